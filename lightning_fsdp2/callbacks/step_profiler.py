"""Callback that traces a few training steps with torch's profiler."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_fsdp2.compat.lightning import is_accumulating


class StepProfiler(Callback):
    """Callback that traces how long each operation of a few training steps takes, with torch's profiler.

    Each rank writes its own file, which https://ui.perfetto.dev can show.

    Args:
        dirpath: Directory for ``step<n>-rank<r>.json.gz``. None for ``traces`` in the directory of the logger or,
            without one, the Trainer's ``default_root_dir``.
        wait: Number of steps to skip first, such as those in which the model is compiled.
        warmup: Number of steps to profile after that, without keeping the trace.
        active: Number of steps to trace, each with all its micro-batches.
        every_n_steps: Number of steps from one trace to the next; 0 traces only once.
        with_stack: Whether to record the Python code that called each operation. This slows down the traced steps.

    Raises:
        ValueError: When a number is out of range.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        wait: int = 10,
        warmup: int = 2,
        active: int = 2,
        every_n_steps: int = 0,
        with_stack: bool = False,
    ) -> None:
        if wait < 0 or warmup < 0 or active < 1:
            raise ValueError(
                f"StepProfiler(wait={wait}, warmup={warmup}, active={active}): `wait` and `warmup` must be 0 or more,"
                " and `active` 1 or more."
            )
        if every_n_steps != 0 and every_n_steps < warmup + active:
            raise ValueError(
                f"StepProfiler(every_n_steps={every_n_steps}) must be 0, or at least warmup + active ="
                f" {warmup + active}."
            )
        self.dirpath = dirpath
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.every_n_steps = every_n_steps
        self.with_stack = with_stack
        self._profiler: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "traces")
        folder.mkdir(parents=True, exist_ok=True)

        def write(profiler: Any) -> None:
            path = folder / f"step{trainer.global_step}-rank{trainer.global_rank}.json.gz"
            profiler.export_chrome_trace(str(path))

        on_device = trainer.strategy.root_device.type == "cuda"
        between = max(0, self.every_n_steps - self.warmup - self.active)
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
            schedule=schedule(
                skip_first=self.wait,
                skip_first_wait=1,
                wait=between,
                warmup=self.warmup,
                active=self.active,
                repeat=0 if self.every_n_steps else 1,
            ),
            on_trace_ready=write,
            with_stack=self.with_stack,
        )
        self._profiler.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_accumulating(trainer):
            self._profiler.step()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

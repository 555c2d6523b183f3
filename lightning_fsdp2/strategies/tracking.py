"""What the loggers of a run are told beside its metrics: what it is, how much it has read, which one it resumes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_fsdp2.callbacks.logging_steps import is_logging_step
from lightning_fsdp2.loggers.axes import TOTAL_TOKENS
from lightning_fsdp2.loggers.run_identity import describe_run
from lightning_fsdp2.loggers.wandb import MissingKeyError, WandbLogger


class Tracking(Callback):
    """Makes one row of a step in every logger, adds the tokens read so far, and logs once what the run is.

    Lightning's row of ``self.log`` and those of callbacks come one by one; they are held until the step is over.

    Tokens are the elements of ``batch["input_ids"]``, padding included, once for ranks that read the same batch. Steps
    that are not logged count on the host and do nothing else.

    Args:
        add_up: The sum of a number over the ranks that read different data, on the host; all ranks call it.
        when_complete: Calls a function once the checkpoint just saved is complete.
    """

    def __init__(self, add_up: Callable[[int], int], when_complete: Callable[[Callable[[], None]], None]) -> None:
        self._add_up = add_up
        self._when_complete = when_complete
        self._total_tokens = 0
        self._own_tokens = 0  # of this rank, not in the total yet
        self._rows: list[_Row] = []  # of the loggers
        self._runs: list[dict[str, Any]] = []  # of the checkpoint

    def attach(self, trainer: Trainer) -> None:
        """Begin a stage, before the Trainer asks its loggers for their experiments.

        Raises:
            MissingKeyError: On every rank, when W&B has no key.
        """
        loggers = trainer.loggers if trainer.is_global_zero else []
        problems = [problem for logger in _get_wandb_loggers(loggers) if (problem := logger.get_optional_problem())]
        if problem := trainer.strategy.broadcast(problems[0] if problems else None):
            raise MissingKeyError(problem)
        self.detach(trainer)  # from a stage that was aborted
        cast(Any, trainer).callbacks.insert(0, self)
        for logger in trainer.loggers:
            row = _Row(logger)
            self._rows.append(row)
            logger.__dict__["log_metrics"] = partial(self._log_metrics, row)
            logger.__dict__["finalize"] = row.finalize
        if trainer.state.fn == TrainerFn.FITTING:
            for wandb_logger in _get_wandb_loggers(loggers):
                others = [_name(other) for other in loggers if other is not wandb_logger]
                wandb_logger.hold(self._when_complete, " and ".join(others))

    def detach(self, trainer: Trainer) -> None:
        """End the stage."""
        if self in cast(Any, trainer).callbacks:
            cast(Any, trainer).callbacks.remove(self)
        self._write_rows()
        self._rows.clear()
        for logger in trainer.loggers:
            for name in ("log_metrics", "finalize"):
                logger.__dict__.pop(name, None)

    def get_state(self, trainer: Trainer) -> dict[str, Any]:
        """What a checkpoint holds; all ranks must call it."""
        self._count()
        runs = [logger.get_state() for logger in _get_wandb_loggers(trainer.loggers)]
        return {"total_tokens": self._total_tokens, "wandb": runs}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was saved."""
        self._total_tokens, self._own_tokens, self._runs = state["total_tokens"], 0, state["wandb"]

    # ------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # the first hook behind the Trainer's look at the experiments: who looks now wants one
        for logger in _get_wandb_loggers(trainer.loggers):
            logger.release()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger, state in zip(_get_wandb_loggers(trainer.loggers), self._runs, strict=False):
            logger.continue_run(state)
        for logger in _get_wandb_loggers(trainer.loggers):
            _ = logger.experiment  # which starts the run
        if cast(Any, trainer).enable_autolog_hparams and trainer.is_global_zero and trainer.loggers:
            identity = describe_run(trainer, pl_module)
            for any_logger in trainer.loggers:
                # TensorBoard's would add a row `hp_metric` of -1 to the metrics of the run
                options: dict[str, Any] = {"metrics": {}} if isinstance(any_logger, TensorBoardLogger) else {}
                any_logger.log_hyperparams({"run": identity}, **options)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._write_rows()  # here at the latest: whoever is killed loses the step it is in

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        input_ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(input_ids, Tensor):
            self._own_tokens += input_ids.numel()
        if is_logging_step(trainer):
            self._count()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_rows()  # which may take long
        self._count()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_rows()
        self._count()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_rows()

    def _count(self) -> None:
        self._total_tokens += self._add_up(self._own_tokens)
        self._own_tokens = 0

    def _write_rows(self) -> None:
        for row in self._rows:
            row.write()

    def _log_metrics(self, row: "_Row", metrics: Any, step: int | None = None, **options: Any) -> None:
        axis = {TOTAL_TOKENS: float(self._total_tokens)} if self._total_tokens else {}
        row.log({**axis, **metrics}, step, **options)


@dataclass
class _Row:
    """What a logger was given for the current step, of which it would make a row per call."""

    logger: Logger
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def log(self, metrics: dict[str, Any], step: int | None, **options: Any) -> None:
        # other ranks' loggers keep nothing, and would read tensors; of what is no number a logger may think anything
        is_held = step is not None and not options and rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if not is_held or not all(_is_number(name, value) for name, value in metrics.items()):
            type(self.logger).log_metrics(self.logger, metrics, step=step, **options)
            return
        if step != self.step:
            self.write()
        self.step = step
        # a tensor may change until the step is over
        self.metrics |= {name: v.item() if isinstance(v, Tensor) else v for name, v in metrics.items()}

    def write(self) -> None:
        metrics, self.metrics = self.metrics, {}
        if metrics:
            type(self.logger).log_metrics(self.logger, metrics, step=self.step)
            self.logger.save()

    def finalize(self, status: str) -> None:
        """Of the logger, at the end of a stage, behind an error and before a job is queued again."""
        self.write()
        type(self.logger).finalize(self.logger, status)


def _is_number(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real))


def _get_wandb_loggers(loggers: list[Logger]) -> Iterator[WandbLogger]:
    return (logger for logger in loggers if isinstance(logger, WandbLogger))


def _name(logger: Logger) -> str:
    place = getattr(logger, "log_dir", None) or logger.save_dir
    return f"{type(logger).__name__} ({place})" if place else type(logger).__name__

"""Callback that logs token counts and a description of the run, and lets a resumed run continue its W&B run."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_fsdp2.callbacks.logging_steps import is_logging_step
from lightning_fsdp2.compat.ledger import get_ledger, has_own
from lightning_fsdp2.loggers.axes import TOTAL_TOKENS
from lightning_fsdp2.loggers.run_identity import describe_run, describe_step, hide_hyperparameters
from lightning_fsdp2.loggers.wandb import MissingKeyError, WandbLogger
from lightning_fsdp2.ranks.whole_tensors import gather
from lightning_fsdp2.ranks.whole_values import get_whole


class Tracking(Callback):
    """Callback that gives every logger a description of the run, and one row of metrics and token counts per step.

    Metrics from ``self.log`` and from callbacks arrive separately, so the callback holds them until the step is over.

    Tokens are the elements of ``batch["input_ids"]``, including padding. A batch that several ranks read counts once.
    The sum over the ranks is computed only in steps that are logged.

    Args:
        add_up: Function that returns the sum of a number over the ranks that read different data. The function is a
            collective on the host.
        when_complete: Function that takes a callback, and calls it once the most recently saved checkpoint is complete.
    """

    def __init__(self, add_up: Callable[[int], int], when_complete: Callable[[Callable[[], None]], None]) -> None:
        self._add_up = add_up
        self._when_complete = when_complete
        self._total_tokens = 0
        self._own_tokens = 0  # tokens of this rank that are not in the total yet
        self._rows: list[_Row] = []  # one row for each logger
        self._runs: list[dict[str, Any]] = []  # states of the W&B runs in the loaded checkpoint

    def attach(self, trainer: Trainer) -> None:
        """Begin a stage. Call this before the Trainer accesses the experiments of its loggers.

        Raises:
            MissingKeyError: On every rank, when the API key for W&B is missing.
        """
        loggers = trainer.loggers if trainer.is_global_zero else []
        problems = [problem for logger in _get_wandb_loggers(loggers) if (problem := logger.get_optional_problem())]
        if problem := trainer.strategy.broadcast(problems[0] if problems else None):
            raise MissingKeyError(problem)
        self.detach(trainer)  # an aborted stage may have left the callback attached
        cast(Any, trainer).callbacks.insert(0, self)
        for logger in trainer.loggers:
            row = _Row(logger)
            self._rows.append(row)
            ledger = get_ledger(trainer)
            ledger.replace(logger, "log_metrics", partial(self._log_metrics, row), reason="a step has one row")
            ledger.replace(logger, "finalize", row.finalize, reason="the row of the last step is still held")
        if trainer.state.fn == TrainerFn.FITTING:
            for wandb_logger in _get_wandb_loggers(loggers):
                others = [_name(other) for other in loggers if other is not wandb_logger]
                wandb_logger.hold(self._when_complete, " and ".join(others))

    def detach(self, trainer: Trainer) -> None:
        """End the stage: write the held rows, and restore the methods of the loggers."""
        if self in cast(Any, trainer).callbacks:
            cast(Any, trainer).callbacks.remove(self)
        self._write_rows()
        self._rows.clear()
        for logger in trainer.loggers:
            get_ledger(trainer).put_back(logger)

    def get_state(self, trainer: Trainer) -> dict[str, Any]:
        """Return the token count and the states of the W&B runs, for a checkpoint. All ranks must call this."""
        self._count()
        runs = [logger.get_state() for logger in _get_wandb_loggers(trainer.loggers)]
        return {"total_tokens": self._total_tokens, "wandb": runs}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the token count and the states of the W&B runs from a checkpoint."""
        self._total_tokens, self._own_tokens, self._runs = state["total_tokens"], 0, state["wandb"]

    # ------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # from this hook on, accessing `experiment` of a logger starts the W&B run
        for logger in _get_wandb_loggers(trainer.loggers):
            logger.release()
        for owner in (pl_module, cast(Any, trainer).datamodule):
            hide_hyperparameters(owner)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger, state in zip(_get_wandb_loggers(trainer.loggers), self._runs, strict=False):
            logger.continue_run(state)
        for logger in _get_wandb_loggers(trainer.loggers):
            _ = logger.experiment  # accessing this property starts the W&B run
        if cast(Any, trainer).enable_autolog_hparams and trainer.is_global_zero and trainer.loggers:
            identity = describe_run(trainer, pl_module)
            for any_logger in trainer.loggers:
                # without this option, TensorBoardLogger would log a metric `hp_metric` with the value -1
                options: dict[str, Any] = {"metrics": {}} if isinstance(any_logger, TensorBoardLogger) else {}
                any_logger.log_hyperparams({"run": identity}, **options)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if description := describe_step(trainer):
            rank_zero_info(description)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._write_rows()  # write now, so that a killed process loses only the current step

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
        self._write_rows()  # write before the validation, which may take a long time
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
        # gather on every rank, before the loggers of all ranks but the first return without writing
        whole = {name: get_whole(value) if isinstance(value, DTensor) else value for name, value in metrics.items()}
        row.log({**axis, **whole}, step, **options)


@dataclass
class _Row:
    """Metrics of a step for one logger, held until all have arrived, because a logger writes a row in every call."""

    logger: Logger
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    has_warned: bool = False

    def log(self, metrics: dict[str, Any], step: int | None, **options: Any) -> None:
        # Only rank 0 holds metrics until the row is complete, because the loggers of the other ranks write nothing.
        # Values that are not numbers go straight to the logger, which may handle them in its own way.
        is_held = step is not None and not options and rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if not is_held or not all(_is_number(name, value) for name, value in metrics.items()):
            type(self.logger).log_metrics(self.logger, metrics, step=step, **options)
            return
        if step != self.step:
            self.write()
        self.step = step
        # read the values now: a tensor may change before the step is over
        values = {name: v.item() if isinstance(v, Tensor) else v for name, v in metrics.items()}
        self.metrics |= values
        for name, value in values.items():
            if "loss" in name and not math.isfinite(value) and not self.has_warned:
                self.has_warned = True
                rank_zero_warn(
                    f"{name} of step {step} is {value}, so the weights may be spoilt; the callback NaNGuard ends a run"
                    " before that."
                )

    def write(self) -> None:
        metrics, self.metrics = self.metrics, {}
        if metrics:
            type(self.logger).log_metrics(self.logger, metrics, step=self.step)
            self.logger.save()

    def finalize(self, status: str) -> None:
        """Write the row, and then finalize the logger."""
        self.write()
        type(self.logger).finalize(self.logger, status)


def log_whole_values(module: LightningModule) -> None:
    """Make the module's ``log`` method gather sharded values, such as the norm of a sharded parameter.

    A ``log`` method that the user has replaced stays as it is. The original method is restored at teardown. Without a
    Trainer, nothing can be logged, and nothing is replaced.
    """
    if module._trainer is not None and not has_own(module, "log"):
        log = partial(_log_whole, type(module).log, module)
        reason = "for a metric that is a DTensor, it would log only this rank's part"
        get_ledger(module.trainer).replace(module, "log", log, reason=reason)


def _log_whole(log: Callable[..., None], module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    log(module, name, gather(value) if isinstance(value, DTensor) else value, *args, **kwargs)


def _is_number(name: Any, value: Any) -> bool:
    return isinstance(name, str) and (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real))


def _get_wandb_loggers(loggers: list[Logger]) -> Iterator[WandbLogger]:
    return (logger for logger in loggers if isinstance(logger, WandbLogger))


def _name(logger: Logger) -> str:
    place = getattr(logger, "log_dir", None) or logger.save_dir
    return f"{type(logger).__name__} ({place})" if place else type(logger).__name__

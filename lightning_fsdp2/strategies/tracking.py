"""What the loggers of a run are told beside its metrics: what it is, how much it has read, which one it resumes."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_fsdp2.callbacks.logging_steps import is_logging_step
from lightning_fsdp2.loggers.run_identity import describe_run
from lightning_fsdp2.loggers.wandb import TOTAL_TOKENS, MissingKeyError, WandbLogger


class Tracking(Callback):
    """Adds the tokens read so far to every row of every logger, and logs once what the run is.

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
        cast(Any, trainer).callbacks.insert(0, self)
        for logger in trainer.loggers:
            logger.__dict__["log_metrics"] = partial(self._log_metrics, type(logger).log_metrics, logger)
        if trainer.state.fn == TrainerFn.FITTING:
            for wandb_logger in _get_wandb_loggers(loggers):
                others = [_name(other) for other in loggers if other is not wandb_logger]
                wandb_logger.hold(self._when_complete, " and ".join(others))

    def detach(self, trainer: Trainer) -> None:
        """End the stage."""
        if self in cast(Any, trainer).callbacks:
            cast(Any, trainer).callbacks.remove(self)
        for logger in trainer.loggers:
            logger.__dict__.pop("log_metrics", None)

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
            _ = logger.experiment  # starts
        if cast(Any, trainer).enable_autolog_hparams and trainer.is_global_zero and trainer.loggers:
            identity = describe_run(trainer, pl_module)
            for any_logger in trainer.loggers:
                any_logger.log_hyperparams({"run": identity})

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
        self._count()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count()

    def _count(self) -> None:
        self._total_tokens += self._add_up(self._own_tokens)
        self._own_tokens = 0

    def _log_metrics(self, log: Callable[..., None], logger: Logger, metrics: Any, *args: Any, **kwargs: Any) -> None:
        axis = {TOTAL_TOKENS: float(self._total_tokens)} if self._total_tokens else {}
        log(logger, {**axis, **metrics}, *args, **kwargs)


def _get_wandb_loggers(loggers: list[Logger]) -> Iterator[WandbLogger]:
    return (logger for logger in loggers if isinstance(logger, WandbLogger))


def _name(logger: Logger) -> str:
    place = getattr(logger, "log_dir", None) or logger.save_dir
    return f"{type(logger).__name__} ({place})" if place else type(logger).__name__

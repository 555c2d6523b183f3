"""Checks that refuse callbacks, loggers, optimizers and parameters that do not work with a sharded module."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.state import check_optimizer_parameters
from lightning_fsdp2.compat.lightning import logs_graph
from lightning_fsdp2.strategies.precision import check_optimization

CALLBACKS_OF_WHOLE_WEIGHTS: dict[type[Callback], str] = dict.fromkeys(
    (WeightAveraging, StochasticWeightAveraging, ModelPruning),
    "needs whole weights and fails on sharded weights; remove the callback, and average with"
    " lightning_fsdp2.callbacks.ExponentialMovingAverage, or average or prune checkpoints after training.",
)
"""Lightning callbacks that do not work with sharded weights, each mapped to the reason and the remedy."""

OPTIMIZERS_WITHOUT_SHARDED_STEP: tuple[type[Optimizer], ...] = (
    torch.optim.LBFGS,
    torch.optim.Adafactor,
    torch.optim.Rprop,
    ZeroRedundancyOptimizer,
)
"""Classes of torch optimizers that cannot step on sharded parameters, up to torch 2.15."""


def refuse_options(trainer: Trainer, callbacks: Mapping[type[Callback], str], *, traces_module: bool) -> None:
    """Refuse a Trainer with callbacks, loggers or a clipping value that do not work under the strategy.

    Args:
        trainer: Trainer whose options are checked.
        callbacks: Classes of callbacks to refuse, each with the reason and the remedy as text for the error message.
        traces_module: Whether loggers may trace the module.

    Raises:
        ValueError: When an option cannot be honoured. The message names the first such option.
    """
    refuse_callbacks(trainer, callbacks)
    check_optimization(trainer)
    if not traces_module and trainer.lightning_module.example_input_array is not None:
        refuse_graphs(trainer)


def refuse_callbacks(trainer: Trainer, refused: Mapping[type[Callback], str]) -> None:
    """Refuse a Trainer that has a callback of one of the classes in ``refused``.

    Args:
        trainer: Trainer whose callbacks are checked.
        refused: Classes of callbacks to refuse, each with the reason and the remedy as text for the error message.

    Raises:
        ValueError: When the Trainer has such a callback. The message names the first such callback.
    """
    for callback in cast(Any, trainer).callbacks:
        for kind, reason in refused.items():
            if isinstance(callback, kind):
                raise ValueError(f"Trainer(callbacks=[{type(callback).__name__}(...)]) {reason}")


def refuse_graphs(trainer: Trainer) -> None:
    """Refuse loggers with ``log_graph=True``, because they run the forward, which is a collective, on one rank only.

    Raises:
        ValueError: When the Trainer has such a logger. The message names the first such logger.
    """
    for logger in cast(Any, trainer).loggers:
        if logs_graph(logger):
            raise ValueError(
                f"{type(logger).__name__}(log_graph=True) traces the module on one rank, but a sharded module can only"
                " run on all ranks; leave log_graph out, or call `logger.log_graph(module)` with a new module before"
                " a Trainer shards it."
            )


def check_optimizers(
    module: LightningModule, optimizers: Sequence[Optimizer], refused: tuple[type[Optimizer], ...], strategy: str
) -> None:
    """Refuse optimizers that cannot step on the parameters of a sharded module.

    Args:
        module: The sharded module.
        optimizers: The optimizers from the module's ``configure_optimizers``.
        refused: Classes of optimizers to refuse.
        strategy: Name of the strategy, for error messages.

    Raises:
        ValueError: When an optimizer is of a refused class, or holds parameters from before the module was sharded.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, refused):
            raise ValueError(
                f"{type(optimizer).__name__} cannot step on the sharded parameters of {strategy}; use another"
                " optimizer, such as AdamW, or a strategy that does not shard."
            )
        check_optimizer_parameters(module, optimizer)


def check_manual_optimization(module: Any) -> None:
    """Refuse parameters that belong directly to the LightningModule and are trained under manual optimisation.

    These parameters are gathered only once per training step, but optimizers may step several times in that step.

    Raises:
        ValueError: When there are such parameters. The message names them.
    """
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    if own and not module.automatic_optimization:
        raise ValueError(
            f"The parameters {', '.join(own)} belong directly to the LightningModule and cannot be trained under manual"
            " optimisation (`automatic_optimization = False`); move them to a child module with its own forward."
        )

"""Checks that refuse callbacks, loggers, optimizers and parameters that do not work with a sharded module."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.state import check_optimizer_parameters
from lightning_fsdp2.compat.lightning import logs_graph
from lightning_fsdp2.modules.structure import find_layer_drop
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


OPTIMIZER_MODULES_WITHOUT_SHARDED_STEP: Mapping[str, str] = {
    "transformers.optimization": "reads and writes whole tensors",
    "bitsandbytes.optim": "calls kernels that do not know sharded parameters",
    "torchao.optim": "keeps its states in a tensor subclass that no checkpoint could restore",
}
"""Modules of other packages whose optimizers cannot step on sharded parameters, each with the reason."""


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
    _warn_of_no_batches(trainer)
    if not traces_module and trainer.lightning_module.example_input_array is not None:
        refuse_graphs(trainer)


def _warn_of_no_batches(trainer: Trainer) -> None:
    if trainer.state.fn == TrainerFn.FITTING and trainer.limit_train_batches == 0:
        rank_zero_warn("limit_train_batches=0: no batch is trained. Leave it out to train on all batches.")


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
        reason = _get_optional_reason(optimizer) if refused else None
        if isinstance(optimizer, refused) or reason is not None:
            kind = type(optimizer)
            name, why = (
                (kind.__name__, "") if reason is None else (f"{kind.__module__}.{kind.__name__}", f": it {reason}")
            )
            raise ValueError(
                f"{name} cannot step on the sharded parameters of {strategy}{why}; use another optimizer, such as AdamW"
                " of torch.optim, or a strategy that does not shard."
            )
        check_optimizer_parameters(module, optimizer)


def _get_optional_reason(optimizer: Optimizer) -> str | None:
    modules = [cls.__module__ for cls in type(optimizer).__mro__]
    return next(
        (
            reason
            for name, reason in OPTIMIZER_MODULES_WITHOUT_SHARDED_STEP.items()
            if any(module == name or module.startswith(f"{name}.") for module in modules)
        ),
        None,
    )


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


def refuse_layer_drop(module: nn.Module, *, apart: bool) -> None:
    """Refuse a module that skips layers at random, if ``apart``: if ranks that share weights draw other numbers.

    All ranks gather the weights of a layer together, so they must skip the same layers.

    Raises:
        ValueError: When a module has a ``layerdrop`` above 0.
    """
    found = find_layer_drop(module) if apart else None
    if found is not None:
        name, layerdrop = found
        raise ValueError(
            f"{name} skips layers at random (layerdrop={layerdrop}), but all ranks gather the weights of a layer"
            " together, and data parallel ranks would skip different layers. Set layerdrop=0, or"
            " random_numbers='shared' of the strategy."
        )

"""Common interface of the sharders other than FSDP2, so that other code need not know which sharder a module uses.

FSDP2 keeps its state on each module that ``fully_shard`` was applied to. Modules sharded by FSDP2 therefore have no
sharder object.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

_ATTRIBUTE = "_lightning_fsdp2_sharder"


class Sharder(Protocol):
    """Object that manages the shards of a module, such as the driver of Megatron-FSDP."""

    name: str
    """Name of the sharder for error messages, as users know it."""

    can_unshard: bool
    """Whether all weights can stay gathered for the duration of a ``with`` block."""

    def defer_sync(self) -> AbstractContextManager[None]:
        """Skip gradient reduction inside the ``with`` block, which runs a micro-batch before the last one of a step."""
        ...

    def get_checkpointed_module(self) -> nn.Module:
        """Prepare the module whose parameters and names go into checkpoints for saving or loading, and return it."""
        ...


def set_sharder(module: nn.Module, sharder: Sharder) -> None:
    """Record on ``module`` that ``sharder`` shards it."""
    module.__dict__[_ATTRIBUTE] = sharder


def get_optional_sharder(module: nn.Module) -> Sharder | None:
    """Return the sharder recorded on ``module``; None if the module is not sharded or is sharded by FSDP2."""
    return module.__dict__.get(_ATTRIBUTE)


def find_optional_call_sharder(model: nn.Module) -> Sharder | None:
    """Return the sharder in ``model`` that gathers weights only during a module's own calls; None if there is none."""
    sharders = (get_optional_sharder(module) for module in model.modules())
    return next((sharder for sharder in sharders if sharder is not None and not sharder.can_unshard), None)


def check_not_sharded(model: nn.Module) -> None:
    """Refuse a model if any part of it is already sharded.

    Raises:
        ValueError: If a part is sharded. The message names the sharder, or the modules that ``fully_shard`` sharded.
    """
    sharder = next(filter(None, map(get_optional_sharder, model.modules())), None)
    if sharder is not None:
        raise ValueError(
            f"{type(model).__name__} is already wrapped by {sharder.name}. A model can be parallelised only once; pass"
            " a model that is not wrapped."
        )
    sharded = [name or "the root" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"{type(model).__name__} has modules that `fully_shard` was already applied to: {', '.join(sharded[:5])}."
            " A model can be parallelised only once; pass a model that is not sharded."
        )

"""Interface of sharders other than FSDP2, for passes that need not know the kind of sharder.

FSDP2 keeps its state on each of its units, so its modules have no sharder.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

_ATTRIBUTE = "_lightning_fsdp2_sharder"


class Sharder(Protocol):
    """Holder of the shards of a wrapped module."""

    name: str
    """Name that users know, for error messages."""

    def check_can_unshard(self) -> None:
        """Check that it is possible to keep all weights gathered for the duration of a block.

        Raises:
            ValueError: If it is not possible; the message says what to do instead.
        """
        ...

    def defer_sync(self) -> AbstractContextManager[None]:
        """Run the block without reducing gradients, for micro-batches that no optimizer step follows."""
        ...

    def get_checkpointed_module(self) -> nn.Module:
        """Return the module whose names and parameters checkpoints use, ready to be read and written."""
        ...


def set_sharder(module: nn.Module, sharder: Sharder) -> None:
    """Note on ``module`` that ``sharder`` shards it."""
    module.__dict__[_ATTRIBUTE] = sharder


def get_optional_sharder(module: nn.Module) -> Sharder | None:
    """Return the sharder of ``module`` as a whole; None if the module is not sharded, or sharded by FSDP2."""
    return module.__dict__.get(_ATTRIBUTE)


def check_not_sharded(model: nn.Module) -> None:
    """Refuse a model if a part of it is sharded already.

    Raises:
        ValueError: If one is sharded. The message names the sharder, or the modules that ``fully_shard`` sharded.
    """
    sharder = next(filter(None, map(get_optional_sharder, model.modules())), None)
    if sharder is not None:
        raise ValueError(
            f"{type(model).__name__} was wrapped by {sharder.name} before. A model is parallelised once; pass one that"
            " is not wrapped."
        )
    sharded = [name or "the root" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"{type(model).__name__} holds modules that `fully_shard` was applied to before: {', '.join(sharded[:5])}."
            " A model is parallelised once; pass one that is not sharded."
        )

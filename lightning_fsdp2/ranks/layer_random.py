"""Random numbers under tensor parallelism: the same where ranks compute the same, different where they do not.

Dropout of what all ranks hold (a residual) must drop the same elements everywhere. Dropout of what each rank holds for
itself (its heads, its part of the sequence) must not repeat one rank's mask on another.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp2.ranks.random_state import get_torch_random_state, set_torch_random_state


class LayerRandom:
    """Random state of a layer's forward: the state common to all ranks, or this rank's own.

    A rank's own state begins with a seed drawn from the common state. So nothing has to be remembered between forwards,
    and activation checkpointing, which restores the common state, gets the same numbers again.
    """

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.layer = layer
        self.group = group
        self.device = device
        self._common: dict[str, Any] | None = None

    def begin_shards(self) -> None:
        """Let ranks draw different numbers from here on."""
        if self.layer.training and self._common is None:
            seed = int(torch.randint(2**48, ()))
            self._common = get_torch_random_state(self.device)
            torch.manual_seed(seed * self.group.size() + self.group.rank())

    def end_shards(self) -> None:
        """Let ranks draw the same numbers again from here on."""
        if self._common is not None:
            set_torch_random_state(self._common, self.device)
            self._common = None


def draws_random_numbers(module: nn.Module) -> bool:
    """Return whether ``module`` or a module in it is set up to drop or jitter anything in training."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name or isinstance(inner, nn.Dropout))
        for inner in module.modules()
        for name, value in vars(inner).items()
    )

"""Random numbers under tensor parallelism: equal where ranks compute the same, different where they do not.

Some tensors, such as a residual, are the same on all ranks. Dropout must drop the same elements of them everywhere.
Other tensors, such as attention heads or a part of the sequence, differ between ranks. Dropout must use a different
mask for them on each rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp2.ranks.random_state import get_torch_random_state, set_torch_random_state


class LayerRandom:
    """Switch between the random state that is common to all ranks and this rank's own, during a layer's forward.

    A rank's own state begins with a seed that is drawn from the common state. So no state is kept between forwards.
    Activation checkpointing restores the common state, and thereby gets the same numbers in the recomputation.
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
    """Return whether ``module`` or one of its submodules uses dropout or random jitter in training."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name or isinstance(inner, nn.Dropout))
        for inner in module.modules()
        for name, value in vars(inner).items()
    )

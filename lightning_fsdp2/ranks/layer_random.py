"""Random numbers under tensor parallelism: equal for tensors that ranks share, different for all other tensors.

Some tensors, such as a residual, are the same on all ranks, so dropout must drop the same elements on every rank.
Other tensors, such as attention heads or a part of the sequence, differ between ranks, so dropout must use a different
mask on each rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp2.ranks.random_state import get_torch_random_state, set_torch_random_state


class LayerRandom:
    """Helper that switches a layer's forward between the common random state of all ranks and this rank's own state.

    A rank's own state is seeded from the common state in each forward, so nothing has to be kept between forwards.
    Activation checkpointing restores the common state, so the recomputation draws the same numbers.
    """

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.layer = layer
        self.group = group
        self.device = device
        self._common: dict[str, Any] | None = None

    def begin_shards(self) -> None:
        """Switch to this rank's own state, so that ranks draw different numbers."""
        if self.layer.training and self._common is None:
            seed = int(torch.randint(2**48, ()))
            self._common = get_torch_random_state(self.device)
            torch.manual_seed(seed * self.group.size() + self.group.rank())

    def end_shards(self) -> None:
        """Switch back to the common state, so that ranks draw the same numbers."""
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

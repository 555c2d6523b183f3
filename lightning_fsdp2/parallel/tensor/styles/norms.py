"""Style of norms over a sharded dim."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot
from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.parallel.tensor.styles.base import Style
from lightning_fsdp2.ranks.collectives import sum_over_ranks


@dataclass(unsafe_hash=True)
class ShardedNorm(Style):
    """Style of an RMS norm over a dim that is sharded, such as OLMo2's norms over all heads.

    The module's own forward runs on this rank's features. The result is then multiplied by the root mean square of this
    rank's features and divided by the root mean square of all features. This works for norms that scale by ``w`` and
    for norms that scale by ``1 + w``.
    """

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        if "rmsnorm" not in type(module).__name__.lower() or module._parameters.get("weight") is None:
            raise TypeError(
                f"{type(module).__name__} is not an RMS norm with a weight; the style ShardedNorm needs one."
            )
        return {(module, "weight"): Layout(placement=Shard(0))}

    def install(self, module: Any, scope: Scope) -> None:
        if hasattr(module, "normalized_shape"):  # `nn.RMSNorm` compares the shape of its input with this attribute
            module.normalized_shape = (module.normalized_shape[0] // scope.group.size(),)
        super().install(module, scope)

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0]
        wide = hidden.float()
        epsilon = _get_epsilon(module)
        local = wide.square().mean(-1, keepdim=True)
        whole = sum_over_ranks(local, scope.group) / scope.group.size()
        ratio = ((local + epsilon) / (whole + epsilon)).sqrt()
        return (forward(wide, *args[1:], **kwargs) * ratio).to(hidden.dtype)


def _get_epsilon(norm: Any) -> float:
    values = (getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    # without an explicit epsilon, torch's own norm uses the machine epsilon of the dtype in which it computes
    return next((value for value in values if value is not None), torch.finfo(torch.float32).eps)

"""Casts to float8 as ``torch.compile`` fuses them, which simulations assume, because they run uncompiled."""

from torch import nn

from lightning_fsdp2.compat.torchao import FusedCasts
from lightning_fsdp2.parallel.layers.float8 import find_float8_layers


def assume_fused_casts(model: nn.Module) -> None:
    """Give the casts of a simulated ``model`` to float8 the memory and the traffic that they have when compiled."""
    for layer in find_float8_layers(model):
        layer.casts = FusedCasts(layer.casts.recipe, emulate=layer.casts.emulates)

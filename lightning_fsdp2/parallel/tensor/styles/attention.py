"""Styles of attention modules and their submodules, with which each rank computes its share of the heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot, get_slots
from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.parallel.tensor.styles.base import Style
from lightning_fsdp2.ranks.collectives import copy_last_to_ranks, get_shard_range


@dataclass(unsafe_hash=True)
class LocalHeads(Style):
    """Style of an attention module that reads its number of heads from attributes or from its config.

    These numbers are divided by the number of ranks, so that each rank computes its share of the heads.
    """

    attributes: tuple[str, ...] = ()
    """Names of the module's integer attributes to divide by the number of ranks."""

    config: tuple[str, ...] = ()
    """Names of the fields in the module's ``config`` to divide by the number of ranks."""

    per_head: tuple[str, ...] = ()
    """Names of keyword arguments with values for each head, [batch * heads, ...] or [batch, heads, ...], from which
    each rank takes the values of its own heads."""

    heads: int = 0
    """Total number of heads on all ranks. Needed only with ``per_head``."""

    def get_layouts(self, module: Any, ranks: int) -> dict[Slot, Layout]:
        for owner, names in ((module, self.attributes), (getattr(module, "config", None), self.config)):
            for name in names:
                value = getattr(owner, name)
                if value % ranks:
                    sizes = ", ".join(str(size) for size in range(1, value + 1) if value % size == 0)
                    raise ValueError(
                        f"tp_size={ranks} does not divide {name}={value} of {type(owner).__name__}; use one of {sizes}."
                    )
        return {}

    def install(self, module: Any, scope: Scope) -> None:
        ranks = scope.group.size()
        for name in self.attributes:
            setattr(module, name, getattr(module, name) // ranks)
        if self.config:
            fields = {name: getattr(module.config, name) // ranks for name in self.config}
            module.config = _ConfigView(module.config, fields)
        super().install(module, scope)

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        own = {name: self._take_own(kwargs[name], scope) for name in self.per_head if kwargs.get(name) is not None}
        return forward(*args, **{**kwargs, **own})

    def _take_own(self, value: Tensor, scope: Scope) -> Tensor:
        start, length = get_shard_range(self.heads, scope.group.rank(), scope.group.size())
        if value.ndim == 4:
            return value if value.size(1) == 1 else value.narrow(1, start, length)
        return value.unflatten(0, (-1, self.heads)).narrow(1, start, length).flatten(0, 1)


@dataclass(unsafe_hash=True)
class PerHeadModules(Style):
    """Style of a module that holds a ``ModuleList`` with one module per head.

    Each rank uses only the modules of its own heads.
    """

    attribute: str
    """Name of the attribute that holds the ``ModuleList``."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        return dict.fromkeys(get_slots(module.modules()), Layout(is_partial=True))

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        whole: Any = module._modules[self.attribute]
        start, length = get_shard_range(len(whole), scope.group.rank(), scope.group.size())
        module._modules[self.attribute] = whole[start : start + length]
        try:
            return forward(*args, **kwargs)
        finally:
            module._modules[self.attribute] = whole


@dataclass(unsafe_hash=True)
class LatentKeyValue(Style):
    """Style of the projection in multi-head latent attention that computes the latent part and the rotary part of keys.

    The projection is replicated. A column-wise projection reads the latent part. Each rank's heads read the rotary part
    directly, so its gradient must be summed over the ranks.
    """

    rotary_features: int | None = None
    """Number of rotary features. None for ``qk_rope_head_dim`` of the model's config."""

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.rotary_features is None:
            raise ValueError(
                "LatentKeyValue(rotary_features=None): the number of rotary features is unknown, because the style is"
                " not part of a plan, or the model's config has no `qk_rope_head_dim`. Set rotary_features."
            )
        return copy_last_to_ranks(forward(*args, **kwargs), self.rotary_features, scope.group)


class _ConfigView:
    """View of a model's config in which the values of some fields are replaced."""

    def __init__(self, config: Any, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields, _config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)

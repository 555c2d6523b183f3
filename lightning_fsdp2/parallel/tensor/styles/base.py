"""Base class of tensor parallel styles, and styles that only shard or replicate parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.tensor.parameters import (
    Layout,
    Slot,
    compute_with_local_parameters,
    get_packed_layout,
    get_slots,
    shard_parameters,
)
from lightning_fsdp2.parallel.tensor.scopes import Scope


class Style(ParallelStyle):
    """Tensor parallel style, which defines how the ranks shard a module and run it together."""

    is_boundary: ClassVar[bool] = False
    """Whether the module converts values that are equal on all ranks to values that differ between ranks, or vice
    versa."""

    reduces: ClassVar[bool] = False
    """Whether the module's result is a sum over the ranks."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        """Return the layouts of the parameters of ``module``. Parameters without a layout are replicated.

        Args:
            module: Module to which the style is assigned.
            ranks: Number of tensor parallel ranks.

        Raises:
            TypeError: If the style cannot be used for this module.
        """
        return {}

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        """Return the layout of a parameter to which a plan assigns this style directly.

        Raises:
            TypeError: If this style can be assigned only to modules.
        """
        raise TypeError(f"The style {type(self).__name__} is for modules, not for a parameter.")

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of ``module``, whose parameters are this rank's parts while this method runs."""
        return forward(*args, **kwargs)

    def install(self, module: nn.Module, scope: Scope) -> None:
        """Wrap the forward of ``module`` in :meth:`run`.

        This does not shard the parameters; see :mod:`~lightning_fsdp2.parallel.tensor.parameters`.
        """
        if type(self).run is not Style.run:
            wrap_method(module, partial(self._run_positional, module, scope))

    def _run_positional(
        self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call :meth:`run`. If there is only one argument, pass it by position even if the caller passed it by name."""
        if not args and len(kwargs) == 1:
            args, kwargs = tuple(kwargs.values()), {}
        return self.run(module, scope, forward, *args, **kwargs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply the style to a single module without sequence parallelism. ``parallelize_module`` calls this method."""
        layouts = dict.fromkeys(get_slots(module.modules()), Layout())
        layouts |= self.get_layouts(module, device_mesh.size())
        shard_parameters(layouts, device_mesh)
        self.install(module, Scope(device_mesh.get_group()))
        compute_with_local_parameters(module, layouts, device_mesh)
        return module


@dataclass(unsafe_hash=True)
class Replicated(Style):
    """Style of a module that is replicated on every rank."""

    on_shards: bool = False
    """Whether the module processes only this rank's heads or features, as the query and key norms of Qwen3 do. The
    gradient that each rank computes is then only a summand."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        return dict.fromkeys(get_slots(module.modules()), Layout(is_partial=self.on_shards))


@dataclass(unsafe_hash=True)
class ShardParameter(Style):
    """Style that shards a single parameter along one of its dims."""

    dim: int = 0
    sections: int | None = None
    """Number of sections of equal size that are packed along ``dim``. None if nothing is packed."""

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        if self.sections is not None:
            return get_packed_layout(parameter, self.dim, self.sections)
        return Layout(placement=Shard(self.dim % parameter.ndim))


@dataclass(unsafe_hash=True)
class SummedParameter(Style):
    """Style of a single bias that a module adds to its result before the result is summed over the ranks.

    The bias is replicated, and only one rank adds it.
    """

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        return Layout(is_summed=True, is_partial=True)

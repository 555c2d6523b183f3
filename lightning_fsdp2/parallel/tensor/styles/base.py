"""The base class of tensor parallel styles, and the styles that place parameters but do not change the forward."""

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
    """Base class of tensor parallel styles. A style is a way to run a module on several tensor parallel ranks."""

    is_boundary: ClassVar[bool] = False
    """Whether the module turns values that all ranks share into values that differ by rank, or the reverse."""

    reduces: ClassVar[bool] = False
    """Whether the module's result is a sum over the ranks."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        """Return the layouts of parameters of ``module``; parameters that are not in the result stay replicated.

        Raises:
            TypeError: If the style does not fit the module.
        """
        return {}

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        """Return the layout of a parameter that an entry of a plan names directly.

        Raises:
            TypeError: If the style is for modules only.
        """
        raise TypeError(f"The style {type(self).__name__} is for modules, not for a parameter.")

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of ``module``, which holds this rank's parts of its parameters."""
        return forward(*args, **kwargs)

    def install(self, module: nn.Module, scope: Scope) -> None:
        """Let this style run the forward of ``module``. Other functions shard the parameters and make them local."""
        if type(self).run is not Style.run:
            wrap_method(module, partial(self._run_positional, module, scope))

    def _run_positional(
        self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call :meth:`run`, and pass a projection's only argument by position even if it was given by name."""
        if not args and len(kwargs) == 1:
            args, kwargs = tuple(kwargs.values()), {}
        return self.run(module, scope, forward, *args, **kwargs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply the style to this module alone, on whole sequences; ``parallelize_module`` calls this."""
        layouts = dict.fromkeys(get_slots(module.modules()), Layout())
        layouts |= self.get_layouts(module, device_mesh.size())
        shard_parameters(layouts, device_mesh)
        self.install(module, Scope(device_mesh.get_group()))
        compute_with_local_parameters(module, layouts, device_mesh.get_group())
        return module


@dataclass(unsafe_hash=True)
class Replicated(Style):
    """Style of a module that is whole on every rank.

    With ``on_shards``, the module works on the rank's own heads or features, as the q and k norms of Qwen3 do. The
    gradient of each rank is then a summand of the whole gradient.
    """

    on_shards: bool = False

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        return dict.fromkeys(get_slots(module.modules()), Layout(is_partial=self.on_shards))


@dataclass(unsafe_hash=True)
class ShardParameter(Style):
    """Style for a parameter that a tensor parallel plan names directly: one dim of the parameter is sharded."""

    dim: int = 0
    sections: int | None = None
    """Number of equal parts that are packed along ``dim``."""

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        if self.sections is not None:
            return get_packed_layout(parameter, self.dim, self.sections)
        return Layout(placement=Shard(self.dim % parameter.ndim))


@dataclass(unsafe_hash=True)
class SummedParameter(Style):
    """Style for a parameter that a plan names directly, in a module whose result is summed over the ranks."""

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        return Layout(is_summed=True, is_partial=True)

"""Styles of mixtures of experts, whose result is a sum over the ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.parallel.tensor.styles.base import Style


@dataclass(unsafe_hash=True)
class SummedResult(Style):
    """Style of a module whose result is summed over the ranks, because its parameters are sharded.

    This style is mainly for the experts of a mixture of experts. Each expert is sharded over all ranks, so every rank
    computes a summand for every token. The plan needs separate entries that shard the parameters, such as
    ``layers.*.mlp.experts.gate_up_proj``.

    Under expert parallelism, no entries shard the parameters. Each rank then returns the results of its part of the
    tokens, and zeros for the other tokens.
    """

    is_boundary: ClassVar[bool] = True
    reduces: ClassVar[bool] = True

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def enter(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return scope.enter(value) if value.is_floating_point() else scope.share(value)

        inputs = [enter(value) for value in args]
        return scope.leave(forward(*inputs, **{name: enter(value) for name, value in kwargs.items()}))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise TypeError(
            f"{type(module).__name__}: `parallelize_module` cannot assign styles to parameters, so it would not shard"
            " the parameters of this module; use `fsdp2_strategy_parallelize` or `apply_tensor_parallel`."
        )


@dataclass(unsafe_hash=True)
class IdentityExpert(Style):
    """Style of an expert that returns its input.

    Each rank returns the input divided by the number of ranks, because the results are summed over the ranks.
    """

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return forward(args[0] / scope.group.size(), *args[1:], **kwargs)

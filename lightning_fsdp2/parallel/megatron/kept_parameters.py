"""Parameters that are kept outside of modules under Megatron-FSDP, such as those in ``self.kept = [self.weight]``.

While Megatron-FSDP shards the weights, it frees them between the forwards of their modules. A kept parameter would then
be read from memory that is gone.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from lightning_fsdp2.modules.kept_parameters import KeptParameter, replace_kept_parameters


def take_over_kept_parameters(kept: Iterable[KeptParameter], *, shards_weights: bool) -> None:
    """Put new ids in the place of kept ids, and what refuses every use in the place of parameters that are freed.

    Call this function on the wrapped module, which has the parameters that optimizers get.

    Args:
        kept: What :func:`~lightning_fsdp2.modules.kept_parameters.find_kept_parameters` found before wrapping.
        shards_weights: Whether weights are freed. If not, kept parameters are those that the modules compute with.
    """
    kept = [place for place in kept if place.is_id or shards_weights]
    replace_kept_parameters(kept, lambda place, new: _refuse_use(place.name))


class _FreedParameter(Tensor):
    """Stand-in for a parameter that is freed between the forwards of its module."""

    parameter: ClassVar[str]
    """Name in the root module."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = next(kind.parameter for kind in types if issubclass(kind, _FreedParameter))
        raise RuntimeError(
            f"An object outside of modules, such as a dict, list, partial or closure, has kept the parameter {name}."
            " Megatron-FSDP frees weights between the forwards of their modules, so only the module that owns it can"
            " compute with it. To use a weight twice, as a tied head does, give it to a second module:"
            " `self.head.weight = self.embedding.weight`. For a penalty on weights, use the optimizer's `weight_decay`,"
            " or set zero_dp_strategy=2, which keeps whole weights."
        )


def _refuse_use(name: str) -> Tensor:
    """Return a tensor of which every use is an error that names the parameter ``name``."""
    kind: Any = type("FreedParameter", (_FreedParameter,), {"parameter": name})
    return torch.empty(0).as_subclass(kind)

"""Autocast for every forward of a model, with an option to choose the dtype of the residual stream."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp2.modules.structure import (
    ModelStructure,
    get_called_children,
    get_entrances,
    has_forward,
    is_hf_model,
    is_metric,
)
from lightning_fsdp2.modules.wrapping import wrap_method


def apply_autocast(
    structure: ModelStructure, dtype: torch.dtype, device_type: str, *, residual_dtype: torch.dtype | None = None
) -> None:
    """Run every forward of a module in :class:`torch.autocast`.

    Forwards of the module's children and of the Hugging Face models inside it, and the steps of a LightningModule, run
    in autocast too.

    Args:
        structure: Structure of the module, which is changed in place.
        dtype: Dtype of matrix products and of other operations that autocast runs in low precision. Operations that
            autocast runs in float32 are not affected.
        device_type: Type of the device on which the model computes.
        residual_dtype: Dtype to which the outputs of input embeddings are cast. It becomes the dtype of the residual
            stream. None leaves the outputs as they are.
    """
    model = structure.root
    # also wrap inner models and children of the root, because a user's hook may call only a part of the model
    entered = [model, *structure.hf_models]
    if not is_hf_model(model):
        entered += [child for child in get_called_children(model) if has_forward(child) and not is_metric(child)]
    for target in dict.fromkeys(entered):
        for name in get_entrances(target):
            wrap_method(target, _Autocast(dtype, device_type), name)
    for norm in model.modules() if device_type == "cpu" else ():
        if isinstance(norm, nn.LayerNorm | nn.GroupNorm):
            wrap_method(norm, _InFloat32(norm))
    if residual_dtype is not None:
        for parts in structure.models:
            if parts.embedding is not None:
                wrap_method(parts.embedding, _CastResult(residual_dtype))


class _Autocast:
    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self.device_type = device_type

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # disable autocast's cache, because it would keep a copy of every gathered weight until the end of the forward
        with torch.autocast(self.device_type, self.dtype, cache_enabled=False):
            return forward(*args, **kwargs)


class _InFloat32:
    """Wrapper that runs the forward of a norm on the CPU in float32, as autocast does on accelerators.

    On the CPU, autocast does not do this, and torch's norms raise an error if input and weights have different dtypes.
    """

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        saved = dict(self.norm._parameters)
        try:
            for name, parameter in saved.items():
                self.norm._parameters[name] = None if parameter is None else parameter.float()  # type: ignore[assignment]
            return forward(*map(_to_float32, args), **{name: _to_float32(value) for name, value in kwargs.items()})
        finally:
            self.norm._parameters.update(saved)


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class _CastResult:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        result = forward(*args, **kwargs)
        # do not cast needlessly: even a cast to the same dtype would trigger the deferred all-reduce of a PendingSum
        return result if result.dtype == self.dtype else result.to(self.dtype)

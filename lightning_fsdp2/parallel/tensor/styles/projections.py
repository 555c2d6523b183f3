"""Styles of linear layers, which are sharded along their outputs or inputs, and of the adapters that peft adds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lightning_fsdp2.parallel.loss.cross_entropy import keeps_logits_sharded
from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot, get_packed_layout
from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.parallel.tensor.styles.base import Style
from lightning_fsdp2.ranks.collectives import copy_to_ranks, gather_shards, get_shard_range, reduce_scatter, split
from lightning_fsdp2.ranks.whole_tensors import make_dtensor

_WHOLE_ATTRIBUTE = "_lightning_fsdp2_output_size"
"""Name of the attribute that keeps the total number of outputs of a ``Conv1D``, whose ``nf`` is set to the number of
outputs on this rank."""


@dataclass(unsafe_hash=True)
class ColumnWise(Style):
    """Style of a projection whose output features are sharded.

    Each rank computes its share of the heads, of the intermediate features or of the vocabulary.
    """

    is_boundary: ClassVar[bool] = True

    gather_output: bool = False
    """Whether the outputs are gathered, so that every rank returns all of them."""

    sections: int | tuple[int, ...] | None = None
    """Number of projections that are packed into this one, such as gate and up, or their sizes if these differ. None if
    nothing is packed."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        layouts: dict[Slot, Layout] = {}
        for linear in _get_base_linears(self, module):
            weight = linear.get_parameter("weight")
            layouts[linear, "weight"] = self._get_layout(weight, _get_output_dim(linear))
            if linear._parameters.get("bias") is not None:
                layouts[linear, "bias"] = self._get_layout(linear.get_parameter("bias"), 0)
        for down, up in _get_adapters(module):
            layouts[down, "weight"] = Layout(is_partial=True)
            layouts[up, "weight"] = self._get_layout(up.get_parameter("weight"), 0)
        return layouts

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        return self._get_layout(parameter, max(parameter.ndim - 2, 0))

    def _get_layout(self, parameter: Tensor, dim: int) -> Layout:
        if self.sections is None:
            return Layout(placement=Shard(dim), is_uneven=self.gather_output)
        return get_packed_layout(parameter, dim, self.sections)

    def install(self, module: nn.Module, scope: Scope) -> None:
        for linear in _get_base_linears(self, module):
            if hasattr(linear, "nf"):
                linear.__dict__[_WHOLE_ATTRIBUTE] = linear.nf
                linear.nf = get_shard_range(linear.nf, scope.group.rank(), scope.group.size())[1]
        super().install(module, scope)

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = forward(scope.enter(args[0]), *args[1:], **kwargs)
        if not self.gather_output:
            scope.begin_shards()
            return output
        (linear,) = _get_base_linears(self, module)
        whole = _get_output_size(linear)
        if self.sections is None:
            return gather_shards(output, -1, whole, scope.group)
        sizes = (whole // self.sections,) * self.sections if isinstance(self.sections, int) else self.sections
        parts = output.split([size // scope.group.size() for size in sizes], -1)
        return torch.cat([gather_shards(p, -1, size, scope.group) for p, size in zip(parts, sizes, strict=True)], -1)


@dataclass(unsafe_hash=True)
class VocabularyHead(ColumnWise):
    """Style of an output head that can return its logits as a DTensor that is sharded over the vocabulary.

    If a forward without gradients computes the logits of only one position, these are always gathered, because
    ``generate`` needs logits for the whole vocabulary.
    """

    gather_output: bool = True
    """True, because logits that do not stay sharded are gathered."""

    shards_logits: bool = True
    """Whether logits stay sharded by default. If False, they stay sharded only inside :func:`keep_logits_sharded`, for
    losses that take sharded logits."""

    mesh: DeviceMesh | None = None

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        logits = forward(scope.enter(args[0]), *args[1:], **kwargs)
        (linear,) = _get_base_linears(self, module)
        is_single = not torch.is_grad_enabled() and logits.size(-2) == 1
        if not keeps_logits_sharded(module) and (is_single or not self.shards_logits):
            return gather_shards(logits, -1, _get_output_size(linear), scope.group)
        shape = torch.Size((*logits.shape[:-1], _get_output_size(linear)))
        return make_dtensor(logits, cast(DeviceMesh, self.mesh), [Shard(logits.ndim - 1)], shape)


@dataclass(unsafe_hash=True)
class RowWise(Style):
    """Style of a projection whose input features are sharded. The results are summed over the ranks."""

    is_boundary: ClassVar[bool] = True

    split_input: bool = False
    """Whether every rank gets the whole input, and must first select its own input features."""

    scatter_output: bool = False
    """Whether each rank returns only its share of the output features."""

    @property
    def reduces(self) -> bool:  # type: ignore[override]
        """Whether every rank returns the whole sum of the ranks' results.

        This is False if each rank returns only its share of the output features. The enclosing module then continues
        with this share.
        """
        return not self.scatter_output

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        layouts: dict[Slot, Layout] = {}
        for linear in _get_base_linears(self, module):
            placement = Shard(1 - _get_output_dim(linear))
            layouts[linear, "weight"] = Layout(placement=placement, is_uneven=self.split_input)
            if self.scatter_output and linear._parameters.get("bias") is not None:
                layouts[linear, "bias"] = Layout(placement=Shard(0))
        for down, up in _get_adapters(module):
            layouts[down, "weight"] = Layout(placement=Shard(1), is_uneven=self.split_input)
            layouts[up, "weight"] = Layout(is_partial=True)
        return layouts

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        return Layout(placement=Shard(parameter.ndim - 1))

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        inputs = split(args[0], -1, scope.group) if self.split_input else args[0]
        (linear,) = _get_base_linears(self, module)
        bias = linear._parameters.get("bias")
        if bias is not None:  # remove the bias, because the sum over the ranks would contain it once per rank
            zeros = bias.new_zeros(_get_output_size(linear))
            linear._parameters["bias"] = None if isinstance(linear, nn.Linear) else zeros
        try:
            output = forward(inputs, *args[1:], **kwargs)
        finally:
            if bias is not None:
                linear._parameters["bias"] = bias
        if self.scatter_output:
            output = reduce_scatter(output, -1, scope.group)
            return output if bias is None else output + bias
        output = scope.leave(output)
        if bias is None:
            return output
        return output + (copy_to_ranks(bias, scope.group) if scope.is_scattered else bias)


def _get_base_linears(style: Style, module: nn.Module) -> list[Any]:
    """Return a list with one linear layer: ``module``, or the layer inside it if ``module`` is an adapter of peft.

    Raises:
        TypeError: If there is no such linear layer.
    """
    base: Any = getattr(module, "base_layer", module)
    weight = base._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(base, nn.Embedding):
        raise TypeError(f"{type(base).__name__} is not a linear layer; the style {type(style).__name__} needs one.")
    return [base]


def _get_adapters(module: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Return the LoRA layers that peft has added to a linear layer, as pairs of a down and an up projection.

    Raises:
        TypeError: If the adapter is not LoRA, or has additional parameters that this package cannot shard.
    """
    if not hasattr(module, "base_layer"):
        return []
    if not hasattr(module, "lora_A"):
        raise TypeError(
            f"{type(module).__name__} is an adapter that cannot be sharded; among peft's adapters, only LoRA without"
            " DoRA and without lora_bias works under tensor parallelism."
        )
    parts = [getattr(module, name) for name in ("base_layer", "lora_A", "lora_B") if hasattr(module, name)]
    known = {id(p) for part in parts for p in part.parameters()}
    known -= {id(up.bias) for up in module.lora_B.values() if getattr(up, "bias", None) is not None}
    other = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if other:
        raise TypeError(
            f"{type(module).__name__} has the parameters {', '.join(other)}, which cannot be sharded; among peft's"
            " adapters, only LoRA without DoRA and without lora_bias works under tensor parallelism."
        )
    return [(module.lora_A[name], module.lora_B[name]) for name in module.lora_A]


def _get_output_size(linear: Any) -> int:
    return linear.__dict__.get(_WHOLE_ATTRIBUTE) or getattr(linear, "nf", None) or linear.out_features


def _get_output_dim(linear: nn.Module) -> int:
    """Return the output dim of a linear layer's weight.

    This is 1 for ``Conv1D`` of transformers, whose weight is transposed, and 0 for all other linear layers.
    """
    return 1 if hasattr(linear, "nf") else 0

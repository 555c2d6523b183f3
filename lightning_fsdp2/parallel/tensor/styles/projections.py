"""The styles of linear layers, sharded by their outputs or inputs, and of the adapters that peft adds to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.parallel.loss.cross_entropy import keeps_logits_sharded
from lightning_fsdp2.parallel.tensor.parameters import Layout, Slot, get_packed_layout
from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.parallel.tensor.styles.base import Style
from lightning_fsdp2.ranks.collectives import copy_to_ranks, gather_shards, get_shard_range, reduce_scatter, split

_WHOLE_ATTRIBUTE = "_lightning_fsdp2_output_size"
"""Name of the attribute that keeps the total number of outputs of a ``Conv1D``; ``nf`` becomes the rank's number."""


@dataclass(unsafe_hash=True)
class ColumnWise(Style):
    """Style of a projection whose outputs are sharded: each rank computes some heads, features or logits."""

    is_boundary: ClassVar[bool] = True

    gather_output: bool = False
    """Whether every rank returns all outputs."""

    sections: int | tuple[int, ...] | None = None
    """Number of projections that are packed into this one, or their sizes if they differ. None if nothing is packed."""

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
    """Style of a head whose logits stay sharded over the vocabulary, in a DTensor.

    In a forward without gradients, the logits of a single position are gathered: ``generate`` wants them whole.
    """

    gather_output: bool = True
    """Whether logits are gathered. If ``shards_logits`` is True, only those of a single position are gathered."""

    shards_logits: bool = True
    """Whether logits stay sharded by default. If False, they stay sharded only for a loss that asks for it with
    :func:`keep_logits_sharded`."""

    mesh: DeviceMesh | None = None

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        logits = forward(scope.enter(args[0]), *args[1:], **kwargs)
        (linear,) = _get_base_linears(self, module)
        is_single = not torch.is_grad_enabled() and logits.size(-2) == 1
        if not keeps_logits_sharded(module) and (is_single or not self.shards_logits):
            return gather_shards(logits, -1, _get_output_size(linear), scope.group)
        shape = torch.Size((*logits.shape[:-1], _get_output_size(linear)))
        stride = torch.empty(shape, device="meta").stride()
        placement = Shard(logits.ndim - 1)
        return DTensor.from_local(logits, self.mesh, [placement], run_check=False, shape=shape, stride=stride)


@dataclass(unsafe_hash=True)
class RowWise(Style):
    """Style of a projection whose inputs are sharded. The results of all ranks are added up."""

    is_boundary: ClassVar[bool] = True

    split_input: bool = False
    """Whether the input is whole on every rank, and is split first."""

    scatter_output: bool = False
    """Whether only this rank's part of the outputs is returned."""

    @property
    def reduces(self) -> bool:  # type: ignore[override]
        """Whether the module's result is a sum over the ranks.

        A scattered result does not count, since it is not the result of the enclosing module.
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
        if bias is not None:  # every rank would add the bias
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
    """Return a list of one linear layer: ``module`` itself, or the layer inside if ``module`` is an adapter of peft."""
    base: Any = getattr(module, "base_layer", module)
    weight = base._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(base, nn.Embedding):
        raise TypeError(f"{type(base).__name__} is not a linear layer; the style {type(style).__name__} needs one.")
    return [base]


def _get_adapters(module: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Return the low-rank pairs (down, up) that peft puts beside a linear layer.

    Raises:
        TypeError: For adapters of another kind, whose sharding is not known.
    """
    if not hasattr(module, "base_layer"):
        return []
    if not hasattr(module, "lora_A"):
        raise TypeError(
            f"{type(module).__name__} is an adapter whose sharding is not known; among peft's adapters, only LoRA"
            " without DoRA and without lora_bias works under tensor parallelism."
        )
    parts = [getattr(module, name) for name in ("base_layer", "lora_A", "lora_B") if hasattr(module, name)]
    known = {id(p) for part in parts for p in part.parameters()}
    known -= {id(up.bias) for up in module.lora_B.values() if getattr(up, "bias", None) is not None}
    other = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if other:
        raise TypeError(
            f"{type(module).__name__} has the parameters {', '.join(other)}, whose sharding is not known; among"
            " peft's adapters, only LoRA without DoRA and without lora_bias works under tensor parallelism."
        )
    return [(module.lora_A[name], module.lora_B[name]) for name in module.lora_A]


def _get_output_size(linear: Any) -> int:
    return linear.__dict__.get(_WHOLE_ATTRIBUTE) or getattr(linear, "nf", None) or linear.out_features


def _get_output_dim(linear: nn.Module) -> int:
    """Return the output dim of the weight: 1 for the transposed ``Conv1D`` of transformers, 0 for all other layers."""
    return 1 if hasattr(linear, "nf") else 0

"""The tensor parallel styles: how a module's parameters are sharded, and what happens to its inputs and results.

Each is a :class:`torch.distributed.tensor.parallel.ParallelStyle`, so that
:func:`torch.distributed.tensor.parallel.parallelize_module` accepts it as well. Styles hold no state: one object can
serve any number of modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.loss.cross_entropy import keeps_logits_sharded
from lightning_fsdp2.parallel.tensor.parameters import (
    Layout,
    Slot,
    compute_with_local_parameters,
    get_packed_layout,
    get_slots,
    shard_parameters,
)
from lightning_fsdp2.parallel.tensor.scopes import Scope
from lightning_fsdp2.ranks.collectives import (
    copy_last_to_ranks,
    copy_to_ranks,
    gather_shards,
    get_shard_range,
    reduce_scatter,
    split,
    sum_over_ranks,
)

_WHOLE_ATTRIBUTE = "_lightning_fsdp2_output_size"
"""Name of the attribute in which a ``Conv1D`` keeps its total number of outputs; ``nf`` becomes the rank's number."""


class Style(ParallelStyle):
    """One way to run a module on several tensor parallel ranks."""

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
        """Let this style run ``module.forward``; the parameters are sharded and made local elsewhere."""
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
class ColumnWise(Style):
    """A projection whose outputs are sharded: each rank computes its heads, intermediate features or tokens."""

    is_boundary: ClassVar[bool] = True

    gather_output: bool = False
    """Whether every rank returns all outputs."""

    sections: int | tuple[int, ...] | None = None
    """Number of projections packed into this one if they are of equal size, else their sizes. None if there is one."""

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
    """A head whose logits stay sharded over the vocabulary, as a DTensor with that placement.

    In a forward without gradients, the logits of a single position are gathered: ``generate`` wants them whole.
    """

    gather_output: bool = True
    """Whether logits are gathered: those of such a single position, or all if ``shards_logits`` is False."""

    shards_logits: bool = True
    """Whether logits stay sharded by default. If False, they do only for a loss that asks for it
    with :func:`keep_logits_sharded`."""

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
    """A projection whose inputs are sharded: the ranks' results are added up."""

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
        if bias is not None:  # every rank would add it
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


@dataclass(unsafe_hash=True)
class VocabularyEmbedding(Style):
    """An embedding whose tokens are sharded over the ranks."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        _check_embedding(self, module)
        # the other parameters (of a norm of the result) see only this rank's tokens
        others = dict.fromkeys(get_slots(module.modules()), Layout(is_partial=True))
        return {**others, (module, "weight"): Layout(placement=Shard(0), is_uneven=True)}

    def run(self, module: Any, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        ids = args[0]
        size = module.num_embeddings
        assert_async(
            ((ids >= 0) & (ids < size)).all(), f"A token id is not in the embedding's range of 0 to {size - 1}."
        )
        start, length = get_shard_range(size, scope.group.rank(), scope.group.size())
        if length == 0:  # more ranks than tokens
            nothing = module.weight.sum() + module.weight.new_zeros((*ids.shape, module.embedding_dim))
            return scope.leave_whole(nothing)
        is_elsewhere = (ids < start) | (ids >= start + length)
        padding = module.padding_idx
        module.padding_idx = None
        if padding is not None and start <= padding < start + length:
            module.padding_idx = padding - start
        try:
            output = forward((ids - start).masked_fill(is_elsewhere, 0), *args[1:], **kwargs)
        finally:
            module.padding_idx = padding
        return scope.leave_whole(output.masked_fill(is_elsewhere.unsqueeze(-1), 0))


@dataclass(unsafe_hash=True)
class FeatureEmbedding(Style):
    """An embedding whose features are sharded over the ranks: each rank holds some features of every token."""

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        _check_embedding(self, module)
        if len(get_slots(module.modules())) > 1:
            raise TypeError(f"{type(module).__name__} has parameters of its own, which need whole features.")
        return {(module, "weight"): Layout(placement=Shard(1), is_uneven=True)}

    def run(self, module: Any, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return gather_shards(forward(*args, **kwargs), -1, module.embedding_dim, scope.group)


@dataclass(unsafe_hash=True)
class Replicated(Style):
    """A module that is whole on every rank.

    With ``on_shards`` it works on the rank's own heads or features (as the q and k norms of Qwen3 do), so each rank's
    gradient is a summand.
    """

    on_shards: bool = False

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        return dict.fromkeys(get_slots(module.modules()), Layout(is_partial=self.on_shards))


@dataclass(unsafe_hash=True)
class ShardedNorm(Style):
    """An RMS norm over a dim that is sharded, such as OLMo2's norms over all heads.

    The module's own forward runs on the rank's features. Its result is then corrected by the ratio of the rank's root
    mean square to that of all features, so any weight convention (``w`` or ``1 + w``) works.
    """

    def get_layouts(self, module: nn.Module, ranks: int) -> dict[Slot, Layout]:
        if "rmsnorm" not in type(module).__name__.lower() or module._parameters.get("weight") is None:
            raise TypeError(
                f"{type(module).__name__} is no RMS norm with a weight, which the style ShardedNorm is for."
            )
        return {(module, "weight"): Layout(placement=Shard(0))}

    def install(self, module: Any, scope: Scope) -> None:
        if hasattr(module, "normalized_shape"):  # torch's own norm
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


@dataclass(unsafe_hash=True)
class LatentKeyValue(Style):
    """The projection of multi-head latent attention that computes the latent and the rotary part of the keys.

    The projection is replicated. The latent part goes through a column-wise projection. The rotary part goes straight
    to each rank's heads, so its gradient must be summed over the ranks.
    """

    rotary_features: int | None = None
    """Number of rotary features. None takes ``qk_rope_head_dim`` from the model's config."""

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.rotary_features is None:
            raise ValueError("LatentKeyValue(rotary_features=None) outside of a plan: give `config.qk_rope_head_dim`.")
        return copy_last_to_ranks(forward(*args, **kwargs), self.rotary_features, scope.group)


@dataclass(unsafe_hash=True)
class SummedResult(Style):
    """A module with sharded parameters in which each rank computes a summand of the result.

    This is mainly for the experts of a mixture. Each expert is sharded, so every rank computes a summand for every
    token. Separate entries shard the parameters (``layers.*.mlp.experts.gate_up_proj``).
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
            f"{type(module).__name__}: `parallelize_module` knows modules only, and would leave its parameters"
            " whole; use `fsdp2_strategy_parallelize` or `apply_tensor_parallel`."
        )


@dataclass(unsafe_hash=True)
class IdentityExpert(Style):
    """An expert that returns its input on every rank, inside a result that is summed over the ranks."""

    def run(self, module: nn.Module, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return forward(args[0] / scope.group.size(), *args[1:], **kwargs)


@dataclass(unsafe_hash=True)
class LocalHeads(Style):
    """An attention module whose code reads its number of heads: each rank has a part of the heads."""

    attributes: tuple[str, ...] = ()
    """Names of the module's integer attributes to divide by the number of ranks."""

    config: tuple[str, ...] = ()
    """Names of the fields to divide in the ``config`` that the module reads."""

    per_head: tuple[str, ...] = ()
    """Names of keyword arguments with values for each head: [batch * heads, ...] or [batch, heads, ...]."""

    heads: int = 0
    """Number of heads on all ranks, for ``per_head``."""

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
    """A module with a ``ModuleList`` of one module per head: each rank uses the modules of its own heads.

    ``attribute`` is the name of the list.
    """

    attribute: str

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
class ShardParameter(Style):
    """Style of an entry that names a parameter: one of the parameter's dims is sharded."""

    dim: int = 0
    sections: int | None = None
    """Number of equal parts that are packed along ``dim``."""

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        if self.sections is not None:
            return get_packed_layout(parameter, self.dim, self.sections)
        return Layout(placement=Shard(self.dim % parameter.ndim))


@dataclass(unsafe_hash=True)
class SummedParameter(Style):
    """Style of an entry that names a parameter, which is added inside a result that is summed over the ranks."""

    def get_parameter_layout(self, parameter: Tensor) -> Layout:
        return Layout(is_summed=True, is_partial=True)


class _ConfigView:
    """View of a model's config in which some fields have other values; the rest is read from the config itself."""

    def __init__(self, config: Any, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields, _config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _get_base_linears(style: Style, module: nn.Module) -> list[Any]:
    """Return, as a list of one, ``module`` itself or the linear layer that it wraps as an adapter of peft."""
    base: Any = getattr(module, "base_layer", module)
    weight = base._parameters.get("weight")
    if weight is None or weight.ndim != 2 or isinstance(base, nn.Embedding):
        raise TypeError(f"{type(base).__name__} is no linear layer; the style {type(style).__name__} needs one.")
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
            f"{type(module).__name__} is an adapter whose sharding is not known; of peft's adapters LoRA without DoRA"
            " and without lora_bias works under tensor parallelism."
        )
    parts = [getattr(module, name) for name in ("base_layer", "lora_A", "lora_B") if hasattr(module, name)]
    known = {id(p) for part in parts for p in part.parameters()}
    known -= {id(up.bias) for up in module.lora_B.values() if getattr(up, "bias", None) is not None}
    other = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    if other:
        raise TypeError(
            f"{type(module).__name__} has the parameters {', '.join(other)}, whose sharding is not known; of peft's"
            " adapters LoRA without DoRA and without lora_bias works under tensor parallelism."
        )
    return [(module.lora_A[name], module.lora_B[name]) for name in module.lora_A]


def _get_output_size(linear: Any) -> int:
    return linear.__dict__.get(_WHOLE_ATTRIBUTE) or getattr(linear, "nf", None) or linear.out_features


def _get_output_dim(linear: nn.Module) -> int:
    """Return the output dim of the weight.

    It is 0 for ``nn.Linear`` and layers stored like it, 1 for the transposed ``Conv1D`` of transformers.
    """
    return 1 if hasattr(linear, "nf") else 0


def reads_token_ids(module: nn.Module) -> bool:
    """Return whether an embedding has further parameters, which its forward uses for some tokens instead."""
    return isinstance(module, nn.Embedding) and any(name != "weight" for name in module._parameters)


def _check_embedding(style: Style, module: nn.Module) -> None:
    if hasattr(module, "base_layer"):
        raise TypeError("adapters on an embedding do not work under tensor parallelism; leave it out of them.")
    if not isinstance(module, nn.Embedding):
        raise TypeError(f"{type(module).__name__} is no nn.Embedding; the style {type(style).__name__} needs one.")
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise TypeError("nn.Embedding with max_norm, sparse or scale_grad_by_freq needs the whole weight on each rank.")
    if reads_token_ids(module):
        raise TypeError(
            f"{type(module).__name__} has embeddings of its own for some tokens, whose ids a rank with a part of the"
            " vocabulary does not see; say 'replicate' of it."
        )


def _get_epsilon(norm: Any) -> float:
    values = (getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    # torch's own norm, if it was given no epsilon, uses that of the dtype it computes in
    return next((value for value in values if value is not None), torch.finfo(torch.float32).eps)

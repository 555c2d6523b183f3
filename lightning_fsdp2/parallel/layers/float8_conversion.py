"""Choice of the linear layers that multiply in float8, with the reasons why others do not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fsdp2.config import Float8Config
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.modules.structure import ModelStructure, get_class, get_class_name

_MULTIPLE = 16
"""Kernels for products in float8 need matrices whose sizes are multiples of this."""

_PRODUCTS = {"rowwise_with_gw_hp": 2, "rowwise": 3, "tensorwise": 3}
"""Number of products in float8 of a trained layer, by recipe: forward, the input's and the weight's gradient. A frozen
layer has two."""

_SMALL = "small"
_ODD = f"sizes are not multiples of {_MULTIPLE}"
_ODD_SHARDS = f"sizes of shards are not multiples of {_MULTIPLE}"

_CONVERSION = "_lightning_fsdp2_float8_conversion"

Shapes = Mapping[nn.Module, Sequence[torch.Size]]
"""Shapes of a weight's shards on all tensor parallel ranks, for each module that tensor parallelism shards."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Names of a model's linear layers that multiply in float8, and of those that do not."""

    recipe: str
    is_emulated: bool
    """Whether the layers round to float8 and then multiply in float32."""

    converted: list[str]
    """Layers in float8."""

    small: list[str]
    """Layers in float8 that float8 makes slower, by torchao's rule for their sizes; see :func:`is_small`."""

    left_out: dict[str, str]
    """Reasons why the other layers are not in float8, by name."""

    flops_per_token: int
    """Floating-point operations in float8 that one token takes in forward and backward; 0 if they are emulated."""

    def describe(self) -> str:
        """Return one sentence with the number of layers, and the reasons why others are left out."""
        others = self.describe_left_out()
        one = len(self.converted) == 1
        sentence = f"{len(self.converted)} linear layer{'' if one else 's'} "
        if self.is_emulated:
            sentence += f"emulate{'s' if one else ''} float8 in float32 ({self.recipe})"
        else:
            sentence += f"{'multiplies' if one else 'multiply'} in float8 ({self.recipe})"
        return f"{sentence}, but not {others}." if others else f"{sentence}."

    def describe_left_out(self) -> str:
        """Return the layers that are left out, with the reasons; "" if there are none."""
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        return "; ".join(f"{_summarize(found)} ({reason})" for reason, found in names.items())


def _summarize(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} layers such as {names[0]}"


def set_conversion(root: nn.Module, conversion: Conversion) -> None:
    """Record what was done to ``root``."""
    root.__dict__[_CONVERSION] = conversion


def get_optional_conversion(root: nn.Module) -> Conversion | None:
    """Return which layers of ``root`` multiply in float8, or None if none does."""
    return cast(Conversion | None, root.__dict__.get(_CONVERSION))


def choose_layers(
    structure: ModelStructure, config: Float8Config, shapes: Shapes
) -> tuple[list[nn.Linear], Conversion]:
    """Choose the linear layers that multiply in float8, without changing the model.

    Call this function before expert and tensor parallelism.

    Args:
        structure: Structure of the model.
        config: Recipe, and layers to leave out.
        shapes: Shapes that tensor parallelism will give to weights.

    Returns:
        The layers, and a description of them.

    Raises:
        ValueError: If a pattern of ``config.skip`` matches no layer, or no layer can multiply in float8.
    """
    names = _name_linears(structure)
    reasons = _find_reasons(structure, names, config, shapes)
    layers = [linear for linear, reason in reasons.items() if reason is None]
    small = [linear for linear in layers if _is_any_small(_get_shapes(linear, shapes), config.recipe)]
    conversion = Conversion(
        recipe=config.recipe,
        is_emulated=config.emulate,
        converted=[names[linear] for linear in layers],
        small=[names[linear] for linear in small],
        left_out={names[linear]: reason for linear, reason in reasons.items() if reason is not None},
        flops_per_token=0 if config.emulate else sum(_count_flops(linear.weight, config.recipe) for linear in layers),
    )
    if not layers:
        raise ValueError(
            f"float8={config}: no linear layer of {get_class_name(structure.root)} is left to multiply in float8. Left"
            f" out are {conversion.describe_left_out()}. {_get_remedy(conversion)}"
        )
    return layers, conversion


def _get_remedy(conversion: Conversion) -> str:
    """Return what to change so that a layer can multiply in float8."""
    reasons = set(conversion.left_out.values())
    remedies = [
        *(["filter_small=False"] if _SMALL in reasons else []),
        *(["a shorter skip"] if any(reason.startswith("skip=") for reason in reasons) else []),
        *(["a smaller tp_size"] if _ODD_SHARDS in reasons else []),
        "float8=None",
    ]
    return f"Use {' or '.join(remedies)}."


def _count_flops(weight: Tensor, recipe: str) -> int:
    products = _PRODUCTS[recipe] if weight.requires_grad else 2
    return int(2 * products * weight.numel())


def _name_linears(structure: ModelStructure) -> dict[nn.Linear, str]:
    """Return all linear layers with their names.

    The names are relative to the Hugging Face model, or to the root if that holds several of them or none. The layers
    of metrics are left out.
    """
    modules = set(structure.modules)
    top = structure.models[0].module if len(structure.models) == 1 else structure.root
    named = [*top.named_modules(), *structure.root.named_modules()]
    linears: dict[nn.Linear, str] = {}
    for name, module in named:
        if isinstance(module, nn.Linear) and module in modules:
            linears.setdefault(module, name)
    return linears


def _find_reasons(
    structure: ModelStructure, names: Mapping[nn.Linear, str], config: Float8Config, shapes: Shapes
) -> dict[nn.Linear, str | None]:
    """Return for each linear layer why it is left out, or None if it is not."""
    models = [parts.module for parts in structure.models] or [structure.root]
    inside = {module for model in models for module in model.modules()}
    heads = set(_iterate_heads(structure)) if config.skip is None else set()
    skipped = {linear: pattern for pattern in config.skip or () for linear in _match(structure, names, pattern)}
    routers, adapters = set(_iterate_routers(structure)), set(_iterate_adapters(structure))

    def get_reason(linear: nn.Linear) -> str | None:
        if linear not in inside:
            return "outside of the Hugging Face model"
        if get_class(linear) is not nn.Linear or "forward" in vars(linear):
            return "forward of its own"
        if linear in skipped:
            return f"skip={skipped[linear]}"
        if linear in heads:
            return "output head"
        if linear in routers:
            return "router"
        if linear in adapters:
            return "adapter"
        return _judge(_get_shapes(linear, shapes), config)

    return {linear: get_reason(linear) for linear in names}


def _match(structure: ModelStructure, names: Mapping[nn.Linear, str], pattern: str) -> list[nn.Linear]:
    """Return the linear layers whose names match a pattern of ``skip``."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    # peft has moved a layer with an adapter to `base_layer`, but its user knows it by its earlier name
    found = [linear for linear, name in names.items() if expression.fullmatch(name.replace(".base_layer", ""))]
    if not found:
        example = next(iter(names.values()), "layers.0.mlp.up_proj").replace(".base_layer", "")
        raise ValueError(
            f"float8.skip: {pattern!r} matches no linear layer of {get_class_name(structure.root)}; use names such as"
            f" {example!r}, with * for any part between dots."
        )
    return found


def _iterate_heads(structure: ModelStructure) -> Iterator[nn.Module]:
    """Yield the modules of output heads: those that Hugging Face models declare, and linear layers beside the base."""
    for parts in structure.models:
        for child in {*parts.module.children(), parts.head} - {None}:
            wrapped: Any = getattr(child, "base_layer", getattr(child, "original_module", child))  # by peft
            if child is parts.head or isinstance(wrapped, nn.Linear):
                yield from cast(nn.Module, child).modules()


def _iterate_routers(structure: ModelStructure) -> Iterator[nn.Module]:
    """Yield the linear layers that choose experts for tokens. Rounding their inputs would change the choice.

    A router lies beside the experts. It is a linear layer, or a module that has no other or that knows the number of
    experts, with an output for each expert, and maybe one more for tokens that go to none.
    """
    packed = set(find_experts(structure.modules))
    for block in structure.modules:
        children = dict(block.named_children())
        experts = [child for name, child in children.items() if child in packed or _is_expert_list(name, child)]
        numbers = {getattr(child, "num_experts", None) or len(cast(Any, child)) for child in experts}
        for child in children.values() if experts else ():
            linears = [module for module in child.modules() if isinstance(module, nn.Linear)]
            known = set(_iterate_expert_numbers(child))
            outputs = {number + extra for number in numbers | known for extra in (0, 1)}
            is_router = child not in experts and (len(linears) == 1 or known)
            if is_router and any(linear.out_features in outputs for linear in linears):
                yield from linears


def _is_expert_list(name: str, module: nn.Module) -> bool:
    return name == "experts" and isinstance(module, nn.ModuleList | nn.ModuleDict)


def _iterate_expert_numbers(module: nn.Module) -> Iterator[int]:
    for inner in module.modules():
        yield from (value for name, value in vars(inner).items() if "experts" in name and type(value) is int)


def _iterate_adapters(structure: ModelStructure) -> Iterator[nn.Module]:
    """Yield the modules that peft has added to layers. Their small rank makes products in float8 slower."""
    for module in structure.modules:
        base: Any = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            yield from set(module.modules()) - set(base.modules())


def _get_shapes(linear: nn.Linear, shapes: Shapes) -> Sequence[torch.Size]:
    return shapes.get(linear, [linear.weight.shape])


def _judge(shapes: Sequence[torch.Size], config: Float8Config) -> str | None:
    """Return why a weight with these shapes, one for each tensor parallel rank, is left out, or None if it is not."""
    if not shapes:
        return "tensor parallelism by a style of torch's own"
    if any(size % _MULTIPLE or size == 0 for shape in shapes for size in shape):
        return _ODD_SHARDS if len(shapes) > 1 else _ODD
    if config.filter_small and _is_any_small(shapes, config.recipe):
        return _SMALL
    return None


def _is_any_small(shapes: Sequence[torch.Size], recipe: str) -> bool:
    return any(is_small(shape, recipe) for shape in shapes)


def is_small(shape: torch.Size, recipe: str) -> bool:
    """Return whether casting a weight [out, in] costs more than its products in float8 save, by torchao's rule.

    The rule is that of ``torchao.float8.float8_linear_utils._auto_filter_for_recipe`` (torchao 0.18, measured on H100).
    torchao has no rule for "rowwise_with_gw_hp", for which that of "rowwise" is used.
    """
    rows, columns = shape
    if recipe == "tensorwise":
        return columns <= 4096 and rows <= 1024
    return rows <= 2048 or columns <= 1024 or (rows <= 4096 and columns <= 2048)

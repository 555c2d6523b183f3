"""Tensor parallel plans, which assign a style to each module of a model.

A plan maps patterns to styles. A pattern is the name of a module or parameter, in which ``*`` stands for any one
component, such as the number of a layer. Most models in transformers have a plan. :data:`STYLES` maps the style names
in these plans to this package's styles. ``families.py`` has plans for families whose plan in transformers is missing,
incomplete or wrong.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_fsdp2.modules.structure import ModelParts
from lightning_fsdp2.parallel.tensor.draft import draft_plan
from lightning_fsdp2.parallel.tensor.families import (
    CORRECTIONS,
    DEEPSTACK,
    FAMILIES,
    NO_TRAITS,
    REFUSED_FAMILIES,
    TRAITS,
    PlanBuilder,
)
from lightning_fsdp2.parallel.tensor.families import LayerTraits as LayerTraits
from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    FeatureEmbedding,
    IdentityExpert,
    LatentKeyValue,
    Replicated,
    RowWise,
    ShardParameter,
    Style,
    SummedResult,
    VocabularyEmbedding,
    VocabularyHead,
    reads_token_ids,
)

Plan = dict[str, ParallelStyle]
PlanOption = Mapping[str, "str | ParallelStyle"] | PlanBuilder | str | None
"""Type of the plans that users may pass; see :func:`get_plan`."""

STYLES: dict[str, Style] = {
    "colwise": ColumnWise(),
    "colwise_gather_output": ColumnWise(gather_output=True),
    "colwise_rep": ColumnWise(gather_output=True),
    "rowwise": RowWise(),
    "rowwise_split_input": RowWise(split_input=True),
    "rowwise_rep": RowWise(split_input=True),
    "embedding_rowwise": VocabularyEmbedding(),
    "embedding_colwise": FeatureEmbedding(),
    "packed_colwise": ColumnWise(sections=2),
    "qkv_colwise": ColumnWise(sections=3),
    "packed_rowwise": ShardParameter(dim=-1, sections=2),
    "replicated_with_grad_allreduce": Replicated(on_shards=True),
    "replicate": Replicated(),
    "local_params": Style(),
    "moe_tp_experts": SummedResult(),
    "moe_identity_expert": IdentityExpert(),
    "mla_kv_a_proj": LatentKeyValue(),
    "all_reduce": SummedResult(),
}
"""Styles of this package, by the names that plans in transformers 5.17 to 5.24 use. ``qkv_colwise`` is our own name."""

_REFUSED = {
    "sequence_parallel": "sequence parallelism is derived from the rest of the plan; set sequence_parallel=True",
    **dict.fromkeys(
        ("grouped_gemm", "ep_dispatch_experts", "ep_router", "megamoe_router", "megamoe_experts"),
        "expert parallelism needs no plan; use ep_size, or shard the experts with 'moe_tp_experts'",
    ),
}


_registered: dict[str | type[nn.Module], tuple[PlanBuilder, LayerTraits]] = {}


def register_tp_plan(
    model: str | type[nn.Module],
    plan: PlanBuilder | Mapping[str, "str | ParallelStyle"],
    traits: LayerTraits = NO_TRAITS,
) -> None:
    """Register a tensor parallel plan for a model class or family, which replaces the default plan.

    Args:
        model: Model class, or the ``model_type`` of a config. A class also covers its subclasses.
        plan: Dict from patterns to styles, or a function that takes the model and returns such a dict. Patterns are
            relative to the model.
        traits: Properties of the model's layers that sequence parallelism needs. Few models need any.
    """
    _registered[model] = (plan if callable(plan) else lambda _: plan, traits)


def is_registered(model: nn.Module) -> bool:
    """Return whether a plan was registered with :func:`register_tp_plan` for the class or family of ``model``."""
    return _get_registered(model) is not None


def get_layer_traits(parts: ModelParts) -> LayerTraits:
    """Return the layer traits that were registered for a model, or otherwise the default traits of its family."""
    registered = _get_registered(parts.module)
    if registered is not None:
        return registered[1]
    family = getattr(_get_config(parts.module), "model_type", None)
    return DEEPSTACK if _has_deepstack(parts) else TRAITS.get(cast(str, family), NO_TRAITS)


def _has_deepstack(parts: ModelParts) -> bool:
    """Return whether the model sees images and adds their features to hidden states between its layers (DeepStack).

    A language model without a vision tower may accept such features as an argument, but does not compute them. For such
    a model, return False.
    """
    names = {name for module in parts.hf_models for name in signature(module.forward).parameters}
    return "pixel_values" in names and any(name.startswith("deepstack_") for name in names)


def get_style(name: str, style: "str | ParallelStyle", config: Any = None) -> ParallelStyle:
    """Return the style object for an entry of a plan.

    Args:
        name: Pattern of the entry, for messages.
        style: A style, or the name of a style as in the plans of transformers.
        config: Config of the model.

    Raises:
        ValueError: If the name is unknown, or stands for a style that this package does not support.
    """
    if isinstance(style, str):
        if style in _REFUSED:
            raise ValueError(f"tp_plan[{name!r}]={style!r} is not supported: {_REFUSED[style]}.")
        if style not in STYLES:
            raise ValueError(f"tp_plan[{name!r}]={style!r} is not a known style; use one of {', '.join(STYLES)}.")
        style = STYLES[style]
    if isinstance(style, LatentKeyValue) and style.rotary_features is None:
        features = getattr(config, "qk_rope_head_dim", None)
        style = replace(style, rotary_features=features)
    return style


def get_plan(parts: ModelParts, plan: PlanOption = None) -> Plan:
    """Return the tensor parallel plan of a model: a dict from patterns to styles. Patterns are relative to the model.

    Args:
        parts: Parts of the model.
        plan: A plan, or a function that takes the model and returns a plan. ``"hf"`` means the model's own plan, which
            transformers defines. None means the first of these that exists: the registered plan, this package's plan
            for the family, or the model's own plan.

    Raises:
        TypeError: If ``plan`` is a function that does not return a dict.
        ValueError: If there is no plan, or if it contains an unknown or unsupported style.
    """
    model = parts.module
    config = _get_config(model)
    if plan is None or plan == "hf":
        plan = _add_ends(parts, _choose(parts, config, own_only=plan == "hf"))
    elif callable(plan):
        plan = plan(model)
    if not isinstance(plan, Mapping):
        raise TypeError(f"tp_plan must be a dict from names to styles, but the given function has returned {plan!r}.")
    styles = {name: get_style(name, style, config) for name, style in plan.items()}
    heads = {name for name, module in model.named_modules() if module is parts.head}
    translated = {name: _from_torch(style, is_head=name in heads) for name, style in styles.items()}
    # if a style has custom layouts, keep torch's styles for all modules: a module with custom layouts may pass DTensors
    # to other modules, and only torch's styles accept DTensors
    return translated if all(isinstance(style, Style) for style in translated.values()) else styles


def _choose(parts: ModelParts, config: Any, *, own_only: bool) -> Mapping[str, "str | ParallelStyle"]:
    model = parts.module
    family = getattr(config, "model_type", None)
    whole_family = getattr(getattr(model, "config", None), "model_type", None)
    if whole_family in REFUSED_FAMILIES:
        raise ValueError(f"tp_size: {type(model).__name__} cannot be sharded: {REFUSED_FAMILIES[whole_family]}.")
    if not own_only:
        registered = _get_registered(model)
        if registered is not None:
            return registered[0](model)
        if family in FAMILIES:
            return _add_prefix(parts, FAMILIES[family](config))
    own = dict(getattr(model, "tp_plan", None) or {})
    ends = {name for name, module in model.named_modules() if module is parts.embedding or module is parts.head}
    # Ignore the entries for the embedding and the output head, which transformers also gives to models whose layers
    # have no plan. A plan with only these entries would shard no layers.
    if not set(own) - ends:
        draft = draft_plan(model)
        example = draft or {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
        source = ", a draft from the shapes of its layers" if draft else ""
        raise NoPlanError(
            f"{type(model).__name__} has no tensor parallel plan. Give a plan that maps module names to styles in the"
            f" config, as tp_plan={{...}}, such as {example}{source}. Or register a plan for the class with"
            " lightning_fsdp2.parallel.tensor.plans.register_tp_plan; for a helper model that should stay whole on"
            " every rank, register an empty plan. Or use tp_size=1."
        )
    return {**own, **_add_prefix(parts, CORRECTIONS[family](config))} if family in CORRECTIONS else own


class NoPlanError(ValueError, AssertionError):
    """Error for a model that has no tensor parallel plan.

    It is both a ValueError and an AssertionError for compatibility with NeMo Automodel, whose documentation names one
    of these types, while its code raises the other.
    """


def _add_ends(parts: ModelParts, plan: Mapping[str, "str | ParallelStyle"]) -> dict[str, "str | ParallelStyle"]:
    """Extend a plan with entries that shard the input embedding and the output head over the vocabulary.

    Entries that the plan already has for these modules are kept.
    """
    names = {module: name for name, module in parts.module.named_modules()}
    embedding, head = parts.embedding, parts.head
    ends: dict[str, str | ParallelStyle] = {}
    if isinstance(embedding, nn.Embedding):
        ends[names[embedding]] = "embedding_rowwise"
    if isinstance(head, nn.Linear) and head in names:
        ends[names[head]] = "colwise_gather_output"
    chosen = {**ends, **plan}
    # replicate embeddings that need the whole vocabulary, and therefore also output heads that are tied to them
    chosen.update({name: "replicate" for name, module in parts.module.named_modules() if reads_token_ids(module)})
    return chosen


def _get_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _get_registered(model: nn.Module) -> tuple[PlanBuilder, LayerTraits] | None:
    family = getattr(_get_config(model), "model_type", None)
    keys = [*type(model).__mro__, *([family] if family is not None else [])]
    return next((_registered[key] for key in keys if key in _registered), None)


def _add_prefix(parts: ModelParts, plan: Mapping[str, "str | ParallelStyle"]) -> dict[str, "str | ParallelStyle"]:
    """Make the patterns in a family's plan relative to the whole model.

    In a family's plan, patterns are relative to the base model. The base model holds the layers, and may be inside a
    model with a head. A vision or audio tower next to the base model may have layers with the same names, and must not
    be mistaken for the base model.
    """
    if not plan:
        return {}
    stem = re.split(r"\.(?:\*|\d+)\.", next(iter(plan)))[0].split(".")
    holders = {name: module for name, module in parts.module.named_modules() if _find(module, stem)}
    # skip vision and audio towers, because a tower may come before the base model
    holder = next((name for name, module in holders.items() if module not in parts.towers), next(iter(holders)))
    return {(f"{holder}." if holder else "") + name: style for name, style in plan.items()}


def _find(module: Any, path: list[str]) -> bool:
    for name in path:
        module = getattr(module, name, None)
    return isinstance(module, nn.ModuleList)


def to_torch_style(style: ParallelStyle) -> ParallelStyle:
    """Return the torch style that is equivalent to ``style``, or ``style`` itself if torch has none."""
    return next((theirs() for theirs, ours in _TORCH_STYLES if ours == style), style)


_TORCH_STYLES: list[tuple[Callable[[], ParallelStyle], Style]] = [
    (ColwiseParallel, ColumnWise()),
    (partial(ColwiseParallel, output_layouts=Replicate()), ColumnWise(gather_output=True)),
    (RowwiseParallel, RowWise()),
    (partial(RowwiseParallel, input_layouts=Replicate()), RowWise(split_input=True)),
]
_SHARDED_LOGITS: tuple[Callable[[], ParallelStyle], Style] = (
    partial(ColwiseParallel, output_layouts=Shard(-1), use_local_output=False),
    VocabularyHead(),
)


def _from_torch(style: ParallelStyle, *, is_head: bool) -> ParallelStyle:
    """Return this package's equivalent of a torch style, or ``style`` itself if there is none.

    This allows plans to combine torch's styles with styles of this package.
    """
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return style
    known = [*_TORCH_STYLES, *([_SHARDED_LOGITS] if is_head else [])]
    return next((ours for theirs, ours in known if vars(theirs()) == vars(style)), style)

"""Tensor parallel plans: which style each module of a model gets.

A plan maps patterns to styles. A pattern is the name of a module or parameter, in which ``*`` stands for one component
(the number of a layer). Most models of transformers come with a plan; :data:`STYLES` translates its style names. The
families in this file have no plan, or one that leaves much of the model replicated.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_fsdp2.modules.structure import ModelParts
from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    FeatureEmbedding,
    IdentityExpert,
    LatentKeyValue,
    LocalHeads,
    PerHeadModules,
    Replicated,
    RowWise,
    ShardedNorm,
    ShardParameter,
    Style,
    SummedParameter,
    SummedResult,
    VocabularyEmbedding,
    VocabularyHead,
    reads_token_ids,
)

Plan = dict[str, ParallelStyle]
PlanBuilder = Callable[[Any], Mapping[str, "str | ParallelStyle"]]
"""Function from a model to its plan."""

PlanOption = Mapping[str, "str | ParallelStyle"] | PlanBuilder | str | None
"""Forms in which a user may give a plan; see :func:`get_plan`."""

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
    "packed_rowwise": ShardParameter(dim=-1, sections=2),
    "replicated_with_grad_allreduce": Replicated(on_shards=True),
    "replicate": Replicated(),
    "local_params": Style(),
    "moe_tp_experts": SummedResult(),
    "moe_identity_expert": IdentityExpert(),
    "mla_kv_a_proj": LatentKeyValue(),
    "all_reduce": SummedResult(),
}
"""Styles by the names that plans of transformers (5.17 to 5.23) use."""

_REFUSED = {
    "sequence_parallel": "sequence parallelism is derived from the rest of the plan; set sequence_parallel=True",
    **dict.fromkeys(
        ("grouped_gemm", "ep_dispatch_experts", "ep_router", "megamoe_router", "megamoe_experts"),
        "expert parallelism is not part of this release; shard the experts with 'moe_tp_experts'",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """Properties of a family's layers that sequence parallelism cannot see from outside."""

    pointwise: tuple[str, ...] = ()
    """Names of children with parameters, other than norms, that treat the positions of a sequence one by one."""

    per_position: tuple[str, ...] = ()
    """Names of arguments, [batch, sequence, ...], that the layer's own forward uses besides the hidden states."""

    sequence_dim: int = 1
    """Sequence dim of the hidden states that layers hand on."""

    regions_take_residual: bool = False
    """Whether attention and MLP are given the residual too, and add it to their result."""

    refused: str = ""
    """Reason why the sequence cannot be sharded between the layers; empty if it can."""


_registered: dict[str | type[nn.Module], tuple[PlanBuilder, LayerTraits]] = {}


def register_tp_plan(
    model: str | type[nn.Module],
    plan: PlanBuilder | Mapping[str, "str | ParallelStyle"],
    traits: LayerTraits = LayerTraits(),
) -> None:
    """Register the tensor parallel plan of a model class or family, in place of the one chosen by default.

    Args:
        model: Model class (subclasses included), or the ``model_type`` of a config.
        plan: Dict from patterns, relative to the model, to styles, or a function of the model that returns one.
        traits: Traits of the model's layers, for sequence parallelism; few models need any.
    """
    _registered[model] = (plan if callable(plan) else lambda _: plan, traits)


def is_registered(model: nn.Module) -> bool:
    """Return whether :func:`register_tp_plan` was called for the class or the family of ``model``."""
    return _get_registered(model) is not None


def get_layer_traits(parts: ModelParts) -> LayerTraits:
    """Return the traits that were registered for a model, or those of its family."""
    registered = _get_registered(parts.module)
    if registered is not None:
        return registered[1]
    family = getattr(_get_config(parts.module), "model_type", None)
    return _DEEPSTACK if _has_deepstack(parts) else _TRAITS.get(cast(str, family), LayerTraits())


def _has_deepstack(parts: ModelParts) -> bool:
    """Return whether the model around the layers takes image features to add between its layers."""
    forwards = [signature(module.forward).parameters for module in parts.hf_models]
    return any(name.startswith("deepstack_") for parameters in forwards for name in parameters)


def get_style(name: str, style: "str | ParallelStyle", config: Any = None) -> ParallelStyle:
    """Return the style that an entry of a plan stands for.

    Args:
        name: Name of the module, for messages.
        style: A style, or its name in the plans of transformers.
        config: Config of the model.

    Raises:
        ValueError: If the style's name is unknown or refused.
    """
    if isinstance(style, str):
        if style in _REFUSED:
            raise ValueError(f"tp_plan[{name!r}]={style!r} is refused: {_REFUSED[style]}.")
        if style not in STYLES:
            raise ValueError(f"tp_plan[{name!r}]={style!r} is no style that is known; use one of {', '.join(STYLES)}.")
        style = STYLES[style]
    if isinstance(style, LatentKeyValue) and style.rotary_features is None:
        features = getattr(config, "qk_rope_head_dim", None)
        style = replace(style, rotary_features=features)
    return style


def get_plan(parts: ModelParts, plan: PlanOption = None) -> Plan:
    """Return the plan of a Hugging Face model: patterns, relative to the model, and their styles.

    Args:
        parts: Parts of the model. The model's config and its own plan are read.
        plan: The plan, or a function of the model that returns it. ``"hf"`` takes the model's own plan. None takes a
            registered plan, else this package's, else the model's own.

    Raises:
        ValueError: If there is no plan.
    """
    model = parts.module
    config = _get_config(model)
    if plan is None or plan == "hf":
        plan = _add_ends(parts, _choose(parts, config, own_only=plan == "hf"))
    elif callable(plan):
        plan = plan(model)
    if not isinstance(plan, Mapping):
        raise TypeError(f"tp_plan must be a dict of names and styles, but the function given returned {plan!r}.")
    styles = {name: get_style(name, style, config) for name, style in plan.items()}
    heads = {name for name, module in model.named_modules() if module is parts.head}
    translated = {name: _from_torch(style, is_head=name in heads) for name, style in styles.items()}
    # a torch style with another layout may hand a DTensor to the next module, where only torch's own style accepts it
    return translated if all(isinstance(style, Style) for style in translated.values()) else styles


def _choose(parts: ModelParts, config: Any, *, own_only: bool) -> Mapping[str, "str | ParallelStyle"]:
    model = parts.module
    family = getattr(config, "model_type", None)
    whole_family = getattr(getattr(model, "config", None), "model_type", None)
    if whole_family in _REFUSED_FAMILIES:
        raise ValueError(f"tp_size: {type(model).__name__} cannot be sharded: {_REFUSED_FAMILIES[whole_family]}.")
    if not own_only:
        registered = _get_registered(model)
        if registered is not None:
            return registered[0](model)
        if family in _FAMILIES:
            return _add_prefix(parts, _FAMILIES[family](config))
    own = dict(getattr(model, "tp_plan", None) or {})
    names = {name for name, module in model.named_modules() if module is parts.head}
    if not set(own) - names:  # every class with a head declares a plan for it, which shards nothing else
        raise NoPlanError(
            f"{type(model).__name__} has no tensor parallel plan. Give one as FSDP2Config(tp_plan={{...}}), from module"
            " names to styles, such as {'model.layers.*.self_attn.q_proj': 'colwise',"
            " 'model.layers.*.self_attn.o_proj': 'rowwise'}, or register it for the class with"
            " lightning_fsdp2.parallel.tensor.plans.register_tp_plan, which also takes an empty plan for a helper model"
            " that every rank shall hold whole; or use tp_size=1."
        )
    return {**own, **_add_prefix(parts, _CORRECTIONS[family](config))} if family in _CORRECTIONS else own


class NoPlanError(ValueError, AssertionError):
    """Error for a model without a plan.

    It is both a ValueError and an AssertionError, since the original documents one and raises the other.
    """


def _add_ends(parts: ModelParts, plan: Mapping[str, "str | ParallelStyle"]) -> dict[str, "str | ParallelStyle"]:
    """Shard the input embedding and the head over the vocabulary where the plan leaves them replicated."""
    names = {module: name for name, module in parts.module.named_modules()}
    embedding, head = parts.embedding, parts.head
    ends: dict[str, str | ParallelStyle] = {}
    if isinstance(embedding, nn.Embedding):
        ends[names[embedding]] = "embedding_rowwise"
    if isinstance(head, nn.Linear) and head in names:
        ends[names[head]] = "colwise_gather_output"
    chosen = {**ends, **plan}
    # these embeddings cannot work on a part of the vocabulary; a head tied to one stays whole too
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
    """Make the names in a family's plan relative to the whole model.

    In the plan they are relative to the model that holds the layers, which is inside of the one with a head. A tower
    beside it may have layers of the same name.
    """
    if not plan:
        return {}
    stem = re.split(r"\.(?:\*|\d+)\.", next(iter(plan)))[0].split(".")
    holders = {name: module for name, module in parts.module.named_modules() if _find(module, stem)}
    # a tower has layers too, and may come first
    holder = next((name for name, module in holders.items() if module not in parts.towers), next(iter(holders)))
    return {(f"{holder}." if holder else "") + name: style for name, style in plan.items()}


def _find(module: Any, path: list[str]) -> bool:
    for name in path:
        module = getattr(module, name, None)
    return isinstance(module, nn.ModuleList)


def to_torch_style(style: ParallelStyle) -> ParallelStyle:
    """Return torch's own style if it has one that does the same as ``style``, else ``style`` itself."""
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
    """Replace a torch style with the layouts of plain tensor parallelism by ours, so that both can be combined."""
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return style
    known = [*_TORCH_STYLES, *([_SHARDED_LOGITS] if is_head else [])]
    return next((ours for theirs, ours in known if vars(theirs()) == vars(style)), style)


# ---------------------------------------------------------------------- families
# names are relative to the base model, the part without a head

_LLAMA_ATTENTION: dict[str, str | ParallelStyle] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_LLAMA_MLP: dict[str, str | ParallelStyle] = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def _gpt2(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        "h.*.attn": LocalHeads(attributes=("num_heads", "split_size")),
        "h.*.attn.c_attn": ColumnWise(sections=3),
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }


def _gpt_neo(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        "h.*.attn.attention": LocalHeads(attributes=("num_heads",)),
        "h.*.attn.attention.q_proj": "colwise",
        "h.*.attn.attention.k_proj": "colwise",
        "h.*.attn.attention.v_proj": "colwise",
        "h.*.attn.attention.out_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }


def _gptj(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        "h.*.attn": LocalHeads(attributes=("num_attention_heads",)),
        "h.*.attn.q_proj": "colwise",
        "h.*.attn.k_proj": "colwise",
        "h.*.attn.v_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    }


def _opt(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        "decoder.layers.*.self_attn": LocalHeads(attributes=("num_heads",)),
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    }


def _bloom(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise ValueError(
            "tp_size: BloomConfig(slow_but_exact=True, pretraining_tp=...) slices weights by hand, which cannot be"
            " sharded; set slow_but_exact=False."
        )
    heads = config.num_attention_heads
    return {
        "h.*.self_attention": LocalHeads(attributes=("num_heads",), per_head=("alibi",), heads=heads),
        "h.*.self_attention.query_key_value": "colwise",  # packed head by head
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }


def _falcon(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    local = LocalHeads(
        attributes=("num_heads", "num_kv_heads"),
        per_head=("alibi", "attention_mask"),
        heads=config.num_attention_heads,
    )
    return {
        "h.*.self_attention": local,
        "h.*.self_attention.query_key_value": "colwise",  # packed by key-value head
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }


def _stablelm(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    plan = {
        **_LLAMA_ATTENTION,
        **_LLAMA_MLP,
        "layers.*.self_attn": LocalHeads(attributes=("num_heads", "num_key_value_heads", "hidden_size")),
    }
    if config.qk_layernorm:
        plan["layers.*.self_attn.q_layernorm"] = PerHeadModules("norms")
        plan["layers.*.self_attn.k_layernorm"] = PerHeadModules("norms")
    return plan


def _phi3(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    return {
        "layers.*.self_attn": LocalHeads(attributes=("num_key_value_heads",), config=("num_attention_heads",)),
        "layers.*.self_attn.qkv_proj": ColumnWise(sections=(queries, keys, keys)),
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": ColumnWise(sections=2),
        "layers.*.mlp.down_proj": "rowwise",
    }


def _olmo2(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        **_LLAMA_ATTENTION,
        "layers.*.self_attn.q_norm": ShardedNorm(),
        "layers.*.self_attn.k_norm": ShardedNorm(),
        **_LLAMA_MLP,
    }


def _deepseek_v3(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    queries = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    return {
        f"layers.*.self_attn.{queries}": "colwise",
        "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.*.self_attn.kv_b_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        **_LLAMA_MLP,
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.shared_experts.gate_proj": "colwise",
        "layers.*.mlp.shared_experts.up_proj": "colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
    }


def _gpt_oss(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        **_LLAMA_ATTENTION,
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        # gate and up alternate, so a contiguous part holds equally much of both
        "layers.*.mlp.experts.gate_up_proj": ShardParameter(dim=2),
        "layers.*.mlp.experts.gate_up_proj_bias": ShardParameter(dim=1),
        "layers.*.mlp.experts.down_proj": ShardParameter(dim=1),
        "layers.*.mlp.experts.down_proj_bias": SummedParameter(),
    }


def _doge(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {
        **_LLAMA_ATTENTION,
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.A": "colwise",
        "layers.*.self_attn.dt_proj": RowWise(scatter_output=True),
        **_LLAMA_MLP,
        "layers.*.mlp.router_gate": "colwise_gather_output",
        "layers.*.mlp.down_embed": "embedding_rowwise",
        "layers.*.mlp.up_embed": "embedding_rowwise",
    }


def _apertus(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}


def _norms_of_heads(*names: str) -> PlanBuilder:
    """Return a plan builder for norms on each rank's heads, which a config may turn on and the model's plan lacks."""
    return lambda _: {f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce" for name in names}


def _cohere(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Shard the weights of the q and k norms, [heads, width], over the heads."""
    if not config.use_qk_norm:
        return {}
    return {f"layers.*.self_attn.{name}.weight": ShardParameter(dim=0) for name in ("q_norm", "k_norm")}


def _inkling(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}


def _gemma3n(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Gather intermediate features in layers with activation sparsity, which take the mean over all of them."""
    plan: dict[str, str | ParallelStyle] = {}
    for index, sparsity in enumerate(config.activation_sparsity_pattern or ()):
        if sparsity > 0:
            plan[f"layers.{index}.mlp.gate_proj"] = "colwise_gather_output"
            plan[f"layers.{index}.mlp.up_proj"] = "colwise_gather_output"
            plan[f"layers.{index}.mlp.down_proj"] = "rowwise_split_input"
    return plan


def _llama(*norms: str) -> PlanBuilder:
    """Return a plan builder for layers like Llama's, with these norms on each rank's heads."""
    return lambda config: {**_LLAMA_ATTENTION, **_norms_of_heads(*norms)(config), **_LLAMA_MLP}


def _chameleon(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    norms = [f"layers.*.self_attn.{name}.{part}" for name in ("q_norm", "k_norm") for part in ("weight", "bias")]
    return {
        **_LLAMA_ATTENTION,
        **_LLAMA_MLP,
        "layers.*.self_attn": LocalHeads(attributes=("num_heads", "num_key_value_heads")),
        **dict.fromkeys(norms, ShardParameter(dim=0)),  # per head, [heads, width]
    }


def _glm5_next(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Replicate ``o_proj`` in linear attention, where nothing is sharded; the other attention has one of that name."""
    linear = [index for index, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    return {f"layers.{index}.self_attn.o_proj": "replicate" for index in linear}


def _qwen4(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Replicate small weights that work position by position: shards of them would need whole sequences again."""
    return {
        "layers.*.attn_hyper_connection.input_mix_weight_down": "replicate",
        "layers.*.mlp_hyper_connection.input_mix_weight_down": "replicate",
    }


_FAMILIES: dict[str, PlanBuilder] = {
    "bloom": _bloom,
    "chameleon": _chameleon,
    "deepseek_v3": _deepseek_v3,
    "doge": _doge,
    "emu3_text_model": _llama(),
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "hunyuan_vl_text": _llama("query_layernorm", "key_layernorm"),
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "opt": _opt,
    "phi3": _phi3,
    "qwen3_vl_text": _llama("q_norm", "k_norm"),
    "stablelm": _stablelm,
}
"""Plans that replace the models' own."""

_CORRECTIONS: dict[str, PlanBuilder] = {
    "apertus": _apertus,
    "cohere": _cohere,
    "gemma3n_text": _gemma3n,
    "glm4_moe": _norms_of_heads("q_norm", "k_norm"),
    "glm5_next_text": _glm5_next,
    "inkling2_text": _inkling,
    "inkling_text": _inkling,
    "phi": _norms_of_heads("q_layernorm", "k_layernorm"),
    "qwen3_omni_moe_text": _norms_of_heads("q_norm", "k_norm"),
    "qwen3_vl_moe_text": _norms_of_heads("q_norm", "k_norm"),
    "qwen4_exp_text": _qwen4,
}
"""Entries that the models' own plans lack or get wrong."""

_REFUSED_FAMILIES = {
    "gemma4": "it reads `embed_tokens.weight` outside of the embedding, where each rank holds a part of the vocabulary;"
    " train its language model (gemma4_text) alone, or use tp_size=1"
}
"""Families whose code allows no plan, with the reason."""

_PER_LAYER = ("per_layer_input_gate", "per_layer_projection")
_DEEPSTACK = LayerTraits(refused="the model adds features of its images to whole sequences between its layers")
_HYPER_CONNECTIONS = LayerTraits(pointwise=("attn_hc", "ffn_hc"))
_TRAITS: dict[str, LayerTraits] = {
    "bloom": LayerTraits(regions_take_residual=True),
    "deepseek_v4": _HYPER_CONNECTIONS,
    "gemma3n_text": LayerTraits(
        pointwise=("altup", "laurel", *_PER_LAYER), per_position=("per_layer_input",), sequence_dim=2
    ),
    "gemma4_text": LayerTraits(pointwise=("router", *_PER_LAYER), per_position=("per_layer_input",)),
    "glm5_next_text": _HYPER_CONNECTIONS,
    "hy_v4": _HYPER_CONNECTIONS,
    "inkling2_text": LayerTraits(
        refused="the model keeps what its layers return beside whole sequences of earlier ones (`block_states`)"
    ),
    "muse_spark_text": LayerTraits(pointwise=("post_attention_residual_gate", "post_feedforward_residual_gate")),
    "qwen4_exp_text": LayerTraits(pointwise=("attn_hyper_connection", "mlp_hyper_connection")),
}

"""Tensor parallel plans for model families that have no plan in transformers, or an incomplete or wrong one.

Module names in these plans are relative to the base model, which has no output head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle

from lightning_fsdp2.parallel.tensor.styles import (
    ColumnWise,
    LocalHeads,
    PerHeadModules,
    RowWise,
    ShardedNorm,
    ShardParameter,
    SummedParameter,
)

PlanBuilder = Callable[[Any], Mapping[str, "str | ParallelStyle"]]
"""Function that takes a model, or its config, and returns a plan."""


@dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """Properties of a model family's layers that sequence parallelism needs but cannot determine from the model."""

    pointwise: tuple[str, ...] = ()
    """Names of child modules, other than norms, that have parameters and process each position independently."""

    per_position: tuple[str, ...] = ()
    """Names of arguments, [batch, sequence, ...], that the layer's own code combines with the hidden states."""

    sequence_dim: int = 1
    """Sequence dim of the hidden states between the layers."""

    regions_take_residual: bool = False
    """Whether the attention and MLP modules also get the residual, and add it to their result themselves."""

    refused: str = ""
    """Reason why the sequence cannot be sharded between the layers; empty if it can be sharded."""


NO_TRAITS = LayerTraits()
"""Traits of most families."""

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
            "tp_size: with BloomConfig(slow_but_exact=True, pretraining_tp=...), the model itself slices its weights,"
            " and such weights cannot be sharded; set slow_but_exact=False."
        )
    heads = config.num_attention_heads
    return {
        "h.*.self_attention": LocalHeads(attributes=("num_heads",), per_head=("alibi",), heads=heads),
        # outputs are ordered by head, so each rank gets the query, key and value of its own heads
        "h.*.self_attention.query_key_value": "colwise",
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
        # outputs are ordered by key-value head, so each rank gets key-value heads together with their queries
        "h.*.self_attention.query_key_value": "colwise",
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
        # gate and up columns alternate, so each rank's contiguous shard holds matching columns of gate and up
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
    """Return a function that builds plan entries for per-head norms of queries and keys.

    The plan in transformers lacks these entries.

    Args:
        *names: Names of the norms in the attention module.
    """
    return lambda _: {f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce" for name in names}


def _cohere(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Return entries that shard the weights of the query and key norms, [heads, width], over the heads."""
    if not config.use_qk_norm:
        return {}
    return {f"layers.*.self_attn.{name}.weight": ShardParameter(dim=0) for name in ("q_norm", "k_norm")}


def _inkling(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    return {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}


def _gemma3n(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Return entries that gather the intermediate features in layers with activation sparsity.

    Activation sparsity needs the mean over all features.
    """
    plan: dict[str, str | ParallelStyle] = {}
    for index, sparsity in enumerate(config.activation_sparsity_pattern or ()):
        if sparsity > 0:
            plan[f"layers.{index}.mlp.gate_proj"] = "colwise_gather_output"
            plan[f"layers.{index}.mlp.up_proj"] = "colwise_gather_output"
            plan[f"layers.{index}.mlp.down_proj"] = "rowwise_split_input"
    return plan


def _llama(*norms: str) -> PlanBuilder:
    """Return a function that builds the plan for a family whose layers are structured like Llama's.

    Args:
        *norms: Names of the per-head norms of queries and keys in the attention module.
    """
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
    """Return entries that replicate ``o_proj`` in the linear attention layers, which are not sharded.

    The model's own plan has an entry for every ``o_proj``, which is right only for the full attention layers.
    """
    linear = [index for index, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    return {f"layers.{index}.self_attn.o_proj": "replicate" for index in linear}


def _qwen4(config: Any) -> Mapping[str, "str | ParallelStyle"]:
    """Return entries that replicate small weights, which the model applies to each position independently.

    If these weights were sharded, sequence parallelism would have to gather whole sequences for them.
    """
    return {
        "layers.*.attn_hyper_connection.input_mix_weight_down": "replicate",
        "layers.*.mlp_hyper_connection.input_mix_weight_down": "replicate",
    }


FAMILIES: dict[str, PlanBuilder] = {
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
"""Plans that replace the models' own plans, by model type."""

CORRECTIONS: dict[str, PlanBuilder] = {
    "apertus": _apertus,
    "apertus1p5_text": _apertus,
    "cohere": _cohere,
    "gemma3n_text": _gemma3n,
    "glm4_moe": _norms_of_heads("q_norm", "k_norm"),
    "glm5_next_text": _glm5_next,
    "inkling2_loop_text": _inkling,
    "inkling2_text": _inkling,
    "inkling_text": _inkling,
    "phi": _norms_of_heads("q_layernorm", "k_layernorm"),
    "qwen3_omni_moe_text": _norms_of_heads("q_norm", "k_norm"),
    "qwen3_vl_moe_text": _norms_of_heads("q_norm", "k_norm"),
    "qwen4_exp_text": _qwen4,
    "sarvam_moe": _norms_of_heads("q_norm", "k_norm"),
}
"""Entries that are missing or wrong in the models' own plans, by model type."""

REFUSED_FAMILIES = {
    "gemma4": "it reads `embed_tokens.weight` outside of the embedding, where each rank holds a part of the vocabulary;"
    " train its language model (gemma4_text) alone, or use tp_size=1"
}
"""Model types whose code does not allow tensor parallelism, each with the reason."""

_PER_LAYER = ("per_layer_input_gate", "per_layer_projection")
DEEPSTACK = LayerTraits(refused="the model adds features of its images to whole sequences between its layers")
_HYPER_CONNECTIONS = LayerTraits(pointwise=("attn_hc", "ffn_hc"))
_EARLIER_LAYERS = LayerTraits(
    refused="the model combines results of its layers with whole sequences from earlier layers (`block_states`)"
)
TRAITS: dict[str, LayerTraits] = {
    "bloom": LayerTraits(regions_take_residual=True),
    "deepseek_v4": _HYPER_CONNECTIONS,
    "gemma3n_text": LayerTraits(
        pointwise=("altup", "laurel", *_PER_LAYER), per_position=("per_layer_input",), sequence_dim=2
    ),
    "gemma4_text": LayerTraits(pointwise=("router", *_PER_LAYER), per_position=("per_layer_input",)),
    "glm5_next_text": _HYPER_CONNECTIONS,
    "hy_v4": _HYPER_CONNECTIONS,
    "hy_v4_vl_text": _HYPER_CONNECTIONS,
    "inkling2_loop_text": _EARLIER_LAYERS,
    "inkling2_text": _EARLIER_LAYERS,
    "muse_spark_text": LayerTraits(pointwise=("post_attention_residual_gate", "post_feedforward_residual_gate")),
    "qwen4_exp_text": LayerTraits(pointwise=("attn_hyper_connection", "mlp_hyper_connection")),
}

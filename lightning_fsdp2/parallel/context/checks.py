"""Checks that a Hugging Face model supports context parallelism. They run before the model is sharded."""

import inspect
from typing import Any

from torch import nn

from lightning_fsdp2.compat.transformers import is_stateful, uses_attention_functions
from lightning_fsdp2.modules.structure import ModelParts, find_layer_drop, get_class_name
from lightning_fsdp2.parallel.context.attention import Method

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_context_parallel(parts: ModelParts, ranks: int) -> None:
    """Check that a model supports context parallelism.

    In particular, its layers may combine different positions only by calling transformers' attention functions.

    Raises:
        ValueError: If the model does not support context parallelism. The message names the model and the reason.
    """
    reason = _get_optional_reason(parts.module, parts.head)
    if reason is not None:
        raise ValueError(
            f"cp_size={ranks}: context parallelism is not possible for {get_class_name(parts.module)}: {reason}. Use"
            " cp_size=1 for it."
        )


def choose_method(model: Any, method: str, cp_size: int, tp_size: int) -> Method:
    """Choose how attention gets the whole sequence: by ``"allgather"`` or ``"ulysses"``.

    ``"auto"`` chooses the method that moves less data per rank. In forward and backward together, the all-gather method
    moves the keys and values of the whole sequence three times. Ulysses moves queries, keys, values and results twice,
    but only ``1 / cp_size`` of each.

    Raises:
        ValueError: If ``"ulysses"`` is requested but the heads cannot be divided over the ranks.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    divides = heads % (tp_size * cp_size) == 0 and key_heads % (tp_size * cp_size) == 0
    if method == "ulysses" and not divides:
        raise ValueError(
            f"context_parallel_method='ulysses' with cp_size={cp_size} x tp_size={tp_size} needs numbers of heads that"
            f" are divisible by {cp_size * tp_size}, but {get_class_name(model)} has num_attention_heads={heads} and"
            f" num_key_value_heads={key_heads}; use 'allgather' or 'auto', or change cp_size or tp_size."
        )
    if method == "auto":
        moves_less = 2 * (heads + key_heads) < 3 * cp_size * key_heads
        return "ulysses" if divides and moves_less else "allgather"
    return "ulysses" if method == "ulysses" else "allgather"


def _get_optional_reason(model: Any, head: nn.Module | None) -> str | None:
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder, which have different sequences"
    if not uses_attention_functions(model):
        return "its layers do not call transformers' attention functions (`_supports_attention_backend` is False)"
    if not getattr(config, "is_causal", True):
        return "its attention is not causal (`config.is_causal`)"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        return f"it has layers of type {' and '.join(other)}, which are neither full nor sliding-window attention"
    if is_stateful(model) or any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules()):
        return "it has layers that pass a state along the sequence"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids"
    if head is None and model.base_model is not model:
        return "it has no head that returns logits for each position, as language models have"
    for name in ("attention_dropout", "attn_pdrop", "attn_logit_softcapping"):
        if value := getattr(config, name, None):
            return f"its config has {name}={value}, but context parallel attention supports only 0 or None"
    if found := find_layer_drop(model):
        return f"it has layerdrop={found[1]}, so ranks would drop different layers; only 0 is supported"
    return None

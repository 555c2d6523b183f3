"""Trial runs of a small copy of a language model, to determine properties that its config does not reveal.

A trial answers two questions. Do tokens attend to later tokens, although the model is trained to predict these? Does
the model accept more positions than its config specifies? Configs answer these questions in different ways, or not at
all. A trial therefore reduces a copy of the config to two small layers, and runs a model with the reduced config on the
CPU, in a fraction of a second.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from lightning_fsdp2.compat.torch_simulation import with_values

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS, HEADS, EXPERTS, VOCABULARY, POSITIONS = 2, 4, 4, 64, 32

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim", "out_hidden_size")
_HEAD_COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
_CUTS: Mapping[str, int] = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("ffn_hidden_size", "shared_intermediate_size"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_words"), VOCABULARY),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), VOCABULARY - 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "chunk_size", "mamba_chunk_size"), POSITIONS),
}
"""Maximum values to which fields of configs are reduced."""

_MOST_PARAMETERS = 60e6
"""Maximum number of parameters of a model to try. A larger model takes longer than a second.

A reduced model is larger only if the widths in its config cannot be reduced.
"""

_LENGTH, _CHANGED_FROM = 16, 10
_TOLERANCE = 1e-3
"""Largest change that counts as rounding, as a fraction of the largest logit.

Later tokens change the logits by 0.7 % or more in every architecture whose tokens attend to them. Rounding
changes them by a millionth, for example because later tokens change how tokens are grouped for experts."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial run of a model."""

    is_causal: bool
    """Whether the logits at a position do not depend on later tokens."""

    lost_positions: int | None
    """Number of the config's positions that the model does not accept.

    None if the model accepts more positions than its config specifies, or if this is unknown.
    """


_TRIALS: dict[str, Trial | None] = {}
"""Results, keyed by class and JSON of the config. They are kept because a run may build its model several times."""


def try_config(config: "PretrainedConfig") -> Trial | None:
    """Run a small copy of the causal language model that ``config`` describes. Return None if this is not possible."""
    key = f"{type(config).__name__} {config.to_json_string()}"
    if key not in _TRIALS:
        _TRIALS[key] = _try_cuts(config)
    return _TRIALS[key]


def _try_cuts(config: "PretrainedConfig") -> Trial | None:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # building the real model will show the same warnings, so hide them here
    try:
        for cuts_widths in (True, False):
            # transformers may raise any error if the reduced fields of a config do not fit together
            # a plan may ask while tensors are fake, but a trial reads values
            with suppress(Exception), with_values():
                return _try(_cut(config, cuts_widths))
        return None
    finally:
        logging.set_verbosity(verbosity)


def _try(config: "PretrainedConfig") -> Trial:
    from lightning_fsdp2.models.hugging_face import build_model

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    if sum(weight.numel() for weight in build_model(config, on_meta=True, **options).parameters()) > _MOST_PARAMETERS:
        raise ValueError("It is too large.")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed accelerators too
        model = build_model(config, on_meta=False, **options).eval()
        for weight in model.parameters():
            if weight.ndim > 1:  # replace the small initial weights, with which attention would be almost uniform
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        return Trial(_is_causal(model), _count_lost_positions(model, config))


def _is_causal(model: nn.Module) -> bool:
    tokens = torch.arange(_LENGTH)[None] % 7 + 3
    changed = tokens.clone()
    changed[:, _CHANGED_FROM:] += 9
    before, after = _run(model, tokens), _run(model, changed)
    difference = (before - after)[:, :_CHANGED_FROM].abs().max()
    return bool(difference <= _TOLERANCE * before.abs().max())


def _count_lost_positions(model: nn.Module, config: "PretrainedConfig") -> int | None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions > 4 * POSITIONS:
        return None
    for length in (positions + 8, positions, positions - 1, positions - 2):
        try:
            _run(model, torch.full((1, length), 3))
        except (IndexError, RuntimeError):
            continue
        return None if length > positions else positions - length
    raise ValueError("The model accepted none of these lengths.")


def _run(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _cut(config: "PretrainedConfig", cuts_widths: bool) -> "PretrainedConfig":
    config = copy.deepcopy(config)
    for part in _get_parts(config):
        for name, value in _get_cuts(dict(vars(part)), cuts_widths).items():
            setattr(part, name, value)
    return config


def _get_parts(config: "PretrainedConfig") -> Iterator["PretrainedConfig"]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _get_parts(part)


def _get_cuts(fields: dict[str, Any], cuts_widths: bool) -> dict[str, Any]:
    """Return the fields of a config, or of a sub-config, that have to be reduced, with their new values."""
    numbers = {name: value for name, value in fields.items() if type(value) is int}
    layers = next((numbers[name] for name in _LAYER_COUNTS if name in numbers), 0)
    heads = next((numbers[name] for name in _HEAD_COUNTS if name in numbers), 0)
    width = next((numbers[name] for name in _WIDTHS if name in numbers), 0)
    cuts: dict[str, Any] = {name: min(numbers[name], limit) for name, limit in _CUTS.items() if name in numbers}
    cuts |= {name: LAYERS for name in _LAYER_COUNTS if numbers.get(name, 0) > LAYERS}
    if layers > LAYERS:
        kept = _choose_layers(next((fields[name] for name in _KINDS_OF_LAYERS if fields.get(name)), None))
        lists = {name: value for name, value in fields.items() if isinstance(value, list | tuple)}
        cuts |= {name: [value[i] for i in kept] for name, value in lists.items() if len(value) == layers}
    if cuts_widths and heads > HEADS and width % heads == 0:
        cuts |= dict.fromkeys(numbers.keys() & set(_HEAD_COUNTS), HEADS)
        cuts |= {
            name: HEADS if numbers[name] == heads else min(numbers[name], 2)
            for name in _KEY_HEAD_COUNTS
            if name in numbers
        }
        cuts |= {name: HEADS * (width // heads) for name in _WIDTHS if numbers.get(name) == width}
    return {name: value for name, value in cuts.items() if value != fields[name]}


def _choose_layers(kinds: Any) -> tuple[int, int]:
    """Return the indices of two layers of different kinds: layer 0, and the first layer that differs from it.

    The indices are 0 and 1 if all layers are of the same kind.
    """
    return 0, next((i for i, kind in enumerate(kinds or ()) if kind != kinds[0]), 1)

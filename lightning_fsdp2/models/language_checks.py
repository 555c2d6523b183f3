"""Checks that a model and its batches are suitable for next-token prediction."""

import inspect
from collections.abc import Collection, Iterable, Set
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fsdp2._suggestions import find_nearest
from lightning_fsdp2.models.trial import try_config
from lightning_fsdp2.modules.structure import get_class, get_class_name
from lightning_fsdp2.ranks.failures import list_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_OF_TOKENIZERS = {"token_type_ids", "mm_token_type_ids", "special_tokens_mask", "length"}
"""Tokenizer outputs that not every model accepts. They are not misspellings, even if they resemble an argument."""


def check_causal(config: "PretrainedConfig", source: str) -> None:
    """Raise an error if tokens attend to later tokens in a model with this ``config``.

    Args:
        config: Config of the model.
        source: Option that specifies the model, for the error message.

    Raises:
        ValueError: When tokens attend to later tokens. The message says what to do instead.
    """
    trial = try_config(config)
    if _is_causal_by_config(config) if trial is None else trial.is_causal:
        return
    as_decoder = "set `is_decoder: true` in its config or " if getattr(config, "is_decoder", None) is False else ""
    raise ValueError(
        f"CausalLM({source}): model_type={config.model_type!r} is not causal with this config: the logits at a position"
        " depend on later tokens, which are the labels, so the model would learn to copy them. For next-token training,"
        f" {as_decoder}use a causal model. To train this model in another way, write a LightningModule with a loss"
        " that suits the model."
    )


def check_length(config: "PretrainedConfig", length: int, source: str, *, restarts: bool) -> None:
    """Raise an error, or warn, if sequences have more tokens than the model has positions.

    Args:
        config: Config of the model.
        length: Length of a sequence, in tokens.
        source: Description of the option or batch that has this length, for the message.
        restarts: Whether positions restart at each document within a sequence.

    Raises:
        ValueError: When the model has no position embeddings for the last tokens of a sequence.
    """
    name, positions, ends = _get_positions(config)
    if positions is None or length <= positions:
        return
    what = f"{source} is more than the {positions} positions of this {config.model_type} ({name})"
    remedy = f"Shorten the sequences to {positions}"
    if ends and not restarts:
        raise ValueError(
            f"{what}, and the model does not support longer sequences. {remedy}, or give a new model a larger {name}."
        )
    if ends:
        rank_zero_warn(f"{what}: a longer document would end the run with an index error. {remedy}.")
    else:
        rank_zero_warn(
            f"{what}. Its rotary positions are not scaled that far, so the model has to extrapolate beyond them."
            f" {remedy}, or scale the positions (`rope_parameters` with rope_type 'yarn' or 'dynamic')."
        )


def check_names(model: nn.Module, names: Set[str]) -> None:
    """Raise an error for a misspelt name in a batch, because transformers' models silently ignore unknown names.

    Args:
        model: Model from transformers.
        names: Names of the batch's tensors.

    Raises:
        ValueError: When an unknown name resembles the name of an argument. The message names the argument.
    """
    arguments = inspect.signature(get_class(model).forward).parameters
    for name in names - arguments.keys() - _OF_TOKENIZERS:
        if (nearest := find_nearest(name, arguments.keys() - names, cutoff=0.8)) is not None:
            raise ValueError(
                f"The batch has {name!r}, which {get_class_name(model)} would ignore. Rename it to {nearest!r},"
                " which the batch lacks, or leave it out of the batch."
            )


def refuse_optimizer_of_matrices(module: nn.Module, error: ValueError) -> None:
    """Refuse an optimizer such as ``Muon`` that takes matrices only, if ``error`` of its class says so.

    Raises:
        ValueError: When the optimizer takes matrices only. The message names the other parameters.
    """
    if "only supports 2D parameters" not in str(error):
        return
    others = [name for name, each in module.named_parameters() if each.requires_grad and each.ndim != 2]
    raise ValueError(
        f"optimizer: {str(error).partition(' whereas')[0]}, but the model also has {list_names(others)}. Use an"
        " optimizer for all parameters, such as AdamW, or write a class that steps matrices with the one and all other"
        " parameters with AdamW."
    ) from error


def warn_of_unknown_monitors(callbacks: Iterable[Any], names: Collection[str]) -> None:
    """Warn of callbacks that monitor a metric that looks like a misspelt one of ``names``, before they look for it.

    Other names may be those of metrics that a callback logs.
    """
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str) or monitor in names:
            continue
        # `val_loss` and `val/los` are meant to be `val/loss`
        words = {name.replace("/", "_"): name for name in names}
        if (nearest := find_nearest(monitor.replace("/", "_"), words, cutoff=0.65)) is not None:
            rank_zero_warn(
                f"{type(callback).__name__}(monitor={monitor!r}): CausalLM logs no such metric; did you mean"
                f" {words[nearest]!r}? It logs {', '.join(names)}."
            )


def _is_causal_by_config(config: "PretrainedConfig") -> bool:
    """Return whether a config says that its model is causal.

    This is less reliable than a trial run of the model. Use it only if no trial run is possible.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    text = config.get_text_config()
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) is True:
        return False
    return config.model_type not in ENCODERS or getattr(config, "is_decoder", True) is not False


def _get_positions(config: "PretrainedConfig") -> tuple[str, int | None, bool]:
    """Return the config field for the number of positions, this number, and whether longer sequences fail.

    The number is None if the model accepts any length, because it uses a linear bias or scales positions itself.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    if not isinstance(positions, int):
        return name, None, False
    trial = try_config(config)
    if trial is not None and trial.lost_positions is not None:
        return name, positions - trial.lost_positions, True
    return name, _get_rotary_positions(text, positions), False


def _get_rotary_positions(text: "PretrainedConfig", positions: int) -> int | None:
    rotary: Any = getattr(text, "rope_parameters", None)
    if not rotary or getattr(text, "alibi", False):  # with `alibi`, Falcon ignores `rope_parameters`
        return None
    kinds = list(rotary.values()) if all(isinstance(value, dict) for value in rotary.values()) else [rotary]
    if any(kind.get("rope_type") == "dynamic" for kind in kinds):
        return None
    scaled = [kind.get("original_max_position_embeddings", 0) * kind.get("factor", 1) for kind in kinds]
    return max(positions, *map(int, scaled))

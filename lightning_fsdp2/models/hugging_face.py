"""Functions that build Hugging Face models without weights, so that each rank later reads only its shards."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_fsdp2._refusals import is_refusal
from lightning_fsdp2._suggestions import suggest
from lightning_fsdp2.compat.transformers import build_from_config, build_without_code, load_without_code
from lightning_fsdp2.modules.structure import get_float32_tensors
from lightning_fsdp2.weights.pretrained import get_weight_files, load_pretrained, set_pretrained

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_MOST = (1 << 31) - 1
_SIZES = {
    "hidden_size": _MOST,
    "intermediate_size": _MOST,
    "num_hidden_layers": 10_000,
    "num_attention_heads": _MOST,
    "num_key_value_heads": _MOST,
    "vocab_size": _MOST,
    "max_position_embeddings": _MOST,
}
"""Fields of configs that are at least 1, if a model type has them, each with a number that no model exceeds."""


def from_pretrained(
    pretrained: str | Path,
    *,
    auto_class: str = "AutoModelForCausalLM",
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    allow_missing: str | Sequence[str] = (),
    on_meta: bool = True,
) -> "PreTrainedModel":
    """Build a Hugging Face model without weights, so that each rank later reads only its shards from the files.

    The model is in training mode, and is on the meta device until the strategy shards it. In a plain loop,
    ``fsdp2_strategy_parallelize`` or a manager shards the model. Then each rank reads its slices of the weights from
    the files. Call this function in ``configure_model`` of any LightningModule::

        def configure_model(self):
            if self.model is None:
                self.model = from_pretrained("/models/llama-3-8b")

    Args:
        pretrained: Directory of a model saved by ``save_pretrained``, or a model id on the Hugging Face Hub, which is
            downloaded if necessary.
        auto_class: Name of the transformers class to build, such as ``"AutoModelForSequenceClassification"`` or
            ``"Gemma3ForConditionalGeneration"``.
        config: Fields of the model's config to change, such as ``{"num_labels": 3}``.
        dtype: Dtype of the weights. None for torch's default, which the Trainer's ``precision`` sets.
        attn_implementation: Attention function of transformers, such as ``"sdpa"`` or ``"eager"``; None for the
            default.
        allow_missing: Names, or patterns such as ``"score.*"``, of weights that the files may lack, such as those of a
            new head. transformers' code initialises missing weights. Any other missing tensor is an error.
        on_meta: Whether the model stays on the meta device until it is sharded. False reads the whole model
            immediately, as strategies from outside this package require.

    Returns:
        The model.

    Raises:
        FileNotFoundError: When ``pretrained`` has no safetensors files.
        ValueError: When ``pretrained`` is a file or a checkpoint of a training run, the model is quantised, or
            ``auto_class`` or a field of ``config`` is unknown or belongs to a different architecture. Once the model is
            sharded, when the files do not match the model.
    """
    folder = find_pretrained(pretrained)
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    return build_pretrained_model(
        folder,
        _read_config(folder, config or {}),
        auto_class=auto_class,
        allow_missing=allow_missing,
        on_meta=on_meta,
        dtype=dtype or torch.get_default_dtype(),
        **options,
    )


def build_pretrained_model(
    folder: Path,
    config: "PretrainedConfig",
    *,
    auto_class: str = "AutoModelForCausalLM",
    allow_missing: str | Sequence[str] = (),
    on_meta: bool,
    **options: Any,
) -> "PreTrainedModel":
    """Build a model from ``config``, with the weights in ``folder``.

    If ``on_meta`` is True, the weights are read once the model is sharded.
    """
    from transformers import GenerationConfig

    _check_not_quantized(config, folder)
    model = build_model(config, auto_class=auto_class, on_meta=True, **options)
    for _, _, tensor in get_float32_tensors(model, model.dtype):
        tensor.data = tensor.data.float()
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    set_pretrained(model, folder, allow_missing=allow_missing)
    if not on_meta:
        load_pretrained(model, torch.get_default_device())
    return model


def build_model(
    config: "PretrainedConfig", *, auto_class: str = "AutoModelForCausalLM", on_meta: bool, **options: Any
) -> "PreTrainedModel":
    """Build a model in training mode from ``config``. Its weights are new, or absent if ``on_meta`` is True."""
    model_class = _get_class(auto_class)
    _check_config_is_of(model_class, config)
    build = build_without_code if hasattr(model_class, "from_config") else build_from_config
    try:
        with torch.device("meta" if on_meta else torch.get_default_device()):
            return build(model_class, config, **options).train()
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"model_type={config.model_type!r} has no model of the class {auto_class}; use the class of this"
            " architecture with `lightning_fsdp2.models.from_pretrained`, or another architecture."
        ) from None  # its message lists hundreds of classes


def build_config(source: Mapping[str, Any] | str) -> "PretrainedConfig":
    """Build a config from a mapping with ``model_type``, or load it from a directory or the Hub.

    Raises:
        ValueError: When the mapping has unknown fields or no known ``model_type``, or when the directory or hub id has
            no config.
    """
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    if isinstance(source, str):
        try:
            return load_without_code("AutoConfig", source)
        except (OSError, ValueError) as error:
            if is_refusal(error):
                what = ""
            elif os.path.isfile(os.path.join(source, "config.json")):
                what = "its config.json cannot be read: "
            else:
                what = "this is neither a directory with a config.json nor a readable model on the Hub: "
            raise ValueError(f"CausalLM({source!r}): {what}{str(error).partition(chr(10))[0]}") from None
    fields = dict(source)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ValueError(
            f"CausalLM(config={source!r}) has no `model_type`; add the architecture's name, such as 'llama'."
        )
    if not isinstance(model_type, str):
        raise ValueError(
            f"CausalLM(config=...): model_type={model_type!r} must be the architecture's name, such as 'llama'."
        )
    if model_type not in CONFIG_MAPPING:
        hint = suggest(model_type, CONFIG_MAPPING) or "; check its spelling."
        raise ValueError(
            f"CausalLM(config=...): model_type={model_type!r} is no architecture of transformers"
            f" {transformers.__version__}{hint}"
        )
    _check_values(CONFIG_MAPPING[model_type], fields)
    config = AutoConfig.for_model(model_type, **fields)
    # skip complete configs, such as those in checkpoints, because other tools may have added fields to them
    if "transformers_version" not in fields:
        _check_fields(config, model_type, fields)
    return config


def find_pretrained(pretrained: str | Path, *, download: bool = True) -> Path:
    """Return the local directory of a model's files, after downloading the files if necessary.

    Without ``download``, the files of a hub id must already be in the local cache.

    Raises:
        FileNotFoundError: When the directory has no safetensors files.
        ValueError: When ``pretrained`` is a file, or a checkpoint of a training run.
    """
    if (folder := get_optional_folder(pretrained)) is not None:
        return folder
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            str(pretrained),
            allow_patterns=[
                *("*.safetensors", "*.json", "*.jinja"),
                *("tokenizer*", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"),
            ],
            # these files are a second copy of the weights, in the authors' own format
            ignore_patterns=["original/*", "*/*.safetensors", "consolidated*"],
            local_files_only=not download,
        )
    )
    get_weight_files(folder)
    return folder


def get_optional_folder(pretrained: str | Path) -> Path | None:
    """Return ``pretrained`` as a path if it is a directory, and None if it is a hub id.

    Raises:
        FileNotFoundError: When ``pretrained`` looks like a path but does not exist, or has no safetensors files.
        ValueError: When ``pretrained`` is a file, or a checkpoint of a training run.
    """
    folder = Path(pretrained)
    if not str(pretrained):
        raise ValueError("pretrained='' is empty; give a directory or a model id, or leave it out.")
    if folder.exists():
        get_weight_files(folder)
        return folder
    if folder.is_absolute() or str(pretrained).startswith("."):
        raise FileNotFoundError(f"pretrained={str(pretrained)!r} does not exist.")
    return None


def _read_config(folder: Path, changes: Mapping[str, Any]) -> "PretrainedConfig":
    config, unknown = load_without_code("AutoConfig", folder, return_unused_kwargs=True, **changes)
    if unknown:
        raise ValueError(
            f"from_pretrained(config={dict(changes)!r}): {type(config).__name__} has no {', '.join(unknown)}; check the"
            f" spelling. Its fields are {', '.join(sorted(config.to_dict()))}."
        )
    return config


def _check_not_quantized(config: "PretrainedConfig", source: Path) -> None:
    """Raise an error for a quantised model, because its files contain encoded values instead of the parameters."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"pretrained={str(source)!r} is a quantised model, which this package does not train. Dequantise it once"
            " with transformers, for example with"
            " `from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))`, save it with `save_pretrained`,"
            " and give the new directory."
        )


def _get_class(name: str) -> Any:
    import transformers

    model_class = getattr(transformers, name, None)
    if not (hasattr(model_class, "from_config") or hasattr(model_class, "_from_config")):
        raise ValueError(
            f"from_pretrained(auto_class={name!r}): transformers has no such model class; use one such as"
            " 'AutoModelForCausalLM'."
        )
    return model_class


def _check_config_is_of(model_class: Any, config: "PretrainedConfig") -> None:
    config_class = getattr(model_class, "config_class", None)  # auto classes do not have this attribute
    if config_class is not None and not isinstance(config, config_class):
        raise ValueError(
            f"from_pretrained(auto_class={model_class.__name__!r}) needs a {config_class.__name__}, but the config of"
            f" `pretrained` is a {type(config).__name__}; use a class of that architecture, or one such as"
            " 'AutoModelForCausalLM'."
        )


def _check_values(config_class: "type[PretrainedConfig]", fields: Mapping[str, Any]) -> None:
    """Raise an error for values with which transformers would fail later, or build a model without layers."""
    from transformers.activations import ACT2FN

    standard = {own: name for name, own in config_class.attribute_map.items()}  # GPT-2's n_embd is hidden_size
    for name, value in fields.items():
        most = _SIZES.get(standard.get(name, name))
        if most is not None and isinstance(value, int) and not 1 <= value <= most:
            raise ValueError(f"CausalLM(config=...): {name}={value} must be at least 1 and at most {most}.")
        if "dropout" in name and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ValueError(f"CausalLM(config=...): {name}={value} is a probability, and must be from 0 to 1.")
        is_activation = isinstance(value, str) and getattr(config_class, name, None) in ACT2FN
        if is_activation and value not in ACT2FN:
            hint = suggest(value, ACT2FN) or f"; use one of {', '.join(sorted(ACT2FN))}."
            raise ValueError(f"CausalLM(config=...): {name}={value!r} is no activation function of transformers{hint}")
    heads, groups = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ValueError(
            f"CausalLM(config=...): num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}."
        )


def _check_fields(config: "PretrainedConfig", model_type: str, fields: dict[str, Any]) -> None:
    """Raise an error for unknown fields, which transformers would silently ignore when it builds the model."""
    config_class = type(config)
    names = {field.name for field in dataclasses.fields(config_class)}
    known = _build_optional_config(model_type, {}) or config_class  # Nougat's has no defaults that fit together
    # attention layers may read `head_dim` although the config's class does not declare it, as in Qwen3 MoE
    undeclared = {*(getattr(known, "rope_parameters", None) or {}), "partial_rotary_factor", "head_dim"}
    undeclared.update(config_class.attribute_map)
    for name in fields:
        # check `names` first, because `hasattr` raises an error for per-layer fields of Gemma 4
        if name in names or hasattr(known, name) or name in undeclared:
            continue
        without = _build_optional_config(model_type, {key: value for key, value in fields.items() if key != name})
        # Accept the old name of a renamed field: it changes the field with the new name, while a typo changes nothing.
        if without and {key: value for key, value in config.to_dict().items() if key != name} == without.to_dict():
            hint = suggest(name, names, cutoff=0.75) or f"; its fields are {', '.join(sorted(names))}."
            raise ValueError(f"CausalLM(config=...): {config_class.__name__} has no {name!r}{hint}")


def _build_optional_config(model_type: str, fields: dict[str, Any]) -> "PretrainedConfig | None":
    """Build a config, or return None if its class does not accept it without further fields."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **fields)
    except (StrictDataclassError, ValueError):
        return None

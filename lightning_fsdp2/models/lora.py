"""peft's LoRA adapters (arXiv:2106.09685) for Hugging Face models that get their weights after sharding."""

import copy
import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fsdp2._suggestions import suggest
from lightning_fsdp2.modules.structure import get_class_name
from lightning_fsdp2.weights.adapters import INSTALL
from lightning_fsdp2.weights.pretrained import get_folder_fingerprint
from lightning_fsdp2.weights.pretrained_adapters import CONFIG_FILE, WEIGHTS_FILE, load_adapters, set_adapter_weights

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

_FIELDS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("bias", "lora_bias", "use_rslora", "fan_in_fan_out", "ensure_weight_tying"),
)
"""Supported fields of ``LoraConfig``. Other fields need unsharded weights or layers of the base model."""

_NOTES = {"peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
_NOTES |= {"inference_mode", "runtime_config", "megatron_core", "qalora_group_size"}
"""Fields of saved adapter configs that training ignores. For example, ``inference_mode`` would freeze the adapter."""

_FIXED = {
    "task_type": ("CAUSAL_LM", "is not the task of CausalLM; leave it out"),
    "inference_mode": (False, "would freeze the adapters; leave it out"),
}
"""Required values of some fields, and the reasons why all other values are rejected."""


def build_lora_config(lora: Mapping[str, Any] | str) -> "LoraConfig":
    """Build peft's ``LoraConfig`` from a mapping of its fields, or from the directory of an adapter.

    For a mapping, some defaults differ from peft's: ``r=16``, ``lora_alpha=2 * r``, and all linear layers except
    the head as targets.

    Raises:
        ImportError: When peft is not installed.
        FileNotFoundError: When the directory or a file in it is missing.
        ValueError: When the adapter in the directory is not a LoRA adapter, or a field is unknown or not supported.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError(f"CausalLM(lora=...) needs peft; {INSTALL}.") from error
    if isinstance(lora, str):
        fields = _read_config(Path(lora))
        _check_fields(fields, str(Path(lora) / CONFIG_FILE), notes=_NOTES)
    else:
        fields = {"r": 16, "target_modules": "all-linear", **lora}
        for name, kind in (("r", int), ("lora_alpha", int | float), ("lora_dropout", int | float)):
            if not isinstance(fields.get(name, 0), kind) or fields.get(name, 0) < 0:
                number = "a whole number" if kind is int else "a number"
                raise ValueError(f"CausalLM(lora={{...}}): {name}={fields[name]!r} must be {number}, and at least 0.")
        fields.setdefault("lora_alpha", 2 * fields["r"])
        _check_fields(fields, "CausalLM(lora={...})")
    known = {*_FIELDS, "base_model_name_or_path", "revision"} & {field.name for field in dataclasses.fields(LoraConfig)}
    return LoraConfig(task_type="CAUSAL_LM", **{name: fields[name] for name in fields if name in known})


def check_base(folder: Path, config: "LoraConfig", pretrained: str, weights: Path) -> None:
    """Check that the adapter in ``folder`` belongs to the base model ``pretrained``, whose files are in ``weights``.

    Raises:
        ValueError: When the adapter's config names a base model with different weights. If the files of that base model
            are not available for comparison, there is only a warning.
    """
    base = config.base_model_name_or_path
    if not base or base == pretrained:
        return
    try:
        fingerprint = get_folder_fingerprint(base)
    except FileNotFoundError:
        rank_zero_warn(f"{folder / CONFIG_FILE} is an adapter of {base!r}; training continues with {pretrained!r}.")
        return
    if fingerprint != get_folder_fingerprint(weights):
        raise ValueError(
            f"{folder / CONFIG_FILE}: base_model_name_or_path={base!r} and pretrained={pretrained!r} are different"
            f" models (their files have different tensors); give pretrained={base!r}, or an adapter of {pretrained!r}."
        )


def add_lora(
    model: "PreTrainedModel", config: "LoraConfig", *, base: str | None, folder: Path | None = None
) -> "PeftModel":
    """Freeze ``model`` and put adapters around its layers.

    If the model is on the meta device, the adapters get their weights later, together with the model. New adapters
    are initialised by peft's code, and their values do not depend on the mesh.

    Args:
        model: Model to change in place.
        config: Config from :func:`build_lora_config`.
        base: Name of the base model to record in the adapters' config.
        folder: Directory of an existing adapter whose training continues. None for a new adapter.

    Raises:
        ValueError: When ``model`` has no modules with the names in the config, or when the adapter in ``folder``
            belongs to a different model.
    """
    from peft import get_peft_model

    _check_modules(model, config, folder)
    on_meta = model.device.type == "meta"
    # Copy the config, because peft fills in missing fields.
    # `autocast_adapter_dtype=False` gives adapters the model's dtype, because an FSDP2 unit must have a single dtype.
    own = dataclasses.replace(copy.deepcopy(config), base_model_name_or_path=None)
    adapted = get_peft_model(model, own, low_cpu_mem_usage=on_meta, autocast_adapter_dtype=False).train()
    name = base or config.base_model_name_or_path
    # a relative path would be wrong in another working directory
    name = str(Path(name).resolve()) if name and Path(name).is_dir() else name
    adapted.peft_config["default"].base_model_name_or_path = name
    if folder is not None:
        set_adapter_weights(adapted, folder)
        if not on_meta:
            load_adapters(adapted, model.device)
    return adapted


def to_mapping(config: "LoraConfig") -> dict[str, Any]:
    """Return the fields of ``config`` that differ from peft's defaults, as plain types to save as hyperparameters."""
    default = type(config)()
    fields = {name: getattr(config, name) for name in _FIELDS if hasattr(config, name)}
    changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in changed.items()}
    return {"r": config.r, "lora_alpha": config.lora_alpha, **plain}


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"CausalLM(lora={str(folder)!r}): there is no {folder / name}; give a directory that peft's"
                " `save_pretrained` or `lightning-fsdp2 export` wrote, or a mapping of LoraConfig's fields."
            )
    try:
        fields: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        kind = fields.get("peft_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} is damaged ({error}); copy the adapter again.") from error
    if kind != "LORA":
        raise ValueError(f"{folder / CONFIG_FILE}: peft_type={kind!r} is not supported; only 'LORA' is.")
    return fields


def _check_fields(fields: Mapping[str, Any], source: str, notes: Collection[str] = ()) -> None:
    """Raise an error for fields unknown to peft, and for fields and values that this package does not support."""
    from peft import LoraConfig

    default: Any = LoraConfig()
    for name, value in fields.items():
        if name in _FIELDS or name in notes:
            continue
        if not hasattr(default, name):
            hint = suggest(name, _FIELDS) or f"; it has {', '.join(_FIELDS)}."
            raise ValueError(f"{source}: peft's LoraConfig has no {name!r}{hint}")
        other = getattr(default, name)
        fixed, reason = _FIXED.get(name, (other, f"is not supported here; use only {', '.join(_FIELDS)}"))
        if value not in (fixed, other):
            raise ValueError(f"{source}: {name}={value!r} {reason}.")
    init = fields.get("init_lora_weights", True)
    if init not in (True, False, "gaussian"):
        raise ValueError(
            f"{source}: init_lora_weights={init!r} needs the unsharded weights of the base model, which no rank has;"
            " use true, false or 'gaussian'."
        )


def _check_modules(model: "PreTrainedModel", config: "LoraConfig", folder: Path | None) -> None:
    source = (
        "CausalLM(lora={...})" if folder is None else f"{folder / CONFIG_FILE} is an adapter for a different base model"
    )
    names = [name for name, _ in model.named_modules() if name]
    ends = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")})
    for option in ("target_modules", "modules_to_save"):
        wanted = getattr(config, option) or ()
        for target in () if isinstance(wanted, str) else sorted(wanted):
            if any(name == target or name.endswith(f".{target}") for name in names):
                continue
            hint = suggest(target, ends) or f"; it has {', '.join(ends)}."
            raise ValueError(f"{source}: {option} has {target!r}, which {get_class_name(model)} lacks{hint}")

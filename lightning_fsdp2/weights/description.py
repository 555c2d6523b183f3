"""Descriptions of the Hugging Face models in a checkpoint, for exporting the models without the user's code.

A description consists of plain JSON types::

    {"path": "model", "class": "LlamaForCausalLM", "config": {...}, "generation_config": {...} or None,
     "tokenizer": "meta-llama/...", "tied": ["lm_head.weight"], "weight_conversions": [["", "..."], ...] or None,
     "has_adapters": False, "adapters": {"default": {"peft_type": "LORA", ...}}}
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lightning_fsdp2.compat.transformers import build_from_config, set_weight_conversions
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.modules.structure import (
    find_peft_models,
    get_class_name,
    get_hf_models,
    is_hf_model,
)
from lightning_fsdp2.modules.stubs import with_skeletons
from lightning_fsdp2.weights.adapters import INSTALL, get_plain_names, without_adapters

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

DESCRIPTIONS_KEY = "hf_models"
"""Key of the descriptions in ``meta.json`` of a checkpoint directory, or in the dict of a single file."""

Description = dict[str, Any]


def describe_hf_models(module: nn.Module, tokenizer: Any = None) -> list[Description]:
    """Describe every Hugging Face model in ``module`` (or ``module`` itself), in plain JSON types.

    Args:
        module: Module, sharded or not.
        tokenizer: Tokenizer of the training data. Its ``name_or_path`` goes into the descriptions. If ``tokenizer`` is
            None, the name of the model is used.

    Returns:
        One description per model, in registration order.
    """
    with with_skeletons(module):
        names = {submodule: name for name, submodule in module.named_modules()}
        tokenizer_name = getattr(tokenizer, "name_or_path", "")
        # search for peft's wrappers, not for its layers: with prompt or prefix tuning, a model has no layers of peft
        adapted = {model: wrapper for wrapper in find_peft_models(module) for model in get_hf_models(wrapper)}
        return [
            {**_describe(model, names[model], tokenizer_name), **_describe_adapters(adapted.get(model))}
            for model in get_hf_models(module)
        ]


def build_hf_skeleton(description: Mapping[str, Any]) -> "PreTrainedModel":
    """Build the described model on the meta device.

    Raises:
        ValueError: If the model's class is not a class of transformers.
    """
    import transformers

    name = description["class"]
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ValueError(
            f"The checkpoint holds a {name}, but the installed transformers {transformers.__version__} has no such"
            " class. In an environment that can import this class, build your module, load the checkpoint into it, and"
            " export the module."
        )
    # choose the config class by `model_type`, because a model class may accept several config classes
    kind = description["config"].get("model_type")
    has_class = kind in transformers.CONFIG_MAPPING
    config_class = transformers.CONFIG_MAPPING[kind] if has_class else model_class.config_class
    return build_skeleton(model_class, config_class, description)


def build_skeleton(model_class: Any, config_class: Any, description: Mapping[str, Any]) -> "PreTrainedModel":
    """Build the described model on the meta device from the given classes, which may be the user's own."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    def build_config() -> Any:
        return config_class.from_dict(copy.deepcopy(description["config"]))

    with torch.device("meta"):
        skeleton = build_from_config(model_class, build_config())
    skeleton.config = build_config()  # use a new config, because building the model added fields to its config
    if description["generation_config"] is not None:
        skeleton.generation_config = _build_generation_config(description)
    if (used := description["weight_conversions"]) is not None:
        conversions = get_model_conversion_mapping(skeleton)
        set_weight_conversions(skeleton, [transform for transform in conversions if _identify(transform) in used])
    return skeleton


def add_described_adapters(skeleton: "PreTrainedModel", description: Mapping[str, Any]) -> "PeftModel | None":
    """Add the described adapter, without weights, to ``skeleton``.

    Returns:
        The ``PeftModel`` that wraps ``skeleton``; None unless exactly one adapter is described.

    Raises:
        ImportError: If peft is not installed.
    """
    if len(description.get("adapters", ())) != 1:
        return None
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(f"The {type(skeleton).__name__} has adapters, which need peft; {INSTALL}.") from error
    ((name, fields),) = description["adapters"].items()
    config = LoraConfig(**{key: value for key, value in fields.items() if key != "peft_type"})
    return get_peft_model(skeleton, config, name, low_cpu_mem_usage=True, autocast_adapter_dtype=False)


def restore_generation_configs(module: nn.Module, descriptions: Sequence[Description]) -> None:
    """Restore the generation configs with which the Hugging Face models in ``module`` were saved."""
    models = {name: model for name, model in module.named_modules() if is_hf_model(model)}
    for description in descriptions:
        model: Any = models.get(description["path"])
        if model is not None and description["generation_config"] is not None:
            model.generation_config = _build_generation_config(description)


def get_model_class(model: nn.Module) -> Any:
    """Return the original class of a model.

    ``fully_shard`` and tensor parallelism replace a model's class with subclasses of the same name.
    """
    name = get_class_name(model)
    return [base for base in type(model).__mro__ if base.__name__ == name][-1]


def _build_generation_config(description: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig.from_dict(copy.deepcopy(description["generation_config"]))


def _describe(model: Any, path: str, tokenizer: str) -> Description:
    model_class = get_model_class(model)
    is_own = model_class.__module__.startswith("transformers.")
    used: Sequence[Any] | None = getattr(model, "_weight_conversions", None)
    generation_config = getattr(model, "generation_config", None)
    return {
        "path": path,
        "class": model_class.__name__ if is_own else f"{model_class.__module__}.{model_class.__qualname__}",
        "config": _to_json(model.config),
        "generation_config": None if generation_config is None else _to_json(generation_config),
        "tokenizer": tokenizer or model.name_or_path,
        "tied": _list_tied(model),
        "weight_conversions": None if used is None else [_identify(transform) for transform in used],
    }


def _describe_adapters(wrapper: Any) -> Description:
    """Describe the adapters. LoRA adapters are described by their whole configs, others only by ``has_adapters``."""
    configs: dict[str, Any] = {} if wrapper is None else wrapper.peft_config
    has_lora = all(config.peft_type == "LORA" for config in configs.values())
    described = {name: _to_json(config, default=_to_plain) for name, config in configs.items()} if has_lora else {}
    return {"has_adapters": wrapper is not None, "adapters": described}


def _to_plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def _list_tied(model: Any) -> list[str]:
    """Return the names of tied tensors that checkpoints store under another name.

    If the config ties a weight but the model has untied it since, its name is not returned.
    """
    with without_adapters(model):
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        identities: dict[str, Any] = {name: id(tensor) for name, tensor in named}
    stages = get_optional_stages(model)
    if stages is not None:  # this rank may hold only one of two tied tensors
        plain = get_plain_names(model)
        identities = {plain[name]: tensor.source for name, tensor in stages.state.items() if name in plain}
    tied: dict[str, str] = model.all_tied_weights_keys
    return sorted(name for name, source in tied.items() if identities.get(name) == identities.get(source))


def _to_json(config: Any, default: Any = str) -> dict[str, Any]:
    # convert values without a JSON type to strings, so that they cannot make saving a checkpoint fail
    return cast(dict[str, Any], json.loads(json.dumps(config.to_dict(), default=default)))


def _identify(transform: Any) -> list[str]:
    """Return a prefix and a pattern that identify a ``WeightTransform`` of a model, as JSON types."""
    return [transform.scope_prefix or "", transform.compiled_sources.pattern]

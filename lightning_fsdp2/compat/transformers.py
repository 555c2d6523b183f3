"""Access to private names of transformers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
"""Names under which models and layers take a cache of keys, values or states. transformers 5.24 renamed all of them to
``cache``; its models accept the earlier names until 5.40."""


def is_cache(value: Any) -> bool:
    """Return whether ``value`` is a cache of transformers.

    The name of an argument does not tell: in other modules, ``cache`` may be anything, such as a table of angles.
    """
    return hasattr(value, "get_seq_length")


_replaced: list[list[Any]] = []
"""What each open block of :func:`assume_unpacked_sequences` has replaced. Only the first has replaced transformers' own
functions."""


@contextmanager
def assume_unpacked_sequences() -> Iterator[None]:
    """Make transformers assume, inside the block, that no batch has packed sequences.

    By default, transformers searches the position ids for packed sequences, and the CPU waits for the result from the
    device. transformers repeats this search when it makes the attention masks of a forward, and in every layer if it
    uses flash attention with batch size 1.

    Blocks may end in any order, as the stages of two Trainers may.
    """
    from transformers import masking_utils, modeling_flash_attention_utils

    checks: list[tuple[Any, str, Any]] = [
        (masking_utils, "find_packed_sequence_indices", None),
        (modeling_flash_attention_utils, "_is_packed_sequence", False),
    ]
    _replaced.append([getattr(module, name) for module, name, _ in checks])
    try:
        for module, name, answer in checks:
            setattr(module, name, partial(_answer, answer))
        yield
    finally:
        originals = _replaced[0]
        _replaced.pop()
        for (module, name, _), function in zip(checks, originals, strict=True) if not _replaced else ():
            setattr(module, name, function)


def assumes_unpacked_sequences() -> bool:
    """Return whether the caller runs inside :func:`assume_unpacked_sequences`."""
    from transformers import masking_utils

    return getattr(masking_utils.find_packed_sequence_indices, "func", None) is _answer


def _answer(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer


def install_output_hooks(model: Any) -> None:
    """Install the hooks with which transformers records results of layers, such as router logits, in ``model``.

    transformers does so in the first forward that asks for such results. Modules that are not in the model during that
    forward would get no hooks.

    Args:
        model: A Hugging Face model.
    """
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if getattr(model, "_can_record_outputs", None):
        maybe_install_capturing_hooks(model)


def get_attention(config: Any) -> Any:
    """Return the name of the attention function of modules whose config is ``config``."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Set the attention function of modules whose config is ``config``, without the public setter's checks."""
    config._attn_implementation_internal = name


def use_plain_functions(model: nn.Module, *, attention: bool = False, experts: bool = False) -> None:
    """Choose functions of attention or of experts that run on any device and on tensors of any strides."""
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in configs:
        if attention and getattr(config, "_attn_implementation", None) not in (None, "sdpa"):
            set_attention(config, "eager")
        if experts and hasattr(config, "_experts_implementation"):
            config._experts_implementation_internal = "eager"


def forget_attention(name: str) -> None:
    """Unregister the attention function ``name`` and its mask function. transformers has no public way to do this."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name)
    AttentionMaskInterface._global_mapping.pop(name)


def uses_attention_functions(model: Any) -> bool:
    """Return whether the layers of ``model`` call the attention functions that are registered in transformers."""
    return bool(model._supports_attention_backend)


def is_stateful(model: Any) -> bool:
    """Return whether layers of ``model`` pass a state from token to token, as recurrent layers do."""
    return bool(model._is_stateful)


def get_optional_own_loss(model: Any) -> Callable[..., Any] | None:
    """Return the loss function set on the instance ``model``, or None if it uses the loss function of its class."""
    return vars(model).get("_loss_function")


def set_own_loss(model: Any, loss: Callable[..., Any] | None) -> None:
    """Set the loss function of the instance ``model``. None restores the loss function of its class."""
    vars(model).pop("_loss_function", None)
    if loss is not None:
        model.loss_function = loss


def get_initializer(model: Any) -> Callable[[nn.Module], None]:
    """Return the function that initialises a single module of ``model``, but not the module's submodules."""
    initialize: Callable[[nn.Module], None] = model._init_weights
    return initialize


def load_without_code(auto_class: str, source: str | Path, **options: Any) -> Any:
    """Load a config or a tokenizer with an auto class of transformers, and never run code that is in the files.

    Without ``trust_remote_code=False``, transformers asks in a terminal whether to run this code.

    Raises:
        ValueError: When the files cannot be used without their own code.
    """
    import transformers

    try:
        return getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=False, **options)
    except ValueError as error:
        is_unknown = "does not recognize this architecture" in str(error)
        if "trust_remote_code" not in str(error) and not (is_unknown and _has_own_code(Path(source))):
            raise
        raise ValueError(_refuse_code(str(source))) from None


def _has_own_code(folder: Path) -> bool:
    return '"auto_map"' in (folder / "config.json").read_text() if (folder / "config.json").is_file() else False


def build_without_code(auto_class: Any, config: Any, **options: Any) -> Any:
    """Build a model with an auto class of transformers, and never run code that the config names.

    Raises:
        ValueError: When the config needs a class that is in its own code.
    """
    try:
        return auto_class.from_config(config, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(_refuse_code(config.name_or_path or type(config).__name__)) from None


def _refuse_code(source: str) -> str:
    return (
        f"{source!r} has code of its own (`auto_map`), which this package never runs. Read that code; if you trust it,"
        " load the model or the tokenizer in your own module or script, with transformers' `trust_remote_code=True`."
    )


def build_from_config(model_class: Any, config: Any, **options: Any) -> Any:
    """Build a ``model_class`` from a config, without loading weights.

    Only auto classes have a public ``from_config``.
    """
    return model_class._from_config(config, **options)


_MADE_IN_FLOAT32 = {"hunyuan_v1_moe": ("gate.wg.weight",)}
"""Weights of routers that a constructor makes in float32, whatever the model's dtype, by ``model_type``. The lists of
transformers lack them, up to 5.24."""


def get_dtype_exceptions(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return which tensors get a dtype other than ``dtype`` when ``model`` is loaded in ``dtype``.

    The keys are patterns of tensor names, and the values are the dtypes of these tensors.
    """
    exceptions: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    made = _MADE_IN_FLOAT32.get(model.config.model_type, ())
    return {**exceptions, **dict.fromkeys(made, torch.float32)}


def get_keys_left_out_on_save(model: Any) -> Iterable[str]:
    """Return the names of the tensors of ``model`` that ``save_pretrained`` does not store."""
    return model._keys_to_ignore_on_save or ()


def set_weight_conversions(model: Any, conversions: list[Any]) -> None:
    """Record in ``model`` the conversions applied to its weights, for transformers' ``revert_weight_conversion``."""
    model._weight_conversions = conversions


def drop_harmless_keys(model: Any, info: Any) -> None:
    """Remove from ``info`` the missing and unexpected keys that the model's class declares harmless."""
    model._adjust_missing_and_unexpected_keys(info)


def load_tensors(model: Any, tensors: dict[str, Tensor], config: Any) -> Any:
    """Convert ``tensors``, load them into ``model``, and return transformers' ``LoadStateDictInfo``."""
    info, _ = type(model)._load_pretrained_model(model, tensors, None, config)
    return info


def mark_loaded(tensor: Tensor) -> None:
    """Make transformers treat ``tensor`` as loaded, so that :func:`finish_loading` does not initialise it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def finish_loading(model: Any, config: Any, info: Any) -> None:
    """Initialise the weights that :func:`load_tensors` has not loaded, tie shared weights, and report problems."""
    type(model)._finalize_model_loading(model, config, info)

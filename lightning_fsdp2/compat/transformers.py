"""Use of private names of transformers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def assume_unpacked_sequences() -> Iterator[None]:
    """Make transformers assume, inside the block, that no batch has packed sequences.

    By default, transformers searches the position ids for packed sequences, and the CPU waits for the result from the
    device. It does so for the attention masks of every forward, and in every layer with flash attention and batch size
    1.
    """
    from transformers import masking_utils, modeling_flash_attention_utils

    checks: list[tuple[Any, str, Any]] = [
        (masking_utils, "find_packed_sequence_indices", None),
        (modeling_flash_attention_utils, "_is_packed_sequence", False),
    ]
    saved = [getattr(module, name) for module, name, _ in checks]
    try:
        for module, name, answer in checks:
            setattr(module, name, partial(_answer, answer))
        yield
    finally:
        for (module, name, _), function in zip(checks, saved, strict=True):
            setattr(module, name, function)


def assumes_unpacked_sequences() -> bool:
    """Return whether the caller runs inside :func:`assume_unpacked_sequences`."""
    from transformers import masking_utils

    return getattr(masking_utils.find_packed_sequence_indices, "func", None) is _answer


def make_unpacked_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for a checkpointed forward inside :func:`assume_unpacked_sequences` and its recomputation."""
    return nullcontext(), _AssumeAgain()


class _AssumeAgain(AbstractContextManager[None]):
    """Reusable form of :func:`assume_unpacked_sequences`, for graphs with several backwards and recomputations."""

    def __enter__(self) -> None:
        self.context = assume_unpacked_sequences()
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.context.__exit__(*error)


def _answer(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer


def get_attention(config: Any) -> Any:
    """Return the name of the attention function that modules with this config call."""
    return config._attn_implementation


def set_attention(config: Any, name: str) -> None:
    """Make modules with this config call the attention function ``name``, without the checks of the public setter."""
    config._attn_implementation_internal = name


def forget_attention(name: str) -> None:
    """Undo the registration of an attention function and its mask function; transformers has no public way."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name)
    AttentionMaskInterface._global_mapping.pop(name)


def uses_attention_functions(model: Any) -> bool:
    """Return whether the layers of ``model`` call the registered attention functions of transformers."""
    return bool(model._supports_attention_backend)


def is_stateful(model: Any) -> bool:
    """Return whether layers of ``model`` pass a state along the sequence, as recurrent layers do."""
    return bool(model._is_stateful)


def get_optional_own_loss(model: Any) -> Callable[..., Any] | None:
    """Return the loss function that was set on this model; None if the model uses the loss function of its class."""
    return vars(model).get("_loss_function")


def set_own_loss(model: Any, loss: Callable[..., Any] | None) -> None:
    """Give ``model`` this loss function; None restores the loss function of its class."""
    vars(model).pop("_loss_function", None)
    if loss is not None:
        model.loss_function = loss


def get_initializer(model: Any) -> Callable[[nn.Module], None]:
    """Return the function with which ``model`` initialises the tensors of one module, without its submodules."""
    initialize: Callable[[nn.Module], None] = model._init_weights
    return initialize


def build_from_config(model_class: Any, config: Any, **options: Any) -> Any:
    """Build a model from its config, without loading weights. Only the auto classes have a public ``from_config``."""
    return model_class._from_config(config, **options)


def get_dtype_exceptions(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of tensors that do not get ``dtype`` when ``model`` does, by name pattern."""
    exceptions: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    return exceptions


def get_keys_left_out_on_save(model: Any) -> Iterable[str]:
    """Return the names of tensors that ``save_pretrained`` does not store."""
    return model._keys_to_ignore_on_save or ()


def set_weight_conversions(model: Any, conversions: list[Any]) -> None:
    """Record which conversions were applied to the weights of ``model``; ``revert_weight_conversion`` reads them."""
    model._weight_conversions = conversions


def drop_harmless_keys(model: Any, info: Any) -> None:
    """Drop the missing and unexpected keys that the model's class declares harmless from ``info``."""
    model._adjust_missing_and_unexpected_keys(info)


def load_tensors(model: Any, tensors: dict[str, Tensor], config: Any) -> Any:
    """Convert ``tensors``, put them into ``model``, and return transformers' ``LoadStateDictInfo``."""
    info, _ = type(model)._load_pretrained_model(model, tensors, None, config)
    return info


def finish_loading(model: Any, config: Any, info: Any) -> None:
    """Initialise the weights that :func:`load_tensors` has not loaded, tie weights, and report problems."""
    type(model)._finalize_model_loading(model, config, info)

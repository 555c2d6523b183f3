"""Handling of packed sequences, which consist of several documents.

To find the documents, transformers searches for position ids that restart. For this search, the CPU waits for the
device once per forward, or with flash attention once per layer. Training without packed sequences can skip the search.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_fsdp2.compat.torch import assert_async
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences, get_attention, is_stateful
from lightning_fsdp2.modules.structure import ModelStructure, get_class_name
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.context.attention import is_running_sharded

_MASKED_LAYER_TYPES = {"full_attention", "sliding_attention", "indexed_attention"}


@contextmanager
def require_separate_documents(model: nn.Module, batch_size: int) -> Iterator[None]:
    """Raise an error if a forward of ``model`` inside the ``with`` block may mix tokens of different documents.

    This happens, for example, with models in transformers that do not pass position ids to the mask functions of
    transformers.

    Args:
        model: A Hugging Face model that is not context parallel. Context parallel attention separates documents itself.
        batch_size: Number of sequences in the batch.

    Raises:
        ValueError: If tokens of different documents may be mixed. The message names the model and the reason.
    """
    from transformers import masking_utils

    reason = _get_optional_mixer(model, batch_size)
    if reason is not None:
        raise _make_separation_error(model, reason)
    find, looks = masking_utils.find_packed_sequence_indices, []

    def find_and_note(position_ids: Tensor) -> Tensor | None:
        looks.append(position_ids.shape)
        return find(position_ids)

    masking_utils.find_packed_sequence_indices = find_and_note
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
    if not looks:
        raise _make_separation_error(model, "it does not use position_ids for its attention mask")


def _get_optional_mixer(model: Any, batch_size: int) -> str | None:
    """Return why the model mixes tokens of different documents even with a correct mask, or None if it does not."""
    config = model.config.get_text_config()
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _MASKED_LAYER_TYPES)
    if other:
        return f"it has layers of type {' and '.join(other)}, which mix all tokens of a sequence"
    if is_stateful(model) or any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules()):
        return "it has layers that pass a state along the whole sequence"
    attention = get_attention(config)
    if "flash" in attention and batch_size > 1:
        return f"its {attention} separates documents only with batch_size=1, but batch_size is {batch_size}"
    return None


def _make_separation_error(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"separate_documents=True is not possible for {get_class_name(model)}: {reason}. If the reason is"
        " attn_implementation, batch_size or patch_is_packed_sequence, change it. Otherwise, use"
        " separate_documents=False (pack=False for a ChatDataModule)."
    )


def apply_unpacked_sequences(structure: ModelStructure) -> None:
    """Make the Hugging Face models in a module assume that no sequence is packed.

    Each forward still checks the batch. If position ids do not increase by one from each attended token to the next,
    the forward raises a RuntimeError. On an accelerator, this is a device-side assertion, because the CPU does not wait
    for the result of the check.
    """
    for hf_model in structure.hf_models:
        wrap_method(hf_model, _UnpackedSequences(hf_model))


class _UnpackedSequences:
    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(inspect.signature(model.forward).parameters)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        position_ids, mask = given.get("position_ids"), given.get("attention_mask")
        # Do not check position ids with three dims: they count along several directions, for example in images. Also
        # skip the base model under context parallelism: it gets only this rank's positions, which are not consecutive.
        if isinstance(position_ids, Tensor) and position_ids.ndim == 2 and not is_running_sharded():
            counts_on = position_ids.diff(dim=-1) == 1
            if isinstance(mask, Tensor) and mask.shape == position_ids.shape:
                counts_on |= (mask[:, 1:] == 0) | (mask[:, :-1] == 0)
            assert_async(
                counts_on.all(),
                "patch_is_packed_sequence=True, but position_ids restart or jump within a sequence: attention would"
                " cross the borders between packed documents. Set patch_is_packed_sequence=False for packed batches.",
            )
        with assume_unpacked_sequences():
            return forward(*args, **kwargs)

"""Training without packed sequences need not look for them: transformers does, with a host sync per layer."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_fsdp2._torch_compat import assert_async
from lightning_fsdp2.parallel.structure import is_hf_model
from lightning_fsdp2.parallel.tp_parameters import wrap_method


@contextmanager
def assume_unpacked_sequences() -> Iterator[None]:
    """Let transformers take every batch for one without packed sequences inside the block.

    It looks for position ids that restart in two places, and waits for the device to see what it has found: in the
    attention masks of every forward, and in every layer with flash attention at batch size 1.
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


def _answer(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer


def apply_unpacked_sequences(model: nn.Module) -> None:
    """Let every forward of the Hugging Face models in ``model`` run in :func:`assume_unpacked_sequences`.

    Their batches are checked nevertheless: position ids that do not count on from one attended token to the next raise
    a RuntimeError, on an accelerator a device-side assertion, since the host does not wait for the answer.
    """
    for module in filter(is_hf_model, list(model.modules())):
        wrap_method(module, _UnpackedSequences(module))


class _UnpackedSequences:
    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(inspect.signature(model.forward).parameters)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        position_ids, mask = given.get("position_ids"), given.get("attention_mask")
        # of three dims they count in several directions, as for images
        if isinstance(position_ids, Tensor) and position_ids.ndim == 2:
            counts_on = position_ids.diff(dim=-1) == 1
            if isinstance(mask, Tensor) and mask.shape == position_ids.shape:
                counts_on |= (mask[:, 1:] == 0) | (mask[:, :-1] == 0)
            assert_async(
                counts_on.all(),
                "patch_is_packed_sequence=True, but position_ids restart or jump within a sequence: attention would"
                " cross the borders of packed documents. Set patch_is_packed_sequence=False for packed batches.",
            )
        with assume_unpacked_sequences():
            return forward(*args, **kwargs)

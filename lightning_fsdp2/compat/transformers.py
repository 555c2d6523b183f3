"""Everything of transformers that this package uses and that transformers does not promise to keep."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any


@contextmanager
def assume_unpacked_sequences() -> Iterator[None]:
    """Let transformers assume inside the block that no batch has packed sequences.

    Otherwise it looks for position ids that restart, and waits for the device to see the result. It does so in two
    places: for the attention masks of every forward, and in every layer with flash attention at batch size 1.
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
    """Return whether this runs inside of :func:`assume_unpacked_sequences`."""
    from transformers import masking_utils

    return getattr(masking_utils.find_packed_sequence_indices, "func", None) is _answer


def make_unpacked_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward inside of :func:`assume_unpacked_sequences`, and for its recomputation."""
    return nullcontext(), _AssumeAgain()


class _AssumeAgain(AbstractContextManager[None]):
    """Context that can enter :func:`assume_unpacked_sequences` again for every backward through the same graph."""

    def __enter__(self) -> None:
        self.context = assume_unpacked_sequences()
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.context.__exit__(*error)


def _answer(answer: Any, *args: Any, **kwargs: Any) -> Any:
    return answer

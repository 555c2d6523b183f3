"""Division of a batch into the micro-batches that travel through a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_fsdp2.labels import IGNORE_INDEX

_POSITIONS = "position_ids"
"""Name of the tensor whose dim 1 is the batch if it has three dims: [3 or 4, batch, sequence] for images."""

_PATCHES = ("image_grid_thw", "video_grid_thw")
"""Names of tensors that say how many rows of other tensors, such as ``pixel_values``, belong to an image."""

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
"""Names of tensors that list the documents of a whole batch, so that rows cannot be taken out of them."""


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the size of dim 0 of its ``input_ids``, or else of its first tensor.

    ``input_ids`` may be in a mapping inside of the batch.

    Raises:
        ValueError: When the batch has no tensor with a dim.
    """
    found = _find_tensors(batch)
    for _, tensor in sorted(found, key=lambda pair: pair[0] != "input_ids"):
        if tensor.ndim > 0:
            return tensor.size(0)
    raise ValueError(
        f"pp_size: a batch of type {type(batch).__name__} holds no tensor with rows, so it cannot be divided into"
        " micro-batches. Let the data loader return tensors whose dim 0 is the batch."
    )


def divide_batch(batch: Any, number: int) -> list[Any]:
    """Divide a batch into micro-batches with equally many rows.

    Every tensor whose dim 0 is the batch is divided along dim 0, and ``position_ids`` [3 or 4, batch, sequence] along
    dim 1. A list in a mapping that has one item per row, such as texts, is divided, too. Everything else goes whole
    into each micro-batch.

    Args:
        batch: Tensors in mappings, lists, tuples and dataclasses.
        number: Number of micro-batches, which divides the number of rows.

    Raises:
        ValueError: When the batch has documents or images that cannot be divided by rows.
    """
    rows = count_rows(batch)
    size = rows // number
    present = {name for name, _ in _find_tensors(batch)}
    if names := [name for name in _BOUNDARIES if name in present]:
        raise ValueError(
            f"pp_size: the batch has {names[0]!r}, which lists the documents of all its rows, so it cannot be divided"
            " into micro-batches. Pack documents into several rows with `position_ids`, or use pp_size=1."
        )
    if number > 1 and (names := [name for name in _PATCHES if name in present]):
        raise ValueError(
            f"pp_size: the batch has {names[0]!r}, so its images have no dim for the rows of the batch and cannot be"
            " divided into micro-batches. Use pp_microbatches=1, or pp_size=1."
        )

    def take(index: int) -> Callable[[str, Tensor], Tensor]:
        def narrow(name: str, tensor: Tensor) -> Tensor:
            dim = _get_optional_batch_dim(name, tensor, rows)
            return tensor if dim is None else tensor.narrow(dim, index * size, size)

        return narrow

    def take_items(index: int) -> Callable[[Sequence[Any]], Sequence[Any] | None]:
        def cut(items: Sequence[Any]) -> Sequence[Any] | None:
            has_rows = all(isinstance(item, Tensor) and item.ndim > 0 and item.size(0) == rows for item in items)
            return None if has_rows or len(items) != rows else items[index * size : (index + 1) * size]

        return cut

    return [_map_tensors(batch, take(index), take_items(index)) for index in range(number)]


def copy_batch(batch: Any) -> Any:
    """Return a copy of a batch, with copies of its tensors."""
    return _map_tensors(batch, lambda name, tensor: tensor.clone())


def add_rows_without_labels(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return a language modelling batch with ``number`` more rows, which repeat its last row and have no labels.

    Args:
        batch: ``input_ids`` [batch, sequence], ``labels`` of the same shape if they differ from ``input_ids``, and any
            other tensors of the model.
        number: Number of rows to add.
    """
    rows = count_rows(batch)

    def repeat(name: str, tensor: Tensor) -> Tensor:
        dim = _get_optional_batch_dim(name, tensor, rows)
        if dim is None:
            return tensor
        last = tensor.narrow(dim, rows - 1, 1)
        return torch.cat([tensor, last.repeat_interleave(number, dim)], dim)

    longer: dict[str, Tensor] = _map_tensors({"labels": batch["input_ids"], **batch}, repeat)
    longer["labels"][rows:] = IGNORE_INDEX
    return longer


def describe_shapes(batch: Any) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return the shape and dtype of every tensor of a batch: batches that agree in them need equal messages."""
    return tuple((tensor.shape, tensor.dtype) for _, tensor in _find_tensors(batch))


def _get_optional_batch_dim(name: str, tensor: Tensor, rows: int) -> int | None:
    if name == _POSITIONS and tensor.ndim == 3:
        return 1 if tensor.size(1) == rows else None
    return 0 if tensor.ndim > 0 and tensor.size(0) == rows else None


def _find_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch with their names; see :func:`_map_tensors`."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        found.append((name, tensor))
        return tensor

    _map_tensors(batch, note)
    return found


def _map_tensors(
    batch: Any,
    function: Callable[[str, Tensor], Tensor],
    cut: Callable[[Sequence[Any]], Sequence[Any] | None] = lambda items: None,
    *,
    name: str = "",
) -> Any:
    """Return ``batch`` with ``function(name, tensor)`` in place of every tensor.

    Args:
        batch: Tensors in mappings, lists, tuples and dataclasses.
        function: Function of a tensor and its name, which is the key in the innermost mapping around it.
        cut: Function of a list or tuple in a mapping. Its result takes the place of the list, unless it is None.
        name: Name of the tensors that are in no mapping.
    """

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(name, value)
        mapped = {}
        for key, item in value.items():
            part = cut(item) if type(item) in (list, tuple) else None
            mapped[key] = _map_tensors(item, function, cut, name=str(key)) if part is None else part
        try:
            return type(value)(mapped)
        except TypeError:  # the class of the mapping takes other arguments
            return mapped

    return apply_to_collection(batch, (Tensor, Mapping), visit)

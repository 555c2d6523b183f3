"""Functions for nested dicts and lists, such as state dicts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import keystr, tree_leaves, tree_map_only, tree_map_with_path

_MARK = "lightning_fsdp2:sharded:"


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to the tensors in ``value``, and return the results in new containers of the same types."""
    return tree_map_only(Tensor, function, value)


def pop_sharded(value: Any, *, numbered: bool = True) -> tuple[Any, dict[str, Any]]:
    """Separate the DTensors in nested containers from all other values.

    Args:
        value: Nested containers.
        numbered: Whether DTensors get numbers. If not, each gets its path, which is the same for all ranks that hold
            it, whatever other DTensors they hold.

    Returns:
        ``value`` with a placeholder for each DTensor, and the DTensors as ``{number or path: {name: tensor}}``. The
        name is the last key on the path to the tensor.
    """
    sharded: dict[str, Any] = {}

    def mark(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        number = str(len(sharded)) if numbered else keystr(path)
        sharded[number] = {str(getattr(path[-1], "key", "")) if path else "": leaf}
        return _MARK + number

    marked = tree_map_with_path(mark, value)
    return (marked, sharded) if sharded else (value, {})


def is_marked(value: Any) -> bool:
    """Return whether there is a placeholder from :func:`pop_sharded` in ``value``."""
    return any(isinstance(leaf, str) and leaf.startswith(_MARK) for leaf in tree_leaves(value))


def put_sharded(value: Any, sharded: dict[str, Any]) -> Any:
    """Undo :func:`pop_sharded`: replace the placeholders with their DTensors."""

    def put(text: str) -> Any:
        number = text.removeprefix(_MARK)
        return next(iter(sharded[number].values())) if text.startswith(_MARK) and number in sharded else text

    return tree_map_only(str, put, value) if sharded else value


def unflatten(values: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Build nested dicts and lists from a dict that maps paths to values. An integer in a path is a list index."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = value
    nested: dict[str, Any] = _lists_from_numbers(root)
    return nested


def _lists_from_numbers(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _lists_from_numbers(value) for key, value in node.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[index] for index in sorted(items)]
    return items

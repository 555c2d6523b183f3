"""Nested dicts and lists, as state dicts are."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors; dicts, lists and tuples are made anew."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def unflatten(values: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Nest values by their paths; integer steps are list indices."""
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

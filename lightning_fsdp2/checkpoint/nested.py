"""Nested dicts and lists, as state dicts are."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2._torch_compat import tree_map_only


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors; what contains them is made anew, of the same type."""
    return tree_map_only(Tensor, function, value)


def pop_sharded(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part the DTensors in nested dicts from the rest.

    Returns:
        ``value`` without them, and the nested dicts that hold them alone.
    """
    rest: dict[str, Any] = {}
    sharded: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, DTensor):
            sharded[key] = item
        elif isinstance(item, dict) and type(item) is dict:
            rest[key], inner = pop_sharded(item)
            sharded |= {key: inner} if inner else {}
        else:
            rest[key] = item
    return rest, sharded


def merge(value: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`pop_sharded`: nested dicts with the items of both."""
    both = {**value}
    for key, item in other.items():
        both[key] = merge(both[key], item) if isinstance(item, dict) and key in both else item
    return both


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

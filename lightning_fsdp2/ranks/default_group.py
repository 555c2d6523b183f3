"""Process groups and meshes that all Trainers of a process share, for as long as the default process group lives."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_kept: dict[Hashable, Any] = {}
_default_group: Callable[[], Any] | None = None
"""Weak reference to the default group that :data:`_kept` belongs to."""


def keep_with_default_group(key: Hashable, build: Callable[[], T]) -> T:
    """Return the result of ``build`` for ``key``. It is called once in the life of the default process group.

    The results are dropped when the default group is destroyed. Otherwise, the threads and the open files of their
    groups would stay until the process ends.

    Args:
        key: Name of the result. It must not refer to the default group.
        build: Function that builds the result, such as a process group.
    """
    global _default_group
    world: Any = dist.group.WORLD
    if _default_group is None or _default_group() is not world:
        _kept.clear()
        _default_group = weakref.ref(world, lambda _: _kept.clear())
    if key not in _kept:
        _kept[key] = build()
    result: T = _kept[key]
    return result

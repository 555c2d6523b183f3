"""Handling of the caches in which layers store keys, values or states for later tokens."""

import inspect
from typing import Any

from torch import nn

from lightning_fsdp2.compat.transformers import CACHE_NAMES, is_cache

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CacheArguments:
    """Helper that finds the caches among the arguments of a layer's forward.

    It finds only caches that the layer itself fills. Some layers only read the keys and values of another layer.
    transformers marks these layers, and this class finds no caches for them.
    """

    def __init__(self, layer: nn.Module) -> None:
        parameters = list(inspect.signature(layer.forward).parameters)
        names = () if getattr(layer, "_can_checkpoint_with_cache", False) else CACHE_NAMES
        self.places = {*names, *(parameters.index(name) for name in names if name in parameters)}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the caches among the given arguments."""
        values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return [value for place, value in values if self._is_cache(place, value)]

    def drop(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return the given arguments with each cache replaced by None."""
        return (
            tuple(None if self._is_cache(index, value) else value for index, value in enumerate(args)),
            {name: None if self._is_cache(name, value) else value for name, value in kwargs.items()},
        )

    def _is_cache(self, place: int | str, value: Any) -> bool:
        return place in self.places and is_cache(value)


def is_filled(cache: Any) -> bool:
    """Return whether a cache already holds keys, values or states of earlier tokens."""
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # raised by caches that have no length, because they hold states instead of keys and values
        return bool(cache.has_previous_state())

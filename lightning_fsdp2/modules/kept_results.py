"""Results that a layer's forward keeps for its recomputation, although the recomputation could compute them again.

With activation checkpointing, backward recomputes a layer. Some results of the forward are small, but need
communication or make the host wait for the device, such as the numbers of rows that experts get.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class _Keeper(Protocol):
    def __call__(self, compute: Callable[[], Result], is_kept_by_selective: bool) -> Result: ...


_keeper: ContextVar[_Keeper | None] = ContextVar("keeper", default=None)


def keep(compute: Callable[[], Result], *, is_kept_by_selective: bool) -> Result:
    """Return ``compute()``, but when a layer is recomputed, return what the same call returned in the forward.

    Calls of the same layer are matched by their order.

    Args:
        compute: Function whose result needs no gradient.
        is_kept_by_selective: Whether ``compute`` only runs one operation whose result selective checkpointing keeps
            anyway, such as a collective. Under selective checkpointing, the recomputation then calls ``compute`` again,
            because torch matches kept results with the calls of operations, and would otherwise lose count.
    """
    keeper = _keeper.get()
    return compute() if keeper is None else keeper(compute, is_kept_by_selective)


def is_keeping() -> bool:
    """Return whether a layer is running whose forward keeps results for a recomputation, or its recomputation."""
    return _keeper.get() is not None


def make_keeping_contexts(*, is_selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for a layer's forward, and one for its recomputations. The second can be entered repeatedly.

    Args:
        is_selective: Whether selective checkpointing recomputes the layer, and keeps some results itself.
    """
    results: list[Any] = []

    def record(compute: Callable[[], Result], is_kept_by_selective: bool) -> Result:
        result = compute()
        if not (is_selective and is_kept_by_selective):
            results.append(result)
        return result

    def make_repeat() -> _Keeper:
        left = iter(results)

        def repeat(compute: Callable[[], Result], is_kept_by_selective: bool) -> Result:
            if is_selective and is_kept_by_selective:
                return compute()
            for result in left:
                return result
            raise RuntimeError(
                "activation_checkpointing: a recomputed layer needs a result that its forward has not kept. Use"
                " activation_checkpointing=False, or a forward that always runs the same operations."
            )

        return repeat

    return _use(record), Repeatable(lambda: _use(make_repeat()))


@contextmanager
def _use(keeper: _Keeper) -> Iterator[None]:
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)


class Repeatable(AbstractContextManager[None]):
    """Context that can be entered once per backward through the same graph. Each time, it makes a new context."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

"""Results that a layer's forward keeps for its recomputation, although the recomputation could compute them again.

With activation checkpointing, backward recomputes a layer. Some results of the forward are small, but need
communication or make the host wait for the device, such as the numbers of rows that experts get.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class _Keeper(Protocol):
    def __call__(self, compute: Callable[[], Result], is_operation: bool) -> Result: ...


_keeper: ContextVar[_Keeper | None] = ContextVar("keeper", default=None)


def keep(compute: Callable[[], Result], *, is_operation: bool = True) -> Result:
    """Return ``compute()``. In the recomputation of a layer, return what the same call returned in the forward.

    Calls of the same layer are matched by their order.

    Args:
        compute: Function whose result needs no gradient.
        is_operation: Whether the function only runs an operation of torch. Selective checkpointing keeps the results of
            operations itself. It supplies them when the same operations run again, so the recomputation calls such a
            function again.
    """
    keeper = _keeper.get()
    return compute() if keeper is None else keeper(compute, is_operation)


def make_keeping_contexts(*, of_operations: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for a layer's forward, and one for its recomputations. The second can be entered repeatedly.

    Args:
        of_operations: Whether to keep the results of calls with ``is_operation=True`` as well as the others.
    """
    results: list[Any] = []

    def record(compute: Callable[[], Result], is_operation: bool) -> Result:
        result = compute()
        if of_operations or not is_operation:
            results.append(result)
        return result

    def make_repeat() -> _Keeper:
        left = iter(results)

        def repeat(compute: Callable[[], Result], is_operation: bool) -> Result:
            if is_operation and not of_operations:
                return compute()
            for result in left:
                return result
            raise RuntimeError(
                "activation_checkpointing: a recomputed layer needs a result that its forward has not kept. Use"
                " activation_checkpointing=False, or a forward that always runs the same operations."
            )

        return repeat

    return _Keeping(lambda: record), _Keeping(make_repeat)


class _Keeping(AbstractContextManager[None]):
    """Context in which :func:`keep` calls a keeper. A new keeper is made each time that the context is entered."""

    def __init__(self, make: Callable[[], _Keeper]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._token = _keeper.set(self._make())

    def __exit__(self, *error: Any) -> None:
        _keeper.reset(self._token)

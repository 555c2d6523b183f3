"""Let the ``zero_grad`` of an optimizer reach gradients that are not in ``parameter.grad``."""

from collections.abc import Callable

from torch.optim import Optimizer


def extend_zero_grad(optimizer: Optimizer, clear: Callable[[], None]) -> None:
    """Call ``clear`` behind the ``zero_grad`` of ``optimizer``; torch has no hook for that."""
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        clear()

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]

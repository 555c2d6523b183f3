"""Access to private parts of autograd, for gradients of sharded parameters. Tested with torch 2.11 to 2.15."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.torch import is_in_backward


def count_gradient_hooks(parameter: Tensor) -> int:
    """Return how many hooks ``parameter`` has on its gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has a hook on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class UnreducedGradient(DTensor):
    """Placeholder in ``parameter.grad`` for a gradient that is not reduced over the ranks yet.

    Without the placeholder, ``parameter.grad`` would be None, although the parameter has a gradient in one process.
    Every use of the placeholder except its attributes, such as ``shape``, is an error.
    """

    __slots__ = ()

    remedy: ClassVar[str] = (
        "Use gradients in `on_before_optimizer_step`; or in `on_after_backward`, since a module or callback with this"
        " hook makes every micro-batch reduce gradients; or set FSDP2Config(defer_fsdp_grad_sync=False), if there are"
        " no replicas. In a plain loop, leave out `defer_grad_sync`."
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        cls._refuse()

    @property
    def _local_tensor(self) -> NoReturn:  # type: ignore[override]
        self._refuse()

    @property
    def _spec(self) -> NoReturn:  # type: ignore[override]
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise ValueError(
            "A gradient was used in the middle of an accumulation window, but gradients are reduced over the ranks only"
            f" in the last micro-batch. {cls.remedy}"
        )


@contextmanager
def replace_backward_inputs(replace: Callable[[Sequence[Tensor], bool], Sequence[Tensor]]) -> Iterator[None]:
    """Let ``replace`` choose the tensors to which backwards in the block compute gradients.

    ``replace`` gets the tensors that a call of ``backward(inputs=...)`` or ``torch.autograd.grad`` names, and whether
    the gradients are added to ``.grad``, as by ``backward``. It does not see calls inside a backward. torch has no
    public hook for the beginning of a backward.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def run_backward(
        outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, inputs: Any, *args: Any, **options: Any
    ) -> Any:
        if inputs and not is_in_backward():
            inputs = tuple(replace(inputs, options["accumulate_grad"]))
        return run(outputs, gradients, retain_graph, create_graph, inputs, *args, **options)

    autograd._engine_run_backward = run_backward
    try:
        yield
    finally:
        autograd._engine_run_backward = run

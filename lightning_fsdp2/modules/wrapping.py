"""Replacement of a module's methods in place, so that checkpoints, hooks and recomputation still see one module."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_method(module: nn.Module, wrapper: Callable[..., Any], name: str = "forward") -> None:
    """Replace the method ``name`` of this instance with ``wrapper(method, ...)``.

    Like ``fully_shard``, this function replaces the module's class with a subclass. Activation checkpointing in the
    layers of transformers also covers the ``forward`` of a subclass, so recomputation includes the wrapper. Hooks would
    not work, because recomputation stops early with an exception, after which torch does not call forward hooks.
    """
    if name in module.__dict__:  # the method was already replaced on this instance
        method = getattr(module, name)
        setattr(module, name, functools.wraps(method)(functools.partial(wrapper, method)))
        return
    base = type(module)
    attribute = f"_lightning_fsdp2_{name}_{len(base.__mro__)}"
    module.__dict__[attribute] = wrapper
    module.__class__ = _make_wrapping_class(base, attribute, name)  # type: ignore[arg-type]


def show_signature(method: Any) -> None:
    """Let code that unwraps ``method`` once see the innermost method's signature.

    Lightning does so to find out which arguments to pass to a step, such as ``batch_idx``.
    """
    getattr(method, "__func__", method).__wrapped__ = inspect.unwrap(method)


@functools.cache
def _make_wrapping_class(base: type[nn.Module], attribute: str, name: str) -> type[nn.Module]:
    """Make the subclass of ``base`` that calls the wrapper.

    The subclass is cached, so that all modules of class ``base`` share it and its compiled code.
    """
    method = getattr(base, name)

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[attribute](functools.partial(method, self), *args, **kwargs)

    show_signature(wrapped)
    return type(base.__name__, (base,), {name: wrapped, "__module__": base.__module__, "__doc__": base.__doc__})

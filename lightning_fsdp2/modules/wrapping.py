"""Methods of a module replaced in place, so that checkpoints, hooks and recomputation still see one module."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_method(module: nn.Module, wrapper: Callable[..., Any], name: str = "forward") -> None:
    """Replace ``module.forward`` (or the method ``name``) of this instance with ``wrapper(method, ...)``.

    As ``fully_shard`` does, this gives the module its own class: the layers of transformers put activation
    checkpointing around the ``forward`` of any subclass, and recomputation must include the wrapper. Hooks would not
    do: they are not called after an exception, and recomputation ends with one on purpose.
    """
    if name in module.__dict__:  # replaced for this instance before
        method = getattr(module, name)
        setattr(module, name, functools.wraps(method)(functools.partial(wrapper, method)))
        return
    base = type(module)
    attribute = f"_lightning_fsdp2_{name}_{len(base.__mro__)}"
    module.__dict__[attribute] = wrapper
    module.__class__ = _make_wrapping_class(base, attribute, name)  # type: ignore[arg-type]


@functools.cache
def _make_wrapping_class(base: type[nn.Module], attribute: str, name: str) -> type[nn.Module]:
    """Make one class for all modules of a class, so that code compiled for one of them serves the others."""
    method = getattr(base, name)

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[attribute](functools.partial(method, self), *args, **kwargs)

    return type(base.__name__, (base,), {name: wrapped, "__module__": base.__module__, "__doc__": base.__doc__})

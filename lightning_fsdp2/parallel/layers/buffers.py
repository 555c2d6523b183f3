"""Handling of buffers that a layer's forward changes, such as running statistics, under activation checkpointing.

When backward recomputes a layer, the layer must see the values that its buffers had before the original forward. The
recomputation must not change the buffers' current values.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_fsdp2.compat.torch import BatchNormBase
from lightning_fsdp2.modules.structure import get_class_name

_SMALL = 2**16
"""Size in bytes up to which every forward copies a buffer. Larger buffers are usually constants, such as causal masks,
and are no longer copied once a forward has left them unchanged."""

_Slot = tuple[nn.Module, str]


@dataclass
class _Buffer:
    """State of a buffer before a forward."""

    tensor: Tensor
    version: int
    copy: Tensor | None

    def is_changed(self, tensor: Tensor | None) -> bool:
        return tensor is not self.tensor or tensor._version != self.version


class LayerBuffers:
    """Buffers of a layer, which are copied in each forward so that the recomputation sees the old values.

    A large buffer is no longer copied once a forward has left it unchanged.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._constants: set[_Slot] = set()
        """Large buffers that an earlier forward has left unchanged, and that are therefore no longer copied."""

    def has_any(self) -> bool:
        return any(module._buffers for module in self.layer.modules())

    def make_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a context for a forward, and a context for all recomputations of this forward.

        Raises:
            ValueError: When the forward's context ends, if the forward has changed a large buffer that an earlier
                forward had left unchanged.
        """
        copies: dict[_Slot, Tensor] = {}
        return self._record(copies), _Repetition(copies)

    @contextmanager
    def refuse_changes(self) -> Iterator[None]:
        """Raise an error if a compiled forward inside the ``with`` block changes a buffer.

        Compiled code also recomputes the layer for backward, and the recomputation could read the new value of the
        buffer. Running statistics of torch's own norms are allowed to change, because a forward that changes them does
        not read them.

        Raises:
            ValueError: At the end of the ``with`` block, if the forward has changed any other buffer.
        """
        buffers = {slot: _Buffer(tensor, tensor._version, None) for slot, tensor in self._list()}
        yield
        for (module, name), buffer in buffers.items():
            if buffer.is_changed(module._buffers.get(name)) and not isinstance(module, BatchNormBase):
                raise ValueError(
                    f"activation_checkpointing with enable_compile=True: the forward of {get_class_name(self.layer)}"
                    f" changes its buffer {name!r}, and compiled code may recompute the layer with the buffer's new"
                    " value. Use only one of the two flags, or exclude this layer (activation_checkpointing_scope)."
                )

    def _list(self) -> Iterator[tuple[_Slot, Tensor]]:
        for module in self.layer.modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    yield (module, name), tensor

    @contextmanager
    def _record(self, copies: dict[_Slot, Tensor]) -> Iterator[None]:
        buffers = {
            slot: _Buffer(tensor, tensor._version, None if slot in self._constants else tensor.detach().clone())
            for slot, tensor in self._list()
        }
        yield
        for slot, buffer in buffers.items():
            module, name = slot
            is_changed = buffer.is_changed(module._buffers.get(name))
            if buffer.copy is None:
                if is_changed:
                    self._refuse(name, buffer.tensor)
            elif is_changed or buffer.copy.nbytes <= _SMALL:
                copies[slot] = buffer.copy
            else:
                self._constants.add(slot)

    def _refuse(self, name: str, tensor: Tensor) -> None:
        raise ValueError(
            f"activation_checkpointing: the forward of {get_class_name(self.layer)} changes its buffer {name!r}"
            f" ({tensor.nbytes} bytes), which an earlier forward did not change. The buffer was therefore not copied,"
            " and backward cannot recompute the layer with its previous value. Change the buffer in the first forward"
            " too, or exclude this layer (activation_checkpointing_scope, activation_checkpointing=False)."
        )


class _Repetition(AbstractContextManager[None]):
    """Context for recomputing a layer with the values that its buffers had before the original forward.

    Inside the context, copies with these old values replace the buffers. The buffers themselves keep their current
    values. The context can be entered several times.
    """

    def __init__(self, copies: dict[_Slot, Tensor]) -> None:
        self.copies = copies

    def __enter__(self) -> None:
        self.replaced = {(module, name): module._buffers[name] for module, name in self.copies}
        for (module, name), copy in self.copies.items():
            module._buffers[name] = copy.clone()

    def __exit__(self, *_: object) -> None:
        for (module, name), tensor in self.replaced.items():
            module._buffers[name] = tensor

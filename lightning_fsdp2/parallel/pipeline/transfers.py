"""Transfers of tensors between the ranks of a pipeline."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 6
_MAX_TENSORS = 2
_HEADER_SIZE = 1 + _MAX_TENSORS * (2 + _MAX_DIMS)


@dataclass(frozen=True)
class _Form:
    """Shape and dtype of a tensor that another rank sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Arrival:
    """Tensors that are on their way to this rank."""

    tensors: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        """Wait until the tensors are there, and return them. On an accelerator, only the current stream waits."""
        for work in self.works:
            work.wait()
        return self.tensors


class Transfers:
    """Sender and receiver of tensors between the ranks of one pipeline.

    A receiver has to know shapes and dtypes in advance. The sender tells them in a header on the CPU, the first time
    that it sends tensors under a key. So batches of another length work, and batches that look like earlier ones
    exchange no headers.

    Args:
        group: Process group of the ranks along the pipeline.
        control: Group of the same ranks for tensors on the CPU.
        device: Device of this rank.

    Attributes:
        elements: Number of elements that this rank has sent so far, without headers.
    """

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._control, self._device = group, control, device
        self._told: dict[Hashable | None, list[_Form]] = {}
        self._forms: dict[Hashable, list[_Form]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self.elements = 0

    def send(self, tensors: Sequence[Tensor], rank: int, *, tag: int, key: Hashable | None = None) -> None:
        """Start to send tensors to a rank of the pipeline, which receives them with the same tag and key.

        Args:
            tensors: Tensors of any float dtype.
            rank: Rank within the pipeline.
            tag: Number that tells apart tensors that are on their way to the same rank at the same time.
            key: Key under which the receiver remembers the shapes. None sends a header in any case.

        Raises:
            ValueError: When tensors of other shapes were sent under this key.
        """
        forms = [_Form(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if self._told.get(key, forms) != forms:
            now, before = map(_describe, (forms, self._told[key]))
            raise ValueError(
                f"pp_size: a micro-batch has hidden states of {now}, but an earlier micro-batch of an equal shape had"
                f" {before}, which the next stage expects. A step must not change the length or the dtype of its"
                " micro-batch; change the batch before `training_step`, or use pp_size=1."
            )
        if key not in self._told:
            if key is not None:
                self._told[key] = forms
            header = _pack_header(tensors)
            self._sent.append((dist.isend(header, group=self._control, group_dst=rank, tag=tag), header))
        self.send_known(tensors, rank, tag=tag)

    def receive(self, rank: int, *, tag: int, key: Hashable | None = None) -> Arrival:
        """Start to receive what a rank of the pipeline sends with the same tag and key; see :meth:`send`."""
        forms = self._forms.get(key) if key is not None else None
        if forms is None:
            header = torch.empty(_HEADER_SIZE, dtype=torch.int64)
            dist.recv(header, group=self._control, group_src=rank, tag=tag)
            forms = _unpack_header(header)
            if key is not None:
                self._forms[key] = forms
        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms]
        return self.receive_known(tensors, rank, tag=tag)

    def send_known(self, tensors: Sequence[Tensor], rank: int, *, tag: int) -> None:
        """Start to send tensors whose shapes and dtypes the receiver knows."""
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for number, tensor in enumerate(tensors):
            tensor = tensor.detach().contiguous()
            self.elements += tensor.numel()
            work = dist.isend(tensor, group=self._group, group_dst=rank, tag=_MAX_TENSORS * tag + number)
            self._sent.append((work, tensor))  # the tensor must stay in memory until it is sent

    def receive_known(self, tensors: Sequence[Tensor], rank: int, *, tag: int) -> Arrival:
        """Start to receive tensors into ``tensors``, which must be contiguous."""
        works = [
            dist.irecv(tensor, group=self._group, group_src=rank, tag=_MAX_TENSORS * tag + number)
            for number, tensor in enumerate(tensors)
        ]
        return Arrival(list(tensors), works)

    def finish(self) -> None:
        """Wait until everything is sent. On an accelerator, only the current stream waits."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def _describe(forms: Sequence[_Form]) -> str:
    return ", ".join(f"{form.dtype} {form.shape}" for form in forms)


def _pack_header(tensors: Sequence[Tensor]) -> Tensor:
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *[0] * (_MAX_DIMS - tensor.ndim)]
    return torch.tensor([*numbers, *[0] * (_HEADER_SIZE - len(numbers))])


def _unpack_header(header: Tensor) -> list[_Form]:
    count, *numbers = header.tolist()
    size = 2 + _MAX_DIMS
    parts = [numbers[first : first + size] for first in range(0, count * size, size)]
    return [_Form(tuple(shape[:ndim]), _DTYPES[dtype]) for dtype, ndim, *shape in parts]

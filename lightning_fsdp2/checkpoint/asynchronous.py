"""Write checkpoints while training goes on: from copies on the host, in a thread."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp2._torch_compat import StateDictStager
from lightning_fsdp2.checkpoint.coordination import on_every_rank, raise_first
from lightning_fsdp2.checkpoint.nested import map_tensors

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread of its own.

    Tensors of the host are copied at once. From an accelerator they are copied beside the next forward and backward,
    into pinned memory. The memory of the copies is kept from one save to the next.

    Every rank has one and calls the same methods in the same order. A failure is raised on the main thread, in the same
    call on all ranks.

    Args:
        device: What the tensors are on.
        group: For the ranks to agree; nothing else communicates on it while they do.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._stager = StateDictStager(pin_memory=device.type == "cuda")
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._device = device
        self._group = group
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: Future[dict[str, Any]] | None = None
        self._save: Future[None] | None = None
        self._then: list[Callable[[], None]] = []
        self._versions: list[tuple[Tensor, int]] = []

    @property
    def is_writing(self) -> bool:
        """Whether a save has been started that was not seen to end."""
        return self._save is not None

    def start(self, tensors: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy ``tensors``, nested dicts, and run ``write`` on the copy in the thread."""
        self.wait()
        if self._stream is None:
            copies = self._stager.stage(tensors)
            self._save = self._pool.submit(write, copies)
            return
        # the copies run on a stream of their own, which knows nothing of what is still being computed
        torch.get_device_module(self._device).synchronize(self._device)
        map_tensors(lambda tensor: self._versions.append((tensor, tensor._version)), tensors)
        self._copies = copying = self._pool.submit(self._copy_beside, tensors, self._stream)
        self._save = self._pool.submit(lambda: write(copying.result()))

    def wait_for_copies(self) -> None:
        """Wait until what is being saved may be changed.

        Raises:
            RuntimeError: When it was, before this was called: the copy may hold something of both.
        """
        if self._copies is None:
            return
        self._copies.exception()  # waits; a failure is that of the save
        self._copies = None
        changed = any(tensor._version != version for tensor, version in self._versions)
        self._versions.clear()
        if changed:
            raise RuntimeError(
                "Weights or optimizer states were changed in place between a save with CheckpointConfig(async_save="
                "True) and the next optimizer step, while they were being copied. Change them before the checkpoint is"
                " saved, or use async_save=False."
            )

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` once what is being written is complete, or now; never if it fails."""
        if self._save is None:
            action()
        else:
            self._then.append(action)

    def poll(self) -> None:
        """End a save that is complete on all ranks, without waiting for one that is not.

        Raises:
            Exception: On every rank, that of the first rank whose write failed.
        """
        if self._save is None:
            return
        is_done = torch.tensor(int(self._save.done()))
        if dist.is_initialized():
            dist.all_reduce(is_done, op=dist.ReduceOp.MIN, group=self._group)
        if is_done:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            Exception: On every rank, that of the first rank whose write failed.
        """
        if self._save is None:
            return
        save, actions = self._save, self._then
        self._save, self._then = None, []
        raise_first(_get_failure(save), self._group)
        on_every_rank(lambda: [action() for action in actions], self._group)

    def settle(self) -> None:
        """Wait for the save in progress where other ranks may be gone: nothing is agreed on, a failure is logged."""
        if self._save is None:
            return
        save, actions = self._save, self._then
        self._save, self._then = None, []
        if (failure := _get_failure(save)) is not None:
            log.error("A checkpoint could not be written: %s", failure)
            return
        for action in actions:
            action()

    def _copy_beside(self, tensors: dict[str, Any], stream: torch.Stream) -> dict[str, Any]:
        with stream:
            copies: dict[str, Any] = self._stager.stage(tensors, non_blocking=True)
        stream.synchronize()
        return copies


def _get_failure(save: "Future[None]") -> Exception | None:
    failure = save.exception()
    if failure is None or isinstance(failure, Exception):
        return failure
    raise failure

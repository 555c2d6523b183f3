"""Write checkpoints while training goes on: from copies on the host, in a thread."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_fsdp2.checkpoint.nested import map_tensors
from lightning_fsdp2.compat.torch import StateDictStager
from lightning_fsdp2.ranks.coordination import on_every_rank

log = logging.getLogger(__name__)

NICENESS = 10
"""Of the thread that writes, where training has 0."""


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread of its own.

    Tensors of the host are copied at once. From an accelerator they are copied beside the next forward and backward,
    into pinned memory. The memory of the copies is kept from one save to the next.

    Every rank has one and calls the same methods in the same order. A failure is raised on the main thread, in the same
    call on all ranks.

    Args:
        device: What the tensors are on.
        group: For the main threads to agree; nothing else communicates on it while they do.
        thread_group: The same for the threads that write.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        thread_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._stager = StateDictStager(pin_memory=device.type == "cuda")
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._device = device
        self._group = group
        self._thread_group = thread_group
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_yield_to_training)
        self._copies: Future[dict[str, Any]] | None = None
        self._save: Future[None] | None = None
        self._then: list[Callable[[], None]] = []
        self._hook: RemovableHandle | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save has been started that was not seen to end."""
        return self._save is not None

    def start(self, tensors: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy ``tensors``, nested dicts, and run ``write`` on the copy in the thread."""
        self.wait()
        copies: Future[dict[str, Any]] = Future()
        self._copies, stream = copies, self._stream
        if stream is None:
            _run_into(copies, lambda: self._stager.stage(tensors))
        else:
            # the copies run on a stream of their own, which knows nothing of what is still being computed
            torch.get_device_module(self._device).synchronize(self._device)
            # buffers change in the next forward
            tensors = map_tensors(lambda t: t if isinstance(t, DTensor) else t.detach().to("cpu", copy=True), tensors)
            versions = _get_versions(tensors)
            self._pool.submit(_run_into, copies, lambda: self._copy_beside(tensors, versions, stream))
            self._hook = register_optimizer_step_pre_hook(self._wait_before_step)
        # copies that a rank could not make are no checkpoint, and the others must not wait for its part
        self._save = self._pool.submit(lambda: write(on_every_rank(copies.result, self._thread_group)))

    def wait_for_copies(self) -> None:
        """Wait until what is being saved may be changed."""
        if self._copies is not None:
            self._copies.exception()  # waits; a failure is that of the save
            self._copies = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

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
        save, actions = self._save, self._forget()
        on_every_rank(save.result, self._group)
        on_every_rank(lambda: [action() for action in actions], self._group)

    def settle(self) -> None:
        """Wait for the save in progress where other ranks may be gone: nothing is agreed on, a failure is logged."""
        if self._save is None:
            return
        failure = self._save.exception()
        actions = self._forget()
        if failure is not None:
            log.error("A checkpoint could not be written: %s", failure)
            return
        for action in actions:
            action()

    def _forget(self) -> list[Callable[[], None]]:
        self.wait_for_copies()
        actions = self._then
        self._save, self._then = None, []
        return actions

    def _wait_before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Hook of all optimizers, for those that are stepped by hand, behind Lightning's back."""
        # Lightning's own steps compute forward and backward in a closure, beside the copies, and wait behind it
        has_closure = len(args) > 1 or kwargs.get("closure") is not None  # the first is the optimizer again
        if not has_closure:
            self.wait_for_copies()

    def _copy_beside(
        self, tensors: dict[str, Any], versions: list[tuple[Tensor, int]], stream: torch.Stream
    ) -> dict[str, Any]:
        with stream:
            copies: dict[str, Any] = self._stager.stage(tensors, non_blocking=True)
        stream.synchronize()
        if any(tensor._version != version for tensor, version in versions):
            raise RuntimeError(
                "Weights or optimizer states were changed in place between a save with CheckpointConfig(async_save="
                "True) and the next optimizer step, while they were being copied. Change them before the checkpoint is"
                " saved, or use async_save=False."
            )
        return copies


def _yield_to_training() -> None:
    """Let this thread have the time that training leaves of the cores."""
    if sys.platform == "linux":  # elsewhere a priority is that of the process
        with suppress(OSError):  # where a sandbox forbids it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _run_into(future: "Future[Any]", action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except Exception as error:
        future.set_exception(error)


def _get_versions(tensors: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """The sharded tensors with the counters of their changes."""
    sharded: list[Tensor] = []
    map_tensors(lambda tensor: sharded.append(tensor) if isinstance(tensor, DTensor) else None, tensors)
    return [(tensor, tensor._version) for tensor in sharded]

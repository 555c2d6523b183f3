"""Write checkpoints in a thread, from copies on the host, while training continues."""

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
"""Niceness of the writing thread; training has 0."""


class BackgroundWriter:
    """Writer of one checkpoint at a time, in its own thread.

    Tensors on the host are copied at once. Tensors on an accelerator are copied into pinned memory while the next
    forward and backward run. The next save reuses the memory of the copies.

    Every rank has a writer and calls the same methods in the same order. A failure is raised on the main thread, in the
    same call on all ranks.

    Args:
        device: Device of the tensors.
        group: Process group for coordination of the main threads; nothing else may communicate on it meanwhile.
        thread_group: Process group for coordination of the writing threads; nothing else may communicate on it.
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
        """Whether a save was started that :meth:`poll`, :meth:`wait` or :meth:`settle` has not finished yet."""
        return self._save is not None

    def start(self, tensors: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy the nested dicts ``tensors``, and run ``write`` on the copy in the thread."""
        self.wait()
        copies: Future[dict[str, Any]] = Future()
        self._copies, stream = copies, self._stream
        if stream is None:
            _run_into(copies, lambda: self._stager.stage(tensors))
        else:
            # the copies run on their own stream, which does not wait for pending computations
            torch.get_device_module(self._device).synchronize(self._device)
            # buffers are copied now, since the next forward changes them
            tensors = map_tensors(lambda t: t if isinstance(t, DTensor) else t.detach().to("cpu", copy=True), tensors)
            versions = _get_versions(tensors)
            self._pool.submit(_run_into, copies, lambda: self._copy_beside(tensors, versions, stream))
            self._hook = register_optimizer_step_pre_hook(self._wait_before_step)
        # if a rank cannot copy, there is no checkpoint, and the other ranks must not wait for its part
        self._save = self._pool.submit(lambda: write(on_every_rank(copies.result, self._thread_group)))

    def wait_for_copies(self) -> None:
        """Wait until the tensors that are being saved may be changed."""
        if self._copies is not None:
            self._copies.exception()  # waits; a failure is raised by the save
            self._copies = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` once the save in progress succeeds, or now if there is none."""
        if self._save is None:
            action()
        else:
            self._then.append(action)

    def poll(self) -> None:
        """Finish the save in progress if it is complete on all ranks, without waiting for it.

        Raises:
            Exception: On every rank, the error of the first rank whose write failed.
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
            Exception: On every rank, the error of the first rank whose write failed.
        """
        if self._save is None:
            return
        save, actions = self._save, self._forget()
        on_every_rank(save.result, self._group)
        on_every_rank(lambda: [action() for action in actions], self._group)

    def settle(self) -> None:
        """Wait for the save in progress without communication, since other ranks may be gone; log a failure."""
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
        """Wait for the copies before a manual step, which Lightning does not run; a pre-step hook of all optimizers."""
        # Lightning's own steps run forward and backward in a closure, during the copies, and wait afterwards
        has_closure = len(args) > 1 or kwargs.get("closure") is not None  # the first argument is the optimizer again
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
    """Lower this thread's priority, so that it uses the CPU time that training leaves."""
    if sys.platform == "linux":  # elsewhere a priority applies to the whole process
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _run_into(future: "Future[Any]", action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except Exception as error:
        future.set_exception(error)


def _get_versions(tensors: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """Return the sharded tensors with their version counters."""
    sharded: list[Tensor] = []
    map_tensors(lambda tensor: sharded.append(tensor) if isinstance(tensor, DTensor) else None, tensors)
    return [(tensor, tensor._version) for tensor in sharded]

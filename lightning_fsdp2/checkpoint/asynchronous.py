"""Write checkpoints in a background thread, from copies in host memory, while training continues."""

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
"""Niceness of the background thread. The training threads have 0."""


class BackgroundWriter:
    """Writer that writes one checkpoint at a time in a background thread.

    Host tensors are copied immediately. Tensors on an accelerator are copied into pinned memory while the next forward
    and backward run. The next save reuses the memory of the copies.

    Every rank must have a writer and call its methods in the same order. An error in a rank's background thread is
    raised on the main threads of all ranks, by the same method call.

    Args:
        device: Device of the tensors.
        group: Process group for messages between the main threads. Nothing else may use it during a save.
        thread_group: Process group for messages between the background threads. Nothing else may use it.
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
        """Whether a save is in progress: started, and not yet ended by :meth:`poll`, :meth:`wait` or :meth:`settle`."""
        return self._save is not None

    def start(self, tensors: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy the tensors in the nested dicts ``tensors``, and run ``write`` on the copies in the background."""
        self.wait()
        copies: Future[dict[str, Any]] = Future()
        self._copies, stream = copies, self._stream
        if stream is None:
            _run_into(copies, lambda: self._stager.stage(tensors))
        else:
            # synchronise first, because the copies run on a stream that does not wait for other computations
            torch.get_device_module(self._device).synchronize(self._device)
            # copy buffers and other plain tensors now, since the next forward may change them
            tensors = map_tensors(lambda t: t if isinstance(t, DTensor) else t.detach().to("cpu", copy=True), tensors)
            versions = _get_versions(tensors)
            self._pool.submit(_run_into, copies, lambda: self._copy_beside(tensors, versions, stream))
            self._hook = register_optimizer_step_pre_hook(self._wait_before_step)
        # If the copy fails on one rank, raise the error on all ranks before they call `write`. Otherwise, the other
        # ranks would wait in `write` for the failed rank.
        self._save = self._pool.submit(lambda: write(on_every_rank(copies.result, self._thread_group)))

    def wait_for_copies(self) -> None:
        """Wait until all tensors are copied, so that an optimizer step may change them."""
        if self._copies is not None:
            # only wait for the copies: if one failed, the background write raises the error
            self._copies.exception()
            self._copies = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` now or, if a save is in progress, once the save has succeeded."""
        if self._save is None:
            action()
        else:
            self._then.append(action)

    def poll(self) -> None:
        """Finish the save in progress if it has ended on all ranks. Return without waiting if it has not.

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
        """Wait for the save in progress without contacting other ranks, which may be dead. Log its error, if any."""
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
        """Wait until all tensors are copied. If the optimizer step has a closure, leave the wait to the closure.

        torch calls this hook before every optimizer step.
        """
        # Lightning passes a closure that runs forward and backward. The strategy waits for the copies at the end of the
        # closure, so this hook does not wait.
        has_closure = len(args) > 1 or kwargs.get("closure") is not None  # args[0] is the optimizer
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
                "True) and the next optimizer step, while they were being copied. Change them before the save, or use"
                " async_save=False."
            )
        return copies


def _yield_to_training() -> None:
    """Lower the priority of this thread below that of the training threads."""
    if sys.platform == "linux":  # on other systems, `setpriority` would affect the whole process
        with suppress(OSError):  # a sandbox may forbid changing the priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _run_into(future: "Future[Any]", action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except Exception as error:
        future.set_exception(error)


def _get_versions(tensors: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """Return each sharded tensor with its version counter, to detect changes to the tensor while it is being copied.

    Every in-place change increments the counter.
    """
    sharded: list[Tensor] = []
    map_tensors(lambda tensor: sharded.append(tensor) if isinstance(tensor, DTensor) else None, tensors)
    return [(tensor, tensor._version) for tensor in sharded]

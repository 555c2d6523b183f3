"""Settings of FSDP2 units while a pipeline runs several backwards of a batch."""

from collections.abc import Sequence
from contextlib import ExitStack

from torch.distributed.fsdp import FSDPModule

from lightning_fsdp2.parallel.data.gradients import defer_unit_sync


class BackwardFlags:
    """Settings of FSDP2 units, so that a batch reduces its gradients and frees its weights once, in its last backward.

    Args:
        units: FSDP2 units.
        defers: Whether to defer the reduction to the last backward. False if the caller has already deferred it.
        reduces_each: Whether every backward reduce-scatters its gradients, so that only the all-reduce over the
            replicas (HSDP) is deferred, to the last backward of each stage.
        frees_once: Whether units stay gathered until the last backward, instead of until their own backward.
    """

    def __init__(self, units: Sequence[FSDPModule], *, defers: bool, reduces_each: bool, frees_once: bool) -> None:
        self._units, self._defers, self._reduces_each, self._frees_once = units, defers, reduces_each, frees_once
        self._deferral = ExitStack()

    def __enter__(self) -> "BackwardFlags":
        if self._defers:
            self._deferral.enter_context(defer_unit_sync(self._units, reduce_scatter=self._reduces_each))
        self._set(is_last=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._begin_last_backward()

    def begin_backward(self, *, ends_stage: bool, ends_batch: bool) -> None:
        """Prepare the next backward.

        Args:
            ends_stage: Whether it is the last backward of its stage. The last backward of the batch runs through the
                units of one stage only, so the all-reduce of the other units of this rank must not wait for it.
            ends_batch: Whether it is the last backward of the batch. It reduces the gradients of all micro-batches, and
                frees the gathered weights.
        """
        if ends_batch:
            self._begin_last_backward()
        elif self._defers and self._reduces_each:
            for unit in self._units:
                unit.set_requires_all_reduce(ends_stage, recurse=False)

    def _begin_last_backward(self) -> None:
        self._deferral.close()
        self._defers = False
        self._set(is_last=True)

    def _set(self, *, is_last: bool) -> None:
        for unit in self._units:
            unit.set_is_last_backward(is_last)
            unit.set_reshard_after_backward(is_last or not self._frees_once, recurse=False)

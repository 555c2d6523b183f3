"""A process group whose ranks may share one GPU, since it communicates through host memory and gloo.

NCCL refuses two ranks on one GPU, and gloo lacks some collectives for CUDA tensors. Inputs and results are copied in
the stream that calls the collective. So a missing wait between streams shows as wrong values.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d

STAGED = "staged"


def register() -> None:
    """Register the backend, so that ``init_process_group("staged")`` makes such groups in this process."""
    if STAGED not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", "cuda"])


class Finished:
    """Work that has ended. The work of gloo's ``recv`` would wait again for another message."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class StagedGroup(dist.ProcessGroup):
    """Process group with the methods that torch 2.11 and 2.13 call. Each collective is finished when it returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return STAGED

    @property
    def group_name(self) -> str:
        """Name under which torch has registered the group. torch's own property needs a backend in C++."""
        return distributed_c10d._world.pg_names[self]

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.zeros(1)])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        staged = _to_host(tensor)
        work = self._gloo.broadcast([staged], opts)
        return _finish(work, [tensor], [staged])

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        work, reduced = self._reduce(tensor, opts)
        return _finish(work, [tensor], [reduced])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        work, parts = self._gather(inputs[0])
        return _finish(work, outputs[0], parts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        work, parts = self._gather(given)
        return _finish(work, output.view(self.size(), *given.shape).unbind(), parts)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        work, reduced = self._reduce(torch.stack(list(inputs[0])), opts)
        return _finish(work, outputs, [reduced[self.rank()]])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        work, reduced = self._reduce(given, opts)
        return _finish(work, [output], [reduced.chunk(self.size())[self.rank()]])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        staged = torch.empty_like(output, device="cpu")
        work = self._gloo.alltoall_base(staged, _to_host(given), output_sizes, input_sizes)
        return _finish(work, [output], [staged])

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        self._gloo.send([_to_host(tensor)], rank, tag).wait()
        return Finished()

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        staged = torch.empty_like(tensor, device="cpu")
        _finish(self._gloo.recv([staged], rank, tag), [tensor], [staged])
        return Finished()

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return [self.allreduce([tensor], opts) for tensor in tensors][-1]

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing, since each collective finishes at once."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.barrier()

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce(self, tensor: Tensor, opts: Any) -> tuple[Any, Tensor]:
        """Reduce on the host. Averages and scaling are done here, since gloo has neither."""
        staged, operation = _to_host(tensor), getattr(opts, "reduceOp", ReduceOp.SUM)
        is_mean = operation == ReduceOp.AVG
        if operation == ReduceOp.PREMUL_SUM:
            staged *= operation.__getstate__()[1]
        is_sum = is_mean or operation == ReduceOp.PREMUL_SUM
        work = self._gloo.allreduce([staged], ReduceOp.SUM if is_sum else operation)
        work.wait()
        return work, staged.div_(self.size()) if is_mean else staged

    def _gather(self, tensor: Tensor) -> tuple[Any, list[Tensor]]:
        staged = _to_host(tensor)
        parts = [torch.empty_like(staged) for _ in range(self.size())]
        return self._gloo.allgather([parts], [staged]), parts


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _finish(work: Any, outputs: Sequence[Tensor], staged: Sequence[Tensor]) -> Any:
    work.wait()
    for output, result in zip(outputs, staged, strict=True):
        output.detach().copy_(result.view(output.shape))
    return work

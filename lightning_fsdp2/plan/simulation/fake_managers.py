"""Managers that give models fake weights, which have shapes and dtypes but no values."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2.compat.torch_simulation import FakeTensorMode, with_values
from lightning_fsdp2.config import DDPConfig, FSDP2Config
from lightning_fsdp2.managers import DDPManager, FSDP2Manager
from lightning_fsdp2.strategies import DDPStrategy, FSDP2Strategy
from lightning_fsdp2.weights.materialize import allocate


def replace_manager(strategy: FSDP2Strategy | DDPStrategy, mode: FakeTensorMode) -> None:
    """Make ``strategy`` use a manager that allocates the weights as fake tensors of ``mode``."""
    if isinstance(strategy, FSDP2Strategy):
        strategy.manager_class = partial(_FakeFSDP2Manager, mode=mode)
    else:
        strategy.manager_class = partial(_FakeDDPManager, mode=mode)


def get_buckets(strategy: FSDP2Strategy | DDPStrategy) -> list[Tensor]:
    """Return the buckets in which DDP reduced gradients in the last step. Under FSDP2 there are none."""
    return [*getattr(strategy.manager, "buckets", {}).values()]


class _FakeFSDP2Manager(FSDP2Manager):
    """FSDP2 manager with fake weights. It never compiles, since compilation needs values."""

    def __init__(self, config: FSDP2Config, device_mesh: DeviceMesh, *, mode: FakeTensorMode) -> None:
        super().__init__(replace(config, enable_compile=False, enable_async_tensor_parallel=False), device_mesh)
        self._mode = mode

    def parallelize(self, model: nn.Module, *, materializes: bool = True, checks_batches: bool = True) -> nn.Module:
        super().parallelize(model, materializes=False, checks_batches=False)
        _allocate(model, self._mode)
        return model


class _FakeDDPManager(DDPManager):
    """DDP manager with fake weights. It makes torch's reducer work with fake tensors and a fake process group."""

    def __init__(self, config: DDPConfig, device_mesh: DeviceMesh, *, mode: FakeTensorMode) -> None:
        if config.find_unused_parameters:
            raise ValueError(
                "find_unused_parameters=True: DDP reads values to learn which parameters a step has used, but a plan"
                " has no values; plan the run without this option."
            )
        # turn off static_graph: it makes DDP read the values of tensors, and affects neither traffic nor memory
        super().__init__(replace(config, static_graph=False), device_mesh)
        self._mode = mode
        self.buckets: dict[int, Tensor] = {}
        """Buckets in which the reducer gathers gradients, by number."""

    def prepare(self, model: nn.Module, *, materializes: bool = True) -> None:
        super().prepare(model, materializes=False)
        _allocate(model, self._mode)

    def replicate(self, model: nn.Module, *, broadcast_buffers: bool) -> DistributedDataParallel:
        wrapper = super().replicate(model, broadcast_buffers=broadcast_buffers)
        wrapper.reducer = _Reducer(wrapper.reducer)  # type: ignore[assignment]
        return wrapper

    def get_optional_hook(self, parameters: Sequence[nn.Parameter]) -> Callable[..., Any]:
        # replace the reducer's own all-reduce, which would wait for a result that the fake process group never delivers
        hook = super().get_optional_hook(parameters) or _all_reduce

        def observe(
            group: dist.ProcessGroup,
            bucket: dist.GradBucket,  # type: ignore[name-defined]
        ) -> torch.futures.Future[Tensor]:
            buffer = bucket.buffer()
            # a bucket that `_Reducer` rebuilt is a real tensor: record the fake tensor that operations use instead
            self.buckets[bucket.index()] = buffer if self._mode.is_our_fake(buffer) else self._mode.from_tensor(buffer)
            return cast(torch.futures.Future[Tensor], hook(group, bucket))

        return observe


class _Reducer:
    """Wrapper of torch's reducer that rebuilds buckets with real tensors.

    torch stores the new order of the parameters in tensors and reads their values, which fake tensors do not have.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with with_values():
            return bool(self._reducer._rebuild_buckets())


def _all_reduce(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def _allocate(model: nn.Module, mode: FakeTensorMode) -> None:
    with mode:
        allocate(model, torch.device("cpu"))

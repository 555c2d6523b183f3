"""Managers that give models fake weights: shapes and dtypes without values."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2._torch_compat import FakeTensorMode, with_values
from lightning_fsdp2.config import DDPConfig, FSDP2Config
from lightning_fsdp2.managers import DDPManager, FSDP2Manager
from lightning_fsdp2.parallel.materialize import allocate
from lightning_fsdp2.strategies import DDPStrategy, FSDP2Strategy


def replace_manager(strategy: FSDP2Strategy | DDPStrategy, mode: FakeTensorMode) -> None:
    """Let ``strategy`` make a manager that allocates tensors of ``mode`` in place of weights."""
    if isinstance(strategy, FSDP2Strategy):
        strategy.manager_class = partial(_FakeFSDP2Manager, mode=mode)
    else:
        strategy.manager_class = partial(_FakeDDPManager, mode=mode)


class _FakeFSDP2Manager(FSDP2Manager):
    """Compiles nothing, either: that needs values."""

    def __init__(self, config: FSDP2Config, device_mesh: DeviceMesh, *, mode: FakeTensorMode) -> None:
        super().__init__(replace(config, enable_compile=False, enable_async_tensor_parallel=False), device_mesh)
        self._mode = mode

    def parallelize(self, model: nn.Module, *, materializes: bool = True) -> nn.Module:
        super().parallelize(model, materializes=False)
        _allocate(model, self._mode)
        return model


class _FakeDDPManager(DDPManager):
    """Helps torch's reducer over what the fake process group and fake tensors lack."""

    def __init__(self, config: DDPConfig, device_mesh: DeviceMesh, *, mode: FakeTensorMode) -> None:
        if config.find_unused_parameters:
            raise ValueError(
                "find_unused_parameters=True: DDP reads values to learn which parameters a step has used, and a plan"
                " has none; plan the run without it."
            )
        # with a static graph a step sends and holds as much, and DDP reads values, too
        super().__init__(replace(config, static_graph=False), device_mesh)
        self._mode = mode

    def prepare(self, model: nn.Module, *, materializes: bool = True) -> None:
        super().prepare(model, materializes=False)
        _allocate(model, self._mode)

    def replicate(self, model: nn.Module, *, broadcast_buffers: bool) -> DistributedDataParallel:
        wrapper = super().replicate(model, broadcast_buffers=broadcast_buffers)
        if all(parameter.dtype != torch.bfloat16 for parameter in model.parameters()):
            # the reducer's own all-reduce wants its result, which the fake group has not
            wrapper.register_comm_hook(None, _all_reduce)
        wrapper.reducer = _Reducer(wrapper.reducer)  # type: ignore[assignment]
        return wrapper


class _Reducer:
    """Reads and writes the order of gradients, numbers that it keeps in tensors."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with with_values():
            return bool(self._reducer._rebuild_buckets())


def _all_reduce(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def _allocate(model: nn.Module, mode: FakeTensorMode) -> None:
    with mode:
        allocate(model, torch.device("cpu"))

"""Megatron-FSDP for the Lightning Trainer: ``Trainer(strategy=MegatronFSDPStrategy())``."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_fsdp2.config import CheckpointConfig, MegatronFSDPConfig
from lightning_fsdp2.managers.megatron_fsdp import MegatronFSDPManager
from lightning_fsdp2.mesh import get_mesh_sizes
from lightning_fsdp2.parallel.megatron_fsdp import (
    attach_optimizer,
    defer_sync,
    finish_backward,
    install_distributed_parameters,
    prepare_for_backward,
)
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_WRAPPER_ATTRIBUTE = "_lightning_fsdp2_megatron_fsdp"


class MegatronFSDPStrategy(MeshStrategy[MegatronFSDPManager]):
    """Trains a LightningModule sharded by NVIDIA's Megatron-FSDP."""

    strategy_name = "megatron_fsdp"
    config: MegatronFSDPConfig

    def __init__(
        self,
        dp_size: int | Literal["auto"] | None = "auto",
        dp_replicate_size: int | Literal["auto"] = 1,
        tp_size: int = 1,
        cp_size: int = 1,
        config: MegatronFSDPConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self._check_arguments(MegatronFSDPConfig, config=config, checkpoint=checkpoint, timeout=timeout)
        get_sizes = partial(
            get_mesh_sizes, dp_size=dp_size, dp_replicate_size=dp_replicate_size, tp_size=tp_size, cp_size=cp_size
        )
        config = config or MegatronFSDPConfig()
        super().__init__(get_sizes=get_sizes, config=config, checkpoint=checkpoint, timeout=timeout)

    @property
    def wrapper(self) -> Any:
        """``megatron_fsdp.MegatronFSDP`` around the LightningModule."""
        return self.lightning_module.__dict__[_WRAPPER_ATTRIBUTE]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._manager = MegatronFSDPManager(self.config, self.full_device_mesh)

    @override
    def setup(self, trainer: "Trainer") -> None:
        super().setup(trainer)
        self.model = self.wrapper

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            self.model = self.lightning_module
        super().teardown()

    @override
    def parallelize_module(self, module: "LightningModule") -> None:
        module.__dict__[_WRAPPER_ATTRIBUTE], _ = self.manager.parallelize(module)

    @override
    def setup_optimizers(self, trainer: "Trainer") -> None:
        install_distributed_parameters(self.wrapper)
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            attach_optimizer(self.wrapper, optimizer)
        self.wrapper.zero_grad_buffer()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        prepare_for_backward(self.wrapper)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        finish_backward(self.wrapper)
        super().post_backward(closure_loss)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.accumulating(), defer_sync(self.wrapper):
            yield

"""A model that never runs is built by the hooks that would build it in a run."""

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_fsdp2 import DDPStrategy, FSDP2Strategy, MegatronFSDPStrategy
from lightning_fsdp2.plan.simulation.model import build_model


class BuildsInHooks(LightningModule):
    def setup(self, stage: str) -> None:
        self.stage, self.body = stage, nn.Linear(4, 4)

    def configure_model(self) -> None:
        self.head = nn.Linear(4, self.device_mesh["tensor_parallel"].size())


@pytest.mark.parametrize("strategy", [FSDP2Strategy, DDPStrategy, MegatronFSDPStrategy])
def test_both_hooks_build_on_the_meta_device_in_the_dtype_of_the_run(strategy: Any) -> None:
    def run() -> None:
        trainer: Any = Trainer(
            strategy=strategy(),
            precision="bf16-true",
            accelerator="cpu",
            devices=1,
            logger=False,
            plugins=[LightningEnvironment()],
        )
        module = BuildsInHooks()
        with build_model(trainer, module, world_size=4, num_nodes=1) as mesh:
            assert mesh.size() == 4
            assert module.stage == "fit"
            assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
            assert module.head.weight.dtype == torch.bfloat16
            assert module.head.out_features == 1
        assert "log" not in vars(module)  # what was replaced is back

    run_ranks(run, 1, group=False)

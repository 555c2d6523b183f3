"""Offloaded shards: on the host at rest, whatever the device that computes, and the same weights as without."""

from typing import Any

import pytest
import torch
from helpers.devices import NEEDS_GPU
from helpers.models import LLAMA, make_token_batches
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy

ACCELERATORS = ["cpu", pytest.param("gpu", marks=NEEDS_GPU)]


class Watched(CausalLM):
    """Starts from weights drawn on the host, and notes where parameters and gradients are before each step."""

    def on_fit_start(self) -> None:
        # a GPU draws other random weights than the host
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.to_local().copy_(torch.randn(parameter.shape, generator=generator).mul_(0.02))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.devices = {p.device.type for p in self.parameters()} | {p.grad.device.type for p in self.parameters()}


@pytest.mark.guarantees("offloaded-shards")
@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("policy", [True, {"pin_memory": False}], ids=["true", "unpinned"])
def test_shards_gradients_and_optimizer_states_are_on_the_host(accelerator: str, policy: Any) -> None:
    def train(offload_policy: Any) -> tuple[dict[str, Tensor], set[str]]:
        torch.manual_seed(0)
        module = Watched(config=LLAMA)
        trainer = make_trainer(
            FSDP2Strategy(config=FSDP2Config(offload_policy=offload_policy)),
            accelerator=accelerator,
            max_steps=3,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
        )
        trainer.fit(module, DataLoader(make_token_batches(6), batch_size=None))
        trainer.validate(module, DataLoader(make_token_batches(2), batch_size=None), verbose=False)
        states = trainer.optimizers[0].state.values()
        devices = module.devices | {value.device.type for state in states for value in state.values()}
        devices |= {parameter.device.type for parameter in module.parameters()}
        return {name: p.full_tensor().cpu() for name, p in module.named_parameters()}, devices

    def run() -> None:
        expected, _ = train(None)
        weights, devices = train(policy)
        assert devices == {"cpu"}
        torch.testing.assert_close(weights, expected)

    run_ranks(run, 1, group=False)

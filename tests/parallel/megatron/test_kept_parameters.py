"""Parameters that are kept outside of modules under Megatron-FSDP: ids select, and uses of freed weights are errors."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.oracle import QUIET
from helpers.ranks import raises_on_all_ranks
from helpers.strategies import STRATEGIES
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import MegatronFSDPConfig, MegatronFSDPStrategy
from lightning_fsdp2.ranks.whole_tensors import gather

MEGATRON_FSDP = STRATEGIES["megatron_fsdp"]


class Keeping(pl.LightningModule):
    def __init__(self, penalty: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.penalty = penalty
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.kept = dict(self.layers.named_parameters())
        self.slow = list(map(id, self.layers[0].parameters()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        loss = batch.square().mean()
        return loss + self.penalty * sum(p.square().sum() for p in self.kept.values()) if self.penalty else loss

    def configure_optimizers(self) -> Any:
        slow = [p for p in self.parameters() if id(p) in self.slow]
        fast = [p for p in self.parameters() if id(p) not in self.slow]
        return torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": fast}], lr=0.1)


def fit(penalty: float, zero_dp_strategy: int) -> Keeping:
    module = Keeping(penalty)
    strategy = MegatronFSDPStrategy(config=MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(module, DataLoader([torch.ones(2, 4)] * 2, batch_size=None))
    return module


def train_alone(penalty: float) -> Keeping:
    module = Keeping(penalty)
    optimizer = module.configure_optimizers()
    for step in range(2):
        module.training_step(torch.ones(2, 4), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


@pytest.mark.parametrize(("penalty", "zero_dp_strategy"), [(0.0, 3), (0.1, 2)])
def test_kept_ids_and_whole_weights_are_those_of_one_process(penalty: float, zero_dp_strategy: int) -> None:
    def run() -> None:
        alone = train_alone(penalty)
        module = fit(penalty, zero_dp_strategy)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gather(parameter.detach()), alone.get_parameter(name).detach())

    MEGATRON_FSDP.run(run, 2)


def test_kept_weights_that_are_freed_are_named() -> None:
    with raises_on_all_ranks(RuntimeError, r"parameter layers\.0\.weight.*zero_dp_strategy=2"):
        MEGATRON_FSDP.run(fit, 2, 0.1, 3)

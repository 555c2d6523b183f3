"""What a resumed run reads: the batches that the run before would have read next."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.user_modules import AtSteps, UserModule, make_trainer
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

EPOCH, RANKS = 4, 2


class Reader(UserModule):
    """A module that writes down the samples of its training steps."""

    make_optimizer = staticmethod(partial(torch.optim.SGD, lr=1e-3))

    def build(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.read: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read += batch.flatten().int().tolist()
        return self.layer(batch).mean()


def make_loader(*, shuffle: bool) -> StatefulDataLoader[Tensor]:
    samples: Any = torch.arange(RANKS * EPOCH, dtype=torch.float32)[:, None]
    return StatefulDataLoader(samples, sampler=DistributedSampler(samples, shuffle=shuffle))


@pytest.mark.filterwarnings("ignore")
def test_a_save_after_a_fit_that_ended_in_an_epoch_has_the_position_of_its_loader(tmp_path: Path) -> None:
    """The end of a fit closes the iterators of its loaders, which know the position."""

    def run() -> list[int]:
        trainer = make_trainer(max_steps=EPOCH - 1)
        trainer.fit(Reader(), make_loader(shuffle=False))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        resumed = Reader()
        make_trainer(max_steps=EPOCH + 1).fit(resumed, make_loader(shuffle=False), ckpt_path=tmp_path / "a.ckpt")
        return resumed.read

    # rank 0 reads 0, 2, 4, 6
    assert run_ranks(run, RANKS) == [[6, 0], [7, 1]]


@pytest.mark.filterwarnings("ignore")
def test_the_epoch_in_which_a_run_is_resumed_is_shuffled_as_in_a_run_that_went_through(tmp_path: Path) -> None:
    path, step = tmp_path / "a.ckpt", EPOCH + 1

    def run() -> tuple[list[int], list[int]]:
        through, resumed = Reader(), Reader()
        save = AtSteps({step: lambda trainer: trainer.save_checkpoint(path)})
        make_trainer(max_epochs=3, callbacks=[save]).fit(through, make_loader(shuffle=True))
        make_trainer(max_epochs=3).fit(resumed, make_loader(shuffle=True), ckpt_path=path)
        return through.read, resumed.read

    for through, resumed in run_ranks(run, RANKS):
        assert resumed == through[step:]
        assert through[:EPOCH] != through[EPOCH : 2 * EPOCH], "each epoch has an order of its own"

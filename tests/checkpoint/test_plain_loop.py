"""Checkpoints of models that a plain loop has wrapped."""

from pathlib import Path

import torch
from helpers.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp2 import load_checkpoint, save_checkpoint


def test_a_model_has_the_same_names_in_and_out_of_ddp(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)

    def run() -> None:
        wrapped = DistributedDataParallel(model)
        assert save_checkpoint(tmp_path / "a.ckpt", wrapped, extra={"step": 3}) is None
        assert load_checkpoint(tmp_path / "a.ckpt", DistributedDataParallel(other)) == {"step": 3}
        assert torch.equal(other.weight, model.weight)

    run_ranks(run, 2)
    assert load_checkpoint(tmp_path / "a.ckpt", other) == {"step": 3}
    assert torch.equal(other.weight, model.weight)

"""Objects in a checkpoint are said at the save, not first at the resume that refuses them."""

import warnings
from collections import defaultdict
from pathlib import Path, PosixPath
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.user_modules import WIDTH, Normalized, make_trainer
from torch.utils.data import DataLoader

from lightning_fsdp2 import CheckpointConfig, FSDP2Strategy


class WithOptions(Normalized):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def fit(config: CheckpointConfig, **options: Any) -> pl.Trainer:
    trainer = make_trainer(FSDP2Strategy(checkpoint=config), max_steps=1)
    trainer.fit(WithOptions(**options), DataLoader(torch.ones(8, WIDTH), batch_size=4))  # type: ignore[arg-type]
    return trainer


@pytest.mark.parametrize("format_", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_objects_are_warned_of_once_unless_they_are_trusted(format_: Any, tmp_path: Path) -> None:
    def run() -> list[str]:
        objects = {"data": Path("data"), "counts": defaultdict(int)}
        trusted = ({"trust_checkpoint": True}, {"weights_only": False})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for trust in trusted:
                fit(CheckpointConfig(format=format_, **trust), **objects).save_checkpoint(tmp_path / "a.ckpt")
            fit(CheckpointConfig(format=format_), data="data", counts={}).save_checkpoint(tmp_path / "b.ckpt")
            assert not [warning for warning in caught if "hold objects" in str(warning.message)]
            trainer = fit(CheckpointConfig(format=format_), **objects)
            trainer.save_checkpoint(tmp_path / "c.ckpt")
            trainer.save_checkpoint(tmp_path / "d.ckpt")
        return [str(warning.message) for warning in caught if "hold objects" in str(warning.message)]

    first, second = run_ranks(run, 2)
    assert len(first) == 1
    assert f"(builtins.int, collections.defaultdict, {PosixPath.__module__}.PosixPath)" in first[0]
    assert "CheckpointConfig(trust_checkpoint=True)" in first[0]
    assert second == []

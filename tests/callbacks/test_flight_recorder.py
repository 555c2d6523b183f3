"""What the ranks were communicating when a run ended."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import Regressor, make_batches, make_loader
from torch import Tensor

from lightning_fsdp2.callbacks import FlightRecorder
from lightning_fsdp2.strategies.launch import rendezvous

VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"


class Loses(Regressor):
    """Rank 1 does not come to its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise RuntimeError("lost")
        return super().training_step(batch, batch_idx)


def test_each_rank_writes_its_last_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PROBE_TIMEOUT", timedelta(seconds=0.5))  # the other rank is gone

    def run() -> None:
        trainer = STRATEGIES["fsdp2"].make_trainer(callbacks=[FlightRecorder(tmp_path)], max_steps=4)
        with pytest.raises(RuntimeError):
            trainer.fit(Loses(), make_loader(make_batches(8)))

    run_ranks(run, 2)
    waiting, lost = (json.loads((tmp_path / f"gloo_rank_{rank}.json").read_text())["entries"] for rank in range(2))
    assert len(waiting) > len(lost)
    assert waiting[-1]["profiling_name"] == "gloo:all_gather"
    assert any(frame["name"] == "training_step" for frame in waiting[-1]["frames"])


def test_nccl_is_told_where_to_write_while_a_run_lasts(tmp_path: Path) -> None:
    class Reads(Regressor):
        def on_train_start(self) -> None:
            self.destination = os.environ.get(VARIABLE)

    def read(callback: FlightRecorder) -> tuple[str | None, str | None]:
        """While the run lasts, and behind it."""
        module = Reads()
        trainer = STRATEGIES["fsdp2"].make_trainer(callbacks=[callback], default_root_dir=tmp_path, max_steps=1)
        trainer.fit(module, make_loader(make_batches(2)))
        return module.destination, os.environ.get(VARIABLE)

    def run() -> None:
        os.environ.pop(VARIABLE, None)
        assert read(FlightRecorder()) == (f"{tmp_path}/flight_records/nccl_rank_", None)
        assert read(FlightRecorder(tmp_path / "own")) == (f"{tmp_path}/own/nccl_rank_", None)
        launcher = os.environ[VARIABLE] = f"{tmp_path}/launcher/rank_"
        assert read(FlightRecorder()) == (launcher, launcher)
        assert read(FlightRecorder(tmp_path / "own")) == (f"{tmp_path}/own/nccl_rank_", launcher)

    run_ranks(run, 1)

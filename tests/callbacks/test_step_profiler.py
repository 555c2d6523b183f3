"""Traces of chosen steps, one file per rank."""

import gzip
import json
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer

from lightning_fsdp2 import DDPStrategy
from lightning_fsdp2.callbacks import StepProfiler


@pytest.mark.parametrize(("every", "expected"), [pytest.param(0, [4], marks=pytest.mark.slow), (3, [4, 7])])
def test_files_of_the_steps_asked_for(every: int, expected: list[int], tmp_path: Path) -> None:
    def run() -> None:
        profiler = StepProfiler(tmp_path / "traces", wait=2, warmup=1, active=1, every_n_steps=every)
        trainer = make_trainer(DDPStrategy(), callbacks=[profiler], max_steps=8, accumulate_grad_batches=2)
        trainer.fit(Regressor(), make_loader(make_batches(32)))

    run_ranks(run, 2)
    names = {f"step{step}-rank{rank}.json.gz" for step in expected for rank in range(2)}
    assert {path.name for path in (tmp_path / "traces").iterdir()} == names
    trace = json.loads(gzip.decompress((tmp_path / "traces" / "step4-rank1.json.gz").read_bytes()))
    operations = [event["name"] for event in trace["traceEvents"]]
    assert operations.count("Optimizer.step#SGD.step") == 1, "the trace is not of one step"
    assert operations.count("aten::mse_loss") == 2, "the trace lacks micro-batches"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"active": 0}, "`active` 1 or more"),
        ({"every_n_steps": 3}, r"must be 0, or at least warmup \+ active = 4"),
    ],
)
def test_values_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepProfiler(**options)

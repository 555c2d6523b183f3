"""A search drops what breaks a rule or does not fit, and its winner trains as it says."""

from pathlib import Path
from typing import Any

import pytest
from helpers.planning import BATCH, LENGTH, make_module, make_trainer

from lightning_fsdp2 import DDPStrategy, FSDP2Config, FSDP2Strategy, TextDataModule
from lightning_fsdp2.plan import SearchResult, get_device, search_run


def run_search(strategy: Any = None, **options: Any) -> SearchResult:
    data = TextDataModule(dataset="nowhere", sequence_length=LENGTH, batch_size=BATCH, global_batch_size=8)
    trainer = make_trainer(strategy or FSDP2Strategy())
    device = get_device("h100", memory=options.pop("memory", None), per_node=2)
    return search_run(trainer, make_module(), datamodule=data, world_size=4, device=device, **options)


@pytest.mark.slow
def test_the_best_is_the_fastest_that_fits(tmp_path: Path) -> None:
    result = run_search(memory=0.05, cache_dir=tmp_path)
    found = result.search
    assert found.best
    assert result.plan is not None
    middles = [candidate.middle for candidate in found.best]
    assert middles == sorted(middles)
    assert found.too_large > 0
    assert result.plan.fits
    # the winner is planned whole, and its few layers told the same
    assert result.plan.peak_bytes == found.best[0].peak_bytes
    assert all(candidate.knobs.samples == 8 for candidate in found.best)
    assert {candidate.knobs.tp for candidate in found.best} <= {1, 2}  # within a node
    assert len(result.configs) == len(found.best)
    again = run_search(memory=0.05, cache_dir=tmp_path, seconds=0)
    assert again.search == found  # nothing was simulated again
    other = run_search(memory=0.05, cache_dir=tmp_path, seconds=0, cache_key="another optimizer")
    assert other.search.left_out > 0


def test_without_time_nothing_is_tried() -> None:
    found = run_search(seconds=0).search
    assert (found.best, found.tried) == ([], 0)
    assert found.left_out > 0


def test_a_strategy_without_a_mesh_has_no_layouts() -> None:
    with pytest.raises(TypeError, match="A search varies the mesh of FSDP2Strategy, and DDPStrategy has none"):
        run_search(DDPStrategy())


def test_what_is_not_varied_stays() -> None:
    strategy = FSDP2Strategy(config=FSDP2Config(enable_fsdp2_prefetch=False))
    run_search(strategy, seconds=0)
    assert strategy.config.enable_fsdp2_prefetch is False


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"cache_dir='.*file' cannot be written to; name another folder, or None"):
        run_search(cache_dir=file)

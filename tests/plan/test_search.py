"""A search drops what breaks a rule or does not fit, and its winner trains as it says."""

import io
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.planning import BATCH, LENGTH, LLAMA, make_batch, make_module, make_trainer
from torch.optim import SGD

from lightning_fsdp2 import CausalLM, DDPStrategy, FSDP2Config, FSDP2Strategy, TextDataModule
from lightning_fsdp2.plan import SearchResult, get_device, plan_run, search_run
from lightning_fsdp2.plan.cache import get_run_fingerprint
from lightning_fsdp2.plan.knobs import Knobs, build_config, read_knobs
from lightning_fsdp2.plan.rank import Run
from lightning_fsdp2.plan.search import _get_next, _weigh_pipeline, list_layouts, simulate_all
from lightning_fsdp2.plan.simulation.blocks import Summary
from lightning_fsdp2.plan.simulation.reserved import Reserved
from lightning_fsdp2.plan.simulation.workers import add_up_progress, run_in_processes
from lightning_fsdp2.plan.table import write_search

MEMORY = 2.1
"""GiB, of which what CUDA and NCCL take leaves some layouts of the small model too little."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was simulated for one test serves the others."""
    return tmp_path_factory.mktemp("cache")


def run_search(strategy: Any = None, **options: Any) -> SearchResult:
    data = TextDataModule(dataset="nowhere", sequence_length=LENGTH, batch_size=BATCH, global_batch_size=8)
    trainer = make_trainer(strategy or FSDP2Strategy())
    device = get_device("h100", memory=options.pop("memory", None), per_node=2)
    return search_run(trainer, make_module(), datamodule=data, world_size=4, device=device, **options)


@pytest.mark.guarantees("searches")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_is_the_fastest_that_fits(cache: Path, tmp_path: Path) -> None:
    result = run_search(memory=MEMORY, cache_dir=cache)
    found = result.search
    assert found.best
    assert result.plan is not None
    estimates = [candidate.estimate for candidate in found.best]
    assert estimates == sorted(estimates)
    assert len(found.best) < found.tried
    assert result.plan.verdict == "fits"
    # the winner is planned whole, and its few layers told the same
    assert result.plan.peak_bytes == found.best[0].peak_bytes
    assert all(candidate.knobs.samples == 8 for candidate in found.best)
    assert {candidate.knobs.tp for candidate in found.best} <= {1, 2}  # within a node
    assert len(result.configs) == len(found.best)
    again = run_search(memory=MEMORY, cache_dir=cache, seconds=0)
    assert again.search == found  # nothing was simulated again
    damaged = shutil.copytree(cache, tmp_path / "damaged")
    for file in damaged.iterdir():
        file.write_bytes(b"")
    assert run_search(memory=MEMORY, cache_dir=damaged, seconds=0).search.left_out > 0


def test_pipelines_are_tried_across_nodes_with_enough_micro_batches() -> None:
    trainer, module, batch = make_trainer(FSDP2Strategy()), make_module(), make_batch(4)
    knobs = read_knobs(trainer, module, batch, world_size=8, num_nodes=4, accumulation=2)
    run = Run(trainer, module, batch, 8, 4, get_device("h100", per_node=2))
    layouts = [layout for layout in list_layouts(run, knobs, LENGTH) if layout.pp > 1]
    assert {(layout.pp, layout.config.pp_schedule) for layout in layouts} == {
        (pp, schedule) for pp in (2, 4) for schedule in ("1f1b", "interleaved_1f1b")
    }
    for layout in layouts:
        assert layout.samples == knobs.samples == 64
        assert layout.pp * layout.dp * layout.tp * layout.cp == 8
        assert (layout.micro_batches, layout.batch_size) == (64 // layout.dp,) * 2
        following = _get_next(layout, fits=True)
        assert following is not None
        assert (following.micro_batches, following.batch_size) == (32 // layout.dp, 64 // layout.dp)
        assert following.config.pp_microbatches == following.micro_batches
        config = build_config(knobs, layout, strategy="fsdp2", names_batch_size=True, has_global_batch=False)
        assert config["trainer"]["strategy"]["init_args"]["pp_size"] == layout.pp
        assert config["data"]["init_args"]["batch_size"] == layout.batch_size


@pytest.mark.slow
def test_a_pipeline_that_is_tried_is_weighed_as_it_is_planned() -> None:
    trainer, module, batch = make_trainer(FSDP2Strategy()), make_module(layers=4), make_batch(16)
    knobs = read_knobs(trainer, module, batch, world_size=4, num_nodes=2, accumulation=1)
    run = Run(trainer, module, batch, 4, 2, get_device("h100", per_node=2))
    layout = replace(knobs, pp=2, dp=2).divide(8, rows=2)
    [(_, ranks)] = simulate_all(
        run, [layout], end=float("inf"), cache=None, processes=None, on_progress=add_up_progress(None)
    )
    candidate = _weigh_pipeline(run, layout, ranks)
    strategy = FSDP2Strategy(pp_size=2, config=FSDP2Config(pp_microbatches=8))
    planned = plan_run(make_trainer(strategy), module, batch, world_size=4, device=run.device, suggest=False)
    assert candidate.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.02)
    # few micro-batches, and the whole schedule in arithmetic
    assert candidate.estimate == pytest.approx(planned.estimate, rel=0.02)
    assert candidate.at_least == pytest.approx(planned.at_least, rel=0.02)
    assert candidate.reason.startswith("waiting ")


def test_runs_are_told_apart_by_what_they_train() -> None:
    def fingerprint(**options: Any) -> str:
        module = CausalLM(config=LLAMA, **options)
        run = Run(make_trainer(FSDP2Strategy()), module, make_batch(), 4, 1, get_device("h100"))
        [(_, text)] = run_in_processes([partial(get_run_fingerprint, run)])
        return text

    texts = [fingerprint(), fingerprint(optimizer=partial(SGD, lr=0.1)), fingerprint(attn_implementation="eager")]
    assert len({*texts}) == 3
    assert fingerprint() == texts[0]


def test_ended_early_a_search_has_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_fsdp2.plan.search.simulate_all", interrupt)
    found = run_search().search
    assert (found.is_interrupted, found.best, found.closest) == (True, [], None)


@pytest.mark.slow
def test_where_none_fits_for_sure_the_tight_ones_are_told(cache: Path) -> None:
    least = run_search(memory=0.001, cache_dir=cache).search.closest
    assert least is not None
    result = run_search(memory=least.peak_bytes / 2**30, cache_dir=cache)
    assert result.plan is not None
    assert {candidate.verdict for candidate in result.search.best} == {result.plan.verdict} == {"tight"}
    text = io.StringIO()
    write_search(result.search, text)
    assert "No layout fits for certain: the best is tight" in text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_few_micro_batches_tell_the_memory_of_many(schedule: Any, stages_per_rank: int) -> None:
    """That of the last rank to the byte, which holds the most: the logits."""
    flags = FSDP2Config(pp_schedule=schedule, pp_stages_per_rank=stages_per_rank, pp_microbatches=8)
    trainer = make_trainer(FSDP2Strategy(pp_size=2, config=flags))
    module, batch = make_module(layers=4), make_batch(8)
    planned = plan_run(trainer, module, batch, world_size=2, suggest=False)
    knobs = read_knobs(trainer, module, batch, world_size=2, num_nodes=1, accumulation=1)
    run = Run(trainer, module, batch, 2, 1, get_device("h100"))
    [(_, first)] = run_in_processes([partial(run.summarize_pipeline_rank, knobs, 0, None)])
    [(_, last)] = run_in_processes([partial(run.summarize_pipeline_rank, knobs, 1, first.boundary)])
    assert last.peak_bytes == planned.peak_bytes
    assert first.peak_bytes == pytest.approx(planned.ranks[0].peak_bytes, abs=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_needs_least_is_told_where_nothing_fits(cache: Path) -> None:
    result = run_search(memory=0.001, cache_dir=cache)
    assert result.plan is None
    assert result.search.closest is not None
    assert result.search.closest.peak_bytes > 0.001 * 2**30


@pytest.mark.parametrize(("experts", "sizes"), [(0, {1}), (4, {1, 2, 4}), (6, {1, 2}), (3, {1})])
def test_experts_are_distributed_over_a_node_and_over_a_replica(
    experts: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Knobs] = []

    def simulate(run: Run, layouts: list[Knobs], **options: Any) -> Any:
        tried.extend(layouts)
        summary = Summary([], {"forward": 2**60}, Reserved(2**60, 2**60), num_experts=experts)
        return [(layout, summary) for layout in layouts]

    monkeypatch.setattr("lightning_fsdp2.plan.search.simulate_all", simulate)
    run_search(FSDP2Strategy(ep_size=4))
    own, *others = tried
    assert own.ep == 4
    assert {layout.ep for layout in others} == sizes
    assert all(4 // layout.dp_replicate % layout.ep == 0 for layout in others)
    assert len(set(map(str, others))) == len(others)


def test_without_time_nothing_is_tried() -> None:
    found = run_search(seconds=0).search
    assert (found.best, found.tried) == ([], 0)
    assert found.left_out > 0


def test_a_strategy_without_a_mesh_has_no_layouts() -> None:
    with pytest.raises(TypeError, match="A search varies the mesh of FSDP2Strategy, but the run uses DDPStrategy"):
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

"""``lightning-fsdp2 plan``: what a person sees of a plan, and what else it writes."""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.planning import LENGTH, LLAMA
from jsonargparse import set_parsing_settings

from lightning_fsdp2.cli import FSDP2CLI
from lightning_fsdp2.plan import Plan
from lightning_fsdp2.plan.result import Change
from lightning_fsdp2.plan.sharding_table import TIMES
from lightning_fsdp2.plan.simulation.blocks import Summary
from lightning_fsdp2.plan.simulation.reserved import Reserved
from lightning_fsdp2.plan.table import write_changes


def write_yaml(folder: Path, **data: Any) -> str:
    strategy = {"class_path": "fsdp2", "init_args": {"tp_size": 2, "config": {"sequence_parallel": True}}}
    trainer = {"accelerator": "gpu", "devices": 8, "precision": "bf16-mixed", "gradient_clip_val": 1.0}
    sizes = {
        "path": "/not/on/this/machine",
        "sequence_length": LENGTH,
        "batch_size": 2,
        "global_batch_size": 16,
        **data,
    }
    config = {
        "trainer": {**trainer, "strategy": strategy},
        "model": {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": LLAMA}},
        "data": {"class_path": "lightning_fsdp2.TextDataModule", "init_args": sizes},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return f"--config={path}"


@pytest.fixture(autouse=True)
def _parsed_as_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the docstrings of fields, which take long."""
    set_parsing_settings(docstring_parse_attribute_docstrings=False)
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])


def run(*args: str) -> str:
    with redirect_stdout(io.StringIO()) as output:
        FSDP2CLI(["plan", *args])
    return output.getvalue()


@pytest.mark.slow
def test_a_plan_needs_neither_the_devices_nor_the_data_of_a_run(tmp_path: Path) -> None:
    output, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    printed = run(write_yaml(tmp_path), "--world-size=16", f"--json={output}", f"--plot={picture}")
    assert not re.search(" $", printed, re.MULTILINE)
    assert max(map(len, printed.splitlines())) <= 100
    for text in (
        "FSDP2Strategy on 16 ranks: H100 HBM3, 2 nodes",
        "dp_replicate 1 x dp_shard 8 x context_parallel 1 x tensor_parallel 2".replace(" x ", TIMES),
        "1 micro-batch on each data parallel rank: 16 samples, 8,192 tokens",
        "reduce-scatter over tensor_parallel",
        "fits: ",
        "so only rank 0 is shown",
        "Allocated is exact",
    ):
        assert text in printed, printed
    plain = json.loads(output.read_text())
    assert (plain["world_size"], plain["nodes"], plain["verdict"]) == (16, 2, "fits")
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_what_would_help(tmp_path: Path) -> None:
    alone = ["--trainer.strategy.tp_size=1", "--trainer.strategy.config.sequence_parallel=false"]
    config = write_yaml(tmp_path, global_batch_size=2)
    printed = run(config, "--world_size=1", "--memory=0.04", "--device=a100", *alone)
    assert "does not fit by" in printed
    assert "of the 41.0 MiB of A100" in printed
    assert "What would help most" in printed


@pytest.mark.slow
def test_a_plan_is_printed_before_changes_are_planned_which_are_printed_as_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = tmp_path / "plan.json"
    seen: list[Any] = []

    def find_changes(run: Any, knobs: Any, plan: Plan, describe_config: Any, **options: Any) -> list[Change]:
        seen.extend([output.getvalue(), json.loads(numbers.read_text())["changes"]])
        after = replace(knobs, batch_size=1, accumulation=2, loss="chunked").with_flags(defer_fsdp_grad_sync=False)
        values = {"peak_bytes": 2**30, "reserved": plan.reserved, "at_least": 1.0, "estimate": 2.0}
        return [Change(name="less", config=describe_config(after), verdict="does not fit", **values)]

    monkeypatch.setattr("lightning_fsdp2.plan.run.find_changes", find_changes)
    config = write_yaml(tmp_path, global_batch_size=None)
    with redirect_stdout(io.StringIO()) as output:
        FSDP2CLI(["plan", config, "--world_size=8", "--memory=0.04", f"--json={numbers}"])
    assert "does not fit by" in seen[0]
    assert "What would help most" not in seen[0]
    assert seen[1] == []
    printed = output.getvalue()[len(seen[0]) :]
    assert re.search(r"1\. +less +1\.0 GiB .* 2\.00 s +1\.00 s +does not fit$", printed, re.MULTILINE)
    [options] = re.findall(r"^1\. (--.*)$", printed, re.MULTILINE)
    assert options == (
        "--trainer.strategy.config.defer_fsdp_grad_sync false --trainer.accumulate_grad_batches 2 --model.loss chunked"
        " --data.batch_size 1"
    )
    [change] = json.loads(numbers.read_text())["changes"]
    assert change["verdict"] == "does not fit"
    picture = tmp_path / "plan.svg"
    changed = json.loads(
        run(config, "--world_size=8", "--memory=0.04", *options.split(), "--json=-", f"--plot={picture}")
    )
    assert picture.exists()
    assert len(changed["changes"]) == 1
    assert (changed["batch"]["accumulation"], changed["batch"]["shapes"]["labels"]) == (2, [1, LENGTH])


def test_where_nothing_helps_the_plan_says_so() -> None:
    text = io.StringIO()
    write_changes([], text)
    assert text.getvalue() == "\nNone of the changes that were tried saves memory.\n"


@pytest.mark.slow
def test_a_search_that_finds_nothing_faster_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(run: Any, layouts: list[Any], **options: Any) -> Any:
        empty = Summary([], {"forward": 0}, Reserved(0, 0))
        return [(layout, empty) for layout in layouts]

    monkeypatch.setattr("lightning_fsdp2.plan.search.simulate_all", simulate)
    monkeypatch.setattr("lightning_fsdp2.plan.search.list_layouts", lambda *args: [])
    best = tmp_path / "best.yaml"
    printed = run(write_yaml(tmp_path), "--world_size=8", f"--search={best}", "--cache_dir=null")
    assert f"{best} has the first of them: it is the run's own layout, so this changes nothing" in printed
    assert yaml.safe_load(best.read_text()) == {}


def test_numbers_alone(tmp_path: Path) -> None:
    small = ["--model.config.num_hidden_layers=1", "--trainer.strategy=lightning_fsdp2.DDPStrategy"]
    plain = json.loads(run(write_yaml(tmp_path), *small, "--ranks=[7]", "--json=-"))
    assert [rank["rank"] for rank in plain["ranks"]] == [7]


@pytest.mark.slow
def test_nodes_are_those_of_the_config_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    strategy = ["--trainer.strategy.init_args.tp_size=1", "--trainer.strategy.init_args.dp_replicate_size=auto"]
    callback = ["--trainer.callbacks=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"]
    config = write_yaml(tmp_path)
    plain = json.loads(run(config, "--trainer.devices=4", "--trainer.num_nodes=2", *strategy, *callback, "--json=-"))
    assert (plain["world_size"], plain["nodes"], plain["mesh"]["dp_replicate"]) == (8, 2, 2)
    assert plain["notes"][-1] == ("Not taken into account: lightning.pytorch.callbacks.StochasticWeightAveraging.")


@pytest.mark.guarantees("searches")
@pytest.mark.slow
def test_the_layout_that_is_found_is_what_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_yaml(tmp_path, global_batch_size=4)
    monkeypatch.chdir(tmp_path)
    options = ["--world_size=2", "--devices_per_node=2", "--memory=2.5", "--cache_dir=cache"]
    printed = run(config, *options, "--search=best.yaml", "--json=found.json")
    assert max(map(len, printed.splitlines())) <= 100
    assert "best.yaml has the first of them: fit --config RUN.yaml --config best.yaml" in printed
    planned = json.loads(run(config, "--config=best.yaml", *options, "--json=-"))
    assert planned == json.loads(Path("found.json").read_text())
    assert planned["batch"]["samples"] == 4


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--device=v100"], "device='v100' is not known; use a100, h100, h200, b200, mi300x."),
        *(
            pytest.param([flag], error, marks=pytest.mark.slow)
            for flag, error in (
                ("--world_size=12", "world_size=12 is not a multiple of the 8 devices of a node"),
                ("--trainer.strategy.tp_size=4", "tp_size=4 does not divide num_key_value_heads=2"),
                ("--data.global_batch_size=15", "global_batch_size=15 is not a multiple of batch_size=2"),
                ("--json=nowhere/plan.json", "json='nowhere/plan.json' cannot be written; name a file in"),
            )
        ),
        (["--trainer.strategy=ddp"], "plan simulates the steps of FSDP2Strategy and DDPStrategy"),
        (
            [
                "--trainer.strategy.tp_size=1",
                "--trainer.strategy.config.sequence_parallel=false",
                "--trainer.strategy.pp_size=2",
                "--trainer.strategy.config.pp_microbatches=3",
            ],
            "pp_microbatches=3 does not divide the 2 rows of a batch; use a number that does, such as 1",
        ),
        (["--plot=plan.txt"], "matplotlib writes"),
        (["--json=."], "json='.' cannot be written; name a file in a writable folder."),
        (["--plot=nowhere/plan.svg"], "plot='nowhere/plan.svg' cannot be written; name a file in a writable folder"),
        (
            ["--search=nowhere/best.yaml"],
            "search='nowhere/best.yaml' cannot be written; name a file in a writable folder",
        ),
        (["--search=best.yaml", "--ranks=[1]"], "a search chooses the ranks itself; leave ranks out."),
    ],
)
def test_what_cannot_be_planned_is_one_line(flags: list[str], error: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI(["plan", write_yaml(tmp_path), *flags])
    assert exit_.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error in line

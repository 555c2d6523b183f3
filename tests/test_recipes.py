"""Recipes from the first step to an exported model: killed on the way, started again, tracked by W&B."""

import csv
import math
import signal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import yaml
from helpers.fork_server import get_python
from helpers.recipes import RECIPES, change, get_callback, make_toy, write_inputs
from helpers.tracked_jobs import get_rows, start_job
from helpers.wandb_reader import WandbRun, read_runs
from transformers import AutoModelForCausalLM

from lightning_fsdp2.cli import main

STEPS, KILLED_BEHIND, SAVED_EVERY = 24, 14, 6
PEAK, WARM_UP = 0.02, 4
SEQUENCES, LENGTH = 4, 96  # of a step

LEARNED = {"pretrain_llama3_8b_fsdp2": 0.8, "sft_llama3_8b": 0.3, "lora_llama3_70b_tp2": 0.95}
"""What is left of the loss at most; adapters learn little around weights that are random."""

pytestmark = pytest.mark.slow


def write_config(name: str, folder: Path) -> Path:
    """The recipe at toy size, with a learning rate for few steps, and a callback that kills it once."""
    config = make_toy(name)
    micro_batches = SEQUENCES // (config["trainer"]["devices"] // get_tp_size(config))
    changes = {
        "trainer.max_steps": STEPS,
        "trainer.val_check_interval": STEPS // 2 * micro_batches,
        "model.init_args.optimizer.init_args": {"lr": PEAK},
        "model.init_args.lr_scheduler.init_args": {"warmup_steps": WARM_UP, "total_steps": STEPS, "min_ratio": 0.1},
    }
    for key, value in changes.items():
        change(config, key, value)
    get_callback(config, "ModelCheckpoint")["every_n_train_steps"] = SAVED_EVERY
    killer = {"marker": str(folder / "died"), "behind": KILLED_BEHIND}
    config["trainer"]["callbacks"].append({"class_path": "helpers.tracked_jobs.DiesOnce", "init_args": killer})
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def get_tp_size(config: dict[str, Any]) -> int:
    return config["trainer"]["strategy"]["init_args"].get("tp_size", 1)


def run_twice(name: str, folder: Path) -> tuple[WandbRun, WandbRun]:
    """What W&B has of the job until it was killed, and of the one that ended."""
    write_inputs(folder)
    config = write_config(name, folder)
    for expected in (-signal.SIGKILL, 0):
        ended = start_job(config, "--ckpt_path=last", python=get_python(), WANDB_MODE="offline")
        assert ended.returncode == expected, ended.stderr[-4000:]
    first, second = read_runs(folder / "outputs" / name)
    return first, second


def check_curves(name: str, folder: Path, first: WandbRun, second: WandbRun) -> None:
    assert first.id == second.id
    before, after = get_rows(first), get_rows(second)
    rows = {**before, **after}
    resumed = next(iter(after))
    assert resumed in (SAVED_EVERY, 2 * SAVED_EVERY)  # a save in the background may not have ended
    assert (list(before), list(after)) == ([*range(KILLED_BEHIND)], [*range(resumed, STEPS)])
    for step in range(resumed, KILLED_BEHIND):  # what was computed again
        assert before[step]["train/loss"] == pytest.approx(after[step]["train/loss"], rel=1e-6)
    assert [rows[step]["train/total_tokens"] for step in range(STEPS)] == [
        (step + 1) * SEQUENCES * LENGTH for step in range(STEPS)
    ]
    rates = [rows[step]["train/learning_rate"] for step in range(STEPS)]
    assert rates == pytest.approx([PEAK * get_factor(step) for step in range(STEPS)])
    losses = [rows[step]["train/loss"] for step in range(STEPS)]
    assert losses[0] == pytest.approx(math.log(257), abs=0.5)  # untrained
    assert losses[-1] < LEARNED[name] * losses[0]
    assert all(run.get_column("val/loss")[-1] < losses[0] for run in (first, second))
    for metric in ("throughput/tokens_per_second", "train/gradient_norm", "loss/max", "throughput/data_share"):
        assert all(row[metric] >= 0 for row in rows.values())
    check_csv(name, folder, rows)


def get_factor(step: int) -> float:
    """Linear warm-up from step 0 on, then half a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP))) / 2


def check_csv(name: str, folder: Path, rows: dict[int, dict[str, Any]]) -> None:
    """The other logger has the same."""
    found: dict[int, float] = {}
    for file in sorted((folder / "outputs" / name).glob("version_*/metrics.csv")):
        with open(file) as lines:
            found |= {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(lines) if row["train/loss"]}
    assert found == {step: pytest.approx(row["train/loss"]) for step, row in rows.items()}


def check_identity(name: str, run: WandbRun) -> None:
    config, identity = make_toy(name), run.config["run"]
    ranks, tp_size = RECIPES[name].ranks, get_tp_size(config)
    mesh = {"dp_replicate": 1, "dp_shard": ranks // tp_size, "context_parallel": 1, "tensor_parallel": tp_size}
    assert identity["strategy"]["mesh"] == mesh
    assert config["trainer"]["strategy"]["init_args"]["config"].items() <= identity["strategy"]["config"].items()
    assert identity["precision"]["compute"] == "bfloat16"
    assert identity["devices"]["ranks"] == ranks
    assert identity["data"]["global_batch_size"] == SEQUENCES
    assert identity["versions"]["torch"] == torch.__version__


def check_artifacts(name: str, folder: Path, *runs: WandbRun) -> None:
    artifacts = [artifact for run in runs for artifact in run.artifacts]
    saved = range(SAVED_EVERY, STEPS + 1, SAVED_EVERY)
    assert [sorted(artifact.aliases)[-1] for artifact in artifacts] == [f"step-{step}" for step in saved]
    for artifact, step in zip(artifacts, saved, strict=True):
        checkpoint = folder / "outputs" / name / "checkpoints" / f"step={step}.ckpt"
        references = [unquote(entry.ref) for entry in artifact.manifest.contents]
        assert references
        assert all(reference.startswith(f"file://{checkpoint}") for reference in references)
        assert "latest" in artifact.aliases


@pytest.mark.guarantees("complete-recipes")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=RECIPES[name].marks) for name in LEARNED],
)
def test_recipe_is_killed_goes_on_and_ends_in_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run_twice(name, tmp_path)
    check_curves(name, tmp_path, first, second)
    check_identity(name, second)
    check_artifacts(name, tmp_path, first, second)

    monkeypatch.chdir(tmp_path)
    checkpoint = f"outputs/{name}/checkpoints/last.ckpt"
    with pytest.raises(SystemExit, match="0"):
        main(["export", checkpoint, "exported", *(["--merge=true"] if name.startswith("lora") else [])])
    model = AutoModelForCausalLM.from_pretrained("exported").eval()
    text = torch.tensor([[*b"train: 3 and 27\ntrain: 4 and 64\n"]])
    loss = model(input_ids=text, labels=text).loss.item()
    untrained = AutoModelForCausalLM.from_pretrained("model").eval()(input_ids=text, labels=text).loss.item()
    assert loss != pytest.approx(untrained, abs=1e-3)

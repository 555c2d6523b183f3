"""The recipes of ``configs/``: each is described at full size, and trains for two steps at toy size.

What a toy run changes of the file stands in ``EVERYWHERE`` and ``RECIPES``; all else is as in the file.
"""

import csv
import io
import json
import math
import re
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.async_on_cpu import fuse_on_cpu
from helpers.compiler import needs_compiler
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import make_causal_lm
from helpers.ranks import run_ranks

from lightning_fsdp2.cli import FSDP2CLI
from lightning_fsdp2.data import build_byte_tokenizer

CONFIGS = Path(__file__).parent.parent / "configs"

VOCABULARY = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **VOCABULARY,
}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

EVERYWHERE: dict[str, Any] = {
    "trainer.accelerator": "cpu",
    "trainer.num_nodes": 1,
    "trainer.max_steps": 2,
    "trainer.log_every_n_steps": 1,
    "data.init_args.tokenizer": "model",
    "data.init_args.sequence_length": 96,
    "data.init_args.batch_size": 1,
    "data.init_args.global_batch_size": 4,
}
"""Of every recipe. The test's folder has a tiny ``model`` with a tokenizer, ``text`` and ``chats``."""


@dataclass(frozen=True)
class Recipe:
    """A file of ``configs/``."""

    parameters: int
    """As published for the architecture."""

    gpus: int
    ranks: int = 2
    """On which a toy run takes place."""

    changes: dict[str, Any] = field(default_factory=dict)
    """What a toy run changes in this file; sizes of the model's config are updated, not replaced."""

    context: Any = nullcontext
    """What stands in for hardware."""

    marks: tuple[Any, ...] = (pytest.mark.slow,)


PRETRAINED = {"model.init_args.pretrained": "model"}
LLAMA_8B = 8_030_261_248
LLAMA_70B = 70_553_706_496

RECIPES = {
    "pretrain_llama3_8b_fsdp2": Recipe(LLAMA_8B, gpus=8, marks=(pytest.mark.slow, needs_compiler)),
    "hsdp_multi_node": Recipe(
        LLAMA_8B,
        gpus=32,
        ranks=4,
        changes={"trainer.strategy.init_args.dp_replicate_size": 2},
        marks=(pytest.mark.slow, needs_compiler),
    ),
    "llama3_70b_fsdp2_tp8_sp_async": Recipe(
        LLAMA_70B,
        gpus=64,
        ranks=4,
        changes={"trainer.strategy.init_args.tp_size": 2},
        context=fuse_on_cpu,
        marks=(pytest.mark.slow, needs_compiler),
    ),
    "long_context_llama3_8b_cp8": Recipe(
        LLAMA_8B, gpus=8, ranks=4, changes={**PRETRAINED, "trainer.strategy.init_args.cp_size": 2}
    ),
    "qwen3_30b_a3b_fsdp2": Recipe(
        30_532_122_624,
        gpus=32,
        changes={
            "model.init_args.config": {
                "moe_intermediate_size": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "head_dim": 16,
            }
        },
    ),
    "sft_llama3_8b": Recipe(LLAMA_8B, gpus=8, changes=PRETRAINED, marks=()),
    "lora_llama3_70b_tp2": Recipe(LLAMA_70B, gpus=8, ranks=4, changes=PRETRAINED),
    "ddp_small": Recipe(134_515_008, gpus=8),
    "megatron_fsdp_8b": Recipe(LLAMA_8B, gpus=8, context=cuda_on_cpu),
}

OTHERS = [name for name in (*RECIPES, "quickstart") if name != "pretrain_llama3_8b_fsdp2"]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def get(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


def change(config: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    parent = get(config, section)
    parent[name] = {**parent[name], **value} if isinstance(value, dict) else value


def get_callback(config: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [callback for callback in config["trainer"]["callbacks"] if callback["class_path"].endswith(f".{name}")]
    return found["init_args"]


def make_toy(name: str) -> dict[str, Any]:
    """The config of a recipe with the changes of the tables."""
    recipe, config = RECIPES[name], read(name)
    kind = "chats" if config["data"]["class_path"].endswith("ChatDataModule") else "text"
    paths = {"data.init_args.path": f"{kind}/train", "data.init_args.validation_path": f"{kind}/validation"}
    for key, value in {**EVERYWHERE, **paths, "trainer.devices": recipe.ranks, **recipe.changes}.items():
        change(config, key, value)
    if "config" in config["model"]["init_args"]:
        change(config, "model.init_args.config", SIZES)
        for key, value in recipe.changes.get("model.init_args.config", {}).items():
            change(config, f"model.init_args.config.{key}", value)
    get_callback(config, "ModelCheckpoint")["every_n_train_steps"] = 2
    return config


def write_inputs(folder: Path) -> None:
    """A tiny model with a tokenizer and a template, texts and conversations."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    make_causal_lm({"model_type": "llama", **SIZES}).save_pretrained(folder / "model")
    for split, count in (("train", 24), ("validation", 8)):
        text, chats = folder / "text" / split, folder / "chats" / split
        text.mkdir(parents=True)
        (text / "text.txt").write_text("\n".join(f"{split}: {number} and {number**3}" for number in range(99)))
        chats.mkdir(parents=True)
        rows = [
            [{"role": "user", "content": f"{number} + 1"}, {"role": "assistant", "content": str(number + 1)}]
            for number in range(count)
        ]
        (chats / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))


def fit(config: dict[str, Any], context: AbstractContextManager[Any], *args: str) -> dict[str, Any]:
    """Train on this rank; what the strategy was given, and how far it came."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    with context:
        trainer = FSDP2CLI(["fit", "--config=run.yaml", *args]).trainer
    strategy = trainer.strategy
    sizes = strategy.get_sizes(world_size=strategy.world_size, num_nodes=1)
    return {
        "strategy": type(strategy).__name__,
        "sizes": {"tp_size": sizes.tp, "cp_size": sizes.cp, "dp_replicate_size": sizes.dp_replicate},
        "config": strategy.config.to_dict(),
        "checkpoint": strategy.checkpoint_config,
        "precision": trainer.precision,
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "accumulated": trainer.accumulate_grad_batches,
        "fused": [group["fused"] for group in trainer.optimizers[0].param_groups],
        "step": trainer.global_step,
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=recipe.marks) for name, recipe in RECIPES.items()])
def test_two_steps_at_toy_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = RECIPES[name], make_toy(name)
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    results = run_ranks(lambda: fit(config, recipe.context()), recipe.ranks, group=False)
    result, given = results[0], config["trainer"]["strategy"]
    assert {result["step"] for result in results} == {2}
    # what the file says is what the run had
    options = given["init_args"]
    assert result["strategy"] == given["class_path"].removeprefix("lightning_fsdp2.")
    assert {size: result["sizes"][size] for size in result["sizes"] if size in options} == {
        size: value for size, value in options.items() if size in result["sizes"]
    }
    assert options["config"].items() <= result["config"].items()
    assert result["checkpoint"].async_save
    assert result["precision"] == "bf16-mixed"
    assert all(result["fused"])
    named = [callback["class_path"].rpartition(".")[2] for callback in config["trainer"]["callbacks"]]
    assert set(named) <= set(result["callbacks"])
    replicas = recipe.ranks // (options.get("tp_size", 1) * options.get("cp_size", 1))
    assert result["accumulated"] * replicas == 4
    # and what it is for has been written
    assert (tmp_path / "outputs" / name / "checkpoints" / "last.ckpt").exists()
    assert len(list((tmp_path / "outputs" / name / "wandb").glob("offline-run-*/*.wandb"))) == 1
    with open(next((tmp_path / "outputs" / name).rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    assert len(losses) == 2
    assert all(abs(loss - math.log(257)) < 0.5 for loss in losses)  # untrained
    assert {"throughput/tokens_per_second", "gradients/norm", "loss/max"} <= rows[0].keys()


@pytest.mark.slow
def test_a_recipe_goes_on_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_toy("sft_llama3_8b")
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_ranks(lambda: fit(config, nullcontext()), 2, group=False)
    longer = ["--trainer.max_steps=4", "--ckpt_path=last"]
    assert run_ranks(lambda: fit(config, nullcontext(), *longer), 2, group=False)[0]["step"] == 4
    checkpoints = tmp_path / "outputs" / "sft_llama3_8b" / "checkpoints"
    assert {path.name for path in checkpoints.glob("*.ckpt")} == {"last.ckpt", "step=2.ckpt", "step=4.ckpt"}
    assert (checkpoints / "last.ckpt").resolve().name == "step=4.ckpt"
    with open(tmp_path / "outputs" / "sft_llama3_8b" / "version_1" / "metrics.csv") as file:
        rates = [float(row["train/learning_rate"]) for row in csv.DictReader(file) if row["train/learning_rate"]]
    assert rates == pytest.approx([5e-6 * 4 / 30, 5e-6 * 5 / 30])  # of the steps to come, on the warm-up begun before


def get_architecture(name: str) -> dict[str, Any]:
    """The model's config, of a recipe that starts from a published model that of its pretraining."""
    arguments = read(name)["model"]["init_args"]
    if "config" not in arguments:
        return get_architecture("llama3_70b_fsdp2_tp8_sp_async" if "70b" in name else "pretrain_llama3_8b_fsdp2")
    return arguments["config"]


def describe(name: str, folder: Path) -> dict[str, Any]:
    """What `describe` prints for the file as it is; for a model of the Hub stands a directory with a `config.json`."""
    arguments = ["describe", f"--config={CONFIGS / name}.yaml", "--format=json"]
    if "pretrained" in read(name)["model"]["init_args"]:
        (folder / "config.json").write_text(json.dumps(get_architecture(name)))
        arguments.append(f"--model.pretrained={folder}")

    def run() -> str:
        with redirect_stdout(io.StringIO()) as output:
            FSDP2CLI(arguments)
        return output.getvalue()

    return json.loads(run_ranks(run, 1, group=False)[0])


def get_row(name: str) -> list[str]:
    """The recipe's row in the table of the README, without the name and without when to take it."""
    [line] = [line for line in (CONFIGS / "README.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    return [cell.strip() for cell in line.split("|")[2:-2]]


def get_activation_bytes(name: str, mesh: dict[str, int]) -> float:
    """By the formula of the README."""
    config, architecture = read(name), get_architecture(name)
    data, flags = config["data"]["init_args"], config["trainer"]["strategy"].get("init_args", {}).get("config", {})
    tokens = data["batch_size"] * data["sequence_length"] / mesh["context_parallel"]
    if flags.get("sequence_parallel"):
        tokens /= mesh["tensor_parallel"]
    per_value = 2 if flags.get("activation_checkpointing") == "full" else 34
    if config["trainer"].get("precision") is None:
        per_value *= 2
    return per_value * tokens * architecture["hidden_size"] * architecture["num_hidden_layers"]


def format_count(count: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= size)
    return f"{count / size:.2f} {unit}"


@pytest.mark.parametrize(
    "name", ["pretrain_llama3_8b_fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_sizes_are_those_of_the_readme_and_the_header(name: str, tmp_path: Path) -> None:
    description = describe(name, tmp_path)
    totals, mesh = description["totals"], description["mesh"]
    adapters = totals["trained_parameters"] if totals["trained_parameters"] < totals["parameters"] else 0
    held = f"{(totals['weight_bytes'] + 3 * totals['gradient_bytes']) / 2**30:.1f}"
    gathered = f"{totals['largest_gathered_bytes'] / 2**30:.1f}"
    activations = f"{get_activation_bytes(name, mesh) / 2**30:.1f}"
    parameters = format_count(totals["parameters"])
    assert get_row(name) == [
        f"{parameters}, {format_count(adapters)} trained" if adapters else parameters,
        "2 processes" if name == "quickstart" else str(totals["ranks"]),
        " \N{MULTIPLICATION SIGN} ".join(map(str, mesh.values())),
        *(held, "0.0" if name == "ddp_small" else gathered, activations),
    ]
    if name == "quickstart":
        return
    assert totals["parameters"] - adapters == RECIPES[name].parameters
    header = " ".join((CONFIGS / f"{name}.yaml").read_text().partition("\nseed_everything")[0].split("\n# "))
    assert int(re.search(r"GPUs: (\d+) of", header)[1]) == totals["ranks"] == RECIPES[name].gpus
    numbers = re.findall(r"(\d+\.\d) GiB", header)
    assert numbers == [held, activations] if name == "ddp_small" else [held, gathered, activations]


@pytest.mark.parametrize("name", RECIPES)
def test_the_schedule_ends_where_the_run_ends(name: str) -> None:
    config = read(name)
    schedule = config["model"]["init_args"]["lr_scheduler"]["init_args"]
    steps = config["trainer"]["max_steps"]
    assert schedule["total_steps"] == steps
    checkpoint = get_callback(config, "ModelCheckpoint")
    assert steps % checkpoint["every_n_train_steps"] == 0  # the last step is saved
    launched = re.search(r"--nproc-per-node (\d+)|--ntasks-per-node (\d+)", (CONFIGS / f"{name}.yaml").read_text())
    assert int(launched[1] or launched[2]) == config["trainer"]["devices"]
    micro_batches = config["trainer"]["val_check_interval"]
    data, mesh = config["data"]["init_args"], config["trainer"]["strategy"]["init_args"]
    replicas = RECIPES[name].gpus // (mesh.get("tp_size", 1) * mesh.get("cp_size", 1))
    accumulated = data["global_batch_size"] // (data["batch_size"] * replicas)
    said = re.search(r"val_check_interval: \d+ # micro-batches, (\d+) steps", (CONFIGS / f"{name}.yaml").read_text())
    assert int(said[1]) * accumulated == micro_batches


def test_every_file_is_a_recipe_of_the_table() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*RECIPES, "quickstart"}

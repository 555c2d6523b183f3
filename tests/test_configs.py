"""The recipes of ``configs/``: each is described at full size, and trains for two steps at toy size."""

import csv
import io
import json
import math
import re
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.compiler import needs_compiler
from helpers.cover import Matrix
from helpers.ranks import run_ranks
from helpers.recipes import CONFIGS, RECIPES, get_bytes_per_value, get_callback, make_toy, read, write_inputs
from helpers.tracked_jobs import finished_runs
from helpers.wandb_reader import read_runs
from jsonargparse import set_parsing_settings
from torch.distributed.checkpoint import FileSystemReader

from benchmarks.plans import plan
from lightning_fsdp2.cli import FSDP2CLI, main
from lightning_fsdp2.parallel.pipeline.schedule import build_orders, count_in_flight

WITH_INDUCTOR = "llama3_70b_fsdp2_tp8_sp_async"
"""The one recipe whose layers are compiled to code; the others are only traced."""


def get_architecture(name: str) -> dict[str, Any]:
    """Return the model's config.

    A recipe that starts from a published model has it in the table, or in the recipe that pretrains it.
    """
    arguments = read(name)["model"]["init_args"]
    if name in RECIPES and RECIPES[name].architecture:
        return RECIPES[name].architecture
    if "config" not in arguments:
        return get_architecture("llama3_70b_fsdp2_tp8_sp_async" if "70b" in name else "pretrain_llama3_8b_fsdp2")
    return arguments["config"]


GOES_ON = "sft_llama3_8b"
"""The recipe that is also started again."""


def list_features(name: str) -> dict[str, Any]:
    """Return the options of a recipe's toy run as features. A size of 1, or a flag that is off, is left out."""
    config = make_toy(name)
    strategy, model = config["trainer"]["strategy"], config["model"]["init_args"]
    options = dict(strategy["init_args"])
    features = {
        "strategy": strategy["class_path"],
        "data": config["data"]["class_path"],
        "family": get_architecture(name)["model_type"],
        "weights": "read" if "pretrained" in model else "drawn",
        "lora": "lora" in model,
        **{f"model.{option}": model.get(option) for option in ("loss", "router_aux_loss_coef")},
        **options.pop("config"),
        **{size: value for size, value in options.items() if size.endswith("_size") and value != 1},
    }
    return {feature: str(value) for feature, value in features.items() if value}


def fit(config: dict[str, Any], context: AbstractContextManager[Any], *args: str) -> dict[str, Any]:
    """Train on this rank. Return what the strategy was given, and the number of the last step."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    set_parsing_settings(docstring_parse_attribute_docstrings=False)  # as the program does, since that takes long
    with context, finished_runs():
        trainer = FSDP2CLI(["fit", "--config=run.yaml", *args]).trainer
    strategy = trainer.strategy
    sizes = strategy.asked_sizes.resolve(world_size=strategy.world_size, num_nodes=1)
    return {
        "strategy": type(strategy).__name__,
        "sizes": {
            "tp_size": sizes.tp,
            "cp_size": sizes.cp,
            "ep_size": sizes.ep,
            "pp_size": sizes.pp,
            "dp_replicate_size": sizes.dp_replicate,
        },
        "config": strategy.config.to_dict(),
        "checkpoint": strategy.checkpoint_config,
        "precision": trainer.precision,
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "accumulated": trainer.accumulate_grad_batches,
        "fused": [group["fused"] for group in trainer.optimizers[0].param_groups],
        "step": trainer.global_step,
    }


TOY_RUNS = Matrix(
    "recipes at toy size",
    {name: list_features(name) for name in RECIPES},
    always=[GOES_ON],
    costs={name: recipe.ranks for name, recipe in RECIPES.items()},
)


@pytest.mark.guarantees("complete-recipes")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=(*TOY_RUNS.mark(name), *((needs_compiler,) if name == WITH_INDUCTOR else ())))
        for name in RECIPES
    ],
)
def test_two_steps_at_toy_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    recipe, config = RECIPES[name], make_toy(name)
    if name != WITH_INDUCTOR:
        request.getfixturevalue("compile_without_code")
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    results = run_ranks(lambda: fit(config, recipe.context()), recipe.ranks, group=False)
    check_options(name, config, results)
    check_outputs(name, tmp_path / "outputs" / name)
    if name == GOES_ON:
        longer = ["--trainer.max_steps=4", "--ckpt_path=last"]
        assert run_ranks(lambda: fit(config, nullcontext(), *longer), 2, group=False)[0]["step"] == 4
        check_goes_on(tmp_path / "outputs" / name)


def check_options(name: str, config: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Check that the run had what the file says."""
    recipe, result, given = RECIPES[name], results[0], config["trainer"]["strategy"]
    assert {result["step"] for result in results} == {2}
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
    replicas = recipe.ranks // math.prod(options.get(f"{axis}_size", 1) for axis in ("pp", "cp", "tp"))
    data = config["data"]["init_args"]
    assert result["accumulated"] * replicas * data["batch_size"] == data["global_batch_size"]


def check_outputs(name: str, folder: Path) -> None:
    """Check that the run has written its outputs."""
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    with open(next(folder.rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [0, 1]
    for row in rows:
        assert float(row["train/loss"]) == pytest.approx(math.log(257), abs=0.5)  # untrained
        assert float(row["loss/max"]) >= float(row["loss/mean"]) == pytest.approx(float(row["train/loss"]), rel=1e-5)
        assert float(row["train/gradient_norm"]) > 0
        assert float(row["throughput/tokens_per_second"]) > 0
    (run,) = read_runs(folder)
    assert [row["trainer/global_step"] for row in run.rows] == [0, 1]
    stored = FileSystemReader(folder / "checkpoints" / "last.ckpt").read_metadata()
    weights = {key for key in stored.state_dict_metadata if key.startswith("state_dict.")}
    assert weights
    if name.startswith("lora"):
        assert all("lora_" in key for key in weights)


def check_goes_on(folder: Path) -> None:
    """Check that the second run began at the checkpoint of the first."""
    checkpoints = folder / "checkpoints"
    assert {path.name for path in checkpoints.glob("*.ckpt")} == {"last.ckpt", "step=2.ckpt", "step=4.ckpt"}
    assert (checkpoints / "last.ckpt").resolve().name == "step=4.ckpt"
    with open(folder / "version_1" / "metrics.csv") as file:
        rates = [float(row["train/learning_rate"]) for row in csv.DictReader(file) if row["train/learning_rate"]]
    assert rates == pytest.approx([5e-6 * 3 / 30, 5e-6 * 4 / 30])  # on the warm-up begun before


def describe(name: str, folder: Path) -> dict[str, Any]:
    """Return what `describe` prints for the file. A directory with a `config.json` replaces a model on the Hub."""
    arguments = ["describe", f"--config={CONFIGS / name}.yaml", "--format=json"]
    if "pretrained" in read(name)["model"]["init_args"]:
        (folder / "config.json").write_text(json.dumps(get_architecture(name)))
        arguments.append(f"--model.pretrained={folder}")

    def run() -> str:
        with redirect_stdout(io.StringIO()) as output:
            main(arguments)
        return output.getvalue()

    return json.loads(run_ranks(run, 1, group=False)[0])


def get_row(name: str) -> list[str]:
    """Return the recipe's row in the table of the README, without its first and last column."""
    [line] = [line for line in (CONFIGS / "README.md").read_text().splitlines() if line.startswith(f"| [{name}]")]
    return [cell.strip() for cell in line.split("|")[2:-2]]


def get_activation_bytes(name: str, mesh: dict[str, int]) -> float:
    """By the formulas of the README, which tests/test_recipe_memory.py compares with toy runs."""
    config, architecture = read(name), get_architecture(name)
    data, flags = config["data"]["init_args"], config["trainer"]["strategy"].get("init_args", {}).get("config", {})
    tokens = data["batch_size"] * data["sequence_length"] / mesh["context_parallel"]
    if flags.get("sequence_parallel"):
        tokens /= mesh["tensor_parallel"]
    per_value = get_bytes_per_value(
        config["trainer"]["strategy"]["class_path"].removeprefix("lightning_fsdp2."),
        config["trainer"].get("precision"),
        flags.get("activation_checkpointing", False),
        architecture,
    )
    layers = architecture["num_hidden_layers"]
    if (ranks := mesh.get("pipeline_parallel", 1)) > 1:
        schedule = {"ranks": ranks, "stages_per_rank": flags.get("pp_stages_per_rank", 1)}
        number = flags.get("pp_microbatches", data["batch_size"])
        order, *_ = build_orders(flags["pp_schedule"], micro_batches=number, **schedule)
        layers *= count_in_flight(order) / math.prod(schedule.values())
        tokens /= number
    return per_value * tokens * architecture["hidden_size"] * layers


def format_count(count: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= size)
    return f"{count / size:.2f} {unit}"


@pytest.mark.guarantees("table-of-recipes")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "ddp_small" else pytest.mark.slow) for name in (*RECIPES, "quickstart")],
)
def test_sizes_are_those_of_the_readme_and_the_header(name: str, tmp_path: Path) -> None:
    description = describe(name, tmp_path)
    totals, mesh = description["totals"], description["mesh"]
    stages = f", pp {mesh['pipeline_parallel']}" if "pipeline_parallel" in mesh else ""
    adapters = totals["trained_parameters"] if totals["trained_parameters"] < totals["parameters"] else 0
    held = f"{(totals['weight_bytes'] + 3 * totals['gradient_bytes']) / 2**30:.1f}"
    gathered = f"{totals['largest_gathered_bytes'] / 2**30:.1f}"
    activations = f"{get_activation_bytes(name, mesh) / 2**30:.1f}"
    parameters = format_count(totals["parameters"])
    layout = " \N{MULTIPLICATION SIGN} ".join(str(size) for axis, size in mesh.items() if axis != "pipeline_parallel")
    assert get_row(name) == [
        f"{parameters}, {format_count(adapters)} trained" if adapters else parameters,
        "2 processes" if name == "quickstart" else str(totals["ranks"]),
        layout + (f", ep {description['expert_mesh']['ep']}" if description["expert_mesh"] else stages),
        *(held, gathered, activations),
        f"{12 * totals['trained_parameters'] / 1e9:.1f}",
    ]
    if name == "quickstart":
        return
    assert totals["parameters"] - adapters == RECIPES[name].parameters
    header = " ".join((CONFIGS / f"{name}.yaml").read_text().partition("\nseed_everything")[0].split("\n# "))
    assert int(re.search(r"GPUs: (\d+) of", header)[1]) == totals["ranks"] == RECIPES[name].gpus
    numbers = re.findall(r"(\d+\.\d) GiB", header)
    assert numbers == [held, activations] if name == "ddp_small" else [held, gathered, activations]


PLANNED = [
    (name, *found)
    for name in RECIPES
    for found in re.findall(r"#   (\w+) (\d+): (.* GiB allocated.*)", (CONFIGS / f"{name}.yaml").read_text())
]
"""What comments say of a plan: the recipe, the size that is changed, its value, and the figures."""


@pytest.mark.release  # a minute each
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "size", "value", "figures"), PLANNED)
def test_comments_say_what_is_planned(name: str, size: str, value: str, figures: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(get_architecture(name)))
    planned = plan(
        f"plan --config configs/{name}.yaml --device h100 --suggest false --ranks [0]"
        f" --model.pretrained {tmp_path} --trainer.strategy.{size} {value}"
    )
    allocated, held = planned["peak_bytes"] / 2**30, planned["reserved_bytes"][1] / 2**30
    seconds = planned["step_seconds"]["estimate"]
    assert figures == (
        f"{allocated:.1f} GiB allocated, {held:.1f} GiB held at most ({planned['verdict']}), {seconds:.0f} s per step"
    )


def get_accumulation(name: str, gpus: int) -> int:
    config = read(name)
    data, mesh = config["data"]["init_args"], config["trainer"]["strategy"]["init_args"]
    shares = math.prod(mesh.get(f"{axis}_size", 1) for axis in ("pp", "cp", "tp"))
    return data["global_batch_size"] * shares // (data["batch_size"] * gpus)


@pytest.mark.parametrize("name", RECIPES)
def test_steps_and_micro_batches_are_those_of_the_gpus(name: str) -> None:
    config, text = read(name), (CONFIGS / f"{name}.yaml").read_text()
    checkpoint = get_callback(config, "ModelCheckpoint")
    assert "total_steps" not in config["model"]["init_args"]["lr_scheduler"]["init_args"]  # it ends with the run
    if config["trainer"]["max_steps"] == -1:
        assert get_callback(config, "HuggingFaceExport")  # writes the last steps, which are not saved
    else:
        assert config["trainer"]["max_steps"] % checkpoint["every_n_train_steps"] == 0
    launched = re.search(r"--nproc-per-node (\d+)|--ntasks-per-node (\d+)", text)
    assert int(launched[1] or launched[2]) == config["trainer"]["devices"]
    said = re.search(r"val_check_interval: \d+ # micro-batches, which are (\d+) steps", text)
    assert int(said[1]) * get_accumulation(name, RECIPES[name].gpus) == config["trainer"]["val_check_interval"]
    nodes = re.search(r"--trainer.num_nodes (\d+) --trainer.val_check_interval (\d+)", text)
    if nodes:
        gpus = int(nodes[1]) * config["trainer"]["devices"]
        assert int(said[1]) * get_accumulation(name, gpus) == int(nodes[2])


def test_the_command_for_fewer_gpus_validates_behind_as_many_steps() -> None:
    command = r"pretrain_llama3_8b_fsdp2.yaml \\\n  --trainer.devices (\d+) --trainer.val_check_interval (\d+)"
    devices, interval = map(int, re.search(command, (CONFIGS / "README.md").read_text()).groups())
    assert interval == 500 * get_accumulation("pretrain_llama3_8b_fsdp2", devices)


@pytest.mark.guarantees("table-of-recipes")
def test_every_file_is_a_recipe_of_the_table() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*RECIPES, "quickstart"}

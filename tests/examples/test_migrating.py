"""The page on migrating: its scripts train what the old ones train, and its tables name what exists."""

import inspect
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import pytest
import torch
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, merge_fsdp_weights
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from accelerate.utils.launch import prepare_multi_gpu_env
from helpers.documents import ROOT
from helpers.examples import EXAMPLES, OWN_MODULE, Finish, Run, list_commands, read_losses, read_metric
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import run_ranks
from helpers.recipes import write_inputs
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, TrainingArguments

import lightning_fsdp2
import lightning_fsdp2.callbacks
import lightning_fsdp2.schedulers
from lightning_fsdp2.checkpoint.files.paths import check_is_checkpoint
from lightning_fsdp2.cli import main
from lightning_fsdp2.data import build_byte_tokenizer

SECTIONS = dict(
    section.split("\n", 1) for section in (ROOT / "docs/migrating.md").read_text().replace(r"\|", "&").split("\n## ")
)
"""The text of each section of the page, by its title."""

PAIRS = [title for title, text in SECTIONS.items() if "\n| before | after |\n" in text]

HOMES = (lightning_fsdp2, lightning_fsdp2.callbacks, lightning_fsdp2.schedulers, pl, pl.callbacks)
"""Where the owners of options in the tables are."""


def read_table(title: str, *, options: bool = False, number: int = 0) -> list[tuple[str, str]]:
    """The rows of a section's table of lines, or of its table of options, or of another one with this number."""
    tables = re.findall(r"(?:^\|.*\|\n)+", SECTIONS[title], re.MULTILINE)
    table = [table for table in tables if table.startswith("| before | after |") != options][number]
    return re.findall(r"^\| (.*?) ?\| (.*?) ?\|$", table, re.MULTILINE)[1:]


def read_codes(cell: str) -> list[str]:
    return re.findall(r"`(.+?)`", cell)


def read_options(title: str) -> set[str]:
    """What the left column of a section's table of options names."""
    return {code for left, _ in read_table(title, options=True) for code in read_codes(left)}


@pytest.mark.guarantees("migrated-scripts")
@pytest.mark.parametrize("title", PAIRS)
def test_lines_stand_in_the_files(title: str) -> None:
    rows = read_table(title)
    assert len(rows) >= 5
    files = re.findall(r"\(\.\./examples/(migrating/\S+)\)", SECTIONS[title])
    for word, cells in zip(("before", "after"), zip(*rows, strict=True), strict=True):
        text = "".join((EXAMPLES / file).read_text() for file in files if word in file).replace("|", "&")
        assert [line for cell in cells for line in read_codes(cell) if line not in text] == []


@pytest.mark.guarantees("options-of-others")
@pytest.mark.parametrize("title", [title for title in PAIRS if len(re.findall(r"\n\|---", SECTIONS[title])) > 1])
def test_options_here_exist(title: str) -> None:
    """The right column has them as ``Owner.option``."""
    options = [
        tuple(code.split("."))
        for _, right in read_table(title, options=True)
        for code in read_codes(right)
        if re.fullmatch(r"[A-Z]\w+\.\w+", code)
    ]
    assert len(options) > 5
    for owner, option in options:
        [component, *_] = [getattr(home, owner) for home in HOMES if hasattr(home, owner)]
        assert option in inspect.signature(component).parameters, f"{owner}.{option}"


def test_every_section_is_in_the_list() -> None:
    intro = next(iter(SECTIONS.values()))
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in PAIRS}
    assert set(re.findall(r"\(#(from-\S+)\)", intro)) == anchors


@pytest.mark.slow
@pytest.mark.parametrize("command", list_commands(migrating=True))
def test_commands_run(finish: Finish, command: str) -> None:
    """As a user starts them."""
    finish(command)


# ---------------------------------------------------------------------- from Lightning's ModelParallelStrategy


EPOCH = 12
"""Steps of an epoch of the two scripts."""


def finish_losses(finish: Finish, script: str, options: str = "") -> list[float]:
    folder = finish(f"torchrun --nproc-per-node 2 examples/migrating/{script}.py{options}")
    return read_metric(script, 0, folder=folder)


@pytest.mark.guarantees("migrated-scripts")
@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_migrated_run_has_the_losses_of_the_old_one_and_takes_its_checkpoints(
    run: Run, finish: Finish, tp_size: int
) -> None:
    options = f" --tp-size {tp_size}" if tp_size > 1 else ""
    before, after = (finish_losses(finish, f"model_parallel_{script}", options) for script in ("before", "after"))
    assert after == pytest.approx(before, abs=1e-5)
    assert after[-1] < after[0] - 1.0
    run("migrating/model_parallel_before.py", "--tp-size", tp_size, "--steps", EPOCH)
    [checkpoint] = Path("outputs/model_parallel_before/version_0/checkpoints").iterdir()
    run("migrating/model_parallel_after.py", "--tp-size", tp_size, "--ckpt-path", checkpoint)
    # and not those of the old strategy, which would go on in the order of another epoch
    assert read_metric("model_parallel_after", 0) == pytest.approx(before[EPOCH:], abs=1e-5)


# ---------------------------------------------------------------------- from NeMo Automodel


@pytest.mark.slow
def test_the_loop_that_comes_from_automodel_trains(run: Run, finish: Finish) -> None:
    model = finish(OWN_MODULE) / "outputs/own_module/model"
    outputs = run("migrating/automodel_after.py", model, "--dp-replicate-size", 2)
    assert [len(read_losses(output)) for output in outputs] == [10, 10]


@pytest.mark.slow
def test_the_yaml_that_comes_from_automodel_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = yaml.safe_load((EXAMPLES / "migrating/automodel_after.yaml").read_text())
    config["trainer"] |= {"accelerator": "cpu", "devices": 2, "max_steps": 2}
    config["model"]["init_args"]["pretrained"] = config["data"]["init_args"]["tokenizer"] = "model"
    config["model"]["init_args"]["lr_scheduler"]["init_args"] = {"warmup_steps": 1}
    config["data"]["init_args"] |= {"path": "chats/train", "sequence_length": 96, "global_batch_size": 4}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    train_from_yaml()
    assert AutoModelForCausalLM.from_pretrained("checkpoints/model").num_parameters() > 0


def train_from_yaml() -> None:
    """What the command line does with `run.yaml`, on two ranks."""

    def train() -> None:
        sys.argv = ["lightning-fsdp2"]
        main(["fit", "--config", "run.yaml"])

    run_ranks(train, 2, group=False)


# ---------------------------------------------------------------------- from torchtitan


@pytest.mark.slow
def test_the_yaml_that_comes_from_torchtitan_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = yaml.safe_load((EXAMPLES / "migrating/torchtitan_after.yaml").read_text())
    config["trainer"] |= {"accelerator": "cpu", "devices": 2, "max_steps": 2}
    config["trainer"]["strategy"]["init_args"]["config"]["enable_compile"] = False
    config["model"]["init_args"]["config"] = config["data"]["init_args"]["tokenizer"] = "model"
    config["model"]["init_args"]["lr_scheduler"]["init_args"]["warmup_steps"] = 1
    config["data"]["init_args"] |= {"dataset": None, "subset": None, "path": "text/train"}
    config["data"]["init_args"] |= {"sequence_length": 96, "global_batch_size": 4}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    train_from_yaml()
    assert AutoModelForCausalLM.from_pretrained("checkpoint/model").num_parameters() > 0


# ---------------------------------------------------------------------- from accelerate


ACCELERATE = "From accelerate with FSDP2"


@contextmanager
def accelerate_config(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[None]:
    """Set the environment that accelerate's launcher gives processes for the page's config, with some changes."""
    config = yaml.safe_load((EXAMPLES / "migrating/accelerate_before.yaml").read_text())
    Path("accelerate.yaml").write_text(yaml.safe_dump(config | changes))
    words = ["--config_file", "accelerate.yaml", "--main_process_port", "0", "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    with monkeypatch.context() as patch:
        for name, value in prepare_multi_gpu_env(arguments).items():
            if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
                patch.setenv(name, value)
        yield


@contextmanager
def accelerate_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let accelerate take CPU processes for those of GPUs: otherwise it leaves FSDP out. Check that it does not."""

    def shard(*args: Any) -> torch.nn.Module:
        Path("sharded").touch()
        return fsdp2_prepare_model(*args)

    with monkeypatch.context() as patch:
        patch.setattr(accelerate.accelerator, "fsdp2_prepare_model", shard)
        patch.setattr(PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU))
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        yield
    assert Path("sharded").exists()


@pytest.mark.guarantees("migrated-scripts")
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_accelerate_trains_the_same_and_its_checkpoint_becomes_a_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    make_causal_lm({**LLAMA, "vocab_size": 257}).save_pretrained("model")
    sizes = {"parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": 2}
    arguments = ("model", "--steps", 5, "--learning-rate", 3e-3)
    with accelerate_config(monkeypatch, mixed_precision="no", parallelism_config=sizes), accelerate_on_cpu(monkeypatch):
        before = run("migrating/accelerate_before.py", *arguments, ranks=2 * replicas)
    options = ("--param-dtype", "float32", "--dp-replicate-size", replicas)
    after = run("migrating/accelerate_after.py", *arguments, *options, ranks=2 * replicas)
    losses = read_losses(before[0])
    assert read_losses(after[0]) == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    models = [AutoModelForCausalLM.from_pretrained(f"outputs/accelerate_{name}/model") for name in ("before", "after")]
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="accelerate merge-weights"):
        check_is_checkpoint("outputs/accelerate_before/state")
    saved = "outputs/accelerate_before/state/pytorch_model_fsdp_0"
    run_ranks(merge_fsdp_weights, 1, saved, "merged", group=False)
    shutil.copy("model/config.json", "merged")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    torch.testing.assert_close(merged.state_dict(), models[0].state_dict(), atol=0, rtol=0)
    resumed = run("migrating/accelerate_after.py", "model", "--steps", 6, "--resume", *options, ranks=2 * replicas)
    assert re.findall(r"micro-batch +(\d+)", resumed[0]) == ["11", "12"]


def test_options_of_accelerate_exist() -> None:
    """And none for FSDP or for parallelism is left out."""
    launcher = {action.dest for action in launch_command_parser()._actions}
    plugin = {f"fsdp_{name}" for name in inspect.signature(FullyShardedDataParallelPlugin).parameters}
    sizes = {f"parallelism_config_{name}" for name in inspect.signature(ParallelismConfig).parameters}
    named = read_options(ACCELERATE)
    assert named <= launcher | plugin | sizes
    assert {name for name in launcher if name.startswith(("fsdp_", "parallelism_config_"))} <= named


def test_methods_of_accelerate_exist() -> None:
    rows = read_table(ACCELERATE, options=True, number=1)
    assert len(rows) > 5
    assert [name for left, _ in rows for name in read_codes(left) if not hasattr(accelerate.Accelerator, name)] == []
    script = (EXAMPLES / "migrating/accelerate_after.py").read_text()
    assert all(code in script for code in (*read_codes(rows[0][1]), *read_codes(rows[1][1])))


def test_accelerate_reads_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with accelerate_config(monkeypatch):
        plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, True)
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (2, 4)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16


# ---------------------------------------------------------------------- from the Trainer of transformers


TRANSFORMERS = "From the Trainer of transformers"


@pytest.mark.guarantees("migrated-scripts")
@pytest.mark.slow
def test_the_trainer_of_transformers_trains_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # AdamW enlarges rounding of a weight whose gradient is almost 0, as some random weights have
    make_causal_lm({**LLAMA, "vocab_size": 257}).save_pretrained("model")
    build_byte_tokenizer().save_pretrained("model")
    arguments = ("model", "--steps", 5, "--learning-rate", 3e-3)
    with accelerate_on_cpu(monkeypatch):
        run("migrating/hf_trainer_before.py", *arguments)
    run("migrating/hf_trainer_after.py", *arguments)
    history = json.loads(Path("outputs/hf_trainer_before/trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert read_metric("hf_trainer_after", 0) == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    names = ("hf_trainer_before/model", "hf_trainer_before/checkpoint-5", "hf_trainer_after/model")
    first, *others = [AutoModelForCausalLM.from_pretrained(f"outputs/{name}").state_dict() for name in names]
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-5, rtol=0)


def test_options_of_the_trainer_of_transformers_exist() -> None:
    assert read_options(TRANSFORMERS) <= set(inspect.signature(TrainingArguments).parameters)


def test_defaults_of_the_trainer_of_transformers() -> None:
    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    stated = {"max_grad_norm": 1.0, "learning_rate": 5e-5, "weight_decay": 0.0, "lr_scheduler_type": "linear"}
    assert stated.items() <= defaults.items()
    assert defaults["average_tokens_across_devices"]


# ---------------------------------------------------------------------- from Lightning's DDPStrategy and FSDPStrategy


LIGHTNING = "From Lightning's DDPStrategy or FSDPStrategy"


@pytest.mark.slow
def test_a_run_of_lightning_trains_the_same_and_goes_on(run: Run, finish: Finish) -> None:
    before, after = (finish_losses(finish, f"lightning_{script}") for script in ("before", "after"))
    assert after == pytest.approx(before, abs=1e-5)
    assert after[-1] < after[0] - 1.0
    run("migrating/lightning_before.py", "--steps", EPOCH)
    [checkpoint] = Path("outputs/lightning_before/version_0/checkpoints").iterdir()
    run("migrating/lightning_after.py", "--ckpt-path", checkpoint)
    assert read_metric("lightning_after", 0) == pytest.approx(before[EPOCH:], abs=1e-5)


def test_a_sharded_checkpoint_of_fsdp_strategy_becomes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only GPUs could write it; this one has its layout."""
    monkeypatch.chdir(tmp_path)
    folder = Path("step.ckpt")
    command = "lightning.pytorch.utilities.consolidate_checkpoint"

    def convert() -> None:
        module_class = runpy.run_path(str(EXAMPLES / "migrating/lightning_after.py"))["LanguageModel"]
        module = module_class(learning_rate=0.5)
        folder.mkdir()
        torch.distributed.checkpoint.save({"model": module.state_dict()}, checkpoint_id=folder, no_dist=True)
        metadata = {"hyper_parameters": {"learning_rate": 0.5}, "pytorch-lightning_version": "2.6.0"}
        torch.save(metadata, folder / "meta.pt")
        with pytest.raises(ValueError, match=f"FSDPStrategy .*{command} .*step.ckpt"):
            lightning_fsdp2.load_from_checkpoint(module_class, folder)
        sys.argv = [command, str(folder), "--output_file=whole.ckpt"]
        runpy.run_module(command, run_name="__main__")
        loaded = lightning_fsdp2.load_from_checkpoint(module_class, "whole.ckpt")
        assert loaded.hparams.learning_rate == 0.5
        torch.testing.assert_close(loaded.state_dict(), module.state_dict(), atol=0, rtol=0)

    run_ranks(convert, 1, group=False)


def test_options_of_lightning_exist() -> None:
    signatures = map(inspect.signature, (FSDPStrategy, DDPStrategy, FullyShardedDataParallel, DistributedDataParallel))
    known = {name for signature in signatures for name in signature.parameters}
    assert {name.partition("=")[0] for name in read_options(LIGHTNING)} <= known
    strategies = {code.partition('"')[2].rstrip('"') for code in read_options(LIGHTNING) if '"' in code}
    assert strategies == {"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"}

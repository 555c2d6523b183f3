"""Every shell command of the documentation, of ``configs/README.md`` and of the recipes' headers is run, or parsed.

A command that trains on GPUs is marked in the text, "needs GPUs", and its options are parsed here; ``COMMANDS`` says of
each other one which test runs it.
"""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.documents import PAGES, Block, get_blocks, read_blocks
from helpers.fork_server import get_python
from helpers.models import LLAMA, make_causal_lm
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_fsdp2.cli import FSDP2CLI
from lightning_fsdp2.data import build_byte_tokenizer

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))

RUN, PARSED = "run here", "parsed here"

QUICKSTART = "tests/test_quickstart.py::test_the_loss_before_training_is_that_of_one_process"
FROM_YAML = "tests/test_documented_commands.py::test_a_page_trains_goes_on_and_exports"
LORA = "tests/test_documented_commands.py::test_an_adapter_is_exported_and_merged"
EVALUATE = "tests/test_documented_commands.py::test_a_checkpoint_is_evaluated"
WHEEL = "tests/cli/test_cli.py::test_the_wheel_works_in_an_empty_directory"

COMMANDS = {
    "make quickstart": QUICKSTART,
    "make test": "tests/test_documented_commands.py::test_targets_of_make_exist",
    "lightning-fsdp2 fit --config run.yaml": FROM_YAML,
    "lightning-fsdp2 fit --config run.yaml --ckpt_path last": FROM_YAML,
    "lightning-fsdp2 verify checkpoints/last.ckpt": FROM_YAML,
    "lightning-fsdp2 export checkpoints/last.ckpt my-model": FROM_YAML,
    "lightning-fsdp2 describe --config run.yaml --world_size 64": RUN,
    "lightning-fsdp2 describe --config run.yaml --world_size 8 --trainer.strategy.tp_size=2": RUN,
    "lightning-fsdp2 plan --config run.yaml --world_size 64": RUN,
    "lightning-fsdp2 plan --config run.yaml --world_size 64 --search best.yaml": PARSED,
    "lightning-fsdp2 quickstart": WHEEL,
    "lightning-fsdp2 --print_completion=bash > ~/.local/share/bash-completion/completions/lightning-fsdp2": (
        "tests/cli/test_cli.py::test_shell_completion"
    ),
    "lightning-fsdp2 fit --config configs/quickstart.yaml": QUICKSTART,
    "lightning-fsdp2 fit --config configs/quickstart.yaml --ckpt_path=last": PARSED,
    "lightning-fsdp2 fit --config configs/quickstart.yaml --trainer.accelerator=gpu --trainer.devices=auto": PARSED,
    "lightning-fsdp2 fit --config configs/quickstart.yaml --trainer.fast_dev_run 2": RUN,
    "lightning-fsdp2 quickstart --trainer.strategy.tp_size=2": PARSED,
    "lightning-fsdp2 quickstart --trainer.devices=4 --trainer.strategy.dp_replicate_size=2": PARSED,
    "lightning-fsdp2 quickstart --ckpt_path=last --trainer.max_steps=600": PARSED,
    "lightning-fsdp2 describe --config run.yaml --world_size 8": FROM_YAML,
    "lightning-fsdp2 fit --config run.yaml --trainer.fast_dev_run 2": FROM_YAML,
    "lightning-fsdp2 validate --config run.yaml --ckpt_path checkpoints/last.ckpt": EVALUATE,
    "lightning-fsdp2 test --config run.yaml --ckpt_path checkpoints/last.ckpt --data.test_path /data/test": EVALUATE,
    "lightning-fsdp2 consolidate checkpoints/step=100.ckpt step=100-whole.ckpt": (
        "tests/cli/test_commands.py::test_consolidate_writes_a_file"
    ),
    "lightning-fsdp2 export checkpoints/last.ckpt my-model --dtype=bfloat16": (
        "tests/cli/test_commands.py::test_export_writes_a_model_of_hugging_face"
    ),
    "lightning-fsdp2 export checkpoints/last.ckpt my-adapter": LORA,
    "lightning-fsdp2 export checkpoints/last.ckpt my-model --merge=true": LORA,
    "lightning-fsdp2 verify outputs/quickstart/last.ckpt": WHEEL,
    "lightning-fsdp2 export outputs/quickstart/last.ckpt outputs/quickstart/model": WHEEL,
    "lightning-fsdp2 export outputs/sft_llama3_8b/checkpoints/last.ckpt outputs/sft_llama3_8b/last": (
        "tests/cli/test_commands.py::test_export_writes_a_model_of_hugging_face"
    ),
}
"""Commands without their comments."""

OF_RECIPES = ("lightning-fsdp2 describe --config configs/", "lightning-fsdp2 plan --config configs/")
"""Run by tests/test_configs.py and tests/benchmarks/test_plans.py."""


def read_commands(text: str) -> list[tuple[str, str]]:
    """The commands of a text, continued lines in one, and the comment behind each."""
    lines = re.sub(r"\s*\\\n[ #]*", " ", text).splitlines()
    commands = [line.strip(" #") for line in lines if re.match(r"[ #]*(lightning-fsdp2|torchrun|srun|make) ", line)]
    parts = [re.split(r" {2,}#? *| # *", command, maxsplit=1) for command in commands]
    return [(command, "".join(comment)) for command, *comment in parts]


def get_texts() -> dict[str, str]:
    """What to look for commands in: fenced blocks of the pages, headers of the recipes."""
    texts = {
        page: "\n".join(block.text for block in read_blocks(page) if block.language in ("", "bash"))
        for page in (*PAGES, "configs/README.md")
    }
    return texts | {path.name: path.read_text().partition("\nseed_everything")[0] for path in RECIPES}


DOCUMENTED = [(name, *command) for name, text in get_texts().items() for command in read_commands(text)]

ONLY_PARSED = {text for _, text, comment in DOCUMENTED if "needs GPUs" in comment or COMMANDS.get(text) == PARSED}


@pytest.mark.guarantees("pages-are-measured")
def test_each_is_run_by_a_test_or_marked() -> None:
    assert len(DOCUMENTED) > 30
    loose = [
        (name, command)
        for name, command, comment in DOCUMENTED
        if "needs GPUs" not in comment
        and not command.startswith(OF_RECIPES)
        and re.sub(r' ARGS=".*"', "", command) not in COMMANDS
    ]
    assert loose == []
    written = {re.sub(r' ARGS=".*"', "", command) for _, command, _ in DOCUMENTED}
    assert set(COMMANDS) <= written, "a command that is no longer in the texts"


@pytest.mark.parametrize("test", sorted({test for test in COMMANDS.values() if "::" in test}))
def test_tests_that_are_named_exist(test: str) -> None:
    path, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text()


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])


def read_run_yaml(page: str) -> dict[str, Any]:
    """A page's own `run.yaml` with a model and data that are here."""
    config = next(config for block in get_blocks("yaml", page=page) if "data" in (config := yaml.safe_load(block.text)))
    arguments = config["model"]["init_args"]
    del arguments["pretrained"]
    arguments["config"] = LLAMA
    config["data"]["init_args"].update(path="text.txt", tokenizer=None)
    return config


OVERLAY = {
    "trainer": {
        "accumulate_grad_batches": 2,
        "strategy": {
            "class_path": "lightning_fsdp2.FSDP2Strategy",
            "init_args": {"dp_size": "auto", "tp_size": 2, "config": {"activation_checkpointing": "full"}},
        },
    },
    "data": {"init_args": {"batch_size": 4}},
}
"""As a search writes it."""


@pytest.fixture
def _run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a few words of it\n" * 40)
    Path("run.yaml").write_text(yaml.safe_dump(read_run_yaml("README.md")))
    Path("best.yaml").write_text(yaml.safe_dump(OVERLAY))
    Path("configs").symlink_to(ROOT / "configs")


def get_arguments(command: str) -> list[str]:
    """What the command line gets of it, from behind the launcher."""
    words = shlex.split(command)
    start = next(index for index, word in enumerate(words) if word in ("lightning-fsdp2", "lightning_fsdp2"))
    return words[start + 1 :]


@pytest.mark.slow
@pytest.mark.usefixtures("_run_yaml")
@pytest.mark.parametrize("command", sorted(ONLY_PARSED))
def test_options_are_parsed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = get_arguments(command)
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI([*arguments, "--print_config"])
    assert exit_.value.code == 0
    printed: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    path = "configs/quickstart.yaml" if "quickstart" in arguments else arguments[arguments.index("--config") + 1]
    config = yaml.safe_load(Path(path).read_text())
    assert printed["trainer"]["strategy"]["class_path"] == config["trainer"]["strategy"]["class_path"]
    if "--nproc-per-node" in command:
        assert str(printed["trainer"]["devices"]) == re.search(r"--nproc-per-node (\d+)", command)[1]


def test_the_yaml_of_the_readme_is_parsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "run.yaml").write_text(block)
        with pytest.raises(SystemExit) as exit_:
            FSDP2CLI(["fit", f"--config={tmp_path / 'run.yaml'}", "--print_config"])
        assert exit_.value.code == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["model"]["init_args"]["pretrained"] == yaml.safe_load(block)["model"]["init_args"]["pretrained"]


@pytest.mark.slow
@pytest.mark.usefixtures("_run_yaml")
@pytest.mark.parametrize("command", sorted(command for command, test in COMMANDS.items() if test == RUN))
def test_commands_run(command: str) -> None:
    run_command(command)


def run_command(command: str) -> subprocess.CompletedProcess[str]:
    words = [get_python(), "-m", "lightning_fsdp2", *get_arguments(command)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result


@pytest.mark.guarantees("page-as-written")
@pytest.mark.slow
@pytest.mark.usefixtures("_run_yaml")
@pytest.mark.parametrize(
    ("page", "expected"),
    [("README.md", ["fit", "fit", "verify", "export"]), ("docs/quickstart.md", ["describe", *3 * ["fit"], "export"])],
)
def test_a_page_trains_goes_on_and_exports(page: str, expected: list[str]) -> None:
    """Two steps and two more, by the page's file and its commands in their order."""
    config = read_run_yaml(page)
    checkpoints = config["trainer"]["callbacks"][-1]["init_args"]
    config["model"]["init_args"]["config"] = {**LLAMA, "vocab_size": 257}
    config["data"]["init_args"]["sequence_length"] = 16
    config["trainer"] |= {"accelerator": "cpu", "devices": config["trainer"]["strategy"]["init_args"].get("tp_size", 2)}
    checkpoints["every_n_train_steps"] = 2
    commands = [command for name, command, _ in DOCUMENTED if name == page and COMMANDS.get(command) == FROM_YAML]
    assert [get_arguments(command)[0] for command in commands] == expected
    steps = 0
    for command in commands:
        is_training = get_arguments(command)[0] == "fit" and "fast_dev_run" not in command
        steps += 2 * is_training
        config["trainer"]["max_steps"] = steps
        Path("run.yaml").write_text(yaml.safe_dump(config))
        result = run_command(command)
        assert ("Restored all states" in result.stderr) == ("--ckpt_path" in command)
        if steps:
            target = Path("checkpoints/last.ckpt").resolve().name
            assert re.search(r"step=(\d+)", target)[1] == str(steps)
    assert AutoModelForCausalLM.from_pretrained("my-model").num_parameters() > 0


@pytest.mark.guarantees("evaluated-checkpoints")
@pytest.mark.slow
@pytest.mark.usefixtures("_run_yaml")
def test_a_checkpoint_is_evaluated() -> None:
    """The commands of the page on serving print the loss of the exported model, and its perplexity."""
    config = read_run_yaml("README.md")
    config["model"]["init_args"]["config"] = {**LLAMA, "vocab_size": 257}
    config["data"]["init_args"].update(sequence_length=16, validation_path="text.txt")
    config["trainer"] |= {"accelerator": "cpu", "devices": 2, "max_steps": 2, "precision": "32-true"}
    config["trainer"]["callbacks"][-1]["init_args"]["every_n_train_steps"] = 2
    Path("run.yaml").write_text(yaml.safe_dump(config))
    run_command("lightning-fsdp2 fit --config run.yaml")
    run_command("lightning-fsdp2 export checkpoints/last.ckpt my-model")
    model = AutoModelForCausalLM.from_pretrained("my-model")
    tokens = build_byte_tokenizer()("a few words of it\n" * 40, return_tensors="pt").input_ids
    commands = [command.replace("/data/test", "text.txt") for command, test in COMMANDS.items() if test == EVALUATE]
    for command, stage in zip(commands, ("val", "test"), strict=True):
        output = run_command(command).stdout
        loss = float(re.search(rf"{stage}/loss\W+([\d.]+)", output)[1])
        perplexity = float(re.search(rf"{stage}/perplexity\W+([\d.]+)", output)[1])
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        # sequences begin elsewhere, so it is the same only nearly
        assert loss == pytest.approx(float(model(tokens[:, :512], labels=tokens[:, :512]).loss), abs=0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("_run_yaml")
def test_an_adapter_is_exported_and_merged() -> None:
    """The commands of the page on LoRA, on what its adapter is after two steps."""
    make_causal_lm({**LLAMA, "vocab_size": 257}).save_pretrained("base")
    config = read_run_yaml("README.md")
    config["model"]["init_args"] = {"pretrained": "base", "lora": {"r": 2}}
    config["data"]["init_args"]["sequence_length"] = 16
    config["trainer"] |= {"accelerator": "cpu", "devices": 2, "max_steps": 2}
    config["trainer"]["callbacks"][-1]["init_args"]["every_n_train_steps"] = 2
    Path("run.yaml").write_text(yaml.safe_dump(config))
    commands = [command for command, test in COMMANDS.items() if test == LORA]
    for command in ("lightning-fsdp2 fit --config run.yaml", *commands):
        run_command(command)
    base = AutoModelForCausalLM.from_pretrained("base")
    adapter = PeftModel.from_pretrained(base, "my-adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained("my-model").state_dict()
    assert adapter.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, adapter[name])


@pytest.mark.parametrize("block", get_blocks("", "bash"), ids=str)
def test_every_line_is_a_command_that_is_known(block: Block) -> None:
    """No block is passed over since nobody has looked for what is in it."""
    assert block.language == "bash" or block.page == "README.md"
    text = re.sub(r"\\\n", " ", block.text)
    lines = [line for line in text.splitlines() if line.strip() and (line[0] != "#" or read_commands(line))]
    others = [line for line in lines if re.sub(r"^(pip install |python examples/).*", "", line)]
    assert len(read_commands(block.text)) == len(others)


def test_targets_of_make_exist() -> None:
    targets = {command.split()[1] for _, command, _ in DOCUMENTED if command.startswith("make ")}
    assert targets >= {"quickstart", "test"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)

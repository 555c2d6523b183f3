"""The scripts of ``examples/`` do what their headers promise, with the numbers of one process."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.examples import EXAMPLES, Run, read_losses, read_metric
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = sorted(
    str(path.relative_to(EXAMPLES)) for folder in (EXAMPLES, EXAMPLES / "migrating") for path in folder.glob("*.py")
)

UNTRAINED = pytest.approx(5.55, abs=0.2)
"""The loss of a model that knows nothing: log 257."""

# ---------------------------------------------------------------------- what each does


@pytest.mark.guarantees("short-scripts")
def test_the_plain_loop_goes_on_where_it_was_saved(run: Run) -> None:
    whole = run("plain_loop.py", "--steps", 6)
    assert whole[1] == ""  # one rank prints
    losses = read_losses(whole[0])
    assert losses[0] == UNTRAINED
    assert losses[-1] < losses[0] - 0.5
    Path("outputs/plain_loop.ckpt").rename("outputs/other.ckpt")
    first, second = run("plain_loop.py", "--steps", 4)[0], run("plain_loop.py", "--steps", 6)[0]
    assert first + second == whole[0]


@pytest.mark.guarantees("short-scripts")
@pytest.mark.slow
def test_the_own_module_becomes_the_model_of_one_process(run: Run) -> None:
    models = []
    for ranks in (1, 2):
        run("own_module.py", "--devices", ranks, "--steps", 20, ranks=ranks)
        models.append(AutoModelForCausalLM.from_pretrained("outputs/own_module/model"))
    tokens = AutoTokenizer.from_pretrained("outputs/own_module/model")("import torch\n" * 10, return_tensors="pt")
    losses = [model(**tokens, labels=tokens["input_ids"]).loss.item() for model in models]
    assert losses[0] < 4.0
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), atol=1e-3, rtol=0)


@pytest.mark.guarantees("own-plan")
@pytest.mark.slow
def test_the_own_tp_plan_trains_as_one_process_does(run: Run) -> None:
    for ranks in (1, 2):
        run("own_tp_plan.py", "--devices", ranks, "--tp-size", ranks, "--steps", 30, ranks=ranks)
    losses = read_metric("own_tp_plan", 0)
    assert read_metric("own_tp_plan", 1) == pytest.approx(losses, abs=1e-3)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_lora_trains_a_model_on_and_leaves_it_out_of_checkpoints(run: Run) -> None:
    run("own_module.py", "--steps", 60)
    for number, base in enumerate([(), ("--pretrained", "outputs/own_module/model")]):
        run("lora.py", *base, "--steps", 80)
        losses = read_metric("lora", number, "val/loss")
        assert losses[-1] < losses[0] - 0.02
        assert losses[0] > 5.0 if base == () else losses[0] < 3.5
    sizes = [
        sum(file.stat().st_size for file in Path(f"outputs/lora/version_{number}/checkpoints").rglob("*.distcp"))
        for number in range(2)
    ]
    assert sizes[1] < 0.6 * sizes[0]  # no file has the base of the first
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained("outputs/own_module/model"), "outputs/lora/adapter"
    )
    tokens = torch.arange(32, 64)[None]
    merged = AutoModelForCausalLM.from_pretrained("outputs/lora/model")
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_two_optimizers_draw_the_circle_as_one_process_does(run: Run) -> None:
    for ranks in (1, 2):
        run("two_optimizers.py", "--devices", ranks, "--epochs", 2, ranks=ranks)
    for metric in ("train/discriminator_loss", "train/generator_loss", "train/distance"):
        alone = read_metric("two_optimizers", 0, metric)
        assert read_metric("two_optimizers", 1, metric) == pytest.approx(alone, abs=1e-3)
    run("two_optimizers.py")
    distances = read_metric("two_optimizers", 2, "train/distance")
    assert distances[0] > 0.3
    assert sum(distances[-5:]) / 5 < 0.15


@pytest.mark.guarantees("short-scripts")
@pytest.mark.slow
def test_generation_is_that_of_one_process(run: Run) -> None:
    run("own_module.py", "--steps", 60)
    prompts = ["def main", "import torch", "a prompt of another length"]
    outputs = run("generate.py", *prompts, "--pretrained", "outputs/own_module/model")
    tokenizer = AutoTokenizer.from_pretrained("outputs/own_module/model")
    model = AutoModelForCausalLM.from_pretrained("outputs/own_module/model", dtype=torch.bfloat16)
    texts = [
        tokenizer.decode(
            model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=40, do_sample=False)[0]
        )
        for prompt in prompts
    ]
    assert outputs[0].splitlines() == [f"rank 0: {text!r}" for text in texts[0::2]]
    assert outputs[1].splitlines() == [f"rank 1: {text!r}" for text in texts[1::2]]


# ---------------------------------------------------------------------- commands


def read_commands(script: str) -> list[tuple[str, bool]]:
    """The commands in a script's header, continued lines in one, and whether they need GPUs."""
    header = (EXAMPLES / script).read_text().split('"""')[1].replace("\\\n", " ")
    lines = re.findall(r"^((?:python|torchrun|accelerate launch) .*)$", header, re.MULTILINE)
    return [(re.split(r" +# ", line)[0], "needs GPUs" in line) for line in lines]


COMMANDS = [(script, *command) for script in SCRIPTS for command in read_commands(script)]


def test_headers_name_commands_whose_options_exist() -> None:
    assert {script for script, _, _ in COMMANDS} == set(SCRIPTS)
    for script, command, _ in COMMANDS:
        words = shlex.split(command)
        assert f"examples/{script}" in words, command
        options = [word for word in words[words.index(f"examples/{script}") :] if word.startswith("--")]
        assert all(f'"{option}"' in (EXAMPLES / script).read_text() for option in options), command


def test_the_readme_lists_every_script() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [script for script in SCRIPTS if f"({script})" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for _, command, needs_gpus in COMMANDS if not needs_gpus])
def test_commands_run(run: Run, tmp_path: Path, command: str) -> None:
    """As a user starts them, in an empty folder; those that read what another has written get it."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    if "outputs/" in command:
        run("own_module.py", "--steps", 10)
        run("lora.py", "--steps", 10)
    launcher, *words = shlex.split(command)
    module = ["-m", "torch.distributed.run"] if launcher == "torchrun" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, *module, *words], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]

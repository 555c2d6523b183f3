"""The scripts of ``examples/`` do what their headers promise, with the numbers of one process."""

import shlex
from pathlib import Path

import pytest
import torch
from helpers.examples import (
    COMMANDS,
    EXAMPLES,
    LORA,
    OWN_MODULE,
    SCRIPTS,
    Finish,
    Run,
    list_commands,
    read_losses,
    read_metric,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

SHORTER = {"python examples/own_tp_plan.py": "python examples/own_tp_plan.py --steps 20"}
"""Commands that take long, and what is run in their place."""

UNTRAINED = pytest.approx(5.55, abs=0.2)
"""The loss of a model that knows nothing: log 257."""

# ---------------------------------------------------------------------- what each does


@pytest.mark.guarantees("short-scripts")
@pytest.mark.slow
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
def test_the_own_tp_plan_trains_as_one_process_does(run: Run, finish: Finish) -> None:
    run("own_tp_plan.py", "--devices", 1, "--tp-size", 1, "--steps", 20, ranks=1)
    losses = read_metric("own_tp_plan", 0)
    folder = finish(SHORTER["python examples/own_tp_plan.py"])
    assert read_metric("own_tp_plan", 0, folder=folder) == pytest.approx(losses, abs=1e-3)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.timeout(600)  # more than four times as long as it takes alone
@pytest.mark.slow
def test_lora_trains_a_model_on_and_leaves_it_out_of_checkpoints(finish: Finish) -> None:
    folders = [finish(LORA), finish(f"{LORA} --pretrained outputs/own_module/model")]
    for folder in folders:
        losses = read_metric("lora", 0, "val/loss", folder=folder)
        assert losses[-1] < losses[0] - 0.02
        assert losses[0] > 5.0 if folder == folders[0] else losses[0] < 3.5
    sizes = [
        sum(file.stat().st_size for file in (folder / "outputs/lora/version_0/checkpoints").rglob("*.distcp"))
        for folder in folders
    ]
    assert sizes[1] < 0.6 * sizes[0]  # no file has the base of the first
    outputs = folders[1] / "outputs"
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(outputs / "own_module/model"), outputs / "lora/adapter"
    )
    tokens = torch.arange(32, 64)[None]
    merged = AutoModelForCausalLM.from_pretrained(outputs / "lora/model")
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_two_optimizers_draw_the_circle_as_one_process_does(run: Run, finish: Finish) -> None:
    for ranks in (1, 2):
        run("two_optimizers.py", "--devices", ranks, "--epochs", 2, ranks=ranks)
    for metric in ("train/discriminator_loss", "train/generator_loss", "train/distance"):
        alone = read_metric("two_optimizers", 0, metric)
        assert read_metric("two_optimizers", 1, metric) == pytest.approx(alone, abs=1e-3)
    folder = finish("python examples/two_optimizers.py")
    distances = read_metric("two_optimizers", 0, "train/distance", folder=folder)
    assert distances[0] > 0.3
    assert sum(distances[-5:]) / 5 < 0.15


@pytest.mark.guarantees("short-scripts")
@pytest.mark.slow
def test_generation_is_that_of_one_process(run: Run, finish: Finish) -> None:
    path = finish(OWN_MODULE) / "outputs/own_module/model"
    prompts = ["def main", "import torch", "a prompt of another length"]
    outputs = run("generate.py", *prompts, "--pretrained", path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    texts = [
        tokenizer.decode(
            model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=40, do_sample=False)[0]
        )
        for prompt in prompts
    ]
    assert outputs[0].splitlines() == [f"rank 0: {text!r}" for text in texts[0::2]]
    assert outputs[1].splitlines() == [f"rank 1: {text!r}" for text in texts[1::2]]


# ---------------------------------------------------------------------- commands


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
@pytest.mark.parametrize("command", list_commands(migrating=False))
def test_commands_run(finish: Finish, command: str) -> None:
    """Commands run as a user starts them, in an empty folder, except that a long one takes fewer steps.

    A command that reads what another one has written gets it.
    """
    finish(SHORTER.get(command, command))

"""Commands that do not wait for torch: real processes, in which nobody has imported it before."""

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fsdp2
from lightning_fsdp2.cli import main

RUN = """
import sys
from lightning_fsdp2.cli import main
try:
    main()
finally:
    slow = {"torch", "lightning", "transformers"} & set(sys.modules)
    sys.stderr.write(f"{sorted(slow)} {len(sys.modules)}")
"""
WITHOUT_TORCH = "[]"
JSONARGPARSE = "import sys, jsonargparse; sys.stderr.write(f'[] {len(sys.modules)}')"
"""Import of the package that every LightningCLI needs."""


def run(*args: str, code: str = RUN) -> tuple[int, str, list[str], str, int]:
    """Return the exit code, the output, the messages, the slow packages among the modules, and how many those are."""
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    *messages, last = result.stderr.splitlines()
    slow, _, modules = last.rpartition(" ")
    return result.returncode, result.stdout, messages, slow, int(modules)


@pytest.fixture(scope="module")
def modules_of_jsonargparse() -> int:
    return run(code=JSONARGPARSE)[-1]


@pytest.mark.guarantees("no-torch")
@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--help"], "Evaluate a model on the test data."),
        ([], "usage: lightning-fsdp2 COMMAND"),
        (["--version"], f"lightning-fsdp2 {lightning_fsdp2.__version__}"),
        (["verify", "--help"], "A directory or a single file."),
        (["export", "--help"], "Largest size of a file"),
        (["fit", "--config", "run.yaml", "--help"], "--trainer.strategy.tp_size"),
        (["plan", "-h"], "--search FILE"),
    ],
)
def test_help_imports_less_than_jsonargparse(args: list[str], shown: str, modules_of_jsonargparse: int) -> None:
    code, output, messages, slow, modules = run(*args)
    assert code == 0
    assert shown in output
    assert messages == []
    assert slow == WITHOUT_TORCH
    assert modules < modules_of_jsonargparse / 2


def test_a_misspelt_command_imports_less_than_jsonargparse(modules_of_jsonargparse: int) -> None:
    code, output, [message], slow, modules = run("fti", "--config", "run.yaml")
    assert (code, output) == (2, "")
    assert message.startswith("error: there is no command 'fti'; use one of 'fit', ")
    assert message.endswith("did you mean 'fit'?")
    assert slow == WITHOUT_TORCH
    assert modules < modules_of_jsonargparse


@pytest.mark.guarantees("no-torch")
@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["verify"], "the following arguments are required: path"),
        (["verify", "a", "--trst_checkpoint=true"], "did you mean 'trust_checkpoint'?"),
        (["consolidate", "a", "b", "--with_optimizers=maybe"], "maybe"),
        (["verify", "{}/absent"], "There is no checkpoint "),
        (["verify", ""], "The path of the checkpoint is empty"),
        (["verify", "{}/text.txt"], "was not written by `torch.save`"),
        (["consolidate", "{}", "{}/whole.ckpt"], "is incomplete: .metadata, meta.pt is missing"),
        (["export", "{}/model", "{}/exported"], "is the directory of a Hugging Face model"),
        (
            ["verify", "{}/state"],
            "Only its weights can be used, not its optimizer: put the model's config.json next to",
        ),
        (
            ["verify", "{}/runs"],
            "runs' is a folder of checkpoints, such as step=20.ckpt; give the path of one of them.",
        ),
        (["verify", "{}/fsdp"], "fsdp/pytorch_model_fsdp_0 DIRECTORY`, put the model's config.json next to"),
        (["verify", "{}/fsdp/pytorch_model_fsdp_0"], "fsdp/pytorch_model_fsdp_0 DIRECTORY`, put the model's"),
    ],
)
def test_a_mistake_does_not_import_torch(args: list[str], error: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "text.txt").write_text("no checkpoint")
    for folder, file in (
        ("state", "model.safetensors"),
        ("state", "optimizer.bin"),
        ("fsdp/pytorch_model_fsdp_0", "x"),
        ("runs/step=20.ckpt", "meta.pt"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / file).touch()
    code, output, [message], slow, _ = run(*(arg.format(tmp_path) for arg in args))
    assert (code, output) == (2, "")
    assert message.startswith("error: ")
    assert error in message
    assert slow == WITHOUT_TORCH


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_fsdp2.cli.app.run", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main(["plan"])
    assert exit_.value.code == 130
    assert "Traceback" not in capsys.readouterr().err

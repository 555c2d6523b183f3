"""Commands that do not wait for torch: real processes, in which nobody has imported it before."""

import subprocess
import sys

import pytest

import lightning_fsdp2

RUN = """
import sys
from lightning_fsdp2.cli import main
try:
    main()
finally:
    sys.stderr.write(f"torch: {'torch' in sys.modules}")
"""


def run(*args: str) -> tuple[int, str, list[str]]:
    result = subprocess.run([sys.executable, "-c", RUN, *args], capture_output=True, text=True)
    return result.returncode, result.stdout, result.stderr.splitlines()


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--help"], "Evaluate a model on the test data."),
        ([], "usage: lightning-fsdp2 COMMAND"),
        (["--version"], f"lightning-fsdp2 {lightning_fsdp2.__version__}"),
        (["verify", "--help"], "A directory or a single file."),
        (["export", "--help"], "Largest size of a file"),
    ],
)
def test_help_does_not_import_torch(args: list[str], shown: str) -> None:
    code, output, messages = run(*args)
    assert code == 0
    assert shown in output
    assert messages == ["torch: False"]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["fti", "--config", "run.yaml"], "there is no command 'fti'; use one of 'fit', "),
        (["verify"], "the following arguments are required: verify.path"),
        (["verify", "a", "--trst_checkpoint=true"], "did you mean 'trust_checkpoint'?"),
        (["consolidate", "a", "b", "--with_optimizers=maybe"], "maybe"),
    ],
)
def test_a_typing_error_does_not_import_torch(args: list[str], error: str) -> None:
    code, output, messages = run(*args)
    assert (code, output) == (2, "")
    line, torch = messages
    assert line.startswith("error: ")
    assert error in line
    assert torch == "torch: False"

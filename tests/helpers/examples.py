"""Runs the scripts of ``examples/``, and reads what they say of their losses."""

import csv
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from helpers.documents import ROOT
from helpers.ranks import run_ranks

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(
    str(path.relative_to(EXAMPLES)) for folder in (EXAMPLES, EXAMPLES / "migrating") for path in folder.glob("*.py")
)

OWN_MODULE, LORA = "python examples/own_module.py", "python examples/lora.py"
"""Commands that leave a model for others."""

Run = Callable[..., list[str]]
Finish = Callable[[str], Path]


def read_commands(script: str) -> list[tuple[str, bool]]:
    """Return the commands in a script's header, with continued lines joined, and whether each needs GPUs."""
    header = (EXAMPLES / script).read_text().split('"""')[1].replace("\\\n", " ")
    lines = re.findall(r"^((?:python|torchrun|accelerate launch) .*)$", header, re.MULTILINE)
    return [(re.split(r" +# ", line)[0], "needs GPUs" in line) for line in lines]


COMMANDS = [(script, *command) for script in SCRIPTS for command in read_commands(script)]


def list_commands(*, migrating: bool) -> list[str]:
    """Return the commands that need no GPUs: of the scripts for the page on migrating, or of the others."""
    return [
        command
        for script, command, needs_gpus in COMMANDS
        if not needs_gpus and script.startswith("migrating/") == migrating
    ]


def run_command(command: str, folder: Path, python: str) -> None:
    """Run a command of a header as a user does, in an empty folder that has the examples."""
    (folder / "examples").symlink_to(EXAMPLES)
    launcher, *words = shlex.split(command)
    module = ["-m", "torch.distributed.run"] if launcher == "torchrun" else []
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}
    result = subprocess.run(
        [python, *module, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def run_example(script: str, *arguments: object, ranks: int = 2) -> list[str]:
    """Run a script on ranks as torchrun starts them, and return what each has printed."""

    def run_rank() -> str:
        sys.argv = [script, *map(str, arguments)]
        with redirect_stdout(StringIO()) as output:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return output.getvalue()

    return run_ranks(run_rank, ranks, group=False)


def read_metric(name: str, version: int, metric: str = "train/loss", *, folder: Path | None = None) -> list[float]:
    """Return the values of a metric that a script's Trainer logged in run number ``version``, which begins at 0."""
    with open((folder or Path()) / f"outputs/{name}/version_{version}/metrics.csv") as file:
        return [float(row[metric]) for row in csv.DictReader(file) if row[metric]]


def read_losses(output: str) -> list[float]:
    """What a script with its own loop has printed."""
    return [float(loss) for loss in re.findall(r"loss (\S+)", output)]

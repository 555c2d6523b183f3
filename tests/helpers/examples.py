"""Runs the scripts of ``examples/``, and reads what they say of their losses."""

import csv
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

from helpers.documents import ROOT
from helpers.ranks import run_ranks

EXAMPLES = ROOT / "examples"

Run = Callable[..., list[str]]


def run_example(script: str, *arguments: object, ranks: int = 2) -> list[str]:
    """Run a script on ranks as torchrun starts them, and return what each has printed."""

    def run_rank() -> str:
        sys.argv = [script, *map(str, arguments)]
        with redirect_stdout(StringIO()) as output:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return output.getvalue()

    return run_ranks(run_rank, ranks, group=False)


def read_metric(name: str, version: int, metric: str = "train/loss") -> list[float]:
    """What the Trainer of a script has logged, its runs counted from 0."""
    with open(f"outputs/{name}/version_{version}/metrics.csv") as file:
        return [float(row[metric]) for row in csv.DictReader(file) if row[metric]]


def read_losses(output: str) -> list[float]:
    """What a script with its own loop has printed."""
    return [float(loss) for loss in re.findall(r"loss (\S+)", output)]

"""Compare the time until ``lightning-fsdp2`` answers with that of importing jsonargparse, on which LightningCLI builds.

Each answer needs no torch: help, and mistakes that are found without it. In every round, each command runs once, in a
process of its own. A ratio compares the two runs of a round.

    python -m benchmarks.start_up
"""
# ruff: noqa: T201

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.turns import get_median, get_ratio_cells

BASELINE = "import jsonargparse"
COMMANDS = {
    "--help": 0,
    "fit --help": 0,
    "verify --help": 0,
    "fti": 2,
    "verify --trst_checkpoint=true": 2,
    "verify absent": 2,
}
"""Arguments of the program, with its exit code."""

SCRIPT = "import sys\nfrom lightning_fsdp2.cli import main\nsys.exit(main())\n"
"""What pip installs as ``lightning-fsdp2``."""

Times = dict[str, list[float]]


def run(command: Sequence[str], code: int) -> Times:
    """Run a command and return its seconds, by each clock."""
    started, used = time.perf_counter(), read_cpu()
    ended = subprocess.run(command, capture_output=True, check=False)
    seconds = {"wall": [time.perf_counter() - started], "CPU": [read_cpu() - used]}
    if ended.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr.decode()}")
    return seconds


def read_cpu() -> float:
    """Return the CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_report(rounds: dict[str, list[Times]], args: argparse.Namespace) -> None:
    """Print versions and a Markdown table of times and ratios."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jsonargparse", "lazy-loader"))
    print(
        f"{versions}, Python {platform.python_version()}; {os.cpu_count()} CPU cores; {len(rounds[BASELINE])} rounds.\n"
    )
    print("| command | clock | ms | ratio of medians | median of ratios | 95 % interval |\n|---|---|--:|--:|--:|--:|")
    for name, times in rounds.items():
        for clock in ("wall", "CPU"):
            ours, theirs = ([time[clock] for time in found] for found in (times, rounds[BASELINE]))
            ratios = ["", "", ""] if name == BASELINE else get_ratio_cells(ours, theirs)
            print(f"| {name} | {clock} | {get_median(ours) * 1e3:.1f} | {' | '.join(ratios)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all commands in turns, and compare them with the import."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41, help="runs of each command")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "lightning-fsdp2"
        script.write_text(SCRIPT)
        commands = {BASELINE: ([sys.executable, "-c", BASELINE], 0)}
        for words, code in COMMANDS.items():
            commands[f"lightning-fsdp2 {words}"] = ([sys.executable, str(script), *words.split()], code)
        commands["python -m lightning_fsdp2 --help"] = ([sys.executable, "-m", "lightning_fsdp2", "--help"], 0)
        rounds: dict[str, list[Times]] = {name: [] for name in commands}
        for number in range(1 + args.rounds):
            for name, (command, code) in commands.items():
                times = run(command, code)
                if number > 0:  # the first round reads files from disk
                    rounds[name].append(times)
    print_report(rounds, args)


if __name__ == "__main__":
    main()

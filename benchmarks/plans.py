"""What ``lightning-fsdp2 plan`` says of five runs, and what it takes to say it on any number of ranks.

python -m benchmarks.plans            the table of docs/planning.md
python -m benchmarks.plans --ranks    CPU seconds and memory of a plan on 8, 64, 1,024 and 16,384 ranks
"""
# ruff: noqa: T201

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "planning.md"
GIB = 2**30

RANKS = (8, 64, 1024, 16384)
COLUMNS = (
    "run",
    "GPUs",
    "weights, gradients, optimizer",
    "gathered, communicated",
    "activations",
    "logits, loss, temporaries",
    "peak",
    "sent over dp",
    "over tp or cp",
    "step, s",
    "tokens/s per GPU",
    "MFU at most",
)
_MEMORY = (
    ("weights", "gradients", "optimizer states"),
    ("unsharded weights", "unsharded gradients", "communication buffers"),
    ("activations",),
    ("logits and loss", "temporaries"),
)


def read_commands() -> dict[str, str]:
    """The commands of the page's runs, by name."""
    section = PAGE.read_text().partition("## Five runs")[2].partition("\n## ")[0]
    block = section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", "")
    return {name: " ".join(command.split()) for name, command in re.findall(r"# (.+)\n(.+)", block)}


def plan(command: str) -> dict[str, Any]:
    """Run a command of the page; return its numbers."""
    arguments = shlex.split(command.removeprefix("lightning-fsdp2"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_fsdp2", *arguments, "--json=-"],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def build_row(name: str, planned: dict[str, Any]) -> list[str]:
    """The cells of the page's table; memory and traffic in GiB, of the rank that needs most."""
    rank = max(planned["ranks"], key=lambda rank: rank["peak_bytes"])
    memory = [sum(rank["peak"][category] for category in categories) for categories in _MEMORY]
    sent = {True: 0, False: 0}
    for entry in rank["traffic"]:
        sent[entry["axis"] in ("tensor_parallel", "context_parallel")] += entry["bytes"]
    shortest, longest = planned["step_seconds"]
    per_rank = planned["batch"]["tokens"] / planned["world_size"]
    return [
        name,
        f"{planned['world_size']:,}",
        *(f"{size / GIB:.1f}" for size in (*memory, rank["peak_bytes"])),
        *(f"{sent[is_model_parallel] / GIB:,.1f}" for is_model_parallel in (False, True)),
        f"{shortest:.2f} to {longest:.2f}",
        f"{per_rank / longest:,.0f} to {per_rank / shortest:,.0f}",
        f"{planned['model_flops_utilisation_at_most']:.0%}",
    ]


def print_row(cells: Iterable[str]) -> None:
    """Print a line of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_runs() -> None:
    """The table of the page."""
    print_row(COLUMNS)
    print_row(["---", *["--:"] * (len(COLUMNS) - 1)])
    for name, command in read_commands().items():
        print_row(build_row(name, plan(command)))


def print_ranks() -> None:
    """Of rank 0; each plan in a process of its own, whose children's CPU seconds and memory the system counts."""
    print_row(["ranks", "CPU seconds", "memory, GiB"])
    print_row(["--:"] * 3)
    command = next(iter(read_commands().values()))
    for ranks in RANKS:
        source = (
            "import resource; from benchmarks.plans import plan;"
            f" plan({command!r} + ' --world_size={ranks} --data.global_batch_size={ranks} --ranks=[0]');"
            " used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, capture_output=True, text=True)
        seconds, kibibytes = map(float, done.stdout.split())
        print_row([f"{ranks:,}", f"{seconds:.1f}", f"{kibibytes / 2**20:.2f}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", action="store_true")
    print_ranks() if parser.parse_args().ranks else print_runs()

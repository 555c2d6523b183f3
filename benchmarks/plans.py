"""Make the tables of docs/planning.md: plans of runs, their comparison with measurements, and the cost of planning.

python -m benchmarks.plans                the five runs
python -m benchmarks.plans --published    runs that torchtitan has published, and their plans
python -m benchmarks.plans --pipelines    the published layouts of Llama 3 405B, and their plans
python -m benchmarks.plans --ranks        CPU seconds and memory of a plan on 8, 64, 1,024 and 16,384 ranks
"""
# ruff: noqa: T201

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "planning.md"
GIB = 2**30

RANKS = (8, 64, 1024, 16384)
RUNS, PUBLISHED_RUNS, PIPELINES = "Five runs", "Published runs", "Llama 3 405B"
"""Headings of the sections of docs/planning.md that have the commands."""

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
    "step, s: at least, about",
    "tokens/s per GPU: about, at most",
    "MFU: about, at most",
)
PUBLISHED_COLUMNS = (
    "run",
    "tokens/s per GPU: measured",
    "at most",
    "about",
    "seconds: about / measured",
    "GiB: reserved",
    "allocated",
    "held",
    "verdict",
)
PIPELINE_COLUMNS = (
    "run",
    "MFU: published",
    "about",
    "at most",
    "step, s: at least, about",
    "waiting",
    "allocated",
    "held",
    "verdict",
)
_MEMORY = (
    ("weights", "gradients", "optimizer states"),
    ("unsharded weights", "unsharded gradients", "communication buffers"),
    ("activations",),
    ("logits and loss", "temporaries"),
)


@dataclass(frozen=True)
class Published:
    """Measurements of a run that torchtitan has published. With ``is_matched``, it ran in bfloat16, as in the plan."""

    tokens: tuple[int, ...]
    """Tokens per second and GPU: first as planned, then compiled or with asynchronous tensor parallelism."""

    gibibytes: tuple[float, ...]
    """Reserved GiB, in the same order."""

    is_matched: bool = True


PUBLISHED = {
    "A": Published((5762, 6667), (82.4, 77.0)),
    "B": Published((5605, 6514), (67.0, 62.0)),
    "C": Published((3890,), (83.9,), is_matched=False),
    "D": Published((2540,), (84.2,), is_matched=False),
    "E": Published((1071,), (84.0,), is_matched=False),
    "F": Published((548,), (84.5,), is_matched=False),
    "G": Published((597, 652), ()),
    "H": Published((4378, 4809), ()),
}
"""Published runs on H100s with 96 GB of HBM2e at 2.4 TB/s and 500 W.

Sources: A and B, https://arxiv.org/abs/2410.06511; C to F, in float8, https://discuss.pytorch.org/t/215082; G and H,
torchtitan, benchmarks/ (2025-06, vanilla and asynchronous)."""


PUBLISHED_UTILISATION = {"16,384 GPUs": 0.41, "8,192 GPUs": 0.43}
"""Model FLOPs utilisation of Llama 3 405B on tp 8 x pp 16, by the beginnings of the runs' names.

Source: https://arxiv.org/abs/2407.21783, table 4."""


def read_commands(heading: str) -> dict[str, str]:
    """Return the commands in a section of docs/planning.md, by name."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    block = section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", "")
    return {name: " ".join(command.split()) for name, command in re.findall(r"# (.+)\n(.+)", block)}


def plan(command: str) -> dict[str, Any]:
    """Run a command of docs/planning.md, and return the numbers of its plan."""
    arguments = shlex.split(command.removeprefix("lightning-fsdp2"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_fsdp2", *arguments, "--json=-"],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def build_row(name: str, planned: dict[str, Any]) -> list[str]:
    """Build a row of the five runs. Memory and traffic are in GiB, for the rank that needs the most memory."""
    rank = max(planned["ranks"], key=lambda rank: rank["peak_bytes"])
    memory = [sum(rank["peak"][category] for category in categories) for categories in _MEMORY]
    sent = {True: 0, False: 0}
    for entry in rank["traffic"]:
        sent[entry["axis"] in ("tensor_parallel", "context_parallel")] += entry["bytes"]
    at_least, about = planned["step_seconds"]["at_least"], planned["step_seconds"]["estimate"]
    per_rank = planned["batch"]["tokens"] / planned["world_size"]
    used = planned["model_flops_utilisation"]
    return [
        name,
        f"{planned['world_size']:,}",
        *(f"{size / GIB:.1f}" for size in (*memory, rank["peak_bytes"])),
        *(f"{sent[is_model_parallel] / GIB:,.1f}" for is_model_parallel in (False, True)),
        f"{at_least:.2f}, {about:.2f}",
        f"{per_rank / about:,.0f}, {per_rank / at_least:,.0f}",
        f"{used['estimate']:.0%}, {used['at_most']:.0%}",
    ]


def build_published_row(name: str, planned: dict[str, Any]) -> list[str]:
    """Build a row of the published runs. The first letter of a run's name is its key in ``PUBLISHED``."""
    published = PUBLISHED[name[0]]
    seconds, per_rank = planned["step_seconds"], planned["batch"]["tokens"] / planned["world_size"]
    ratio = published.tokens[0] * seconds["estimate"] / per_rank
    return [
        name,
        ", ".join(f"{tokens:,}" for tokens in published.tokens),
        f"{per_rank / seconds['at_least']:,.0f}",
        f"{per_rank / seconds['estimate']:,.0f}",
        f"{ratio:.2f}" if published.is_matched else f"not matched ({ratio:.2f})",
        ", ".join(f"{size:.1f}" for size in published.gibibytes) or "-",
        f"{planned['peak_bytes'] / GIB:.1f}",
        " to ".join(f"{size / GIB:.1f}" for size in planned["reserved_bytes"]),
        planned["verdict"],
    ]


def build_pipeline_row(name: str, planned: dict[str, Any]) -> list[str]:
    """Build a row of the published pipelines. The waiting is that of the rank that waits the least."""
    seconds, used = planned["step_seconds"], planned["model_flops_utilisation"]
    waiting = min(rank["reached"]["waiting"] for rank in planned["ranks"]) / seconds["estimate"]
    return [
        name,
        f"{PUBLISHED_UTILISATION[name.partition(':')[0]]:.0%}",
        f"{used['estimate']:.0%}",
        f"{used['at_most']:.0%}",
        f"{seconds['at_least']:.2f}, {seconds['estimate']:.2f}",
        f"{waiting:.0%}",
        f"{planned['peak_bytes'] / GIB:.1f}",
        " to ".join(f"{size / GIB:.1f}" for size in planned["reserved_bytes"]),
        planned["verdict"],
    ]


def print_row(cells: Iterable[str]) -> None:
    """Print a line of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_table(heading: str, columns: Sequence[str], build: Callable[[str, dict[str, Any]], list[str]]) -> None:
    """Print a table from the commands in a section of docs/planning.md."""
    print_row(columns)
    print_row(["---", *["--:"] * (len(columns) - 1)])
    for name, command in read_commands(heading).items():
        print_row(build(name, plan(command)))


def print_ranks() -> None:
    """Print the CPU seconds and the memory of a plan of rank 0, as the system counts them for a separate process."""
    print_row(["ranks", "CPU seconds", "memory, GiB"])
    print_row(["--:"] * 3)
    command = next(iter(read_commands(RUNS).values()))
    for ranks in RANKS:
        source = (
            "import resource; from benchmarks.plans import plan;"
            f" plan({command!r} + ' --world_size={ranks} --data.global_batch_size={ranks} --ranks=[0]');"
            " used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, capture_output=True, text=True)
        seconds, kibibytes = map(float, done.stdout.split())
        print_row([f"{ranks:,}", f"{seconds:.1f}", f"{kibibytes / 2**20:.2f}"])


def main() -> None:
    """Print the table that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--pipelines", action="store_true")
    args = parser.parse_args()
    if args.ranks:
        print_ranks()
    elif args.published:
        print_table(PUBLISHED_RUNS, PUBLISHED_COLUMNS, build_published_row)
    elif args.pipelines:
        print_table(PIPELINES, PIPELINE_COLUMNS, build_pipeline_row)
    else:
        print_table(RUNS, COLUMNS, build_row)


if __name__ == "__main__":
    main()

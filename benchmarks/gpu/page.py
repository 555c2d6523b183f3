"""Output of a benchmark: its figures as a JSON file and as a Markdown page."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import Outcome

_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits")


@cache
def get_gpu() -> tuple[str, str, float] | None:
    """Return the name, the driver and the GiB of the first GPU, without starting CUDA; None if there is no GPU."""
    if torch.cuda.device_count() == 0:
        return None
    line = subprocess.run(_QUERY, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    name, driver, memory = line.split(", ")
    return name, driver, float(memory) / 1024


def build_heading(args: argparse.Namespace) -> dict[str, Any]:
    """Build the heading of the output: versions, hardware, scale and budget."""
    packages = ("torch", "lightning", "transformers")
    heading = {package: version(package) for package in packages} | {"Python": platform.python_version()}
    if gpu := get_gpu():
        heading |= {"GPU": f"{gpu[0]}, {gpu[2]:.1f} GiB", "driver": gpu[1], "CUDA": torch.version.cuda}
    else:
        heading |= {"CPU": f"{os.cpu_count()} cores"}
    return heading | {"scale": args.scale, "budget, s": args.budget}


def write_files(title: str, args: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Write the two files in ``args.output`` again. Readers see each file complete at every moment."""
    heading = build_heading(args)
    name = title.lower().replace(" ", "-")
    content = {"heading": heading, "parts": [asdict(outcome) for outcome in outcomes]}
    _replace(args.output / f"{name}.json", json.dumps(content, indent=1) + "\n")
    _replace(args.output / f"{name}.md", build_page(title, heading, outcomes))


def build_page(title: str, heading: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Build the page as Markdown."""
    lines = [f"# {title}", "", ", ".join(f"{name} {value}" for name, value in heading.items()), ""]
    lines += build_lines(
        ("part", "status", "seconds"),
        [(outcome.name, outcome.status, round(outcome.seconds, 1) or None) for outcome in outcomes],
    )
    for outcome in outcomes:
        lines += [f"## {outcome.name}", "", outcome.purpose, ""]
        for table in outcome.tables:
            lines += [f"{table.title}:", "", *build_lines(table.columns, table.rows)]
        if outcome.reason:
            lines += [f"{outcome.status}:", "", "```", outcome.reason, "```", ""]
    return "\n".join(lines)


def build_lines(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Build the lines of a table as Markdown, followed by an empty line."""
    lines = [columns, ["---"] + ["--:"] * (len(columns) - 1), *([format_cell(cell) for cell in row] for row in rows)]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def format_cell(value: Any) -> str:
    """Format a cell. Floats below 1,000 have four digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f"{path.suffix}.tmp")
    temporary.write_text(text)
    temporary.replace(path)

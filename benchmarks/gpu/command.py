"""The command line that ``check`` and ``speed`` have in common."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.page import write_files
from benchmarks.gpu.parts import REAL, SCALES, TOY, Part, has_cuda, run_parts


def build_parser(description: str | None, parts: Sequence[Part], output: str) -> argparse.ArgumentParser:
    """Build a parser with the options that both commands have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in parts]
    parser.add_argument("--output", type=Path, default=Path(output), metavar="FOLDER", help=f"default: {output}")
    parser.add_argument(
        "--budget", type=float, default=600, metavar="SECONDS", help="time limit for all parts; default: 600"
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--scale", choices=SCALES, default=REAL if has_cuda() else TOY, help="default: real on CUDA")
    return parser


def run(title: str, parts: Sequence[Part], parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    """Run the parts that the command line chooses, and exit with 1 if one fails."""
    args = parser.parse_args(arguments)
    if args.budget <= 0:
        parser.error(f"--budget {args.budget} leaves no time; give a number of seconds > 0.")
    args.output.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts if part.name in args.parts]
    if not run_parts(chosen, args, partial(write_files, title, args)):
        sys.exit(1)

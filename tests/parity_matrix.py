"""Compare every causal language model family that has a tensor parallel plan with one process, on every layout.

Usage: python tests/parity_matrix.py [--families a,b] [--layouts "tp2;cp2" | --context] [--output docs/parity.md]
"""

import argparse
import os
import platform
import sys
import time
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from helpers.families import NOT_BUILT, get_families
from helpers.family_parity import CONTEXT_LAYOUTS, LAYOUTS, STEPS, get_optional_refusal, measure_parity
from helpers.ranks import RankError
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    cells: dict[tuple[str, str], str] = {}
    failures = []
    reasons: dict[str, str] = {}
    start = time.monotonic()
    layouts = arguments.layouts or list(CONTEXT_LAYOUTS if arguments.context else LAYOUTS)
    for family in arguments.families or get_families():
        for layout in layouts:
            try:
                cells[family, layout] = f"{measure_parity(family, layout):.0e}"
            except RankError as error:
                reason = get_optional_refusal(family, error)
                if reason is not None:
                    cells[family, layout] = "refused"
                    reasons[family] = reason
                    continue
                cells[family, layout] = "**FAILED**"
                # a rank that died has left no error but its output
                details = error if arguments.verbose or error.cause is None else ""
                failures.append(f"{family}, {layout}: {error.cause!r}\n{details}")
        row = [cells[family, layout] for layout in layouts]
        print(f"{time.monotonic() - start:6.0f} s  {family:24}", *row, flush=True)
    for failure in failures:
        print(failure)
    if arguments.output:
        arguments.output.write_text(
            summarize(cells, reasons, "Context parallel" if arguments.context else "Tensor and sequence parallel")
        )
        print(f"wrote {arguments.output}")
    return int(bool(failures))


def summarize(cells: dict[tuple[str, str], str], reasons: dict[str, str], kind: str) -> str:
    families = list(dict.fromkeys(family for family, _ in cells))
    layouts = list(dict.fromkeys(layout for _, layout in cells))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [
        f"# {kind} parity",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, Python {platform.python_version()}, {versions}. Written by"
        " tests/parity_matrix.py (`make parity`, `make parity-oldest`).",
        "",
        "A tiny random model of every causal language model family of transformers that has a tensor parallel plan,",
        f"its own or ours, with the attention it takes by default: {STEPS} AdamW steps with clipping in float32, on",
        "each layout and in one process. A number is the largest difference of any gradient in the first step,",
        "relative to that parameter's largest gradient (or to 1 % of the model's largest one). In every cell with a",
        "number losses, all gradients before and after clipping, the gradient norm and the weights after the last step",
        "are within the tolerances of the tests: 1e-5 for losses and for gradients relative to their parameter's",
        "largest, and ten times that for gradients after the first step.",
        "",
        "`sp` is `sequence_parallel=True`; `accumulate 2` two micro-batches per step, synchronised once.",
        "",
        "| family | " + " | ".join(layouts) + " |",
        "|---|" + "--:|" * len(layouts),
        *(f"| {family} | " + " | ".join(cells[family, layout] for layout in layouts) + " |" for family in families),
    ]
    if reasons:
        lines += ["", "Refused:", "", *(f"- `{family}`: {reason}" for family, reason in reasons.items())]
    lines += ["", "Not built here:", "", *(f"- `{family}`: {reason}" for family, reason in NOT_BUILT.items()), ""]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=lambda text: text.split(","), help="model types; default: all")
    parser.add_argument(
        "--layouts",
        type=lambda text: text.split(";"),
        help=f"of {', '.join([*LAYOUTS, *CONTEXT_LAYOUTS])}; separated by ;",
    )
    parser.add_argument("--context", action="store_true", help="the layouts of context parallelism")
    parser.add_argument("--output", type=Path, help="the table, as Markdown")
    parser.add_argument("--verbose", action="store_true", help="print the tracebacks of failures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

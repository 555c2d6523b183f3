"""Compare every causal language model family that has a tensor parallel plan with one process, on every layout.

Two families at a time. What is measured is kept under ``.parity/`` for as long as nothing changes that can reach it
(:mod:`helpers.reach`), so that an interrupted run goes on where it stopped.

Usage: python tests/parity_matrix.py [--families a,b] [--layouts "tp2;cp2" | --context] [--output docs/parity.md]
"""

import argparse
import os
import sys
import time
import warnings
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from helpers.families import NOT_BUILT, get_families
from helpers.family_parity import CONTEXT_LAYOUTS, LAYOUTS, STEPS, get_optional_refusal, measure_parity
from helpers.ledger import VERSIONS, Ledger, get_key, hold, run_jobs
from helpers.ranks import RankError
from helpers.reach import ROOT, find_reach
from transformers.utils import logging

FOLDER = ROOT / ".parity"
FAILED = "**FAILED**"


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.monotonic()
    layouts = arguments.layouts or list(CONTEXT_LAYOUTS if arguments.context else LAYOUTS)
    families = arguments.families or get_families()
    with hold(FOLDER):
        key = get_key(find_reach(Path(__file__)))
        ledgers = {family: Ledger(FOLDER / family / f"{key}.jsonl") for family in families}
        jobs = {
            family: partial(measure_family, family, [layout for layout in layouts if is_open(ledger, layout)], ledger)
            for family, ledger in ledgers.items()
        }
        for family, status, _ in run_jobs(jobs, FOLDER):
            ledger = ledgers[family] = Ledger(ledgers[family].path)
            for layout in layouts:
                if layout not in ledger.results:
                    ledger.results[layout] = {"cell": FAILED, "error": f"ended with {status}, see .parity/{family}.log"}
            row = [ledger.results[layout]["cell"] for layout in layouts]
            print(f"{time.monotonic() - start:6.0f} s  {family:24}", *row, flush=True)
    cells = {(family, layout): ledgers[family].results[layout] for family in families for layout in layouts}
    failures = [f"{family}, {layout}: {cell['error']}" for (family, layout), cell in cells.items() if "error" in cell]
    print(*failures, sep="\n")
    if arguments.output:
        kind = "Context parallel" if arguments.context else "Tensor and sequence parallel"
        arguments.output.write_text(summarize(cells, kind))
        print(f"wrote {arguments.output}")
    return int(bool(failures))


def is_open(ledger: Ledger, layout: str) -> bool:
    """Whether a layout has not been measured, or failed."""
    return ledger.results.get(layout, {"cell": FAILED})["cell"] == FAILED


def measure_family(family: str, layouts: list[str], ledger: Ledger) -> int:
    for layout in layouts:
        try:
            ledger.add(layout, cell=f"{measure_parity(family, layout):.0e}")
        except RankError as error:
            reason = get_optional_refusal(family, error)
            if reason is None:
                # a rank that died has left no error but its output
                ledger.add(layout, cell=FAILED, error=str(error if error.cause is None else repr(error.cause)))
                print(error)
            else:
                ledger.add(layout, cell="refused", reason=reason)
    return 0


def summarize(cells: dict[tuple[str, str], dict[str, str]], kind: str) -> str:
    families = list(dict.fromkeys(family for family, _ in cells))
    layouts = list(dict.fromkeys(layout for _, layout in cells))
    reasons = {family: cell["reason"] for (family, _), cell in cells.items() if "reason" in cell}
    lines = [
        f"# {kind} parity",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, "
        + ", ".join(f"{name} {VERSIONS[name]}" for name in ("Python", "torch", "transformers"))
        + ". Written by tests/parity_matrix.py (`make parity`, `make parity-oldest`).",
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
        *(
            f"| {family} | " + " | ".join(cells[family, layout]["cell"] for layout in layouts) + " |"
            for family in families
        ),
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
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

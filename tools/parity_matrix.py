"""Compare model families of transformers on every parallel layout with one process.

The families are causal language models that have a tensor parallel plan, or models that see images. Two families are
measured at a time. Results are kept under ``.parity/`` until a file that can affect them changes
(:mod:`helpers.reach`). So an interrupted run continues where it stopped.

Usage: python tools/parity_matrix.py [--context | --megatron | --experts | --pipelines | --images |
--expert-images]
[--families a,b] [--layouts "tp2;cp2"] [--output docs/x.md]
"""

import argparse
import inspect
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from helpers import family_parity, vision_families, vision_parity
from helpers.families import NOT_BUILT, get_all_families, get_families, get_mixture_families
from helpers.family_parity import (
    CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MEGATRON_LAYOUTS,
    PIPELINE_LAYOUTS,
    get_optional_refusal,
    measure_parity,
)
from helpers.ledger import VERSIONS, Ledger, get_key, hold, run_jobs
from helpers.ranks import RankError
from helpers.reach import ROOT, find_reach
from helpers.vision_parity import get_optional_vision_refusal, get_vision_families, measure_vision_parity
from transformers.utils import logging

from lightning_fsdp2.parallel.expert.checks import REFUSED

FOLDER = ROOT / ".parity"
FAILED = "**FAILED**"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A comparison of families on layouts, and the text of its page."""

    title: str
    about: list[str]
    folder: Path
    layouts: list[str]
    get_families: Callable[[], list[str]]
    not_built: dict[str, str]
    measure: Callable[[str, str], float]
    get_optional_refusal: Callable[[str, RankError], str | None]

    def get_key(self) -> str:
        """Return a hash of all files that affect a number of this matrix."""
        return get_key({*find_reach(Path(inspect.getfile(self.measure))), Path(__file__)})


ABOUT_TEXT = [
    "This page compares every causal language model family of transformers that has a tensor parallel plan, its own or",
    "ours. A tiny random model of each family, with the attention that it uses by default, trains for",
    f"{family_parity.STEPS} AdamW steps with clipping in float32, on each layout and in one process. A number is the",
    "largest difference of any gradient in the first step, relative to that parameter's largest gradient (or to 1 % of",
    "the model's largest gradient). In every cell with a number, losses, all gradients before and after clipping, the",
    "gradient norm and the weights after the last step are within the tolerances of the tests: 1e-5 for losses, 1e-5",
    "of a parameter's largest gradient for gradients, and ten times that for gradients after the first step.",
    "",
    "`sp` means `sequence_parallel=True`. `accumulate 2` means two micro-batches per step, synchronised once.",
]
ABOUT_IMAGES = [
    "This page compares every family of transformers that reads text with images. A tiny random model of each family,",
    "vision towers included, computes gradients in float32, on each layout and in one process. The gradients are those",
    f"of {2 * vision_parity.STEPS} accumulated micro-batches (of {vision_parity.STEPS} on each of two data parallel",
    "ranks), and every sequence has an image. A number is the largest difference of any parameter's gradient, relative",
    "to that parameter's largest gradient (or to 0.1 % of the model's largest gradient). Every number is at most 1e-5.",
    "",
    "`dp2` means two data parallel ranks, `tp2` two tensor parallel ranks, and `sp` `sequence_parallel=True`. Towers",
    "without a plan are replicated over tensor parallel ranks, with a warning.",
]

ABOUT_EXPERTS = [
    "This page compares every family of transformers that packs its experts. It is made as the page on tensor",
    "parallelism: a tiny random model of each family trains for",
    *ABOUT_TEXT[2:7],
    "",
    "`ep2` means two expert parallel ranks, which are also data parallel ranks. With `efsdp2`, two ranks shard each",
    "expert; `HSDP2` means two replicas, `dp2` two data parallel ranks, `tp2` two tensor parallel ranks, `cp2` two",
    "context parallel ranks, and `sp` `sequence_parallel=True`. `accumulate 2` means two micro-batches per step,",
    "synchronised once.",
]
ABOUT_PIPELINES = [
    "This page compares every causal language model family of transformers that has a tensor parallel plan, or packed",
    "experts, on pipeline parallel layouts. It is made as the page on tensor parallelism: a tiny random model of each",
    "family trains for",
    *ABOUT_TEXT[2:7],
    "",
    "`pp2` means two pipeline parallel ranks, with one layer each. A step has two micro-batches, which run through the",
    "stages in the order of 1F1B. `dp2` means two data parallel ranks, `tp2` two tensor parallel ranks, and `sp`",
    "`sequence_parallel=True`.",
]
REFUSED_EXPERTS = {family: f"refused, because {reason}." for family, reason in REFUSED.items()}

TEXT = Matrix(
    title="Tensor and sequence parallel parity",
    about=ABOUT_TEXT,
    folder=FOLDER,
    layouts=list(LAYOUTS),
    get_families=get_families,
    not_built=NOT_BUILT,
    measure=measure_parity,
    get_optional_refusal=get_optional_refusal,
)
CONTEXT = replace(TEXT, title="Context parallel parity", layouts=list(CONTEXT_LAYOUTS))
MEGATRON = replace(TEXT, title="Tensor parallel parity under Megatron-FSDP", layouts=list(MEGATRON_LAYOUTS))
EXPERTS = replace(
    TEXT,
    title="Expert parallel parity",
    about=ABOUT_EXPERTS,
    layouts=list(EXPERT_LAYOUTS),
    get_families=get_mixture_families,
    not_built=REFUSED_EXPERTS,
)
PIPELINES = replace(
    TEXT,
    title="Pipeline parallel parity",
    about=ABOUT_PIPELINES,
    layouts=list(PIPELINE_LAYOUTS),
    get_families=get_all_families,
)
IMAGES = Matrix(
    title="Parity of multimodal models with images",
    about=ABOUT_IMAGES,
    folder=FOLDER / "images",
    layouts=list(vision_parity.LAYOUTS),
    get_families=get_vision_families,
    not_built=vision_families.NOT_BUILT,
    measure=measure_vision_parity,
    get_optional_refusal=get_optional_vision_refusal,
)
EXPERT_IMAGES = replace(
    IMAGES,
    title="Expert parallel parity of multimodal models with images",
    layouts=list(vision_parity.EXPERT_LAYOUTS),
    get_families=vision_parity.get_vision_mixtures,
)
_MATRICES = (TEXT, CONTEXT, MEGATRON, EXPERTS, PIPELINES, IMAGES, EXPERT_IMAGES)
LAYOUTS_OF_ALL = [layout for matrix in _MATRICES for layout in matrix.layouts]


def main() -> int:
    """Measure everything that is not known yet, and return 1 if something failed."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.monotonic()
    matrix: Matrix = arguments.matrix
    layouts = arguments.layouts or matrix.layouts
    families = arguments.families or matrix.get_families()
    with hold(FOLDER):
        key = matrix.get_key()
        ledgers = {family: Ledger(matrix.folder / family / f"{key}.jsonl") for family in families}
        jobs = {
            family: partial(
                measure_family, matrix, family, [layout for layout in layouts if is_open(ledger, layout)], ledger
            )
            for family, ledger in ledgers.items()
        }
        for family, status, _ in run_jobs(jobs, matrix.folder):
            ledger = ledgers[family] = Ledger(ledgers[family].path)
            for layout in layouts:
                if layout not in ledger.results:
                    error = f"ended with {status}, see {matrix.folder}/{family}.log"
                    ledger.results[layout] = {"cell": FAILED, "error": error}
            row = [ledger.results[layout]["cell"] for layout in layouts]
            print(f"{time.monotonic() - start:6.0f} s  {family:24}", *row, flush=True)
    cells = {(family, layout): ledgers[family].results[layout] for family in families for layout in layouts}
    failures = [f"{family}, {layout}: {cell['error']}" for (family, layout), cell in cells.items() if "error" in cell]
    print(*failures, sep="\n")
    if arguments.output:
        arguments.output.write_text(summarize(cells, matrix))
        print(f"wrote {arguments.output}")
    return int(bool(failures))


def is_open(ledger: Ledger, layout: str) -> bool:
    """Return whether a layout has not been measured yet, or has failed."""
    return ledger.results.get(layout, {"cell": FAILED})["cell"] == FAILED


def measure_family(matrix: Matrix, family: str, layouts: list[str], ledger: Ledger) -> int:
    """Measure each layout of a family, and write the results into the family's ledger."""
    for layout in layouts:
        try:
            ledger.add(layout, cell=f"{matrix.measure(family, layout):.0e}")
        except AssertionError as error:
            reason = matrix.get_optional_refusal(family, error) if isinstance(error, RankError) else None
            if reason is None:
                # a rank that died has left only its output, without an error
                cause = getattr(error, "cause", None)
                ledger.add(layout, cell=FAILED, error=str(error if cause is None else repr(cause)))
                print(error)
            else:
                ledger.add(layout, cell="refused", reason=reason)
    return 0


def summarize(cells: dict[tuple[str, str], dict[str, str]], matrix: Matrix) -> str:
    """Return the page as Markdown."""
    families = list(dict.fromkeys(family for family, _ in cells))
    layouts = list(dict.fromkeys(layout for _, layout in cells))
    reasons: dict[tuple[str, str], str] = {}
    for (family, _), cell in cells.items():
        if "reason" in cell:  # the same for all sizes
            reasons.setdefault((family, re.sub(r"_size=\d+", "_size", cell["reason"])), cell["reason"])
    lines = [
        f"# {matrix.title}",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, "
        + ", ".join(f"{name} {VERSIONS[name]}" for name in ("Python", "torch", "transformers"))
        + ". Written by tools/parity_matrix.py (`make parity`, `make parity-oldest`).",
        "",
        *matrix.about,
        "",
        "| family | " + " | ".join(layouts) + " |",
        "|---|" + "--:|" * len(layouts),
        *(
            f"| {family} | " + " | ".join(cells[family, layout]["cell"] for layout in layouts) + " |"
            for family in families
        ),
    ]
    if reasons:
        lines += ["", "Refused:", "", *(f"- `{family}`: {reason}" for (family, _), reason in reasons.items())]
    not_built = sorted(matrix.not_built.items())
    lines += ["", "Not built here:", "", *(f"- `{family}`: {reason}" for family, reason in not_built), ""]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=lambda text: text.split(","), help="model types; default: all")
    parser.add_argument(
        "--layouts",
        type=lambda text: text.split(";"),
        help=f"of {', '.join(LAYOUTS_OF_ALL)}; separated by ;",
    )
    kinds = parser.add_mutually_exclusive_group()
    for name, matrix, text in (
        ("--context", CONTEXT, "the layouts of context parallelism"),
        ("--megatron", MEGATRON, "the layouts of tensor parallelism under Megatron-FSDP"),
        ("--experts", EXPERTS, "the layouts of expert parallelism"),
        ("--pipelines", PIPELINES, "the layouts of pipeline parallelism"),
        ("--expert-images", EXPERT_IMAGES, "mixtures that see images, with images"),
        ("--images", IMAGES, "models that see images, with images"),
    ):
        kinds.add_argument(name, action="store_const", const=matrix, default=TEXT, dest="matrix", help=text)
    parser.add_argument("--output", type=Path, help="the table, as Markdown")
    arguments = parser.parse_args()
    if arguments.output and (arguments.families or arguments.layouts):
        parser.error("--output writes a whole page; leave out --families and --layouts, or --output")
    return arguments


if __name__ == "__main__":
    sys.exit(main())

"""Write the page of supported models from the pages of parity.

Usage: python tools/supported_models.py --output docs/models.md
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers.models.auto import modeling_auto

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
_LEAD = re.compile(
    r"(\w+_size(=\d)?: )?"
    r"((context parallelism|sequence_parallel=True) is not possible for the model: "
    r"|the model cannot be (sharded|divided into pipeline stages): |refused, because )?"
)
"""What the column says already, at the beginning of a reason."""
NOT_BUILT, REFUSED = "Not built here:", "refused"

OPENING = """# Supported models

**Under `FSDP2Strategy()`, a model needs no support of its own**, because FSDP2 shards parameters, whatever the
architecture. (Of the families below, only `udop` is refused.) The other kinds of parallelism divide the computation
inside a model. The tables say which families they support. They are made from the pages of parity, which compare the
gradients of a tiny model of each family with those of one process.

To check your own model, ask `describe`. It builds the model without weights, applies the layout, and says what a rank
would hold. If the model cannot have the layout, it says why:

```bash
lightning-fsdp2 describe --config run.yaml --world_size 8 --trainer.strategy.tp_size=2
```

* **Your family is not in the tables.** It has no tensor parallel plan, neither in transformers nor in this package.
  Train it with FSDP2 alone, or [give your own plan](tensor_parallel.md#which-plan);
  [own_tp_plan.py](../examples/own_tp_plan.py) does so for a model that transformers does not have.
* **Your family has "no".** The footnote says why.
* **Your model is an encoder, or an encoder-decoder.** [Vision, encoder and encoder-decoder models](multimodal.md) says
  what works.

The name of a family is the `model_type` in its `config.json`.

## Causal language models

Each column leads to the page with the numbers. `yes` means that the gradients are those of one process on every layout
that was tried, `in part` that some layouts are refused. An empty cell means that there is nothing to divide (a model
without experts), or that the family was not tried. The column Megatron-FSDP is about this strategy alone and with
tensor and sequence parallelism; the others are about FSDP2.
"""
MIDDLE = """
## Models that read images

These models were compared with an image in every sequence. The column `data` is FSDP2 alone. [Vision, encoder and
encoder-decoder models](multimodal.md#models-that-read-images) says more about images, also under context and pipeline
parallelism. Megatron-FSDP was not tried with images.
"""
CLOSING = """
The tables are written by tools/supported_models.py (`make parity`).
"""


class Page:
    """What a page of parity says: cells by family and layout, reasons of refusals by family."""

    def __init__(self, name: str) -> None:
        """Read the page ``name`` of the folder of documents."""
        text = (DOCS / name).read_text()
        head, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        self.cells = {(row[0], layout): cell for row in rows for layout, cell in zip(head[1:], row[1:], strict=True)}
        self.layouts, self.families = head[1:], [row[0] for row in rows]
        refused, _, not_built = text.partition(NOT_BUILT)
        self.reasons, self.not_built = _read_reasons(refused), _read_reasons(not_built)


def _read_reasons(text: str) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for family, reason in re.findall(r"^- `([^`]+)`: (.*)$", text, re.MULTILINE):
        reasons.setdefault(family, []).append(_shorten(reason))
    return reasons


def _shorten(reason: str) -> str:
    """Return what is wrong, without names of classes and layers, the option, and what to do instead."""
    reason = re.sub(r"\b\w+(For[A-Z]\w+|LMHeadModel)\b", "the model", reason)
    reason = re.sub(r"\bits layer [\w.]+\.\d+ ", "a layer ", reason)
    reason = _LEAD.sub("", reason, count=1)
    reason = re.split(r"\. (?=[A-Z])|[;,] (?:use|train) ", reason)[0].rstrip(".")
    return f"{reason[0].upper()}{reason[1:]}."


get_page = cache(Page)


@dataclass(frozen=True)
class Column:
    """A kind of parallelism: its title, its page, and which layouts of the page try it."""

    title: str
    page: str
    tries: Callable[[str], bool] = lambda layout: True

    def get_cell(self, family: str, notes: list[str]) -> str:
        """Return what the page says of a family, and add the reason of a refusal to ``notes``."""
        page = get_page(self.page)
        if family not in page.families:
            return f"no{_add_note(page.not_built[family][0], notes)}" if family in page.not_built else ""
        cells = {layout: page.cells[family, layout] for layout in page.layouts if self.tries(layout)}
        failed = [layout for layout, cell in cells.items() if not re.fullmatch(r"\de-\d\d", cell)]
        if not failed:
            return "yes"
        # a page has the reasons of a family in the order of its layouts
        refused = [layout for layout in page.layouts if page.cells[family, layout] == REFUSED]
        reason = page.reasons[family][0 if failed[0] == refused[0] else -1]
        return ("no" if len(failed) == len(cells) else "in part") + _add_note(reason, notes)


def _add_note(reason: str, notes: list[str]) -> str:
    if reason not in notes:
        notes.append(reason)
    return f"[^{notes.index(reason) + 1}]"


LANGUAGE = (
    Column("tensor", "parity.md", lambda layout: "sp" not in layout),
    Column("sequence", "parity.md", lambda layout: "sp" in layout),
    Column("context", "parity-context-parallel.md", lambda layout: "tp" not in layout),
    Column("pipeline", "parity-pipeline-parallel.md"),
    Column("expert", "parity-expert-parallel.md", lambda layout: not re.search("tp|cp", layout)),
    Column("Megatron-FSDP", "parity-megatron.md"),
)
VISION = (
    Column("data", "parity-images.md", lambda layout: "tp" not in layout),
    Column("tensor", "parity-images.md", lambda layout: layout == "tp2"),
    Column("sequence", "parity-images.md", lambda layout: "sp" in layout),
    Column("expert", "parity-expert-parallel-images.md", lambda layout: "tp" not in layout),
)


def build_table(columns: tuple[Column, ...], classes: dict[str, str], notes: list[str]) -> list[str]:
    """Return the lines of a table with a row for each family."""
    families = sorted({family for column in columns for family in get_page(column.page).families})
    lines = [
        "| family | " + " | ".join(f"[{column.title}]({column.page})" for column in columns) + " | class |",
        "|---|---|" + "---|" * len(columns),
    ]
    for family in families:
        name = classes[family.split(" ")[0]]
        cells = [column.get_cell(family, notes) for column in columns]
        lines.append(f"| `{family}` | " + " | ".join(cells) + f" | `{name}` |")
    return lines


def write_page() -> str:
    """Return the page as Markdown."""
    notes: list[str] = []
    language, vision = build_table(LANGUAGE, TEXT, notes), build_table(VISION, IMAGES, notes)
    texts = [f"[^{number}]: {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([OPENING, *language, MIDDLE, *vision, CLOSING, *texts, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS / "models.md", help="the page, as Markdown")
    parser.parse_args().output.write_text(write_page())

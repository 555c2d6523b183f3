"""What the page on layouts says that `describe` prints, it prints."""

import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from helpers.documents import ROOT, read_blocks

from lightning_fsdp2.cli import main

PAGE = "docs/layout.md"

ROWS = re.findall(r"^\| `(\w+)` \| `(--[^`]*)` \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / PAGE).read_text(), re.MULTILINE)


def describe(config: str, *arguments: str) -> str:
    """What the command writes; in this process, which has imported what it needs."""
    command = ["lightning-fsdp2", "describe", f"--config={ROOT / 'configs' / config}.yaml", *arguments]
    with patch.object(sys, "argv", command), contextlib.redirect_stdout(io.StringIO()) as output:
        main()
    return output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_memory_is_what_describe_says(row: Sequence[str]) -> None:
    config, arguments, held, gathered = row
    totals = json.loads(describe(config, *shlex.split(arguments), "--format=json"))["totals"]
    # a weight's two states in AdamW are as large as its gradient each
    bytes_held = totals["weight_bytes"] + 3 * totals["gradient_bytes"]
    assert f"{bytes_held / 2**30:.1f}" == held
    assert f"{totals['largest_gathered_bytes'] / 2**30:.1f}" == gathered


def test_the_table_is_read() -> None:
    assert len(ROWS) == 8


@pytest.mark.slow
def test_the_output_that_is_quoted() -> None:
    [quoted] = [block.text for block in read_blocks(PAGE) if block.language == "console"]
    printed = {line.strip() for line in describe("pretrain_llama3_8b_fsdp2").splitlines()}
    assert {line.strip() for line in quoted.splitlines()} <= printed

"""What the page on pipeline parallelism says of numbers, by the executed orders and by the sizes of the models."""

import re

import pytest
from helpers.documents import ROOT
from helpers.recipes import LLAMA_70B

from lightning_fsdp2.parallel.pipeline.schedule import build_orders, compute_bubble

PAGE = " ".join((ROOT / "docs" / "pipeline_parallel.md").read_text().split())
ROWS = re.findall(r"(?<=\| )(\d+) \| (\d+) \| (\d+) % \| (\d+) % \| (\d+) %", PAGE)


def test_the_table_is_read() -> None:
    assert len(ROWS) == 6


@pytest.mark.guarantees("bubble")
@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_bubbles_are_those_of_the_orders(row: tuple[str, ...]) -> None:
    ranks, micro_batches, *shares = map(int, row)
    for schedule, stages, share in (
        ("1f1b", 1, shares[0]),
        ("gpipe", 1, shares[0]),
        ("interleaved_1f1b", 2, shares[1]),
        ("interleaved_1f1b", 4, shares[2]),
    ):
        orders = build_orders(schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages)
        assert f"{compute_bubble(orders):.0%}" == f"{share}%"


def test_sizes_are_those_of_the_models() -> None:
    gathered, hidden_states = 2 * LLAMA_70B / 8 / 2**30, 2 * 8192 * 8192 / 8 / 2**20
    assert f"gathers {gathered:.1f} GiB of weights" in PAGE
    assert f"gathers {gathered / 4:.1f} GiB, once per batch" in PAGE
    assert f"moves {hidden_states:.0f} MiB forward and {hidden_states:.0f} MiB back" in PAGE
    assert f"vocabulary of 128,256 take {2 * 8192 * 128256 / 2**30:.1f} GiB in bfloat16" in PAGE

"""Every pair of values of the flags of FSDP2, in as few runs as cover them, against one process."""

from collections import OrderedDict
from itertools import combinations
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from helpers.cases import MESHES, make_case
from helpers.mesh_runs import check_parity
from helpers.ranks import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config

PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "32-true": ("32-true", {}),
    "bf16-mixed": ("bf16-mixed", {}),
    "autocast": (
        "32-true",
        {
            "autocast_dtype": torch.bfloat16,
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
        },
    ),
}
PREFETCH: dict[str, dict[str, Any]] = {
    "prefetch": {},
    "prefetch-0": {"enable_fsdp2_prefetch": False},
    "prefetch-3": {"fsdp2_forward_prefetch_depth": 3, "fsdp2_backward_prefetch_depth": 1},
}
VALUES: OrderedDict[str, list[Any]] = OrderedDict(
    mesh=[
        *("dp2", "dp4", "hsdp2x2", "tp2", "tp2+sp", "tp2+loss", "dp2xtp2+sp+loss", "hsdp2xtp2"),
        *("cp2", "cp2+ulysses", "cp2xtp2+sp+loss"),
    ],
    activation_checkpointing=[False, "full", "selective"],
    precision=list(PRECISIONS),
    prefetch=list(PREFETCH),
    reshard_after_forward=[None, True, False, 2],
    enable_compile=[True, False],
    loss=["full", "chunked"],
    defer_fsdp_grad_sync=[True, False],
    offload_policy=[None, True],
    patch_is_packed_sequence=[False, True],
    accumulate=[3, 1],
    clip=[None, 0.1],
    model=["llama", "gpt2"],
    tied=[False, True],
    meta=[False, True],
)
"""Where any value would do, allpairspy takes the last: of compilation and accumulation the cheaper one."""


def is_possible(values: list[Any]) -> bool:
    """Of a row, or of its beginning: shards of fewer ranks are not divided further."""
    row = dict(zip(VALUES, values, strict=False))
    return row.get("reshard_after_forward") != 2 or row["mesh"] == "dp4"


ROWS = [row._asdict() for row in AllPairs(VALUES, filter_func=is_possible)]
FAST = (5, 9, 18, 21)
"""Rows that every change runs. They have nearly every value, but no compiled layers, and no mesh of four ranks."""


@pytest.mark.guarantees("flags-together")
def test_every_pair_of_values_occurs() -> None:
    for (first, values), (second, others) in combinations(VALUES.items(), 2):
        impossible = len(values) - 1 if (first, second) == ("mesh", "reshard_after_forward") else 0
        seen = {(row[first], row[second]) for row in ROWS}
        assert len(seen) == len(values) * len(others) - impossible, (first, second)


def test_rows_of_every_change_have_nearly_every_value() -> None:
    assert {MESHES[ROWS[number]["mesh"]][0] for number in FAST} == {2}
    lacking = {
        name: {*map(str, values)} - {str(ROWS[number][name]) for number in FAST} for name, values in VALUES.items()
    }
    assert {name: lacking[name] for name in lacking if lacking[name] and name != "mesh"} == {
        "activation_checkpointing": {"selective"},
        "enable_compile": {"True"},
        "reshard_after_forward": {"2"},
        "clip": {"None"},
    }


def describe(row: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in row.items())


@pytest.mark.guarantees("flags-together")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{i:02}-{row['mesh']}", marks=() if i in FAST else pytest.mark.slow)
        for i, row in enumerate(ROWS)
    ],
)
def test_together_they_have_the_numbers_of_one_process(row: dict[str, Any], compile_without_code: None) -> None:
    world_size, sizes, tensor_parallel = MESHES[row["mesh"]]
    precision, policy = PRECISIONS[row["precision"]]
    flags = ("activation_checkpointing", "reshard_after_forward", "enable_compile", "defer_fsdp_grad_sync")
    config = FSDP2Config(
        **tensor_parallel,
        **policy,
        **PREFETCH[row["prefetch"]],
        **{name: row[name] for name in (*flags, "offload_policy", "patch_is_packed_sequence")},
    )
    case = make_case(
        row["model"],
        **{name: row[name] for name in ("accumulate", "clip", "tied", "meta", "loss")},
        precision=precision,
        strategy={**sizes, "config": config},
    )
    try:
        run_ranks(check_parity, world_size, case)
    except Exception as error:
        raise AssertionError(describe(row)) from error

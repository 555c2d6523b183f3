"""A checkpoint of any layout is one of every other: Lightning's files and directories, and ours of any mesh."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cover import Matrix
from helpers.layouts import LAYOUTS, SAVED_AT, Run, State, load_weights, train
from helpers.ranks import run_ranks
from torch import Tensor

import lightning_fsdp2

WEIGHTS_ONLY = (("plain", "theirs"), ("pp2-full", "theirs"))
"""Lightning numbers the states of a single file as if the optimizer had one group of all parameters, and fails."""

CELLS = {
    f"{writer}-to-{reader}": (writer, reader)
    for writer, reader in product(LAYOUTS, LAYOUTS)
    if LAYOUTS[writer].is_mixture == LAYOUTS[reader].is_mixture and (writer, reader) not in WEIGHTS_ONLY
}
FAILED = ("megatron-dp2-tp2-to-dp3", "mixture-plain-to-cp2-ep2", "mixture-dp2-to-cp2-ep2")
"""Cells that have ever failed, as far as is known."""

GROUP = 6
"""How many checkpoints a layout reads in one fork of its ranks, in which all but the first are cheaper."""


ONLY_WRITTEN = ("format", "async_save")
"""Features of what is written, which a layout that reads ignores."""

ONLY_READ = ("cp_size", "dp_replicate_size")
"""What replicas and context parallel ranks write is cut as by other data parallel ranks."""


def describe(writer: str, reader: str) -> dict[str, Hashable]:
    """Return the features of a cell."""
    written, read = LAYOUTS[writer], LAYOUTS[reader]
    return {
        "mixture": written.is_mixture,
        "same data parallel size": written.data_parallel_size == read.data_parallel_size,
        **{f"written: {name}": value for name, value in written.features.items() if name not in ONLY_READ},
        **{f"read: {name}": value for name, value in read.features.items() if name not in ONLY_WRITTEN},
    }


MATRIX = Matrix(
    "layouts of checkpoints",
    {name: describe(*cell) for name, cell in CELLS.items()},
    fast=("ddp2-to-plain",),
    always=(*FAILED, "dp2-to-dp4", "dp4-to-dp2", *(f"{name}-to-{name}" for name in LAYOUTS)),
    costs={name: LAYOUTS[reader].cost for name, (_, reader) in CELLS.items()},
)

Write = Callable[[str, bool], tuple[Path, list[Run]]]


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Train on a layout, save on the way and go on to the end; each run only once."""
    runs: dict[tuple[str, bool], tuple[Path, list[Run]]] = {}

    def write(name: str, optimize_unused: bool) -> tuple[Path, list[Run]]:
        key = name, optimize_unused
        if key not in runs:
            path = tmp_path_factory.mktemp(name) / "step.ckpt"
            run = LAYOUTS[name].run(lambda: train(name, seed=0, optimize_unused=optimize_unused, save=path))
            runs[key] = path, run
        return runs[key]

    return write


def list_groups() -> list[Any]:
    """Return the arguments of the test: writers, reader."""
    writers = defaultdict(list)
    for name, (writer, reader) in CELLS.items():
        tier = "fast" if name in MATRIX.fast else "cover" if name in MATRIX.chosen else "rest"
        writers[tier, reader].append(writer)
    return [
        MATRIX.make_group(f"{reader}-{tier}-{i // GROUP}", [f"{writer}-to-{reader}" for writer in group], group, reader)
        for (tier, reader), every in writers.items()
        for i in range(0, len(every), GROUP)
        for group in [every[i : i + GROUP]]
    ]


@pytest.mark.guarantees(
    "any-layout-resumes", "checkpoints-of-experts", "checkpoints-of-stages", "lightning-reads-them", "lightnings-files"
)
@pytest.mark.parametrize(("writers", "reader"), list_groups())
def test_training_goes_on_from_the_checkpoint_of_any_layout(
    writers: list[str], reader: str, write: Write, tmp_path: Path
) -> None:
    checkpoints, expected, optimize = {}, {}, {}
    for writer in writers:
        # of "theirs" only what it reads: others write states of that parameter, or none
        optimize[writer] = LAYOUTS[reader].optimizes_unused and (writer == "theirs" or LAYOUTS[writer].optimizes_unused)
        path, expected[writer] = write(writer, optimize[writer])
        needs_file = reader.endswith("plain") and path.is_dir()
        checkpoints[writer] = consolidate(path, tmp_path / writer) if needs_file else path

    def read() -> dict[str, Run]:
        return {
            writer: train(reader, seed=1, optimize_unused=optimize[writer], resume=path)
            for writer, path in checkpoints.items()
        }

    ranks = LAYOUTS[reader].run(read)
    for writer in writers:
        check_continuation(writer, reader, [runs[writer] for runs in ranks], expected[writer])


def check_continuation(writer: str, reader: str, actual: list[Run], expected: list[Run]) -> None:
    for rank in actual:
        assert_same_state(rank.states["start"], expected[0].states["saved"])
        assert_same_tensors(rank.states["end"].weights, actual[0].states["end"].weights)  # of replicas too
    is_same = reader == writer
    losses = get_losses(expected)[SAVED_AT:]
    # stages and context parallel ranks add up the losses of parts of a batch: six times the last bit of a loss
    tolerance = 3e-6 if any(axis in name for axis in ("pp", "cp") for name in (writer, reader)) else 1e-6
    assert get_losses(actual) == pytest.approx(losses, rel=0, abs=0 if is_same else tolerance)
    weights, others = actual[0].states["end"].weights, expected[0].states["end"].weights
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=0 if is_same else 5e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), WEIGHTS_ONLY)
def test_lightning_takes_the_weights_of_a_single_file(writer: str, reader: str, write: Write) -> None:
    path, expected = write(writer, True)
    for weights in LAYOUTS[reader].run(lambda: load_weights(reader, seed=1, path=path)):
        torch.testing.assert_close(weights, expected[0].states["saved"].weights, rtol=0, atol=0)


def consolidate(directory: Path, path: Path) -> Path:
    """Lightning's strategies of one process read single files only."""
    run_ranks(lambda: lightning_fsdp2.consolidate_checkpoint(directory, path), 1, group=False)
    return path


def assert_same_state(actual: State, expected: State) -> None:
    assert actual.step == expected.step == SAVED_AT
    assert actual.schedule == expected.schedule
    assert actual.groups == expected.groups
    assert_same_tensors(actual.weights, expected.weights)
    assert_same_tensors(actual.optimizer, expected.optimizer)


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in actual.items() if not torch.equal(tensor, expected[name])] == []


def get_losses(ranks: list[Run]) -> list[float]:
    """Of the global batch; ranks of one replica have the same."""
    return [sum(losses) / len(ranks) for losses in zip(*(rank.losses for rank in ranks), strict=True)]

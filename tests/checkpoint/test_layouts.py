"""A checkpoint of any layout is one of every other: Lightning's files and directories, and ours of any mesh."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.layouts import LAYOUTS, MIXTURE_LAYOUTS, SAVED_AT, Run, State, load_weights, train
from helpers.ranks import run_ranks
from torch import Tensor

import lightning_fsdp2

SAMPLE = [
    ("theirs", "dp2-tp2-sp"),
    ("pp2-interleaved", "dp2"),
]
UNEVEN = ("megatron-dp2-tp2", "dp3")

WEIGHTS_ONLY = ("plain", "theirs")
"""Lightning numbers the states of a single file as if the optimizer had one group of all parameters, and fails."""

READERS_APART = (0, 1, 3, 7, 12)
"""How far a layout's readers are from it in the list. What is stored says nothing of who reads it, so each layout
writes for almost a third of all, itself among them, and reads what as many, of three kinds or more, have written."""

NAMES = list(LAYOUTS)
CELLS = [(NAMES[i], NAMES[(i + apart) % len(NAMES)]) for i in range(len(NAMES)) for apart in READERS_APART]

MIXTURE_SAMPLE = [("ep2-efsdp2", "mixture-dp2")]
MIXTURE_CELLS = [
    *MIXTURE_SAMPLE,
    *((writer, reader) for writer in MIXTURE_LAYOUTS for reader in MIXTURE_LAYOUTS if "ep" in writer or "ep" in reader),
]
"""Every pair with expert parallelism on at least one side."""

Write = Callable[[str, bool], tuple[Path, list[Run]]]


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Train on a layout, save on the way and go on to the end; each run only once."""
    runs: dict[tuple[str, bool], tuple[Path, list[Run]]] = {}

    def write(name: str, optimize_unused: bool) -> tuple[Path, list[Run]]:
        key = name, optimize_unused
        if key not in runs:
            path = tmp_path_factory.mktemp(name) / "step.ckpt"
            layout = (LAYOUTS | MIXTURE_LAYOUTS)[name]
            runs[key] = path, layout.run(lambda: train(name, seed=0, optimize_unused=optimize_unused, save=path))
        return runs[key]

    return write


@pytest.mark.guarantees("any-layout-resumes", "checkpoints-of-stages", "lightning-reads-them", "lightnings-files")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(*cell, id="-to-".join(cell), marks=() if cell in SAMPLE else pytest.mark.slow)
        for cell in dict.fromkeys([*SAMPLE, UNEVEN, *CELLS])
        if cell != WEIGHTS_ONLY
    ],
)
def test_training_goes_on_from_the_checkpoint_of_any_layout(
    writer: str, reader: str, write: Write, tmp_path: Path
) -> None:
    check_continuation(writer, reader, write, tmp_path)


@pytest.mark.guarantees("any-layout-resumes", "checkpoints-of-experts")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(*cell, id="-to-".join(cell), marks=() if cell in MIXTURE_SAMPLE else pytest.mark.slow)
        for cell in dict.fromkeys(MIXTURE_CELLS)
    ],
)
def test_a_mixture_goes_on_with_its_experts_on_other_ranks(
    writer: str, reader: str, write: Write, tmp_path: Path
) -> None:
    check_continuation(writer, reader, write, tmp_path)


def check_continuation(writer: str, reader: str, write: Write, tmp_path: Path) -> None:
    layouts = LAYOUTS | MIXTURE_LAYOUTS
    # of "theirs" only what it reads: others write states of that parameter, or none
    optimize_unused = layouts[reader].optimizes_unused and (writer == "theirs" or layouts[writer].optimizes_unused)
    path, expected = write(writer, optimize_unused)
    if reader.endswith("plain") and path.is_dir():
        path = consolidate(path, tmp_path)
    actual = layouts[reader].run(lambda: train(reader, seed=1, optimize_unused=optimize_unused, resume=path))
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
def test_lightning_takes_the_weights_of_a_plain_file(write: Write) -> None:
    writer, reader = WEIGHTS_ONLY
    path, expected = write(writer, True)
    for weights in LAYOUTS[reader].run(lambda: load_weights(reader, seed=1, path=path)):
        torch.testing.assert_close(weights, expected[0].states["saved"].weights, rtol=0, atol=0)


def consolidate(directory: Path, folder: Path) -> Path:
    """Lightning's strategies of one process read single files only."""
    path = folder / "whole.ckpt"
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

"""The cache of a search reads back what it has written, and runs no code that others have put there."""

import dataclasses
import io
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import xxhash

from lightning_fsdp2.plan.cache import _RECORDS, Cache
from lightning_fsdp2.plan.pipeline import ActionOperations, RankSummary
from lightning_fsdp2.plan.simulation.blocks import Summary
from lightning_fsdp2.plan.simulation.recorder import Attention, Collective, Group, Operation
from lightning_fsdp2.plan.simulation.reserved import Reserved

KNOBS: Any = "tp2"  # the cache knows only its text

COLLECTIVE = Collective("all-gather", Group(("tensor_parallel",), (0, 1)), True, 8)
OPERATION = Operation(2, 4, torch.bfloat16, COLLECTIVE, Attention(4, 8, 32, True, False), 3)
SUMMARY = Summary([OPERATION, Operation(1, 1, None)], {"forward": 5}, Reserved(1, 2), 4)
RANK = RankSummary(
    peak_bytes=9,
    reserved=Reserved(3, 4),
    actions=[ActionOperations(stage=0, is_backward=True, runs=2, operations=[OPERATION])],
    rest=[OPERATION],
    layers=(1, 2),
    boundary=[(torch.Size([2]), torch.half)],
    num_experts=0,
)


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("result", [SUMMARY, [RANK], "tp_size=3 does not divide 4"], ids=["summary", "ranks", "text"])
def test_a_result_is_read_back(result: Any, tmp_path: Path) -> None:
    Cache(tmp_path, "run").put(KNOBS, result)
    assert Cache(tmp_path, "run").get(KNOBS) == result
    assert Cache(tmp_path, "other run").get(KNOBS) is None
    assert len(list(tmp_path.iterdir())) == 1


def test_all_classes_of_results_are_known() -> None:
    """A class that is missing in the list would make every search start from nothing."""

    def find(kind: Any) -> Iterator[type]:
        if dataclasses.is_dataclass(kind):
            yield kind  # type: ignore[misc]
        hints = get_type_hints(kind).values() if dataclasses.is_dataclass(kind) else get_args(kind)
        for part in hints:
            yield from find(part)

    assert {*find(Summary), *find(RankSummary)} == {*_RECORDS}


@pytest.mark.guarantees("cache-of-plans")
@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_code_in_the_cache_does_not_run(write: Any, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", "run")
    cache.put(KNOBS, "text")
    [file] = (tmp_path / "cache").iterdir()
    for content in (Evil(tmp_path / "made"), {"result": [Evil(tmp_path / "made")]}):
        write(content, buffer := io.BytesIO())
        file.write_bytes(buffer.getvalue())
        assert cache.get(KNOBS) is None
        file.write_bytes(xxhash.xxh3_128(buffer.getvalue()).digest() + buffer.getvalue())
        assert cache.get(KNOBS) is None
    assert not (tmp_path / "made").exists()


def test_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "run")
    cache.put(KNOBS, SUMMARY)
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
        assert cache.get(KNOBS) is None
    file.unlink()
    os.mkfifo(file)
    assert cache.get(KNOBS) is None


def test_a_full_disk_does_not_end_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    cache = Cache(tmp_path, "run")
    monkeypatch.setattr(Path, "replace", fill)
    with caplog.at_level(logging.WARNING):
        cache.put(KNOBS, SUMMARY)
        cache.put(KNOBS, SUMMARY)
    assert [record.getMessage().count("cannot be written to any more") for record in caplog.records] == [1]
    assert list(tmp_path.iterdir()) == []
    assert cache.get(KNOBS) is None

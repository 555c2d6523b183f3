"""A failure on one rank is an error on all of them, and none waits for what will not come."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks

from lightning_fsdp2.compat.torch import get_group_timeout
from lightning_fsdp2.ranks.coordination import (
    compare_in_store,
    gather_objects,
    get_group,
    on_every_rank,
    on_first_rank,
    shorten_timeout,
    wait_for_all_ranks,
)


class StubbornError(Exception):
    """One that cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail(error: Exception) -> Any:
    raise error


def test_every_rank_learns_what_the_first_one_did() -> None:
    def run() -> None:
        rank = dist.get_rank()
        assert on_first_rank(lambda: rank + 10) == 10
        with pytest.raises(OSError, match="no room"):
            on_first_rank(lambda: fail(OSError(28, "no room")))
        with pytest.raises(StubbornError if rank == 0 else RuntimeError, match="1 and 2") as caught:
            on_first_rank(lambda: fail(StubbornError(1, 2)))
        assert (caught.traceback[-1].name == "fail") == (rank == 0), "where it failed is known"

    run_ranks(run, 2)


def test_every_rank_raises_where_any_failed() -> None:
    def run() -> None:
        rank = dist.get_rank()
        assert on_every_rank(lambda: rank) == rank
        with pytest.raises(ValueError, match="rank 1"):
            on_every_rank(lambda: fail(ValueError("rank 1")) if rank == 1 else rank)
        with pytest.raises(ValueError, match=f"^rank {rank}$") as caught:
            on_every_rank(lambda: fail(ValueError(f"rank {rank}")))
        assert caught.traceback[-1].name == "fail"
        assert gather_objects(rank) == [0, 1]

    run_ranks(run, 2)


def test_one_process_needs_no_group() -> None:
    assert on_first_rank(lambda: 1) == on_every_rank(lambda: 1) == 1
    assert gather_objects(3) == [3]
    with pytest.raises(ValueError, match="alone"):
        on_every_rank(lambda: fail(ValueError("alone")))


@pytest.mark.parametrize(("timeout", "expected"), [(2, 2), (30, 5), (31, 31), (120, 120)])
def test_a_timeout_above_the_default_is_not_shortened(timeout: int, expected: int) -> None:
    found = shorten_timeout(timedelta(minutes=timeout), timedelta(minutes=5))
    assert found == timedelta(minutes=expected)


def test_each_purpose_has_one_group_whose_timeout_may_change() -> None:
    def run() -> None:
        group = get_group("save", timedelta(seconds=40))
        assert (group.size(), get_group_timeout(group)) == (2, timedelta(seconds=40))
        assert get_group("save", timedelta(seconds=30)) is group
        assert get_group_timeout(group) == timedelta(seconds=30)
        assert get_group("load", timedelta(seconds=40)) not in (group, dist.group.WORLD)

    run_ranks(run, 2)


@pytest.mark.guarantees("race-for-the-store")
def test_no_rank_leaves_while_another_still_talks_to_the_store(tmp_path: Path) -> None:
    """Rank 0 keeps the store, and the end of its process may come right after the call."""

    def run() -> None:
        store = type(dist.group.WORLD.get_group_store())
        delete_key = store.delete_key

        def delete_late(own: Any, key: str) -> Any:
            time.sleep(dist.get_rank() * 0.5)
            delete_key(own, key)
            (tmp_path / str(dist.get_rank())).touch()

        with patch.object(store, "delete_key", delete_late):
            wait_for_all_ranks("end", timedelta(seconds=30), "Nothing.")
        assert (tmp_path / "1").exists()

    run_ranks(run, 2)


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_is_missing_is_late_or_has_ended(ends: bool) -> None:
    def run() -> None:
        wait_for_all_ranks("begin", timedelta(seconds=60), "")
        if dist.get_rank() == 1 and ends:
            dist.destroy_process_group()
        elif dist.get_rank() == 1:
            time.sleep(3)
        else:
            end = "before the connection to a rank ended" if ends else "within 0:00:01"
            with pytest.raises(RuntimeError, match=f"wants to save, but not every rank .*point {end}: rank 1 did not"):
                wait_for_all_ranks("save", timedelta(seconds=60 if ends else 1), "Call it on all ranks.")

    run_ranks(run, 2)


def test_answers_that_differ_are_known_to_all_ranks() -> None:
    def run() -> list[Any]:
        found = []
        for answers in ("aaa", "aba", "abc", "aaa"):
            found.append(compare_in_store("letters", answers[dist.get_rank()], range(3), timedelta(seconds=30)))
            # of some ranks only, in between
            if dist.get_rank() > 0:
                found.append(compare_in_store("letters", answers[dist.get_rank()], [1, 2], timedelta(seconds=30)))
        return found

    whole = [{}, {"a": [0, 2], "b": [1]}, {"a": [0], "b": [1], "c": [2]}, {}]
    first, *others = run_ranks(run, 3)
    assert first == whole
    of_two = [{}, {"b": [1], "a": [2]}, {"b": [1], "c": [2]}, {}]
    assert others == [[each for pair in zip(whole, of_two, strict=True) for each in pair]] * 2


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_answer_is_named(missing: int) -> None:
    def run() -> None:
        compare_in_store("letters", "a", [0, 1], timedelta(seconds=30))
        wait_for_all_ranks("go on", timedelta(seconds=30), "")
        if dist.get_rank() != missing:
            with pytest.raises(RuntimeError, match=f"^: rank {missing} did not$"):
                compare_in_store("letters", "a", [0, 1], timedelta(seconds=1))
        wait_for_all_ranks("end", timedelta(seconds=30), "")

    run_ranks(run, 2)


def test_answers_do_not_pile_up_in_the_store() -> None:
    def run() -> list[int]:
        store = dist.group.WORLD.get_group_store()
        sizes = []
        for number in range(4):
            compare_in_store("letters", "a" * number, [0, 1], timedelta(seconds=30))
            dist.barrier()
            sizes.append(store.num_keys())
            dist.barrier()
        return sizes

    for sizes in run_ranks(run, 2):
        assert len(set(sizes[1:])) == 1

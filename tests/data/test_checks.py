"""Numbers that data modules refuse."""

import os

import pytest

from lightning_fsdp2.data.checks import check_minimum, check_workers


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1, ValueError, "batches=1 is less than 2, the smallest value that works: one is no batch."),
        (10**30, ValueError, f"batches={10**30} is more than 2147483647, the largest value that works."),
        ("8", TypeError, "batches='8' must be an int, at least 2."),
        (2.5, TypeError, "batches=2.5 must be an int, at least 2."),
        (True, TypeError, "batches=True must be an int, at least 2."),
    ],
)
def test_a_count_that_is_none_is_refused(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        check_minimum("batches", value, 2, "one is no batch")  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_workers_go_by_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    check_workers(64)
    with pytest.raises(ValueError, match=r"num_workers=65 would start 65 processes .* 4 processor.* use at most 64"):
        check_workers(65)

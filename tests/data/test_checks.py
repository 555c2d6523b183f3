"""Numbers that data modules refuse."""

import os
from pathlib import Path

import pytest

from lightning_fsdp2 import TextDataModule
from lightning_fsdp2.data.checks import check_minimum, check_workers, name_cache


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


@pytest.mark.parametrize(
    ("error", "is_named"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError("Not enough disk space. Needed: Unknown size (download: 0)"), True),
        (PermissionError(13, "Permission denied", "/c/x.lock"), True),
        (OSError(30, "Read-only file system", "/c"), True),
        (PermissionError(13, "Permission denied", "/cat/a.txt"), False),
        (FileNotFoundError("path='x' is no file"), False),
        (ValueError("batch_size=0"), False),
    ],
)
def test_a_cache_that_cannot_be_written_is_named(error: Exception, is_named: bool) -> None:
    wrapper = RuntimeError("An error occurred while generating the dataset")
    wrapper.__cause__ = error
    for each in (error, wrapper):
        named = name_cache(each, "/c")
        assert (named is not each) == is_named
        assert not is_named or str(named).startswith("cache_dir='/c': the tokenised data cannot be kept there (")
        assert "Needed" not in str(named) or not is_named


def test_a_data_module_names_the_cache_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fill(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_fsdp2.data.text.load_documents", fill)
    data = TextDataModule(path=__file__, cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=rf"^cache_dir='{tmp_path}': .*No space left on device"):
        data.prepare_data()

"""A checkpoint that is being replaced is there afterwards, or the new one: after interrupts and errors."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.models import LLAMA, make_causal_lm
from torch import nn

from lightning_fsdp2 import export_hf, load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.files import drafts
from lightning_fsdp2.checkpoint.files.drafts import Draft, clean_folder, link_checkpoint
from lightning_fsdp2.checkpoint.files.errors import NotDurableError
from lightning_fsdp2.checkpoint.formats.single_file import write_file

MODEL = nn.Linear(2, 2)

SAVES: dict[str, Callable[[Path], None]] = {
    "directory": lambda path: save_checkpoint(path, MODEL, extra="new"),
    "file": lambda path: write_file(path, {"state_dict": MODEL.state_dict()}),
    "link": lambda path: link_checkpoint(path.with_name("other.ckpt"), path),
    "export": lambda path: [export_hf(make_causal_lm(LLAMA), path, overwrite=True), None][1],
}
"""Ways to replace a directory."""


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in a file system that cannot exchange directories, such as NFS."""
    monkeypatch.setattr(drafts, "_exchange", lambda first, second: False)
    save_checkpoint(tmp_path / "last.ckpt", MODEL, extra="old")
    return tmp_path / "last.ckpt"


def fail_after_moving_away(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make each rename fail after the one that moves the old checkpoint away. An interrupt comes once, at its end."""
    rename, moved = Path.rename, []

    def rename_and_fail(self: Path, target: Path) -> Path:
        if moved and isinstance(error, OSError):
            raise error
        result = rename(self, target)
        if ".saving-replaced" in str(target):
            moved.append(target)
            if isinstance(error, KeyboardInterrupt):
                raise error
        return result

    monkeypatch.setattr(Path, "rename", rename_and_fail)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.guarantees("complete-or-absent", "interrupted-replacement")
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_an_interrupt_between_two_renames_keeps_the_old_one(
    save: Callable[[Path], None], last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_after_moving_away(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            save(last)
    assert names(last.parent) == ["last.ckpt"]
    assert load_checkpoint(last, MODEL) == "old"


@pytest.mark.guarantees("complete-or-absent", "interrupted-replacement")
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_errors_that_stay_keep_the_old_one_where_the_next_run_finds_it(
    save: Callable[[Path], None], last: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, drafts.__name__):
        fail_after_moving_away(patch, OSError(errno.EIO, "Input/output error"))
        with pytest.raises(OSError, match=r"Could not save the \w+ '.*last\.ckpt' \(Input/output error\); .* are kept"):
            save(last)
    [container] = (name for name in names(last.parent) if name.startswith(".saving-") and not name.endswith(".lock"))
    assert names(last.parent / container / ".saving-replaced") == ["last.ckpt"]
    assert f"{container} could not be cleaned" in caplog.text
    assert "it is still in that folder, and the next run that starts or saves in" in caplog.text
    assert load_checkpoint(last, MODEL) == "old"
    assert names(last.parent) == ["last.ckpt"]


def test_a_draft_is_discarded_once(tmp_path: Path) -> None:
    """The number of the closed lock may belong to another file by then."""
    draft = Draft(tmp_path / "a.ckpt")
    draft.path.mkdir()
    draft.publish()
    with (tmp_path / "metrics.csv").open("w") as file:
        draft.discard()
        file.write("x")
    assert (tmp_path / "metrics.csv").read_text() == "x"


@pytest.mark.parametrize("call", ["unlink", "close", "rmtree"])
def test_a_draft_that_cannot_be_removed_is_left_to_the_next_save(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if call == "unlink":
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: fail())
        elif call == "rmtree":
            patch.setattr("shutil.rmtree", lambda path, ignore_errors=False: fail())
        else:
            close, locks = os.close, set[int]()
            lock = drafts._lock

            def close_and_fail(descriptor: int) -> None:
                close(descriptor)
                if descriptor in locks:
                    fail()

            patch.setattr(drafts, "_lock", lambda path: [locks.add(number := lock(path)), number][1])
            patch.setattr(os, "close", close_and_fail)
        save_checkpoint(tmp_path / "a.ckpt", MODEL, extra="saved")
    assert load_checkpoint(tmp_path / "a.ckpt", MODEL) == "saved"
    save_checkpoint(tmp_path / "b.ckpt", MODEL)
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


@pytest.mark.parametrize("has_exchange", [True, False])
@pytest.mark.parametrize("save", [SAVES["directory"], SAVES["file"]], ids=["directory", "file"])
def test_a_folder_that_cannot_be_synced_after_publishing_is_told_as_that(
    save: Callable[[Path], None], has_exchange: bool, last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = drafts.sync_folder

    def sync_but_parent(folder: Path) -> None:
        sync(folder)
        if folder == last.parent:
            fail()

    if has_exchange:
        monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(drafts, "sync_folder", sync_but_parent)
        with pytest.raises(
            NotDurableError, match=r"is complete, .*an older one .* is replaced.*not be synced.*last\.ck"
        ):
            save(last)
    assert names(last.parent) == ["last.ckpt"]
    assert load_checkpoint(last, MODEL) != "old"


@pytest.mark.parametrize("place", ["draft", "replaced", "lock"])
def test_leftovers_that_are_links_are_left_alone(place: str, tmp_path: Path) -> None:
    """Somebody else in a shared folder could make them, to have a job move files that only the job may move."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    draft = shared / ".saving-1f2e3d4c"
    shared.mkdir()
    (victim / ".saving-replaced" / "a.ckpt").mkdir(parents=True)
    (victim / "a.ckpt").mkdir()
    if place == "draft":
        draft.symlink_to(victim)
    else:
        (draft / "a.ckpt").mkdir(parents=True)
        (draft / ".saving-replaced").symlink_to(victim / ".saving-replaced")
    lock = draft.with_name(f"{draft.name}.lock")
    if place == "lock":
        lock.symlink_to(victim / "lock")
        (victim / "lock").touch()
    else:
        lock.touch()
    before = sorted(victim.rglob("*"))
    clean_folder(shared)
    assert sorted(victim.rglob("*")) == before
    assert "a.ckpt" not in names(shared)
    assert lock.exists() is (place != "replaced")


def test_a_link_that_cannot_be_made_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "a.ckpt", MODEL)
    monkeypatch.setattr(Path, "symlink_to", lambda self, target: fail())
    with pytest.raises(OSError, match=r"Could not save the checkpoint '.*last\.ckpt' \(Input/output error\)"):
        link_checkpoint(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    assert names(tmp_path) == ["a.ckpt"]

"""Checkpoint directories are complete or absent, whatever their name and whenever a writer dies."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import RankError, run_ranks
from torch import nn

from lightning_fsdp2 import load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint import distributed, folder


def fail_with_full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_the_directory_is_complete_or_absent_and_replaced_only_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"

    def save(value: int, fails: bool) -> None:
        model = nn.Linear(2, 2)
        if fails:
            monkeypatch.setattr(folder, "_sync_folder", fail_with_full_disk)
        save_checkpoint(path, model, extra=value)

    run_ranks(save, 2, 1, False)
    assert {".metadata", "__0_0.distcp", "meta.json", "meta.pt"} <= {entry.name for entry in path.iterdir()}
    assert json.loads((path / "meta.json").read_text())["format_version"] == 1
    run_ranks(save, 2, 2, False)
    with pytest.raises(RankError, match="No space left"):
        run_ranks(save, 2, 3, True)
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_replacement_that_died_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two directories cannot be exchanged at once, as on NFS."""
    path = tmp_path / "last.ckpt"
    rename = Path.rename

    def die_with_the_old_one_away(self: Path, target: Path) -> Path:
        if target == path:
            os._exit(1)
        return rename(self, target)

    def save(value: int, *, dies: bool = False) -> None:
        monkeypatch.setattr(folder, "_exchange", lambda first, second: False)
        if dies:
            monkeypatch.setattr(Path, "rename", die_with_the_old_one_away)
        save_checkpoint(path, nn.Linear(2, 2), extra=value)

    def names() -> list[str]:
        return [entry.name for entry in tmp_path.iterdir()]

    run_ranks(save, 1, 1)
    run_ranks(save, 1, 2)
    assert names() == ["last.ckpt"]
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: save(3, dies=True), 1)
    assert "last.ckpt" not in names()
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: save(3, dies=True), 1)
    with pytest.raises(RankError, match="No space left"):
        run_ranks(lambda: [monkeypatch.setattr(distributed, "_save_tensors", fail_with_full_disk), save(4)], 1)
    assert names() == ["last.ckpt"], "the next save, which failed, lost the checkpoint before"
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2


def test_a_new_save_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "best-[0]*.ckpt", tmp_path / ".best-0.ckpt.tmp-12345678"
    other.mkdir()
    leftover = folder.get_hidden_path(path, "12345678")
    leftover.mkdir()
    (leftover / "__0_0.distcp").touch()
    save_checkpoint(path, nn.Linear(2, 2))
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_removing_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    path, link, file = tmp_path / "a.ckpt", tmp_path / "last.ckpt", tmp_path / "b.ckpt"
    save_checkpoint(path, nn.Linear(2, 2))
    link.symlink_to(path)
    file.touch()
    for entry in (link, file):
        folder.remove_checkpoint(entry)
        assert not entry.exists()
    assert path.exists()
    folder.remove_checkpoint(path)
    assert not path.exists()
    folder.remove_checkpoint(path)  # and again: there is nothing to do

"""Checkpoints are complete or absent, whatever their name and whenever a writer dies."""

import ctypes
import errno
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from torch import nn

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.files import drafts as folder
from lightning_fsdp2.checkpoint.files import storage
from lightning_fsdp2.checkpoint.formats import directory as distributed
from lightning_fsdp2.checkpoint.formats.single_file import write_file


class Usage(NamedTuple):
    free: int


def fail_with_full_disk(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.guarantees("complete-or-absent")
def test_the_directory_is_complete_or_absent_and_replaced_only_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"

    def save(value: int, fails: bool) -> None:
        model = nn.Linear(2, 2)
        if fails:
            monkeypatch.setattr(folder, "sync_folder", fail_with_full_disk)
        save_checkpoint(path, model, extra=value)

    run_ranks(save, 2, 1, False)
    assert {".metadata", "__0_0.distcp", "meta.json", "meta.pt"} <= set(names(path))
    assert json.loads((path / "meta.json").read_text())["format_version"] == distributed.FORMAT_VERSION
    run_ranks(save, 2, 2, False)
    with raises_on_all_ranks(OSError, match="No space left"):
        run_ranks(save, 2, 3, True)
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2
    assert names(tmp_path) == ["last.ckpt"]


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

    run_ranks(save, 1, 1)
    run_ranks(save, 1, 2)
    assert names(tmp_path) == ["last.ckpt"]
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: save(3, dies=True), 1)
    assert "last.ckpt" not in names(tmp_path)
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2
    with pytest.raises(RankError, match="died"):
        run_ranks(lambda: save(3, dies=True), 1)
    with pytest.raises(RankError, match="No space left"):
        run_ranks(lambda: [monkeypatch.setattr(distributed, "_finish", fail_with_full_disk), save(4)], 1)
    assert names(tmp_path) == ["last.ckpt"], "the next save, which failed, lost the checkpoint before"
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2


def test_two_paths_are_exchanged_at_once_where_the_system_can(tmp_path: Path) -> None:
    for name in ("first", "second", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    here, flag_exchange = -100, 2  # <fcntl.h>, <linux/fs.h>
    paths = [os.fsencode(tmp_path / name) for name in ("a", "b")]
    can = ctypes.CDLL(None).renameat2(here, paths[0], here, paths[1], flag_exchange) == 0
    assert folder._exchange(tmp_path / "first", tmp_path / "second") is can
    assert names(tmp_path / "first") == (["second"] if can else ["first"])
    assert names(tmp_path / "second") == (["first"] if can else ["second"])
    assert folder._exchange(tmp_path / "first", tmp_path / "gone") is False


@pytest.mark.parametrize("place", ["directory", "file", "archive", "store", "file in store"])
def test_what_is_no_checkpoint_is_not_replaced(place: str, tmp_path: Path) -> None:
    def save() -> None:
        target: Any = tmp_path / "thesis"
        precious = target / "thesis.txt" if place in ("directory", "store") else target
        if "store" in place:  # of this process alone
            target = folder.get_path("memory://bucket/thesis")
            precious = target / "thesis.txt" if place == "store" else target
        if dist.get_rank() == 0 or "store" in place:
            precious.parent.mkdir(parents=True, exist_ok=True)
            if place == "archive":
                with zipfile.ZipFile(precious, "w") as archive:
                    archive.writestr("thesis.txt", "precious")
            else:
                precious.write_bytes(b"precious")
        dist.barrier()
        content = precious.read_bytes()
        kind = "directory" if precious != target else "file"
        for write in (
            lambda: save_checkpoint(target, nn.Linear(2, 2)),
            lambda: write_file(target, {"state_dict": {}}),
            *([] if "store" in place else [lambda: folder.link_checkpoint(tmp_path / "a.ckpt", target)]),
        ):
            with pytest.raises(
                FileExistsError, match=rf"There is already a {kind} of that name which is not.*another name.*thesis'"
            ):
                write()
        assert precious.read_bytes() == content

    run_ranks(save, 2)
    assert "store" in place or names(tmp_path) == ["thesis"]


def test_checkpoints_of_others_and_parts_of_them_are_replaced(tmp_path: Path) -> None:
    """Whatever the format, and what is empty too."""
    model = nn.Linear(2, 2)

    def write(kind: str, path: Any) -> None:
        if kind == "directory":
            path.mkdir()
        elif kind == "file":
            path.touch()
        elif kind == "torch.save":
            torch.save(model.state_dict(), path)
        elif kind == "torch.distributed.checkpoint":
            torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=path, no_dist=True)
        else:
            save_checkpoint(path, model)
            for name in (".metadata", "meta.pt", "meta.json"):
                (path / name).unlink()

    for kind in ("directory", "file", "torch.save", "torch.distributed.checkpoint", "part"):
        for save in (save_checkpoint, lambda path, model: write_file(path, {"state_dict": model.state_dict()})):
            path = tmp_path / kind / save.__name__
            path.parent.mkdir(exist_ok=True)
            write(kind, path)
            save(path, model)
            load_checkpoint(path, nn.Linear(2, 2))
    path = folder.get_path("memory://runs/part.ckpt")
    write("part", path)
    save_checkpoint(path, model)
    load_checkpoint(path, nn.Linear(2, 2))


def test_a_replacement_that_fails_half_way_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, nn.Linear(2, 2), extra=1)
    rename = Path.rename

    def fail_with_the_old_one_away(self: Path, target: Path) -> Path:
        return fail_with_full_disk() if target == path and self.parent.parent == tmp_path else rename(self, target)

    monkeypatch.setattr(folder, "_exchange", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", fail_with_the_old_one_away)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, nn.Linear(2, 2), extra=2)
    assert load_checkpoint(path, nn.Linear(2, 2)) == 1
    assert names(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("has_exchange", [True, False])
def test_a_checkpoint_may_be_called_replaced(
    has_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "replaced"
    if not has_exchange:
        monkeypatch.setattr(folder, "_exchange", lambda first, second: False)

    def save_and_die() -> None:
        monkeypatch.setattr(distributed, "_finish", lambda *args: os._exit(1))
        save_checkpoint(path, nn.Linear(2, 2))

    for value in (1, 2):
        save_checkpoint(path, nn.Linear(2, 2), extra=value)
    with pytest.raises(RankError, match="died"):
        run_ranks(save_and_die, 1)
    folder.clean_folder(tmp_path)
    assert names(tmp_path) == ["replaced"]
    assert load_checkpoint(path, nn.Linear(2, 2)) == 2


def test_what_an_earlier_version_has_put_aside_comes_back(tmp_path: Path) -> None:
    container = tmp_path / ".saving-1f2e3d4c"
    save_checkpoint(container / "replaced" / "last.ckpt", nn.Linear(2, 2), extra=1)
    (container / "last.ckpt").mkdir()
    container.with_name(f"{container.name}.lock").touch()
    assert load_checkpoint(tmp_path / "last.ckpt", nn.Linear(2, 2)) == 1
    assert names(tmp_path) == ["last.ckpt"]


@pytest.mark.guarantees("dead-drafts")
def test_a_new_save_removes_the_drafts_of_the_dead_and_nothing_else(tmp_path: Path) -> None:
    def start_and_die(name: str) -> None:
        folder.Draft(tmp_path / name).path.mkdir()
        os._exit(1)

    for name in ("a.ckpt", "b-[0]*.ckpt"):
        with pytest.raises(RankError, match="died"):
            run_ranks(start_and_die, 1, name)
    living = folder.Draft(tmp_path / "c.ckpt")  # of this process, as good as of another job
    living.path.mkdir()
    foreign = tmp_path / ".saving-of-somebody"
    foreign.mkdir()
    run_ranks(lambda: save_checkpoint(tmp_path / "d.ckpt", nn.Linear(2, 2)), 1)
    container = living.path.parent.name
    assert names(tmp_path) == sorted([container, f"{container}.lock", foreign.name, "d.ckpt"])
    living.publish()
    assert names(tmp_path) == sorted([foreign.name, "c.ckpt", "d.ckpt"])


@pytest.mark.guarantees("draft-then-rename")
def test_names_and_data_are_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {"__0_0.distcp", ".metadata.tmp", "meta.pt", "meta.json"} <= set(before)
    assert before.index("meta.json") > max(before.index(name) for name in ("__0_0.distcp", ".metadata.tmp", "meta.pt"))
    assert "a.ckpt" in before[before.index("meta.json") :], "the draft's names"
    assert after == [tmp_path.name]


@pytest.mark.guarantees("draft-then-rename")
def test_all_new_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    sync = folder.sync_folder
    monkeypatch.setattr(folder, "sync_folder", lambda path: [flushed.append(path), sync(path)])
    save_checkpoint(tmp_path / "a" / "b" / "c" / "x.ckpt", nn.Linear(2, 2))
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"} <= set(flushed)
    assert tmp_path.parent not in flushed


def test_a_folder_that_takes_no_files_is_named_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path.name.startswith(".saving-"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    descriptors = os.listdir("/proc/self/fd")
    message = (
        rf"folder '{tmp_path}' of the checkpoint cannot be written to \(Read-only file system\); choose another folder"
    )
    with pytest.raises(OSError, match=message) as caught:
        save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
    assert caught.value.errno == errno.EROFS
    assert ".saving" not in str(caught.value)
    assert names(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


@pytest.mark.parametrize("name", ["", "new/folder"])
def test_a_folder_for_checkpoints_is_tested_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder.check_folder(tmp_path / name)
    assert names(tmp_path) == []

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ValueError, match=rf"dirpath='{tmp_path / name}'.* '{tmp_path}' may not be written to\."):
        folder.check_folder(tmp_path / name)


def test_a_checkpoint_may_be_removed_from_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, nn.Linear(2, 2))
    monkeypatch.setattr(Path, "mkdir", fail_with_full_disk)
    folder.remove_checkpoint(path)
    assert names(tmp_path) == []
    monkeypatch.undo()

    save_checkpoint(path, nn.Linear(2, 2))
    monkeypatch.setattr(folder, "_lock", fail_with_full_disk)
    monkeypatch.setattr(shutil, "rmtree", fail_with_full_disk)  # as if it died
    with pytest.raises(OSError, match="No space left"):
        folder.remove_checkpoint(path)
    with pytest.raises(ValueError, match=r"incomplete: \.metadata"):
        load_checkpoint(path, nn.Linear(2, 2))


@pytest.mark.guarantees("free-space")
def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "a.ckpt"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=3_000_000))
    model = nn.Linear(1000, 1000)
    with pytest.raises(OSError, match=r"needs 4\.0 MB, but the disk has only 3\.0 MB left; nothing was written"):
        save_checkpoint(path, model)
    assert names(path.parent) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=5_000_000))
    save_checkpoint(path, model)


def test_nodes_that_share_no_folder_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = storage.CheckpointWriter.__init__

    def start_in_folder_of_the_node(self: Any, path: Path) -> None:
        start(self, tmp_path / f"node-{dist.get_rank()}" / "a.ckpt" if dist.get_rank() else path)

    monkeypatch.setattr(storage.CheckpointWriter, "__init__", start_in_folder_of_the_node)

    def save() -> None:
        mesh = create_device_mesh()
        model = FSDP2Manager(FSDP2Config(), mesh).parallelize(nn.Sequential(nn.Linear(4, 4)))
        with pytest.raises(FileNotFoundError, match=r"__1_0\.distcp .*not visible on rank 0.*that all nodes share"):
            save_checkpoint(tmp_path / "shared" / "a.ckpt", model)

    run_ranks(save, 2)
    assert names(tmp_path / "shared") == []


def test_a_disk_that_is_full_in_the_middle_says_so_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = tmp_path / "a.ckpt", nn.Linear(1000, 1000)

    class FullDisk:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            return self.file.write(data) if self.file.tell() + len(data) < 1_000_000 else fail_with_full_disk()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.close()

    def save(value: int) -> None:
        save_checkpoint(path, model, extra=value)

    save(1)
    hashed_open = storage.DurableFile.__init__

    def open_on_full_disk(self: Any, path: Path) -> None:
        hashed_open(self, path)
        self._file = FullDisk(self._file)

    monkeypatch.setattr(storage.DurableFile, "__init__", open_on_full_disk)
    with raises_on_all_ranks(OSError, match="No space left on device"):
        run_ranks(save, 2, 2)
    assert load_checkpoint(path, model) == 1
    assert names(tmp_path) == ["a.ckpt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
def test_a_folder_without_permission_is_named_on_every_rank(tmp_path: Path) -> None:
    top = Path(tempfile.gettempdir())
    for folder_ in (tmp_path, *tmp_path.parents):
        if top in folder_.parents:
            folder_.chmod(0o755)
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
    (tmp_path / "a.ckpt" / "meta.pt").chmod(0o600)

    def run() -> None:
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=rf"{tmp_path}' of the checkpoint may not be written to"):
                save_checkpoint(tmp_path / "b.ckpt", nn.Linear(2, 2))
            with pytest.raises(PermissionError, match=r"meta\.pt"):
                load_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
        finally:
            os.seteuid(0)

    run_ranks(run, 2)


def test_a_link_points_to_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    first, second, link = tmp_path / "a.ckpt", tmp_path / "b.ckpt", tmp_path / "last.ckpt"
    for path in (first, second, link):
        save_checkpoint(path, nn.Linear(2, 2), extra=path.name)
    for target in (first, second):
        folder.link_checkpoint(str(target), str(link))
        assert os.readlink(link) == target.name
        assert load_checkpoint(link, nn.Linear(2, 2)) == target.name
    save_checkpoint(link, nn.Linear(2, 2), extra="again a directory")
    assert load_checkpoint(second, nn.Linear(2, 2)) == "b.ckpt"
    assert not link.is_symlink()
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "last.ckpt"]


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


def test_a_removal_that_dies_half_way_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, nn.Linear(2, 2))

    def remove_and_die() -> None:
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: os._exit(1))
        folder.remove_checkpoint(path)

    with pytest.raises(RankError, match="died"):
        run_ranks(remove_and_die, 1)
    assert not path.exists()
    folder.clean_folder(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.guarantees("stores")
def test_a_store_of_fsspec_holds_checkpoints(tmp_path: Path) -> None:
    path = "memory://runs/a.ckpt"
    save_checkpoint(path, nn.Linear(2, 2), extra=1)
    model = nn.Linear(2, 2)
    save_checkpoint(path, model, extra=2)
    other = nn.Linear(2, 2)
    assert load_checkpoint(path, other, verify=True) == 2
    assert other.weight.equal(model.weight)
    (folder.get_path(path) / "meta.json").unlink()  # as a save that died leaves it
    with pytest.raises(ValueError, match="incomplete"):
        load_checkpoint(path, other)
    folder.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(path, other)


def test_a_store_holds_checkpoints_of_others(tmp_path: Path) -> None:
    """A directory as Lightning writes it: without the summary, which is the last file of ours."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.distributed.checkpoint.save({"state_dict": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"extra": 3}, tmp_path / "meta.pt")
    path = folder.get_path("memory://runs/lightning.ckpt")
    path.mkdir(parents=True)
    for file in tmp_path.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    assert load_checkpoint(path, other) == 3
    assert other.weight.equal(model.weight)
    (path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match=r"incomplete: __0_0\.distcp \(truncated\)"):
        load_checkpoint(path, other)
    for name in ("__0_0.distcp", "meta.pt"):
        (path / name).unlink()
        with pytest.raises(ValueError, match=rf"incomplete: {name}".replace(".", r"\.")):
            load_checkpoint(path, other)

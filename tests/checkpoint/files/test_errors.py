"""Errors of the file system name their file, and no intact file is called damaged."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import raises_on_all_ranks, run_ranks
from torch import nn

from lightning_fsdp2 import consolidate_checkpoint, export_hf, load_checkpoint, save_checkpoint, verify_checkpoint
from lightning_fsdp2.checkpoint.files import storage
from lightning_fsdp2.checkpoint.files.drafts import get_path
from lightning_fsdp2.checkpoint.files.storage import DurableFile, save_plain
from lightning_fsdp2.checkpoint.formats.single_file import write_file

MODEL = nn.Linear(2, 2)


# ---------------------------------------------------------------------- writing


def make_sync_fail(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == name:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.guarantees("errors-of-saves")
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata.tmp", "meta.pt", "checksums.json", "meta.json", "a.ckpt"])
def test_an_error_of_a_save_names_the_file_and_what_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is the folder of the draft."""
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, MODEL, extra="old")

    def save() -> None:
        make_sync_fail(monkeypatch, name)
        save_checkpoint(path, MODEL, extra="new")

    with raises_on_all_ranks(
        OSError,
        match=rf"Could not save the checkpoint '{path}' \(Input/output error\); earlier .* are kept: '.*{name}'$",
    ):
        run_ranks(save, 2)
    assert load_checkpoint(path, MODEL) == "old"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_error_of_an_export_names_the_file_and_what_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_hf(make_causal_lm(LLAMA), tmp_path / "out")
    make_sync_fail(monkeypatch, name)
    with pytest.raises(OSError, match=rf"Could not save the export '.*out' .*; earlier exports are kept: '.*{name}'$"):
        export_hf(make_causal_lm(LLAMA), tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_of_an_export_that_is_closed_on_a_full_disk_is_in_a_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write these files, and what they raise has no name."""
    model = make_causal_lm(LLAMA)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(model.config), "save_pretrained", fail)
    with pytest.raises(OSError, match=r"Could not save the export .*\(No space left on device\); earlier .*: '.*/out'"):
        export_hf(model, tmp_path / "out")


def test_a_full_disk_is_named_in_an_export_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs_result([1, 1, 0, 0, 0, 0, 0, 0, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    with pytest.raises(
        OSError, match=r"The export needs .*choose a folder on another disk\. A replaced export"
    ) as error:
        export_hf(make_causal_lm(LLAMA), tmp_path / "out")
    assert "save_top_k" not in str(error.value)
    with pytest.raises(OSError, match="save_top_k"):
        save_checkpoint(tmp_path / "a.ckpt", MODEL)


def test_a_disk_that_is_full_at_the_flush_is_named() -> None:
    def write(data: bytes) -> None:
        with DurableFile(Path("/dev/full")) as file:
            file.write(data)

    for data in (b"?", bytes(storage.BLOCK_SIZE)):  # at the end, and in the middle
        with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
            write(data)


def test_in_an_object_store_only_other_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(storage, "compute_checksum", fail)
    with pytest.raises(OSError, match=r"Could not save .*; earlier checkpoints with other names are kept"):
        save_checkpoint(get_path("memory://bucket/a.ckpt"), MODEL)


# ---------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("is_single", [False, True], ids=["directory", "file"])
def test_an_interrupt_in_a_write_is_an_interrupt(
    is_single: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.save` would say that the archive is incomplete."""
    path, write = tmp_path / "a.ckpt", io.BufferedWriter.write
    save_checkpoint(path, MODEL, extra="old")

    class Interrupted(io.BufferedWriter):
        def write(self, data: Any) -> int:
            if self.tell() > 100 and dist.get_rank() == 0:
                raise KeyboardInterrupt
            return write(self, data)

    def run() -> str:
        monkeypatch.setattr(Path, "open", lambda self, mode: Interrupted(io.FileIO(self, mode)))
        try:
            if is_single:
                write_file(path, {"state_dict": MODEL.state_dict()})
            else:
                save_checkpoint(path, MODEL)
        except (KeyboardInterrupt, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "saved"

    first, *others = run_ranks(run, 1 if is_single else 2)
    assert first == "KeyboardInterrupt: "
    assert others == ([] if is_single else [f"RuntimeError: Rank 0 was interrupted while it wrote or read '{path}'."])
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert load_checkpoint(path, MODEL) == "old"


# ---------------------------------------------------------------------- reading


class Unreadable(io.BytesIO):
    """A file of which every read fails."""

    def read(self, size: Any = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")


def make_unreadable(monkeypatch: pytest.MonkeyPatch, path: Path, error: int) -> None:
    """Let ``path`` not open, or not be read if the error is EIO."""
    real = io.open

    def open_or_fail(file: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(file, str | Path) or Path(file) != path:
            return real(file, *args, **options)
        if error != errno.EIO:
            raise OSError(error, os.strerror(error), str(file))
        return Unreadable(path.stat().st_size * b"?")

    monkeypatch.setattr(io, "open", open_or_fail)


READERS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: load_checkpoint(path, MODEL),
    "verify": verify_checkpoint,
}


@pytest.mark.guarantees("unreadable-files")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["f.ckpt", ".metadata", "meta.json", "meta.pt", "checksums.json", "__0_0.distcp"])
def test_a_file_that_cannot_be_read_is_not_damaged(
    name: str, code: int, read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.ckpt"
    save_checkpoint(path, MODEL)
    file = path / name
    if name == "f.ckpt":
        path = file = tmp_path / name
        consolidate_checkpoint(tmp_path / "d.ckpt", path)
    make_unreadable(monkeypatch, file, code)
    with pytest.raises(OSError, match=rf"{os.strerror(code)}: '{file}'$") as error:
        read(path)
    assert error.value.errno == code


def test_a_file_that_one_rank_cannot_read_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.ckpt"
    save_checkpoint(tmp_path / "d.ckpt", MODEL)
    consolidate_checkpoint(tmp_path / "d.ckpt", path)

    def run() -> None:
        if dist.get_rank() == 1:
            make_unreadable(monkeypatch, path, errno.EACCES)
        load_checkpoint(path, MODEL)

    with raises_on_all_ranks(PermissionError, match=rf"Permission denied: '{path}'"):
        run_ranks(run, 2)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_what_is_no_archive_is_still_called_that(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"is truncated, or was not written by `torch\.save`"):
        load_checkpoint(tmp_path / "f.ckpt", MODEL)


def test_an_archive_with_wrong_places_is_damaged(tmp_path: Path) -> None:
    """Its records seem to begin before the file, which the system calls an invalid argument."""
    path = tmp_path / "f.ckpt"
    with path.open("wb") as file:
        save_plain({"state_dict": MODEL.state_dict()}, file)
    path.write_bytes(path.read_bytes()[100:])
    with pytest.raises(ValueError, match=r"truncated|damaged"):
        load_checkpoint(path, MODEL)
    with pytest.raises(ValueError, match=r"truncated|damaged"):
        verify_checkpoint(path)


# ---------------------------------------------------------------------- files that are missing, or longer


@pytest.mark.parametrize("name", ["checksums.json", "__0_0.distcp", "meta.pt", ".metadata"])
def test_a_file_that_is_missing_is_called_missing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, MODEL)
    (path / name).unlink()
    for read in READERS.values():
        with pytest.raises(ValueError, match=rf"incomplete: {name} is missing"):
            read(path)


@pytest.mark.parametrize("name", ["checksums.json", "__0_0.distcp", "meta.pt", ".metadata"])
def test_a_file_that_something_was_appended_to_is_refused_at_load_too(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, MODEL)
    with (path / name).open("ab") as file:
        file.write(b"?")
    for read in (*READERS.values(), lambda path: load_checkpoint(path, MODEL, verify=False)):
        with pytest.raises(ValueError, match=rf"damaged: {name} has changed since it was written"):
            read(path)

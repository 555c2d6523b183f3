"""Files of a checkpoint that are damaged or missing are named."""

import json
from pathlib import Path

import pytest
from torch import nn

from lightning_fsdp2 import save_checkpoint
from lightning_fsdp2.checkpoint import find
from lightning_fsdp2.checkpoint.find import find_checkpoint, find_damaged, get_files

DATA = "__0_0.distcp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
    return tmp_path / "a.ckpt"


def test_the_files_of_a_checkpoint_are_those_that_were_written(path: Path) -> None:
    files = get_files(path)
    assert files.keys() == {entry.name for entry in path.iterdir()} - {"meta.json"}
    assert {name: info["bytes"] for name, info in files.items()} == {
        name: (path / name).stat().st_size for name in files
    }
    assert {name for name, info in files.items() if "xxh3_128" not in info} == {DATA}
    assert find_damaged(path, files) == []
    (path / "meta.json").unlink()
    assert get_files(path) == {}


def test_what_is_damaged_is_named_by_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = get_files(path)
    (path / "meta.pt").write_bytes((path / "meta.pt").read_bytes()[::-1])
    (path / DATA).write_bytes(b"short")
    (path / "checksums.json").unlink()
    assert sorted(find_damaged(path, files)) == [DATA, "checksums.json", "meta.pt"]
    without_checksum = {".metadata": {"bytes": files[".metadata"]["bytes"]}}
    assert find_damaged(path, without_checksum) == [".metadata"], "a small file has a checksum, or is not one of ours"

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(find, "describe_file", refuse)
    with pytest.raises(PermissionError):  # the file may be intact
        find_damaged(path, files)


def test_a_checkpoint_is_complete_or_refused(path: Path) -> None:
    assert find_checkpoint(path) == path
    whole = (path / DATA).read_bytes()
    (path / DATA).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"is incomplete: {DATA} \(truncated\) is missing"):
        find_checkpoint(path)
    (path / DATA).write_bytes(whole)
    (path / "meta.json").unlink()  # as Lightning and torch write it: sizes follow from the metadata
    assert find_checkpoint(path) == path
    (path / DATA).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"is incomplete: {DATA} \(truncated\) is missing"):
        find_checkpoint(path)


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        ({"format_version": 99}, "has format_version=99, but this version .* reads only up to"),
        ({}, r"meta\.json cannot be read \(KeyError\('format_version'\)\)"),
        ({"format_version": 3, "files": {"meta.pt": {}}}, r"meta\.json cannot be read \(KeyError\('bytes'\)\)"),
        ([], r"meta\.json cannot be read \(TypeError"),
    ],
)
def test_a_summary_that_says_too_much_or_too_little_is_refused(summary: object, says: str, path: Path) -> None:
    (path / "meta.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=says):
        find_checkpoint(path)

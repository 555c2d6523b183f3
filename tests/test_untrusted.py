"""Files of others: what they name stays in their folder, and nothing that never ends is read."""

import io
import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import LLAMA, make_causal_lm
from torch import nn

from lightning_fsdp2 import load_checkpoint, save_checkpoint, verify_checkpoint
from lightning_fsdp2.checkpoint.files.drafts import clean_folder
from lightning_fsdp2.checkpoint.files.storage import CheckpointReader, _MetadataUnpickler
from lightning_fsdp2.data.sources import find_files
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.weights.pretrained import get_folder_fingerprint

DATA = "__0_0.distcp"


def load(path: Path) -> None:
    load_checkpoint(path, nn.Linear(8, 8))


READERS = [pytest.param(load, id="load"), pytest.param(verify_checkpoint, id="verify")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(8, 8))
    return tmp_path / "a.ckpt"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_causal_lm(LLAMA).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def rename_in_metadata(path: Path, name: str) -> None:
    """Write ``name`` for the file with the tensors, and leave out the checksums, which an enemy would adapt."""
    (path / "meta.json").unlink()
    (path / "checksums.json").unlink()
    metadata = CheckpointReader(path).read_metadata()
    assert metadata.storage_data is not None
    metadata.storage_data = {k: replace(info, relative_path=name) for k, info in metadata.storage_data.items()}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.guarantees("names-in-checkpoints")
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["../outside.distcp", "{folder}/outside.distcp", "sub/../../outside.distcp", ""])
def test_metadata_that_names_a_file_elsewhere_is_refused(read: Callable[[Path], Any], name: str, path: Path) -> None:
    (path / DATA).rename(path.parent / "outside.distcp")
    (path / "sub").mkdir()
    rename_in_metadata(path, name.format(folder=path.parent))
    with pytest.raises(ValueError, match="but its files are in its own folder"):
        read(path)


@pytest.mark.guarantees("names-in-checkpoints")
@pytest.mark.parametrize("read", READERS)
def test_a_summary_that_names_a_file_elsewhere_is_refused(read: Callable[[Path], Any], path: Path) -> None:
    summary = json.loads((path / "meta.json").read_text())
    summary["files"]["/dev/zero"] = summary["files"]["meta.pt"]
    (path / "meta.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"it names the file '/dev/zero'"):
        read(path)


@pytest.mark.guarantees("names-in-models")
@pytest.mark.parametrize("name", ["../other.safetensors", "/dev/zero"])
def test_an_index_that_names_a_file_elsewhere_is_refused(name: str, model: Path) -> None:
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"it names the file '{name}'"):
        from_pretrained(model)


def test_a_model_of_links_is_read(model: Path, tmp_path: Path) -> None:
    """The cache of the Hub is such a folder."""
    (tmp_path / "links").mkdir()
    for file in model.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    assert get_folder_fingerprint(tmp_path / "links") == get_folder_fingerprint(model)


@pytest.mark.guarantees("pipes")
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", [DATA, "meta.json", ".metadata", "checksums.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_in_a_checkpoint_is_refused(
    kind: str, name: str, read: Callable[[Path], Any], path: Path
) -> None:
    replace_file(path / name, kind)
    with pytest.raises(ValueError, match=f"{name}' is a pipe, a socket or a device"):
        read(path)


@pytest.mark.guarantees("pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_as_a_checkpoint_or_model_file_is_refused(kind: str, model: Path) -> None:
    replace_file(model / "single.ckpt", kind)
    with pytest.raises(ValueError, match="is a pipe, a socket or a device"):
        verify_checkpoint(model / "single.ckpt")
    (model / "single.ckpt").unlink()
    replace_file(model / "config.json", kind)
    with pytest.raises(ValueError, match="is a pipe, a socket or a device"):
        from_pretrained(model)


@pytest.mark.guarantees("pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_among_data_is_left_out(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    replace_file(tmp_path / "b.txt", kind)
    assert find_files(str(tmp_path)) == [str(tmp_path / "a.txt")]


def replace_file(file: Path, kind: str) -> None:
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")


@pytest.mark.guarantees("bombs")
def test_a_single_file_that_is_larger_in_memory_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": nn.Linear(8, 8).state_dict()}, tmp_path / "a.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "a.ckpt") as source,
        zipfile.ZipFile(tmp_path / "b.ckpt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record) + bytes(64 << 20) * record.filename.endswith(".pkl"))
    start = time.process_time()
    for read in (verify_checkpoint, load):
        with pytest.raises(ValueError, match="compressed records"):
            read(tmp_path / "b.ckpt")
    assert time.process_time() - start < 0.2


@pytest.mark.guarantees("bombs")
def test_deep_json_is_damage(path: Path, model: Path) -> None:
    deep = "[" * 200_000
    (path / "meta.json").write_text(deep)
    with pytest.raises(ValueError, match=r"is damaged: meta.json cannot be read"):
        verify_checkpoint(path)
    (model / "model.safetensors.index.json").write_text(deep)
    with pytest.raises(ValueError, match="is damaged, or is not an index of safetensors files"):
        from_pretrained(model)


@pytest.mark.guarantees("bombs")
@pytest.mark.parametrize("header", [(1 << 62).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]", b"\3"])
def test_a_header_that_is_none_is_damage(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(ValueError, match="is damaged, or is no safetensors file"):
        get_folder_fingerprint(tmp_path)


def test_a_link_among_the_drafts_is_left_alone(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / ".saving-replaced" / "b.ckpt").mkdir(parents=True)
    (victim / "b.ckpt").mkdir()
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / ".saving-evil").symlink_to(victim)
    (folder / ".saving-evil.lock").touch()
    clean_folder(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == [".saving-evil", ".saving-evil.lock"]
    assert (victim / ".saving-replaced" / "b.ckpt").exists()


def test_metadata_of_other_versions_of_python_is_read() -> None:
    """Python 3.13 writes ``pathlib._local``, which other versions do not have."""
    content = io.BytesIO(b"cpathlib._local\nPosixPath\n(Va\ntR.")
    assert _MetadataUnpickler(content).load() == Path("a")

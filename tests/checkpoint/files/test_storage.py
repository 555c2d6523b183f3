"""Nothing in a checkpoint runs code unless it is trusted, and what is written has the checksums it says."""

import os
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_fsdp2 import load_checkpoint, save_checkpoint, verify_checkpoint
from lightning_fsdp2.checkpoint.files import storage
from lightning_fsdp2.checkpoint.files.drafts import get_path
from lightning_fsdp2.checkpoint.files.storage import CheckpointReader, DurableFile, get_reason, load_pickled
from lightning_fsdp2.checkpoint.formats.dcp import call_dcp


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def make_checkpoint(folder: Path) -> tuple[Path, nn.Module]:
    path, model = folder / "a.ckpt", nn.Linear(2, 2)
    save_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), extra={"step": 3})
    return path, model


@pytest.mark.guarantees("no-code-runs", "trusted-checkpoints")
@pytest.mark.filterwarnings("ignore:This run's checkpoints hold objects")
@pytest.mark.parametrize("place", ["metadata", "meta.pt", "small-object", "single-file"])
def test_a_pickle_bomb_goes_off_only_in_a_trusted_checkpoint(place: str, tmp_path: Path) -> None:
    proof = tmp_path / "exploded"
    path, model = make_checkpoint(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if place == "metadata":
        metadata = FileSystemReader(path).read_metadata()
        metadata.planner_data["state_dict.bomb"] = Bomb(proof)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        (path / "meta.json").unlink()  # which knows its checksum
    elif place == "meta.pt":
        torch.save({"extra": Bomb(proof)}, path / "meta.pt")
        (path / "meta.json").unlink()  # which knows its checksum
    elif place == "small-object":
        optimizer.param_groups[0]["bomb"] = Bomb(proof)
        save_checkpoint(path, model, optimizer)
    else:
        path = tmp_path / "file.ckpt"
        torch.save({"state_dict": model.state_dict(), "extra": Bomb(proof)}, path)
    with pytest.raises(ValueError, match=r"(?s)run code when .*trust.*CheckpointConfig\(trust_checkpoint=True\)"):
        load_checkpoint(path, model, optimizer if place == "small-object" else ())
    assert not proof.exists()
    if place != "metadata":  # the mapping is damaged by what it holds
        load_checkpoint(path, model, optimizer if place == "small-object" else (), weights_only=False)
        assert proof.exists()


@pytest.mark.guarantees("no-code-runs")
@pytest.mark.parametrize(
    "name", [("os", "system"), ("builtins", "eval"), ("torch.distributed.checkpoint.filesystem", "io.FileIO")]
)
def test_metadata_may_name_its_own_classes_only(name: tuple[str, str], tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path)
    module, function = name
    program = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in name) + b"\x93."
    (path / ".metadata").write_bytes(program)
    with pytest.raises(pickle.UnpicklingError, match=f"{module}.{function}"):
        CheckpointReader(path).read_metadata()


@pytest.mark.guarantees("checksums")
def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    parts = [b"one", torch.arange(5).numpy(), b"two"]
    with DurableFile(tmp_path / "file") as file:
        for part in parts:
            file.write(part)
    data = (tmp_path / "file").read_bytes()
    assert data == b"one" + parts[1].tobytes() + b"two"
    assert file.size == len(data)


def test_what_is_saved_beside_a_checkpoint_keeps_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_middle, go_on = threading.Event(), threading.Event()
    to_host = storage._to_host

    def wait_in_the_middle(tensor: torch.Tensor) -> torch.Tensor:
        in_the_middle.set()
        assert go_on.wait(60)
        return to_host(tensor)

    monkeypatch.setattr(storage, "_to_host", wait_in_the_middle)
    writer = storage.CheckpointWriter(tmp_path / "a.ckpt")
    tensors = {"weight": torch.ones(2)}
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save, tensors, storage_writer=writer, no_dist=True)
        assert in_the_middle.wait(60)
        torch.save({"state_dict": tensors}, tmp_path / "mine.ckpt")
        go_on.set()
        saving.result()
    verify_checkpoint(tmp_path / "mine.ckpt")


def test_a_save_in_a_thread_leaves_the_filters_of_warnings_alone(tmp_path: Path) -> None:
    in_the_middle, go_on = threading.Event(), threading.Event()
    filters = list(warnings.filters)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(call_dcp, lambda: [in_the_middle.set(), go_on.wait(60)], tmp_path)
        assert in_the_middle.wait(60)
        with warnings.catch_warnings():
            go_on.set()
            saving.result()
    assert warnings.filters == filters


def test_advice_that_a_file_system_does_not_take_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with DurableFile(tmp_path / "file") as file:
        file.write(bytes(storage.BLOCK_SIZE))
    assert (tmp_path / "file").stat().st_size == storage.BLOCK_SIZE


def test_pages_are_handed_to_the_disk_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: calls.append(file.size), raising=False)
    monkeypatch.setattr(storage, "BLOCK_SIZE", 10)
    with DurableFile(tmp_path / "file") as file:
        for size in (9, 1, 9, 2, 30):
            file.write(bytes(size))
    assert calls == [10, 21, 51]
    with DurableFile(get_path("memory://pages/file")) as file:
        file.write(bytes(30))
    assert calls == [10, 21, 51]


def test_metadata_knows_the_load_as_torch_needs_it(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path)
    reader = CheckpointReader(path)
    metadata = reader.read_metadata()
    assert metadata.storage_meta.load_id == reader.load_id
    metadata.storage_meta = None  # as in those of torch before 2.3
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert CheckpointReader(path).read_metadata().storage_meta is None


def test_only_local_files_are_mapped_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[bool] = []
    load = torch.load

    def watch(*args: Any, **options: Any) -> Any:
        mapped.append(options["mmap"])
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", watch)
    torch.save(torch.arange(3), tmp_path / "file")
    stored = get_path("memory://mapped/file")
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_bytes((tmp_path / "file").read_bytes())
    for path, mmap in ((tmp_path / "file", False), (tmp_path / "file", True), (stored, True)):
        assert load_pickled(path, trust=False, mmap=mmap).tolist() == [0, 1, 2]
    assert mapped == [False, True, False]


def test_reasons_are_one_line_without_torchs_advice() -> None:
    assert get_reason(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert get_reason(pickle.UnpicklingError("use weights_only=False")) == "UnpicklingError"


def test_torch_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    path, model = make_checkpoint(tmp_path)
    state = {"state_dict": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    torch.distributed.checkpoint.load(state, checkpoint_id=path, no_dist=True)
    assert all(value.equal(state["state_dict"][name]) for name, value in model.state_dict().items())
    theirs, other = tmp_path / "theirs.ckpt", nn.Linear(2, 2)
    torch.distributed.checkpoint.save({"state_dict": model.state_dict()}, checkpoint_id=theirs, no_dist=True)
    torch.save({}, theirs / "meta.pt")
    load_checkpoint(theirs, other)
    assert other.weight.equal(model.weight)

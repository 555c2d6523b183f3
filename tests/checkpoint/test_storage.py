"""Nothing in a checkpoint runs code unless it is trusted, and what is written has the checksums it says."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_fsdp2 import load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.storage import CheckpointReader, HashedFile


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
    elif place == "meta.pt":
        torch.save({"extra": Bomb(proof)}, path / "meta.pt")
        (path / "meta.json").unlink()  # which knows its size
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


def test_a_file_is_described_by_what_was_written(tmp_path: Path) -> None:
    parts = [b"one", torch.arange(5).numpy(), b"two"]
    with HashedFile(tmp_path / "file") as file:
        for part in parts:
            file.write(part)
    data = (tmp_path / "file").read_bytes()
    assert data == b"one" + parts[1].tobytes() + b"two"
    assert file.summary == {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}


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

"""Paths that hold no checkpoint are told apart, and each gets its remedy."""

from pathlib import Path

import pytest
import torch
from torch import nn
from upath import UPath

from lightning_fsdp2 import save_checkpoint
from lightning_fsdp2.checkpoint.files.paths import check_is_checkpoint, resolve_checkpoint


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def test_a_checkpoint_is_found_through_links(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
    torch.save({}, tmp_path / "b.ckpt")
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / f"link-to-{name}").symlink_to(name)
        assert check_is_checkpoint(str(tmp_path / f"link-to-{name}")) == tmp_path / name
        assert resolve_checkpoint(tmp_path / name) == tmp_path / name


def test_a_path_without_anything_is_named_with_what_is_called_nearly_so(tmp_path: Path) -> None:
    write(tmp_path, "epoch=1.ckpt")
    with pytest.raises(FileNotFoundError, match=r"epoch=2\.ckpt'; did you mean '.*/epoch=1\.ckpt'\?"):
        resolve_checkpoint(tmp_path / "epoch=2.ckpt")
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint '.*/other'\.$"):
        resolve_checkpoint(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="path of the checkpoint is empty, as if from a shell variable"):
        resolve_checkpoint("")
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint 'memory://gone/a\.ckpt'\.$"):
        resolve_checkpoint("memory://gone/a.ckpt")


def test_a_checkpoint_that_was_put_aside_comes_back(tmp_path: Path) -> None:
    container = tmp_path / ".saving-1f2e3d4c"  # of a process that has died
    (container / "a.ckpt").mkdir(parents=True)
    save_checkpoint(container / "replaced" / "a.ckpt", nn.Linear(2, 2))
    container.with_name(f"{container.name}.lock").touch()
    assert (resolve_checkpoint(tmp_path / "a.ckpt") / "meta.pt").exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], r"is incomplete: \.metadata, meta\.pt is missing"),
        (["meta.pt"], r"is incomplete: \.metadata is missing"),
        (["model.safetensors", "config.json"], "is the directory of a Hugging Face model.*CausalLM.pretrained="),
        (["a.ckpt", "b.ckpt"], r"is a folder of checkpoints, such as b\.ckpt; give the path of one"),
        (["a.ckpt/meta.pt", "meta.pt"], r"is incomplete: \.metadata is missing"),
        (["optimizer.bin"], "was written by accelerate's `save_state`.* not its optimizer: put the model's config"),
        (
            ["scheduler.bin", "pytorch_model_fsdp_0/.metadata"],
            "was written by accelerate.*make a model.safetensors with `accelerate merge-weights .*/pytorch_model_fsdp",
        ),
    ],
)
def test_other_folders_are_refused_with_their_remedies(files: list[str], says: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError, match=says):
        check_is_checkpoint(write(folder, *files))


def test_the_weights_of_accelerate_are_known_by_the_name_of_their_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, "pytorch_model_fsdp_0/.metadata") / "pytorch_model_fsdp_0"
    with pytest.raises(ValueError, match=f"accelerate merge-weights {folder} DIRECTORY"):
        check_is_checkpoint(folder)


def test_what_has_been_exported_beside_a_checkpoint_is_no_obstacle(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2))
    write(tmp_path / "a.ckpt", "model.safetensors", "inner.ckpt")
    assert check_is_checkpoint(tmp_path / "a.ckpt") == tmp_path / "a.ckpt"


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(100)}, tmp_path / "a.ckpt")
    whole = (tmp_path / "a.ckpt").read_bytes()
    for content in (whole[:-10], b"", b"plain text"):
        (tmp_path / "a.ckpt").write_bytes(content)
        with pytest.raises(ValueError, match=r"is truncated, or was not written by `torch\.save`"):
            check_is_checkpoint(tmp_path / "a.ckpt")
    stored = UPath("memory://paths/a.ckpt")
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_bytes(b"any")
    assert check_is_checkpoint(stored) == stored, "a file in a store is looked at when it is read"

"""Whole tensors of a checkpoint in one process, whatever mesh wrote it."""

from pathlib import Path

import pytest
import torch
from helpers.families import make_family_model
from helpers.oracle import whole
from helpers.ranks import run_ranks
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, save_checkpoint
from lightning_fsdp2.checkpoint.whole import list_tensors, read_descriptions, read_whole_tensors


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["tp2", "dp2xtp2"])
def test_weights_of_a_mesh_are_whole_again(ranks: int, tmp_path: Path) -> None:
    """Packed experts too, of which a rank holds two pieces; optimizer states are left out."""
    path = tmp_path / "run.ckpt"

    def save() -> dict[str, Tensor]:
        mesh = create_device_mesh(device_type="cpu", tp_size=2)
        manager = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh)
        model = manager.parallelize(make_family_model("gpt_oss"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.sum().backward()
        optimizer.step()
        save_checkpoint(path, model, optimizer)
        return whole(model.state_dict())

    expected = run_ranks(save, ranks)[0]
    assert list_tensors(path) == {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
    names = list(expected)[::-3]
    tensors = read_whole_tensors(path, names)
    assert list(tensors) == names
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert [description["class"] for description in read_descriptions(path)] == ["GptOssForCausalLM"]


@pytest.mark.parametrize("kind", ["lightning", "state-dict"])
def test_weights_of_a_single_file(kind: str, tmp_path: Path) -> None:
    state = {"weight": torch.ones(2, 3), "count": torch.zeros((), dtype=torch.int64)}
    torch.save({"state_dict": state, "epoch": 1} if kind == "lightning" else state, tmp_path / "run.ckpt")
    expected = {"weight": (torch.Size([2, 3]), torch.float32), "count": (torch.Size([]), torch.int64)}
    assert list_tensors(tmp_path / "run.ckpt") == expected
    assert torch.equal(read_whole_tensors(tmp_path / "run.ckpt", ["weight"])["weight"], torch.ones(2, 3))
    assert read_descriptions(tmp_path / "run.ckpt") == []


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('it ran')",)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(1)}, "bomb": Bomb()}, tmp_path / "run.ckpt")
    for read in (list_tensors, read_descriptions):
        with pytest.raises(ValueError, match=r"run\.ckpt' holds objects other than .* If you trust"):
            read(tmp_path / "run.ckpt")

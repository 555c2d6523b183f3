"""Checkpoints of units on different meshes: saved, read on other meshes and back, renamed on the way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import PlainTransformer
from helpers.oracle import Record, assert_equal_runs, whole
from helpers.ranks import run_ranks
from helpers.unit_meshes import (
    RANKS,
    READERS,
    make_model,
    make_optimizer,
    shard_over_many_meshes,
    shard_over_one_mesh,
    train,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_fsdp2.checkpoint import load_checkpoint, save_checkpoint
from lightning_fsdp2.compat.torch import StridedShard, has_packed_shards

PACKED = StridedShard(0, split_factor=2)
SHARD: dict[str, Any] = {"many": shard_over_many_meshes, "one": shard_over_one_mesh}
READERS_OF = {"many": READERS, "one": RANKS}
LAYOUTS = [("many", "one"), ("many", "many"), ("one", "many")]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), LAYOUTS, ids=["-to-".join(layout) for layout in LAYOUTS])
def test_training_goes_on_from_a_checkpoint_of_other_meshes(before: str, after: str, tmp_path: Path) -> None:
    def run() -> None:
        model = make_model()
        expected = train_alone(model, range(4))
        SHARD[before](model)
        optimizer = make_optimizer(model)
        saved = train(model, optimizer, range(2), readers=READERS_OF[before])
        save_checkpoint(tmp_path / "a.ckpt", model, optimizer)
        SHARD[after](model := make_model(seed=1))
        load_checkpoint(tmp_path / "a.ckpt", model, optimizer := make_optimizer(model))
        actual = train(model, optimizer, range(2, 4), readers=READERS_OF[after])
        for name, weight in saved.weights.items():
            assert torch.equal(actual.initial[name], weight), name
        assert_equal_runs(join(saved, actual), expected)

    run_ranks(run, RANKS)


@pytest.mark.skipif(not has_packed_shards(), reason="this torch cannot gather packed shards")
@pytest.mark.parametrize("placements", [(PACKED, Shard(1)), (Shard(1), PACKED)], ids=["first", "last"])
def test_a_packed_weight_is_saved_and_read_whichever_axis_packs_it(placements: Any, tmp_path: Path) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        whole_weight = torch.arange(48.0).view(8, 6)
        model, other, plain = (nn.Linear(6, 8, bias=False) for _ in range(3))
        model.weight = nn.Parameter(distribute_tensor(whole_weight, mesh, placements))
        save_checkpoint(tmp_path / "a.ckpt", model)
        other.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, placements[::-1]))
        for loaded in (other, plain):
            load_checkpoint(tmp_path / "a.ckpt", loaded)
            (weight,) = whole(dict(loaded.named_parameters())).values()
            assert torch.equal(weight, whole_weight)
        assert torch.equal(other.weight.to_local(), distribute_tensor(whole_weight, mesh, placements[::-1]).to_local())

    run_ranks(run, RANKS)


def join(first: Record, second: Record) -> Record:
    return Record(
        initial=first.initial,
        losses=first.losses + second.losses,
        gradients=first.gradients + second.gradients,
        norms=first.norms + second.norms,
        clipped=first.clipped + second.clipped,
        weights=second.weights,
    )


class Renames(PlainTransformer):
    """A model whose hook, of the root or of a block, knows an older name of perceptrons."""

    def __init__(self, depth: str) -> None:
        super().__init__()
        module: nn.Module = self if depth == "root" else self.blocks[1]
        module.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[name.replace(".feed_forward.", ".mlp.")] = state.pop(name)


@pytest.mark.slow
@pytest.mark.parametrize("depth", ["root", "block"])
def test_a_hook_may_rename_weights_of_units_on_different_meshes(depth: str, tmp_path: Path) -> None:
    def run() -> None:
        shard_over_many_meshes(model := make_model())
        expected = whole(dict(model.named_parameters()))
        for block in model.blocks if depth == "root" else [model.blocks[1]]:
            block.add_module("feed_forward", block._modules.pop("mlp"))
        save_checkpoint(tmp_path / "a.ckpt", model)
        torch.manual_seed(1)
        shard_over_many_meshes(renamed := Renames(depth))
        load_checkpoint(tmp_path / "a.ckpt", renamed)
        actual = whole(dict(renamed.named_parameters()))
        assert all(torch.equal(actual[name], weight) for name, weight in expected.items())

    run_ranks(run, RANKS)

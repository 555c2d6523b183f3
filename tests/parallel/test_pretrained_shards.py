"""Weights that are converted while they are read: every family has those of ``from_pretrained`` in any shards."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import get_families, make_family_config
from helpers.ranks import RankError, run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import create_device_mesh
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.parallel import tp_parameters
from lightning_fsdp2.parallel.pretrained import _StoredTensor
from lightning_fsdp2.parallelizer import fsdp2_strategy_parallelize

MESHES = {"dp2": (2, 1), "dp3": (3, 1), "tp2": (2, 2), "dp2xtp2": (4, 2)}
"""Ranks, and tensor parallel ranks."""

FAST = {
    ("olmo_hybrid", "dp2"),  # concatenated along the sharded dim
    ("qwen3_moe", "dp3"),  # no expert on the last rank
    ("hrm_text", "tp2"),  # split
    ("inkling2_text", "tp2"),  # interleaved
    ("hrm_text", "dp2xtp2"),  # along the dim that both axes shard
}

NO_TENSOR_PARALLEL = {"gemma4"}

CASES = [
    pytest.param(family, mesh, id=f"{family}-{mesh}", marks=[] if (family, mesh) in FAST else pytest.mark.slow)
    for family in get_families()
    for mesh in MESHES
    if mesh in ("dp2", "dp3") or family not in NO_TENSOR_PARALLEL
]


def save(family: str, folder: Path, **changes: Any) -> Any:
    """A model of random weights, also where the family begins with zeros or ones, in files of its own format."""
    torch.manual_seed(0)
    config = make_family_config(family)
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def shard(model: Any, tp_size: int) -> Any:
    mesh = create_device_mesh(device_type="cpu", tp_size=tp_size)
    return fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())


def read_shards(family: str, mesh: str, folder: Path, **changes: Any) -> None:
    expected = save(family, folder, **changes).state_dict()
    ranks, tp_size = MESHES[mesh]

    def run() -> None:
        model = shard(from_pretrained(folder), tp_size)
        actual = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
        assert actual.keys() == expected.keys()
        for name, tensor in actual.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes, f"{name} keeps more than its shard in memory"

    run_ranks(run, ranks)


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_weights_are_those_of_one_process(family: str, mesh: str, tmp_path: Path) -> None:
    read_shards(family, mesh, tmp_path)


@pytest.mark.slow
def test_ranks_without_a_part_of_what_both_axes_shard(tmp_path: Path) -> None:
    """Of the sinks of two heads tensor parallelism leaves one to each rank, and that only to the first of two."""
    read_shards("gpt_oss", "dp2xtp2", tmp_path, num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("dp2xtp2", marks=pytest.mark.slow)])
def test_experts_in_contiguous_shards(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 has them, whose DTensor cannot pack."""
    monkeypatch.setattr(tp_parameters, "has_packed_shards", lambda: False)
    read_shards("qwen3_moe", mesh, tmp_path)


def test_what_cannot_be_converted_is_named_once_with_the_reason(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.experts.1.gate_proj.weight"
    save_file({**weights, name: weights[name][:-1]}, file, metadata={"format": "pt"})
    with pytest.raises(RankError) as raised:
        run_ranks(lambda: shard(from_pretrained(tmp_path), 1), 2)
    text = str(raised.value.cause)
    assert "not convertible to the model's: model.layers.1.mlp.experts.gate_up_proj; the first error is " in text
    assert "Error: MergeModulelist on tensors" in text
    assert "missing in the files" not in text


def test_the_environment_is_only_changed_while_tensors_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("olmo_hybrid", tmp_path)

    def run(name: str, before: str | None) -> None:
        if before is not None:
            monkeypatch.setenv(name, before)
        inside = []
        read = _StoredTensor.__getitem__

        def look(tensor: Any, index: Any) -> torch.Tensor:
            inside.append(os.environ.get(name))
            return read(tensor, index)

        monkeypatch.setattr(_StoredTensor, "__getitem__", look)
        shard(from_pretrained(tmp_path), 1)
        assert set(inside) == {"1"}
        assert os.environ.get(name) == before

    for before in (None, "0"):
        run_ranks(run, 2, "HF_DEACTIVATE_ASYNC_LOAD", before)


def test_what_the_files_lack_is_initialised_in_shards(tmp_path: Path) -> None:
    model = save("olmo_hybrid", tmp_path)
    lacking = "model.layers.0.linear_attn.conv1d.weight"
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    convolutions = [name for name in weights if "layers.0.linear_attn" in name and "conv" in name]
    kept = {name: tensor for name, tensor in weights.items() if name not in convolutions}
    assert len(convolutions) == 3
    save_file(kept, file, metadata={"format": "pt"})

    def run() -> None:
        sharded = shard(from_pretrained(tmp_path, allow_missing=lacking), 1)
        parameter = sharded.get_parameter(lacking)
        assert isinstance(parameter, DTensor)
        assert not parameter.is_meta
        assert parameter.full_tensor().shape == model.get_parameter(lacking).shape
        assert parameter.full_tensor().std() > 0

    run_ranks(run, 2)

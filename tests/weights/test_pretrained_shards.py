"""Weights that are converted while they are read: every family has those of ``from_pretrained`` in any shards."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cover import Matrix
from helpers.families import get_all_families, keep_known, make_family_config
from helpers.memory import get_peak_memory, reset_peak_memory
from helpers.models import LLAMA
from helpers.oracle import make_config
from helpers.pretrained_kinds import get_kind
from helpers.ranks import raises_on_all_ranks, run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Interleave, WeightConverter

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.parallel.tensor import parameters as tp_parameters
from lightning_fsdp2.weights import pretrained_shards
from lightning_fsdp2.weights.pretrained import _StoredTensor

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "dp3": (3, {}),
    "tp2": (2, {"tp_size": 2}),
    "dp2xtp2": (4, {"tp_size": 2}),
    "ep2xefsdp2": (4, {"ep_size": 2}),
    "tp2-ep2": (2, {"tp_size": 2, "ep_size": 2}),
}
"""Ranks, and sizes."""

FAST = keep_known(
    "olmo_hybrid-dp2",  # concatenated along the sharded dim
    "qwen3_moe-dp3",  # no expert on the last rank
    "hrm_text-tp2",  # split
    "inkling2_text-tp2",  # interleaved
    "hrm_text-dp2xtp2",  # along the dim that both axes shard
    "qwen3_moe-ep2xefsdp2",  # experts merged, and sharded twice along one dim or along two
)
KINDS = {family: get_kind(family) for family in get_all_families()}
CELLS = {
    f"{family}-{mesh}": (family, mesh)
    for family, kind in KINDS.items()
    for mesh, (_, sizes) in MESHES.items()
    # three ranks shard as two do, and unevenly too; four shard over both axes
    if (f"{family}-{mesh}" in FAST or mesh not in ("dp2", "tp2"))
    and (kind.styles or "tp_size" not in sizes)
    and (kind.has_experts or "ep_size" not in sizes)
}
ONE_OF_EACH_KIND = {kind: family for family, kind in reversed(KINDS.items()) if kind.styles}
MATRIX = Matrix(
    "pretrained files of families",
    {name: KINDS[family].describe(mesh, MESHES[mesh][1]) for name, (family, mesh) in CELLS.items()},
    fast=FAST,
    always=[f"{family}-dp2xtp2" for family in ONE_OF_EACH_KIND.values()],
    costs={name: MESHES[mesh][0] for name, (_, mesh) in CELLS.items()},
)


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


def shard(model: Any, **sizes: int) -> Any:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
    return FSDP2Manager(config, create_device_mesh(device_type="cpu", **sizes)).parallelize(model)


def read_shards(family: str, mesh: str, folder: Path, **changes: Any) -> None:
    expected = save(family, folder, **changes).state_dict()
    ranks, sizes = MESHES[mesh]

    def run() -> None:
        model = shard(from_pretrained(folder), **sizes)
        actual = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
        assert actual.keys() == expected.keys()
        for name, tensor in actual.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            assert local.untyped_storage().nbytes() == local.nbytes, f"{name} keeps more than its shard in memory"

    run_ranks(run, ranks)


def test_all_families_but_two_have_styles_of_tensor_parallelism() -> None:
    """The matrix has no tensor parallel cell of a family without them, so none may lose them unnoticed."""
    assert {family for family, kind in KINDS.items() if not kind.styles} == {"gemma4", "zaya"}


@pytest.mark.guarantees("pretrained-slices")
@pytest.mark.parametrize(("family", "mesh"), MATRIX.list_parameters(CELLS))
def test_weights_are_those_of_one_process(family: str, mesh: str, tmp_path: Path) -> None:
    read_shards(family, mesh, tmp_path)


@pytest.mark.guarantees("pretrained-slices")
@pytest.mark.parametrize(("family", "mesh"), [("qwen3_moe", "ep2xefsdp2"), ("gpt_oss", "tp2-ep2")])
def test_a_rank_reads_only_its_own_experts(
    family: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of experts that all ranks read are as many as the files have, even though tensors are merged."""
    save(family, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    bytes_of_experts = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name)
    ranks, sizes = MESHES[mesh]
    read = _StoredTensor.__getitem__
    bytes_read = [0]

    def count(tensor: Any, index: Any) -> torch.Tensor:
        result = read(tensor, index)
        bytes_read[0] += result.nbytes * (".experts." in tensor._name)
        return result

    monkeypatch.setattr(_StoredTensor, "__getitem__", count)

    def run() -> int:
        shard(from_pretrained(tmp_path), **sizes)
        return bytes_read[0]

    assert sum(run_ranks(run, ranks)) == bytes_of_experts


@pytest.mark.slow
def test_ranks_without_a_part_of_what_both_axes_shard(tmp_path: Path) -> None:
    """Tensor parallelism leaves each rank the sink of one head, and FSDP leaves that to the first of two ranks."""
    read_shards("gpt_oss", "dp2xtp2", tmp_path, num_attention_heads=2, num_key_value_heads=2)


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("dp2xtp2", marks=pytest.mark.slow)])
def test_experts_in_contiguous_shards(mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 has them, whose DTensor cannot pack."""
    monkeypatch.setattr(tp_parameters, "has_packed_shards", lambda: False)
    read_shards("qwen3_moe", mesh, tmp_path)


@pytest.mark.slow
def test_memory_of_reading_whole(tmp_path: Path) -> None:
    """A rank holds one tensor that cannot be cut before it is read, twice, beside its shards."""
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 2, "num_attention_heads": 16}
    config = make_config({**LLAMA, **sizes, "num_key_value_heads": 16})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {name: torch.zeros(weight.shape, dtype=torch.bfloat16) for name, weight in model.state_dict().items()}
    for layer in range(2):
        parts = [weights.pop(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        weights[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = 4 * weights["model.layers.0.mlp.gate_up_proj.weight"].numel()

    def measure() -> tuple[int, int]:
        names = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        converter = WeightConverter("mlp.gate_up_proj.weight", names, [Interleave(dim=0), Chunk(dim=0)])
        register_checkpoint_conversion_mapping("llama", [converter], overwrite=True)
        model = from_pretrained(tmp_path)
        baseline = reset_peak_memory()
        shards = sum(parameter.to_local().nbytes for parameter in shard(model).parameters())
        return shards, get_peak_memory() - baseline

    for shards, peak in run_ranks(measure, 2):
        assert peak <= shards + 2 * whole + 100_000_000, f"{peak / 1e6} MB, of which {shards / 1e6} are shards"


def test_it_is_known_what_is_made_from_each_stored_tensor(tmp_path: Path) -> None:
    model = save("qwen3_moe", tmp_path)
    stored = [*load_file(tmp_path / "model.safetensors"), "unknown"]
    targets = pretrained_shards.get_targets(model, stored, get_model_conversion_mapping(model))
    experts = "model.layers.1.mlp.experts"
    assert targets.keys() == {*stored}
    assert targets[f"{experts}.1.gate_proj.weight"] == targets[f"{experts}.0.up_proj.weight"]
    assert targets[f"{experts}.1.gate_proj.weight"] == [f"{experts}.gate_up_proj"]
    assert targets["model.norm.weight"] == ["model.norm.weight"]
    assert targets["unknown"] == []


def test_what_cannot_be_converted_is_named_once_with_the_reason(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.experts.1.gate_proj.weight"
    save_file({**weights, name: weights[name][:-1]}, file, metadata={"format": "pt"})
    named = "not convertible to the model's: model.layers.1.mlp.experts.gate_up_proj; the first error is "
    with raises_on_all_ranks(ValueError, match=rf"(?s)^(?!.*missing in the files).*{named}.*Error: MergeModulelist on"):
        run_ranks(lambda: shard(from_pretrained(tmp_path)), 2)


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
        shard(from_pretrained(tmp_path))
        assert set(inside) == {"1"}
        assert os.environ.get(name) == before

    for before in (None, "0"):
        run_ranks(run, 2, "HF_DEACTIVATE_ASYNC_LOAD", before)


def test_weights_are_converted_on_the_host_if_they_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator may lack the memory for them."""
    save("olmo_hybrid", tmp_path)
    load_tensors, placed = pretrained_shards.load_tensors, {}

    def look(model: Any, tensors: Any, config: Any) -> Any:
        placed.update(config.device_map)
        return load_tensors(model, tensors, config)

    monkeypatch.setattr(pretrained_shards, "load_tensors", look)

    def run() -> dict[str, Any]:
        shard(from_pretrained(tmp_path))
        return placed

    concatenated = "model.layers.0.linear_attn.conv1d.weight"
    assert run_ranks(run, 2) == [{"": torch.device("cpu"), concatenated: "cpu"}] * 2


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
        sharded = shard(from_pretrained(tmp_path, allow_missing=lacking))
        parameter = sharded.get_parameter(lacking)
        assert isinstance(parameter, DTensor)
        assert not parameter.is_meta
        assert parameter.full_tensor().shape == model.get_parameter(lacking).shape
        assert parameter.full_tensor().std() > 0

    run_ranks(run, 2)

"""Stages get the weights of one process: those that a seed draws, and those in the files of a pretrained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.families import make_family_config
from helpers.oracle import make_config, whole
from helpers.ranks import run_ranks
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.pipeline.split import build_split
from lightning_fsdp2.weights import pretrained
from lightning_fsdp2.weights.materialize import materialize
from lightning_fsdp2.weights.pretrained import load_pretrained, set_pretrained

CPU = torch.device("cpu")
RANKS = 2


def build_on_meta(family: str) -> nn.Module:
    """A model between two modules that draw numbers of their own."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_family_config(family))
        return nn.ModuleDict({"first": nn.Linear(3, 3), "model": model, "last": nn.Linear(3, 3)})


def build_stages(build: Callable[[], nn.Module]) -> list[nn.Module]:
    """The whole module, and the part of each rank."""
    whole, *stages = [build() for _ in range(1 + RANKS)]
    for rank, stage in enumerate(stages):
        build_split(find_structure(stage), ranks=RANKS, rank=rank).drop()
    return [whole, *stages]


def get_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**module.state_dict(), **dict(module.named_buffers())}


def assert_parts_of(stages: list[nn.Module], whole: nn.Module) -> None:
    expected, found = get_tensors(whole), set()
    for stage in stages:
        for name, tensor in get_tensors(stage).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        found |= get_tensors(stage).keys()
        assert len(get_tensors(stage)) < len(expected)
    assert found == expected.keys()


@pytest.mark.guarantees("same-seed", "seeds-of-stages")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_a_seed_gives_stages_the_weights_of_one_process(family: str) -> None:
    whole, *stages = build_stages(lambda: build_on_meta(family))
    for module in (whole, *stages):
        torch.manual_seed(5)
        materialize(module, CPU)
    assert_parts_of(stages, whole)


def test_a_seed_gives_stages_the_adapters_of_one_process() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_family_config("llama"))
            return get_peft_model(model, LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"]))

    whole, *stages = build_stages(build)
    for module in (whole, *stages):
        torch.manual_seed(5)
        materialize(module, CPU)
    assert_parts_of(stages, whole)


# ---------------------------------------------------------------------- pretrained


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the tensors that are read from files."""
    names: set[str] = set()
    original = pretrained._Reader.read

    def record(self: Any, file: str, name: str, index: Any) -> Tensor:
        names.add(name)
        return original(self, file, name, index)

    monkeypatch.setattr(pretrained._Reader, "read", record)
    return names


@pytest.mark.guarantees("no-whole-model")
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_stage_reads_only_its_own_tensors(family: str, read: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make_family_config(family)).save_pretrained(tmp_path)

    def build() -> nn.Module:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_family_config(family))
        set_pretrained(model, tmp_path)
        return nn.ModuleDict({"model": model})

    whole, *stages = build_stages(build)
    load_pretrained(whole, CPU)
    every = set(read)
    parts = []
    for stage in stages:
        read.clear()
        load_pretrained(stage, CPU)
        parts.append(set(read))
    assert_parts_of(stages, whole)
    assert parts[0] | parts[1] == every
    tied = {"gpt2": {"transformer.wte.weight"}}.get(family, set())
    assert parts[0] & parts[1] == tied


def test_a_seed_gives_stages_the_adapters_of_a_pretrained_model(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(make_family_config("llama")).save_pretrained(tmp_path)

    def build() -> nn.Module:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_family_config("llama"))
            set_pretrained(model, tmp_path)
            return get_peft_model(model, LoraConfig(target_modules="all-linear"))

    whole, *stages = build_stages(build)
    for module in (whole, *stages):
        torch.manual_seed(5)
        load_pretrained(module, CPU)
        materialize(module, CPU)
    assert_parts_of(stages, whole)


def test_a_stage_draws_weights_that_the_files_lack_as_one_process_does(tmp_path: Path) -> None:
    config = make_family_config("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def build() -> nn.Module:
        longer = make_config({**config.to_dict(), "num_hidden_layers": 4, "num_labels": 8})
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(longer)
        set_pretrained(model, tmp_path, allow_missing=("score.weight", "model.layers.2.*", "model.layers.3.*"))
        return nn.ModuleDict({"model": model})

    whole, *stages = build_stages(build)
    for module in (whole, *stages):
        torch.manual_seed(5)
        load_pretrained(module, CPU)
        materialize(module, CPU)
    assert_parts_of(stages, whole)


@pytest.mark.parametrize("sizes", [{}, pytest.param({"tp_size": 2}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_pretrained", [False, True])
def test_ranks_of_all_stages_get_the_weights_of_one_process(
    is_pretrained: bool, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Every rank has a seed of its own, and all take that of the first."""
    config = make_family_config("gpt2")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def build() -> nn.Module:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if is_pretrained:
            set_pretrained(model, tmp_path)
        return model

    def run() -> dict[str, Tensor]:
        torch.manual_seed(5 + dist.get_rank())
        flags = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        mesh = create_device_mesh(flags, device_type="cpu", pp_size=2, **sizes)
        return whole(FSDP2Manager(flags, mesh).parallelize(build()).state_dict())

    expected = build()
    torch.manual_seed(5)
    load_pretrained(expected, CPU)
    materialize(expected, CPU)
    results = run_ranks(run, 4 if sizes else 2)
    for weights in results:
        torch.testing.assert_close(weights, {name: expected.state_dict()[name] for name in weights}, rtol=0, atol=0)
    assert set().union(*results) == expected.state_dict().keys()

"""The units of every kind of model, and what no grouping into units can serve."""

from typing import cast

import lightning.pytorch as pl
import pytest
import torch
from helpers.model_kinds import MODELS, make_moe
from helpers.models import LLAMA, Block, PlainTransformer, make_causal_lm
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.data.units import Unit, build_layer_units, build_unit_plan


def describe(unit: Unit, root: nn.Module) -> str:
    """The unit in one line: ``kept`` after forward, casts its ``output``, ..."""
    names = {module: name or "root" for name, module in root.named_modules()}
    settings = {
        "kept": unit.reshard_after_forward is False,
        "output": unit.casts_output,
        "container": unit.is_container,
        "forward-only": not unit.unshard_in_backward,
    }
    return " ".join([" + ".join(names[module] for module in unit.modules), *[key for key in settings if settings[key]]])


@pytest.mark.parametrize("name", MODELS)
def test_units_of_a_model(name: str) -> None:
    model = MODELS[name].make()
    expected = [line.strip() for line in MODELS[name].units.strip().splitlines()]
    assert [describe(unit, model) for unit in build_unit_plan(find_structure(model)).units] == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_unit_has_the_mesh_of_the_plan(name: str) -> None:
    structure, mesh = find_structure(MODELS[name].make()), cast(DeviceMesh, object())
    assert {unit.mesh for unit in build_unit_plan(structure, mesh=mesh).units} == {mesh}
    assert {unit.mesh for unit in build_layer_units(structure, mesh=mesh)} <= {mesh}
    assert {unit.mesh for unit in build_unit_plan(structure).units} == {None}


CHAINS = {
    "llama": [["model.embed_tokens", *(f"model.layers.{index}" for index in range(3)), "model.norm + lm_head"]],
    "bert": [["bert.embeddings.word_embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"]],
    "t5": [["encoder.block.0", "encoder.block.1"], ["decoder.block.0", "decoder.block.1"]],
}


@pytest.mark.parametrize("name", CHAINS)
def test_units_of_a_chain_are_in_the_order_in_which_forward_runs_them(name: str) -> None:
    model = MODELS[name].make()
    names = {module: name for name, module in model.named_modules()}
    chains = build_unit_plan(find_structure(model)).chains
    assert [[" + ".join(names[m] for m in unit.modules) for unit in chain] for chain in chains] == CHAINS[name]


def test_a_module_with_two_dtypes_is_refused_with_its_parameters() -> None:
    model = make_moe()
    model.blocks[1].gate.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"blocks\.1\.gate\.weight \(torch\.float32\), blocks\.1\.gate\.bias"):
        build_unit_plan(find_structure(model))
    model.blocks[1].gate.bias.requires_grad_(False)
    build_unit_plan(find_structure(model))


def test_parameters_of_another_dtype_in_a_module_without_a_forward_are_refused_by_name() -> None:
    model = make_moe()
    model.blocks[1].decays = nn.ParameterList([torch.ones(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"blocks\.1\.decays\.0 \(torch\.float64\) are in a ParameterList"):
        build_unit_plan(find_structure(model))


def test_parameters_tied_across_blocks_are_refused_with_their_names() -> None:
    model = PlainTransformer()
    model.blocks[2].mlp[0].weight = model.blocks[0].mlp[0].weight
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.0\.weight, blocks\.2\.mlp\.0\.weight are tied"):
        build_unit_plan(find_structure(model))


def test_a_container_without_a_forward_is_refused_before_anything_is_sharded() -> None:
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match=r"A Module(List|Dict) has no forward"):
            build_unit_plan(find_structure(container))


def test_a_model_that_owns_nothing_but_its_blocks_has_a_unit_to_cast_its_output() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(2))

        def forward(self) -> None: ...

    module = pl.LightningModule()
    module.model = Stack()
    (unit,) = [unit for unit in build_unit_plan(find_structure(module)).units if unit.modules == [module.model]]
    assert unit.casts_output


def test_a_module_that_is_never_called_is_no_unit() -> None:
    class Shelf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4))
            self.down = nn.Linear(4, 4)

    module = pl.LightningModule()
    module.shelf = Shelf()
    assert [unit.modules for unit in build_unit_plan(find_structure(module)).units] == [[module.shelf.down], [module]]


def test_an_embedding_with_a_norm_of_its_own_is_gathered_for_backward() -> None:
    model = make_causal_lm(LLAMA)
    embedding = model.get_input_embeddings()
    embedding.norm = nn.LayerNorm(embedding.embedding_dim)  # as in Inkling
    (unit,) = [unit for unit in build_unit_plan(find_structure(model)).units if unit.modules == [embedding]]
    assert unit.unshard_in_backward

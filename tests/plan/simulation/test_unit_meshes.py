"""What `describe` says of units on different meshes is what ranks hold."""

import io

import torch
from helpers.ranks import run_ranks
from helpers.unit_meshes import RANKS, make_model, shard_over_many_meshes
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Strategy, create_device_mesh
from lightning_fsdp2.plan.sharding_table import write_tables
from lightning_fsdp2.plan.simulation.sharding import Description, describe_sharded

ROLES = ("weights", "gathered", "compute", "reduction")


def test_every_parameter_is_described_on_its_own_mesh() -> None:
    def run() -> Description:
        model = make_model()
        mesh = create_device_mesh(device_type="cpu")
        shard_over_many_meshes(model)
        description = describe_sharded(FSDP2Strategy(), model, mesh, dict.fromkeys(ROLES, torch.float32))
        shapes = {p.name: p.shard_shape for unit in description.units for p in unit.parameters}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert shapes[name] == parameter.to_local().shape, name
        return description

    description = run_ranks(run, RANKS)[0]
    placements = {p.name: p.placements for unit in description.units for p in unit.parameters}
    assert placements["embedding.weight"] == {"everywhere": "dim 0"}
    assert placements["blocks.0.mlp.0.weight"] == {"data": "dim 0"}
    assert placements["blocks.1.mlp.0.weight"] == {"replicate": "whole", "shard": "dim 0"}
    assert placements["blocks.2.mlp.2.weight"] == {"data": "dim 0", "tensor_parallel": "dim 1"}
    gathered = {unit.modules[0]: unit.gathered_bytes for unit in description.units}
    assert gathered["blocks.0"] == gathered["blocks.1"]
    # each tensor parallel rank gathers its half of the perceptron's two weights and of the bias between them
    assert gathered["blocks.1"] - gathered["blocks.2"] == 4 * (2 * 32 * 64 + 64) // 2
    output = io.StringIO()
    write_tables(description, output)
    header = next(line for line in output.getvalue().splitlines() if "everywhere" in line)
    assert {"data", "shard"} <= set(header.split())

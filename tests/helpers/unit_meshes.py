"""A model whose units are sharded over different meshes of four ranks, and a loop that trains it.

Two ranks that are neighbours on the axis ``tensor_parallel`` read the same rows, as expert parallel ranks may.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from helpers.models import PlainTransformer, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE, Record, whole
from lightning_fsdp2 import clip_grad_norm_, defer_grad_sync
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.data.fully_shard import apply_fully_shard, apply_prefetch
from lightning_fsdp2.parallel.data.units import Unit, build_unit_plan

RANKS = 4
READERS = 2
ROWS = 8
MAX_NORM = 0.5
BATCHES = make_token_batches(6, size=ROWS, ragged=False)


def make_model(seed: int = 0) -> PlainTransformer:
    torch.manual_seed(seed)
    return PlainTransformer()


def shard_over_many_meshes(model: PlainTransformer) -> dict[str, DeviceMesh]:
    """Give every kind of mesh to a unit of ``model``, and return these meshes by the names of units.

    The root lies on all ranks; block 0 on two of them, as copies on the other two; block 1 on two replicas of two
    shards; the perceptron of block 2 on two axes, and the rest of that block on all ranks again.
    """
    everywhere = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("everywhere",))
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    two_axes = init_device_mesh("cpu", (READERS, 2), mesh_dim_names=("data", "tensor_parallel"))
    perceptron = model.blocks[2].mlp
    parallelize_module(perceptron, two_axes["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plan = build_unit_plan(find_structure(model), mesh=everywhere)
    units = {unit.modules[0]: unit for unit in plan.units}
    units[model.blocks[0]].mesh = two_axes["data"]
    units[model.blocks[1]].mesh = replicas
    inner = Unit(modules=[perceptron], mesh=two_axes["data"])
    apply_fully_shard([inner, *plan.units], model, mp_policy=MixedPrecisionPolicy())
    apply_prefetch(plan, forward_depth=1, backward_depth=1)
    return {"": everywhere, "blocks.0": two_axes["data"], "blocks.1": replicas, "blocks.2.mlp": two_axes}


def shard_over_one_mesh(model: PlainTransformer) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("everywhere",))
    plan = build_unit_plan(find_structure(model), mesh=mesh)
    apply_fully_shard(plan.units, model, mp_policy=MixedPrecisionPolicy())


def make_optimizer(model: nn.Module, **options: bool) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, **options)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: range,
    *,
    readers: int,
    micro_batches: int = 1,
    reduce_scatter: bool = False,
) -> Record:
    """Train the batches of ``steps``; each of ``readers`` pairs of neighbours reads its rows of every batch."""
    record = Record(initial=whole(dict(model.named_parameters())))
    reader = dist.get_rank() * readers // dist.get_world_size()
    rows = torch.arange(ROWS).chunk(readers)[reader].chunk(micro_batches)
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for index, chosen in enumerate(rows):
            batch = {name: value[chosen] for name, value in BATCHES[step].items()}
            if index < micro_batches - 1:
                with defer_grad_sync(model, reduce_scatter=reduce_scatter):
                    losses.append(backward(model, batch, micro_batches))
            else:
                losses.append(backward(model, batch, micro_batches))
        loss = torch.stack(losses).sum() / dist.get_world_size()
        dist.all_reduce(loss)
        record.losses.append(loss.item())
        record.gradients.append(get_gradients(model))
        record.norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        record.clipped.append(get_gradients(model))
        optimizer.step()
    record.weights = whole(dict(model.named_parameters()))
    return record


def backward(model: nn.Module, batch: dict[str, Tensor], micro_batches: int) -> Tensor:
    loss = plain_loss(model, batch)[0] / micro_batches
    loss.backward()
    return loss.detach()


def get_gradients(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})


def train_alone(model: nn.Module, steps: range) -> Record:
    """Train a copy of ``model`` on whole batches in this process, with torch's own clipping."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    record = Record(initial=whole(dict(model.named_parameters())))
    for step in steps:
        optimizer.zero_grad()
        record.losses.append(backward(model, BATCHES[step], 1).item())
        record.gradients.append(get_gradients(model))
        record.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        record.clipped.append(get_gradients(model))
        optimizer.step()
    record.weights = whole(dict(model.named_parameters()))
    return record

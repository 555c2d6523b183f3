"""Part that measures a layer of experts on one rank of a mesh, whose collectives do nothing."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.kernel_part import measure_calls
from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import QWEN3_30B_A3B, TINY_MIXTURE
from lightning_fsdp2.compat.torch_simulation import simulate_world
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.expert.apply import apply_expert_parallel
from lightning_fsdp2.plan.simulation.even_routing import assume_even_routing

IMPLEMENTATIONS = ("grouped_mm", "eager")
"""Values of ``experts_implementation``. The first is the default of transformers."""

EP_SIZES = (1, 2, 4, 8)


@part("experts", toy=60, real=90)
def compare_experts(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Measure what expert parallelism adds to a layer besides its all-to-alls: one of Qwen3-30B-A3B, 8,192 tokens.

    With each `ep_size`, the layer computes equally many rows, but with fewer experts. If a larger `ep_size` takes more
    time, the rows' sort and copies cost more than fewer experts save, and a fused dispatcher can save as much. The host
    does not wait for the numbers of rows here. The implementations decide which `experts_implementation` a recipe
    should set.
    """
    fields, tokens = (TINY_MIXTURE, 64) if args.scale == TOY else (QWEN3_30B_A3B, 8192)
    hidden = torch.randn(1, tokens, fields["hidden_size"], dtype=torch.bfloat16, device=get_device_type())
    rows: list[list[Any]] = []
    with simulate_world(max(EP_SIZES)):
        for implementation in IMPLEMENTATIONS:
            layers = [build_layer(fields, implementation, ep_size) for ep_size in EP_SIZES]
            seconds = measure(layers, hidden, args.rounds)
            for ep_size, taken in zip(EP_SIZES, seconds, strict=True):
                experts = fields["num_experts"] // ep_size
                rows.append([implementation, ep_size, experts, taken * 1e3, taken / seconds[0]])
            columns = ("experts_implementation", "ep_size", "experts", "ms", "ms / first")
            yield [Table(f"Forward and backward of a layer of experts, {tokens} tokens", columns, rows)]


def build_layer(fields: dict[str, Any], implementation: str, ep_size: int) -> nn.Module:
    """Build a router with experts in bfloat16, of which this rank has its part."""
    config = AutoConfig.for_model(**{**fields, "num_hidden_layers": 1, "vocab_size": 2})
    with torch.device(get_device_type()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    layer: nn.Module = model.model.layers[0].mlp
    if ep_size > 1:
        mesh = init_device_mesh(get_device_type(), (max(EP_SIZES) // ep_size, ep_size), mesh_dim_names=("efsdp", "ep"))
        apply_expert_parallel(find_structure(layer), mesh["ep"])
        assume_even_routing(layer)
    return layer


def measure(layers: Sequence[nn.Module], hidden: Tensor, rounds: int) -> list[float]:
    """Return the median seconds of each layer. The layers take turns."""
    seconds: list[list[float]] = [[] for _ in layers]
    for _ in range(1 + rounds):
        for layer, taken in zip(layers, seconds, strict=True):
            taken += measure_calls(partial(run_both_ways, layer, hidden))
    return [median(taken[1:]) for taken in seconds]  # the first measurement of each is slower than the others


def run_both_ways(layer: nn.Module, hidden: Tensor) -> None:
    """Run forward and backward."""
    output: Tensor = layer(hidden)
    output.backward(torch.ones_like(output))

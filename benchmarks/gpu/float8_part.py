"""Parts about float8: what the GPU's products are worth beside emulated ones, and how much time they save."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.gpu.arm_parts import take_turns
from benchmarks.gpu.arms import Arm, Workload, run_ours
from benchmarks.gpu.parity_part import SHORT, get_loss, make_model, make_tokens
from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import TINY
from benchmarks.memory import LLAMA_3_8B, run_forked
from benchmarks.trainings import process_group
from lightning_fsdp2 import Float8Config, FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.config import Float8Recipe

RECIPES: tuple[Float8Recipe, ...] = get_args(Float8Recipe)
LIMIT = 1.25
"""Largest error of the GPU's products, relative to the error of emulated products."""

ARMS: dict[str, Arm] = {
    "bfloat16": partial(run_ours, enable_compile=True),
    **{name: partial(run_ours, enable_compile=True, float8=Float8Config(recipe=name)) for name in RECIPES},
}
"""Compiled arms, because float8 is slower than bfloat16 without compilation."""

Gradients = dict[str, Tensor]


@part("float8-speed", toy=180, real=420)
def compare_float8(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Compare the recipes of float8 with bfloat16, all compiled: 8 layers of Llama 3 8B, with 1 x 8,192 tokens.

    A recipe that is not faster here is not worth its rounding. Published gains are in docs/precision.md.
    """
    workload = Workload({**LLAMA_3_8B, "num_hidden_layers": 8}, 1, 8192, is_bfloat16=True)
    if args.scale == TOY:
        workload = Workload(TINY, 1, 16, is_bfloat16=True, warmup_steps=1, blocks=2, steps=1)
    yield from take_turns(ARMS, workload, args.rounds)


@part("float8", toy=120, real=180)
def check_float8(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check that the GPU's products in float8 are as exact as emulated ones, compiled or not, for each recipe.

    The errors are those of all gradients of a Llama, relative to gradients in float32 without float8. The error of the
    GPU may be 1.25 times that of emulated products: its kernels accumulate in fewer bits.
    """
    fields, length = (TINY, 32) if args.scale == TOY else (SHORT, 1024)

    def compute(**flags: Any) -> Gradients:
        return run_forked(partial(compute_gradients, fields, length, flags), 1)[0]

    exact = compute()
    rows: list[list[Any]] = []
    failures: list[str] = []
    without: list[str] = []
    for recipe in RECIPES:
        emulated = get_error(compute(float8=Float8Config(recipe=recipe, emulate=True)), exact)
        errors = [
            get_error(compute(float8=Float8Config(recipe=recipe), enable_compile=compiles), exact)
            for compiles in (False, True)
        ]
        rows.append([recipe, emulated, *errors])
        failures += [recipe] if max(errors) > LIMIT * emulated else []
        without += [recipe] if min(errors) < emulated / 2 else []
        yield [Table("errors of gradients", ("recipe", "emulated", "in float8", "in float8, compiled"), rows)]
    if failures:
        raise ValueError(f"Less exact than emulated products: {', '.join(failures)}.")
    if without:
        raise ValueError(f"As exact as without float8, so it did not run: {', '.join(without)}.")


def compute_gradients(fields: dict[str, Any], length: int, flags: dict[str, Any], worker: int) -> Gradients:
    """Compute all gradients of a Llama on one rank in float32, with some flags."""
    with process_group():
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **flags)
        mesh = create_device_mesh(config, device_type=get_device_type())
        model = FSDP2Manager(config, mesh).parallelize(make_model(fields))
        get_loss(model, make_tokens(fields, length, dist.get_world_size())).backward()
        return {name: parameter.grad.full_tensor().cpu() for name, parameter in model.named_parameters()}


def get_error(gradients: Gradients, exact: Gradients) -> float:
    """Return the distance of all gradients from the exact ones, relative to the size of the exact ones."""
    distance = sum((gradients[name] - gradient).square().sum() for name, gradient in exact.items())
    size = sum(gradient.square().sum() for gradient in exact.values())
    return float(torch.as_tensor(distance / size).sqrt())

"""Part that compares the loss and every gradient of several ranks on one machine with those of one process."""

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.parts import TOY, Table, get_device_type, part
from benchmarks.gpu.shapes import LLAMA_3_8B, TINY, make_mixture
from benchmarks.gpu.staged_group import STAGED, register
from benchmarks.memory import run_forked
from lightning_fsdp2 import (
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    clip_grad_norm_,
    create_device_mesh,
)
from lightning_fsdp2.parallel.megatron import wrap
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.plain_loop import train_on_stages
from lightning_fsdp2.ranks.whole_tensors import gather

LOSS_TOLERANCE = GRADIENT_TOLERANCE = 1e-5
"""Tolerances: absolute for the loss, and for a gradient, relative to its largest value. ``LARGEST_TOLERANCE`` times the
largest value of any gradient is added."""

LARGEST_TOLERANCE = 1e-7
SHORT: dict[str, Any] = {**LLAMA_3_8B, "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816}
SHORT |= {"num_hidden_layers": 4, "num_attention_heads": 8}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and flags: how the ranks share the work."""

    sizes: dict[str, int]
    flags: dict[str, Any] = field(default_factory=dict)
    is_megatron: bool = False
    is_mixture: bool = False
    """Whether the model is a mixture of experts, and not a Llama."""

    @property
    def pp_size(self) -> int:
        """Number of pipeline parallel ranks."""
        return self.sizes.get("pp_size", 1)

    @property
    def shares(self) -> int:
        """Number of ranks that read the same sequences."""
        return self.pp_size * self.sizes.get("tp_size", 1) * self.sizes.get("cp_size", 1)


LAYOUTS = {
    "FSDP": Layout({}),
    "tensor + sequence parallel": Layout({"tp_size": 2}, {"sequence_parallel": True}),
    "context parallel, allgather": Layout({"cp_size": 2}, {"context_parallel_method": "allgather"}),
    "context parallel, ulysses": Layout({"cp_size": 2}, {"context_parallel_method": "ulysses"}),
    "HSDP": Layout({"dp_replicate_size": 2}),
    "expert parallel": Layout({"ep_size": 2}, is_mixture=True),
    "expert parallel, full AC": Layout({"ep_size": 2}, {"activation_checkpointing": "full"}, is_mixture=True),
    "expert parallel, selective AC": Layout({"ep_size": 2}, {"activation_checkpointing": "selective"}, is_mixture=True),
    "expert + tensor + sequence parallel": Layout(
        {"ep_size": 2, "tp_size": 2}, {"sequence_parallel": True}, is_mixture=True
    ),
    "pipeline parallel, 1F1B": Layout({"pp_size": 2}),
    "pipeline parallel, GPipe": Layout({"pp_size": 2}, {"pp_schedule": "gpipe"}),
    "pipeline parallel, interleaved": Layout({"pp_size": 2}, {"pp_schedule": "interleaved_1f1b"}),
    "pipeline parallel, full AC": Layout({"pp_size": 2}, {"activation_checkpointing": "full"}),
    "pipeline + tensor + sequence parallel": Layout({"pp_size": 2, "tp_size": 2}, {"sequence_parallel": True}),
    "Megatron-FSDP": Layout({}, is_megatron=True),
    "Megatron-FSDP, double buffer": Layout({}, {"fsdp_double_buffer": True}, is_megatron=True),
    "Megatron-FSDP, tensor + sequence parallel": Layout({"tp_size": 2}, {"sequence_parallel": True}, is_megatron=True),
}


@part("parity", toy=120, real=240)
def compare_with_one_process(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Check that every wait for a GPU stream is in place, which CPUs cannot show.

    `--ranks` processes share the GPU, and communicate through the host. In float32, the loss must equal the loss of one
    process to 1e-5, and each gradient to 1e-5 of its largest value. A larger difference is a race or an error of a
    kernel. The same layout on CPUs tells which. NCCL is not checked, since it needs a GPU for each rank.
    """
    llama, length = ({**TINY, "num_hidden_layers": 4}, 32) if args.scale == TOY else (SHORT, 1024)
    models = {False: llama, True: make_mixture(llama)}
    expected = {kind: run_forked(partial(run_alone, models[kind], length, args.ranks), 1)[0] for kind in models}
    rows: list[list[Any]] = []
    failures: list[str] = []
    for name, layout in LAYOUTS.items():
        if layout.is_megatron and get_device_type() not in wrap.DEVICE_TYPES:
            rows.append([name, "needs CUDA", None, None])
            continue
        if args.ranks % layout.shares:
            rows.append([name, f"needs --ranks {layout.shares}", None, None])
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                run = partial(run_rank, layout, models[layout.is_mixture], length, args.ranks, folder)
                actual, *_ = run_forked(run, args.ranks)
            loss, gradient = compare(actual, expected[layout.is_mixture])
            is_right = loss <= LOSS_TOLERANCE and gradient <= 1
            rows.append([name, "equal" if is_right else "differs", loss, gradient])
        except Exception as error:  # other layouts may still be right
            rows.append([name, f"{type(error).__name__}: {error}".splitlines()[0], None, None])
        failures += [name] if rows[-1][1] != "equal" else []
        columns = ("layout", "is", "loss: difference", "gradients: largest difference / allowed")
        yield [Table(f"{args.ranks} ranks beside one process", columns, rows)]
    if failures:
        raise ValueError(f"Not equal to one process: {', '.join(failures)}.")


Result = tuple[float, dict[str, Tensor]]
"""The loss, and the gradients by name."""


def run_alone(fields: dict[str, Any], length: int, ranks: int, worker: int) -> Result:
    """Compute the expected result in one process."""
    model = make_model(fields)
    loss = get_loss(model, make_tokens(fields, length, ranks))
    loss.backward()
    return loss.item(), {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def run_rank(layout: Layout, fields: dict[str, Any], length: int, ranks: int, folder: str, rank: int) -> Result:
    """Compute the result of a layout on one of its ranks. All ranks return the same."""
    register()
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(STAGED, store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    if layout.is_megatron:
        config: Any = MegatronFSDPConfig(**layout.flags)
    else:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **layout.flags)
    mesh = create_device_mesh(config, device_type=get_device_type(), **layout.sizes)
    # the ranks of a stage are consecutive
    index = rank % (ranks // layout.pp_size) // (layout.shares // layout.pp_size)
    tokens = make_tokens(fields, length, ranks).chunk(ranks // layout.shares)[index]
    model = make_model(fields)
    if layout.is_megatron:
        wrapped, _ = MegatronFSDPManager(config, mesh).parallelize(model, torch.optim.SGD(model.parameters()))
    else:
        wrapped = FSDP2Manager(config, mesh).parallelize(model)
    if layout.pp_size > 1:
        loss = train_on_stages(wrapped, partial(get_loss, wrapped), tokens)
    else:
        loss = get_loss(wrapped, tokens)
        loss.backward()
    clip_grad_norm_([*wrapped.parameters()], math.inf)  # creates the gradients of Megatron-FSDP
    gradients = {name: gather(parameter.grad).cpu() for name, parameter in model.named_parameters()}
    if layout.pp_size > 1:
        stages: list[Any] = [None] * layout.pp_size
        dist.all_gather_object(stages, gradients, group=get_pipeline(wrapped).control)
        gradients = {name: gradient for stage in stages for name, gradient in stage.items()}
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    dist.barrier()  # a rank that exits early would make its peers fail
    return loss.item(), gradients


def make_model(fields: dict[str, Any]) -> nn.Module:
    """Make a model with the same weights at every call."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    return model.to(get_device_type()).train()


def make_tokens(fields: dict[str, Any], length: int, ranks: int) -> Tensor:
    """Make random tokens, with one sequence for each rank."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(fields["vocab_size"], (ranks, length), generator=generator).to(get_device_type())


def get_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss that the model itself computes."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def compare(actual: Result, expected: Result) -> tuple[float, float]:
    """Return the difference of the losses, and the largest difference of gradients relative to the tolerance."""
    references = expected[1]
    sizes = {name: reference.abs().max().item() for name, reference in references.items()}
    largest = max(sizes.values())
    worst = max(
        (actual[1][name] - reference).abs().max().item()
        / (GRADIENT_TOLERANCE * sizes[name] + LARGEST_TOLERANCE * largest)
        for name, reference in references.items()
    )
    return abs(actual[0] - expected[0]), worst

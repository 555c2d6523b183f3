"""Steps on fake CUDA tensors: none mixes the host's tensors with the device's, or lets the host wait for the device."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from helpers.fake_cuda import Step, needs_stub, simulate_on_cuda
from helpers.ranks import run_ranks
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import AdamW

from lightning_fsdp2 import CausalLM, DDPStrategy, FSDP2Config, FSDP2Strategy

pytestmark = needs_stub

RANKS = 8
LAYERS = 4
MICRO_BATCHES = 2
LENGTH = 1024
TENSORS = 3 + 9 * LAYERS
"""Parameters of a Llama."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "sliding_window": 128,
}

FLASH = "aten::_scaled_dot_product_flash_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
SEGMENTS = "lightning_fsdp2::segment_attention"
KERNELS = (FLASH, EFFICIENT, SEGMENTS)

READ_BY_THE_HOST = {f"{EFFICIENT}_backward", SEGMENTS, f"{SEGMENTS}_backward"}
"""Operations that take tensors of the host: the state of random numbers, as torch's own forward returns it without
dropout, and where the keys of each sequence start, of which views are made."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A run of 8 ranks, and what its step may do."""

    strategy: Callable[[], Any] = FSDP2Strategy
    config: dict[str, Any] = field(default_factory=lambda: LLAMA)
    module: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16-mixed"
    is_packed: bool = False
    kernels: set[str] = field(default_factory=lambda: {FLASH})
    """Of attention."""

    copies: int = 0
    """To the device, per micro-batch, beside the batch: where the segments of each of a rank's two chunks end."""

    host_reads: int = 0
    """Per micro-batch. With packed sequences transformers asks whether all are whole."""


def shard(*, tp: int = 1, cp: int = 1, replicas: int = 1, **options: Any) -> Callable[[], FSDP2Strategy]:
    """A strategy of these sizes with these flags, to be made later."""
    return lambda: FSDP2Strategy(tp_size=tp, cp_size=cp, dp_replicate_size=replicas, config=FSDP2Config(**options))


SEQUENCE_PARALLEL = shard(tp=2, sequence_parallel=True)

LAYOUTS = {
    "dp8": Layout(),
    "hsdp 2x4": Layout(strategy=shard(replicas=2)),
    "tp2+sp": Layout(strategy=SEQUENCE_PARALLEL),
    "tp2+sp, loss parallel, full AC": Layout(
        strategy=shard(tp=2, sequence_parallel=True, loss_parallel=True, activation_checkpointing="full")
    ),
    "selective AC": Layout(strategy=shard(activation_checkpointing="selective")),
    "cp4 allgather": Layout(strategy=shard(cp=4, context_parallel_method="allgather")),
    "cp4 ulysses": Layout(strategy=shard(cp=4, context_parallel_method="ulysses")),
    "cp2, packed": Layout(strategy=shard(cp=2), is_packed=True, kernels={SEGMENTS}, copies=4),
    "cp2, window": Layout(
        strategy=shard(cp=2, context_parallel_method="allgather"),
        config=GPT_OSS,
        module={"attn_implementation": "eager"},
        kernels={FLASH, SEGMENTS},
        copies=4,
    ),
    "tp2+sp, chunked loss": Layout(strategy=SEQUENCE_PARALLEL, module={"loss": "chunked"}),
    "tp2, LoRA": Layout(strategy=shard(tp=2), module={"lora": {"r": 8}}),
    "dp8, packed": Layout(is_packed=True, kernels={EFFICIENT}, host_reads=1),
    "tp2+sp, Qwen3-MoE": Layout(strategy=SEQUENCE_PARALLEL, config=QWEN3_MOE),
    "DDP": Layout(strategy=DDPStrategy),
    "dp8, bf16-true": Layout(precision="bf16-true"),
    "dp8, gradients reduced at once": Layout(strategy=shard(defer_fsdp_grad_sync=False)),
}


def make_batch(is_packed: bool) -> dict[str, Tensor]:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if is_packed:
        batch["position_ids"] = torch.arange(LENGTH // 2).repeat(2, 2)
    return batch


def run_step(layout: Layout, **options: Any) -> Step:
    """Simulate a step of ``layout`` in a process of its own."""

    def run() -> Step:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=layout.strategy(),
            precision=layout.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=MICRO_BATCHES,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        module = CausalLM(config=layout.config, optimizer=partial(AdamW, fused=True), **layout.module)
        batch = make_batch(layout.is_packed)
        return simulate_on_cuda(trainer, module, batch, world_size=RANKS)

    return run_ranks(run, 1, group=False)[0]


@pytest.mark.guarantees("packed-sequences-are-not-sought")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_step_mixes_no_devices_and_waits_for_none(layout: Layout) -> None:
    step = run_step(layout)
    assert [event for event in step.mixed if get_operation(event) not in READ_BY_THE_HOST] == []
    assert step.copies_to_device.total() == len(make_batch(layout.is_packed)) + layout.copies * MICRO_BATCHES
    assert step.copies_to_host == {}
    assert step.host_reads.total() == layout.host_reads * MICRO_BATCHES
    assert step.waits == {}
    assert {kernel for kernel in KERNELS if step.operations[kernel]} == layout.kernels
    assert sum(step.operations[f"{kernel}_backward"] for kernel in KERNELS) >= LAYERS * MICRO_BATCHES


def get_operation(event: str) -> str:
    return event.split(" ")[0]


def test_each_layer_calls_the_flash_kernel_once() -> None:
    step = run_step(LAYOUTS["dp8"])
    assert step.operations[FLASH] == step.operations[f"{FLASH}_backward"] == LAYERS * MICRO_BATCHES


def test_offloaded_shards_travel_and_compute_on_the_host() -> None:
    offloaded = Layout(strategy=shard(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    step = run_step(offloaded)
    assert step.mixed == step.host_reads == step.waits == {}
    factors = [line for line in step.copies_to_host if "parallel/data/gradients.py" in line]
    assert sum(step.copies_to_host[line] for line in factors) == 1  # by which gradients are scaled
    assert step.copies_to_host.total() - 1 == TENSORS  # gradients, once a step
    assert step.copies_to_device.total() >= MICRO_BATCHES * TENSORS


def test_logging_waits_once() -> None:
    step = run_step(LAYOUTS["dp8"], log_every_n_steps=1)
    assert step.copies_to_host.total() == 1
    assert step.host_reads == step.waits == {}


def test_a_host_that_looks_for_packed_sequences_is_seen() -> None:
    with patch.object(CausalLM, "_treat_documents", lambda module, inputs: nullcontext()):
        step = run_step(LAYOUTS["dp8"])
    assert step.host_reads.total() == MICRO_BATCHES
    assert all("transformers/masking_utils.py" in line for line in step.host_reads)

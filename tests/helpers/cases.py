"""Runs to compare with one process: meshes, and a causal language model's or a plain model's training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from helpers.mesh_runs import Case, ScalarLossModule
from helpers.models import GPT2, LLAMA, PlainTransformer, make_causal_lm, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE, token_sum_loss
from lightning_fsdp2 import CausalLM

MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp1": (1, {}, {}),
    "dp2": (2, {}, {}),
    "dp3": (3, {}, {}),
    "dp4": (4, {}, {}),
    "hsdp2x1": (2, {"dp_replicate_size": 2}, {}),
    "hsdp2x2": (4, {"dp_replicate_size": 2}, {}),
    "tp2": (2, {"tp_size": 2}, {}),
    "tp2+sp": (2, {"tp_size": 2}, {"sequence_parallel": True}),
    "tp2+loss": (2, {"tp_size": 2}, {"loss_parallel": True}),
    "dp2xtp2+sp+loss": (4, {"tp_size": 2}, {"sequence_parallel": True, "loss_parallel": True}),
    "cp2": (2, {"cp_size": 2}, {"context_parallel_method": "allgather"}),
    "cp2+ulysses": (2, {"cp_size": 2}, {"context_parallel_method": "ulysses"}),
    "dp2xcp2": (4, {"cp_size": 2}, {}),
    "cp2xtp2+sp+loss": (4, {"cp_size": 2, "tp_size": 2}, {"sequence_parallel": True, "loss_parallel": True}),
    "hsdp2xtp2": (4, {"tp_size": 2, "dp_replicate_size": 2}, {}),
}
"""Ranks, sizes, and the flags of tensor and context parallelism."""


def make_case(
    model: str, *, accumulate: int, clip: float | None, tied: bool, meta: bool, loss: str = "full", **options: Any
) -> Case:
    """Three steps of ``"llama"``, ``"gpt2"`` or ``"plain"``; ``options`` are fields of the case."""
    # what context parallelism of all meshes here divides; elsewhere the tests' usual length
    length = 16 if options.get("strategy", {}).get("cp_size", 1) > 1 else 12
    batches = make_token_batches(3 * accumulate * 4, length=length)
    if model == "plain":
        make_model: Callable[[], nn.Module] = partial(PlainTransformer, tied=tied)
        make_module = partial(ScalarLossModule, make_model, plain_loss, meta=meta)
        return Case(
            make_module=make_module,
            make_model=make_model,
            loss=plain_loss,
            batches=batches,
            accumulate=accumulate,
            clip=clip,
            **options,
        )
    config = {**(LLAMA if model == "llama" else GPT2), "tie_word_embeddings": tied}
    return Case(
        make_module=partial(make_causal_lm_module, config, meta=meta, loss=loss),
        make_model=partial(make_causal_lm, config),
        loss=token_sum_loss,
        batches=batches,
        accumulate=accumulate,
        clip=clip,
        **options,
    )


def make_causal_lm_module(config: dict[str, Any], *, meta: bool, loss: str) -> CausalLM:
    """Without weight decay, as the oracle; its model has weights already if not ``meta``."""
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    module = CausalLM(config=config, optimizer=optimizer, decay_norms_and_biases=True, loss=loss)
    if not meta:
        module.model = make_causal_lm(config)
    return module

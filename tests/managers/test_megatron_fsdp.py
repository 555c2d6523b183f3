"""MegatronFSDPManager in a plain torch loop, and the functions it stands on."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import LLAMA, PlainTransformer, make_causal_lm, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE, assert_equal_gradients, whole
from helpers.ranks import run_ranks
from torch import Tensor, nn

from lightning_fsdp2 import (
    MegatronFSDPConfig,
    MegatronFSDPManager,
    clip_grad_norm_,
    create_device_mesh,
    defer_grad_sync,
)

ALL_STRATEGIES = (0, 1, 2, 3)


def run_on_ranks(function: Any, world_size: int) -> list[Any]:
    def run() -> Any:
        with cuda_on_cpu():
            return function()

    return run_ranks(run, world_size)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as recipes have them."""
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)


def parallelize(model: nn.Module, optimizer: Any = None, sizes: dict[str, int] | None = None, **flags: Any) -> Any:
    config = MegatronFSDPConfig(**flags)
    mesh = create_device_mesh(config, device_type="cpu", **(sizes or {}))
    return MegatronFSDPManager(config, mesh).parallelize(model, optimizer)


def causal_lm_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


@pytest.mark.parametrize("make", [PlainTransformer, lambda: make_causal_lm(LLAMA).train()], ids=["tensors", "a dict"])
def test_ranks_train_like_one_process_with_accumulation_and_clipping(make: Any) -> None:
    """Whatever the model returns: hooks of the package look for tensors in it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        return plain_loss(model, {"input_ids": ids})[0] if make is PlainTransformer else model(ids, labels=ids).loss

    def run() -> None:
        rank = dist.get_rank()
        for zero_dp_strategy in ALL_STRATEGIES:
            torch.manual_seed(0)
            reference = make()
            torch.manual_seed(rank)
            plain = copy.deepcopy(reference) if rank == 0 else make()
            model, optimizer = parallelize(plain, make_optimizer(plain), zero_dp_strategy=zero_dp_strategy)
            expected_optimizer = make_optimizer(reference)
            for batch in make_token_batches(3, size=4, length=6, ragged=False):
                loss(reference, batch).backward()
                expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                first, second = ({"input_ids": batch["input_ids"][rank + start, None]} for start in (0, 2))
                with defer_grad_sync(model):
                    (loss(model, first) / 2).backward()
                with torch.no_grad():
                    loss(model, first)  # changes nothing
                (loss(model, second) / 2).backward()
                actual = clip_grad_norm_(model.parameters(), 0.1)
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
                gradients = whole({name: p.grad for name, p in plain.named_parameters()})
                assert_equal_gradients(gradients, {name: p.grad for name, p in reference.named_parameters()})
                for each in (optimizer, expected_optimizer):
                    each.step()
                    each.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(loss(model, batch), loss(reference, batch))
            torch.testing.assert_close(
                whole(dict(plain.named_parameters())), dict(reference.named_parameters()), rtol=0, atol=5e-5
            )

    run_on_ranks(run, 2)

"""DDPManager in a plain torch loop."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import LLAMA, PlainTransformer, make_causal_lm, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE
from helpers.ranks import run_ranks
from torch import nn

from lightning_fsdp2 import DDPConfig, DDPManager, FSDP2Config, FSDP2Manager, clip_grad_norm_, create_device_mesh


def parallelize(model: nn.Module, **flags: Any) -> Any:
    config = DDPConfig(**flags)
    return DDPManager(config, create_device_mesh(config, device_type="cpu")).parallelize(model)


@pytest.mark.guarantees("plain-loops")
def test_ranks_train_like_one_process_with_accumulation_and_clipping() -> None:
    def run() -> None:
        torch.manual_seed(0)
        reference = PlainTransformer()
        torch.manual_seed(dist.get_rank())
        plain = copy.deepcopy(reference) if dist.get_rank() == 0 else PlainTransformer()
        model = parallelize(plain)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, eps=EPSILON) for m in (reference, model)]
        for batch in make_token_batches(2, size=4, length=6, ragged=False):
            plain_loss(reference, batch)[0].backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            first, second = ({"input_ids": batch["input_ids"][dist.get_rank() + start, None]} for start in (0, 2))
            with model.no_sync():
                (plain_loss(model, first)[0] / 2).backward()
            (plain_loss(model, second)[0] / 2).backward()
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), expected, rtol=1e-4, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, actual), weight in zip(plain.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual, weight, rtol=0, atol=5e-5, msg=name)

    run_ranks(run, 2)


def test_the_flags_reach_torch() -> None:
    def run() -> None:
        defaults = parallelize(PlainTransformer())
        model = parallelize(
            PlainTransformer(),
            find_unused_parameters=True,
            static_graph=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=2,
            broadcast_buffers=False,
        )
        for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
            assert (getattr(defaults, name), getattr(model, name)) == (False, True), name
        assert model.bucket_bytes_cap == 2 * 2**20
        assert [
            m.forward_sync_buffers if hasattr(m, "forward_sync_buffers") else m.broadcast_buffers
            for m in (defaults, model)
        ] == [True, False]

    run_ranks(run, 1)


def test_a_model_on_the_meta_device_gets_the_same_weights_on_every_rank() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(dist.get_rank())
        with torch.device("meta"):
            model = make_causal_lm(LLAMA)
        return parallelize(model).module.lm_head.weight.detach()

    first, second = run_ranks(run, 2)
    assert first.std() > 0.01
    assert torch.equal(first, second)


def test_what_is_sharded_is_refused() -> None:
    def run() -> None:
        config = FSDP2Config()
        mesh = create_device_mesh(config, device_type="cpu")
        model = FSDP2Manager(config, mesh).parallelize(PlainTransformer())
        with pytest.raises(ValueError, match="modules that `fully_shard` was already applied to"):
            DDPManager(DDPConfig(), mesh).parallelize(model)
        with pytest.raises(ValueError, match=r"has 2 ranks, but only 1 of them are data parallel.*FSDP2Manager"):
            DDPManager(DDPConfig(), create_device_mesh(tp_size=2, device_type="cpu"))

    run_ranks(run, 2)

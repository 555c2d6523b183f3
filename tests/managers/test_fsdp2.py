"""The manager in a plain torch loop: which flags it takes, and that each of them reaches the model."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import LLAMA, PlainTransformer, make_causal_lm, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE, token_sum_loss
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import (
    DDPConfig,
    DDPManager,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    clip_grad_norm_,
    create_device_mesh,
    defer_grad_sync,
)

FLOAT32 = MixedPrecisionPolicy()

MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def parallelize(model: nn.Module, **flags: Any) -> nn.Module:
    """Shard ``model`` over all ranks, computing in float32 unless a flag says otherwise."""
    config = FSDP2Config(**{"mp_policy": FLOAT32, **flags})
    return FSDP2Manager(config, create_device_mesh(config, device_type="cpu")).parallelize(model)


@pytest.mark.guarantees("refused-precisions")
def test_a_policy_for_float16_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"mp_policy\.param_dtype=torch\.float16 is not supported"):
        FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy(torch.float16)), None)


@pytest.mark.guarantees("mesh-of-experts")
def test_a_mesh_of_experts_is_taken_from_elsewhere() -> None:
    def run() -> None:
        config = FSDP2Config(mp_policy=FLOAT32)
        device_mesh = create_device_mesh(config, device_type="cpu")
        torch.manual_seed(0)
        plain = make_causal_lm(MIXTRAL)
        (batch,) = make_token_batches(1, ragged=False)
        for shape, of_experts in (((1, 2), {("ep_shard", "ep")}), ((2, 1), set())):
            moe_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep_shard", "ep"))
            manager = FSDP2Manager(config, device_mesh, moe_mesh=moe_mesh)
            assert manager.moe_mesh is moe_mesh
            model = manager.parallelize(copy.deepcopy(plain))
            found = {parameter.device_mesh.mesh_dim_names for parameter in model.parameters()}
            assert found == {("dp_shard_cp",), *of_experts}
            torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)

    run_ranks(run, 2)


def test_other_managers_refuse_a_mesh_with_experts() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu", ep_size=2)
        with pytest.raises(ValueError, match="ep_size=2: DDP has no expert parallelism"):
            DDPManager(DDPConfig(), mesh)
        message = "ep_size=2: Megatron-FSDP has no expert parallelism"
        with cuda_on_cpu(), pytest.raises(ValueError, match=message):
            MegatronFSDPManager(MegatronFSDPConfig(), mesh).parallelize(make_causal_lm(MIXTRAL))

    run_ranks(run, 2)


@pytest.mark.guarantees("mesh-of-experts")
def test_a_mesh_of_experts_that_contradicts_the_other_is_refused() -> None:
    def run() -> None:
        config = FSDP2Config(mp_policy=FLOAT32)
        device_mesh = create_device_mesh(config, device_type="cpu", ep_size=2)
        for shape, names, message in (
            ((2,), ("ep",), r"has the axes \('ep',\); it needs the axes 'ep' and 'ep_shard'"),
            ((2,), ("experts",), r"has the axes \('experts',\); it needs"),
            ((2, 1), ("ep_shard", "ep"), "has 1 expert parallel ranks, but device_mesh was built with ep_size=2"),
        ):
            moe_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            with pytest.raises(ValueError, match=message):
                FSDP2Manager(config, device_mesh, moe_mesh=moe_mesh)
        of_one = DeviceMesh("cpu", [[0]], mesh_dim_names=("ep_shard", "ep"))
        with pytest.raises(ValueError, match="have different ranks; build both from the same ranks"):
            FSDP2Manager(config, device_mesh, moe_mesh=of_one)

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("given", "in_effect"),
    [
        (None, MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)),
        (MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)),
        (
            MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32, cast_forward_inputs=False),
            MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32, cast_forward_inputs=False),
        ),
    ],
    ids=["default", "no-reduce-dtype", "nothing-set", "all-set"],
)
def test_the_policy_in_effect_reduces_in_float32_unless_it_says_otherwise(
    given: MixedPrecisionPolicy | None, in_effect: MixedPrecisionPolicy
) -> None:
    assert FSDP2Manager(FSDP2Config(mp_policy=given), None).mp_policy == in_effect


@pytest.mark.guarantees("mp-policy")
def test_the_policy_of_the_config_decides_on_the_dtypes() -> None:
    def run() -> None:
        tokens = make_token_batches(1)[0]["input_ids"]
        for policy, compute, output in (
            (None, torch.bfloat16, torch.float32),
            (FLOAT32, torch.float32, torch.float32),
            (MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16, torch.bfloat16),
        ):
            model = parallelize(PlainTransformer(), mp_policy=policy)
            seen = []
            model.blocks[1].mlp.register_forward_hook(lambda module, inputs, result, seen=seen: seen.append(result))
            assert model(tokens).dtype is output
            assert seen[0].dtype is compute

    run_ranks(run, 1)


def test_the_log_says_in_which_dtypes_a_loop_computes(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        caplog.set_level("INFO")
        parallelize(PlainTransformer(), mp_policy=None)
        lines = [
            line for line in caplog.messages if line.startswith("FSDP2Manager: mesh dp_replicate 1 x dp_shard 2 x ")
        ]
        assert len(lines) == (dist.get_rank() == 0)
        assert all(
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32" in line for line in lines
        )

    run_ranks(run, 2)


RESHARDS: dict[bool | None, tuple[list[bool], int]] = {
    None: ([False, False, True], 2),
    True: ([False, False, False], 4),
    False: ([True, True, True], 0),
}
"""Which of three layers are gathered after forward, and how many units backward gathers, ``[norm, head]`` included."""


def test_reshard_after_forward_decides_which_layers_stay_gathered() -> None:
    def run() -> None:
        for value, (gathered, all_gathers) in RESHARDS.items():
            model = parallelize(make_causal_lm(LLAMA), reshard_after_forward=value)
            loss, _ = token_sum_loss(model, make_token_batches(1)[0])
            parameters = [next(layer.parameters()) for layer in model.model.layers]
            assert [not isinstance(parameter, DTensor) for parameter in parameters] == gathered, value
            with StepCounter() as backward:
                loss.backward()
            assert backward.collectives["all_gather"] == all_gathers, value

    run_ranks(run, 2)


PREFETCHES: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "default": ({}, [3, 4, 5], [2, 2, 2]),
    "off": ({"enable_fsdp2_prefetch": False}, [2, 3, 4], [1, 2, 2]),
    "depth-0": ({"fsdp2_forward_prefetch_depth": 0, "fsdp2_backward_prefetch_depth": 0}, [2, 3, 4], [1, 2, 2]),
    "2-and-1": ({"fsdp2_forward_prefetch_depth": 2, "fsdp2_backward_prefetch_depth": 1}, [4, 5, 5], [1, 2, 2]),
    "reshard": ({"reshard_after_forward": True}, [3, 4, 5], [4, 4, 4]),
}
"""Flags; then how many all-gathers were issued when each layer runs, in the order of forward and of backward.

The units in forward are the embedding, three layers and ``[norm, head]``.
"""


def test_prefetch_depths_decide_how_far_ahead_units_are_gathered() -> None:
    def run() -> None:
        for name, (flags, forward, backward) in PREFETCHES.items():
            model = parallelize(make_causal_lm(LLAMA), **flags)
            counts: list[int] = []

            def record(*_: Any, counts: list[int] = counts) -> None:
                counts.append(counter.collectives["all_gather"])

            for layer in model.model.layers:
                layer.mlp.register_forward_pre_hook(record)
                layer.mlp.register_full_backward_hook(record)
            for _ in range(2):
                with StepCounter() as counter:
                    loss, _ = token_sum_loss(model, make_token_batches(1)[0])
                with StepCounter() as counter:
                    loss.backward()
            assert counts == [*forward, *backward] * 2, name

    run_ranks(run, 2)


@pytest.mark.guarantees("plain-loops")
@pytest.mark.slow
def test_replicas_of_shards_train_like_one_process_with_accumulation_and_clipping() -> None:
    def run() -> None:
        torch.manual_seed(0)
        reference = PlainTransformer()
        model = copy.deepcopy(reference)
        config = FSDP2Config(mp_policy=FLOAT32)
        mesh = create_device_mesh(config, dp_replicate_size=2, device_type="cpu")
        assert FSDP2Manager(config, mesh).parallelize(model) is model
        make_optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, fused=True)
        optimizers = [make_optimizer(each.parameters()) for each in (reference, model)]
        for batch in make_token_batches(2, size=8, length=6, ragged=False):
            plain_loss(reference, batch)[0].backward()
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            first, second = ({"input_ids": batch["input_ids"][dist.get_rank() + start, None]} for start in (0, 4))
            with defer_grad_sync(model):
                (plain_loss(model, first)[0] / 2).backward()
            (plain_loss(model, second)[0] / 2).backward()
            norm = clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, actual), weight in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual.full_tensor(), weight.data, rtol=0, atol=5e-5, msg=name)

    run_ranks(run, 4)


def test_an_offload_policy_changes_nothing_where_shards_are_in_host_memory_anyway() -> None:
    def run() -> None:
        reference = PlainTransformer()
        model = parallelize(copy.deepcopy(reference), offload_policy=True)
        for each in (reference, model):
            plain_loss(each, make_token_batches(1)[0])[0].backward()
        for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-7)

    run_ranks(run, 1)

"""Replicas of shards (HSDP): one per node if asked, equal to the last bit, and with the numbers of one process."""

import dataclasses
import os
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.cases import make_case
from helpers.collectives import StepCounter
from helpers.flags import UNITS
from helpers.mesh_runs import check_parity
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.ranks import run_ranks
from helpers.user_modules import (
    Regressor,
    ThrowsAway,
    assert_same_weights,
    make_batches,
    make_loader,
    make_trainer,
    train_alone,
)
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import (
    CausalLM,
    FSDP2Config,
    FSDP2Manager,
    FSDP2Strategy,
    create_device_mesh,
    defer_grad_sync,
)
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.sizes import DP_REPLICATE

ACCUMULATE, STEPS = 3, 2


class Batches(pl.LightningDataModule):
    """Each data parallel rank, and so each replica, has its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        strategy: Any = self.trainer.strategy
        batches = make_token_batches(ACCUMULATE * STEPS * strategy.data_parallel_size)
        return DataLoader(batches[strategy.data_parallel_rank :: strategy.data_parallel_size], batch_size=None)


def train(sizes: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """Ranks begin with random states of their own, and the model without weights."""
    torch.manual_seed(100 + dist.get_rank())
    module = CausalLM(config={**LLAMA, "tie_word_embeddings": True})
    trainer = make_trainer(
        FSDP2Strategy(**sizes, config=FSDP2Config(**flags)),
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.1,
        log_every_n_steps=1,
    )
    trainer.fit(module, Batches())
    (optimizer,) = trainer.optimizers
    shards = {}
    for name, parameter in module.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state[parameter]}.items():
            shards[f"{name}: {key}"] = to_local(value)
    replicas = get_mesh(trainer.strategy.full_device_mesh, DP_REPLICATE).mesh.tolist()
    return {"replicas": replicas, "shards": shards, "norm": trainer.callback_metrics["train/gradient_norm"].item()}


def to_local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.guarantees("replicas-average-once")
@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        pytest.param({}, {}, id="hsdp2x2", marks=pytest.mark.slow),
        pytest.param({"cp_size": 2}, {}, id="hsdp2xcp2", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, {}, id="hsdp2xtp2", marks=pytest.mark.slow),
        pytest.param({}, {"defer_fsdp_grad_sync": False}, id="hsdp2x2-not-deferred", marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_equal_to_the_last_bit(sizes: dict[str, Any], flags: dict[str, Any]) -> None:
    ranks = run_ranks(lambda: train({"dp_replicate_size": 2, **sizes}, **flags), 4)
    assert all(rank["norm"] > 0.1 for rank in ranks), "nothing was clipped"
    assert {tuple(rank["replicas"]) for rank in ranks} == {(0, 2), (1, 3)}
    for first, second in ((0, 2), (1, 3)):
        shards, others = ranks[first]["shards"], ranks[second]["shards"]
        assert len(shards) == len(others) > 3 * 20
        assert [name for name, shard in shards.items() if not torch.equal(shard, others[name])] == []
    shards, others = ranks[0]["shards"], ranks[1]["shards"]
    assert not any(
        torch.equal(shard, others[name]) for name, shard in shards.items() if "mlp" in name and "exp" in name
    )


@pytest.mark.guarantees("deferred-reduction", "replicas-average-once")
@pytest.mark.parametrize(
    ("sizes", "defers"),
    [
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (({"cp_size": 2}, True), ({"cp_size": 2}, False), ({"tp_size": 2}, True))
        ),
        pytest.param({"tp_size": 2}, False, marks=pytest.mark.release),
    ],
    ids=str,
)
def test_gradients_are_reduced_over_replicas_once_per_step(sizes: dict[str, int], defers: bool) -> None:
    def count(replicas: int) -> Counter[str]:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), context_parallel_method="allgather")
        mesh = create_device_mesh(config, dp_replicate_size=replicas, **sizes)
        model = FSDP2Manager(config, mesh).parallelize(make_causal_lm(LLAMA))
        with StepCounter() as counter:
            for batch in make_token_batches(ACCUMULATE - 1, ragged=False):
                with defer_grad_sync(model, reduce_scatter=not defers):
                    model(**batch).loss.backward()
            model(**batch).loss.backward()
        return counter.collectives

    expected, actual = run_ranks(count, 2, 1)[0], run_ranks(count, 4, 2)[0]
    if "cp_size" in sizes:  # shards over more than one rank
        assert expected["reduce_scatter"] >= UNITS * (1 if defers else ACCUMULATE)
    assert actual - expected == {"all_reduce": UNITS}
    assert expected - actual == {}


@pytest.mark.parametrize("defers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_zero_grad_drops_what_was_not_yet_reduced_over_replicas(defers: bool) -> None:
    batches = make_batches(6 * 4)

    def run() -> None:
        module, expected = ThrowsAway(), ThrowsAway()
        strategy = FSDP2Strategy(dp_replicate_size=2, config=FSDP2Config(defer_fsdp_grad_sync=defers))
        make_trainer(strategy).fit(module, make_loader(batches))
        train_alone(expected, [*batches[4:12], *batches[16:]], window=8)
        assert_same_weights(module, expected)

    run_ranks(run, 4)


@pytest.mark.guarantees("replica-per-node")
def test_auto_makes_a_replica_per_node() -> None:
    def run() -> tuple[Any, ...]:
        rank = dist.get_rank()
        os.environ.update(  # what torchrun says on two nodes
            LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2), GROUP_WORLD_SIZE="2"
        )
        strategy = FSDP2Strategy(dp_replicate_size="auto")
        trainer = make_trainer(strategy, devices=2, num_nodes=2, limit_train_batches=0, max_epochs=1)
        trainer.fit(Regressor(), Batches())
        return strategy.full_device_mesh.shape, get_mesh(strategy.full_device_mesh, DP_REPLICATE).mesh.tolist()

    assert run_ranks(run, 4) == [((2, 2, 1, 1), replicas) for replicas in ([0, 2], [1, 3], [0, 2], [1, 3])]


@pytest.mark.guarantees("float32-losses", "float32-gradients", "several-families")
@pytest.mark.parametrize(
    "sequence_parallel", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.release)]
)
def test_replicas_of_context_and_tensor_parallel_shards_have_the_numbers_of_one_process(
    sequence_parallel: bool,
) -> None:
    def run() -> None:
        config = FSDP2Config(sequence_parallel=sequence_parallel)
        strategy = {"dp_replicate_size": 2, "cp_size": 2, "tp_size": 2, "config": config}
        case = make_case("llama", accumulate=ACCUMULATE, clip=0.1, tied=False, meta=True, strategy=strategy)
        check_parity(dataclasses.replace(case, batches=make_token_batches(len(case.batches), length=16)))

    run_ranks(run, 8)

"""What a plan varies is found by comparing settings, and told in the words of the YAML."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.planning import make_batch, make_module, make_trainer
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_fsdp2 import DDPConfig, DDPStrategy, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.config import DistributedConfig
from lightning_fsdp2.plan.knobs import Knobs, apply_knobs, build_config, describe_differences, merge, read_knobs
from lightning_fsdp2.plan.remedies import _combine, _list_remedies


def read(config: DistributedConfig) -> Knobs:
    strategy = FSDP2Strategy(config=config) if isinstance(config, FSDP2Config) else DDPStrategy(config)
    return read_knobs(make_trainer(strategy), make_module(), make_batch(), world_size=4, num_nodes=1, accumulation=1)


def build(before: Knobs, after: Knobs) -> dict[str, Any]:
    return build_config(before, after, strategy="fsdp2", names_batch_size=True, has_global_batch=False)


def test_differences_are_named_as_in_the_yaml() -> None:
    before = read(FSDP2Config())
    after = replace(before, dp=2, tp=2, accumulation=2, loss="chunked").with_flags(sequence_parallel=True)
    assert describe_differences(before, after) == (
        "tp_size=2, sequence_parallel=True, loss='chunked', accumulate_grad_batches=2"
    )
    init_args = {"dp_size": "auto", "tp_size": 2, "config": {"sequence_parallel": True}}
    assert build(before, after) == {
        "trainer": {"strategy": {"class_path": "fsdp2", "init_args": init_args}, "accumulate_grad_batches": 2},
        "model": {"init_args": {"loss": "chunked"}},
    }


def test_offloading_is_told_as_true() -> None:
    before = read(FSDP2Config())
    after = before.with_flags(offload_policy=True)
    assert describe_differences(before, after) == "offload_policy=True"
    assert build(before, after)["trainer"]["strategy"]["init_args"] == {"config": {"offload_policy": True}}


@pytest.mark.parametrize("config", [FSDP2Config, DDPConfig])
def test_true_and_full_are_no_difference(config: Any) -> None:
    before = read(config(activation_checkpointing=True))
    assert before.with_flags(activation_checkpointing="full") == before


def test_changes_are_combined_unless_they_conflict() -> None:
    before = replace(read(FSDP2Config()), accumulation=4)
    reduced = before.with_flags(defer_fsdp_grad_sync=False)
    split = replace(before, dp=2, tp=2, accumulation=8).with_flags(sequence_parallel=True)
    both = replace(split, config=replace(split.config, defer_fsdp_grad_sync=False))
    assert merge(before, reduced, split) == merge(before, split, reduced) == both
    assert both.samples == before.samples
    assert merge(before, split, replace(before, dp=2, cp=2, accumulation=8)) is None  # both double the accumulation
    offloaded, nccl = before.with_flags(offload_policy=True), before.with_flags(backend="nccl")
    assert merge(before, offloaded, nccl) is None  # refused by the config
    assert _combine(before, [split, replace(before, dp=2, cp=2, accumulation=8), reduced]) == [both]


def test_changes_of_several_parallel_sizes_keep_the_ranks_and_the_samples() -> None:
    before = read(FSDP2Config())
    split = replace(before, dp=2, tp=2, accumulation=2)
    staged = replace(before, dp=2, pp=2).divide(2, rows=before.batch_size)
    both = merge(before, split, staged)
    assert both is not None
    assert (both.dp, both.tp, both.pp) == (1, 2, 2)
    assert both.samples == before.samples


def test_reducing_each_micro_batch_is_a_remedy_where_there_are_several() -> None:
    knobs = read(FSDP2Config())
    for accumulation, is_remedy in ((1, False), (4, True)):
        several = replace(knobs, accumulation=accumulation)
        names = [describe_differences(several, remedy) for remedy in _list_remedies(several, per_node=8)]
        assert ("defer_fsdp_grad_sync=False" in names) is is_remedy


def test_flags_are_applied_and_the_users_own_policy_stays() -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    trainer = make_trainer(FSDP2Strategy(config=FSDP2Config(offload_policy=policy)))
    knobs = read(trainer.strategy.config).with_flags(loss_parallel=True)
    apply_knobs(knobs, trainer, make_module(), make_batch())
    assert trainer.strategy.config.offload_policy is policy
    assert trainer.strategy.config.loss_parallel


@pytest.mark.parametrize(
    ("config", "offloads"),
    [
        (FSDP2Config(), True),
        (FSDP2Config(offload_policy=CPUOffloadPolicy(pin_memory=False)), False),
        (FSDP2Config(backend="nccl"), False),
        (DDPConfig(), False),
    ],
    ids=["fsdp2", "offloaded", "nccl", "ddp"],
)
def test_offloading_is_a_remedy_where_the_config_allows_it(config: Any, offloads: bool) -> None:
    knobs = read(config)
    names = [describe_differences(knobs, remedy) for remedy in _list_remedies(knobs, per_node=8)]
    assert ("offload_policy=True" in names) is offloads

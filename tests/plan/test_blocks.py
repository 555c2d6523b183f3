"""A few layers tell of many, to the byte."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.planning import LLAMA, make_batch, make_trainer
from helpers.ranks import run_ranks

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.plan.blocks import FEW, MORE, Repetition, extrapolate, get_optional_repetition, shorten
from lightning_fsdp2.plan.blocks import summarize as summarize_recording
from lightning_fsdp2.plan.devices import DEVICES
from lightning_fsdp2.plan.result import build_rank_plan
from lightning_fsdp2.plan.roofline import get_step_time
from lightning_fsdp2.plan.simulate import Simulation, simulate

LAYERS = 7


def simulate_few(repetitions: int | None, config: FSDP2Config, **options: Any) -> Simulation:
    module = CausalLM(config={**LLAMA, "num_hidden_layers": LAYERS}, optimizer=partial(torch.optim.AdamW, foreach=True))

    def change(model: torch.nn.Module) -> None:
        if repetitions is not None:
            repetition = get_optional_repetition(model)
            assert repetition == Repetition(0, 1, LAYERS)
            shorten(model, repetition, repetitions)

    def run() -> Simulation:
        strategy = FSDP2Strategy(config=config, **options)
        return simulate(make_trainer(strategy), module, make_batch(), world_size=4, change=change)

    return run_ranks(run, 1, group=False)[0]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (FSDP2Config(), {}),
        pytest.param(FSDP2Config(activation_checkpointing="full"), {}, marks=pytest.mark.slow),
        pytest.param(FSDP2Config(sequence_parallel=True), {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(FSDP2Config(), {"cp_size": 2, "dp_replicate_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_few_layers_tell_of_many(config: FSDP2Config, options: dict[str, Any]) -> None:
    few, more = (summarize_recording(simulate_few(count, config, **options).recording) for count in (FEW, MORE))
    told = extrapolate(few, more, LAYERS)
    whole = build_rank_plan(0, simulate_few(None, config, **options).recording, DEVICES["h100"], overlapped_axes=())
    assert told.peak_bytes == whole.peak_bytes
    assert sum(operation.flops * operation.times for operation in told.operations) == whole.flops
    calls = [(o.collective.bytes * o.times, o.times) for o in told.operations if o.collective is not None]
    assert sum(size for size, _ in calls) == sum(entry.bytes for entry in whole.traffic)
    time = get_step_time(told.operations, DEVICES["h100"], overlapped_axes=())
    assert (time.shortest, time.longest) == pytest.approx((whole.time.shortest, whole.time.longest))


class Block(torch.nn.Module):
    def __init__(self, size: int, window: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(size, size)
        self.window = window


def make_blocks(*kinds: tuple[int, int]) -> torch.nn.Module:
    module = torch.nn.Module()
    module.blocks = torch.nn.ModuleList([Block(*kind) for kind in kinds])
    return module


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([(2, 0)] * 6, Repetition(0, 1, 6)),
        ([(3, 0)] + [(2, 0)] * 6, Repetition(1, 1, 6)),  # a first block of its own, as some mixtures of experts have
        ([(2, 0), (2, 8)] * 4, Repetition(0, 2, 4)),  # windows that take turns
        ([(2, 0)] * 3, None),  # as many as would be simulated
        ([(size, 0) for size in range(1, 9)], None),
    ],
)
def test_what_repeats_is_found(kinds: list[tuple[int, int]], expected: Repetition | None) -> None:
    assert get_optional_repetition(make_blocks(*kinds)) == expected


def test_several_lists_of_blocks_do_not_tell_of_each_other() -> None:
    both = torch.nn.ModuleDict({"vision": make_blocks(*[(2, 0)] * 6), "text": make_blocks(*[(2, 0)] * 8)})
    assert get_optional_repetition(both) is None

"""A few layers tell of many, to the byte."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.planning import LENGTH, LLAMA, VOCABULARY, make_batch, make_trainer
from helpers.ranks import run_ranks

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.plan.simulation.blocks import (
    Repetition,
    Summary,
    extrapolate,
    get_few,
    get_optional_repetition,
    shorten,
    summarize,
)
from lightning_fsdp2.plan.simulation.step import simulate
from lightning_fsdp2.plan.timing.devices import DEVICES
from lightning_fsdp2.plan.timing.roofline import get_step_time

LAYERS, FEW = 7, 4


def simulate_layers(
    layers: int,
    repetitions: int | None,
    config: FSDP2Config,
    *,
    length: int = LENGTH,
    vocabulary: int = VOCABULARY,
    **options: Any,
) -> Summary:
    optimizer = partial(torch.optim.AdamW, fused=True)
    architecture = {**LLAMA, "num_hidden_layers": layers, "vocab_size": vocabulary}
    module = CausalLM(config=architecture, optimizer=optimizer)
    names: list[list[str]] = []

    def change(model: torch.nn.Module) -> None:
        if repetitions is not None:
            repetition = get_optional_repetition(model, get_few(config))
            assert repetition == Repetition(0, 1, layers)
            names.extend(shorten(model, repetition, repetitions))

    trainer = make_trainer(FSDP2Strategy(config=config, **options))
    simulation = simulate(trainer, module, make_batch(length=length), world_size=4, change=change)
    return summarize(simulation.recording, names)


def get_peaks(summary: Summary) -> dict[str, int]:
    return {
        phase: max(peak for part, peak in summary.peaks.items() if part.startswith(phase))
        for phase in ("forward", "backward", "optimizer")
    }


@pytest.mark.parametrize(
    "blocks",
    [
        torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(LAYERS)),
        torch.nn.ModuleDict({f"layer {number}": torch.nn.Linear(2, 2) for number in range(LAYERS)}),
    ],
)
def test_all_but_a_few_are_left_out(blocks: Any) -> None:
    module = torch.nn.ModuleDict({"blocks": blocks, "head": torch.nn.Linear(2, 2)})
    few = [*blocks.children()][:FEW]
    names = shorten(module, Repetition(0, 1, LAYERS), FEW)
    assert [*blocks.children()] == few
    assert [module.get_submodule(name) for (name,) in names] == few


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "config", "options"),
    [
        (LAYERS, FSDP2Config(), {}),
        (LAYERS, FSDP2Config(sequence_parallel=True), {"tp_size": 2}),
        (LAYERS, FSDP2Config(), {"cp_size": 2, "dp_replicate_size": 2}),
        (16, FSDP2Config(fsdp2_backward_prefetch_depth=4), {"length": 24}),
        # backward needs most at its begin with few layers, for the logits, and at its end with many, for the gradients
        (20, FSDP2Config(activation_checkpointing="full"), {"length": 24, "vocabulary": 1024}),
    ],
)
def test_a_few_layers_tell_of_many(layers: int, config: FSDP2Config, options: dict[str, Any]) -> None:
    few = get_few(config)

    def run() -> list[Summary]:
        return [simulate_layers(layers, count, config, **options) for count in (few, few + 1, None)]

    [(shorter, longer, whole)] = run_ranks(run, 1, group=False)
    told = extrapolate(shorter, longer, layers - few)
    assert shorter.peak_bytes < longer.peak_bytes < whole.peak_bytes
    assert get_peaks(told) == get_peaks(whole)
    for count in (count_flops, count_bytes, count_collectives):
        assert count(told) == count(whole)
    times = [get_step_time(summary.operations, DEVICES["h100"], overlapped_axes=()) for summary in (told, whole)]
    assert times[0].longest == pytest.approx(times[1].longest)
    assert times[0].shortest == pytest.approx(times[1].shortest)


def count_flops(summary: Summary) -> int:
    return sum(operation.flops * operation.times for operation in summary.operations)


def count_bytes(summary: Summary) -> int:
    return sum(operation.bytes * operation.times for operation in summary.operations)


def count_collectives(summary: Summary) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by kind and axis."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for operation in summary.operations:
        if (call := operation.collective) is not None:
            calls, size = counts.get((call.kind, call.axis), (0, 0))
            counts[call.kind, call.axis] = calls + operation.times, size + call.bytes * operation.times
    return counts


class Block(torch.nn.Module):
    def __init__(self, size: int, window: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(size, size)
        self.window = window

    def forward(self) -> None: ...


def make_blocks(*kinds: tuple[int, int]) -> torch.nn.Module:
    module = torch.nn.Module()
    module.blocks = torch.nn.ModuleList([Block(*kind) for kind in kinds])
    return module


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([(2, 0)] * 6, Repetition(0, 1, 6)),
        ([(3, 0)] + [(2, 0)] * 6, Repetition(1, 1, 6)),  # a first block of its own, as some mixtures of experts have
        ([(2, 0), (2, 8)] * 6, Repetition(0, 2, 6)),  # windows that take turns
        ([(2, 0)] * (FEW + 1), None),  # as many as would be simulated
        ([(size, 0) for size in range(1, 9)], None),
    ],
)
def test_what_repeats_is_found(kinds: list[tuple[int, int]], expected: Repetition | None) -> None:
    assert get_optional_repetition(make_blocks(*kinds), FEW) == expected


def test_several_lists_of_blocks_do_not_tell_of_each_other() -> None:
    both = torch.nn.ModuleDict({"vision": make_blocks(*[(2, 0)] * 6), "text": make_blocks(*[(2, 0)] * 8)})
    assert get_optional_repetition(both, FEW) is None

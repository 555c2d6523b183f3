"""Suggested changes for a run that does not fit into memory. Each change is tried before it is suggested."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.plan.knobs import Knobs, describe_differences, merge
from lightning_fsdp2.plan.rank import Run
from lightning_fsdp2.plan.result import Change, Plan
from lightning_fsdp2.plan.search import Candidate, simulate_all, weigh
from lightning_fsdp2.plan.simulation.blocks import Summary
from lightning_fsdp2.plan.simulation.workers import add_up_progress

_SUGGESTIONS = 3

_MOST_COMBINED = 4
"""Largest number of changes that are combined."""


def find_changes(
    run: Run,
    knobs: Knobs,
    plan: Plan,
    describe_config: Callable[[Knobs], dict[str, Any]],
    *,
    processes: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[Change]:
    """Try the changes that might reduce memory, and return those that help most.

    As in a search, each change is simulated with a few of the model's layers. If no single change makes the run fit,
    those that save the most are combined, and other layouts and offloading only after all others. Changes that make the
    run fit are returned in the order of their step times. If there are none, those that need the least memory are
    returned. A ``KeyboardInterrupt`` ends the work early, and what was found so far is returned.
    """
    remedies = [other for other in _list_remedies(knobs, per_node=run.device.per_node) if other != knobs]
    tried: list[Candidate] = []
    options: dict[str, Any] = {"processes": processes, "on_progress": add_up_progress(on_progress)}

    def try_all(remedies: list[Knobs]) -> None:
        for remedy, result in simulate_all(run, remedies, end=math.inf, cache=None, **options):
            if (
                isinstance(result, Summary | list)
                and (found := weigh(run, remedy, result)).peak_bytes < plan.peak_bytes
            ):
                tried.append(found)

    with suppress(KeyboardInterrupt):
        try_all(remedies)
        if not any(candidate.verdict == "fits" for candidate in tried):
            tried.sort(key=lambda found: (_costs_much(knobs, found.knobs), found.peak_bytes))
            try_all(_combine(knobs, [found.knobs for found in tried]))
    fitting = sorted((found for found in tried if found.verdict == "fits"), key=lambda found: found.estimate)
    others = sorted((found for found in tried if found.verdict != "fits"), key=lambda found: found.reserved.most)
    return [
        Change(
            name=describe_differences(knobs, found.knobs),
            config=describe_config(found.knobs),
            peak_bytes=found.peak_bytes,
            reserved=found.reserved,
            verdict=found.verdict,
            at_least=found.at_least,
            estimate=found.estimate,
        )
        for found in (fitting or others)[:_SUGGESTIONS]
    ]


def _costs_much(before: Knobs, after: Knobs) -> bool:
    """Return whether a change is one of the layout, or to offloading, which cost more time than other flags."""
    is_offloaded, was_offloaded = (getattr(each.config, "offload_policy", None) is not None for each in (after, before))
    return after.dp != before.dp or is_offloaded != was_offloaded


def _combine(knobs: Knobs, remedies: list[Knobs]) -> list[Knobs]:
    """Combine the first remedy with the second, then with the third, and so on, and leave out those that conflict."""
    combined: list[Knobs] = []
    for remedy in remedies:
        merged = merge(knobs, combined[-1], remedy) if combined else remedy
        combined += [] if merged is None else [merged]
    return combined[1:_MOST_COMBINED]


def _list_remedies(knobs: Knobs, *, per_node: int) -> Iterator[Knobs]:
    """Yield variants of ``knobs`` that leave the training unchanged but may need less memory."""
    for amount in ("selective", "full"):
        yield knobs.with_flags(activation_checkpointing=amount)
    if knobs.loss == "full":
        chunked = replace(knobs, loss="chunked")
        yield chunked.with_flags(loss_parallel=False) if isinstance(knobs.config, FSDP2Config) else chunked
    if isinstance(knobs.config, FSDP2Config) and knobs.accumulation * knobs.micro_batches > 1:
        yield knobs.with_flags(defer_fsdp_grad_sync=False)
    rows = knobs.batch_size // knobs.micro_batches
    if knobs.pp > 1 and rows % 2 == 0:
        yield knobs.with_flags(pp_microbatches=2 * knobs.micro_batches)
    if knobs.pp == 1 and rows % 2 == 0:
        yield replace(knobs, batch_size=knobs.batch_size // 2, accumulation=2 * knobs.accumulation)
    if not isinstance(knobs.config, FSDP2Config):
        return
    if knobs.tp > 1:
        yield knobs.with_flags(sequence_parallel=True)
        if knobs.loss != "chunked":
            yield knobs.with_flags(loss_parallel=True)
    if knobs.dp_replicate > 1:
        yield replace(knobs, dp_replicate=1)
    if knobs.dp % (2 * knobs.dp_replicate) == 0:
        halved = replace(knobs, dp=knobs.dp // 2, accumulation=2 * knobs.accumulation)
        if 2 * knobs.tp <= per_node:
            yield replace(halved, tp=2 * knobs.tp).with_flags(sequence_parallel=True)
        yield replace(halved, cp=2 * knobs.cp)
        number, pp = halved.batch_size * halved.accumulation // rows, 2 * knobs.pp
        if number % pp == 0:
            yield replace(halved, pp=pp).divide(number, rows).with_flags(pp_layers_per_stage=None)
    if knobs.config.offload_policy is None:
        with suppress(ValueError):  # raised by the config if the backend has no collectives for CPU tensors
            yield knobs.with_flags(offload_policy=True)

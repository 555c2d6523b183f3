"""Suggested changes for a run that does not fit into memory. Each change is planned before it is suggested."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.plan.knobs import Knobs, describe_differences, merge
from lightning_fsdp2.plan.layouts import plan_pipeline
from lightning_fsdp2.plan.rank import PlannedRank, Run
from lightning_fsdp2.plan.result import Change, Plan, RankPlan, get_verdict
from lightning_fsdp2.plan.workers import add_up_progress, get_result_or_refusal, run_in_processes

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
    """Plan the changes that might reduce memory, and return those that help most.

    If no single change makes the run fit, those that save the most are combined. Changes that make the run fit come
    first, ordered by step time. Changes that are not enough follow, ordered by memory. A ``KeyboardInterrupt`` ends
    the work early, and what was found so far is returned.
    """
    remedies = [other for other in _list_remedies(knobs, per_node=run.device.per_node) if other != knobs]
    changes: list[tuple[Knobs, Change]] = []
    report = add_up_progress(on_progress)

    def plan_all(remedies: list[Knobs]) -> None:
        tasks = [partial(get_result_or_refusal, partial(run.plan_rank, remedy, 0)) for remedy in remedies]
        for done, (number, planned) in enumerate(run_in_processes(tasks, processes=processes), start=1):
            report(done, len(tasks))
            if isinstance(planned, str):
                continue
            ranks = _plan_ranks(run, remedies[number], planned, processes)
            change = _build_change(run, knobs, remedies[number], ranks, describe_config)
            if change.peak_bytes < plan.peak_bytes:
                changes.append((remedies[number], change))

    with suppress(KeyboardInterrupt):
        plan_all(remedies)
        if not any(change.verdict == "fits" for _, change in changes):
            plan_all(_combine(knobs, [remedy for remedy, _ in sorted(changes, key=lambda pair: pair[1].peak_bytes)]))
    fitting = sorted((c for _, c in changes if c.verdict == "fits"), key=lambda change: change.estimate)
    others = sorted((c for _, c in changes if c.verdict != "fits"), key=lambda change: change.reserved.most)
    return [*fitting, *others][:_SUGGESTIONS]


def _plan_ranks(run: Run, knobs: Knobs, first: PlannedRank, processes: int | None) -> list[RankPlan]:
    """Return the plans of the ranks that show the most, of which the first is already planned."""
    if first.pipeline is None:
        return [first.plan]
    return plan_pipeline(run, knobs, first, first.pipeline, None, load=None, processes=processes)


def _build_change(
    run: Run,
    before: Knobs,
    after: Knobs,
    ranks: list[RankPlan],
    describe_config: Callable[[Knobs], dict[str, Any]],
) -> Change:
    peak = max(rank.peak_bytes for rank in ranks)
    reserved = max((rank.reserved for rank in ranks), key=lambda reserved: reserved.most)
    return Change(
        name=describe_differences(before, after),
        config=describe_config(after),
        peak_bytes=peak,
        reserved=reserved,
        verdict=get_verdict(peak, reserved, run.device),
        at_least=max(rank.time.shortest for rank in ranks),
        estimate=max(rank.reached.longest for rank in ranks),
    )


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

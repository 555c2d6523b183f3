"""Suggested changes for a run that does not fit into memory. Each change is planned before it is suggested."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.plan.knobs import Knobs, describe_differences
from lightning_fsdp2.plan.layouts import plan_pipeline
from lightning_fsdp2.plan.rank import Run
from lightning_fsdp2.plan.result import Change, Plan
from lightning_fsdp2.plan.workers import get_result_or_refusal, run_in_processes

_SUGGESTIONS = 3


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

    Changes that make the run fit come first, ordered by step time. Changes that are not enough follow, ordered by
    memory.
    """
    remedies = [other for other in _list_remedies(knobs, per_node=run.device.per_node) if other != knobs]
    changes, memory = [], run.device.memory
    tasks = [partial(get_result_or_refusal, partial(run.plan_rank, remedy, 0)) for remedy in remedies]
    for done, (number, planned) in enumerate(run_in_processes(tasks, processes=processes), start=1):
        if on_progress is not None:
            on_progress(done, len(tasks))
        if isinstance(planned, str):
            continue
        remedy = remedies[number]
        ranks = [planned.plan]
        if planned.pipeline is not None:
            ranks = plan_pipeline(run, remedy, planned, planned.pipeline, None, load=None, processes=processes)
        peak = max(rank.peak_bytes for rank in ranks)
        if peak >= plan.peak_bytes:
            continue
        changes.append(
            Change(
                name=describe_differences(knobs, remedy),
                config=describe_config(remedy),
                peak_bytes=peak,
                reserved=max((rank.reserved for rank in ranks), key=lambda reserved: reserved.most),
                at_least=max(rank.time.shortest for rank in ranks),
                estimate=max(rank.reached.longest for rank in ranks),
            )
        )
    fitting = sorted((c for c in changes if c.reserved.most <= memory), key=lambda change: change.estimate)
    others = sorted((c for c in changes if c.reserved.most > memory), key=lambda change: change.reserved.most)
    return [*fitting, *others][:_SUGGESTIONS]


def _list_remedies(knobs: Knobs, *, per_node: int) -> Iterator[Knobs]:
    """Yield variants of ``knobs`` that leave the training unchanged but may need less memory."""
    for amount in ("selective", "full"):
        yield knobs.with_flags(activation_checkpointing=amount)
    if knobs.loss == "full":
        chunked = replace(knobs, loss="chunked")
        yield chunked.with_flags(loss_parallel=False) if isinstance(knobs.config, FSDP2Config) else chunked
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

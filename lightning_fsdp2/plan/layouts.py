"""Plans of several ranks of a run, each in a process of its own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from lightning_fsdp2.plan.knobs import Knobs
from lightning_fsdp2.plan.pipeline import Pipeline
from lightning_fsdp2.plan.rank import PlannedRank, Run
from lightning_fsdp2.plan.result import RankPlan, add_waiting
from lightning_fsdp2.plan.simulation.stages import Boundary
from lightning_fsdp2.plan.simulation.workers import run_in_processes


def plan_ranks(
    run: Run,
    knobs: Knobs,
    ranks: Sequence[int],
    *,
    load: int | None,
    processes: int | None,
    boundary: Boundary | None = None,
) -> list[PlannedRank]:
    """Plan ranks of a run.

    Args:
        run: Run to plan.
        knobs: Settings of the run.
        ranks: Ranks to plan.
        load: With expert parallelism, each rank's memory is also planned at this multiple of the tokens of its experts,
            unless it is None.
        processes: Number of simulations that run at once. None for one per CPU.
        boundary: Boundary that the plan of the first pipeline rank has seen. None for the first rank.
    """
    tasks: list[Callable[[], Any]] = [partial(run.plan_rank, knobs, rank, boundary) for rank in ranks]
    if knobs.ep > 1 and load is not None:
        tasks += [partial(run.plan_uneven_memory, knobs, rank, load, boundary) for rank in ranks]
    results = [result for _, result in sorted(run_in_processes(tasks, processes=processes), key=itemgetter(0))]
    planned, uneven = results[: len(ranks)], results[len(ranks) :] or [None] * len(ranks)
    return [replace(rank, plan=replace(rank.plan, uneven=memory)) for rank, memory in zip(planned, uneven, strict=True)]


def plan_pipeline(
    run: Run, knobs: Knobs, first: PlannedRank, pipeline: Pipeline, ranks: Sequence[int] | None, **options: Any
) -> list[RankPlan]:
    """Plan the ranks of a pipeline after its first rank.

    Args:
        run: Run to plan.
        knobs: Settings of the run.
        first: Plan of rank 0.
        pipeline: Pipeline of the run.
        ranks: Ranks to plan. None chooses the first ranks of the pipeline ranks that show the most.
        options: Further arguments of :func:`plan_ranks`.
    """
    ranks_per_stage = run.world_size // pipeline.ranks
    needed = [place * ranks_per_stage for place in pipeline.choose_ranks()]
    others = sorted({*needed, *(ranks or ())} - {0})
    planned = [first, *plan_ranks(run, knobs, others, boundary=first.boundary, **options)]
    plans = add_waiting(
        [rank.plan for rank in planned],
        pipeline,
        ranks_per_stage=ranks_per_stage,
        batches=knobs.accumulation,
    )
    return [plan for plan in plans if plan.rank in (ranks or needed)]

"""Search for the fastest layout of a run. It plans the layouts that rules of thumb allow, and sorts them by step time.

The search simulates only a few of the model's layers (:mod:`~lightning_fsdp2.plan.simulation.blocks`). The best layout
is then planned again with the whole model.
"""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

from lightning_fsdp2.plan.cache import Cache
from lightning_fsdp2.plan.knobs import Knobs
from lightning_fsdp2.plan.pipeline import RankSummary
from lightning_fsdp2.plan.rank import Run, describe_pipeline, get_overlapped_axes
from lightning_fsdp2.plan.result import Verdict, get_verdict
from lightning_fsdp2.plan.simulation.blocks import Summary, extrapolate
from lightning_fsdp2.plan.simulation.recorder import Operation
from lightning_fsdp2.plan.simulation.reserved import Reserved
from lightning_fsdp2.plan.simulation.workers import add_up_progress, get_result_or_refusal, run_in_processes
from lightning_fsdp2.plan.timing.devices import Device
from lightning_fsdp2.plan.timing.roofline import get_seconds, get_step_time

_LARGEST_MICRO_BATCH = 16
_LARGEST_PIPELINE = 16
_RECOMPUTATIONS: tuple[str | bool, ...] = (False, "selective", "full")
_SHORTEST_PART = 1024
"""Smallest number of tokens that a context parallel rank may hold of each sequence."""


Result: TypeAlias = Summary | list[RankSummary] | str | None
"""Summary of a layout, or those of the first and the last rank of its pipeline; or the reason for a refusal; or None if
there was no time to simulate the layout."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Candidate layout, with the memory and the time that a step needs on rank 0."""

    knobs: Knobs
    peak_bytes: int
    reserved: Reserved
    verdict: Verdict
    at_least: float
    """Lower bound of the step time in seconds."""

    estimate: float
    """Estimated step time in seconds, at the rates that kernels reach."""

    reason: str
    """Largest contributions to the estimated time, with their shares: operations, and collectives by mesh axis."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Outcome of trying the layouts of a run."""

    best: list[Candidate]
    """Layouts that fit, the fastest first. If none fits, the layouts that are tight."""

    closest: Candidate | None
    """The layout that needs the least memory, whether or not it fits."""

    tried: int
    too_large: int
    """Number of layouts that do not fit."""

    refused: dict[str, int]
    """Number of layouts that were refused, by reason."""

    left_out: int
    """Number of layouts that were not tried for lack of time."""

    is_interrupted: bool
    """Whether the search was ended by a ``KeyboardInterrupt``."""


def search(
    run: Run,
    knobs: Knobs,
    *,
    sequence_length: int | None,
    seconds: float,
    cache: Cache | None,
    processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Try possible layouts of a run, all with the same number of samples per step.

    Args:
        run: Run to find a layout for.
        knobs: Current settings of the run.
        sequence_length: Number of tokens per sample. None leaves out context parallelism.
        seconds: Time limit in seconds. Simulations that run at the end of this time are stopped.
        cache: Cache of earlier simulations. None for no cache.
        processes: Number of simulations that run at once. None for one per CPU.
        on_progress: Callback that gets the number of finished simulations, and the number of simulations known so far.
    """
    options: dict[str, Any] = {"cache": cache, "processes": processes, "on_progress": add_up_progress(on_progress)}
    simulate = partial(simulate_all, run, end=time.monotonic() + seconds, **options)
    tried: list[Candidate] = []
    refused: Counter[str] = Counter()
    left_out = 0
    layouts = sorted(list_layouts(run, knobs, sequence_length), key=_get_model_parallel_size)
    groups = itertools.groupby(layouts, key=_get_model_parallel_size)
    # first try the run's own layout, and then those with little communication, so that those with the most are left out
    # if time runs out
    outcomes = itertools.chain(
        _try_once(run, knobs, simulate),
        *(_climb(run, [other for other in group if other != knobs], simulate) for _, group in groups),
    )
    is_interrupted = False
    try:
        for outcome in outcomes:
            if isinstance(outcome, Candidate):
                if all(outcome.knobs != other.knobs for other in tried):  # the run's own layout may come again
                    tried.append(outcome)
            elif outcome is None:
                left_out += 1
            else:
                refused[outcome] += 1
    except KeyboardInterrupt:  # keep what was found so far
        is_interrupted = True
    fitting, tight = ([candidate for candidate in tried if candidate.verdict == word] for word in ("fits", "tight"))
    return Search(
        best=sorted(fitting or tight, key=lambda candidate: candidate.estimate),
        closest=min(tried, key=lambda candidate: candidate.peak_bytes, default=None),
        tried=len(tried),
        too_large=len(tried) - len(fitting) - len(tight),
        refused=dict(refused),
        left_out=left_out,
        is_interrupted=is_interrupted,
    )


def _try_once(run: Run, layout: Knobs, simulate: Any) -> Iterator[Candidate | str | None]:
    """Yield the candidate of a layout, or the reason why it was refused, or None if there was no time to try it."""
    for _, result in simulate([layout]):
        yield result if result is None or isinstance(result, str) else weigh(run, layout, result)


def _climb(run: Run, layouts: list[Knobs], simulate: Any) -> Iterator[Candidate | str | None]:
    """Try layouts, and then the layouts that :func:`_get_next` derives from the results.

    Yields:
        For each layout, one value: the candidate, or the reason why the layout was refused, or None if there was no
        time to try it.
    """
    is_start = True
    while layouts:
        following: list[Knobs | None] = []
        for layout, result in simulate(layouts):
            if result is None or isinstance(result, str):
                yield result
                continue
            candidate = weigh(run, layout, result)
            yield candidate
            following.append(_get_next(layout, fits=candidate.verdict == "fits"))
            if is_start:
                num_experts = (result if isinstance(result, Summary) else result[0]).num_experts
                following += _distribute_experts(run, layout, num_experts)
        layouts, is_start = [layout for layout in following if layout is not None], False


def _get_model_parallel_size(layout: Knobs) -> int:
    return layout.tp * layout.cp * layout.pp


def list_layouts(run: Run, knobs: Knobs, sequence_length: int | None) -> Iterator[Knobs]:
    """Yield the layouts to start from, with tensor parallelism only within nodes, and pipelines only across nodes.

    There is one replica of the model, or one per node. These layouts have one sample per micro-batch, no recomputation
    and no expert parallelism. :func:`search` then varies the micro-batch size, the recomputation and, for mixtures,
    expert parallelism.
    """
    tp_sizes = [size for size in _powers_of_two(run.device.per_node) if run.world_size % size == 0]
    cp_sizes = list(_powers_of_two(max(1, (sequence_length or 0) // _SHORTEST_PART)))
    pp_sizes = list(_powers_of_two(min(run.nodes, _LARGEST_PIPELINE)))
    for tp, cp, pp in itertools.product(tp_sizes, cp_sizes, pp_sizes):
        dp, rest = divmod(run.world_size, tp * cp * pp)
        if rest or knobs.samples % dp:
            continue
        nodes = max(1, run.nodes // pp)
        for replicate in sorted({1, nodes} if dp % nodes == 0 and dp > nodes else {1}):
            layout = replace(
                knobs,
                dp=dp,
                pp=pp,
                dp_replicate=replicate,
                tp=tp,
                cp=cp,
                ep=1,
                batch_size=1,
                accumulation=knobs.samples // dp,
            ).with_flags(
                activation_checkpointing=False,
                sequence_parallel=tp > 1,
                loss_parallel=tp > 1 and knobs.loss != "chunked",
                pp_microbatches=None,
                pp_layers_per_stage=None,
            )
            yield from [layout] if pp == 1 else _list_pipelines(layout)


def _list_pipelines(layout: Knobs) -> Iterator[Knobs]:
    """Yield variants of ``layout`` in which one batch runs through a pipeline of one or two stages per rank."""
    if layout.accumulation % layout.pp:
        return  # ranks would wait for more than half of the time, or micro-batches could not be interleaved
    divided = layout.divide(layout.accumulation, rows=1)
    for schedule, stages in (("1f1b", 1), ("interleaved_1f1b", 2)):
        yield divided.with_flags(pp_schedule=schedule, pp_stages_per_rank=stages, pp_layers_per_stage=None)


def _get_next(layout: Knobs, *, fits: bool) -> Knobs | None:
    """Return the layout to try after ``layout``; None if no layout is left to try.

    If the layout fits, the next one has a larger micro-batch, since recomputation would only cost time. If the layout
    does not fit, the next one recomputes more, since a larger micro-batch would not fit either.
    """
    if fits and layout.pp > 1:
        number, rows = layout.micro_batches // 2, 2 * layout.batch_size // layout.micro_batches
        return layout.divide(number, rows) if rows <= _LARGEST_MICRO_BATCH and number % layout.pp == 0 else None
    if fits:
        larger = 2 * layout.batch_size
        if larger > _LARGEST_MICRO_BATCH or layout.accumulation % 2:
            return None
        return replace(layout, batch_size=larger, accumulation=layout.accumulation // 2)
    more = _RECOMPUTATIONS[_RECOMPUTATIONS.index(layout.config.activation_checkpointing) + 1 :]
    return layout.with_flags(activation_checkpointing=more[0]) if more else None


def _distribute_experts(run: Run, layout: Knobs, num_experts: int) -> list[Knobs]:
    """Return variants of ``layout`` with expert parallelism; none for dense models, which have no experts.

    Experts are distributed over as many ranks as possible, once within a node and once within a replica. Sizes between
    these two are left out: compared with the larger one, they gather more weights and send hardly fewer tokens.
    """
    if not num_experts:
        return []
    most = math.gcd(num_experts, run.world_size // layout.pp // layout.dp_replicate)
    return [replace(layout, ep=ep) for ep in sorted({math.gcd(most, run.device.per_node), most} - {1})]


def _powers_of_two(most: int) -> Iterator[int]:
    return itertools.takewhile(lambda size: size <= most, (2**exponent for exponent in itertools.count()))


def simulate_all(
    run: Run,
    layouts: list[Knobs],
    *,
    end: float,
    cache: Cache | None,
    processes: int | None,
    on_progress: Callable[[int, int], None],
) -> Iterator[tuple[Knobs, Result]]:
    """Simulate layouts, and yield each layout with its result."""
    cached = [(layout, cache.get(layout) if cache else None) for layout in layouts]
    yield from ((layout, result) for layout, result in cached if result is not None)
    missing = [layout for layout, result in cached if result is None]
    run_all = partial(_run_all, end=end, processes=processes, on_progress=on_progress)
    whole = [layout for layout in missing if layout.pp == 1]
    pipelines = [layout for layout in missing if layout.pp > 1]
    for layout, result in itertools.chain(_simulate_few(run, whole, run_all), _simulate_ends(run, pipelines, run_all)):
        if cache is not None and result is not None:
            cache.put(layout, result)
        yield layout, result


def _run_all(
    tasks: list[Any], *, end: float, processes: int | None, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[int, Any]]:
    """Run simulations, and yield the number of each with its result, with a refusal, or with None for lack of time."""
    left = dict(enumerate(tasks))
    results = run_in_processes([partial(get_result_or_refusal, task) for task in tasks], processes=processes, end=end)
    for number, result in results:
        del left[number]
        on_progress(len(tasks) - len(left), len(tasks))
        yield number, result
    yield from ((number, None) for number in left)


def _simulate_few(run: Run, layouts: list[Knobs], run_all: Any) -> Iterator[tuple[Knobs, Result]]:
    """Simulate each layout with few layers, and once more with a few more."""
    tasks = [partial(run.summarize, layout, further) for layout in layouts for further in (0, 1)]
    halves: dict[int, Any] = {}
    for number, result in run_all(tasks):
        halves[number] = result
        first = number // 2 * 2
        if first in halves and first + 1 in halves:
            yield layouts[number // 2], _combine(halves.pop(first), halves.pop(first + 1))


def _simulate_ends(run: Run, layouts: list[Knobs], run_all: Any) -> Iterator[tuple[Knobs, Result]]:
    """Simulate the first and then the last rank of each pipeline."""
    firsts: list[tuple[Knobs, RankSummary]] = []
    for number, first in run_all([partial(run.summarize_pipeline_rank, layout, 0, None) for layout in layouts]):
        if isinstance(first, RankSummary):
            firsts.append((layouts[number], first))
        else:
            yield layouts[number], first
    tasks = [
        partial(run.summarize_pipeline_rank, layout, _get_last(run, layout), first.boundary) for layout, first in firsts
    ]
    for number, last in run_all(tasks):
        layout, first = firsts[number]
        yield layout, [first, last] if isinstance(last, RankSummary) else last


def _get_last(run: Run, layout: Knobs) -> int:
    """Return the first rank of the last stage."""
    return run.world_size - run.world_size // layout.pp


def weigh(run: Run, layout: Knobs, result: Summary | list[RankSummary]) -> Candidate:
    """Return the memory and the time of a layout that was simulated."""
    return _weigh(run, layout, result) if isinstance(result, Summary) else _weigh_pipeline(run, layout, result)


def _weigh_pipeline(run: Run, knobs: Knobs, ranks: list[RankSummary]) -> Candidate:
    overlapped = get_overlapped_axes(run.trainer.strategy.config)
    pipeline = describe_pipeline(knobs, ranks[0].layers)
    times = [action.get_time(run.device, overlapped_axes=overlapped) for rank in ranks for action in rank.actions]
    sends = [one for one in ranks[0].rest if one.collective is not None and one.collective.kind == "send"]
    transfer = max((get_seconds(one, run.device, as_reached=True) for one in sends), default=0.0)
    bound, _ = pipeline.compute_waiting({(time.stage, time.is_backward): time.at_least for time in times})
    reached, waiting = pipeline.compute_waiting(
        {(time.stage, time.is_backward): time.estimate for time in times}, transfer=transfer
    )
    rests = [
        [get_step_time(rank.rest, run.device, overlapped_axes=overlapped, as_reached=reach) for rank in ranks]
        for reach in (False, True)
    ]
    fullest = max(ranks, key=lambda rank: rank.reserved.most)
    peak = max(rank.peak_bytes for rank in ranks)
    slowest = ranks[0] if waiting[0] < waiting[-1] else ranks[-1]
    operations = [*slowest.rest, *(one for action in slowest.actions for one in action.operations)]
    return Candidate(
        knobs=knobs,
        peak_bytes=peak,
        reserved=fullest.reserved,
        verdict=get_verdict(peak, fullest.reserved, run.device),
        at_least=bound + max(rest.shortest for rest in rests[0]),
        estimate=reached + max(rest.longest for rest in rests[1]),
        reason=f"waiting {min(waiting) / reached:.0%}, {_explain(operations, run.device)}",
    )


def _combine(few: Any, more: Any) -> Summary | str | None:
    for half in (few, more):
        if half is None or isinstance(half, str):
            return half
    summary, left_out = few
    return extrapolate(summary, more[0], left_out) if left_out else summary


def _weigh(run: Run, knobs: Knobs, summary: Summary) -> Candidate:
    overlapped = get_overlapped_axes(run.trainer.strategy.config)
    bound, reached = (
        get_step_time(summary.operations, run.device, overlapped_axes=overlapped, as_reached=as_reached)
        for as_reached in (False, True)
    )
    return Candidate(
        knobs=knobs,
        peak_bytes=summary.peak_bytes,
        reserved=summary.reserved,
        verdict=get_verdict(summary.peak_bytes, summary.reserved, run.device),
        at_least=bound.shortest,
        estimate=reached.longest,
        reason=_explain(summary.operations, run.device),
    )


def _explain(operations: Iterable[Operation], device: Device) -> str:
    seconds: dict[str, float] = defaultdict(float)
    for operation in operations:
        name = "operations" if operation.collective is None else operation.collective.axis
        seconds[name] += get_seconds(operation, device, as_reached=True) * operation.times
    total = sum(seconds.values()) or 1.0
    largest = sorted(seconds.items(), key=itemgetter(1), reverse=True)
    parts = [f"{name} {share / total:.0%}" for name, share in largest[:3] if share > 0.01 * total]
    return ", ".join(parts)

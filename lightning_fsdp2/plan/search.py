"""Search for the fastest layout of a run. It plans the layouts that rules of thumb allow, and sorts them by step time.

The search simulates only a few of the model's layers (:mod:`~lightning_fsdp2.plan.simulation.blocks`). The best layout
is then planned again with the whole model.
"""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from lightning_fsdp2.plan.cache import Cache
from lightning_fsdp2.plan.knobs import Knobs
from lightning_fsdp2.plan.rank import Run, get_overlapped_axes
from lightning_fsdp2.plan.result import Verdict, get_verdict
from lightning_fsdp2.plan.simulation.blocks import Summary, extrapolate
from lightning_fsdp2.plan.simulation.reserved import Reserved
from lightning_fsdp2.plan.timing.devices import Device
from lightning_fsdp2.plan.timing.roofline import get_seconds, get_step_time
from lightning_fsdp2.plan.workers import get_result_or_refusal, run_in_processes

_LARGEST_MICRO_BATCH = 16
_RECOMPUTATIONS: tuple[str | bool, ...] = (False, "selective", "full")
_SHORTEST_PART = 1024
"""Smallest number of tokens that a context parallel rank may hold of each sequence."""


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
        seconds: Time limit in seconds. After this time, no further simulation starts.
        cache: Cache of earlier simulations. None for no cache.
        processes: Number of simulations that run at once. None for one per CPU.
        on_progress: Callback that gets the number of finished simulations, and the number of simulations known so far.
    """
    options: dict[str, Any] = {"cache": cache, "processes": processes, "on_progress": on_progress}
    simulate = partial(simulate_all, run, end=time.monotonic() + seconds, **options)
    tried: list[Candidate] = []
    refused: Counter[str] = Counter()
    left_out = 0
    layouts = sorted(list_layouts(run, knobs, sequence_length), key=_get_model_parallel_size)
    groups = itertools.groupby(layouts, key=_get_model_parallel_size)
    # first try the layouts with little communication, so that those with the most are left out if time runs out
    outcomes = itertools.chain.from_iterable(_climb(run, [*group], simulate) for _, group in groups)
    is_interrupted = False
    try:
        for outcome in outcomes:
            if isinstance(outcome, Candidate):
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
            if not isinstance(result, Summary):
                yield result
                continue
            candidate = _weigh(run, layout, result)
            yield candidate
            following.append(_get_next(layout, fits=candidate.verdict == "fits"))
            if is_start:
                following += _distribute_experts(run, layout, result.num_experts)
        layouts, is_start = [layout for layout in following if layout is not None], False


def _get_model_parallel_size(layout: Knobs) -> int:
    return layout.tp * layout.cp


def list_layouts(run: Run, knobs: Knobs, sequence_length: int | None) -> Iterator[Knobs]:
    """Yield the layouts to start from, with tensor parallelism only within nodes, and one replica or one per node.

    These layouts have one sample per micro-batch, no recomputation and no expert parallelism. :func:`search` then
    varies the micro-batch size, the recomputation and, for mixtures, expert parallelism.
    """
    tp_sizes = [size for size in _powers_of_two(run.device.per_node) if run.world_size % size == 0]
    cp_sizes = list(_powers_of_two(max(1, (sequence_length or 0) // _SHORTEST_PART)))
    for tp, cp in itertools.product(tp_sizes, cp_sizes):
        dp, rest = divmod(run.world_size, tp * cp)
        if rest or knobs.samples % dp:
            continue
        for replicate in sorted({1, run.nodes} if dp % run.nodes == 0 and dp > run.nodes else {1}):
            layout = replace(
                knobs, dp=dp, dp_replicate=replicate, tp=tp, cp=cp, ep=1, batch_size=1, accumulation=knobs.samples // dp
            )
            yield layout.with_flags(
                activation_checkpointing=False,
                sequence_parallel=tp > 1,
                loss_parallel=tp > 1 and knobs.loss != "chunked",
            )


def _get_next(layout: Knobs, *, fits: bool) -> Knobs | None:
    """Return the layout to try after ``layout``; None if no layout is left to try.

    If the layout fits, the next one has a larger micro-batch, since recomputation would only cost time. If the layout
    does not fit, the next one recomputes more, since a larger micro-batch would not fit either.
    """
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
    most = math.gcd(num_experts, run.world_size // layout.dp_replicate)
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
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[Knobs, Summary | str | None]]:
    """Simulate layouts, and yield each layout with its result.

    The result is a summary, or the reason for a refusal, or None if there was no time to simulate the layout.
    """
    cached = [(layout, cache.get(layout) if cache else None) for layout in layouts]
    yield from ((layout, result) for layout, result in cached if result is not None)
    missing = [layout for layout, result in cached if result is None]
    tasks = [partial(_try, run, layout, further, end) for layout in missing for further in (0, 1)]
    halves: dict[int, Any] = {}
    for done, (number, result) in enumerate(run_in_processes(tasks, processes=processes), start=1):
        if on_progress is not None:
            on_progress(done, len(tasks))
        halves[number] = result
        first = number // 2 * 2
        if first in halves and first + 1 in halves:
            layout, whole = missing[number // 2], _combine(halves.pop(first), halves.pop(first + 1))
            if cache is not None and whole is not None:
                cache.put(layout, whole)
            yield layout, whole


def _try(run: Run, knobs: Knobs, further: int, end: float) -> Any:
    if time.monotonic() > end:
        return None
    return get_result_or_refusal(partial(run.summarize, knobs, further))


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
        reason=_explain(summary, run.device),
    )


def _explain(summary: Summary, device: Device) -> str:
    seconds: dict[str, float] = defaultdict(float)
    for operation in summary.operations:
        name = "operations" if operation.collective is None else operation.collective.axis
        seconds[name] += get_seconds(operation, device, as_reached=True) * operation.times
    total = sum(seconds.values()) or 1.0
    largest = sorted(seconds.items(), key=itemgetter(1), reverse=True)
    parts = [f"{name} {share / total:.0%}" for name, share in largest[:3] if share > 0.01 * total]
    return ", ".join(parts)

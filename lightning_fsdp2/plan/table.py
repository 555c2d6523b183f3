"""Tables that show a :class:`~lightning_fsdp2.plan.Plan`."""

import json
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from lightning_fsdp2.plan.knobs import Knobs
from lightning_fsdp2.plan.pipeline import Pipeline
from lightning_fsdp2.plan.result import Change, Plan, RankPlan, get_verdict
from lightning_fsdp2.plan.search import Candidate, Search
from lightning_fsdp2.plan.sharding_table import (
    TIMES,
    build_table,
    describe_meshes,
    format_bytes,
    format_count,
    open_console,
)
from lightning_fsdp2.plan.simulation.reserved import Reserved


def describe(plan: Plan) -> str:
    """Return the tables that ``lightning-fsdp2 plan`` prints, as text 100 columns wide."""
    with StringIO() as file:
        write_plan(plan, file)
        return file.getvalue()


def write_plan(plan: Plan, file: TextIO) -> None:
    """Write the tables of a plan to ``file``, as wide as the terminal, or 100 columns wide without a terminal."""
    with open_console(file) as console:
        console.print(_build_summary(plan), "")
        console.print(_build_placement_table(plan), "")
        console.print(_build_memory_table(plan), "")
        if plan.ranks[0].traffic:
            console.print(_build_traffic_table(plan.ranks[0]), "")
        console.print(_build_time_summary(plan), "")
        console.print(_build_verdict(plan))
        if plan.uneven is not None:
            verdict = get_verdict(plan.uneven.peak_bytes, plan.uneven.reserved, plan.device)
            console.print(f"at {plan.uneven.load} times the load: {verdict}")
        for note in plan.notes:
            console.print(f"\n{note}")
    if plan.changes:
        write_changes(plan.changes, file)


def write_changes(changes: Sequence[Change], file: TextIO) -> None:
    """Write the changes that would help a run to fit, and the options of the command line that make them."""
    if not changes:
        file.write("\nNone of the changes that were tried saves memory.\n")
        return
    table = build_table("")
    table.add_column("What would help most", overflow="fold")
    for column in ("Allocated", "Held", "Step", "At least"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    for number, change in enumerate(changes, start=1):
        table.add_row(
            f"{number}.",
            change.name,
            format_bytes(change.peak_bytes),
            _format_range(change.reserved),
            _format_seconds(change.estimate),
            _format_seconds(change.at_least),
            change.verdict,
        )
    with open_console(file) as console:
        console.print("", table, "\nAs options:")
        for number, change in enumerate(changes, start=1):
            # the batch size of the user's own data module has a name that only the user knows
            is_missing = "batch_size=" in change.name and "data" not in change.config
            data = ", and the batch size of the data module" if is_missing else ""
            console.print(f"{number}. {' '.join(_list_options(change.config))}{data}", soft_wrap=True)


def _list_options(config: dict[str, Any], prefix: str = "--") -> Iterator[str]:
    """Yield the options of the command line that have the same effect as ``config``."""
    for name, value in config.items():
        if name == "init_args":
            yield from _list_options(value, prefix)
        elif isinstance(value, dict):
            yield from _list_options(value, f"{prefix}{name}.")
        elif name != "class_path":  # it is that of the run
            yield f"{prefix}{name} {value if isinstance(value, str) else json.dumps(value)}"


def write_search(found: Search, file: TextIO, *, limit: int = 10) -> None:
    """Write the best layouts of a search, and count those that do not fit, are not supported or were not tried."""
    with open_console(file) as console:
        if found.best:
            console.print(_build_layout_table(found.best[:limit]), "")
        if any(candidate.knobs.ep > 1 for candidate in found.best[:limit]):
            console.print("Layouts with ep assume that the experts of all ranks get the same number of tokens.\n")
        counts = [f"Layouts: {found.tried} planned, of which {found.too_large} do not fit"]
        counts += [f"{sum(found.refused.values())} refused"] if found.refused else []
        counts += [f"{found.left_out} left out for lack of time"] if found.left_out else []
        counts += ["others left out, interrupted"] if found.is_interrupted else []
        console.print(f"{'; '.join(counts)}.")
        if found.best and found.best[0].verdict == "tight":
            console.print("No layout fits for certain: the best is tight, since its processes may run out of memory.")
        if not found.best and found.closest is not None:
            needed = f"{format_bytes(found.closest.peak_bytes)} allocated, {_format_range(found.closest.reserved)} held"
            is_whole = not found.left_out and not found.is_interrupted
            verdict = (
                "Nothing fits." if is_whole else "None of these fits; more time (--search_seconds) tries the others."
            )
            console.print(f"{verdict} {_describe_layout(found.closest.knobs)} needs the least: {needed}.")
        for reason, count in sorted(found.refused.items(), key=lambda item: -item[1]):
            console.print(f"\n{count}{TIMES}{reason}")


def _build_layout_table(candidates: Sequence[Candidate]) -> Table:
    table = build_table("Layout", "Micro-batches", "Peak", "Held up to", "Step", "At least")
    table.add_column("What takes the time")
    for candidate in candidates:
        knobs = candidate.knobs
        table.add_row(
            _describe_layout(knobs),
            f"{knobs.accumulation * knobs.micro_batches}{TIMES}{knobs.batch_size // knobs.micro_batches}",
            format_bytes(candidate.peak_bytes),
            format_bytes(candidate.reserved.most),
            _format_seconds(candidate.estimate),
            _format_seconds(candidate.at_least),
            candidate.reason,
        )
    return table


def _describe_layout(knobs: Knobs) -> str:
    amount = knobs.config.activation_checkpointing
    sizes = {
        "pp": knobs.pp,
        "replicas": knobs.dp_replicate,
        "shards": knobs.dp // knobs.dp_replicate,
        "cp": knobs.cp,
        "tp": knobs.tp,
    }
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    experts = [f"ep {knobs.ep}"] if knobs.ep > 1 else []
    return ", ".join([TIMES.join(parts) or "1 rank", *experts, f"{amount} AC" if amount else "no AC"])


def _build_summary(plan: Plan) -> Table:
    is_all = plan.trained_parameters == plan.parameters
    trained = "all" if is_all else format_count(plan.trained_parameters)
    nodes = f"{plan.nodes} node{'s' if plan.nodes > 1 else ''}"
    return _build_grid(
        {
            "model": plan.model,
            "parameters": f"{format_count(plan.parameters)}, {trained} trained",
            "strategy": f"{plan.strategy} on {plan.world_size} ranks: {plan.device.name.upper()}, {nodes}",
            **describe_meshes(plan.mesh, plan.expert_mesh),
            "dtypes": ", ".join(f"{role} {dtype}" for role, dtype in plan.precision.items()),
            "micro-batch" if plan.pipeline is None else "batch": ", ".join(
                f"{name} {TIMES.join(map(str, shape))}" for name, shape in plan.batch.shapes.items()
            ),
            "step": _describe_step(plan),
            **({} if plan.pipeline is None else {"pipeline": _describe_pipeline(plan.pipeline)}),
        }
    )


def _describe_pipeline(pipeline: Pipeline) -> str:
    fewest, most = min(pipeline.layers), max(pipeline.layers)
    layers = f"{most} layer{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} layers"
    rows = f"{pipeline.rows} sample{'s' if pipeline.rows > 1 else ''}"
    return (
        f"{pipeline.schedule}, {len(pipeline.layers)} stages of {layers}, {pipeline.micro_batches} micro-batches of"
        f" {rows}: ranks wait for {pipeline.bubble:.1%} of the time if stages are equal"
    )


def _describe_step(plan: Plan) -> str:
    batch = plan.batch
    tokens = "" if batch.tokens is None else f", {batch.tokens:,} tokens"
    kind = "micro-batch" if plan.pipeline is None else "batch"
    batches = f"{batch.accumulation} {kind}es" if batch.accumulation > 1 else f"1 {kind}"
    return f"{batches} on each data parallel rank: {batch.samples:,} samples{tokens}"


def _build_placement_table(plan: Plan) -> Table:
    axes = list(dict.fromkeys(axis for group in plan.placements for axis in group["placement"]))
    whole = "all ranks" if plan.pipeline is None else "its stages"
    table = build_table("Parameters", "Tensors", f"Of {whole}", "Of rank 0")
    for axis in axes:
        table.add_column(axis)
    for group in sorted(plan.placements, key=lambda group: group["bytes"], reverse=True):
        placement = group["placement"]
        table.add_row(
            "sharded" if set(placement.values()) - {"whole"} else "whole",
            str(group["tensors"]),
            format_count(group["parameters"]),
            format_bytes(group["bytes"]),
            *(placement.get(axis, "whole") for axis in axes),
        )
    return table


def _build_memory_table(plan: Plan) -> Table:
    table = build_table("Memory at its peak", *(f"Rank {rank.rank}" for rank in plan.ranks))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.no_wrap = len(plan.ranks) < 3  # the names of the parts in which memory peaks are long
    if plan.pipeline is not None:
        _add_stages(table, plan, plan.pipeline)
    for category in plan.ranks[0].peak:
        if any(rank.peak[category] for rank in plan.ranks):
            table.add_row(category, *(format_bytes(rank.peak[category]) for rank in plan.ranks))
    table.add_section()
    table.add_row("allocated", *(format_bytes(rank.peak_bytes) for rank in plan.ranks), style="bold")
    table.add_row("held", *(_format_range(rank.reserved) for rank in plan.ranks))
    table.add_row("in the", *(rank.peak_at for rank in plan.ranks))
    uneven = [rank.uneven for rank in plan.ranks if rank.uneven is not None]
    if uneven:
        table.add_section()
        name = f"at {uneven[0].load} times the load"
        table.add_row(f"allocated {name}", *(format_bytes(memory.peak_bytes) for memory in uneven), style="bold")
        table.add_row(f"held {name}", *(_format_range(memory.reserved) for memory in uneven))
        table.add_row("in the", *(memory.peak_at for memory in uneven))
    return table


def _add_stages(table: Table, plan: Plan, pipeline: Pipeline) -> None:
    """Add which stages the ranks run, and for how many micro-batches they keep activations."""
    places = [rank.rank // (plan.world_size // pipeline.ranks) for rank in plan.ranks]
    stages = [pipeline.get_stages(place) for place in places]
    table.add_row("stages", *(", ".join(map(str, own)) for own in stages))
    table.add_row("layers", *(str(sum(pipeline.layers[stage] for stage in own)) for own in stages))
    table.add_row("micro-batches in flight", *(str(pipeline.in_flight[place]) for place in places))
    table.add_section()


def _build_traffic_table(rank: RankPlan) -> Table:
    table = build_table(f"Collectives of rank {rank.rank} in a step", "Ranks", "Nodes", "Calls", "Size", "Time")
    table.add_column("")
    for entry in rank.traffic:
        table.add_row(
            f"{entry.kind} over {entry.axis}",
            str(entry.ranks),
            str(entry.nodes),
            str(entry.calls),
            format_bytes(entry.bytes),
            _format_seconds(entry.seconds),
            "can overlap" if entry.overlaps else "cannot overlap",
        )
    return table


def _build_time_summary(plan: Plan) -> Table:
    slowest = max(plan.ranks, key=lambda rank: rank.reached.longest)
    time, flops = slowest.reached, slowest.flops
    rows = {
        "step": f"about {_format_seconds(plan.estimate)}, at least {_format_seconds(plan.at_least)}",
        "": f"operations {_format_seconds(time.compute)} ({flops / 1e12:,.1f} TFLOP), collectives"
        f" {_format_seconds(time.exposed)} exposed and {_format_seconds(time.overlappable)} overlappable",
    }
    if plan.pipeline is not None:
        busiest = min(plan.ranks, key=lambda rank: rank.reached.waiting)
        rows["pipeline"] = f"rank {busiest.rank} waits the least for others, {_format_seconds(busiest.reached.waiting)}"
        rows["pipeline"] += f" or {busiest.reached.waiting / plan.estimate:.0%} of the step"
    if (tokens := plan.batch.tokens) is not None:
        about, most = tokens / plan.estimate, tokens / plan.at_least
        rows["tokens"] = f"about {about:,.0f} per second on all ranks, at most {most:,.0f};"
        rows["tokens"] += f" {about / plan.world_size:,.0f} per rank, at most {most / plan.world_size:,.0f}"
    about_used, most_used = plan.get_utilisation(plan.estimate), plan.get_utilisation(plan.at_least)
    if about_used is not None and most_used is not None:
        rows["MFU"] = f"about {about_used:.0%}, at most {most_used:.0%} of {plan.peak_flops / 1e12:,.0f} TFLOP/s, as"
        rows["MFU"] += " Throughput counts: all of attention, also the causal half that kernels skip"
    return _build_grid(rows)


def _build_verdict(plan: Plan) -> Text:
    memory = plan.device.memory
    of = f"{format_bytes(memory)} of {plan.device.name.upper()}"
    held = f"{_format_range(plan.reserved)} of the {of}"
    if plan.verdict == "fits":
        return Text.assemble(("fits", "bold green"), f": the process holds {held}")
    if plan.verdict == "tight":
        allocated = format_bytes(plan.peak_bytes)
        return Text.assemble(("tight", "bold yellow"), f": {allocated} allocated, but the process may hold {held}")
    missing = format_bytes(plan.peak_bytes - memory)
    allocated = f": {format_bytes(plan.peak_bytes)} allocated of the {of}"
    return Text.assemble((f"does not fit by {missing}", "bold red"), allocated)


def _format_range(reserved: Reserved) -> str:
    return f"{format_bytes(reserved.least)} to {format_bytes(reserved.most)}"


def _build_grid(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def write_json(plan: Plan, path: str) -> None:
    """Write all numbers of a plan to a file, or to stdout if ``path`` is ``"-"``."""
    text = f"{json.dumps(plan.to_dict(), indent=2)}\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)

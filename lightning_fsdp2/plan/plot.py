"""Plot of a :class:`~lightning_fsdp2.plan.Plan`: memory over the step, and traffic by mesh axis."""

import os
from typing import Any

from lightning_fsdp2.plan.result import Plan, RankPlan
from lightning_fsdp2.plan.simulation.recorder import CATEGORIES

_GIB = 2**30

_COLORS = ("#0072B2", "#56B4E9", "#004D73", "#E69F00", "#F0C75E", "#CC79A7", "#009E73", "#D55E00", "#999999")
"""Colors of the categories, distinguishable with red-green color blindness (https://jfly.uni-koeln.de/color/)."""

_PHASES = {"forward": "#ffffff", "backward": "#f2f2f2", "optimizer": "#e3e3e3"}


def draw_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw memory over the step and traffic by mesh axis, for the rank that needs the most memory.

    Args:
        plan: Plan to draw.
        path: File to write, in a format of matplotlib such as ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ImportError: When matplotlib is not installed.
        ValueError: When matplotlib does not write files with this ending.
    """
    check_plot(path)
    figure_class = _import_figure()
    rank = max(plan.ranks, key=lambda rank: rank.peak_bytes)
    figure = figure_class(figsize=(10, 8), layout="constrained")
    mesh = " \N{MULTIPLICATION SIGN} ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1)
    figure.suptitle(f"{plan.model}, {mesh or '1 rank'}: rank {rank.rank}")
    memory, traffic = figure.subplots(2, 1, height_ratios=(3, max(1, len(rank.traffic) / 4)))
    _draw_memory(memory, plan, rank)
    _draw_traffic(traffic, rank)
    figure.savefig(path, dpi=150)


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise the errors that :func:`draw_plan` would raise for ``path``, before time is spent on computing a plan."""
    known = _import_figure()().canvas.get_supported_filetypes()
    if os.path.splitext(path)[1].removeprefix(".") not in known:
        names = ", ".join(f".{name}" for name in sorted(known))
        raise ValueError(f"plot={str(path)!r}: matplotlib writes only {names}; use .png or .svg.")


def _draw_memory(axes: Any, plan: Plan, rank: RankPlan) -> None:
    seconds = [moment.seconds for moment in rank.timeline]
    shown = [name for name in CATEGORIES if any(moment.bytes[name] for moment in rank.timeline)]
    colors = dict(zip(CATEGORIES, _COLORS, strict=True))
    _shade_phases(axes, rank, end=seconds[-1])
    axes.stackplot(
        seconds,
        [[moment.bytes[name] / _GIB for moment in rank.timeline] for name in shown],
        labels=shown,
        colors=[colors[name] for name in shown],
        step="post",
    )
    peak, memory = rank.peak_bytes / _GIB, plan.device.memory / _GIB
    drawn = sum(name == "forward" for _, name in rank.phases)
    part = f"; {drawn} of {plan.batch.accumulation} micro-batches" if drawn < plan.batch.accumulation else ""
    axes.axhline(memory, color="black", linestyle="--", linewidth=1)
    axes.set(
        xlim=(0, seconds[-1]),
        ylim=(0, 1.15 * peak),  # scale to the peak, since the device's memory may be far larger
        xlabel=f"seconds since the start of the step, if nothing overlaps{part}",
        ylabel="GiB",
        title=f"Memory: at its peak {peak:.1f} of {memory:.1f} GiB, in the {rank.peak_at}",
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _shade_phases(axes: Any, rank: RankPlan, *, end: float) -> None:
    begins = [seconds for seconds, _ in rank.phases]
    for begin, stop, (_, name) in zip(begins, [*begins[1:], end], rank.phases, strict=True):
        axes.axvspan(begin, stop, color=_PHASES.get(name, "white"), zorder=0)
        if stop - begin > 0.06 * end:
            axes.annotate(name, ((begin + stop) / 2, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top")


def _draw_traffic(axes: Any, rank: RankPlan) -> None:
    entries = [entry for entry in rank.traffic if entry.bytes >= 2**20][::-1]
    names = [f"{entry.kind} over {entry.axis}" for entry in entries]
    sizes = [entry.bytes / _GIB for entry in entries]
    bars = axes.barh(names, sizes, color=["#56B4E9" if entry.overlaps else "#D55E00" for entry in entries])
    labels = [
        f" {size:,.1f} GiB in {entry.calls} calls, {entry.seconds * 1e3:,.0f} ms"
        for size, entry in zip(sizes, entries, strict=True)
    ]
    axes.bar_label(bars, labels)
    axes.margins(x=1)  # room for the labels
    axes.set(
        xlabel="GiB of whole tensors in a step",
        title="Traffic: blue can overlap with operations, red cannot" if entries else "No traffic",
    )


def _import_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'A plot needs matplotlib: pip install "lightning-fsdp2[plot]", or leave `plot` out.'
        ) from error
    return Figure

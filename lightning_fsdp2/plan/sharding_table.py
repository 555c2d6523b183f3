"""Tables that show how a model is sharded. Identical layers share a line."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fsdp2.plan.simulation.sharding import Description, ParameterDescription, UnitDescription
from lightning_fsdp2.sizes import EFSDP, EXPERT_PARALLEL, PIPELINE_PARALLEL

WIDTH = 100
_ROOT = "(root)"
TIMES = " \N{MULTIPLICATION SIGN} "
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def write_tables(description: Description, file: TextIO) -> None:
    """Write the tables of units and of parameters to ``file``, with the width that :func:`open_console` chooses."""
    prefix = _get_common_prefix(description)
    units = [_remove_prefix(unit, prefix) for unit in description.units]
    groups = _group_alike(units)
    axes = _get_sharding_axes(description)
    with open_console(file) as console:
        console.print(_build_summary(description, prefix, has_units=bool(axes)), "")
        if axes:
            console.print(_build_unit_table(groups, is_pipeline=PIPELINE_PARALLEL in description.mesh), "")
        console.print(_build_parameter_table(groups, axes, description.precision["weights"]))
        for note in description.notes:
            console.print(f"\n{note}")


@contextmanager
def open_console(file: TextIO) -> Iterator[Console]:
    """Yield a console as wide as the terminal.

    If ``file`` is not a terminal, the console is at least 100 columns wide, and its lines do not end in spaces.
    """
    console = Console(file=file, highlight=False)
    if console.is_terminal:
        yield console
        return
    console.width = max(WIDTH, console.width)
    with console.capture() as captured:
        yield console
    file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
    file.flush()


def _get_sharding_axes(description: Description) -> list[str]:
    """Return the axes over which at least one parameter is sharded."""
    parameters = [parameter for unit in description.units for parameter in unit.parameters]
    placements = [placement for parameter in parameters for placement in parameter.placements.items()]
    return list(dict.fromkeys(axis for axis, placement in placements if placement != "whole"))


def _get_common_prefix(description: Description) -> str:
    """Return the prefix that all unit and parameter names share, such as ``model.base_model.model.`` with adapters."""
    parameters = [parameter.name for unit in description.units for parameter in unit.parameters]
    modules = [name for unit in description.units for name in unit.modules if name != _ROOT]
    paths = [name.split(".")[:-1] for name in (*parameters, *modules)]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return "".join(f"{parts[0]}." for parts in shared)


def _remove_prefix(unit: UnitDescription, prefix: str) -> UnitDescription:
    return replace(
        unit,
        modules=[name.removeprefix(prefix) for name in unit.modules],
        parameters=[replace(parameter, name=parameter.name.removeprefix(prefix)) for parameter in unit.parameters],
    )


def _build_summary(description: Description, prefix: str, *, has_units: bool) -> Table:
    totals, is_pipeline = description.totals, PIPELINE_PARALLEL in description.mesh
    weights, gradients = format_bytes(totals["weight_bytes"]), format_bytes(totals["gradient_bytes"])
    states, gathered = format_bytes(2 * totals["gradient_bytes"]), format_bytes(totals["largest_gathered_bytes"])
    accumulated = totals["accumulated_gradient_bytes"]
    is_all = totals["trained_parameters"] == totals["parameters"]
    trained = "all" if is_all else format_count(totals["trained_parameters"])
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "model": description.model,
        **({"names": f"within {prefix[:-1]}"} if prefix else {}),
        "parameters": f"{format_count(totals['parameters'])}, {trained} trained",
        "strategy": f"{description.strategy} on {totals['ranks']} ranks",
        **describe_meshes(description.mesh, description.expert_mesh),
        "dtypes": ", ".join(f"{role} {dtype}" for role, dtype in description.precision.items()),
        **({"float8": description.float8.describe()} if description.float8 is not None else {}),
        "per rank"
        if not is_pipeline
        else "at most": f"weights {weights}, gradients {gradients}, two states per weight (AdamW) {states}",
        **({"": f"the largest unit while it computes {gathered}"} if has_units else {}),
    }.items():
        table.add_row(Text(name, style="bold"), value)
    if accumulated:
        condition = "" if is_pipeline else "if the run accumulates, "
        table.add_row("", f"{condition}whole gradients between micro-batches {format_bytes(accumulated)}")
        table.add_row("", "(defer_fsdp_grad_sync=False shards them after each)")
    return table


def describe_meshes(mesh: dict[str, int], expert_mesh: dict[str, int]) -> dict[str, str]:
    """Return the names and sizes of the axes of a mesh and, if there is one, of the mesh of experts."""
    meshes = {"mesh": mesh, "mesh of experts": expert_mesh}
    return {name: TIMES.join(f"{axis} {size}" for axis, size in each.items()) for name, each in meshes.items() if each}


def _build_unit_table(groups: list[list[UnitDescription]], *, is_pipeline: bool) -> Table:
    table = build_table("Unit", *(["Pipeline rank"] if is_pipeline else []), "Parameters", "Gathered", "Shard")
    table.add_column("After forward", no_wrap=True)
    for group in groups:
        first, times = group[0], f"{len(group)}{TIMES}" if len(group) > 1 else ""
        table.add_row(
            _get_unit_name(group),
            *([str(first.pipeline_rank)] if is_pipeline else []),
            times + format_count(sum(math.prod(parameter.shape) for parameter in first.parameters)),
            times + format_bytes(first.gathered_bytes),
            times + format_bytes(first.shard_bytes),
            _describe_resharding(group),
        )
    return table


def _build_parameter_table(groups: list[list[UnitDescription]], axes: list[str], usual_dtype: str) -> Table:
    parameters = [parameter for group in groups for parameter in group[0].parameters]
    shows_dtypes = any(parameter.dtype != usual_dtype for parameter in parameters)  # the summary has the usual one
    shows_frozen = not all(parameter.is_trained for parameter in parameters)
    table = build_table("Parameter", "Shard")
    for column in ("Shape", *(["Dtype"] if shows_dtypes else [])):
        table.add_column(column, no_wrap=True)
    for axis in axes:
        table.add_column(axis.replace("_", "\n"))  # a narrow column leaves more room for names
    if shows_frozen:
        table.add_column("Frozen")
    for group in groups:
        table.add_row(Text(_get_unit_name(group), style="bold"))
        for name, parameter, count in _fold_parameters(group[0]):
            table.add_row(
                f" {name}",
                (f"{count}{TIMES}" if count > 1 else "") + format_bytes(parameter.shard_bytes),
                TIMES.join(map(str, parameter.shape)),
                *([parameter.dtype] if shows_dtypes else []),
                *(_get_placement(parameter, axis) for axis in axes),
                *(["" if parameter.is_trained else "yes"] if shows_frozen else []),
            )
    return table


def _get_placement(parameter: ParameterDescription, axis: str) -> str:
    """Return the placement of a parameter on an axis, or a dash if the parameter is sharded over other axes instead."""
    is_expert = EXPERT_PARALLEL in parameter.placements
    missing = "-" if is_expert or axis in (EFSDP, EXPERT_PARALLEL) else "whole"
    return parameter.placements.get(axis, missing)


def build_table(name: str, *numbers: str) -> Table:
    """Create a table with a column of names and columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _group_alike(units: list[UnitDescription]) -> list[list[UnitDescription]]:
    """Put consecutive units of the same kind into groups. Inner units stay with the unit that contains them."""
    blocks: list[list[UnitDescription]] = []
    for unit in units:
        if unit.is_inner and blocks:
            blocks[-1].append(unit)
        else:
            blocks.append([unit])
    groups: list[list[UnitDescription]] = []
    for _, alike in itertools.groupby(blocks, lambda block: [_get_kind(unit) for unit in block]):
        groups += map(list, zip(*alike, strict=True))
    return groups


def _get_kind(unit: UnitDescription) -> object:
    """Return a key to group units by.

    Units with equal keys are on the same pipeline rank, and differ only in the numbers in their names and in whether
    they reshard after forward.
    """
    modules = [_NUMBER.sub("#", name) for name in unit.modules]
    parameters = [(name, _get_look(parameter)) for name, parameter, _ in _fold_parameters(unit)]
    return modules, parameters, unit.gathered_bytes, unit.pipeline_rank


def _fold_parameters(unit: UnitDescription) -> list[tuple[str, ParameterDescription, int]]:
    """Group the parameters of a unit that have the same properties, and the same names apart from numbers.

    Returns:
        For each group, its name within the unit, such as ``experts.0-7.up_proj.weight``, its first parameter, and the
        number of parameters.
    """
    prefix = f"{unit.modules[0]}." if len(unit.modules) == 1 and unit.modules != [_ROOT] else ""
    alike: dict[object, list[tuple[str, ParameterDescription]]] = {}
    for parameter in unit.parameters:
        name = parameter.name.removeprefix(prefix)
        alike.setdefault((_NUMBER.sub("#", name), _get_look(parameter)), []).append((name, parameter))
    return [(_fold_names([name for name, _ in group]), group[0][1], len(group)) for group in alike.values()]


def _get_look(parameter: ParameterDescription) -> object:
    return (
        parameter.shape,
        parameter.dtype,
        parameter.is_trained,
        tuple(parameter.placements.items()),
        parameter.shard_bytes,
    )


def _get_unit_name(group: list[UnitDescription]) -> str:
    return " + ".join(_fold_names(names) for names in zip(*(unit.modules for unit in group), strict=True))


def _fold_names(names: Sequence[str]) -> str:
    """Merge names that differ only in numbers: ``layers.0``, ``layers.1`` and ``layers.2`` become ``layers.0-2``."""
    numbers = [tuple(map(int, _NUMBER.findall(name))) for name in names]
    ranges = iter([_fold_numbers(sorted(set(column))) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda match: next(ranges), names[0])


def _fold_numbers(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _describe_resharding(group: list[UnitDescription]) -> str:
    words = [_name_resharding(unit.reshard_after_forward) for unit in group]
    numbers = [(_NUMBER.findall(unit.modules[0]) or [unit.modules[0]])[-1] for unit in group]
    others = [number for number, word in zip(numbers, words, strict=True) if word != words[0]]
    return f"{words[0]}, {','.join(others)} {words[-1]}" if others else words[0]


def _name_resharding(reshard_after_forward: bool | int) -> str:
    if reshard_after_forward is True:
        return "resharded"
    return "kept" if reshard_after_forward is False else f"on {reshard_after_forward} ranks"


def format_bytes(number: int) -> str:
    """Format a number of bytes as text, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.1f} {unit}" if unit != "B" else f"{number} B"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.1f} GiB"


def format_count(number: int) -> str:
    """Format a number of parameters as text, such as ``1.24 B`` for 1.24 billion."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)

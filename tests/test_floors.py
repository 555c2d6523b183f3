"""Imports go down: a file imports from floors below its own, from its own folder, and never in a circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_fsdp2

NAME = "lightning_fsdp2"
PACKAGE = Path(lightning_fsdp2.__file__).parent

FLOORS = (
    {
        "_git_lfs",
        "_refusals",
        "_secrets",
        "_suggestions",
        "_untrusted",
        "labels",
        "compat",
        "sizes",
        "startup",
    },
    {"config"},
    {"mesh", "data", "schedulers"},
    {"mesh_axes"},
    {"modules", "ranks"},
    {"weights"},
    {"parallel"},
    {"recipes", "checkpoint"},
    {"parallelizer"},
    {"export"},
    {"managers", "callbacks"},
    {"models", "loggers"},
    {"strategies"},
    {"plan"},
    {"cli"},
    {"__main__"},
)
"""Files and folders from the ground up; ``__init__`` is the door to all of them."""

SIBLINGS = {
    ("expert.apply", "tensor.parameters"): "experts are computed with this rank's parts of their parameters",
    ("layers.compile", "loss.cross_entropy"): "the loss is compiled where the layers are",
    ("layers.compile", "tensor.fusion"): "async tensor parallelism is a pass of inductor",
    ("layers.compile", "tensor.parameters"): "compiled layers find their parameters in the slots of tensor parallelism",
    ("layers.packed_sequences", "context.attention"): "the positions of a context parallel rank do not count on",
    ("layers.selective_checkpointing", "context.segment_attention"): "its result is kept, as that of any attention",
    ("loss.token_mean", "data.gradients"): "the mean is made by scaling gradients",
    ("megatron.driver", "data.gradients"): "its buffers are cleared with the gradients",
    ("megatron.tensor_parallel", "tensor.parameters"): "what the wrapper gets depends on how a parameter is sharded",
    ("pipeline.backward_flags", "data.gradients"): "a batch reduces its gradients in its last backward",
    ("tensor.apply", "loss.cross_entropy"): "a sharded vocabulary has a loss of its own",
    ("tensor.styles.projections", "loss.cross_entropy"): "a loss asks the head for sharded logits",
}
"""Imports from one folder of ``parallel`` to another, with the reason of each. They are few on purpose."""

MOST_SIBLINGS = 12


@cache
def get_imports() -> dict[str, set[str]]:
    """The files of the package that each file imports, by dotted names, also in functions and for annotations."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {
        name: {
            next(file for file in (imported, f"{imported}.__init__", *_list_parents(imported)) if file in paths)
            for imported in _find_imports(path)
        }
        for name, path in paths.items()
    }


def _find_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{NAME}."):
            yield from (f"{node.module}.{alias.name}".removeprefix(f"{NAME}.") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix(f"{NAME}.") for a in node.names if a.name.startswith(f"{NAME}."))


def _list_parents(name: str) -> list[str]:
    parent = name.rpartition(".")[0]
    return [parent, f"{parent}.__init__", "__init__"]


def get_part(name: str) -> str:
    return name.partition(".")[0]


def get_floor(name: str) -> int:
    [floor] = [number for number, parts in enumerate(FLOORS) if get_part(name) in parts]
    return floor


@pytest.mark.guarantees("floors")
def test_imports_go_down() -> None:
    arrows = [(name, other) for name, others in get_imports().items() for other in others if name != "__init__"]
    between = [(name, other) for name, other in arrows if get_part(name) != get_part(other)]
    assert [(name, other) for name, other in between if get_floor(other) >= get_floor(name)] == []


@pytest.mark.guarantees("floors")
def test_no_file_imports_itself_by_others() -> None:
    list(TopologicalSorter(get_imports()).static_order())  # a CycleError names the circle


@pytest.mark.guarantees("few-arrows")
def test_kinds_of_parallelism_know_little_of_each_other() -> None:
    arrows = {
        (name.removeprefix("parallel."), other.removeprefix("parallel."))
        for name, others in get_imports().items()
        for other in others
        if get_part(name) == get_part(other) == "parallel" and name.split(".")[1] != other.split(".")[1]
    }
    assert arrows == SIBLINGS.keys()
    assert len(arrows) <= MOST_SIBLINGS
    folders: dict[str, set[str]] = {}
    for name, other in arrows:
        folders.setdefault(get_part(name), set()).add(get_part(other))
    list(TopologicalSorter(folders).static_order())

"""Private names of other packages are used in ``lightning_fsdp2/compat`` alone, apart from those listed here."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_fsdp2

PACKAGE = Path(lightning_fsdp2.__file__).parent

OF_MODULES = {"_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"}
"""Dictionaries of ``torch.nn.Module``, which have no public equal and have been the same since torch 0.4."""

OF_TENSORS = {
    "_version",
    "_foreach_add_",
    "_foreach_clamp_max_",
    "_foreach_clamp_min_",
    "_foreach_mul_",
    "_foreach_norm",
}
"""Autograd's count of writes, and operations on lists of tensors, which torch's optimizers are made of."""

OPERATIONS = ("_c10d_functional", "_efficient_attention", "_flash_attention", "_grouped_mm", "_scaled_dot_product")
"""Beginnings of names of operations under ``torch.ops``, which a selective checkpoint and a plan must name."""

PROTECTED = {
    "_get": "LightningCLI",
    "_layer_sync": "ParallelStrategy",
    "_lightning_optimizers": "Strategy",
    "_parser": "LightningCLI",
    "_precision_plugin": "Strategy",
    "_reset_optimizers_and_schedulers": "Strategy",
    "_subcommands_action": "ArgumentParser of jsonargparse",
    "_update_metrics": "RichProgressBar",
    "_wandb_init": "WandbLogger",
    "_prefix": "WandbLogger",
}
"""Names that a class of ours has from its base, by the base; they are for subclasses, and used on ``self`` alone."""

OF_PYTHON = {"os._exit"}


@cache
def get_trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def get_own_names() -> frozenset[str]:
    """The private names that the package itself defines."""
    names: set[str] = set()
    for tree in get_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
    return frozenset(filter(is_private, names))


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def find_private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find the uses of private names that the package does not define, apart from those that are listed above."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_fsdp2"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, ast.unparse(node)) for name in names if is_private(name))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, ast.unparse(node)) for a in node.names if any(map(is_private, a.name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_allowed(node):
            yield node.lineno, ast.unparse(node)


def is_allowed(node: ast.Attribute) -> bool:
    if node.attr in get_own_names() | OF_MODULES | OF_TENSORS or ast.unparse(node) in OF_PYTHON:
        return True
    is_of_base = is_self(node.value) or ast.unparse(node.value) == "super()"
    return node.attr.startswith(OPERATIONS) or (node.attr in PROTECTED and is_of_base)


@pytest.mark.guarantees("private-names")
def test_private_names_are_in_compat() -> None:
    found = [
        f"{file}:{line} {name}"
        for file, tree in get_trees().items()
        if not file.startswith("compat/")
        for line, name in find_private_names(tree)
    ]
    assert found == []


def test_what_is_listed_is_used() -> None:
    used = {
        node.attr
        for file, tree in get_trees().items()
        if not file.startswith("compat/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    assert (OF_MODULES | OF_TENSORS | PROTECTED.keys()) - used == set()
    assert all(any(name.startswith(operation) for name in used) for operation in OPERATIONS)

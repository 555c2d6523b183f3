"""Count what makes the source hard to read: large files and folders, long functions, and paths of values through it.

    python tools/count_house.py

A flag should be written in two places: in ``config.py``, with its text and its check, and in the function of the public
contract, which has a parameter for each flag. The program lists the other files that declare a field or a parameter
with the name of a flag. The files in ``parallel/`` are left out, because each pass has parameters of its own.

A flag should be used in one place. For each config, the program lists flags that several files read from a config or
name in a string. It counts the files that a training run uses, so the recipes of other strategies are left out, and so
is the planner, which tries values of flags.

On its way from ``FSDP2Strategy(tp_size=2)`` to the mesh, the number ``tp_size`` is passed from file to file. A *hop* is
a function that gets the number, or an object with the number, from another file.
"""

import argparse
import ast
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CONTRACT = {"parallelizer.py", "recipes/nvfsdp.py"}
"""Files whose functions have a parameter for each flag, by contract."""


class MarkedInt(int):
    """An int that can be distinguished from other ints of the same value."""


def main() -> None:
    """Print all counts."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    from helpers import house

    report(f"files over {house.MOST_LINES} lines", house.find_long_files())
    report(f"folders over {house.MOST_FILES} files", house.find_full_folders())
    report(f"functions over {house.MOST_LINES_OF_FUNCTION} lines", house.find_long_functions())
    from lightning_fsdp2 import DDPConfig, FSDP2Config, MegatronFSDPConfig

    flags = {field.name for config in (FSDP2Config, MegatronFSDPConfig, DDPConfig) for field in fields(config)}
    report(f"of {len(flags)} flags, written in other files too", find_writes(house.PACKAGE, flags))
    recipes = {"fsdp2.py": FSDP2Config, "megatron_fsdp.py": MegatronFSDPConfig, "ddp.py": DDPConfig}
    for recipe, config in recipes.items():
        uses = find_uses(house.PACKAGE, config, {f"recipes/{other}" for other in recipes.keys() - {recipe}})
        several = {flag: ", ".join(files) for flag, files in uses.items() if len(files) > 1}
        report(f"of {len(uses)} flags of {config.__name__}, used in several files", several)
    hops = trace_tp_size(str(house.PACKAGE))
    report("hops of tp_size, in order", dict.fromkeys(hops, ""))
    print(f"times that sizes are resolved: {sum(hop.rpartition('.')[2].startswith('resolve') for hop in hops)}")


def report(title: str, found: dict[str, Any]) -> None:
    """Print how many things were found, and each of them."""
    print(f"{title}: {len(found)}")
    for name, value in sorted(found.items()) if all(found.values()) else found.items():
        print(f"    {name} {value}".rstrip())


# ---------------------------------------------------------------------- flags


def find_writes(package: Path, flags: set[str]) -> dict[str, str]:
    """Return the files that declare each flag again, apart from ``config.py``, the contract and the passes."""
    writes: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if name == "config.py" or name in CONTRACT or name.startswith("parallel/"):
            continue
        for flag in flags & find_declared(ast.parse(path.read_text())):
            writes.setdefault(flag, []).append(name)
    return {flag: ", ".join(files) for flag, files in writes.items()}


def find_declared(tree: ast.AST) -> set[str]:
    """Return the names of all parameters of functions, and of all annotated fields of classes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ClassDef):
            targets = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def find_uses(package: Path, config: type[Any], other_recipes: set[str]) -> dict[str, list[str]]:
    """Return the files that use each flag of a config in a run, apart from ``config.py`` and the contract."""
    uses: dict[str, list[str]] = {field.name: [] for field in fields(config)}
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if name == "config.py" or name in CONTRACT | other_recipes or name.startswith("plan/"):
            continue
        for flag in uses.keys() & find_names(ast.parse(path.read_text())):
            uses[flag].append(name)
    return uses


def find_names(tree: ast.AST) -> set[str]:
    """Return the names that are read from an object called ``config``, are passed to a config, or are in strings."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and get_last_name(node.value).endswith("config"):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and get_last_name(node.func) in ("replace", "FSDP2Config", "DDPConfig"):
            names.update(keyword.arg for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def get_last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------------- tp_size


def trace_tp_size(package: str) -> list[str]:
    """Set up a strategy on two forked ranks, and return the hops of its ``tp_size``, in order."""
    import torch
    from count_moves import MODEL
    from helpers.ranks import run_ranks
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_fsdp2 import CausalLM, FSDP2Strategy

    def run() -> list[str]:
        tracer = Tracer(package)
        sys.setprofile(tracer.see)
        strategy = FSDP2Strategy(tp_size=MarkedInt(2))
        module = CausalLM(config=MODEL)
        loader = DataLoader([{"input_ids": row, "labels": row} for row in torch.zeros(2, 8, dtype=torch.long)])
        Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=2,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)
        sys.setprofile(None)
        return tracer.hops

    hops: list[str] = run_ranks(run, 2, group=False)[0]
    return hops


class Tracer:
    """Profiler that records functions that get a marked number, or an object with one, from another file."""

    def __init__(self, package: str) -> None:
        self.hops: list[str] = []
        self._package = package

    def see(self, frame: Any, event: str, argument: Any) -> None:
        """Look for a marked number in the arguments of a call. ``sys.setprofile`` takes this function."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_step = frame.f_back is not None and frame.f_back.f_code.co_filename == code.co_filename
        if not is_step and any(self._holds_mark(frame.f_locals.get(name)) for name in names):
            file = code.co_filename.removeprefix(self._package).lstrip("/")
            self.hops.append(f"{file}:{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}")

    def _holds_mark(self, value: Any) -> bool:
        if is_dataclass(value):
            return any(isinstance(held, MarkedInt) for held in vars(value).values())
        return isinstance(value, MarkedInt)


if __name__ == "__main__":
    main()

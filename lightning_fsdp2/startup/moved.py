"""Support for old import paths. They still work, but importing from them emits a warning that names the new path."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

UNTIL = "2027-06-01"
"""Date after which releases no longer accept the old paths."""

MOVED = {
    "lightning_fsdp2.parallel.context_parallel": "lightning_fsdp2.parallel.context.apply",
    "lightning_fsdp2.parallel.fully_shard": "lightning_fsdp2.parallel.data.fully_shard",
    "lightning_fsdp2.parallel.pretrained": "lightning_fsdp2.weights.pretrained",
    "lightning_fsdp2.parallel.tensor_parallel": "lightning_fsdp2.parallel.tensor.apply",
    "lightning_fsdp2.parallel.tp_plans": "lightning_fsdp2.parallel.tensor.plans",
    "lightning_fsdp2.parallel.tp_styles": "lightning_fsdp2.parallel.tensor.styles",
    "lightning_fsdp2.parallel.uneven_shards": "lightning_fsdp2.ranks.whole_tensors",
    "lightning_fsdp2.plan.devices": "lightning_fsdp2.plan.timing.devices",
    "lightning_fsdp2.plan.recorder": "lightning_fsdp2.plan.simulation.recorder",
    "lightning_fsdp2.plan.simulate": "lightning_fsdp2.plan.simulation.step",
}
"""Old import paths, each with the new path of the same module."""


def keep_moved_paths() -> None:
    """Make the old import paths in :data:`MOVED` work. It is safe to call this more than once."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())


class _MovedFinder:
    """Import finder for the old paths. Python tries it after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, cast(Any, _MovedLoader(MOVED[fullname]))) if fullname in MOVED else None


class _MovedLoader:
    """Loader that gives the module at an old path the contents of the module at the new path.

    It does not inherit from ``importlib.abc.Loader``, because importing that takes longer than all the rest.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to create the module."""

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(
            f"{module.__name__} is {self.path} now; the old path works until {UNTIL}.", FutureWarning, stacklevel=2
        )
        moved = importlib.import_module(self.path)

        def get(name: str) -> Any:
            return getattr(moved, name)

        module.__dict__.update(__getattr__=get, __doc__=moved.__doc__)

"""Short names of the strategies, for Lightning's registry, the command line and YAML."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"class_path": "lightning_fsdp2.FSDP2Strategy"},
    "fsdp2_offload": {
        "class_path": "lightning_fsdp2.FSDP2Strategy",
        "init_args": {"config": {"offload_policy": True}},
    },
    "lightning_fsdp2_ddp": {"class_path": "lightning_fsdp2.DDPStrategy"},
    "megatron_fsdp": {"class_path": "lightning_fsdp2.MegatronFSDPStrategy"},
}
"""YAML form of each strategy, by short name. The command line adds the user's options to this form."""

_LIGHTNINGS_REGISTRY = "lightning.pytorch.strategies"
_FABRICS_REGISTRY = "lightning.fabric.strategies"


def register_with_lightning() -> None:
    """Register the short names for ``Trainer(strategy=NAME)``, now or when Lightning is imported.

    It is safe to call this more than once. Lightning has no entry point for strategies, so the names are known once
    ``lightning_fsdp2`` has been imported.
    """
    if _LIGHTNINGS_REGISTRY in sys.modules:
        _register(sys.modules[_LIGHTNINGS_REGISTRY])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Import finder that finds only Lightning's registry, and registers the names once that has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNINGS_REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(lightnings: ModuleType) -> None:
    registry = lightnings.StrategyRegistry
    for name, strategy in STRATEGIES.items():
        if name not in registry:
            registry.register(name, partial(_create, **strategy), description=strategy["class_path"])
    fabrics = import_module(_FABRICS_REGISTRY).STRATEGY_REGISTRY  # Lightning's strategies have imported it
    for name in STRATEGIES:
        if name not in fabrics:
            fabrics.register(name, partial(_refuse_in_fabric, name), description="Only for the Trainer.")


def _refuse_in_fabric(name: str) -> NoReturn:
    manager = STRATEGIES[name]["class_path"].replace("Strategy", "Manager")
    raise ValueError(
        f"Fabric(strategy={name!r}) is not supported: the strategies of lightning_fsdp2 are for Lightning's Trainer."
        f" Use the Trainer, or shard the model in a loop of your own with {manager}, as examples/plain_loop.py does."
    )


def _create(class_path: str, init_args: dict[str, Any] | None = None) -> Any:
    """Create a strategy from its YAML form. Its class is imported only now, because that imports torch."""
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)(**(init_args or {}))

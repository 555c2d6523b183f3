"""Short names of the strategies, for Lightning's registry, the command line and YAML."""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_fsdp2.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from lightning_fsdp2.strategies.ddp import DDPStrategy
from lightning_fsdp2.strategies.fsdp2 import FSDP2Strategy
from lightning_fsdp2.strategies.megatron_fsdp import MegatronFSDPStrategy

_STRATEGIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "fsdp2": (FSDP2Strategy, FSDP2Config, {}),
    "fsdp2_offload": (FSDP2Strategy, FSDP2Config, {"offload_policy": True}),
    "lightning_fsdp2_ddp": (DDPStrategy, DDPConfig, {}),
    "megatron_fsdp": (MegatronFSDPStrategy, MegatronFSDPConfig, {}),
}

STRATEGIES: dict[str, dict[str, Any]] = {
    name: {
        "class_path": f"lightning_fsdp2.{strategy.__name__}",
        **({"init_args": {"config": flags}} if flags else {}),
    }
    for name, (strategy, _, flags) in _STRATEGIES.items()
}
"""YAML form of each strategy, by short name. The command line adds the user's options to this form.

:func:`register_strategies` registers the same names with Lightning.
"""


def register_strategies() -> None:
    """Register the strategies' short names in Lightning, for ``Trainer(strategy=NAME)``."""
    for name, (strategy, config, flags) in _STRATEGIES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=strategy.__doc__ or "", config=config(**flags))

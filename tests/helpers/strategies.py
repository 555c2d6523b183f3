"""The strategies of the package, and what differs between them by their nature. A new one is added here."""

import itertools
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest

from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from lightning_fsdp2 import (
    CheckpointConfig,
    DDPConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2Strategy,
    MegatronFSDPConfig,
    MegatronFSDPStrategy,
)
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy


@dataclass(frozen=True)
class Kind:
    """A strategy, and what differs between strategies by their nature."""

    strategy: type[MeshStrategy[Any]]
    config: type[Any]
    shards: bool
    flags_for_unused: dict[str, Any] = field(default_factory=dict)
    """What a step needs in which some parameters take no part."""

    flags_without_layers: dict[str, Any] = field(default_factory=dict)
    """What a module needs that has no list of layers."""

    flags_without_sharding: dict[str, Any] = field(default_factory=dict)
    """What gives every rank all parameters, if anything does."""

    several_optimizers: bool = True
    """Whether a module may have more than one."""

    unfreezes: bool = True
    """Whether what is frozen may be trained later."""

    context: Callable[[], AbstractContextManager[None]] = nullcontext
    """What stands in for hardware that the tests do without."""

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, group: bool = True) -> list[Any]:
        """:func:`run_ranks`, in the strategy's context."""

        def run_in_context(*args: Any) -> Any:
            with self.context():
                return function(*args)

        return run_ranks(run_in_context, world_size, *args, group=group)

    def make_trainer(
        self,
        flags: dict[str, Any] | None = None,
        *,
        checkpoint: CheckpointConfig | None = None,
        timeout: int = 60,
        **options: Any,
    ) -> pl.Trainer:
        config = self.config(**(flags or {}))
        strategy = self.strategy(config=config, checkpoint=checkpoint, timeout=timedelta(seconds=timeout))
        return make_trainer(strategy, **options)


STRATEGIES = {
    "fsdp2": Kind(FSDP2Strategy, FSDP2Config, shards=True),
    "ddp": Kind(DDPStrategy, DDPConfig, shards=False, flags_for_unused={"find_unused_parameters": True}),
    "megatron_fsdp": Kind(
        MegatronFSDPStrategy,
        MegatronFSDPConfig,
        shards=True,
        flags_without_layers={"zero_dp_strategy": 2},
        flags_without_sharding={"zero_dp_strategy": 0},
        several_optimizers=False,
        unfreezes=False,
        context=cuda_on_cpu,
    ),
}


def fast_under(*names: str) -> pytest.MarkDecorator:
    """Give the decorated test each strategy as ``kind``; those that ``names`` leaves out are slow."""
    kinds = [
        pytest.param(kind, id=name, marks=() if name in names else pytest.mark.slow)
        for name, kind in STRATEGIES.items()
    ]
    return pytest.mark.parametrize("kind", kinds)


def pairs(argument: str, values: Iterable[Any], *, fast: Collection[tuple[str, Any]]) -> pytest.MarkDecorator:
    """Give the decorated test each strategy as ``kind`` with each of ``values``; pairs that ``fast`` lacks are slow."""
    cells = [
        pytest.param(kind, value, id=f"{name}-{value}", marks=() if (name, value) in fast else pytest.mark.slow)
        for (name, kind), value in itertools.product(STRATEGIES.items(), values)
    ]
    return pytest.mark.parametrize(("kind", argument), cells)

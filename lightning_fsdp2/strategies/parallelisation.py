"""Record of how a module was parallelised. A later Trainer compares its own settings with this record."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.config import FLAGS_OF_A_RUN, DistributedConfig, spell_alike
from lightning_fsdp2.mesh import get_optional_mesh
from lightning_fsdp2.parallel.data.branches import check_branches
from lightning_fsdp2.sizes import PIPELINE_PARALLEL
from lightning_fsdp2.strategies.parts.world import World

_ATTRIBUTE = "_lightning_fsdp2_parallelisation"

_CAUSES = {"mp_policy": "precision", "autocast_dtype": "precision and autocast_dtype"}
"""Options to name in error messages, by flag. ``Trainer(precision=)`` also sets these flags."""


@dataclass(frozen=True)
class Parallelisation:
    """Settings that a module was parallelised with."""

    device_mesh: DeviceMesh
    config: DistributedConfig

    has_half_weights: bool
    """Whether ``bf16-true`` converted the module's parameters to bfloat16."""


def is_parallelised(module: nn.Module, parallelisation: Parallelisation) -> bool:
    """Return whether an earlier Trainer has parallelised ``module`` with the same settings.

    Raises:
        ValueError: When the earlier Trainer had a different strategy, mesh or weight dtype, or a different value of a
            flag that changes the module.
    """
    earlier: Parallelisation | None = module.__dict__.get(_ATTRIBUTE)
    if earlier is not None:
        _check_same(earlier, parallelisation)
    return earlier is not None


def set_parallelisation(module: nn.Module, parallelisation: Parallelisation) -> None:
    """Record how ``module`` was parallelised."""
    module.__dict__[_ATTRIBUTE] = parallelisation


def _check_same(earlier: Parallelisation, current: Parallelisation) -> None:
    if type(earlier.config) is not type(current.config):
        old, new = type(earlier.config).__name__, type(current.config).__name__
        raise ValueError(
            f"An earlier Trainer parallelised the module with a {old}, and this Trainer cannot parallelise the module"
            f" again with a {new}. Save a checkpoint, and load it into a new module."
        )
    old_ranks, ranks = _describe_ranks(earlier.device_mesh), _describe_ranks(current.device_mesh)
    if old_ranks != ranks:
        raise ValueError(
            f"The module was sharded over {old_ranks} by an earlier Trainer, but this strategy asks for {ranks}. Use"
            " the same sizes, or load a checkpoint into a new module."
        )
    if earlier.has_half_weights != current.has_half_weights:
        old, new = ("bfloat16" if way.has_half_weights else "their original dtype" for way in (earlier, current))
        raise ValueError(
            f"The module's weights were kept in {old} by an earlier Trainer, but this Trainer needs them in {new}. Use"
            " the same precision, or load a checkpoint into a new module."
        )
    for name, (old, new) in get_differences(earlier.config, current.config).items():
        raise ValueError(
            f"The module was parallelised with {name}={old!r} by an earlier Trainer, but this Trainer asks for"
            f" {new!r}. Use the same {_CAUSES.get(name, name)}, or load a checkpoint into a new module."
        )


def _describe_ranks(mesh: DeviceMesh) -> str:
    """Return ``mesh`` as text, with its device type and the size of each axis, and with the number of stages."""
    pipeline = get_optional_mesh(mesh, PIPELINE_PARALLEL)
    return str(mesh) if pipeline is None else f"{pipeline.size()} pipeline stages of {mesh}"


def tell_branches_apart(world: World, module: nn.Module, units: Iterable[Any], *, layers: Iterable[Any] = ()) -> None:
    """Make data parallel ranks check, before they gather weights, that they all run the same part of the model.

    Ranks read different batches, and some batches skip a part of the model: text without images, for example, skips the
    vision tower. If some ranks skipped a part that others run, their collectives would not match. Ranks that draw their
    own random numbers may also skip different ``layers``, which is checked in the first training steps.
    """
    if world.data_parallel_size > 1 and world.control_group is not None:
        layers = layers if world.has_own_random_numbers else ()
        check_branches(module, units, world.get_stage_control(), layers=layers)


def get_differences(first: DistributedConfig, second: DistributedConfig) -> dict[str, tuple[Any, Any]]:
    """Return the flags that change the module and differ between two configs of the same class."""
    flags, others = _get_flags(first), _get_flags(second)
    return {
        name: (value, others[name])
        for name, value in flags.items()
        # also compare by `repr`, because torch's parallel styles are not equal by `==`, even if their settings are
        if value != others[name] and repr(value) != repr(others[name])
    }


def _get_flags(config: DistributedConfig) -> dict[str, Any]:
    return {name: value for name, value in spell_alike(config).to_dict().items() if name not in FLAGS_OF_A_RUN}

"""What a strategy has made of a module, which outlives the Trainer: another one must mean the same, or say so."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.config import DistributedConfig

_ATTRIBUTE = "_lightning_fsdp2_layout"

_FLAGS_OF_A_RUN = (
    "backend",
    "bind_device_id",
    "defer_fsdp_grad_sync",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
    "broadcast_buffers",
)
"""Those that leave the module as it is."""


_CAUSES = {"mp_policy": "precision", "autocast_dtype": "precision and autocast_dtype"}
"""What users set where a flag differs that ``Trainer(precision=)`` sets too."""


@dataclass(frozen=True)
class Layout:
    """How a module was parallelised."""

    device_mesh: DeviceMesh
    config: DistributedConfig

    has_half_weights: bool
    """Whether ``bf16-true`` has made its parameters bfloat16."""


def get_optional_layout(module: nn.Module) -> Layout | None:
    """How ``module`` was parallelised by an earlier Trainer; None if it was not."""
    return module.__dict__.get(_ATTRIBUTE)


def set_layout(module: nn.Module, layout: Layout) -> None:
    """Note how ``module`` was parallelised."""
    module.__dict__[_ATTRIBUTE] = layout


def check_same_layout(earlier: Layout, current: Layout) -> None:
    """Refuse a module that an earlier Trainer has made something else of.

    Raises:
        ValueError: When strategy, mesh or a flag differs that changes a module.
    """
    if type(earlier.config) is not type(current.config):
        old, new = type(earlier.config).__name__, type(current.config).__name__
        raise ValueError(
            f"The module was parallelised by an earlier Trainer as a {old} says, and cannot be again as a {new} does."
            " Save a checkpoint, and load it into a new module."
        )
    old_mesh, mesh = earlier.device_mesh, current.device_mesh
    if (old_mesh.shape, old_mesh.device_type) != (mesh.shape, mesh.device_type):
        raise ValueError(
            f"The module was sharded over {old_mesh} by an earlier Trainer, but this strategy asks for {mesh}. Use the"
            " same sizes, or load a checkpoint into a new module."
        )
    if earlier.has_half_weights != current.has_half_weights:
        old, new = ("bfloat16" if layout.has_half_weights else "the dtype they had" for layout in (earlier, current))
        raise ValueError(
            f"The module was given weights of {old} by an earlier Trainer, but this one asks for {new}. Use the same"
            " precision, or load a checkpoint into a new module."
        )
    for name, (old, new) in get_differences(earlier.config, current.config).items():
        raise ValueError(
            f"The module was parallelised with {name}={old!r} by an earlier Trainer, but this one asks for {new!r}. Use"
            f" the same {_CAUSES.get(name, name)}, or load a checkpoint into a new module."
        )


def get_differences(first: DistributedConfig, second: DistributedConfig) -> dict[str, tuple[Any, Any]]:
    """The flags that change a module, and differ; of two configs of one class."""
    flags, others = _get_flags(first), _get_flags(second)
    return {
        name: (value, others[name])
        for name, value in flags.items()
        # the styles of a plan are compared by identity, but say what they are
        if value != others[name] and repr(value) != repr(others[name])
    }


def _get_flags(config: DistributedConfig) -> dict[str, Any]:
    flags = {name: value for name, value in config.to_dict().items() if name not in _FLAGS_OF_A_RUN}
    if flags["activation_checkpointing"] is True:
        flags["activation_checkpointing"] = "full"
    return flags

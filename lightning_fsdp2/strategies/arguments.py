"""Checks of the constructor arguments that all strategies have in common."""

from datetime import timedelta
from typing import Any

from lightning_fsdp2.config import CheckpointConfig, DistributedConfig


def check_arguments(strategy: str, config_class: type[DistributedConfig], **arguments: Any) -> None:
    """Refuse strategy arguments of the wrong type, such as a dict for the config, and timeouts that are not positive.

    Args:
        strategy: Name of the strategy, for error messages.
        config_class: Class of the strategy's config.
        arguments: The arguments ``config`` and ``checkpoint``, and the timeouts.

    Raises:
        TypeError: When an argument has the wrong type.
        ValueError: When a timeout is not positive.
    """
    kinds = {"config": config_class, "checkpoint": CheckpointConfig}
    for name, value in arguments.items():
        kind = kinds.get(name, timedelta)
        if not isinstance(value, kind) and (value is not None or name in ("timeout", "rendezvous_timeout")):
            raise TypeError(f"{strategy}({name}={value!r}) must be a {kind.__name__}; pass {kind.__name__}(...).")
        if isinstance(value, timedelta) and value <= timedelta(0):
            raise ValueError(f"{strategy}({name}={str(value)!r}) must be longer than 0.")

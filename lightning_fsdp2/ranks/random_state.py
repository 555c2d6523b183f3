"""Random state of one process, in types that ``torch.load(weights_only=True)`` accepts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_shared: list[dict[str, Any]] = []
"""Random state of torch that all ranks share, while each rank draws its own numbers. Empty at other times."""


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch (for the CPU and ``device``), numpy and Python."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        **get_torch_random_state(device),
        "numpy": (name, _pack(keys), position, has_gauss, cached),
        "python": (version, _pack(internal), gauss),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the random states that :func:`get_random_state` returned. States of other device types are ignored."""
    set_torch_random_state(state, device)
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, _unpack(keys), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(_unpack(internal).tolist()), gauss))


def get_torch_random_state(device: torch.device) -> dict[str, Any]:
    """Return only the random states of torch, for the CPU and ``device``."""
    state = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_torch_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore only the random states of torch. States of other device types are ignored."""
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


@contextmanager
def own_random_state(state: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Run the block with this rank's own random state of torch, and then with the state that all ranks share again.

    In the block, :func:`shared_random_state` still draws from the shared state.

    Args:
        state: Own state, from :func:`get_torch_random_state`. At the end of the block, it holds the new own state.
        device: Device whose state is exchanged, beside that of the CPU.
    """
    _shared.append(get_torch_random_state(device))
    set_torch_random_state(state, device)
    try:
        yield
    finally:
        state.update(get_torch_random_state(device))
        set_torch_random_state(_shared.pop(), device)


@contextmanager
def shared_random_state(device: torch.device) -> Iterator[None]:
    """Run the block with the random state of torch that all ranks share, even while each rank draws its own numbers.

    What the ranks draw in the block is equal on all of them, if all of them enter it in the same order.
    """
    if not _shared:
        yield
        return
    own = get_torch_random_state(device)
    set_torch_random_state(_shared[0], device)
    try:
        yield
    finally:
        _shared[0] = get_torch_random_state(device)
        set_torch_random_state(own, device)


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Set the random state of all ranks of ``group`` to that of its first rank."""
    if group.size() > 1:
        states = [get_random_state(device)]
        dist.broadcast_object_list(states, group=group, group_src=0)
        set_random_state(states[0], device)


def _pack(words: Any) -> torch.Tensor:
    # A single tensor takes less space than a tuple in checkpoints, which hold the states of all ranks.
    # The dtype is int32, because torch cannot pickle uint32.
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def _unpack(words: Any) -> Any:
    # checkpoints of earlier versions hold int64 tensors or tuples
    return np.asarray(words).astype(np.uint32)

"""Random state of one process, in types that ``torch.load(weights_only=True)`` accepts."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


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

"""The random state of one process, in types that ``torch.load(weights_only=True)`` accepts."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch (host and ``device``), numpy and Python."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        **get_torch_random_state(device),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`get_random_state` returned; a state of another device type is left out."""
    set_torch_random_state(state, device)
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def get_torch_random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of torch alone."""
    state = {"torch": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_torch_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back the states of torch; one of another device type is left out."""
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of ``group`` the random state of its first one; processes start with different ones."""
    if group.size() > 1:
        states = [get_random_state(device)]
        dist.broadcast_object_list(states, group=group, group_src=0)
        set_random_state(states[0], device)

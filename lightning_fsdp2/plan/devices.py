"""What a plan takes devices and the links between them for: the numbers of their data sheets."""

from dataclasses import dataclass, replace

import torch

from lightning_fsdp2.callbacks.model_flops import get_peak_flops_of


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of accelerator, in machines as their makers build them."""

    name: str
    """As CUDA calls it; what is in :mod:`~lightning_fsdp2.callbacks.model_flops` has peaks."""

    memory: int
    """Bytes that a process can allocate on an empty one."""

    memory_bandwidth: float
    """Bytes per second."""

    link_bandwidth: float
    """Bytes per second that one sends to the others of its node, and receives at the same time."""

    network_bandwidth: float
    """The same to other nodes: one network adapter for each."""

    per_node: int = 8

    def get_peak_flops(self, dtype: torch.dtype) -> float:
        """Dense floating-point operations per second; in float32 those of TensorFloat-32, if torch is set to use it."""
        return get_peak_flops_of(self.name, dtype)


_GIB, _GB = 2**30, 1e9

DEVICES = {
    "a100": Device(
        name="a100",
        memory=int(79.1 * _GIB),
        memory_bandwidth=2039 * _GB,
        link_bandwidth=300 * _GB,
        network_bandwidth=25 * _GB,
    ),
    "h100": Device(
        name="h100 hbm3",
        memory=int(79.1 * _GIB),
        memory_bandwidth=3350 * _GB,
        link_bandwidth=450 * _GB,
        network_bandwidth=50 * _GB,
    ),
    "h200": Device(
        name="h200",
        memory=int(139.8 * _GIB),
        memory_bandwidth=4800 * _GB,
        link_bandwidth=450 * _GB,
        network_bandwidth=50 * _GB,
    ),
    "b200": Device(
        name="b200",
        memory=int(178.3 * _GIB),
        memory_bandwidth=8000 * _GB,
        link_bandwidth=900 * _GB,
        network_bandwidth=50 * _GB,
    ),
    "mi300x": Device(
        name="mi300x",
        memory=int(191.9 * _GIB),
        memory_bandwidth=5300 * _GB,
        link_bandwidth=448 * _GB,
        network_bandwidth=50 * _GB,
    ),
}
"""The 80 GB A100, H100 (SXM), H200, B200 and MI300X, eight to a node, with one adapter of 200 (A100) or 400 Gbit/s for
each. From the data sheets of DGX A100, H100, H200 and B200, and of AMD's MI300X platform; link bandwidths are those of
one direction, half of what is printed there."""


def get_device(
    name: str, *, memory: float | None = None, network_bandwidth: float | None = None, per_node: int | None = None
) -> Device:
    """Return a device of the table, with what is special about it here.

    Args:
        name: ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"`` or ``"mi300x"``.
        memory: GiB, for another size of it.
        network_bandwidth: GB per second and device, in one direction.
        per_node: Devices that the fast links join.

    Raises:
        ValueError: When the name is not known, or a number is not positive.
    """
    if name not in DEVICES:
        raise ValueError(f"device={name!r} is not known; use {', '.join(DEVICES)}.")
    given = {"memory": memory, "network_bandwidth": network_bandwidth, "per_node": per_node}
    for option, value in given.items():
        if value is not None and value <= 0:
            raise ValueError(f"{option}={value} must be more than 0; leave it out for that of {name}.")
    device = DEVICES[name]
    return replace(
        device,
        memory=int(memory * _GIB) if memory is not None else device.memory,
        network_bandwidth=network_bandwidth * _GB if network_bandwidth is not None else device.network_bandwidth,
        per_node=per_node or device.per_node,
    )

"""Data sheet numbers of devices and of the links between them."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_fsdp2.callbacks.model_flops import get_peak_flops_of
from lightning_fsdp2.plan.timing.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Device:
    """Kind of accelerator, together with the links and network adapters of its vendor's machines."""

    name: str
    """Name of the device in CUDA. Peaks are known for the names in :mod:`~lightning_fsdp2.callbacks.model_flops`."""

    memory: int
    """Bytes that a process can allocate on an empty device."""

    memory_bandwidth: float
    """Bandwidth of the device's memory, in bytes per second."""

    link_bandwidth: float
    """Bandwidth to the other devices of the node in each direction, in bytes per second."""

    network_bandwidth: float
    """Bandwidth to other nodes in each direction, through the device's own adapter, in bytes per second."""

    rates: Rates
    """Rates that are reached in practice. Some are fractions of numbers in the data sheet."""

    per_node: int = 8

    def get_peak_flops(self, dtype: torch.dtype) -> float:
        """Return the peak rate of dense floating-point operations, in operations per second.

        For float32, return the peak rate of TensorFloat-32 if torch is set to use it.
        """
        return get_peak_flops_of(self.name, dtype)


_GIB, _GB, _TERA = 2**30, 1e9, 1e12

_HOPPER = Rates(products=0.803, attention_forward=370 * _TERA, attention_backward=322 * _TERA)

DEVICES = {
    "a100": Device(
        name="a100",
        memory=int(79.1 * _GIB),
        memory_bandwidth=2039 * _GB,
        link_bandwidth=300 * _GB,
        network_bandwidth=25 * _GB,
        rates=Rates(products=0.869, attention_forward=228 * _TERA, attention_backward=196 * _TERA),
    ),
    "h100": Device(
        name="h100 hbm3",
        memory=int(79.1 * _GIB),
        memory_bandwidth=3350 * _GB,
        link_bandwidth=450 * _GB,
        network_bandwidth=50 * _GB,
        rates=_HOPPER,
    ),
    "h200": Device(
        name="h200",
        memory=int(139.8 * _GIB),
        memory_bandwidth=4800 * _GB,
        link_bandwidth=450 * _GB,
        network_bandwidth=50 * _GB,
        rates=_HOPPER,
    ),
    "b200": Device(
        name="b200",
        memory=int(178.3 * _GIB),
        memory_bandwidth=8000 * _GB,
        link_bandwidth=900 * _GB,
        network_bandwidth=50 * _GB,
        rates=Rates(products=0.776, attention_forward=433 * _TERA, attention_backward=369 * _TERA),
    ),
    "mi300x": Device(
        name="mi300x",
        memory=int(191.9 * _GIB),
        memory_bandwidth=5300 * _GB,
        link_bandwidth=448 * _GB,
        network_bandwidth=50 * _GB,
        rates=Rates(products=0.514, attention_forward=311 * _TERA, attention_backward=271 * _TERA),
    ),
}
"""The 80 GB A100, H100 (SXM), H200, B200 and MI300X, eight to a node, each with one network adapter of 200 (A100) or
400 Gbit/s. The numbers are from the data sheets of DGX A100, H100, H200 and B200, and of AMD's MI300X platform. Link
bandwidths are for one direction, half of what the data sheets state."""


def get_device(
    name: str,
    *,
    memory: float | None = None,
    memory_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    per_node: int | None = None,
    product_tflops: float | None = None,
    attention_tflops: float | None = None,
) -> Device:
    """Return the device ``name`` from :data:`DEVICES`. Any number that is given replaces the device's own number.

    Args:
        name: ``"a100"``, ``"h100"``, ``"h200"``, ``"b200"`` or ``"mi300x"``, in any case.
        memory: GiB of memory that a process can allocate.
        memory_bandwidth: Memory bandwidth according to the data sheet, in GB per second.
        network_bandwidth: Network bandwidth per device in one direction, in GB per second.
        per_node: Number of devices that the fast links connect.
        product_tflops: TFLOP/s that matrix products in bfloat16 reach, for estimates.
        attention_tflops: TFLOP/s that the forward of fused attention reaches in bfloat16 with 16,384 keys, a head size
            of 128 and no mask, for estimates. The rates of other sizes and of backward change in proportion.

    Raises:
        ValueError: When the name is not known, or a number is not positive.
    """
    if name.lower() not in DEVICES:
        raise ValueError(f"device={name!r} is not known; use {', '.join(DEVICES)}.")
    given = {option: value for option, value in locals().items() if option != "name"}
    for option, value in given.items():
        if value is not None and value <= 0:
            option = "devices_per_node" if option == "per_node" else option  # its name in every command and config
            raise ValueError(f"{option}={value} must be more than 0; leave it out to use the value of {name}.")
    device = DEVICES[name.lower()]
    rates = device.rates
    if product_tflops is not None:
        rates = replace(rates, products=product_tflops * _TERA / device.get_peak_flops(torch.bfloat16))
    if attention_tflops is not None:
        ratio = attention_tflops * _TERA / rates.attention_forward
        backward = rates.attention_backward * ratio
        rates = replace(rates, attention_forward=attention_tflops * _TERA, attention_backward=backward)
    return replace(
        device,
        memory=_take(memory, _GIB, device.memory),
        memory_bandwidth=_take(memory_bandwidth, _GB, device.memory_bandwidth),
        network_bandwidth=_take(network_bandwidth, _GB, device.network_bandwidth),
        per_node=per_node or device.per_node,
        rates=rates,
    )


def _take(value: float | None, unit: float, default: float) -> Any:
    return default if value is None else type(default)(value * unit)

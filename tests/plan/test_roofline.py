import pytest
import torch

from lightning_fsdp2.plan.devices import DEVICES, Device, get_device
from lightning_fsdp2.plan.recorder import Collective, Group, Operation
from lightning_fsdp2.plan.roofline import get_bandwidth, get_seconds, get_step_time

DEVICE = Device(
    name="a100", memory=2**30, memory_bandwidth=1e12, link_bandwidth=100e9, network_bandwidth=10e9, per_node=4
)
NODE = Group(("tensor_parallel",), (0, 1, 2, 3))


def make_call(kind: str, group: Group, size: int, *, is_of_unit: bool = False) -> Operation:
    return Operation(0, 0, None, Collective(kind, group, is_of_unit, size))


def test_an_operation_takes_as_long_as_its_slower_part() -> None:
    assert get_seconds(Operation(312 * 10**12, 0, torch.bfloat16), DEVICE) == pytest.approx(1)
    assert get_seconds(Operation(195 * 10**11, 0, torch.float32), DEVICE) == pytest.approx(1)
    assert get_seconds(Operation(312 * 10**10, 2 * 10**12, torch.bfloat16), DEVICE) == pytest.approx(2)


@pytest.mark.parametrize(
    ("ranks", "bandwidth"),
    [
        ((0, 1, 2, 3), 100e9),  # within a node
        ((0, 4, 8, 12), 10e9),  # one of each node
        ((0, 1, 4, 5), 20e9),  # two of each: two adapters
        (tuple(range(16)), 40e9),
    ],
)
def test_a_ring_over_nodes_goes_through_all_their_adapters(ranks: tuple[int, ...], bandwidth: float) -> None:
    assert get_bandwidth(Group((), ranks), DEVICE) == bandwidth


def test_an_all_reduce_goes_around_twice() -> None:
    gather, reduce = (make_call(kind, NODE, 400 * 10**9) for kind in ("all-gather", "all-reduce"))
    assert get_seconds(gather, DEVICE) == pytest.approx(3)  # 3/4 of the bytes at 100 GB/s
    assert get_seconds(reduce, DEVICE) == pytest.approx(6)
    assert get_seconds(make_call("all-reduce", Group((), (5,)), 10**12), DEVICE) == 0


def test_units_are_gathered_beside_operations_and_the_rest_is_waited_for() -> None:
    operations = [
        Operation(312 * 10**12, 0, torch.bfloat16),
        make_call("all-gather", NODE, 400 * 10**9, is_of_unit=True),
        make_call("all-reduce", NODE, 400 * 10**9),
    ]
    time = get_step_time(operations, DEVICE)
    assert (time.compute, time.overlappable, time.exposed) == pytest.approx((1, 3, 6))
    assert (time.shortest, time.longest) == pytest.approx((7, 10))
    overlapped = get_step_time(operations, DEVICE, overlapped_axes=("tensor_parallel",))
    assert (overlapped.shortest, overlapped.longest) == pytest.approx((9, 10))


def test_every_device_of_the_table_has_peaks() -> None:
    for device in DEVICES.values():
        assert device.get_peak_flops(torch.bfloat16) > device.get_peak_flops(torch.float32) > 1e12


def test_a_device_can_be_special() -> None:
    device = get_device("h100", memory=64, network_bandwidth=25, per_node=4)
    assert (device.memory, device.network_bandwidth, device.per_node) == (64 * 2**30, 25e9, 4)
    with pytest.raises(ValueError, match="device='v100' is not known; use a100, h100, h200, b200, mi300x"):
        get_device("v100")
    with pytest.raises(ValueError, match="memory=0 must be more than 0"):
        get_device("h100", memory=0)

import pytest
import torch

from lightning_fsdp2.plan.simulation.recorder import Attention, Collective, Group, Operation
from lightning_fsdp2.plan.timing.devices import DEVICES, Device, get_device
from lightning_fsdp2.plan.timing.rates import Rates
from lightning_fsdp2.plan.timing.roofline import StepTime, get_bandwidth, get_seconds, get_step_time

DEVICE = Device(
    name="a100",
    memory=2**30,
    memory_bandwidth=1e12,
    link_bandwidth=100e9,
    network_bandwidth=10e9,
    per_node=4,
    rates=Rates(products=0.5, attention_forward=156e12, attention_backward=78e12, memory=0.8, links=0.25),
)
NODE = Group(("tensor_parallel",), (0, 1, 2, 3))


def make_call(kind: str, group: Group, size: int, *, is_of_unit: bool = False) -> Operation:
    return Operation(0, 0, None, Collective(kind, group, is_of_unit, size))


def test_an_operation_takes_as_long_as_its_slower_part() -> None:
    assert get_seconds(Operation(312 * 10**12, 0, torch.bfloat16), DEVICE) == pytest.approx(1)
    assert get_seconds(Operation(195 * 10**11, 0, torch.float32), DEVICE) == pytest.approx(1)
    assert get_seconds(Operation(312 * 10**10, 2 * 10**12, torch.bfloat16), DEVICE) == pytest.approx(2)


def test_products_in_float8_run_at_twice_the_peak_of_bfloat16() -> None:
    device = get_device("h100")
    for dtype, flops in ((torch.bfloat16, 9894), (torch.float8_e4m3fn, 19788), (torch.float8_e5m2, 19788)):
        assert get_seconds(Operation(flops * 10**11, 0, dtype), device) == pytest.approx(1)


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


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        ((0, 1, 2, 3), 3),  # a node: 3 of 4 parts of 100 GB, at 100 GB/s
        ((0, 4, 8, 12), 30),  # one of each node: the same through an adapter
        ((0, 1, 4, 5), 20),  # two of each: 2 of 4 parts leave the node, through each rank's own adapter
        (tuple(range(16)), 30),  # 12 of 16 parts of 25 GB leave
    ],
)
def test_in_an_all_to_all_each_rank_sends_its_own_bytes_to_other_nodes(ranks: tuple[int, ...], seconds: float) -> None:
    call = make_call("all-to-all", Group((), ranks), 400 * 10**9)
    assert get_seconds(call, DEVICE) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        ((0, 1), 4),  # on one node
        ((0, 4), 40),  # to the next node, through an adapter
        ((0, 2, 4, 6), 40),  # as the slowest transfer of the pipeline
    ],
)
def test_a_transfer_goes_to_one_rank_over_one_link(ranks: tuple[int, ...], seconds: float) -> None:
    send = make_call("send", Group((), ranks), 400 * 10**9)
    assert get_seconds(send, DEVICE) == pytest.approx(seconds)
    # the time of a transfer is part of the time that ranks wait
    assert get_step_time([send], DEVICE) == StepTime(compute=0, exposed=0, overlappable=0)
    assert StepTime(compute=1, exposed=2, overlappable=4, waiting=8).shortest == 12
    assert StepTime(compute=1, exposed=2, overlappable=4, waiting=8).longest == 15


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


def test_what_is_reached_is_less_than_the_data_sheet() -> None:
    product, copy = Operation(312 * 10**12, 0, torch.bfloat16), Operation(0, 10**12, torch.bfloat16)
    assert get_seconds(product, DEVICE, as_reached=True) == pytest.approx(2)
    assert get_seconds(copy, DEVICE, as_reached=True) == pytest.approx(1.25)
    assert get_seconds(make_call("all-gather", NODE, 400 * 10**9), DEVICE, as_reached=True) == pytest.approx(12)
    time = get_step_time([product, copy], DEVICE, as_reached=True)
    assert time.compute == pytest.approx(3.25)


@pytest.mark.parametrize(
    ("head_size", "length", "is_causal", "is_backward", "tflops"),
    [  # FlashAttention-2 in figures 5 and 6 of https://arxiv.org/abs/2407.08608
        (128, 16384, False, False, 370),
        (128, 131072, False, False, 370),
        (128, 16384, True, False, 335),
        (128, 2048, True, False, 298),
        (128, 3000, True, False, 298),
        (128, 64, True, False, 191),
        (64, 8192, False, False, 322),
        (256, 1024, False, False, 313),
        (128, 8192, True, True, 318),
        (64, 512, False, True, 198),
        (96, 4096, False, True, 310),
    ],
)
def test_attention_reaches_what_was_published(
    head_size: int, length: int, is_causal: bool, is_backward: bool, tflops: int
) -> None:
    attention = Attention(head_size, length, 1, is_causal, is_backward)
    operation = Operation(tflops * 10**12, 0, torch.bfloat16, attention=attention)
    assert get_seconds(operation, DEVICES["h100"], as_reached=True) == pytest.approx(1)


@pytest.mark.guarantees("bounds")
def test_no_estimate_is_below_its_bound() -> None:
    for device in DEVICES.values():
        for operation in (
            Operation(10**15, 0, torch.bfloat16),
            Operation(0, 10**12, torch.bfloat16),
            Operation(10**15, 0, torch.bfloat16, attention=Attention(64, 512, 1, True, False)),
            make_call("all-reduce", NODE, 10**12),
        ):
            assert get_seconds(operation, device, as_reached=True) > get_seconds(operation, device)


def test_every_device_of_the_table_has_peaks() -> None:
    for device in DEVICES.values():
        assert device.get_peak_flops(torch.bfloat16) > device.get_peak_flops(torch.float32) > 1e12


def test_a_device_can_be_special() -> None:
    device = get_device("h100", memory=64, network_bandwidth=25, per_node=4)
    assert (device.memory, device.network_bandwidth, device.per_node) == (64 * 2**30, 25e9, 4)
    device = get_device("h100", memory_bandwidth=2400, product_tflops=500, attention_tflops=185)
    product = Operation(500 * 10**12, 0, torch.bfloat16)
    backward = Operation(161 * 10**12, 0, torch.bfloat16, attention=Attention(128, 16384, 1, False, True))
    assert get_seconds(Operation(0, 2400 * 10**9, torch.bfloat16), device) == pytest.approx(1)
    assert get_seconds(product, device, as_reached=True) == pytest.approx(1)
    assert get_seconds(backward, device, as_reached=True) == pytest.approx(1)  # half as fast, as forward is
    with pytest.raises(ValueError, match="device='v100' is not known; use a100, h100, h200, b200, mi300x"):
        get_device("v100")
    with pytest.raises(ValueError, match="memory=0 must be more than 0"):
        get_device("h100", memory=0)

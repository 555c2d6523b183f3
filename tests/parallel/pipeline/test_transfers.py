"""Transfers between the ranks of a pipeline: what is sent arrives, and shapes are told only once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor

from lightning_fsdp2.parallel.pipeline.transfers import Transfers


def make_transfers() -> tuple[Transfers, list[Tensor]]:
    """Make transfers between two ranks, and a list of the headers that this rank sends."""
    control: Any = dist.new_group([0, 1], backend="gloo")
    headers: list[Tensor] = []
    send = dist.isend

    def isend(tensor: Tensor, *, group: Any, **options: Any) -> Any:
        if group is control:
            headers.append(tensor)
        return send(tensor, group=group, **options)

    dist.isend = isend
    group: Any = dist.group.WORLD
    return Transfers(group, control, torch.device("cpu")), headers


def make_tensors(number: int, *, length: int = 3) -> list[Tensor]:
    """Make what a stage passes on: hidden states in 16 bits, not contiguous, and a sum."""
    hidden = torch.arange(2.0 * length * 4).view(4, length, 2).transpose(0, 2) + number
    return [hidden.bfloat16(), torch.tensor(number + 0.5, dtype=torch.float64)]


@pytest.mark.guarantees("boundaries")
def test_tensors_of_any_shape_arrive_under_their_tags() -> None:
    def run() -> list[Tensor]:
        transfers, headers = make_transfers()
        if dist.get_rank() == 0:
            for number in range(3):
                transfers.send(make_tensors(number), 1, tag=number, key="short")
            transfers.send(make_tensors(3, length=5), 1, tag=3, key="long")
            transfers.finish()
            assert transfers.elements == 3 * (24 + 1) + 40 + 1
        else:
            arrivals = [transfers.receive(0, tag=number, key="short") for number in range(3)]
            arrivals.append(transfers.receive(0, tag=3, key="long"))
            for number in reversed(range(4)):  # each arrival can be waited for, whatever came before it
                expected = make_tensors(number, length=5 if number == 3 else 3)
                torch.testing.assert_close(arrivals[number].wait(), expected, rtol=0, atol=0)
        return headers

    assert [len(headers) for headers in run_ranks(run, 2)] == [2, 0]


def test_a_message_without_a_key_tells_its_shapes_each_time() -> None:
    def run() -> int:
        transfers, headers = make_transfers()
        for length in (3, 7):
            if dist.get_rank() == 0:
                transfers.send(make_tensors(0, length=length), 1, tag=0)
                transfers.finish()
            else:
                received = transfers.receive(0, tag=0).wait()
                torch.testing.assert_close(received, make_tensors(0, length=length), rtol=0, atol=0)
        return len(headers)

    assert run_ranks(run, 2) == [2, 0]


def test_another_shape_under_the_same_key_is_an_error_of_the_sender() -> None:
    def run() -> None:
        transfers, _ = make_transfers()
        if dist.get_rank() == 0:
            transfers.send(make_tensors(0), 1, tag=0, key="batch")
            with pytest.raises(ValueError, match=r"float16 \(2, 4, 4\), .* had .*bfloat16 \(2, 3, 4\)"):
                transfers.send(make_tensors(0, length=4), 1, tag=1, key="batch")
            transfers.finish()
        else:
            transfers.receive(0, tag=0, key="batch").wait()

    run_ranks(run, 2)

"""Containers of several stages that become one."""

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks

from lightning_fsdp2.checkpoint.stages import send_to_first_stage, unite


def test_the_first_that_has_an_entry_decides_its_value() -> None:
    first, second = {"a": 1, "both": {"x": 1}}, {"b": 2, "both": {"x": 2, "y": 3}}
    assert unite([first, second]) == {"a": 1, "b": 2, "both": {"x": 1, "y": 3}}
    assert unite([[first], [second]]) == [{"a": 1, "b": 2, "both": {"x": 1, "y": 3}}]
    for values in ([[1, 2], [3]], [[1, 2], 3], [3, [1, 2]], [first, 3], [3, first]):
        assert unite(values) == values[0]


def test_the_first_stage_gets_the_tensors_of_all() -> None:
    def run() -> None:
        rank = dist.get_rank()
        own = torch.arange(6.0).view(2, 3).T + rank  # not contiguous
        values = {"all": torch.full((2,), float(rank)), "each": {f"of {rank}": own}, "number": rank}
        united = send_to_first_stage(values, dist.group.WORLD)
        if rank > 0:
            assert united == {}
            return
        assert united["all"].tolist() == [0, 0]
        assert united["number"] == 0
        expected = {
            f"of {other}": [[other, 3 + other], [1 + other, 4 + other], [2 + other, 5 + other]] for other in range(3)
        }
        assert {name: tensor.tolist() for name, tensor in united["each"].items()} == expected

    run_ranks(run, 3)

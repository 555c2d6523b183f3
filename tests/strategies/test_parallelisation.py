"""A module that an earlier Trainer has split into pipeline stages is not split in another way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import nn

from lightning_fsdp2 import FSDP2Config, create_device_mesh
from lightning_fsdp2.strategies.parallelisation import Parallelisation, is_parallelised, set_parallelisation


def run_alone(function: Callable[[], None]) -> None:
    run_ranks(function, 1, group=False)


def make_parallelisation(ranks: int, pp_size: int, **flags: Any) -> Parallelisation:
    """How rank 0 of a world of ``ranks`` parallelises a module. The other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = create_device_mesh(pp_size=pp_size, device_type="cpu")
    return Parallelisation(mesh, FSDP2Config(**flags), has_half_weights=False)


def test_another_number_of_stages_is_seen_where_stages_have_the_same_ranks() -> None:
    def run() -> None:
        module = nn.Linear(2, 2)
        set_parallelisation(module, make_parallelisation(4, pp_size=2))
        assert is_parallelised(module, make_parallelisation(4, pp_size=2))
        message = (
            r"sharded over 2 pipeline stages of DeviceMesh\(.*dp_shard=2.* but this strategy asks for DeviceMesh\("
        )
        with pytest.raises(ValueError, match=message):
            is_parallelised(module, make_parallelisation(2, pp_size=1))
        with pytest.raises(ValueError, match="asks for 4 pipeline stages of DeviceMesh"):
            is_parallelised(module, make_parallelisation(8, pp_size=4))

    run_alone(run)


@pytest.mark.parametrize(
    ("earlier", "current", "message"),
    [
        ({}, {"pp_schedule": "gpipe", "pp_microbatches": 8, "pp_stages_per_rank": 1}, None),
        ({}, {"pp_schedule": "interleaved_1f1b"}, "pp_stages_per_rank=1 by an earlier Trainer, .* asks for 2"),
        ({}, {"pp_layers_per_stage": [1, 2]}, r"pp_layers_per_stage=None by an earlier Trainer, .* asks for \[1, 2\]"),
    ],
    ids=["schedule", "stages", "layers"],
)
def test_the_layers_of_a_rank_stay_and_the_schedule_may_change(
    earlier: dict[str, Any], current: dict[str, Any], message: str | None
) -> None:
    def run() -> None:
        module = nn.Linear(2, 2)
        set_parallelisation(module, make_parallelisation(2, pp_size=2, **earlier))
        parallelisation = make_parallelisation(2, pp_size=2, **current)
        if message is None:
            assert is_parallelised(module, parallelisation)
            return
        with pytest.raises(ValueError, match=message):
            is_parallelised(module, parallelisation)

    run_alone(run)

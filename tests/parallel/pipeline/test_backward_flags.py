"""When the backwards of a batch reduce their gradients."""

import torch
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_fsdp2.parallel.data.gradients import defer_unit_sync
from lightning_fsdp2.parallel.pipeline.backward_flags import BackwardFlags

BACKWARDS = [(False, False), (True, False), (True, True)]
"""Whether a backward ends its stage, and whether it ends the batch."""


def test_units_reduce_when_a_stage_or_the_batch_ends_or_later_if_the_caller_has_deferred_it() -> None:
    def run() -> None:
        module = nn.Linear(2, 2)
        fully_shard(module)
        module(torch.ones(1, 2)).sum().backward()
        group = module._get_fsdp_state()._fsdp_param_group

        def list_flags(*, defers: bool, reduces_each: bool) -> list[tuple[bool, bool]]:
            found = []
            with BackwardFlags([module], defers=defers, reduces_each=reduces_each, frees_once=False) as flags:
                for ends_stage, ends_batch in BACKWARDS:
                    flags.begin_backward(ends_stage=ends_stage, ends_batch=ends_batch)
                    found.append((group.reduce_grads, group.all_reduce_grads))
            return found

        assert list_flags(defers=True, reduces_each=False) == [(False, False), (False, False), (True, True)]
        assert list_flags(defers=True, reduces_each=True) == [(True, False), (True, True), (True, True)]
        for reduces_each in (False, True):
            with defer_unit_sync([module], reduce_scatter=reduces_each):
                assert list_flags(defers=False, reduces_each=reduces_each) == [(reduces_each, False)] * 3

    run_ranks(run, 1)

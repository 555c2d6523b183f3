"""Stacks of layers: what they shard, gather and say about the hidden states between the layers."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor

from lightning_fsdp2.parallel.tensor.stacks import Stack, StackedLayer
from lightning_fsdp2.parallel.tensor.verification import LayerVerification
from lightning_fsdp2.ranks.collectives import Kind
from lightning_fsdp2.ranks.pending_sum import PendingSum


class Recorder:
    """In place of the verification of a layer: it records what it is told."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.lengths: list[int] = []

    def run(self, forward: Callable[..., Any], hidden: Tensor, kind: Kind, *args: Any) -> Any:
        self.kinds.append(kind)
        self.lengths.append(hidden.size(1))
        return forward(*args)


def test_hidden_states_are_a_rank_s_own_as_long_as_the_sequence_is_split() -> None:
    @torch.no_grad()
    def run() -> None:
        recorder, stack = Recorder(), Stack(dist.group.WORLD)
        layer = StackedLayer(stack, None, cast(LayerVerification, recorder), name="layer", is_last=True)
        for length in (4, 3):
            hidden = torch.arange(2.0 * length).view(1, length, 2)
            assert torch.equal(stack.run_first(partial(layer.run, lambda part: part + 1), hidden), hidden + 1)
        assert recorder.lengths == [2, 3]
        assert recorder.kinds == [Kind.OWN, Kind.EITHER]

    run_ranks(run, 2)


def test_recorded_hidden_states_are_whole_also_those_that_are_not_summed_yet() -> None:
    @torch.no_grad()
    def run() -> None:
        stack = Stack(dist.group.WORLD)
        hidden = torch.arange(8.0).view(1, 4, 2)

        def forward() -> tuple[Tensor, tuple[Tensor, ...]]:
            embedded = PendingSum.make(hidden * dist.get_rank(), dist.group.WORLD)
            part = stack.open(hidden)
            return stack.close(part), (embedded, part)

        result, recorded = stack.run_model(forward)
        assert type(recorded[0]) is Tensor
        for value in (result, *recorded):
            assert torch.equal(value, hidden)

    run_ranks(run, 2)

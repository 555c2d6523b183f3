"""What a checkpointed layer keeps of its forward, and finds again in its recomputation."""

from itertools import count

import pytest
from torch import Tensor, ones
from torch.utils.checkpoint import checkpoint

from lightning_fsdp2.modules.kept_results import keep, make_keeping_contexts


def test_recomputations_find_the_results_of_the_forward_in_order() -> None:
    numbers, seen = count(), []

    def layer(hidden: Tensor) -> Tensor:
        seen.append([keep(lambda: next(numbers)) for _ in range(3)])
        return hidden.sin()

    output = checkpoint(
        layer,
        ones(2, requires_grad=True),
        use_reentrant=False,
        context_fn=lambda: make_keeping_contexts(of_operations=True),
    )
    for _ in range(2):
        output.sum().backward(retain_graph=True)
    assert seen == [[0, 1, 2]] * 3
    assert keep(lambda: next(numbers)) == 3, "outside of a layer, nothing is kept"


def test_results_of_operations_are_kept_only_where_they_are_asked_for() -> None:
    numbers = count()
    forward, recomputation = make_keeping_contexts(of_operations=False)
    with forward:
        assert [keep(lambda: next(numbers)), keep(lambda: next(numbers), is_operation=False)] == [0, 1]
    with recomputation:
        assert [keep(lambda: next(numbers)), keep(lambda: next(numbers), is_operation=False)] == [2, 1]


def test_an_inner_layer_keeps_its_own_results() -> None:
    outer, repeated = make_keeping_contexts(of_operations=True)
    inner, _ = make_keeping_contexts(of_operations=True)
    with outer:
        keep(lambda: "first")
        with inner:
            keep(lambda: "inner")
        keep(lambda: "second")
    with repeated:
        assert [keep(str), keep(str)] == ["first", "second"]
        with pytest.raises(RuntimeError, match="a result that its forward has not kept"):
            keep(str)

"""What a checkpointed layer keeps of its forward, and finds again in its recomputation."""

from itertools import count
from threading import Thread

import pytest
from torch import Tensor, ones
from torch.utils.checkpoint import checkpoint

from lightning_fsdp2.modules.kept_results import keep, make_keeping_contexts


def test_recomputations_find_the_results_of_the_forward_in_order() -> None:
    numbers, seen = count(), []

    def layer(hidden: Tensor) -> Tensor:
        seen.append([keep(lambda: next(numbers), is_kept_by_selective=True) for _ in range(3)])
        return hidden.sin()

    output = checkpoint(
        layer,
        ones(2, requires_grad=True),
        use_reentrant=False,
        context_fn=lambda: make_keeping_contexts(is_selective=False),
    )
    for _ in range(2):  # on a GPU, backward runs in a thread of its own
        thread = Thread(target=output.sum().backward, kwargs={"retain_graph": True})
        thread.start()
        thread.join()
    assert seen == [[0, 1, 2]] * 3
    assert keep(lambda: next(numbers), is_kept_by_selective=True) == 3, "outside of a layer, nothing is kept"


def test_results_that_selective_checkpointing_keeps_are_not_kept_twice() -> None:
    numbers = count()
    forward, recomputation = make_keeping_contexts(is_selective=True)
    with forward:
        assert [
            keep(lambda: next(numbers), is_kept_by_selective=True),
            keep(lambda: next(numbers), is_kept_by_selective=False),
        ] == [0, 1]
    with recomputation:
        assert [
            keep(lambda: next(numbers), is_kept_by_selective=True),
            keep(lambda: next(numbers), is_kept_by_selective=False),
        ] == [2, 1]


def test_an_inner_layer_keeps_its_own_results() -> None:
    outer, repeated = make_keeping_contexts(is_selective=False)
    inner, _ = make_keeping_contexts(is_selective=False)
    with outer:
        keep(lambda: "first", is_kept_by_selective=False)
        with inner:
            keep(lambda: "inner", is_kept_by_selective=False)
        keep(lambda: "second", is_kept_by_selective=False)
    with repeated:
        assert [keep(str, is_kept_by_selective=False), keep(str, is_kept_by_selective=False)] == ["first", "second"]
        with pytest.raises(RuntimeError, match="a result that its forward has not kept"):
            keep(str, is_kept_by_selective=False)

"""The masks of context parallel models: what a mask function is asked, how often, and what it is taken for."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.models import LLAMA, make_causal_lm
from helpers.ranks import run_ranks
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    padding_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from lightning_fsdp2.parallel.context import attention as cp_attention
from lightning_fsdp2.parallel.context.attention import install_attention, run_sharded

LENGTH = 64


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    cp_attention._find_window_once.cache_clear()
    yield
    cp_attention._find_window_once.cache_clear()


OPTIONS: dict[str, Any] = {"batch_size": 1, "documents": None, "padding": None, "method": "allgather"}


def get_window(make_function: Callable[[], Any], length: int = LENGTH) -> tuple[int | None, int]:
    """The window that is found, and how many operations it took."""
    with run_sharded("A model", torch.arange(length), group=dist.group.WORLD, **OPTIONS), StepCounter() as counter:
        running = cp_attention._running.get()
        assert running is not None
        window = cp_attention._get_window(make_function(), running)
    return window, counter.operations.total()


@pytest.mark.guarantees("cached-masks")
def test_masks_of_one_kind_are_asked_once() -> None:
    def run() -> None:
        kinds: list[tuple[Callable[[], Any], int | None]] = [
            (lambda: causal_mask_function, None),
            (lambda: sliding_window_causal_mask_function(8), 8),
            (lambda: sliding_window_causal_mask_function(9), 9),
            (lambda: and_masks(causal_mask_function, sliding_window_overlay(8)), 8),
            (lambda: sliding_window_causal_mask_function(2 * LENGTH), None),
        ]
        for make_function, window in kinds:
            found, operations = get_window(make_function)
            assert (found, operations > 0) == (window, True)
        for make_function, window in kinds:
            assert get_window(make_function) == (window, 0)
        assert get_window(kinds[1][0], 4)[0] is None, "of another length"
        assert get_window(kinds[1][0], 4) == (None, 0)

    run_ranks(run, 1)


def test_masks_that_read_tensors_are_asked_every_time() -> None:
    def run() -> None:
        padding = torch.ones(1, LENGTH, dtype=torch.bool)
        make_function = lambda: and_masks(causal_mask_function, padding_mask_function(padding))  # noqa: E731
        assert all(get_window(make_function)[1] > 0 for _ in range(2))
        padding[0, 5] = False
        with pytest.raises(ValueError, match="neither causal nor a causal sliding window"):
            get_window(make_function)

    run_ranks(run, 1)


def test_masks_of_others_are_asked_every_time() -> None:
    def run() -> None:
        size = 8

        def see(batch: int, head: int, query: Tensor, keys: Tensor) -> Tensor:
            return (keys <= query) & (keys > query - size)

        assert get_window(lambda: see)[0] == 8
        size = 9
        assert get_window(lambda: see)[0] == 9

    run_ranks(run, 1)


@pytest.mark.parametrize(
    "make_function",
    [
        lambda: bidirectional_mask_function,
        lambda: chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
    ],
    ids=["bidirectional", "chunked"],
)
def test_other_masks_are_refused_every_time(make_function: Callable[[], Any]) -> None:
    def run() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="cp_size=1: the attention mask of A model is neither causal nor"):
                get_window(make_function)

    run_ranks(run, 1)


def test_models_compute_what_they_did_outside_of_a_split_forward_and_own_masks_are_refused_inside() -> None:
    def run() -> None:
        model = make_causal_lm(LLAMA)
        tokens = torch.arange(3, 11)[None]
        mask = {"inputs_embeds": torch.zeros(1, 8, 32), "attention_mask": None, "past_key_values": None}
        sees_no_more = {"or_mask_function": lambda batch, head, query, key: query < 0}
        expected = model(tokens).logits
        install_attention(model.config)
        assert torch.equal(model(tokens).logits, expected)
        create_causal_mask(model.config, **mask, **sees_no_more)
        with run_sharded("A model", torch.arange(8), group=dist.group.WORLD, **OPTIONS):
            create_causal_mask(model.config, **mask)
            with pytest.raises(ValueError, match="A model modifies the causal mask with its own function"):
                create_causal_mask(model.config, **mask, **sees_no_more)

    run_ranks(run, 1)

"""What the devices' kernels are called with, without the devices: fake tensors go through the kernels' own checks."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fsdp2.compat.attention_kernels import attend, attend_backward

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA")
    ),
]

BATCH, HEADS = 2, 4
SIZES = [(64, 64), (48, 32), (7, 7), (288, 288)]
"""Dim of queries and keys, and of values."""


@pytest.fixture
def fake_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        yield


@pytest.mark.usefixtures("fake_tensors")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seen", ["all", "causal", "mask"])
def test_results_and_gradients_have_the_shapes_of_what_was_given(device: str, seen: str) -> None:
    for dtype, (size, value_size) in itertools.product((torch.float32, torch.bfloat16), SIZES):
        queries, keys = 33, 33 if seen == "causal" else 71
        # position by position in memory, as models and gathers have it
        query, key, value, output, gradient = (
            torch.empty(BATCH, length, HEADS, dim, dtype=dtype, device=device).transpose(1, 2)
            for length, dim in (
                (queries, size),
                (keys, size),
                (keys, value_size),
                (queries, value_size),
                (queries, value_size),
            )
        )
        mask = torch.ones(BATCH, 1, queries, keys, dtype=torch.bool, device=device) if seen == "mask" else None
        result, normalizer = attend(query, key, value, is_causal=seen == "causal", mask=mask, scale=0.5)
        assert result.shape == output.shape
        assert result.dtype == dtype
        assert normalizer.shape == (BATCH, HEADS, queries)
        assert normalizer.dtype == torch.float32
        inputs = (gradient, query, key, value, output, normalizer)
        gradients = attend_backward(*inputs, is_causal=seen == "causal", mask=mask, scale=0.5)
        for part, given in zip(gradients, (query, key, value), strict=True):
            assert part.shape == given.shape
            assert part.dtype == dtype

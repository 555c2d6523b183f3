"""Packed experts are found by what they hold and how they are called."""

import pytest
import torch
from helpers.families import get_mixture_families, make_family_model
from torch import Tensor, nn

from lightning_fsdp2.modules.experts import find_experts


class Experts(nn.Module):
    def __init__(self, number: int, stacked: int) -> None:
        super().__init__()
        self.num_experts = number
        self.weight = nn.Parameter(torch.empty(stacked, 2, 2))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Dense(Experts):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return hidden


@pytest.mark.guarantees("experts-by-structure")
def test_they_hold_one_matrix_per_expert_and_take_three_arguments() -> None:
    found = Experts(4, 4)
    assert find_experts([found, Experts(4, 3), Dense(4, 4), nn.Linear(2, 2)]) == [found]


def test_shared_experts_and_routers_are_none() -> None:
    for family in ("deepseek_v3", "qwen2_moe"):
        assert {
            type(module).__name__.endswith("Experts") for module in find_experts(make_family_model(family).modules())
        } == {True}


@pytest.mark.guarantees("experts-by-structure")
@pytest.mark.slow
def test_families_are_known() -> None:
    assert {"mixtral", "gpt_oss", "nemotron_h", "zaya"} <= set(get_mixture_families())
    assert {"llama", "llama4_text", "longcat_flash"}.isdisjoint(get_mixture_families())

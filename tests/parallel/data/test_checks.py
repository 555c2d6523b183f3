"""Parameters that cannot be sharded are refused by name."""

import pytest
import torch
from torch import nn

from lightning_fsdp2.parallel.data.checks import check_shardable


def test_a_scalar_parameter_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"0\.temperature.*torch\.ones\(1\)"):
        check_shardable(model, "FSDP2")


def test_a_parameter_without_elements_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].prompts = nn.Parameter(torch.empty(0, 4))
    with pytest.raises(ValueError, match=r"parameters without elements, such as 0\.prompts"):
        check_shardable(model, "FSDP2")
    check_shardable(model, "Megatron-FSDP")


def test_parameters_that_share_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    flat = torch.randn(32)  # as in recurrent modules on CUDA: one storage, but no shared elements
    for layer, part in zip(model, flat.split(16), strict=False):
        layer.weight = nn.Parameter(part.view(4, 4))
    check_shardable(model, "FSDP2")
    for view in (model[0].weight.t(), model[0].weight[3:]):
        model[2].weight = nn.Parameter(view)
        with pytest.raises(ValueError, match=r"0\.weight and 2\.weight share memory"):
            check_shardable(model, "FSDP2")


def register(model: nn.Module, *views: torch.Tensor) -> nn.Module:
    for number, view in enumerate(views):
        model.register_parameter(f"part{number}", nn.Parameter(view))
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_interleaved_parts_of_one_weight_share_no_element(device: str) -> None:
    packed = torch.empty(6, 8, device=device, dtype=torch.bfloat16)
    deep = torch.empty(4, 3, 5, device=device)
    for parts in (
        packed.chunk(2, dim=1),
        packed.t().split(3, dim=1),
        [packed[:, number::3] for number in range(3)],
        [packed[:, :3], packed[::2, 3:], packed[1::2, 3:]],
        [*deep.unbind(1), packed],
        [packed[:, :0], packed],  # nothing to share
    ):
        check_shardable(register(nn.Module(), *parts), "Megatron-FSDP")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parts_of_one_weight_that_share_any_element_are_refused_by_name(device: str) -> None:
    packed = torch.empty(6, 8, device=device)
    for first, second, parts in (
        (0, 1, [packed[:, :5], packed[:, 4:]]),
        (0, 1, [packed[:, ::2], packed[:, ::3]]),
        (0, 2, [packed[:, :4], packed[:, 4:], packed[5:, 3:4]]),
        (1, 2, [packed[:, :4], packed[:, 4:], packed[5:, 4:]]),
        (0, 1, [packed, packed.view(torch.int64).view(torch.float32)[1:2]]),
    ):
        with pytest.raises(ValueError, match=f"part{first} and part{second} share memory"):
            check_shardable(register(nn.Module(), *parts), "FSDP2")


def test_sparse_gradients_are_refused_and_frozen_tables_have_none() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="embeddings 0 are sparse"):
        check_shardable(model, "FSDP2")
    model[0].requires_grad_(False)
    check_shardable(model, "FSDP2")

"""Autocast around every forward: dtypes that a dispatch mode sees, and gradients no worse than one process's."""

from typing import Any

import pytest
import torch
from helpers.dispatch import Products
from helpers.models import GPT2, LLAMA, PlainTransformer
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients, make_rough_model
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh

GATHERED_IN_FLOAT32 = MixedPrecisionPolicy(None, torch.float32, torch.float32)
GATHERED_IN_BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)


def make_batch() -> dict[str, Tensor]:
    input_ids = torch.randint(3, 101, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_ids, "labels": input_ids}


def parallelize(model: nn.Module, *, tp_size: int = 1, **flags: Any) -> Any:
    config = FSDP2Config(autocast_dtype=torch.bfloat16, **flags)
    return FSDP2Manager(config, create_device_mesh(config, tp_size=tp_size)).parallelize(model)


@pytest.mark.parametrize(
    "layout", [{}, {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["dp2", "tp2", "tp2+sp"]
)
@pytest.mark.parametrize(
    "policy",
    [pytest.param(GATHERED_IN_FLOAT32, marks=pytest.mark.slow), GATHERED_IN_BFLOAT16],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize(
    "config", [pytest.param(LLAMA, id="llama"), pytest.param(GPT2, id="gpt2", marks=pytest.mark.slow)]
)
def test_products_are_in_bfloat16_and_the_residual_stream_is_in_float32(
    config: dict[str, Any], policy: MixedPrecisionPolicy, layout: dict[str, Any]
) -> None:
    def run() -> None:
        model = parallelize(make_rough_model(config), mp_policy=policy, **layout)
        layers = model.model.layers if config is LLAMA else model.transformer.h
        residuals = []
        for layer in layers:
            layer.register_forward_hook(lambda module, args, output: residuals.append(output))
        with Products() as products:
            output = model(**make_batch(), use_cache=False)
            output.loss.backward()
        residuals = [value if isinstance(value, Tensor) else value[0] for value in residuals]
        assert {residual.dtype for residual in residuals} == {torch.float32}
        assert products.dtypes == {torch.bfloat16}
        assert output.logits.dtype is torch.float32
        assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()} == {torch.float32}

    run_ranks(run, 2)


def test_without_an_output_dtype_the_residual_stream_is_that_of_the_weights() -> None:
    def run() -> None:
        model = parallelize(make_rough_model(LLAMA), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        residuals = []
        model.model.layers[0].register_forward_hook(lambda module, args, output: residuals.append(output.dtype))
        model(**make_batch(), use_cache=False)
        assert residuals == [torch.bfloat16]

    run_ranks(run, 1)


@pytest.mark.parametrize("mode", [pytest.param(False, marks=pytest.mark.slow), "full"])
def test_the_gradient_error_is_that_of_one_process_in_autocast(mode: Any) -> None:
    def compute(model: Any) -> Tensor:
        model(**make_batch(), use_cache=False).loss.backward()
        return torch.cat([gradient.flatten() for gradient in get_gradients(model).values()])

    def run() -> None:
        exact = compute(make_rough_model(LLAMA))
        with torch.autocast("cpu", torch.bfloat16):
            alone = compute(make_rough_model(LLAMA))
        flags = {"mp_policy": GATHERED_IN_FLOAT32, "activation_checkpointing": mode}
        for layout in ({}, {"tp_size": 2, "sequence_parallel": True}):
            actual = compute(parallelize(make_rough_model(LLAMA), **flags, **layout))
            assert 0 < (actual - exact).norm() <= 1.25 * (alone - exact).norm()

    run_ranks(run, 2)


def test_a_plain_model_and_the_end_of_a_forward() -> None:
    def run() -> None:
        model = parallelize(PlainTransformer(), mp_policy=MixedPrecisionPolicy())
        with Products() as products:
            logits = model(torch.arange(6).view(1, 6))
        assert products.dtypes == {torch.bfloat16}
        assert logits.dtype is torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")

    run_ranks(run, 1)


class Scaled(nn.LayerNorm):
    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return super().forward(hidden) * scale


def test_norms_are_called_in_any_way() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.first, self.second = nn.Linear(8, 8), nn.LayerNorm(8, bias=False), Scaled(8)
            nn.init.normal_(self.first.weight)
            nn.init.normal_(self.second.bias)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.project(hidden)
            return self.second(self.first(input=hidden), scale=hidden)

    def run() -> None:
        model = Normed()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.project(torch.ones(2, 8)).float()
        expected = model.second(model.first(hidden), hidden)
        actual = parallelize(model, mp_policy=GATHERED_IN_FLOAT32)(torch.ones(2, 8))
        torch.testing.assert_close(actual, expected)

    run_ranks(run, 1)


def test_parts_of_a_model_called_from_a_hook_run_in_autocast_too() -> None:
    class Ranker(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.lm = make_rough_model(LLAMA)
            self.head = nn.Linear(101, 1)

        def forward(self, **inputs: Any) -> Tensor:
            return self.head(self.lm(**inputs).logits)

    def run() -> None:
        module = parallelize(Ranker(), mp_policy=GATHERED_IN_BFLOAT16)
        inputs = {"input_ids": make_batch()["input_ids"], "use_cache": False}
        module(**inputs)
        with Products() as products, torch.no_grad():
            module.lm.model(**inputs)
            module.head(module.lm(**inputs).logits)
        assert products.dtypes == {torch.bfloat16}

    run_ranks(run, 1)

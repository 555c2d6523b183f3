"""A rank whose batch has no image: an error before the collectives meet, or a dummy image that changes nothing."""

import os
import random
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import LLAMA
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import UserModule, WithModel, make_trainer
from helpers.vision import get_vision_loss, make_image_batch, make_vision_model
from helpers.vision_families import IMAGE
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy
from lightning_fsdp2.data import add_dummy_image
from lightning_fsdp2.parallel.data import branches

FAMILY = "qwen2_vl"
SEEN = ("pixel_values", "image_grid_thw", "mm_token_type_ids")


def make_text_batch(seed: int) -> dict[str, Tensor]:
    batch = make_image_batch(FAMILY, seed)
    return {"input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 9), "labels": batch["labels"]}


def make_dummy() -> dict[str, Tensor]:
    batch = make_image_batch(FAMILY, 99)
    tokens = ("input_ids", "mm_token_type_ids")
    return {name: batch[name][:, 1:7] if name in tokens else batch[name] for name in ("input_ids", *SEEN)}


class Seeing(WithModel):
    make_optimizer = staticmethod(partial(torch.optim.SGD, lr=0.0))

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__(partial(make_vision_model, FAMILY))
        self.is_frozen = is_frozen
        self.gradients: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        super().configure_model()
        self.model.model.visual.requires_grad_(not self.is_frozen)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return get_vision_loss(self.model, batch)

    def on_after_backward(self) -> None:
        named = self.model.named_parameters()
        self.gradients = whole({name: value.grad for name, value in named if value.grad is not None})


def fit(batch: dict[str, Tensor], *, is_compiled: bool = False, **options: Any) -> dict[str, Tensor]:
    module = Seeing(**options)
    strategy = FSDP2Strategy(config=FSDP2Config(activation_checkpointing="full", enable_compile=is_compiled))
    make_trainer(strategy, max_steps=1).fit(module, torch.utils.data.DataLoader([batch], batch_size=None))
    return module.gradients


@pytest.mark.guarantees("batches-without-images")
@pytest.mark.parametrize(
    "options", [{}, {"is_compiled": True}, pytest.param({"is_frozen": True}, marks=pytest.mark.slow)], ids=str
)
def test_ranks_that_run_other_parts_are_told_apart(options: dict[str, bool], compile_without_code: None) -> None:
    def run() -> None:
        batch = make_image_batch(FAMILY, 0) if os.environ["RANK"] == "0" else make_text_batch(1)
        message = (
            r"visual\.blocks\.0 \(ranks 0\); model\.model\.language_model\.layers\.0 \(ranks 1\)\..*add_dummy_image"
        )
        with pytest.raises(RuntimeError, match=message):
            fit(batch, **options)

    run_ranks(run, 2, group=False)


def test_ranks_of_megatron_fsdp_are_told_apart_too() -> None:
    kind = STRATEGIES["megatron_fsdp"]

    def run() -> None:
        batch = make_image_batch(FAMILY, 0) if os.environ["RANK"] == "0" else make_text_batch(1)
        loader = torch.utils.data.DataLoader([batch], batch_size=None)
        with pytest.raises(RuntimeError, match=r"visual\.patch_embed\.proj \(ranks 0\); .*\.layers\.0 \(ranks 1\)\."):
            kind.make_trainer(max_steps=1).fit(Seeing(), loader)

    kind.run(run, 2, group=False)


class WithTower(UserModule):
    """A Hugging Face model with a tower of the user's, which has no list of layers."""

    def build(self) -> None:
        self.tower = torch.nn.Linear(8, 32)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        embedded = self.model.get_input_embeddings()(batch)
        if self.global_rank == 0:
            embedded = embedded + self.tower(torch.ones(8))
        return self.model(inputs_embeds=embedded).logits.square().mean()


def test_a_tower_beside_a_model_is_a_part_too() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match=r"tower \(ranks 0\); model \(ranks 1\)\."):
            make_trainer(max_steps=1).fit(WithTower(), torch.utils.data.DataLoader(torch.ones(2, 4).long()))

    run_ranks(run, 2, group=False)


class WithTail(WithTower):
    """The same, but that it is called last."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(batch).logits.square().mean()
        return loss + self.tower(torch.ones(8)).mean() if self.global_rank == 0 else loss

    validation_step = training_step


@pytest.mark.parametrize(("stage", "other"), [("fit", "the backward pass"), ("validate", "the end of the step")])
def test_a_part_that_is_called_last_is_told_apart_from_what_follows(stage: str, other: str) -> None:
    def run() -> None:
        loader = torch.utils.data.DataLoader(torch.ones(2, 4).long())
        with pytest.raises(RuntimeError, match=rf"tower \(ranks 0\); {other} \(ranks 1\)\."):
            getattr(make_trainer(max_steps=1), stage)(WithTail(), loader)

    run_ranks(run, 2, group=False)


class Draws(UserModule):
    """Each step runs as many layers on all ranks, but draws which; all layers have weights of the same shape."""

    seed = 1

    def build(self) -> None:
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(6))
        self.ran: list[list[int]] = []

    def choose(self) -> list[int]:
        return torch.randperm(6)[:3].tolist()

    def forward(self, batch: Tensor) -> Tensor:
        self.ran.append(self.choose())
        for index in self.ran[-1]:
            batch = self.layers[index](batch)
        return batch


class SkipsByRandom(Draws):
    def choose(self) -> list[int]:
        return [index for index in range(6) if random.random() < 0.7]


class SkipsByNumpy(Draws):
    def choose(self) -> list[int]:
        return [index for index in range(6) if np.random.rand() < 0.7]


@pytest.mark.parametrize("kind", [Draws, SkipsByRandom, pytest.param(SkipsByNumpy, marks=pytest.mark.slow)])
def test_ranks_that_draw_other_layers_are_told_apart_or_share_their_numbers(kind: type[Draws]) -> None:
    """In one list of layers, which ranks otherwise always enter together."""

    def run() -> list[list[int]]:
        loader = torch.utils.data.DataLoader(torch.ones(8, 8))
        message = r"layers\.\d \(ranks \d\); .* \(ranks \d\)\..*random_numbers=\"shared\" of the strategy"
        with pytest.raises(RuntimeError, match=message):
            make_trainer(FSDP2Strategy(timeout=timedelta(seconds=15)), max_steps=3).fit(kind(), loader)
        module = kind()
        make_trainer(FSDP2Strategy(random_numbers="shared"), max_steps=3).fit(module, loader)
        return module.ran

    first, second = run_ranks(run, 2, group=False)
    assert first == second
    assert len({str(layers) for layers in first}) > 1


def test_ranks_of_megatron_fsdp_that_draw_other_layers_are_told_apart_too() -> None:
    kind = STRATEGIES["megatron_fsdp"]

    def run() -> None:
        with pytest.raises(RuntimeError, match=r"random_numbers=\"shared\" of the strategy"):
            kind.make_trainer(max_steps=3).fit(Draws(), torch.utils.data.DataLoader(torch.ones(8, 8)))

    kind.run(run, 2, group=False)


class RunsAll(Draws):
    def choose(self) -> list[int]:
        return list(range(6))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)


def test_single_layers_are_compared_in_the_first_training_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[int]:
        counts: list[int] = []
        compare = branches._Check.compare

        def count(check: Any, index: int) -> None:
            counts.append(index)
            compare(check, index)

        monkeypatch.setattr(branches._Check, "compare", count)
        loader = torch.utils.data.DataLoader(torch.ones(12, 8))
        make_trainer(max_steps=6, limit_val_batches=2, val_check_interval=1).fit(RunsAll(), loader, loader)
        return counts

    assert run_ranks(run, 2, group=False) == [3 * [0, 1, 2, 3, 4, 5, 6]] * 2


def test_a_module_that_goes_through_several_stages_is_checked_once() -> None:
    def run() -> int:
        module = Seeing()
        loader = torch.utils.data.DataLoader([make_image_batch(FAMILY, 0)], batch_size=None)
        for _ in range(2):
            make_trainer(max_steps=1).fit(module, loader)
        hooks = module.model.model.language_model.layers[0]._forward_pre_hooks.values()
        return sum("branches" in hook.__module__ for hook in hooks)

    assert run_ranks(run, 2, group=False) == [1, 1]


@pytest.mark.guarantees("dummy-images")
def test_a_dummy_image_changes_nothing() -> None:
    def run() -> dict[str, Tensor]:
        batch = make_image_batch(FAMILY, 0) if os.environ["RANK"] == "0" else make_text_batch(1)
        return fit(add_dummy_image(batch, make_dummy()))

    def run_alone() -> dict[str, Tensor]:
        model = make_vision_model(FAMILY)
        for batch in (make_image_batch(FAMILY, 0), make_text_batch(1)):
            (get_vision_loss(model, batch) / 2).backward()
        return {f"{name}": value.grad for name, value in model.named_parameters()}

    [gradients, _] = run_ranks(run, 2, group=False)
    [expected] = run_ranks(run_alone, 1)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-7 * largest)


def test_what_a_dummy_adds() -> None:
    batch = {
        "input_ids": torch.ones(2, 3).long(),
        "labels": torch.ones(2, 3).long(),
        "attention_mask": torch.ones(2, 3),
    }
    dummy = {"input_ids": torch.tensor([[7, 8]]), "pixel_values": torch.zeros(1, 3, 4, 4)}
    grown = add_dummy_image(batch, dummy, pad_token_id=5)
    assert grown["input_ids"].tolist() == [[1, 1, 1, 7, 8], [1, 1, 1, 5, 5]]
    assert grown["labels"].tolist() == [[1, 1, 1, -100, -100]] * 2
    assert grown["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert grown["pixel_values"] is dummy["pixel_values"]
    assert add_dummy_image(grown, dummy) == grown
    grid = {"input_ids": torch.tensor([[7, 8, 9]]), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    assert add_dummy_image(batch, grid)["image_grid_thw"] is grid["image_grid_thw"]
    with pytest.raises(ValueError, match="position_ids"):
        add_dummy_image({**batch, "position_ids": batch["labels"]}, dummy)

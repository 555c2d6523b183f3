"""A checkpoint of any mesh is one of every other, packed weights and their optimizer states included."""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cover import Matrix
from helpers.models import GPT2, make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, whole
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.checkpoint import load_checkpoint, save_checkpoint

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "gpt2-tied-packed-qkv": {**GPT2, "tie_word_embeddings": True},
    "qwen3-moe-packed-experts": {
        "model_type": "qwen3_moe",
        **SMALL,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "phi3-packed-rows": {"model_type": "phi3", **SMALL, "intermediate_size": 64},
}
MESHES = {"one": (1, 1), "dp2": (2, 1), "tp2": (1, 2), "dp2-tp2": (2, 2), "tp4": (1, 4)}
"""Data parallel and tensor parallel ranks."""

CELLS = {
    f"{model}-{before}-{after}": (model, before, after)
    for model, before, after in itertools.product(MODELS, MESHES, MESHES)
}


def describe(model: str, before: str, after: str) -> dict[str, Any]:
    """Return the features of a cell."""
    (dp, tp), (dp_after, tp_after) = MESHES[before], MESHES[after]
    return {"model": model, "written: dp": dp, "written: tp": tp, "read: dp": dp_after, "read: tp": tp_after}


MATRIX = Matrix(
    "checkpoints of plain loops",
    {name: describe(*cell) for name, cell in CELLS.items()},
    fast=("qwen3-moe-packed-experts-one-tp2", "gpt2-tied-packed-qkv-tp2-one"),
    costs={name: math.prod(MESHES[after]) for name, (_, _, after) in CELLS.items()},
)
SAVED_AT = 1
STEPS = 3
BATCHES = make_token_batches(STEPS, size=4, ragged=False)

Results = dict[str, Any]
Write = Callable[[str, str], tuple[Path, Results]]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Train a model on a mesh, save on the way and go on to the end; each only once."""

    @cache
    def write(model: str, mesh: str) -> tuple[Path, Results]:
        path = tmp_path_factory.mktemp(f"{model}-{mesh}") / "a.ckpt"
        dp, tp = MESHES[mesh]
        return path, run_ranks(train, dp * tp, MODELS[model], tp, path)[0]

    return write


def train(config: dict[str, Any], tp_size: int, path: Path, *, load: bool = False, **flags: Any) -> Results:
    """Train to the end and save to ``path`` on the way, or go on from there if ``load``."""
    settings = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **flags)
    mesh = create_device_mesh(settings, tp_size=tp_size)
    torch.manual_seed(1 if load else 0)
    model: nn.Module = FSDP2Manager(settings, mesh).parallelize(make_causal_lm(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    if load:
        load_checkpoint(path, model, optimizer)
        saved = whole(dict(model.named_parameters()))
    rows = 4 // mesh["dp_shard"].size()
    start = mesh["dp_shard"].get_local_rank() * rows
    losses = []
    for step in range(SAVED_AT if load else 0, STEPS):
        batch = {name: value[start : start + rows] for name, value in BATCHES[step].items()}
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / torch.distributed.get_world_size())
        if step + 1 == SAVED_AT:
            save_checkpoint(path, model, optimizer)
            saved = whole(dict(model.named_parameters()))
    return {"losses": losses[-(STEPS - SAVED_AT) :], "saved": saved, "weights": whole(dict(model.named_parameters()))}


@pytest.mark.guarantees("any-layout-resumes")
@pytest.mark.parametrize(("model", "before", "after"), MATRIX.list_parameters(CELLS))
def test_training_goes_on_from_the_checkpoint_of_another_mesh(
    model: str, before: str, after: str, write: Write
) -> None:
    path, expected = write(model, before)
    dp, tp = MESHES[after]
    actual = run_ranks(partial(train, MODELS[model], tp, path, load=True), dp * tp)[0]
    assert_goes_on(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["compiled-before", "compiled-after"])
def test_a_checkpoint_of_compiled_layers_is_one_of_others(
    is_first: bool, tmp_path: Path, compile_without_code: None
) -> None:
    compiled = {"enable_compile": True, "activation_checkpointing": "full"}
    before, after = (compiled, {}) if is_first else ({}, compiled)
    config, path = MODELS["phi3-packed-rows"], tmp_path / "a.ckpt"
    expected = run_ranks(partial(train, config, 2, path, **before), 2)[0]
    actual = run_ranks(partial(train, config, 2, path, load=True, **after), 2)[0]
    assert_goes_on(actual, expected)


def assert_goes_on(actual: Results, expected: Results) -> None:
    assert list(actual["saved"]) == list(expected["saved"])
    assert all(torch.equal(weight, expected["saved"][name]) for name, weight in actual["saved"].items())
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    for name, weight in actual["weights"].items():
        assert (weight - expected["weights"][name]).abs().max() <= 5e-6, name

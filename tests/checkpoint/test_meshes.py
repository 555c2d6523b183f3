"""A checkpoint of any mesh is one of every other, packed weights and their optimizer states included."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
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
SAMPLE = [
    ("qwen3-moe-packed-experts", "dp2", "tp4"),
    ("gpt2-tied-packed-qkv", "tp2", "dp2"),
]
BATCHES = make_token_batches(5, size=4, ragged=False)


def run(
    config: dict[str, Any], tp_size: int, load: Path | None, save: Path | None, steps: range, **flags: Any
) -> dict[str, Any]:
    """Train the batches of ``steps``, from the checkpoint ``load`` on, and save at the end."""
    settings = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **flags)
    mesh = create_device_mesh(settings, tp_size=tp_size)
    torch.manual_seed(0 if load is None else 1)
    model: nn.Module = FSDP2Manager(settings, mesh).parallelize(make_causal_lm(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    if load is not None:
        load_checkpoint(load, model, optimizer)
    loaded = whole(dict(model.named_parameters()))
    rows = 4 // mesh["dp_shard"].size()
    start = mesh["dp_shard"].get_local_rank() * rows
    losses = []
    for step in steps:
        batch = {name: value[start : start + rows] for name, value in BATCHES[step].items()}
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / torch.distributed.get_world_size())
    if save is not None:
        save_checkpoint(save, model, optimizer)
    return {"losses": losses, "loaded": loaded, "weights": whole(dict(model.named_parameters()))}


@pytest.mark.guarantees("any-layout-resumes")
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        *(pytest.param(*cell, id="-".join(cell)) for cell in SAMPLE),
        *(
            pytest.param(*cell, id="-".join(("all", *cell)), marks=pytest.mark.slow)
            for cell in itertools.product(MODELS, MESHES, MESHES)
            if cell[1] != cell[2] and cell not in SAMPLE
        ),
    ],
)
def test_training_goes_on_from_the_checkpoint_of_another_mesh(
    model: str, before: str, after: str, tmp_path: Path
) -> None:
    config = MODELS[model]
    (dp, tp), (dp_after, tp_after) = MESHES[before], MESHES[after]
    first = run_ranks(run, dp * tp, config, tp, None, tmp_path / "a.ckpt", range(2))[0]
    expected = run_ranks(run, dp * tp, config, tp, tmp_path / "a.ckpt", None, range(2, 5))[0]
    actual = run_ranks(run, dp_after * tp_after, config, tp_after, tmp_path / "a.ckpt", None, range(2, 5))[0]
    assert all(torch.equal(weight, first["weights"][name]) for name, weight in actual["loaded"].items())
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    for name, weight in actual["weights"].items():
        assert (weight - expected["weights"][name]).abs().max() <= 5e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["compiled-before", "compiled-after"])
def test_a_checkpoint_of_compiled_layers_is_one_of_others(
    is_first: bool, tmp_path: Path, compile_without_code: None
) -> None:
    compiled = {"enable_compile": True, "activation_checkpointing": "full"}
    before, after = (compiled, {}) if is_first else ({}, compiled)
    config = MODELS["phi3-packed-rows"]
    first = run_ranks(partial(run, config, 2, None, tmp_path / "a.ckpt", range(2), **before), 2)[0]
    expected = run_ranks(partial(run, config, 2, tmp_path / "a.ckpt", None, range(2, 5), **before), 2)[0]
    actual = run_ranks(partial(run, config, 2, tmp_path / "a.ckpt", None, range(2, 5), **after), 2)[0]
    assert list(actual["loaded"]) == list(first["weights"])
    assert all(torch.equal(weight, first["weights"][name]) for name, weight in actual["loaded"].items())
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-6)

"""Modules come back from checkpoints of any kind in one process: with the weights that were trained, and all else."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import GPT2, LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import QUIET, whole
from helpers.ranks import run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_fsdp2 import (
    CausalLM,
    CheckpointConfig,
    FSDP2Strategy,
    TextDataModule,
    load_from_checkpoint,
    save_checkpoint,
)

GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BATCHES = make_token_batches(4, ragged=False)
TOKENS = BATCHES[0]["input_ids"]


def train(module: pl.LightningModule, path: Path, **strategy: Any) -> Tensor:
    """Train two steps, save, and return the logits of the trained model."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy.get("strategy") or FSDP2Strategy(**strategy),
        **{**QUIET, "max_steps": 2},
    )
    trainer.fit(module, DataLoader(BATCHES, batch_size=None))
    trainer.save_checkpoint(path)
    return get_logits(module)


def get_logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module.eval()(TOKENS)


def assert_loaded(module: CausalLM, logits: Tensor) -> None:
    assert module.training
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    config = module.model.config
    tied = module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight
    assert tied == bool(config.tie_word_embeddings)
    torch.testing.assert_close(get_logits(module), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", ["sharded", "full"])
@pytest.mark.parametrize(
    ("config", "tp_size"), [(GEMMA, 1), (LLAMA, 2), pytest.param(GPT2, 2, marks=pytest.mark.slow)], ids=["gemma-dp2", "llama-tp2", "gpt2-tp2"]
)
def test_a_model_that_was_sharded(config: dict[str, Any], tp_size: int, format: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint = CheckpointConfig(format=format)
    logits = run_ranks(lambda: train(CausalLM(config=config), path, tp_size=tp_size, checkpoint=checkpoint), 2)[0]
    assert path.is_dir() == (format == "sharded")
    assert_loaded(load_from_checkpoint(CausalLM, path), logits)

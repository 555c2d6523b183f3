"""Training of adapters, for tests of every part that has to do with them."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from helpers.families import make_family_model
from helpers.mesh_runs import RankBatches
from helpers.models import make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, whole
from helpers.user_modules import make_trainer
from lightning_fsdp2 import CausalLM

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"target_modules": ["q_proj", "o_proj", "down_proj", "lm_head"]},
    "qwen3": {"target_modules": "all-linear", "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}
"""Grouped queries and an untied head; norms of queries and keys; one matrix for queries, keys and values, stored
transposed, biases, learned positions and a tied head."""

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
"""Which starts without zeros, so that both halves have gradients."""


def save_base(folder: Path, family: str = "llama", seed: int = 0) -> str:
    torch.manual_seed(seed)
    make_family_model(family).save_pretrained(folder, max_shard_size="20KB")
    return str(folder)


def make_module(base: str, family: str = "llama", *, lora: Any = None, **options: Any) -> CausalLM:
    return CausalLM(
        pretrained=base,
        lora={**LORA, **FAMILIES[family]} if lora is None else lora,
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON),
        decay_norms_and_biases=True,
        **options,
    )


def make_plain(base: str, family: str = "llama", *, lora: Any = None) -> PeftModel:
    """What peft and transformers make of the same in one process."""
    model = AutoModelForCausalLM.from_pretrained(base).train()
    fields = {**LORA, **FAMILIES[family]} if lora is None else lora
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))


def fit(
    module: pl.LightningModule,
    strategy: Any,
    *,
    steps: int = 2,
    alike: bool = False,
    apart: bool = False,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Train and return the Trainer.

    On all ranks on the same batches whatever the mesh, or on one again and again (``alike``); or on batches of their
    own, as the oracle deals them out (``apart``).
    """
    trainer = make_trainer(strategy, max_steps=steps, **options)
    batches = make_token_batches(1 if alike else 8, size=4, ragged=apart) * (8 if alike else 1)
    data = (
        {"datamodule": RankBatches(batches)} if apart else {"train_dataloaders": DataLoader(batches, batch_size=None)}
    )
    trainer.fit(module, ckpt_path=ckpt_path, **data)
    return trainer


def get_weights(module: Any) -> dict[str, Tensor]:
    return whole(module.model.state_dict())


def get_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=make_token_batches(1)[0]["input_ids"], use_cache=False).logits


def assert_equal_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=atol, msg=name)

"""The activations of ``configs/README.md``: what a forward keeps for backward, counted in toy runs of each kind."""

import re
from typing import Any

import pytest
import torch
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.ranks import run_ranks
from helpers.recipes import CONFIGS, get_bytes_per_value
from helpers.user_modules import make_trainer
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from lightning_fsdp2 import (
    CausalLM,
    DDPConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2Strategy,
    MegatronFSDPConfig,
    MegatronFSDPStrategy,
)

TOKENS = 192
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
KINDS: dict[str, tuple[Any, Any, str, Any]] = {
    "fsdp2": (FSDP2Strategy, FSDP2Config, "bf16-mixed", "full"),
    "ddp": (DDPStrategy, DDPConfig, "bf16-mixed", False),
    "ddp, checkpointed": (DDPStrategy, DDPConfig, "bf16-mixed", "full"),
    "megatron_fsdp": (MegatronFSDPStrategy, MegatronFSDPConfig, "bf16-mixed", "full"),
    "quickstart": (FSDP2Strategy, FSDP2Config, "32-true", False),
}


class Kept(CausalLM):
    """Counts the bytes that its forward keeps, each storage once, without weights and their copies in bfloat16."""

    bytes = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        kept: dict[int, Tensor] = {}
        shapes = {shape for weight in self.parameters() for shape in (weight.shape, weight.T.shape)}

        def pack(tensor: Tensor) -> Tensor:
            # what a unit gathers is in storages of its own, and in flat ones
            if TOKENS in tensor.shape and tensor.shape not in shapes:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().training_step(batch, batch_idx)
        self.bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        return loss


def measure(kind: str, layers: int) -> int:
    """The bytes of a forward over one sequence of ``TOKENS``."""
    strategy, config, precision, checkpointing = KINDS[kind]
    module = Kept(config={**LLAMA, "num_hidden_layers": layers})
    chosen = strategy(config=config(activation_checkpointing=checkpointing))
    trainer = make_trainer(chosen, precision=precision, max_epochs=1)
    trainer.fit(module, DataLoader([{"input_ids": torch.arange(TOKENS) % 101}]))
    return module.bytes


@pytest.mark.guarantees("activations-of-recipes")
@pytest.mark.parametrize(
    "kind", ["fsdp2", "ddp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[2:])]
)
def test_a_layer_keeps_as_many_bytes_as_the_readme_says(kind: str) -> None:
    def run() -> int:
        if kind == "megatron_fsdp":
            with cuda_on_cpu():
                return measure(kind, 3) - measure(kind, 1)
        return measure(kind, 3) - measure(kind, 1)

    difference = run_ranks(run, 1, group=False)[0]  # embeddings, logits and what layers share cancel out
    per_value = difference / 2 / TOKENS / LLAMA["hidden_size"]
    strategy, _, precision, checkpointing = KINDS[kind]
    expected = get_bytes_per_value(strategy.__name__, precision, checkpointing, LLAMA)
    # a few float32 per token more: the norms' statistics, and attention's for each head
    assert per_value - expected == pytest.approx(0 if checkpointing else (2 + 6) * 4 / 288)


def test_the_readme_has_these_formulas() -> None:
    text = " ".join((CONFIGS / "README.md").read_text().split())
    two, four, autocast, full = re.search(
        r"(\d) bytes \S+ tokens on a GPU.*?Under autocast \(DDP and Megatron-FSDP\) it is (\d) bytes"
        r".*?`(30 [^`]*)`.*?`(32 [^`]*)` in float32",
        text,
    ).groups()
    values = {"kv": 2, "heads": 6, "intermediate": 768, "hidden": 288}

    def evaluate(formula: str) -> float:
        return eval(formula.replace("\N{MULTIPLICATION SIGN}", "*"), {}, values)

    assert int(two) == get_bytes_per_value("FSDP2Strategy", "bf16-mixed", "full", LLAMA)
    assert int(four) == get_bytes_per_value("DDPStrategy", "bf16-mixed", "full", LLAMA)
    assert evaluate(autocast) == get_bytes_per_value("DDPStrategy", "bf16-mixed", False, LLAMA)
    assert evaluate(full) == get_bytes_per_value("FSDP2Strategy", "32-true", False, LLAMA)

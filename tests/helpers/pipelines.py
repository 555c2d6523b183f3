"""Models and modules to train over pipeline stages."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.models import GPT2, LLAMA
from helpers.oracle import EPSILON, LEARNING_RATE, Batch, LossFunction

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_hidden_layers": 4},
    "gpt2": {**GPT2, "n_layer": 4},
    "qwen3": {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {
        **LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Configs of four layers, by family."""


class LoggingModule(pl.LightningModule):
    """A user's own module, which logs in ``training_step``, returns a mapping, and knows nothing of this package."""

    def __init__(self, make_model: Callable[[], nn.Module], loss: LossFunction) -> None:
        super().__init__()
        self.model, self.loss = make_model(), loss

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        loss_sum, weight = self.loss(self.model, batch)
        loss = loss_sum / weight
        self.log("train/loss", loss, prog_bar=True)
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss_sum, weight = self.loss(self.model, batch)
        self.log("val/loss", loss_sum / weight, batch_size=len(batch["input_ids"]))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).logits

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val or float("inf"), gradient_clip_algorithm)
        self.log("train/gradient_norm", self.trainer.precision_plugin.gradient_norm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def merge_stages(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The tensors of all stages; a copy on several stages must be the same on all of them."""
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, tensors, group=group)
    merged: dict[str, Tensor] = {}
    for stage in stages:
        for name, tensor in stage.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), f"the stages' copies of {name} differ"
    return merged

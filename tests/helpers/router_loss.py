"""The auxiliary loss of routers as transformers computes it in one process."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COEFFICIENT = 0.5
"""Large, so that the loss of the tokens does not hide a wrong auxiliary loss."""


def token_sum_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The losses of tokens, with transformers' own auxiliary loss added to each; its value is left out, as logs do."""
    labels = batch["labels"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    output = model(**inputs, output_router_logits=True, use_cache=False)
    logits = output.logits[:, :-1].flatten(0, 1).float()
    count = (labels[:, 1:] != -100).sum()
    auxiliary = COEFFICIENT * count * output.aux_loss
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") + auxiliary - auxiliary.detach(), count


def mask_padding(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    for index, batch in enumerate(batches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, 7 + index % 5 :] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batches

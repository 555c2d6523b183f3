"""A learning rate schedule that YAML can name; torch's own need objects, and transformers' are functions."""

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["WarmupCosine"]


class WarmupCosine(LambdaLR):
    """Linear warm-up to the optimizer's learning rate, then half a cosine down to a part of it, where it stays.

    The first step already has a learning rate above 0. A resumed run goes on at its step, on the curve of the
    arguments of that run: ``total_steps`` may change. The cosine is that of `SGDR <https://arxiv.org/abs/1608.03983>`_.

    Args:
        optimizer: Each of its groups has its own learning rate to warm up to.
        warmup_steps: Optimizer steps until the full learning rate; 0 starts with it.
        total_steps: Optimizer steps until the lowest learning rate, those of the warm-up included.
        min_ratio: The lowest learning rate as a part of the full one.

    Raises:
        ValueError: When the steps or the ratio are out of their range.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int, total_steps: int, min_ratio: float = 0.1) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"WarmupCosine(warmup_steps={warmup_steps}, total_steps={total_steps}): the warm-up, of 0 steps or"
                " more, is the first part of the steps; use fewer warmup_steps or more total_steps."
            )
        if not 0 <= min_ratio <= 1:
            raise ValueError(f"WarmupCosine(min_ratio={min_ratio}) must be from 0 to 1; use 0.1 for a tenth.")
        # a partial's arguments are not part of `state_dict`, so that those of the running config hold
        factor = partial(_get_factor, warmup_steps=warmup_steps, total_steps=total_steps, min_ratio=min_ratio)
        super().__init__(optimizer, factor)


def _get_factor(step: int, *, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """What the learning rate of ``step``, counted from 0, is multiplied by."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2

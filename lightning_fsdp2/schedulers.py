"""A learning rate schedule that YAML can name; torch's own need objects, and transformers' are functions."""

import math
from functools import partial
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["WarmupCosine"]


class WarmupCosine(LambdaLR):
    """Linear warm-up to the optimizer's learning rate, then half a cosine down to a part of it, where it stays.

    The first step already has a learning rate above 0. A resumed run continues at its step, on the curve of its
    current arguments: ``total_steps`` may change. The cosine is that of `SGDR <https://arxiv.org/abs/1608.03983>`_.

    Args:
        optimizer: Optimizer whose groups warm up to their own learning rates.
        warmup_steps: Number of optimizer steps until the full learning rate; 0 starts with it.
        total_steps: Number of optimizer steps until the lowest learning rate, including the warm-up. None for the steps
            of the run, which :class:`~lightning_fsdp2.CausalLM` asks the Trainer for; elsewhere call
            :meth:`fit_to_run`.
        min_ratio: Lowest learning rate as a part of the full one.

    Raises:
        ValueError: When the steps or the ratio are out of range; after the warm-up, when the number of steps of the run
            was never given.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int, total_steps: int | None = None, min_ratio: float = 0.1
    ) -> None:
        if warmup_steps < 0 or (total_steps is not None and warmup_steps >= total_steps):
            raise ValueError(
                f"WarmupCosine(warmup_steps={warmup_steps}, total_steps={total_steps}): the warm-up, of 0 steps or"
                " more, is the first part of the steps; use fewer warmup_steps or more total_steps."
            )
        if not 0 <= min_ratio <= 1:
            raise ValueError(f"WarmupCosine(min_ratio={min_ratio}) must be from 0 to 1; use 0.1 for a tenth.")
        # a partial's arguments are not part of `state_dict`, so those of the current config apply
        factor = partial(_get_factor, warmup_steps=warmup_steps, total_steps=total_steps, min_ratio=min_ratio)
        super().__init__(optimizer, factor)

    def fit_to_run(self, steps: int | float) -> None:
        """End the schedule with a run of ``steps`` optimizer steps, or warn if ``total_steps`` is another number.

        Args:
            steps: ``trainer.estimated_stepping_batches``, which is infinite or below 0 if unknown.

        Raises:
            ValueError: When ``total_steps`` was left out and the number of steps of the run is not known.
        """
        arguments = cast(Any, self.lr_lambdas[0]).keywords
        warmup_steps, total_steps = arguments["warmup_steps"], arguments["total_steps"]
        is_known = 0 <= steps < math.inf
        if total_steps is not None:
            if is_known and steps != total_steps:
                rank_zero_warn(
                    f"WarmupCosine(total_steps={total_steps}) ends {'before' if total_steps < steps else 'behind'} the"
                    f" run, which has {steps} steps; leave total_steps out for a schedule that ends with the run."
                )
            return
        if not is_known:
            raise ValueError(
                "WarmupCosine(total_steps=None) ends with the run, but nobody knows how many steps this one has, whose"
                " data is a stream or which ends after a time; set the Trainer's max_steps, or total_steps."
            )
        if steps <= warmup_steps:
            rank_zero_info(f"WarmupCosine(warmup_steps={warmup_steps}): the run of {steps} steps ends in the warm-up.")
        self.lr_lambdas = [partial(_get_factor, **{**arguments, "total_steps": int(steps)})] * len(self.lr_lambdas)


def _get_factor(step: int, *, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """Return the factor of the learning rate in ``step``, which is counted from 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if step == warmup_steps:
        return 1.0
    if total_steps is None:
        raise ValueError(
            "WarmupCosine(total_steps=None) has not been told how many steps the run has; set total_steps, or call"
            " `fit_to_run(trainer.estimated_stepping_batches)` where the scheduler is made."
        )
    if step >= total_steps:
        return min_ratio
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2

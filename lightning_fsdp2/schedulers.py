"""Learning rate schedule with plain arguments, so that a YAML config can create it.

torch's own schedules need objects as arguments, and the schedules of transformers are functions.
"""

import math
from functools import partial
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["WarmupCosine"]


class WarmupCosine(LambdaLR):
    """Learning rate schedule with a linear warm-up, followed by a cosine decay to ``min_ratio`` of the full rate.

    The full rate is the optimizer's learning rate. The first step already has a rate above 0. After ``total_steps`` the
    rate stays at its minimum. A resumed run continues at the saved step, but uses its own arguments, so it can have a
    different ``total_steps`` from the earlier run. The cosine decay is that of
    `SGDR <https://arxiv.org/abs/1608.03983>`_.

    Args:
        optimizer: Optimizer to schedule. Each of its parameter groups warms up to its own learning rate.
        warmup_steps: Number of optimizer steps until the full learning rate. With 0, the first step has the full rate.
        total_steps: Number of optimizer steps until the lowest learning rate, including the warm-up. None means all
            steps of the run. :class:`~lightning_fsdp2.CausalLM` gets their number from the Trainer; with any other
            module, call :meth:`fit_to_run`.
        min_ratio: Lowest learning rate, as a fraction of the full rate.

    Raises:
        ValueError: When the numbers of steps or the ratio are out of range. Also in the first step after the warm-up,
            when neither ``total_steps`` nor :meth:`fit_to_run` has set the number of steps.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int, total_steps: int | None = None, min_ratio: float = 0.1
    ) -> None:
        if warmup_steps < 0 or (total_steps is not None and warmup_steps >= total_steps):
            raise ValueError(
                f"WarmupCosine(warmup_steps={warmup_steps}, total_steps={total_steps}): warmup_steps must be at least 0"
                " and less than total_steps; use fewer warmup_steps or more total_steps."
            )
        if not 0 <= min_ratio <= 1:
            raise ValueError(
                f"WarmupCosine(min_ratio={min_ratio}) must be from 0 to 1; use 0.1 to end at a tenth of the rate."
            )
        # use a partial: `state_dict` does not save a partial's arguments, so a resumed run uses its own arguments
        factor = partial(_get_factor, warmup_steps=warmup_steps, total_steps=total_steps, min_ratio=min_ratio)
        super().__init__(optimizer, factor)

    def fit_to_run(self, steps: int | float) -> None:
        """Make the schedule end with the run. If ``total_steps`` is set, only warn when the run has a different length.

        Args:
            steps: Number of the run's optimizer steps: ``trainer.estimated_stepping_batches``, which is infinite or
                below 0 if the number is unknown.

        Raises:
            ValueError: When ``total_steps`` was left out and the number of steps of the run is not known.
        """
        arguments = cast(Any, self.lr_lambdas[0]).keywords
        warmup_steps, total_steps = arguments["warmup_steps"], arguments["total_steps"]
        is_known = 0 <= steps < math.inf
        if total_steps is not None:
            if is_known and steps != total_steps:
                rank_zero_warn(
                    f"WarmupCosine(total_steps={total_steps}) ends {'before' if total_steps < steps else 'after'} the"
                    f" run, which has {steps} steps; leave total_steps out for a schedule that ends with the run."
                )
            return
        if not is_known:
            raise ValueError(
                "WarmupCosine(total_steps=None) ends with the run, but the number of steps of this run is not known:"
                " its data is a stream, or a time limit ends the run. Set max_steps of the Trainer, or total_steps"
                " of WarmupCosine."
            )
        if steps <= warmup_steps:
            rank_zero_info(
                f"WarmupCosine(warmup_steps={warmup_steps}): the run of {steps} steps ends during the warm-up."
            )
        self.lr_lambdas = [partial(_get_factor, **{**arguments, "total_steps": int(steps)})] * len(self.lr_lambdas)


def _get_factor(step: int, *, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """Return the factor by which the full learning rate is multiplied in ``step``, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if step == warmup_steps:
        return 1.0
    if total_steps is None:
        raise ValueError(
            "WarmupCosine(total_steps=None) does not know how many steps the run has; set total_steps, or call"
            " `fit_to_run(trainer.estimated_stepping_batches)` where the scheduler is created."
        )
    if step >= total_steps:
        return min_ratio
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2

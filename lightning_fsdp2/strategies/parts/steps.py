"""The training steps: accumulation of micro-batches, the mean loss of all tokens, and optimizers' states."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.state import check_optimizer_parameters, check_optimizer_states
from lightning_fsdp2.parallel.data.branches import check_branches
from lightning_fsdp2.parallel.loss.token_mean import TokenMean, apply_token_mean_, drop_token_windows
from lightning_fsdp2.strategies.parts.world import World

HAVE_NO_STEP_FOR_SHARDS: tuple[type[Optimizer], ...] = (
    torch.optim.LBFGS,
    torch.optim.Adafactor,
    torch.optim.Rprop,
    ZeroRedundancyOptimizer,
)
"""Optimizers of torch whose first step fails on sharded parameters, up to torch 2.15."""


class Steps:
    """The training steps of a run.

    Args:
        world: The ranks of the run.
        averages_gradients: Whether gradients are the mean over the data parallel ranks; otherwise they are the sum.

    Attributes:
        is_accumulating: Whether the current micro-batch is not followed by an optimizer step.
        token_mean: Mean loss and token count of the last optimizer step, if the module uses
            :func:`~lightning_fsdp2.token_mean_loss`.
    """

    def __init__(self, world: World, *, averages_gradients: bool) -> None:
        self._world = world
        self._averages_gradients = averages_gradients
        self._checked: set[Optimizer] = set()
        self.is_accumulating = False
        self.token_mean: TokenMean | None = None

    def begin_stage(self, module: LightningModule) -> None:
        """Start a stage of the Trainer: forget the optimizers of earlier stages, and losses of an aborted run."""
        self._checked.clear()
        drop_token_windows(module)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run the block as a micro-batch that is not followed by an optimizer step."""
        self.is_accumulating = True
        try:
            yield
        finally:
            self.is_accumulating = False

    def apply_token_mean(self, module: LightningModule) -> None:
        """Scale the gradients of losses that are a mean over the tokens of all ranks and micro-batches."""
        divisor = float(module.trainer.accumulate_grad_batches if module.automatic_optimization else 1)
        if not self._averages_gradients:
            divisor /= self._world.loss_group.size()
        for submodule in module.modules():
            mean = apply_token_mean_(submodule, self._world.loss_group, loss_divisor=divisor)
            if mean is not None:
                self.token_mean = mean

    def tell_branches_apart(self, module: nn.Module, units: Iterable[Any]) -> None:
        """Make data parallel ranks check, before they gather weights, that they all run the same part of the model.

        Their batches differ, and not every batch needs every part.
        """
        if self._world.data_parallel_size > 1 and self._world.control_group is not None:
            check_branches(module, units, self._world.control_group)

    def check_states(self, module: LightningModule, optimizer: Optimizer) -> None:
        """Check the states of ``optimizer`` after its first step."""
        if optimizer not in self._checked:
            check_optimizer_states(module, optimizer)
            self._checked.add(optimizer)


def check_optimizers(
    module: LightningModule, optimizers: Sequence[Optimizer], refused: tuple[type[Optimizer], ...], strategy: str
) -> None:
    """Refuse optimizers that cannot step on the parameters of a sharded module.

    Args:
        module: The sharded module.
        optimizers: The optimizers from its ``configure_optimizers``.
        refused: Classes whose first step would fail.
        strategy: Name of the strategy, for errors.

    Raises:
        ValueError: When an optimizer is of such a class, or has parameters from before the module was sharded.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, refused):
            raise ValueError(
                f"{type(optimizer).__name__} has no step for the shards of {strategy}; use another optimizer, such as"
                " AdamW, or a strategy that does not shard."
            )
        check_optimizer_parameters(module, optimizer)


def check_manual_optimization(module: Any) -> None:
    """Refuse trainable parameters of the LightningModule itself under manual optimisation.

    These parameters are gathered once per training step, in which optimizers may step several times.

    Raises:
        ValueError: When there are such parameters. The message names them.
    """
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    if own and not module.automatic_optimization:
        raise ValueError(
            f"The parameters {', '.join(own)} hang on the LightningModule itself, which cannot be trained under manual"
            " optimisation (`automatic_optimization = False`); put them into a child module with a forward of its own."
        )

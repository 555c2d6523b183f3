"""State of the training steps: gradient accumulation, the mean loss per token, and checks of the optimizers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.state import check_optimizer_states
from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.parallel.loss.token_mean import TokenMean, apply_token_mean_, drop_token_windows
from lightning_fsdp2.strategies.parts.world import World


class Steps:
    """State and checks of the training steps of a run.

    Args:
        world: The ranks of the run.

    Attributes:
        is_accumulating: Whether the current micro-batch ends without an optimizer step.
        is_deferring: Whether the current micro-batch also ends without reducing its gradients.
        token_mean: Mean loss and token count of the last optimizer step, if the module uses
            :func:`~lightning_fsdp2.token_mean_loss`.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._checked: set[Optimizer] = set()
        self._has_told_reader = False
        self.is_accumulating = self.is_deferring = False
        self.token_mean: TokenMean | None = None

    def begin_stage(self, module: LightningModule) -> None:
        """Start a stage of the Trainer: forget the optimizers of earlier stages, and the losses of an aborted stage."""
        self._checked.clear()
        drop_token_windows(module)

    @contextmanager
    def accumulating(self, *, defers: bool = True) -> Iterator[None]:
        """Run the block as a micro-batch that ends without an optimizer step.

        Args:
            defers: Whether it also ends without reducing its gradients.
        """
        self.is_accumulating, self.is_deferring = True, defers
        try:
            yield
        finally:
            self.is_accumulating = self.is_deferring = False

    def reads_gradients(self, trainer: Trainer) -> bool:
        """Return whether a hook may read the gradients of each micro-batch. If so, log it once."""
        owners: list[Any] = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
        readers = [type(owner).__name__ for owner in owners if is_overridden("on_after_backward", owner)]
        if readers and not self._has_told_reader:
            self._has_told_reader = True
            rank_zero_info(
                f"{readers[0]} has a hook `on_after_backward`, which may use gradients, so every micro-batch reduces"
                " gradients, and not only the last one of a step. Use `on_before_optimizer_step` to avoid this."
            )
        return bool(readers)

    def apply_token_mean(self, module: LightningModule, *, averages_gradients: bool) -> None:
        """Scale the gradients to match a loss that is the mean over the tokens of all ranks and micro-batches.

        Args:
            module: Module that is trained.
            averages_gradients: Whether gradients are averaged over the data parallel ranks instead of summed.
        """
        divisor = float(module.trainer.accumulate_grad_batches if module.automatic_optimization else 1)
        if not averages_gradients:
            divisor /= self._world.loss_group.size()
        for submodule in module.modules():
            mean = apply_token_mean_(submodule, self._world.loss_group, loss_divisor=divisor)
            if mean is not None:
                self.token_mean = mean

    def complete_closure(
        self,
        module: LightningModule,
        closure: Callable[[], Any],
        finish_gradients: Callable[[], None],
        wait_for_copies: Callable[[], None],
    ) -> Callable[[], Any]:
        """Extend an optimizer step's closure: scale the gradients, and wait until a background save has copied tensors.

        Args:
            module: Module that is trained.
            closure: Lightning's or the user's closure, which may run forward and backward.
            finish_gradients: Function that checks and scales the gradients under manual optimisation.
            wait_for_copies: Function that waits until a background save has copied the tensors that the step changes.
        """
        is_manual = not module.automatic_optimization
        if is_manual and closure is do_nothing_closure:  # do this now, because some optimizers never call the closure
            finish_gradients()

        def complete() -> Any:
            # wait only after the closure, so that a background save can copy tensors during forward and backward
            output = closure()
            if is_manual and closure is not do_nothing_closure:
                finish_gradients()
            wait_for_copies()
            return output

        return complete

    def check_states(self, module: LightningModule, optimizer: Optimizer) -> None:
        """Check, after the first step of ``optimizer``, that its states can be saved in a checkpoint."""
        if optimizer not in self._checked:
            check_optimizer_states(module, optimizer)
            self._checked.add(optimizer)


def use_own_zero_grad(trainer: Trainer, optimizer: Optimizer, wrapper: LightningOptimizer) -> None:
    """Make Lightning's ``wrapper`` call the ``zero_grad`` of ``optimizer``, which the strategy may have extended."""
    reason = "it would call the method of the optimizer's class, not that of the optimizer"
    get_ledger(trainer).replace(wrapper, "zero_grad", optimizer.zero_grad, reason=reason)

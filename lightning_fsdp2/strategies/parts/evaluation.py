"""Validation, test and prediction steps on several ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.parallel.data.branches import check_end
from lightning_fsdp2.strategies.parts.step_region import StepRegion
from lightning_fsdp2.strategies.parts.world import World


class Evaluation:
    """Runner of validation, test and prediction steps, in which all ranks must run the same number of forwards.

    Args:
        world: The ranks of the run.
        release: Function that reshards the parameters after a step.
    """

    def __init__(self, world: World, release: Callable[[], None]) -> None:
        self._world = world
        self._release = release
        self._predictions = 0
        self._missing: dict[float, int] = {}

    def leave_inference_mode(self, trainer: Any) -> None:
        """Make the Trainer evaluate under ``no_grad`` instead of inference mode, until the strategy's teardown."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            get_ledger(trainer).replace(
                loop, "inference_mode", False, reason="parameters gathered in it could not be trained"
            )

    def begin_predictions(self, batches: list[int | float]) -> None:
        """Find out how many more prediction steps other ranks make than this rank, for each data loader.

        Args:
            batches: This rank's number of batches from each data loader.
        """
        own = torch.tensor(batches, dtype=torch.float64)
        missing = (self._world.find_maximum(batches) - own).nan_to_num(posinf=0.0)
        # In the dict, a key is this rank's total number of steps at the end of a data loader. The value is how often
        # this rank then repeats its last step.
        self._missing = dict(zip(own.cumsum(0).tolist(), missing.int().tolist(), strict=True))
        self._predictions = 0

    def run(self, region: StepRegion, module: nn.Module, step: Callable[[], Any]) -> Any:
        """Run an evaluation step, and then free the gathered weights, since there is no backward.

        Hooks may write to the weights after the step. If the weights were still gathered, hooks would change only a
        copy.
        """
        with _outside_inference_mode(), region():
            output = step()
            check_end(module, "the end of the step")
        self._release()
        return output

    def run_prediction(self, region: StepRegion, module: nn.Module, step: Callable[[], Any]) -> Any:
        """Run a prediction step. After this rank's last batch, repeat the step while other ranks have more batches."""
        predictions = self.run(region, module, step)
        self._predictions += 1
        for _ in range(self._missing.get(self._predictions, 0)):
            # the other ranks need this rank in their collectives, but not the result of this step
            self.run(region, module, step)
        return predictions


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Run the block under ``no_grad`` instead of inference mode.

    A later fit could not train parameters that were gathered in inference mode.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield

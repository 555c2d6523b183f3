"""The steps of a validation, a test or a prediction."""

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
    """The steps of a validation, a test or a prediction, whose forwards are collectives.

    Args:
        world: The ranks of the run.
        release: Function that puts the sharded parameters back after a step.
    """

    def __init__(self, world: World, release: Callable[[], None]) -> None:
        self._world = world
        self._release = release
        self._predictions = 0
        self._missing: dict[float, int] = {}

    def leave_inference_mode(self, trainer: Any) -> None:
        """Let the Trainer evaluate under ``no_grad`` in place of inference mode; its ledger undoes that."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            get_ledger(trainer).replace(loop, "inference_mode", False, reason="what it gathers could not be trained")

    def begin_predictions(self, batches: list[int | float]) -> None:
        """Learn how many steps the other ranks make. ``batches``: this rank's number of batches by data loader."""
        own = torch.tensor(batches, dtype=torch.float64)
        missing = (self._world.find_maximum(batches) - own).nan_to_num(posinf=0.0)
        # keys: this rank's number of steps at the end of each data loader; values: how many more the others make
        self._missing = dict(zip(own.cumsum(0).tolist(), missing.int().tolist(), strict=True))
        self._predictions = 0

    def run(self, region: StepRegion, module: nn.Module, step: Callable[[], Any]) -> Any:
        """Run a step, and then release the gathered weights, which no backward needs.

        Otherwise, hooks that write to the weights after the step would change only a gathered copy.
        """
        with _outside_inference_mode(), region():
            output = step()
            check_end(module, "the end of the step")
        self._release()
        return output

    def run_prediction(self, region: StepRegion, module: nn.Module, step: Callable[[], Any]) -> Any:
        """Run a step of a prediction. After the last one, run along with the ranks that have more batches."""
        predictions = self.run(region, module, step)
        self._predictions += 1
        for _ in range(self._missing.get(self._predictions, 0)):
            self.run(region, module, step)  # only for its collectives
        return predictions


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Run the block under ``no_grad`` instead of inference mode, whose tensors cannot be trained later."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield

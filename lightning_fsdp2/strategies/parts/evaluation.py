"""Validation, test and prediction steps on several ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning_loops import (
    forget_logged_value,
    get_logged_metrics,
    get_metric_states,
    surround_fillers,
)
from lightning_fsdp2.modules.structure import find_metrics
from lightning_fsdp2.parallel.data.branches import check_end
from lightning_fsdp2.strategies.parts.dataloading import count_own_batches
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

    def prepare_loops(self, trainer: Any) -> None:
        """Prepare the Trainer's loops for evaluations, until the strategy's teardown.

        They evaluate under ``no_grad`` instead of inference mode, and what a filler logs does not count.
        """
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            get_ledger(trainer).replace(
                loop, "inference_mode", False, reason="parameters gathered in it could not be trained"
            )

        surround_fillers(trainer, count_own_batches, partial(_without_weight, trainer))

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


@contextmanager
def _without_weight(trainer: Any) -> Iterator[None]:
    """Run the block, and then undo its effect on the module's metrics and attributes, and on the logged values.

    The block still logs, since ranks may reduce a value as soon as it is logged.
    """
    attributes = _get_own_attributes(trainer.lightning_module)
    # a list of pairs, because the hash of a metric changes with its states
    before = [(metric, get_metric_states(metric)) for metric in _find_metrics(trainer)]
    known = {id(metric) for metric, _ in before}
    yield
    for metric, states in before:
        vars(metric).update(states)
    _restore_attributes(trainer.lightning_module, attributes)
    for metric in get_logged_metrics(trainer):
        if id(metric) not in known:
            forget_logged_value(metric)


def _find_metrics(trainer: Any) -> list[Any]:
    logged = get_logged_metrics(trainer)
    return [
        *find_metrics(trainer.lightning_module),
        *logged,
        *(metric.value for metric in logged if not metric.is_tensor),
    ]


def _get_own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return copies of the attributes in which a module may add up results: numbers, tensors, lists and dicts."""
    inherited = vars(LightningModule())
    kinds = (int, float, Tensor, list, dict, type(None))
    own = {name: value for name, value in vars(module).items() if name not in inherited and isinstance(value, kinds)}
    return {name: value.clone() if isinstance(value, Tensor) else _copy_lists(value) for name, value in own.items()}


def _copy_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy_lists(part) for name, part in value.items()}
    return [_copy_lists(part) for part in value] if isinstance(value, list) else value


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name, before in attributes.items():
        value = getattr(module, name)
        if isinstance(before, list | dict) and isinstance(value, list | dict):
            if before:  # a rank without samples keeps what its filler has added, as an empty list may have no mean
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
        else:
            setattr(module, name, before)

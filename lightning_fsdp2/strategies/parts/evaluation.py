"""Validation, test and prediction steps on several ranks."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning_loops import (
    forget_logged_value,
    get_logged_metrics,
    get_metric_states,
    surround_fillers,
)
from lightning_fsdp2.modules.structure import find_metrics, get_hf_models, get_modules
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

        They evaluate under ``no_grad`` instead of inference mode, and what a filler logs or adds up does not count.
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
def _without_weight(trainer: Any, has_samples: bool) -> Iterator[None]:
    """Run the block, and then undo its effect on metrics, logged values, and attributes of modules and callbacks.

    The block still logs, since ranks may reduce a value as soon as it is logged. Its hooks still run, since they may
    call the module, which is a collective.

    Args:
        trainer: Trainer that evaluates.
        has_samples: Whether this rank has samples. If not, what is empty keeps what the block adds, because an empty
            list may have no mean.
    """
    restores = [_remember_attributes(owner, keeps_empty=not has_samples) for owner in _find_owners(trainer)]
    # a list of pairs, because the hash of a metric changes with its states
    before = [(metric, get_metric_states(metric)) for metric in _find_metrics(trainer)]
    known = {id(metric) for metric, _ in before}
    yield
    for metric, states in before:
        vars(metric).update(states)
    for restore in restores:
        restore()
    for metric in get_logged_metrics(trainer):
        if id(metric) not in known:
            forget_logged_value(metric)


def _find_owners(trainer: Any) -> list[Any]:
    """Return the modules and callbacks that may add up results of batches.

    Hugging Face models and other callbacks do not, but may hold tensors that are too large to copy. Callbacks of
    Lightning and of this package do not either, but may note a signal that must not be forgotten.
    """
    module = trainer.lightning_module
    inside = {part for model in get_hf_models(module) for part in model.modules()}
    hooks = [f"on_{stage}_batch_{end}" for stage in ("validation", "test") for end in ("start", "end")]
    callbacks = [
        callback
        for callback in trainer.callbacks
        if type(callback).__module__.partition(".")[0] not in ("lightning", "lightning_fsdp2")
        and any(is_overridden(hook, callback) for hook in hooks)
    ]
    return [*(part for part in get_modules(module) if part not in inside), *callbacks]


def _find_metrics(trainer: Any) -> list[Any]:
    logged = get_logged_metrics(trainer)
    return [
        *find_metrics(trainer.lightning_module),
        *logged,
        *(metric.value for metric in logged if not metric.is_tensor),
    ]


def _remember_attributes(owner: Any, *, keeps_empty: bool) -> Callable[[], None]:
    """Return a function that gives the attributes and buffers of ``owner`` their current values again."""
    inherited = vars(LightningModule())
    attributes = {name: value for name, value in vars(owner).items() if name not in inherited}
    buffers = vars(owner).get("_buffers", {})
    places = [(vars(owner), name, value) for name, value in attributes.items() if isinstance(value, _KINDS)]
    places += [(buffers, name, value) for name, value in buffers.items()]
    contents = [_remember(value, keeps_empty=keeps_empty) for *_, value in places if isinstance(value, _CONTAINERS)]

    def restore() -> None:
        for place, name, value in places:
            place[name] = value
        for restore_content in contents:
            restore_content()

    return restore


_CONTAINERS = (Tensor, np.ndarray, list, deque, dict, set)
"""Types of values that a step may change in place."""

_KINDS = (*_CONTAINERS, int, float, complex, str, tuple, np.generic, type(None))
"""Types of attributes in which a module or a callback may add up results."""


def _remember(value: Any, *, keeps_empty: bool) -> Callable[[], None]:
    """Return a function that gives a value of one of ``_CONTAINERS`` its current content again, at any depth."""
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.is_inference()):
        return lambda: None  # an evaluation cannot change them
    if isinstance(value, Tensor):
        tensor, version = value.clone(), value._version
        return lambda: None if value._version == version else cast(Any, value.copy_(tensor))
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array) if value.flags.writeable else None
    if keeps_empty and not value:
        return lambda: None
    content = value.copy()
    parts = content.values() if isinstance(content, dict) else content
    restores = [_remember(part, keeps_empty=keeps_empty) for part in parts if isinstance(part, _CONTAINERS)]

    def restore() -> None:
        value.clear()
        value.extend(content) if isinstance(value, list | deque) else value.update(content)
        for restore_part in restores:
            restore_part()

    return restore

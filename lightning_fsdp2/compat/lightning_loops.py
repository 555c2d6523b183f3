"""Access to private names of Lightning's loops and their data. Tested with lightning 2.6.6."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_fsdp2.compat.ledger import get_ledger


def surround_data_hooks(trainer: Trainer, surround: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``surround()`` whenever ``fit`` builds its data loaders, and for each validation in ``fit``."""
    loop, ledger = cast(Any, trainer).fit_loop, get_ledger(trainer)
    reason = "Lightning has no hook around what all ranks must draw from the same random numbers"
    for owner, name in ((loop, "setup_data"), (loop.epoch_loop.val_loop, "run")):
        ledger.replace(owner, name, partial(_run_inside, surround, getattr(owner, name)), reason=reason)


def _run_inside(surround: Callable[[], AbstractContextManager[None]], call: Callable[[], Any]) -> Any:
    with surround():
        return call()


def replace_evaluation_sampler(trainer: Trainer, build: Callable[..., Any]) -> None:
    """Let ``build(loader, shuffle=..., **kwargs)`` build the samplers that Lightning gives to evaluation loaders.

    ``kwargs`` are the number of replicas and the rank.
    """
    connector = cast(Any, trainer)._data_connector
    resolve = partial(_resolve_sampler, connector, build)
    reason = "Lightning's sampler repeats samples in an evaluation, and these count twice"
    get_ledger(trainer).replace(connector, "_resolve_sampler", resolve, reason=reason)


def _resolve_sampler(
    connector: Any, build: Callable[..., Any], dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage
) -> Any:
    is_evaluation = mode in (RunningStage.VALIDATING, RunningStage.TESTING)
    if is_evaluation and connector._requires_distributed_sampler(dataloader):
        trainer = connector.trainer
        shuffle = shuffle and not trainer.overfit_batches
        return build(dataloader, shuffle=shuffle, **trainer.distributed_sampler_kwargs)
    return type(connector)._resolve_sampler(connector, dataloader, shuffle=shuffle, mode=mode)


def surround_fillers(
    trainer: Trainer, count_batches: Callable[[Any], float], surround: Callable[[bool], AbstractContextManager[None]]
) -> None:
    """Enter ``surround(has_samples)`` for each batch of a validation or test that only fills up this rank's batches.

    Args:
        trainer: Trainer that runs the stage.
        count_batches: Function that returns the number of batches of a data loader that are no fillers.
        surround: Function that returns the context for the hooks and the step of a filler. Its argument says whether
            this rank also has batches that are no fillers.
    """
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        step = partial(_run_evaluation_step, loop, count_batches, surround)
        reason = "Lightning has no hook around the step and the hooks of a batch"
        get_ledger(trainer).replace(loop, "_evaluation_step", step, reason=reason)


def _run_evaluation_step(
    loop: Any,
    count_batches: Callable[[Any], float],
    surround: Callable[[bool], AbstractContextManager[None]],
    batch: Any,
    batch_idx: int,
    dataloader_idx: int,
    dataloader_iter: Any,
) -> None:
    step = partial(type(loop)._evaluation_step, loop, batch, batch_idx, dataloader_idx, dataloader_iter)
    loaders = loop._combined_loader.flattened
    # if a batch comes from several loaders at once, it is a filler only if all its parts are
    loaders = [loaders[dataloader_idx]] if loop._is_sequential else loaders
    own_batches = max(map(count_batches, loaders))
    if dataloader_iter is None and batch_idx >= own_batches:
        with surround(own_batches > 0):
            step()
    else:
        step()


def get_logged_metrics(trainer: Trainer) -> list[Any]:
    """Return the metrics in which Lightning collects what ``self.log`` has logged since the evaluation began.

    Lightning also holds the metrics of earlier evaluations, which have been reset.
    """
    return [metric for metric in cast(Any, trainer)._results.values() if not metric.has_reset]


def get_metric_states(metric: Metric) -> dict[str, Any]:
    """Return all attributes of ``metric``, with copies of its states, which updates may change in place."""
    states = {name: _copy(getattr(metric, name)) for name in metric._defaults}
    return {**vars(metric), **states}


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def forget_logged_value(metric: Any) -> None:
    """Give a metric of :func:`get_logged_metrics` the states of a metric that has no value yet, if ranks reduce it.

    The metric still takes part when ranks reduce their values.
    """
    if metric.is_tensor and metric.meta.sync.should:
        for name, default in metric._defaults.items():
            setattr(metric, name, default.clone().to(getattr(metric, name).device))


def agree_on_monitored_values(trainer: Trainer, agree: Callable[[str, Any], Any]) -> None:
    """Let ``agree(name, value)`` return the value of a metric that a scheduler such as ``ReduceLROnPlateau`` monitors.

    The arguments are those of this rank. The value is None if this rank has not logged the metric.
    """
    loop = cast(Any, trainer).fit_loop.epoch_loop
    get = partial(type(loop)._get_monitor_value, loop)
    replacement = partial(_get_monitored, get, agree)
    reason = "each rank would set its own learning rate"
    get_ledger(trainer).replace(loop, "_get_monitor_value", replacement, reason=reason)


def _get_monitored(get: Callable[[str], Any], agree: Callable[[str, Any], Any], key: str) -> Any:
    return agree(key, get(key))

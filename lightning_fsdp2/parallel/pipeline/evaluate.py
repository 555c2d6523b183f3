"""Evaluation of a model through all stages of a pipeline, for code that calls the model on all ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp2.modules.structure import get_class_name
from lightning_fsdp2.parallel.pipeline.run import PipelineRun
from lightning_fsdp2.parallel.pipeline.schedule import get_rank


def evaluate_in_stages(run: PipelineRun, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the model's forward through all stages, one after the other, and return its output on all ranks.

    Args:
        run: Runner of this rank's stages.
        forward: The model's forward.
        args: Positional arguments of the forward.
        kwargs: Keyword arguments of the forward.

    Raises:
        ValueError: If gradients are enabled, because a backward would not go through the stages.
    """
    name, ranks = get_class_name(run.split.model), run.group.size()
    if torch.is_grad_enabled():
        raise ValueError(
            f"pp_size={ranks}: {name} is called with gradients outside of `training_step`, but its stages train only in"
            " the order of the schedule. Call it under `torch.no_grad()`, or use pp_size=1."
        )
    output: Any = None
    carried: list[Tensor] = []
    for stage in run.split.own_stages:
        if stage > 0 and get_rank(stage - 1, ranks) != run.group.rank():
            carried = run.transfers.receive(get_rank(stage - 1, ranks), tag=stage - 1).wait()
        with run.run_stage(stage, carried) as passage:
            output = forward(*args, **kwargs)
        if stage < run.last_stage:
            carried = run.collect_outputs(passage)
            if get_rank(stage + 1, ranks) != run.group.rank():
                run.transfers.send(carried, get_rank(stage + 1, ranks), tag=stage)
    run.transfers.finish()
    return _share_output(run, output if run.has_last_stage else None)


def share_from_last_stage(run: PipelineRun, value: Any) -> Any:
    """Return ``value`` of the rank that runs the last stage on all ranks of the pipeline.

    Tensors travel through the CPU, so this is for small results at the end of a step or an epoch.

    Args:
        run: Runner of this rank's stages.
        value: Tensors and other picklable objects in mappings, lists and tuples.
    """
    message = [_move(value, torch.device("cpu")) if run.has_last_stage else None]
    dist.broadcast_object_list(message, group=run.control, group_src=run.last_rank)
    return _move(message[0], run.device)


def _share_output(run: PipelineRun, output: Any) -> Any:
    """Return the output of the last stage on all ranks: its class, its tensors, and whatever else can be pickled."""
    forms = None
    if output is not None:
        items = output.items() if isinstance(output, Mapping) else enumerate(output)
        named = {key: value for key, value in items if value is not None}
        forms = (
            type(output),
            [(key, (value.shape, value.dtype) if isinstance(value, Tensor) else value) for key, value in named.items()],
        )
    message: list[Any] = [forms]
    dist.broadcast_object_list(message, group=run.control, group_src=run.last_rank)
    kind, forms = message[0]
    values: dict[Any, Any] = {}
    for key, form in forms:
        values[key] = form
        if isinstance(form, tuple) and isinstance(form[0], torch.Size):
            shape, dtype = form
            is_here = output is not None
            tensor = named[key].contiguous() if is_here else torch.empty(shape, dtype=dtype, device=run.device)
            dist.broadcast(tensor, group=run.group, group_src=run.last_rank)
            values[key] = tensor
    if output is not None:
        return output
    return kind(**values) if issubclass(kind, Mapping) else kind(values.values())


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    return type(value)(_move(item, device) for item in value) if isinstance(value, list | tuple) else value

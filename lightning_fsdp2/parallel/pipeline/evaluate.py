"""Evaluation of a model through all stages of a pipeline, for code that calls the model on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

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
            output = run.run_forward(forward, *args, **kwargs)
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
    """Return the output of the last stage on all ranks, with its tensors on the device of each rank.

    Args:
        run: Runner of this rank's stages.
        output: Output of the model on the last stage, such as transformers' ``ModelOutput``; None on other stages.

    Raises:
        ValueError: On all ranks, if the output has tensors that are sharded over ranks.
    """
    tensors: list[Tensor] = []

    def describe(tensor: Tensor) -> _Described:
        tensors.append(tensor)
        return _Described(len(tensors) - 1, tensor.shape, tensor.dtype, isinstance(tensor, DTensor))

    message: list[Any] = [apply_to_collection(output, Tensor, describe) if run.has_last_stage else None]
    dist.broadcast_object_list(message, group=run.control, group_src=run.last_rank)

    def receive(described: _Described) -> Tensor:
        if described.is_sharded:
            raise ValueError(
                f"pp_size={run.group.size()} with loss_parallel=True: the model returns logits with a sharded"
                " vocabulary, which cannot be passed on to the other stages in an evaluation. Use loss_parallel=False,"
                " or the validation steps of CausalLM."
            )
        if run.has_last_stage:
            tensor = tensors[described.index].contiguous()
        else:
            tensor = torch.empty(described.shape, dtype=described.dtype, device=run.device)
        dist.broadcast(tensor, group=run.group, group_src=run.last_rank)
        return tensor

    shared = apply_to_collection(message[0], _Described, receive)
    return output if run.has_last_stage else shared


@dataclass(frozen=True)
class _Described:
    """Tensor in a message to other ranks."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    is_sharded: bool


def _move(value: Any, device: torch.device) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().to(device))

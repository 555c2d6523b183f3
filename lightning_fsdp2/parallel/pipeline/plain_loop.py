"""Training over pipeline stages in a plain torch loop, without a Trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.mesh_axes import get_stage_control
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.batches import count_rows, describe_shapes, divide_batch
from lightning_fsdp2.parallel.pipeline.run import PipelineRun
from lightning_fsdp2.parallel.pipeline.schedule import build_orders, check_rows, get_micro_batches
from lightning_fsdp2.ranks.same_batches import check_same_batch


def train_on_stages(model: nn.Module, step: Callable[[Any], Tensor], batch: Any, *, is_last: bool = True) -> Tensor:
    """Run forward and backward of a batch over the stages of a pipeline.

    Afterwards, the gradients are those of one process, ready to be clipped and for the optimizer. The schedule and the
    number of micro-batches are those of the :class:`~lightning_fsdp2.FSDP2Config` with which the model was sharded.

    Args:
        model: Model that :class:`~lightning_fsdp2.FSDP2Manager` has sharded on a mesh with several pipeline ranks.
        step: Function that calls the model on a micro-batch, once, and returns the mean loss of the micro-batch. It
            runs on every stage, but only the last stage runs what follows the model.
        batch: Batch, the same on all stages, with as many rows on all data parallel ranks. Dim 0 of its tensors is
            divided into micro-batches.
        is_last: Whether the optimizer steps after this batch. Enter :func:`~lightning_fsdp2.defer_grad_sync` for the
            batches before.

    Returns:
        The mean loss of the batch on this rank's data, the same on all stages. [] float32.

    Raises:
        ValueError: If the model has no pipeline, the first batch differs between stages, the data parallel ranks have
            other numbers of rows, or the micro-batches do not divide the rows.
    """
    run, total = get_pipeline(model), []
    if not run.has_compared:
        run.has_compared = True
        check_same_batch(batch, [run.control])
    micro_batches = _choose_number(run, count_rows(batch))
    parts = divide_batch(batch, micro_batches)

    def run_step(part: Any) -> Tensor | None:
        loss = step(part)
        if not run.is_on_last_stage:
            return None
        total.append(loss.detach() / micro_batches)
        return loss / micro_batches

    run.execute(
        build_orders(**_get_schedule(run), micro_batches=micro_batches),
        run_step,
        parts,
        key=describe_shapes(parts[0]),
        synchronises=is_last,
        reduces_each=not run.config.defer_fsdp_grad_sync,
    )
    if is_last:
        run.shared.sum_gradients()
    mean = torch.stack(total).sum().float() if total else torch.empty((), device=run.device)
    dist.broadcast(mean, group=run.group, group_src=run.last_rank)
    return mean


def _choose_number(run: PipelineRun, rows: int) -> int:
    """Return the number of micro-batches. Ranks of a stage with other numbers would wait for each other forever.

    Raises:
        ValueError: On all ranks of the stage, if they have batches of other numbers of rows.
    """
    rows_of_stage = torch.tensor([rows, -rows])
    dist.all_reduce(rows_of_stage, op=dist.ReduceOp.MAX, group=get_stage_control(run.device_mesh))
    most, fewest = rows_of_stage[0].item(), -rows_of_stage[1].item()
    if most != fewest:
        raise ValueError(
            f"pp_size={run.group.size()}: the batches of the data parallel ranks have between {fewest} and {most} rows,"
            " but all ranks need equally many micro-batches. Give the DataLoader drop_last=True, or let all ranks read"
            " equally many rows."
        )
    number = get_micro_batches(run.config.pp_microbatches, rows=rows, **_get_schedule(run))
    check_rows(rows, number)
    return number


def _get_schedule(run: PipelineRun) -> dict[str, Any]:
    config = run.config
    return {"schedule": config.pp_schedule, "ranks": run.group.size(), "stages_per_rank": config.stages_per_rank}

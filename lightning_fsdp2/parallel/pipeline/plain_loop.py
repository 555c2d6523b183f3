"""Training over pipeline stages in a plain torch loop, without a Trainer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.batches import count_rows, describe_shapes, divide_batch
from lightning_fsdp2.parallel.pipeline.schedule import build_orders, check_rows


def train_on_stages(
    model: nn.Module,
    step: Callable[[Any], Tensor],
    batch: Any,
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    is_last: bool = True,
) -> Tensor:
    """Run forward and backward of a batch over the stages of a pipeline.

    Afterwards, the gradients are those of one process, ready to be clipped and for the optimizer.

    Args:
        model: Model that :class:`~lightning_fsdp2.FSDP2Manager` has sharded on a mesh with several pipeline ranks.
        step: Function that calls the model on a micro-batch, once, and returns the mean loss of the micro-batch. It
            runs on every stage, but only the last stage runs what follows the model.
        batch: Batch, the same on all stages. Dim 0 of its tensors is divided into micro-batches.
        micro_batches: Number of micro-batches.
        schedule: See ``pp_schedule`` of :class:`~lightning_fsdp2.FSDP2Config`.
        is_last: Whether the optimizer steps after this batch. Enter :func:`~lightning_fsdp2.defer_grad_sync` for the
            batches before.

    Returns:
        The mean loss of the batch on this rank's data, the same on all stages. [] float32.

    Raises:
        ValueError: If the model has no pipeline, or cannot be trained with these numbers.
    """
    run, total = get_pipeline(model), []
    check_rows(count_rows(batch), micro_batches)
    parts = divide_batch(batch, micro_batches)

    def run_step(part: Any) -> Tensor | None:
        loss = step(part)
        if not run.is_on_last_stage:
            return None
        total.append(loss.detach() / micro_batches)
        return loss / micro_batches

    stages = len(run.split.own_stages)
    ranks = run.group.size()
    orders = build_orders(schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages)
    run.execute(orders, run_step, parts, key=describe_shapes(parts[0]), synchronises=is_last)
    if is_last:
        run.shared.sum_gradients()
    mean = torch.stack(total).sum().float() if total else torch.empty((), device=run.device)
    dist.broadcast(mean, group=run.group, group_src=run.last_rank)
    return mean

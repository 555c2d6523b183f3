"""Callback that logs how evenly the tokens are distributed over experts."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_fsdp2.callbacks.expert_counts import ExpertCounts, all_reduce_
from lightning_fsdp2.callbacks.logging_steps import is_logging_step, log_metrics
from lightning_fsdp2.modules.experts import get_optional_expert_mesh
from lightning_fsdp2.modules.stages import get_optional_stages


class ExpertLoad(Callback):
    """Callback that logs, on the Trainer's logging steps, how evenly tokens were distributed over experts.

    The load of an expert is the number of tokens, on all ranks, that were routed to it since the previous logging step.
    For each layer of experts, numbered from 0, the metrics are:

    - ``experts/max_load_<layer>``: the highest load, divided by the mean load (1 for even loads);
    - ``experts/variation_<layer>``: the coefficient of variation of the loads (0 for even loads);
    - ``experts/unused_<layer>``: the share of experts without a token.

    ``experts/max_load``, ``experts/variation`` and ``experts/unused`` are the highest of these values over all layers.
    With expert parallelism, ``experts/rows`` is the number of rows (tokens times experts per token) that a rank
    receives in one forward of a layer, averaged over ranks and layers. ``experts/max_rows`` is the highest number over
    ranks and layers. No token is dropped, and all ranks wait for the rank with the most rows. Both numbers are averages
    over the forwards since the previous logging step, so single forwards may be less even.

    Tokens are counted on the device. On a logging step, there is one all-reduce and one wait for the device; on other
    steps, there is neither.

    Attributes:
        latest: Metrics of the latest logging step.

    Raises:
        ValueError: At the start of training, if the module has no packed experts, or layers with different numbers of
            experts.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._counts: ExpertCounts | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.teardown(trainer, pl_module, "fit")  # an earlier fit may have failed before it removed its hooks
        self._counts = ExpertCounts(pl_module, trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._counts is None or not is_logging_step(trainer):
            return
        forwards, own = self._counts.forwards, self._counts.take()
        rows = _assign_to_ranks(own, [*self._counts.own.values()], getattr(trainer.strategy, "ep_size", 1))
        # a layer is run by the ranks of one pipeline stage, and other stages may have no experts
        forwards_by_layer = own.new_zeros(len(own), 1)
        forwards_by_layer[[*self._counts.own]] = forwards
        numbers = all_reduce_(torch.cat([own, rows, forwards_by_layer], dim=1)).double().cpu()
        loads, rows, forwards_by_layer = numbers.split([own.size(1), rows.size(1), 1], dim=1)
        stages = get_optional_stages(pl_module)
        ranks = trainer.world_size // (1 if stages is None else stages.num_ranks)
        rows = rows * ranks / forwards_by_layer.clamp(min=1)
        self.latest = {**_describe_loads(loads), **_describe_rows(rows, ranks)}
        log_metrics(trainer, self.latest)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._counts is not None:
            self._counts.remove()
            self._counts = None


def _assign_to_ranks(counts: Tensor, own: list[Any], ep_size: int) -> Tensor:
    """Return how many rows this rank sends to each rank, [layers, ranks].

    A token that is routed to k experts makes k rows. Without expert parallelism, the result is [layers, 0].

    Args:
        counts: Number of this rank's tokens for each expert, [layers, experts].
        own: Packed experts of this rank's pipeline stages. There may be none.
        ep_size: Number of expert parallel ranks.
    """
    to_ranks = counts.new_zeros(len(counts), dist.get_world_size() if ep_size > 1 else 0)
    mesh = next(map(get_optional_expert_mesh, own), None)
    if mesh is None:
        return to_ranks
    receivers = torch.tensor(dist.get_process_group_ranks(mesh.get_group()), device=counts.device)
    rows = counts.view(len(counts), mesh.size(), -1).sum(2)
    return to_ranks.index_add(1, receivers, rows)


def _describe_loads(loads: Tensor) -> dict[str, float]:
    """Return the metrics for ``loads``, the tokens of each layer and expert, [layers, experts], float64."""
    mean = loads.mean(1).clamp(min=1e-12)  # no token at all gives zeros
    by_layer = {
        "max_load": loads.amax(1) / mean,
        "variation": loads.std(1, correction=0) / mean,
        "unused": (loads == 0).double().mean(1),
    }
    metrics = {f"experts/{name}": float(values.max()) for name, values in by_layer.items()}
    for name, values in by_layer.items():
        metrics |= {f"experts/{name}_{layer}": value for layer, value in enumerate(values.tolist())}
    return metrics


def _describe_rows(rows: Tensor, ranks: int) -> dict[str, float]:
    """Return the metrics of the rows that each rank received per forward of a layer.

    Args:
        rows: Number of rows, [layers, all ranks], float64.
        ranks: Number of ranks of a pipeline stage. A layer sends rows only to those of its own stage.
    """
    if rows.numel() == 0:
        return {}
    return {"experts/rows": float(rows.sum(1).mean()) / ranks, "experts/max_rows": float(rows.max())}

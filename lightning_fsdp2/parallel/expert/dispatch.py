"""Exchange of tokens between ranks, so that each token reaches the ranks that hold its experts.

A *row* is the hidden state of a token on the way to one of its experts, so a token with k experts is sent as k rows.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp2.compat.torch import all_to_all_tensor, assert_async
from lightning_fsdp2.modules.kept_results import is_keeping, keep
from lightning_fsdp2.ranks.collectives import exchange

_OTHER_EXPERTS = (  # kept short, because torch refuses long messages on CUDA
    "activation_checkpointing: when backward recomputed a layer, its router sent a different number of tokens to some"
    " expert. Use activation_checkpointing=False, or a router whose choice depends only on its inputs."
)


class Dispatcher(Protocol):
    """Interface for exchanging tokens. A faster exchange, such as DeepEP, only has to implement these two methods.

    A method that reads numbers on the host should do so inside
    ``keep(..., is_kept_by_selective=False)`` (:func:`~lightning_fsdp2.modules.kept_results.keep`). Otherwise the host
    waits again when activation checkpointing recomputes the layer.
    """

    num_experts: int
    """Number of experts on all ranks."""

    group: dist.ProcessGroup
    """Ranks that hold the experts."""

    def dispatch(self, hidden: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Send each token to the ranks that hold its experts.

        Args:
            hidden: Hidden states of this rank's tokens [tokens, features].
            indices: Experts of each token [tokens, k]. An index equal to ``num_experts`` stands for no expert.

        Returns:
            The received rows [rows, features], the expert of each row [rows], counted from this rank's first expert,
            and whatever :meth:`combine` needs to send the results back.
        """

    def combine(self, results: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """Send the results of rows back, and add up the results of each token.

        Args:
            results: Result of each received row [rows, features].
            weights: Routing weight of each of a token's experts [tokens, k].
            handle: Third value that :meth:`dispatch` has returned.

        Returns:
            The weighted sum of each token's results [tokens, features].
        """


@dataclass(frozen=True, kw_only=True)
class Route:
    """Record of where a rank's rows were sent, which is needed to send their results back."""

    order: Tensor
    """Position of each sent row among the ``tokens * k`` rows of this rank's tokens [rows], sorted by expert."""

    sent: list[int]
    """Number of rows sent to each rank."""

    received: list[int]
    """Number of rows received from each rank."""


class AllToAll:
    """Dispatcher that uses three all-to-alls: for the numbers of rows, for the rows, and for their results.

    The numbers of rows are copied to the host, because the all-to-alls of rows need them there. This is the only time
    that the host waits for the device. If a layer is recomputed in backward, the numbers of its forward are used again.

    If a layer is compiled, the exchange stays outside its graphs, because a graph cannot contain code that reads
    values on the host.

    Args:
        num_experts: Number of experts on all ranks, which ``group`` divides evenly.
        group: Ranks that hold the experts.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        self.num_experts = num_experts
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(self, hidden: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Send each token to the ranks that hold its experts; see :meth:`Dispatcher.dispatch`."""
        k = indices.size(-1)
        wanted = indices.flatten()
        counts = torch.zeros(self.num_experts + 1, dtype=torch.long, device=wanted.device)
        counts = counts.scatter_add_(0, wanted, torch.ones_like(wanted, dtype=torch.long))
        experts, sent, received = self.exchange_counts(counts[: self.num_experts], wanted.numel())
        # Sorting by expert also sorts by rank, because each rank holds consecutive experts. Tokens that are assigned
        # to no expert come last, and are not sent.
        order = torch.argsort(wanted, stable=True)[: sum(sent)]
        rows = exchange(hidden[order // k], sent, received, self.group)
        return rows, experts, Route(order=order, sent=sent, received=received)

    def exchange_counts(self, counts: Tensor, rows: int) -> tuple[Tensor, list[int], list[int]]:
        """Exchange the numbers of rows between all ranks, so that each rank knows how many rows it will receive.

        A row is the hidden state of a token on the way to one of its experts.

        Args:
            counts: Number of this rank's rows for each expert of all ranks [experts].
            rows: Number of this rank's rows, including rows that are assigned to no expert.

        Returns:
            The expert of each row that this rank will receive [rows], counted from this rank's first expert, and the
            numbers of rows to send to and to receive from each rank.

        Raises:
            RuntimeError: When a layer is recomputed in backward, and an expert gets a different number of this rank's
                rows than in the layer's forward. On a GPU, this is a device-side assertion.
        """
        ranks = self.group.size()
        if is_keeping():
            counts_of_forward = keep(lambda: counts, is_kept_by_selective=False)
            # check in the forward, too, since selective checkpointing allows a recomputation no further operations
            assert_async((counts_of_forward == counts).all(), _OTHER_EXPERTS)
        received = keep(lambda: all_to_all_tensor(counts, self.group), is_kept_by_selective=True).view(ranks, -1)
        rows_sent, rows_received = keep(
            lambda: torch.stack([counts.view(ranks, -1).sum(1), received.sum(1)]).tolist(), is_kept_by_selective=False
        )
        local = torch.arange(received.size(1), device=counts.device).repeat(ranks)
        experts = local.repeat_interleave(received.flatten(), output_size=sum(rows_received))
        return experts, rows_sent, rows_received

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, results: Tensor, weights: Tensor, handle: Route) -> Tensor:
        """Send the experts' results back to the tokens' ranks, and add them up; see :meth:`Dispatcher.combine`."""
        returned = exchange(results, handle.received, handle.sent, self.group)
        rows = returned.new_zeros(weights.numel(), returned.size(-1)).index_copy(0, handle.order, returned)
        return (rows.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)

"""Even routing of tokens to experts, which simulations assume, because their tensors have no values."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import all_to_all_tensor
from lightning_fsdp2.modules.kept_results import keep
from lightning_fsdp2.parallel.expert.apply import get_optional_expert_forward
from lightning_fsdp2.parallel.expert.dispatch import AllToAll


def assume_even_routing(model: nn.Module, *, load: int = 1) -> None:
    """Make the experts of a simulated ``model`` assume that each rank sends equally many tokens to every rank.

    The tensors of a simulation have no values, so the real numbers of tokens cannot be read. With ``load``, this rank
    receives ``load`` times as many tokens as it sends.
    """
    for module in model.modules():
        if (forward := get_optional_expert_forward(module)) is not None:
            forward.dispatcher = EvenAllToAll(forward.dispatcher.num_experts, forward.dispatcher.group, load)


class EvenAllToAll(AllToAll):
    """Dispatcher for simulations, which assumes that every rank sends equally many rows to every rank.

    The tensors of a simulation have no values, so the real numbers of rows are unknown.

    Args:
        num_experts: See :class:`AllToAll`.
        group: See :class:`AllToAll`.
        load: Number of rows that this rank receives, as a multiple of the number that it sends.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, load: int = 1) -> None:
        super().__init__(num_experts, group)
        self.load = load

    def exchange_counts(self, counts: Tensor, rows: int) -> tuple[Tensor, list[int], list[int]]:
        """Run the exchange of :meth:`AllToAll.exchange_counts`, but return an even split of the rows over the ranks.

        The exchanged numbers are ignored, because tensors have no values in a simulation.
        """
        ranks = self.group.size()
        keep(lambda: all_to_all_tensor(counts, self.group), is_kept_by_selective=True)
        sent = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        received = [self.load * number for number in sent]
        experts = torch.arange(sum(received), device=counts.device) % (self.num_experts // ranks)
        return experts, sent, received

"""Auxiliary loss of mixtures of experts, which makes routers send equally many tokens to each expert.

The loss of a micro-batch is ``experts * sum(f * P)``, where ``f`` is the share of the micro-batch's tokens that each
expert gets, and ``P`` is the mean probability that the routers give to the expert (equations 4 to 6 of
https://arxiv.org/abs/2101.03961). Both ``f`` and ``P`` are means over the tokens of all ranks, so the loss differs from
the mean of losses that each rank computes from its own tokens. For a given ``f``, the loss is a sum of one summand per
rank, because ``P`` is such a sum. Only ``P`` has a gradient. So each rank gets ``f`` by communication, and computes the
summand of its own tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class LoadBalance:
    """Auxiliary loss of one micro-batch."""

    summand: Tensor
    """Summand of this rank, with a gradient. The sum over all ranks is the loss. [] float64."""

    loss: Tensor
    """Loss over the tokens of all ranks, without a gradient. [] float64."""

    label_tokens: Tensor
    """Number of tokens with a label in the micro-batch, on all ranks. [] float64."""


def sum_routing(router_logits: Sequence[Tensor], top_k: int, *, attention_mask: Tensor | None = None) -> Tensor:
    """Sum what the auxiliary loss needs to know of this rank's tokens over the layers.

    Args:
        router_logits: Logits of the router of each layer [tokens, experts].
        top_k: Number of experts that each token is sent to.
        attention_mask: 1 for tokens and 0 for padding, which is left out [batch, sequence]. None for no padding.

    Returns:
        For each expert the number of tokens that it gets, then for each expert the sum of its probabilities, which has
        a gradient, and then the number of tokens. [2 * experts + 1] float64.
    """
    experts = router_logits[0].size(-1)
    zeros = router_logits[0].new_zeros(experts, dtype=torch.float64)
    counts, probabilities, tokens = zeros, zeros, zeros[0]
    for logits in router_logits:
        routed = torch.softmax(logits.float(), dim=-1)
        chosen = routed.topk(top_k, dim=-1).indices
        is_token = _get_weights(attention_mask, routed)
        counts = counts.scatter_add(0, chosen.flatten(), is_token.repeat_interleave(top_k))
        probabilities = probabilities + (routed * is_token.unsqueeze(-1)).sum(0)
        tokens = tokens + is_token.sum()
    return torch.cat([counts, probabilities, tokens.unsqueeze(0)])


def compute_load_balance(
    routing: Tensor, label_tokens: Tensor, *, group: dist.ProcessGroup | None = None
) -> LoadBalance:
    """Compute the auxiliary loss over the tokens of all ranks, as transformers' ``load_balancing_loss_func`` does.

    This needs one all-reduce of two numbers per expert. The CPU does not wait for the device.

    Args:
        routing: Sums over all layers; see :func:`sum_routing`.
        label_tokens: Number of this rank's tokens with a label, as a scalar tensor.
        group: Data and context parallel ranks, whose tokens form the micro-batch. None for one process.
    """
    experts = routing.numel() // 2
    probabilities = routing[experts:-1]
    totals = torch.cat([routing.detach(), label_tokens.double().unsqueeze(0)])
    if group is not None:
        dist.all_reduce(totals, group=group)
    loads, all_probabilities, (all_tokens, all_labels) = totals[:experts], totals[experts:-2], totals[-2:]
    weights = experts * loads / all_tokens**2
    return LoadBalance((weights * probabilities).sum(), (weights * all_probabilities).sum(), all_labels)


def _get_weights(attention_mask: Tensor | None, routed: Tensor) -> Tensor:
    """Return a float64 tensor [tokens] that is 1 for each token and 0 for padding."""
    if attention_mask is None:
        return routed.new_ones(routed.size(0), dtype=torch.float64)
    return attention_mask.flatten().to(routed.device, torch.float64)

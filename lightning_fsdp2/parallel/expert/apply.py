"""Entry point of expert parallelism, which distributes the packed experts of a model over ranks.

A module of packed experts holds all experts of a mixture-of-experts layer in stacked parameters.
"""

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lightning_fsdp2.modules.experts import find_experts, get_arguments, set_expert_mesh
from lightning_fsdp2.modules.structure import ModelStructure
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.expert.dispatch import AllToAll, Dispatcher
from lightning_fsdp2.parallel.tensor.parameters import (
    Layout,
    compute_with_local_parameters,
    get_slots,
    shard_parameters,
)
from lightning_fsdp2.ranks.collectives import get_shard_range

_FORWARD_ATTRIBUTE = "_lightning_fsdp2_expert_forward"


def apply_expert_parallel(
    structure: ModelStructure,
    mesh: DeviceMesh,
    tp_mesh: DeviceMesh | None = None,
    *,
    build_dispatcher: Callable[[int, dist.ProcessGroup], Dispatcher] = AllToAll,
) -> None:
    """Distribute the packed experts of a module over the expert parallel ranks.

    Each rank keeps an equal share of every layer's experts, and computes them with the module's own forward, so that
    every ``experts_implementation`` of transformers keeps working. This forward then gets the tokens that any rank
    routes to these experts. Routers and shared experts are not changed.

    The parameters of experts become DTensors on ``mesh``, sharded along dim 0. The gradient of an expert is the sum
    over all tokens that the ranks send to it.

    :func:`~lightning_fsdp2.parallel.expert.checks.check_experts` must have accepted the module.

    Args:
        structure: Structure of a module that contains mixtures of experts. The module is changed in place.
        mesh: 1-D mesh of the expert parallel ranks.
        tp_mesh: 1-D mesh of the tensor parallel ranks. They all have the same tokens, so each rank sends only its part
            of them. Tensor parallelism must be applied after this function is called, and must sum the results of the
            experts over the tensor parallel ranks.
        build_dispatcher: Function that builds the exchange of tokens, given the number of experts of a layer and the
            group of the expert parallel ranks.
    """
    tp_group = None if tp_mesh is None else tp_mesh.get_group()
    for module in find_experts(structure.modules):
        dispatcher = build_dispatcher(module.num_experts, mesh.get_group())
        layouts = dict.fromkeys(get_slots([module]), Layout(placement=Shard(0)))
        shard_parameters(layouts, mesh)
        module.num_experts //= mesh.size()
        compute_with_local_parameters(module, layouts, mesh, modules=[module])
        forward = ExpertParallelForward(get_arguments(module), dispatcher, tp_group)
        wrap_method(module, forward)
        module.__dict__[_FORWARD_ATTRIBUTE] = forward
        set_expert_mesh(module, mesh)


def get_optional_expert_forward(module: nn.Module) -> "ExpertParallelForward | None":
    """Return the wrapper around a module's forward; None if the module has no experts that are distributed."""
    forward: ExpertParallelForward | None = module.__dict__.get(_FORWARD_ATTRIBUTE)
    return forward


class ExpertParallelForward:
    """Wrapper around the forward of packed experts.

    It sends this rank's tokens to the ranks that hold their experts, runs the forward on the tokens that it receives
    for this rank's experts, and sends the results back.

    Args:
        arguments: Names of the forward's arguments: hidden states, indices and weights.
        dispatcher: Object that exchanges tokens between the ranks that hold the experts.
        tp_group: Tensor parallel ranks, which all have the same tokens.
    """

    def __init__(self, arguments: list[str], dispatcher: Dispatcher, tp_group: dist.ProcessGroup | None) -> None:
        self.arguments = arguments
        self.dispatcher = dispatcher
        self.tp_group = tp_group

    def __call__(self, forward: Callable[..., Tensor], /, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the result for this rank's tokens.

        Tensor parallel ranks all have the same tokens, and each rank sends only its part of them to the experts. The
        result is zero for all other tokens, so it must still be summed over the tensor parallel ranks.

        Shapes are [tokens, features] for hidden states and the result, and [tokens, k] for indices and weights.
        """
        hidden, indices, weights = (*args, *(kwargs[name] for name in self.arguments[len(args) :]))
        if self.tp_group is None:
            return self._run(forward, hidden, indices, weights)
        tokens = hidden.size(0)
        start, length = get_shard_range(tokens, self.tp_group.rank(), self.tp_group.size())
        own = [tensor.narrow(0, start, length) for tensor in (hidden, indices, weights)]
        return F.pad(self._run(forward, *own), (0, 0, start, tokens - start - length))

    def _run(self, forward: Callable[..., Tensor], hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        rows, experts, handle = self.dispatcher.dispatch(hidden, indices)
        results = compute_rows(forward, rows, experts)
        # the rank that sent a token also applies the token's routing weights, so the gradient of the router needs no
        # communication
        return self.dispatcher.combine(results, weights, handle).to(hidden.dtype)


def compute_rows(forward: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """Run each row of ``rows`` [rows, features] through its expert. ``experts`` [rows] are the experts' indices."""
    indices = experts.unsqueeze(-1)
    if rows.size(0) > 0:
        return forward(rows, indices, indices.new_ones(indices.shape, dtype=rows.dtype))
    # If this rank has received no rows, a model that loops over its experts would compute nothing. The experts would
    # then have no gradients, and the other ranks would wait for these gradients forever. So compute a dummy row, and
    # drop its result.
    dummy = rows.sum(0, keepdim=True)
    return forward(dummy, indices.new_zeros(1, 1), dummy.new_ones(1, 1))[:0]

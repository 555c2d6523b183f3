"""Entry point of expert parallelism, which finds the packed experts of a model and distributes them over ranks."""

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lightning_fsdp2.modules.experts import find_experts, get_arguments, set_expert_mesh
from lightning_fsdp2.modules.structure import ModelStructure
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.expert.checks import check_experts
from lightning_fsdp2.parallel.expert.dispatch import AllToAll, Dispatcher, EvenAllToAll
from lightning_fsdp2.parallel.tensor.parameters import (
    Layout,
    compute_with_local_parameters,
    get_slots,
    shard_parameters,
)
from lightning_fsdp2.ranks.collectives import get_shard_range

_FORWARD_ATTRIBUTE = "_lightning_fsdp2_expert_forward"


def apply_expert_parallel(structure: ModelStructure, mesh: DeviceMesh, tp_mesh: DeviceMesh | None = None) -> None:
    """Distribute the packed experts of a module over the expert parallel ranks.

    Each rank keeps an equal share of every layer's experts, and computes them with the module's own forward, so that
    every ``experts_implementation`` of transformers keeps working. The forward then takes the tokens of all ranks that
    are routed to these experts. Routers and shared experts are not changed.

    The parameters of experts become DTensors on ``mesh``, sharded along dim 0. Their gradients are sums over the tokens
    of all ranks that send to them.

    Args:
        structure: Structure of a module that contains mixtures of experts. The module is changed in place.
        mesh: 1-D mesh of the expert parallel ranks.
        tp_mesh: 1-D mesh of the tensor parallel ranks. They have the same tokens, and each rank sends its part of these
            tokens. Tensor parallelism must be applied after this pass, and sum the results of experts over its ranks.

    Raises:
        ValueError: If there are no packed experts, if the ranks do not divide their number, or if something else shards
            or quantises them already.
    """
    experts = find_experts(structure.modules)
    check_experts(structure, experts, mesh.size())
    tp_group = None if tp_mesh is None else tp_mesh.get_group()
    for module in experts:
        dispatcher = AllToAll(module.num_experts, mesh.get_group())
        layouts = dict.fromkeys(get_slots([module]), Layout(placement=Shard(0)))
        shard_parameters(layouts, mesh)
        module.num_experts //= mesh.size()
        compute_with_local_parameters(module, layouts, mesh, modules=[module])
        forward = ExpertParallelForward(get_arguments(module), dispatcher, tp_group)
        wrap_method(module, forward)
        module.__dict__[_FORWARD_ATTRIBUTE] = forward
        set_expert_mesh(module, mesh)


def assume_even_routing(model: nn.Module) -> None:
    """Let the experts of a simulated ``model`` exchange tokens without reading how many tokens each expert gets."""
    for module in model.modules():
        forward: ExpertParallelForward | None = module.__dict__.get(_FORWARD_ATTRIBUTE)
        if forward is not None:
            forward.dispatcher = EvenAllToAll(forward.dispatcher.num_experts, forward.dispatcher.group)


class ExpertParallelForward:
    """Wrapper of the forward of packed experts, which takes this rank's tokens and computes this rank's experts.

    Args:
        arguments: Names of the forward's arguments: hidden states, indices and weights.
        dispatcher: Exchange of tokens between the ranks that hold the experts.
        tp_group: Tensor parallel ranks, which all have the same tokens.
    """

    def __init__(self, arguments: list[str], dispatcher: Dispatcher, tp_group: dist.ProcessGroup | None) -> None:
        self.arguments = arguments
        self.dispatcher = dispatcher
        self.tp_group = tp_group

    def __call__(self, forward: Callable[..., Tensor], /, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the result for this rank's tokens. With tensor parallelism, it is a summand.

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
        # the sender applies the routing weights, so the gradient of its router needs no communication
        return self.dispatcher.combine(results, weights, handle).to(hidden.dtype)


def compute_rows(forward: Callable[..., Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """Compute each row [features] of ``rows`` with its expert, an index in ``experts``."""
    indices = experts.unsqueeze(-1)
    if rows.size(0) > 0:
        return forward(rows, indices, indices.new_ones(indices.shape, dtype=rows.dtype))
    # Without a row, models that loop over experts would compute nothing. The experts would then have no gradient, and
    # the other ranks would wait for it forever. So compute one row, and drop its result.
    dummy = rows.sum(0, keepdim=True)
    return forward(dummy, indices.new_zeros(1, 1), dummy.new_ones(1, 1))[:0]

"""Counts of the tokens that are routed to each expert of a mixture-of-experts model."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import is_in_backward
from lightning_fsdp2.mesh import get_optional_mesh
from lightning_fsdp2.modules.experts import get_arguments, get_optional_expert_mesh, is_packed_experts
from lightning_fsdp2.modules.structure import get_hf_models
from lightning_fsdp2.modules.stubs import with_skeletons
from lightning_fsdp2.ranks.collectives import get_shard_range
from lightning_fsdp2.sizes import TENSOR_PARALLEL


class ExpertCounts:
    """Counts of tokens by layer and expert, updated during training by forward hooks on the experts.

    A token that is routed to k experts is counted k times. Counting needs no communication, and the host does not wait
    for the device. When activation checkpointing recomputes a forward, its tokens are not counted again.

    Args:
        module: Module that is trained, after it is sharded.
        trainer: Trainer of the run.

    Raises:
        ValueError: If the module has no packed experts, or layers with different numbers of experts.

    Attributes:
        layers: Modules of packed experts in all pipeline stages, by name. Models that are frozen as a whole are left
            out.
        own: Those of ``layers`` that this rank's pipeline stages run, with their positions in ``layers`` as keys.
        forwards: Number of forwards of each layer that were counted since the last call of :meth:`take`.
    """

    def __init__(self, module: nn.Module, trainer: Trainer) -> None:
        present = set(module.modules())
        with with_skeletons(module):
            self.layers = _find_layers(module)
        self.own = {row: experts for row, experts in enumerate(self.layers.values()) if experts in present}
        self.forwards = 0
        self._trainer = trainer
        numbers = {count_experts(experts) for experts in self.layers.values()}
        if len(numbers) != 1:
            found = f"layers with {sorted(numbers)} experts" if numbers else "no packed experts"
            raise ValueError(
                f"{type(module).__name__} has {found}, but tokens can only be counted for a mixture of experts whose"
                " layers all have the same number of experts. Remove the callback."
            )
        self._counts = torch.zeros(
            len(self.layers), numbers.pop(), dtype=torch.long, device=trainer.strategy.root_device
        )
        mesh = getattr(trainer.strategy, "full_device_mesh", None)
        tp_mesh = None if mesh is None else get_optional_mesh(mesh, TENSOR_PARALLEL)
        self._tp_share = (0, 1) if tp_mesh is None else (tp_mesh.get_local_rank(), tp_mesh.size())
        self._handles = [
            experts.register_forward_pre_hook(self._make_hook(row, get_arguments(experts)[1]), with_kwargs=True)
            for row, experts in self.own.items()
        ]

    def take(self) -> Tensor:
        """Return this rank's counts since the last call, [layers, experts], int64, and reset them to zero.

        The counts of layers that only other pipeline stages run are zero.

        Tensor parallel ranks have the same tokens, and each rank counts a different part of them. So no token is
        counted twice in the sum over all ranks.
        """
        counts = self._counts.clone()
        self._counts.zero_()
        self.forwards = 0
        return counts

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _make_hook(self, row: int, name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def count(experts: nn.Module, args: Any, kwargs: Any) -> None:
            if not (self._trainer.training and torch.is_grad_enabled()):
                return
            is_recomputed = is_in_backward()
            self.forwards += row == next(iter(self.own)) and not is_recomputed
            indices = args[1] if len(args) > 1 else kwargs[name]
            start, length = get_shard_range(indices.size(0), *self._tp_share)
            own = indices.detach().narrow(0, start, length).flatten().long()
            # an index equal to the number of experts means "no expert"; it is counted in an extra entry, dropped below
            counts = self._counts.new_zeros(self._counts.size(1) + 1).scatter_add_(0, own, torch.ones_like(own))
            # When selective checkpointing recomputes a layer in backward, it must see the same operations as in
            # forward. So add the counts in backward too, but multiplied by zero.
            self._counts[row].add_(counts[:-1], alpha=0 if is_recomputed else 1)

        return count


def _find_layers(module: nn.Module) -> dict[str, Any]:
    frozen = {
        inner
        for model in get_hf_models(module)
        if not any(parameter.requires_grad for parameter in model.parameters())
        for inner in model.modules()
    }
    return {
        name: inner
        for name, inner in module.named_modules()
        if inner not in frozen and (get_optional_expert_mesh(inner) is not None or is_packed_experts(inner))
    }


def count_experts(experts: Any) -> int:
    """Return the total number of experts in a layer, including those on other expert parallel ranks."""
    mesh = get_optional_expert_mesh(experts)
    number: int = experts.num_experts
    return number if mesh is None else number * mesh.size()


def all_reduce_(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor

"""Record on a root module of its pipeline stages, and of the parameters and buffers that all stages have together.

On each pipeline rank, the module holds only the tensors of its own stages. Checkpoints, optimizers and norms need the
names of all tensors, in the order that a single process would have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ATTRIBUTE = "_lightning_fsdp2_stages"
_RANKS_ATTRIBUTE = "_lightning_fsdp2_pipeline_ranks"


@dataclass(frozen=True)
class StageTensor:
    """A parameter or buffer of the whole module."""

    shape: torch.Size

    dtype: torch.dtype

    requires_grad: bool

    ranks: tuple[int, ...]
    """Pipeline ranks that hold the tensor, in ascending order."""

    source: str
    """Name under which ``named_parameters()`` or ``named_buffers()`` lists the tensor. For a tied tensor, this may not
    be the name under which it is recorded."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Pipeline stages of a root module, as this pipeline rank sees them."""

    rank: int
    """This pipeline rank."""

    num_ranks: int

    own: tuple[int, ...]
    """Stages of this rank."""

    parameters: dict[str, StageTensor]
    """Parameters of the whole module, by name and in the order of ``named_parameters()``. A tied parameter is listed
    once."""

    state: dict[str, StageTensor]
    """Tensors of the whole module, by name and in the order of ``state_dict()``. A tied tensor is listed under each of
    its names."""

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several ranks hold: their names, and the ranks."""
        return {name: tensor.ranks for name, tensor in self.parameters.items() if len(tensor.ranks) > 1}

    def is_own(self, name: str) -> bool:
        """Return whether this rank holds the tensor ``name``."""
        return self.rank in (self.parameters.get(name) or self.state[name]).ranks

    def is_counted(self, name: str) -> bool:
        """Return whether the parameter ``name`` counts on this rank in a norm over all ranks.

        Copies of a tied parameter count only on the first rank that holds it.
        """
        return self.parameters[name].ranks[0] == self.rank

    def within(self, path: str) -> "Stages":
        """Return the stages of the submodule ``path``, with its own names. An empty path is the root."""
        prefix = f"{path}." if path else ""

        def shorten(tensors: dict[str, StageTensor]) -> dict[str, StageTensor]:
            return {
                name.removeprefix(prefix): replace(tensor, source=tensor.source.removeprefix(prefix))
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }

        return replace(self, parameters=shorten(self.parameters), state=shorten(self.state))


def mark_stages(root: nn.Module, stages: Stages) -> None:
    """Record the stages of ``root``."""
    root.__dict__[_ATTRIBUTE] = stages


def get_optional_stages(root: nn.Module) -> Stages | None:
    """Return the recorded stages of ``root``, or None if it is not divided into stages."""
    stages: Stages | None = root.__dict__.get(_ATTRIBUTE)
    return stages


def describe_tensors(
    root: nn.Module, ranks: Mapping[Tensor, Iterable[int]], num_ranks: int
) -> tuple[dict[str, StageTensor], dict[str, StageTensor]]:
    """Describe the tensors of a whole module.

    Args:
        root: Module that still has all of its parts.
        ranks: Pipeline ranks that will hold each tensor. All ranks hold a tensor that is not a key.
        num_ranks: Number of pipeline ranks.

    Returns:
        :attr:`Stages.parameters` and :attr:`Stages.state`.
    """
    sources = {tensor: name for name, tensor in reversed([*root.named_buffers(), *root.named_parameters()])}

    def describe(name: str, tensor: Any) -> StageTensor:
        return StageTensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            ranks=tuple(sorted(ranks.get(tensor, range(num_ranks)))),
            source=sources.get(tensor, name),
        )

    state = root.state_dict(keep_vars=True)
    return (
        {name: describe(name, parameter) for name, parameter in root.named_parameters()},
        {name: describe(name, tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)},
    )


@dataclass(frozen=True)
class PipelineRanks:
    """Ranks of a pipeline, over which the norm of a model's gradients is summed."""

    group: dist.ProcessGroup
    """Process group of the ranks along the pipeline."""

    device: torch.device
    """Device on which the group communicates."""

    elsewhere: frozenset[nn.Parameter]
    """Parameters of this rank that count on another rank, because several stages hold a copy."""


def set_pipeline_ranks(model: nn.Module, ranks: PipelineRanks) -> None:
    """Make every norm of gradients of ``model`` the norm over all stages of its pipeline."""
    for parameter in model.parameters():
        setattr(parameter, _RANKS_ATTRIBUTE, ranks)


def get_optional_pipeline_ranks(parameters: Iterable[Tensor]) -> PipelineRanks | None:
    """Return what :func:`set_pipeline_ranks` has set on any of ``parameters``, or None."""
    return next(filter(None, (vars(parameter).get(_RANKS_ATTRIBUTE) for parameter in parameters)), None)

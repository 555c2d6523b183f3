"""Sequence parallelism for any stack of decoder layers, derived from the tensor parallel plan alone.

Between the first layer's input and the last layer's output each rank holds its part of the sequence
(https://arxiv.org/abs/2205.05198). Everything outside of the layers sees whole sequences: position ids, masks, rotary
embeddings, final norm and head. Inside a layer

- norms, and everything else that computes position by position, work on the rank's positions;
- every other child is a *region* (attention, MLP, mixture of experts): its hidden states are gathered on entry. If the
  region has exactly one row-wise projection, the projection reduce-scatters the result; otherwise the result is sliced.

On entry a region makes two tensors from the gathered hidden states: *complete*, whose gradient is the same on all
ranks, and *partial*, whose gradients are summands. The region's code sees the complete one, which is right for routers,
gates and everything else that all ranks compute alike. Column-wise projections that are given this very tensor use the
partial one instead. So a dense region costs one all-gather and one reduce-scatter in forward and the same in backward,
without any knowledge of the model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import all_reduce_tensor, get_forward_hooks
from lightning_fsdp2.compat.torch_simulation import FakeTensor
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.tensor.stacks import Stack, get_hidden_states, map_hidden_states, replace_hidden_states
from lightning_fsdp2.parallel.tensor.verification import LayerVerification
from lightning_fsdp2.ranks.collectives import (
    copy_to_ranks,
    gather_for_ranks,
    gather_twice,
    reduce_from_ranks,
    reduce_scatter,
    split,
)
from lightning_fsdp2.ranks.layer_random import LayerRandom
from lightning_fsdp2.ranks.pending_sum import PendingSum


class Scope:
    """The surroundings of a styled module: how its input comes in and how its result goes out.

    This base class is for whole sequences on every rank: for tensor parallelism alone, and modules outside of the
    layers.
    """

    is_scattered = False
    """Whether results are parts of the sequence."""

    def __init__(self, group: dist.ProcessGroup, random: LayerRandom | None = None) -> None:
        self.group = group
        self.random = random

    def enter(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as the input of a module whose columns are sharded over the ranks."""
        self.end_shards()
        return copy_to_ranks(tensor, self.group)

    def share(self, tensor: Tensor) -> Tensor:
        """Return an input that all ranks need and that has no gradient, such as indices of experts."""
        return tensor

    def leave(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' summands of a result."""
        self.end_shards()
        return reduce_from_ranks(tensor, self.group)

    def leave_whole(self, tensor: Tensor) -> Tensor:
        """Add up the ranks' summands of a result that is whole under sequence parallelism too."""
        return reduce_from_ranks(tensor, self.group)

    def begin_shards(self) -> None:
        """Note that from here on ranks hold different activations."""
        if self.random is not None:
            self.random.begin_shards()

    def end_shards(self) -> None:
        """Note that from here on ranks hold the same activations."""
        if self.random is not None:
            self.random.end_shards()


class LayerScope(Scope):
    """Scope of a layer under tensor parallelism alone: projections of one tensor share one gradient all-reduce."""

    def __init__(self, group: dist.ProcessGroup, random: LayerRandom | None, verification: LayerVerification) -> None:
        super().__init__(group, random)
        self.verification = verification
        self._tensor: Tensor | None = None
        self._copy: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        self.end_shards()
        if self._tensor is not tensor or self._copy is None:
            self._tensor, self._copy = tensor, super().enter(tensor)
        return self._copy

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward."""
        hidden = get_hidden_states(args, kwargs) if args or kwargs else None
        try:
            return self.verification.run(forward, hidden, self.verification.returns, *args, **kwargs)
        finally:
            self._tensor = self._copy = None
            self.end_shards()


class EmbeddingScope(Scope):
    """Scope of an input embedding, if the first layer takes only this rank's part of the embedding's result.

    Args:
        group: Process group of the tensor parallel ranks.
        stacks: Stacks whose first layer may take the part.
        embedding: The embedding module.
    """

    def __init__(self, group: dist.ProcessGroup, stacks: list[Stack], embedding: nn.Module) -> None:
        super().__init__(group)
        self.stacks, self.embedding = stacks, embedding
        self._watched: dict[bool, bool] = {}
        """Whether any rank had a user's hook in the first forward with gradients (key True) or without (key False)."""

    def leave_whole(self, tensor: Tensor) -> Tensor:
        running = [stack for stack in self.stacks if stack.is_running]
        # a user's torch.compile around the model would have to trace the subclass
        if not running or torch.compiler.is_compiling():
            return super().leave_whole(tensor)
        is_watched, mode = any(map(_is_foreign, get_forward_hooks(self.embedding))), torch.is_grad_enabled()
        if mode not in self._watched:
            self._watched[mode] = self._agree(is_watched, tensor)
        # a hook may read the result on one rank alone, and that must not start a collective
        if self._watched[mode]:
            return super().leave_whole(tensor)
        pending = PendingSum.make(tensor, self.group, is_watched=is_watched)
        running[-1].embeddings.append(pending.summands)
        return pending

    def _agree(self, is_watched: bool, tensor: Tensor) -> bool:
        """Return whether ``is_watched`` is True on any rank."""
        if isinstance(tensor, FakeTensor):
            return is_watched
        return bool(all_reduce_tensor(torch.tensor(float(is_watched), device=tensor.device), self.group))


class PointwiseScope(Scope):
    """Scope of a styled module that is itself a child of the layer: it gathers its input and scatters its result."""

    is_scattered = True

    def __init__(self, stack: Stack, random: LayerRandom | None) -> None:
        super().__init__(stack.group, random)
        self.stack = stack

    def enter(self, tensor: Tensor) -> Tensor:
        if not self.stack.is_active:
            return super().enter(tensor)
        self.end_shards()
        return gather_for_ranks(tensor, self.stack.get_token_dim(tensor), self.group)

    def share(self, tensor: Tensor) -> Tensor:
        return self.enter(tensor) if self.stack.is_active else tensor

    def leave(self, tensor: Tensor) -> Tensor:
        if not self.stack.is_active:
            return super().leave(tensor)
        self.begin_shards()
        return reduce_scatter(tensor, self.stack.get_token_dim(tensor), self.group)


class RegionScope(Scope):
    """Scope of a region: a child of the layer that sees whole sequences.

    Args:
        stack: Stack of the layer.
        random: Random state of the layer; None if the layer draws no random numbers.
        reduces_once: Whether the region's result comes from one row-wise projection, which can then scatter it.
        takes_residual: Whether the region is also given hidden states to add to its (scattered) result.
        name: Name of the region, for messages.
    """

    def __init__(
        self, stack: Stack, random: LayerRandom | None, *, reduces_once: bool, takes_residual: bool, name: str
    ) -> None:
        super().__init__(stack.group, random)
        self.stack = stack
        self.reduces_once = reduces_once
        self.takes_residual = takes_residual
        self.name = name
        self._complete: Tensor | None = None
        self._partial: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        if self._partial is not None and tensor is self._complete:
            self.end_shards()
            return self._partial
        return super().enter(tensor)

    def leave(self, tensor: Tensor) -> Tensor:
        dim = self.stack.dim
        if not self.stack.is_active:
            return super().leave(tensor)
        # a part of a single position would silently be broadcast against whole sequences
        if not (self.reduces_once and (self.stack.local > 1 or self.takes_residual) and tensor.ndim > dim + 1):
            return super().leave(tensor)
        if tensor.size(dim) != self.stack.whole:
            return super().leave(tensor)
        self.is_scattered = True
        self.begin_shards()
        return reduce_scatter(tensor, dim, self.group)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the region's forward on whole sequences and return this rank's part."""
        if not self.stack.is_active:
            return forward(*args, **kwargs)
        hidden = get_hidden_states(args, kwargs)
        dim = self.stack.get_token_dim(hidden)
        self._check_length(hidden, dim)
        whole = ("encoder_hidden_states", "key_value_states")  # of cross attention
        self._check_residual(hidden, [*args, *(value for name, value in kwargs.items() if name not in whole)])
        self._complete, self._partial = gather_twice(hidden, dim, self.group)
        args, kwargs = replace_hidden_states(args, kwargs, self._complete)
        self.end_shards()
        try:
            output = forward(*args, **kwargs)
        except RuntimeError as error:
            if self.is_scattered and "must match the size" in str(error):
                raise self._make_error("combines its scattered result with whole hidden states", hidden) from error
            raise
        finally:
            self._complete = self._partial = None
            self.is_scattered = False
            self.begin_shards()
        return map_hidden_states(output, partial(self._take, hidden, dim))

    def _check_length(self, hidden: Tensor, dim: int) -> None:
        tokens = hidden.size(dim)
        if tokens % self.stack.local or (hidden.ndim > 2 and tokens != self.stack.local):
            raise self._make_error("was given hidden states", hidden)

    def _check_residual(self, hidden: Tensor, values: list[Any]) -> None:
        others = [
            value
            for value in values
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden.shape
        ]
        if len(others) > 1 and not (self.takes_residual and self.reduces_once):
            raise self._make_error("was given several hidden states", hidden)

    def _take(self, hidden: Tensor, dim: int, output: Tensor) -> Tensor:
        """Return this rank's part of ``output``, which may be whole, scattered already, or flattened to tokens."""
        local = hidden.shape[: dim + 1]
        whole = (*local[:-1], local[-1] * self.group.size())
        if output.shape[: dim + 1] == local or (output.ndim == 2 and len(output) == math.prod(local)):
            return output
        if output.shape[: dim + 1] == whole:
            return split(output, dim, self.group)
        if output.ndim == 2 and len(output) == math.prod(whole):
            return split(output.unflatten(0, whole), dim, self.group).flatten(0, dim)
        raise self._make_error("returned hidden states", output)

    def _make_error(self, what: str, tensor: Tensor) -> ValueError:
        return ValueError(
            f"sequence_parallel=True: {self.name} {what} of shape {tuple(tensor.shape)}, where each rank holds"
            f" {self.stack.local} of {self.stack.whole} positions: it or the layer around it does not treat the"
            " positions of a sequence one by one. Use sequence_parallel=False for this model."
        )


def sum_gradients_on_shards(module: nn.Module, scope: RegionScope) -> None:
    """Sum the gradients of a module in a region over the ranks if it runs after the region's result was scattered."""

    def run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not scope.is_scattered:
            return forward(*args, **kwargs)
        saved = dict(module._parameters)
        try:
            for name, parameter in saved.items():
                if parameter is not None and parameter.requires_grad:
                    module._parameters[name] = copy_to_ranks(parameter, scope.group)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(saved)

    wrap_method(module, run)


def _is_foreign(hook: Any) -> bool:
    """Return whether a hook is a user's. It may then read what the module returns.

    Hooks of torch (FSDP2) and of this package do not read it.
    """
    return getattr(hook, "__module__", "").partition(".")[0] not in ("torch", "lightning_fsdp2")

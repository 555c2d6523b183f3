"""Sequence parallelism for any stack of decoder layers, derived from the tensor parallel plan alone.

From the input of the first layer to the output of the last layer, each rank holds its part of the sequence
(https://arxiv.org/abs/2205.05198). Everything outside the layers is computed for whole sequences: position ids, masks,
rotary embeddings, final norm and head. A layer has two kinds of children:

- Norms, and other modules that process each position independently, work on this rank's positions.
- Every other child, such as attention, MLP or MoE, is a *region*. A region gathers its hidden states on entry. If the
  region has exactly one row-wise projection, this projection reduce-scatters the result. Otherwise, the region returns
  a slice of the whole result.

A region gathers the hidden states into two tensors with the same values but different backward passes. The gradient of
the *complete* tensor must be the same on all ranks. The gradients of the *partial* tensor are summed over the ranks.
The region's code gets the complete tensor, which is right for routers, gates and other computations that are the same
on all ranks. Column-wise projections detect that their input is the complete tensor, and use the partial tensor
instead.

A dense region therefore needs one all-gather and one reduce-scatter in forward, and the same in backward. For most
models, this needs no information except the tensor parallel plan.
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
    """Collectives that run at the input and output of a module to which the plan assigns a style.

    A scope also switches the random state: ranks draw different random numbers while their activations differ, and
    otherwise the same ones. With this base class, every rank holds whole sequences. The base class is used without
    sequence parallelism, and for modules outside the layers.
    """

    is_scattered = False
    """Whether results are only this rank's part of the sequence."""

    def __init__(self, group: dist.ProcessGroup, random: LayerRandom | None = None) -> None:
        self.group = group
        self.random = random

    def enter(self, tensor: Tensor) -> Tensor:
        """Return the input for a module whose weights are sharded column-wise over the ranks."""
        self.end_shards()
        return copy_to_ranks(tensor, self.group)

    def share(self, tensor: Tensor) -> Tensor:
        """Prepare an input without a gradient, such as expert indices, so that it has the same tokens as other inputs.

        The other inputs are prepared by :meth:`enter`, which may gather the tokens of all ranks.
        """
        return tensor

    def leave(self, tensor: Tensor) -> Tensor:
        """Sum a module's result over the ranks."""
        self.end_shards()
        return reduce_from_ranks(tensor, self.group)

    def leave_whole(self, tensor: Tensor) -> Tensor:
        """Sum a module's result over the ranks, and return the whole sum even with sequence parallelism."""
        return reduce_from_ranks(tensor, self.group)

    def begin_shards(self) -> None:
        """Make ranks draw different random numbers, because from now on their activations differ."""
        if self.random is not None:
            self.random.begin_shards()

    def end_shards(self) -> None:
        """Make all ranks draw the same random numbers, because from now on their activations are the same."""
        if self.random is not None:
            self.random.end_shards()


class LayerScope(Scope):
    """Collectives at the inputs and outputs of the modules in a layer without sequence parallelism.

    Projections that read the same tensor share a single all-reduce of this tensor's gradient.
    """

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
        """Run the layer's forward, and verify its gradients the first time."""
        hidden = get_hidden_states(args, kwargs) if args or kwargs else None
        try:
            return self.verification.run(forward, hidden, self.verification.returns, *args, **kwargs)
        finally:
            self._tensor = self._copy = None
            self.end_shards()


class EmbeddingScope(Scope):
    """Collectives at the output of an input embedding with sequence parallelism.

    The first layer may need only this rank's part of the embedding's result, so the sum of the result over the ranks is
    postponed until it is known whether the whole result is needed.

    Args:
        group: Process group of the tensor parallel ranks.
        stacks: Stacks of layers whose first layer may need only this rank's part of the result.
        embedding: The embedding module.
    """

    def __init__(self, group: dist.ProcessGroup, stacks: list[Stack], embedding: nn.Module) -> None:
        super().__init__(group)
        self.stacks, self.embedding = stacks, embedding
        self._watched: dict[bool, bool] = {}
        """Whether the embedding had a user's forward hook on any rank. Key True is for the first forward with
        gradients, and key False for the first forward without gradients."""

    def leave_whole(self, tensor: Tensor) -> Tensor:
        running = [stack for stack in self.stacks if stack.is_running]
        # do not defer the sum if the user compiles the whole model, because torch.compile cannot trace a PendingSum
        if not running or torch.compiler.is_compiling():
            return super().leave_whole(tensor)
        is_watched, mode = any(map(_is_foreign, get_forward_hooks(self.embedding))), torch.is_grad_enabled()
        if mode not in self._watched:
            self._watched[mode] = self._agree(is_watched, tensor)
        # If the embedding has a user's hook on any rank, sum now on all ranks. Otherwise a hook that reads the output
        # would start an all-reduce that the ranks without this hook do not call.
        if self._watched[mode]:
            return super().leave_whole(tensor)
        pending = PendingSum.make(tensor, self.group, is_watched=is_watched)
        running[-1].embeddings.append(pending.summands)
        return pending

    def _agree(self, is_watched: bool, tensor: Tensor) -> bool:
        """Return whether the embedding has a user's forward hook on at least one rank.

        Args:
            is_watched: Whether the embedding has such a hook on this rank.
            tensor: Any tensor on this rank's device.
        """
        if isinstance(tensor, FakeTensor):
            return is_watched
        return bool(all_reduce_tensor(torch.tensor(float(is_watched), device=tensor.device), self.group))


class PointwiseScope(Scope):
    """Collectives of a projection, or another direct child of a sequence parallel layer, if the plan gives it a style.

    The child's input is gathered along the sequence, and its result is reduce-scattered.
    """

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
    """Collectives at the input and output of a region.

    A region is a child of a layer that works on whole sequences, such as an attention module or an MLP.

    Args:
        stack: Stack to which the layer belongs.
        random: Random state of the layer. None if the layer draws no random numbers.
        reduces_once: Whether the region's result comes from exactly one row-wise projection, which can then
            reduce-scatter it.
        takes_residual: Whether the region also gets the residual, and adds it to its result itself.
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
        # Do not scatter if each rank would get a single position, because the region's code may wrongly add its shard
        # to a whole sequence. PyTorch raises an error for longer shards, but silently broadcasts a single position.
        if not (self.reduces_once and (self.stack.local > 1 or self.takes_residual) and tensor.ndim > dim + 1):
            return super().leave(tensor)
        if tensor.size(dim) != self.stack.whole:
            return super().leave(tensor)
        self.is_scattered = True
        self.begin_shards()
        return reduce_scatter(tensor, dim, self.group)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the region's forward on whole sequences, and return this rank's part of the result."""
        if not self.stack.is_active:
            return forward(*args, **kwargs)
        hidden = get_hidden_states(args, kwargs)
        dim = self.stack.get_token_dim(hidden)
        self._check_length(hidden, dim)
        # the arguments of cross attention are not sharded over the sequence
        whole = ("encoder_hidden_states", "key_value_states")
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
        """Return this rank's part of a region's output, which may be whole or already scattered.

        The output may also be flattened from [batch, sequence, hidden] to [tokens, hidden].
        """
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
            f"sequence_parallel=True: {self.name} {what} of shape {tuple(tensor.shape)}, but each rank holds"
            f" {self.stack.local} of {self.stack.whole} positions. The layer does not process each position of a"
            " sequence independently. Use sequence_parallel=False for this model."
        )


def sum_gradients_on_shards(module: nn.Module, scope: RegionScope) -> None:
    """Sum the gradients of a module's parameters over the ranks if the module runs on a part of the sequence.

    A module in a region gets only this rank's part if it runs after the projection that reduce-scatters the region's
    result.
    """

    def run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not scope.is_scattered:
            return forward(*args, **kwargs)
        saved = dict(module._parameters)
        try:
            for name, parameter in saved.items():
                if parameter is not None and parameter.requires_grad:
                    # Clone the parameter if it is an nn.Parameter, because `copy_to_ranks` returns a view.
                    # Megatron-FSDP may move the parameter to another buffer before backward, but the view would keep
                    # the old buffer.
                    own = parameter.clone() if isinstance(parameter, nn.Parameter) else parameter
                    module._parameters[name] = copy_to_ranks(own, scope.group)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(saved)

    wrap_method(module, run)


def _is_foreign(hook: Any) -> bool:
    """Return whether a forward hook comes from the user, and may therefore read a module's result.

    Hooks that belong to torch, such as those of FSDP2, and hooks of this package do not read the result.
    """
    return getattr(hook, "__module__", "").partition(".")[0] not in ("torch", "lightning_fsdp2")

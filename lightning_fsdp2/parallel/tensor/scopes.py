"""Sequence parallelism for any stack of decoder layers, derived from the tensor parallel plan alone.

Between the first layer's input and the last layer's output each rank holds its part of the sequence
(https://arxiv.org/abs/2205.05198). Everything outside of the layers sees whole sequences: position ids, masks, rotary
embeddings, final norm and head. Inside a layer

- norms, and whatever else computes position by position, work on the rank's positions;
- every other child is a *region* (attention, MLP, mixture of experts): its hidden states are gathered on entry, and
  what comes out is reduce-scattered by its one row-wise projection, or sliced where there is none or several.

On entry a region makes two tensors of the gathered hidden states: *complete*, whose gradient is the same on all ranks,
and *partial*, whose gradients are summands. Its code sees the first one, which is right for routers, gates and
whatever else all ranks compute alike; column-wise projections that are given this very tensor take the second one.
So a dense region costs one all-gather and one reduce-scatter, forward and backward each, without knowing the model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.compat.torch import all_reduce_tensor, is_in_backward
from lightning_fsdp2.compat.torch_simulation import FakeTensor
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.tensor.verification import LayerVerification
from lightning_fsdp2.ranks.collectives import (
    Kind,
    copy_to_ranks,
    gather,
    gather_for_ranks,
    gather_twice,
    reduce_from_ranks,
    reduce_scatter,
    split,
)
from lightning_fsdp2.ranks.layer_random import LayerRandom
from lightning_fsdp2.ranks.pending_sum import PendingSum, Summands


class Scope:
    """Where a styled module stands: how what it reads comes in, and how its result goes out.

    This one is for whole sequences on every rank: tensor parallelism alone, and modules outside of the layers.
    """

    is_scattered = False
    """Whether results are parts of the sequence."""

    def __init__(self, group: dist.ProcessGroup, random: LayerRandom | None = None) -> None:
        self.group = group
        self.random = random

    def enter(self, tensor: Tensor) -> Tensor:
        """For a module of which each rank computes other columns."""
        self.end_shards()
        return copy_to_ranks(tensor, self.group)

    def share(self, tensor: Tensor) -> Tensor:
        """For what all ranks need and has no gradient: indices of experts."""
        return tensor

    def leave(self, tensor: Tensor) -> Tensor:
        """For the ranks' summands of a result."""
        self.end_shards()
        return reduce_from_ranks(tensor, self.group)

    def leave_whole(self, tensor: Tensor) -> Tensor:
        """For the ranks' summands of a result that is whole in a sequence parallel layer, too."""
        return reduce_from_ranks(tensor, self.group)

    def begin_shards(self) -> None:
        """From here on ranks hold different activations."""
        if self.random is not None:
            self.random.begin_shards()

    def end_shards(self) -> None:
        """From here on ranks hold the same activations."""
        if self.random is not None:
            self.random.end_shards()


class LayerScope(Scope):
    """A layer under tensor parallelism alone: projections of the same tensor share the all-reduce of its gradient."""

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


class Stack:
    """The layers of one model between which the sequence is sharded, and how long it is in the layer that runs.

    Args:
        group: Of the tensor parallel ranks.
        stream_dim: Of the sequence in what the layers hand on.
    """

    dim = 1
    """Of the sequence in what the children of a layer are given, [batch, sequence, hidden]."""

    def __init__(self, group: dist.ProcessGroup, *, stream_dim: int = 1) -> None:
        self.group = group
        self.stream_dim = stream_dim
        self.is_open = False
        self.is_running = False
        self.whole = 0
        self.local = 0
        self.embeddings: list[Summands] = []
        """Of the forward that runs."""

    @property
    def is_active(self) -> bool:
        """Whether the sequence is sharded: not if the ranks do not divide it, in a forward without gradients."""
        return self.local > 0

    def open(self, hidden: Tensor) -> Tensor:
        """Shard the hidden states of the first layer.

        A sequence that cannot be sharded (one token of ``generate``) stays whole in a forward without gradients.

        Raises:
            ValueError: In training. When the stack is open already.
        """
        if self.is_open and not _may_be_repeated():
            raise ValueError(
                "sequence_parallel=True: the model runs its first layer twice in one forward. Use"
                " sequence_parallel=False, or layers that are modules of their own."
            )
        ranks, self.whole = self.group.size(), hidden.size(self.stream_dim)
        self.local = self.whole // ranks if self.whole % ranks == 0 else 0
        self.is_open = not _may_be_repeated()
        if self.is_active:
            if isinstance(hidden, PendingSum):
                return hidden.get_part(self.stream_dim)
            return split(hidden, self.stream_dim, self.group)
        if torch.is_grad_enabled():
            self.is_open = False
            raise ValueError(
                f"sequence_parallel=True with tp_size={ranks} needs sequences whose length it divides, but this batch"
                f" has {self.whole} positions; pad them to {(self.whole // ranks + 1) * ranks}"
                " (labels with -100), or set sequence_parallel=False."
            )
        return hidden.get_whole() if isinstance(hidden, PendingSum) else hidden

    def run_first(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the first layer with this rank's part of the sequence.

        Around the layer's ``__call__``: checkpoints and compiled code inside of it see the part alone.
        """
        args, kwargs = replace_hidden_states(args, kwargs, self.open(get_hidden_states(args, kwargs)))
        return call(*args, **kwargs)

    def enter_layer(self, hidden: Tensor, name: str) -> None:
        """Check the hidden states of a layer, or take their length where they are computed again.

        Between forward and backward there may have been forwards of other lengths.
        """
        length = hidden.size(self.stream_dim)
        if torch.is_grad_enabled() and _may_be_repeated():
            self.local, self.whole = length, length * self.group.size()
        elif not _may_be_repeated() and (not self.is_open or (self.is_active and length != self.local)):
            raise ValueError(
                f"sequence_parallel=True: {name} was given hidden states of shape {tuple(hidden.shape)}, but each rank"
                f" holds {self.local} of {self.whole} positions between the layers: the model changes them there, or"
                " leaves out its first layer. Use sequence_parallel=False for this model."
            )

    def close(self, hidden: Tensor) -> Tensor:
        """Gather what the last layer returned."""
        self.is_open = False
        return gather(hidden, self.stream_dim, self.whole, self.group) if self.is_active else hidden

    def run_model(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model around the layers.

        Hidden states that it recorded (``output_hidden_states=True``) are gathered: each layer returned this rank's
        part.

        Raises:
            ValueError: When the model left out its last layer, so that parts of the sequence would get out.
        """
        outer = self.is_running, self.embeddings
        self.is_open, self.is_running, self.embeddings = False, True, []
        try:
            output = forward(*args, **kwargs)
            left_open = self.is_open
            output = self._gather_recorded(output)
        finally:
            for summands in self.embeddings:
                summands.end()
            self.is_open, (self.is_running, self.embeddings) = False, outer
        if left_open and self.is_active:
            raise ValueError(
                "sequence_parallel=True: the model left out its last layer, which gathers the sequence. Use"
                " sequence_parallel=False, or a model of fewer layers."
            )
        return output

    def _gather_recorded(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0], *map(self._gather_all, output[1:]))
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = self._gather_all(output.hidden_states)
        return output

    def _gather_all(self, value: Any) -> Any:
        return type(value)(map(self._gather, value)) if isinstance(value, tuple | list) else value

    def _gather(self, value: Any) -> Any:
        if isinstance(value, PendingSum):
            return value.get_whole()
        return self.close(value) if self.is_active and self._is_part(value) else value

    def _is_part(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 2 and value.size(self.stream_dim) == self.local

    def get_token_dim(self, tensor: Tensor) -> int:
        """Models flatten [batch, sequence, hidden] to [tokens, hidden] for modules that treat each token alone."""
        return 0 if tensor.ndim == 2 else self.dim


class EmbeddingScope(Scope):
    """The input embedding of a model whose first layer takes a part of the sequence from it.

    Args:
        group: Of the tensor parallel ranks.
        stacks: Of the layers that may take it.
        embedding: The module.
    """

    def __init__(self, group: dist.ProcessGroup, stacks: list[Stack], embedding: nn.Module) -> None:
        super().__init__(group)
        self.stacks, self.embedding = stacks, embedding
        self._watched: dict[bool, bool] = {}
        """Whether any rank had a hook of the user's in the first forward without gradients, and in that with them."""

    def leave_whole(self, tensor: Tensor) -> Tensor:
        running = [stack for stack in self.stacks if stack.is_running]
        # a user's torch.compile around the model would have to trace the subclass
        if not running or torch.compiler.is_compiling():
            return super().leave_whole(tensor)
        is_watched, mode = any(map(_is_foreign, self.embedding._forward_hooks.values())), torch.is_grad_enabled()
        if mode not in self._watched:
            self._watched[mode] = self._agree(is_watched, tensor)
        # a hook may read on one rank alone, which must then not be a collective
        if self._watched[mode]:
            return super().leave_whole(tensor)
        pending = PendingSum.make(tensor, self.group, is_watched=is_watched)
        running[-1].embeddings.append(pending.summands)
        return pending

    def _agree(self, is_watched: bool, tensor: Tensor) -> bool:
        """Return whether it is so on any rank."""
        if isinstance(tensor, FakeTensor):
            return is_watched
        return bool(all_reduce_tensor(torch.tensor(float(is_watched), device=tensor.device), self.group))


class PointwiseScope(Scope):
    """A styled module that is itself a child of the layer: it gathers and scatters for itself."""

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
    """A child of the layer that sees whole sequences.

    Args:
        stack: The layers around it.
        random: Of the layer; None where it draws no random numbers.
        reduces_once: Whether one row-wise projection makes its result, which can then be scattered at once.
        takes_residual: Whether it is also given hidden states to add to its (scattered) result.
        name: For messages.
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
        # a part of one position would be broadcast, silently, against whole sequences
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


class StackedLayer:
    """A layer of a stack.

    Args:
        stack: The layers it belongs to.
        random: None where the layer draws no random numbers.
        verification: Of this layer.
        name: For messages.
        is_last: Whether it returns whole sequences.
        per_position: Positions and names of further arguments that are whole sequences, and that it uses itself.
    """

    def __init__(
        self,
        stack: Stack,
        random: LayerRandom | None,
        verification: LayerVerification,
        *,
        name: str,
        is_last: bool,
        per_position: tuple[int | str, ...] = (),
    ) -> None:
        self.stack, self.random, self.verification = stack, random, verification
        self.name, self.is_last = name, is_last
        self.per_position = per_position

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward on this rank's part of the sequence."""
        hidden = get_hidden_states(args, kwargs)
        self.stack.enter_layer(hidden, self.name)
        if self.stack.is_active and self.per_position:
            args = tuple(self._take(value) if i in self.per_position else value for i, value in enumerate(args))
            kwargs = {name: self._take(value) if name in self.per_position else value for name, value in kwargs.items()}
        if self.random is not None and self.stack.is_active:
            self.random.begin_shards()
        kind = Kind.OWN if self.stack.is_active else Kind.EITHER
        try:
            output = self.verification.run(forward, hidden, kind, *args, **kwargs)
        finally:
            if self.random is not None:
                self.random.end_shards()
        return map_hidden_states(output, self.stack.close) if self.is_last else output

    def _take(self, value: Any) -> Any:
        return split(value, self.stack.dim, self.stack.group) if isinstance(value, Tensor) else value


def sum_gradients_on_shards(module: nn.Module, scope: RegionScope) -> None:
    """Let ``module``, inside a region, have its parameters' gradients summed where it works on scattered results."""

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
    """Whether a hook is neither FSDP2's nor this package's, which do not read what modules return."""
    return getattr(hook, "__module__", "").partition(".")[0] not in ("torch", "lightning_fsdp2")


def _may_be_repeated() -> bool:
    """Whether this forward may be one that activation checkpointing computes again in backward."""
    return torch.compiler.is_compiling() or is_in_backward()


def get_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer or one of its children."""
    name = _get_optional_name(args, kwargs)
    return args[0] if name is None else kwargs[name]


def replace_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put ``hidden`` where :func:`get_hidden_states` looks."""
    name = _get_optional_name(args, kwargs)
    return ((hidden, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: hidden})


def _get_optional_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The keyword of the hidden states, None where they are the first positional argument."""
    if "hidden_states" in kwargs or not args:
        return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return None


def map_hidden_states(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to the hidden states that a layer or one of its children returned: all, or its first item."""
    if isinstance(output, Tensor):
        return function(output)
    return (function(output[0]), *output[1:])

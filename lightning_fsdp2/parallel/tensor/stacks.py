"""Stacks of sequence parallel layers; see :mod:`~lightning_fsdp2.parallel.tensor.scopes`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp2.compat.torch import is_in_backward
from lightning_fsdp2.parallel.tensor.verification import LayerVerification
from lightning_fsdp2.ranks.collectives import Kind, gather_shards, split
from lightning_fsdp2.ranks.layer_random import LayerRandom
from lightning_fsdp2.ranks.pending_sum import PendingSum, Summands


class Stack:
    """Stack of layers between which hidden states are sharded along the sequence.

    The stack also keeps the length of the current sequence.

    Args:
        group: Process group of the tensor parallel ranks.
        stream_dim: Sequence dim of the hidden states between the layers.
    """

    dim = 1
    """Sequence dim of the hidden states inside a layer, [batch, sequence, hidden]."""

    def __init__(self, group: dist.ProcessGroup, *, stream_dim: int = 1) -> None:
        self.group = group
        self.stream_dim = stream_dim
        self.is_open = False
        self.is_running = False
        self.whole = 0
        self.local = 0
        self.embeddings: list[Summands] = []
        """Results of the input embedding in the current forward that are not yet summed over the ranks."""

    @property
    def is_active(self) -> bool:
        """Whether the current sequence is sharded over the ranks."""
        return self.local > 0

    def open(self, hidden: Tensor) -> Tensor:
        """Shard the hidden states that the first layer gets.

        In a forward without gradients, a sequence stays whole if its length is not divisible by the number of ranks.
        For example, ``generate`` passes sequences of one token.

        Raises:
            ValueError: If the length is not divisible in a forward with gradients, or if the first layer runs twice in
                one forward of the model.
        """
        if self.is_open and not may_be_repeated():
            raise ValueError(
                "sequence_parallel=True: the model runs its first layer twice in one forward. Use"
                " sequence_parallel=False, or a separate module for each layer."
            )
        ranks, self.whole = self.group.size(), hidden.size(self.stream_dim)
        self.local = self.whole // ranks if self.whole % ranks == 0 else 0
        self.is_open = not may_be_repeated()
        if self.is_active:
            if isinstance(hidden, PendingSum):
                return hidden.get_part(self.stream_dim)
            return split(hidden, self.stream_dim, self.group)
        if torch.is_grad_enabled():
            self.is_open = False
            raise ValueError(
                f"sequence_parallel=True needs sequences whose length is divisible by tp_size={ranks}, but this batch"
                f" has {self.whole} positions; pad them to {(self.whole // ranks + 1) * ranks}"
                " (labels with -100), or set sequence_parallel=False."
            )
        return hidden.get_whole() if isinstance(hidden, PendingSum) else hidden

    def resume(self, hidden: Tensor) -> None:
        """Continue a forward whose first layers run on an earlier pipeline stage.

        Args:
            hidden: Tensor of the shape of whole hidden states. What the earlier stage sends is this rank's part of
                them, unless the sequence is not divisible by the number of ranks; see :meth:`open`.
        """
        ranks, self.whole = self.group.size(), hidden.size(self.stream_dim)
        self.local = self.whole // ranks if self.whole % ranks == 0 else 0
        self.is_open = True

    def pause(self, hidden: Tensor) -> Tensor:
        """Leave hidden states as they are, because the next layers run on a later pipeline stage.

        Returns:
            Zeros of the shape of whole hidden states, without memory, for what the model does after its layers.
        """
        self.is_open = False
        shape = list(hidden.shape)
        shape[self.stream_dim] = self.whole
        return hidden.new_zeros(()).expand(shape)

    def run_first(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the first layer with this rank's part of the sequence.

        This method wraps the layer's ``__call__`` and not its ``forward``, so that activation checkpoints and compiled
        code only see this rank's part.
        """
        args, kwargs = replace_hidden_states(args, kwargs, self.open(get_hidden_states(args, kwargs)))
        return call(*args, **kwargs)

    def enter_layer(self, hidden: Tensor, name: str) -> None:
        """Check that a layer gets hidden states with this rank's number of positions.

        In a recomputation by activation checkpointing, set the sequence length from the hidden states instead, because
        forwards with other lengths may have run since the original forward.

        Raises:
            ValueError: If the number of positions is wrong, or if the first layer has not run yet.
        """
        length = hidden.size(self.stream_dim)
        if torch.is_grad_enabled() and may_be_repeated():
            self.local, self.whole = length, length * self.group.size()
        elif not may_be_repeated() and (not self.is_open or (self.is_active and length != self.local)):
            raise ValueError(
                f"sequence_parallel=True: {name} was given hidden states of shape {tuple(hidden.shape)}, but each rank"
                f" holds {self.local} of {self.whole} positions between the layers. The model changes hidden states"
                " between its layers, or skips its first layer. Use sequence_parallel=False for this model."
            )

    def close(self, hidden: Tensor) -> Tensor:
        """Gather the last layer's hidden states along the sequence."""
        self.is_open = False
        return gather_shards(hidden, self.stream_dim, self.whole, self.group) if self.is_active else hidden

    def run_model(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model that contains the layers.

        With ``output_hidden_states=True``, also gather the hidden states that the model has recorded, because each
        layer returns only this rank's part.

        Raises:
            ValueError: If the model skips its last layer. The model would then return only a part of the sequence.
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
                "sequence_parallel=True: the model skipped its last layer, which would have gathered the sequence. Use"
                " sequence_parallel=False, or remove the layers that the model never runs."
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
        """Return the dim of ``tensor`` along which the sequence is sharded.

        This is the sequence dim of [batch, sequence, hidden], and dim 0 of [tokens, hidden]. Some models flatten hidden
        states to the latter shape for modules that process each token independently.
        """
        return 0 if tensor.ndim == 2 else self.dim


class StackedLayer:
    """Wrapper of the forward of a layer in a stack.

    Args:
        stack: Stack to which the layer belongs.
        random: Random state of the layer. None if the layer draws no random numbers.
        verification: Verification of the layer's gradients, which runs in the first forward with gradients.
        name: Name of the layer, for messages.
        is_last: Whether the layer is the last one in the stack, which returns whole sequences.
        per_position: Arguments to split like the hidden states, because they have a value per position and the layer's
            own code uses them. Each is given by its name, and also by its positional index if it has one.
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


def get_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states from the arguments of a layer or of one of its children."""
    name = _get_optional_name(args, kwargs)
    return args[0] if name is None else kwargs[name]


def replace_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer or of one of its children, with the hidden states replaced by ``hidden``."""
    name = _get_optional_name(args, kwargs)
    return ((hidden, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: hidden})


def _get_optional_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of the keyword argument that holds the hidden states.

    Return None if the hidden states are the first positional argument.
    """
    if "hidden_states" in kwargs or not args:
        return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return None


def map_hidden_states(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to the hidden states in the output of a layer or of one of its children.

    The hidden states are the output itself if it is a tensor, and otherwise its first item.
    """
    if isinstance(output, Tensor):
        return function(output)
    return (function(output[0]), *output[1:])


def may_be_repeated() -> bool:
    """Return whether the current forward may be a recomputation that activation checkpointing runs in backward."""
    return torch.compiler.is_compiling() or is_in_backward()

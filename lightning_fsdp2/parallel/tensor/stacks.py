"""The stacks of layers between which the sequence is sharded; see :mod:`~lightning_fsdp2.parallel.tensor.scopes`."""

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
    """The layers of one model between which the sequence is sharded, and the sequence's length in the running layer.

    Args:
        group: Process group of the tensor parallel ranks.
        stream_dim: Sequence dim of the hidden states that layers pass on.
    """

    dim = 1
    """Sequence dim of the hidden states that children of a layer are given, [batch, sequence, hidden]."""

    def __init__(self, group: dist.ProcessGroup, *, stream_dim: int = 1) -> None:
        self.group = group
        self.stream_dim = stream_dim
        self.is_open = False
        self.is_running = False
        self.whole = 0
        self.local = 0
        self.embeddings: list[Summands] = []
        """Summands of the input embedding's results in the current forward."""

    @property
    def is_active(self) -> bool:
        """Whether the sequence is sharded. In a forward without gradients, an indivisible sequence stays whole."""
        return self.local > 0

    def open(self, hidden: Tensor) -> Tensor:
        """Shard the hidden states of the first layer.

        A sequence that cannot be sharded (one token of ``generate``) stays whole in a forward without gradients.

        Raises:
            ValueError: If the sequence cannot be sharded in a forward with gradients, or the stack is open already.
        """
        if self.is_open and not may_be_repeated():
            raise ValueError(
                "sequence_parallel=True: the model runs its first layer twice in one forward. Use"
                " sequence_parallel=False, or layers that are modules of their own."
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
                f"sequence_parallel=True with tp_size={ranks} needs sequences whose length it divides, but this batch"
                f" has {self.whole} positions; pad them to {(self.whole // ranks + 1) * ranks}"
                " (labels with -100), or set sequence_parallel=False."
            )
        return hidden.get_whole() if isinstance(hidden, PendingSum) else hidden

    def run_first(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the first layer with this rank's part of the sequence.

        This wraps the layer's ``__call__``, so checkpoints and compiled code inside of it see only the part.
        """
        args, kwargs = replace_hidden_states(args, kwargs, self.open(get_hidden_states(args, kwargs)))
        return call(*args, **kwargs)

    def enter_layer(self, hidden: Tensor, name: str) -> None:
        """Check the length of a layer's hidden states or, in a recomputation, take the sequence's length from them.

        Forwards of other lengths may have run between forward and backward.
        """
        length = hidden.size(self.stream_dim)
        if torch.is_grad_enabled() and may_be_repeated():
            self.local, self.whole = length, length * self.group.size()
        elif not may_be_repeated() and (not self.is_open or (self.is_active and length != self.local)):
            raise ValueError(
                f"sequence_parallel=True: {name} was given hidden states of shape {tuple(hidden.shape)}, but each rank"
                f" holds {self.local} of {self.whole} positions between the layers: the model changes them there, or"
                " leaves out its first layer. Use sequence_parallel=False for this model."
            )

    def close(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states that the last layer returned."""
        self.is_open = False
        return gather_shards(hidden, self.stream_dim, self.whole, self.group) if self.is_active else hidden

    def run_model(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model around the layers.

        Hidden states that the model recorded (``output_hidden_states=True``) are gathered, since each layer returned
        only this rank's part.

        Raises:
            ValueError: If the model left out its last layer, and would return parts of the sequence.
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
        """Return the dim of ``tensor`` that is sharded: the sequence's, or 0 for flattened tokens.

        Models flatten [batch, sequence, hidden] to [tokens, hidden] for modules that treat each token alone.
        """
        return 0 if tensor.ndim == 2 else self.dim


class StackedLayer:
    """A layer of a stack.

    Args:
        stack: Stack that the layer belongs to.
        random: Random state of the layer; None if the layer draws no random numbers.
        verification: Verification of the layer.
        name: Name of the layer, for messages.
        is_last: Whether the layer is the last one, which returns whole sequences.
        per_position: Positions and names of further arguments that are whole sequences and that the layer's own code
            uses.
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
    """Return the hidden states among the arguments of a layer or of one of its children."""
    name = _get_optional_name(args, kwargs)
    return args[0] if name is None else kwargs[name]


def replace_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with ``hidden`` in the place where :func:`get_hidden_states` looks."""
    name = _get_optional_name(args, kwargs)
    return ((hidden, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: hidden})


def _get_optional_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the keyword of the hidden states, or None if they are the first positional argument."""
    if "hidden_states" in kwargs or not args:
        return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return None


def map_hidden_states(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to the hidden states in ``output``, which a layer or one of its children returned.

    They are ``output`` itself or its first item.
    """
    if isinstance(output, Tensor):
        return function(output)
    return (function(output[0]), *output[1:])


def may_be_repeated() -> bool:
    """Return whether this forward may be a recomputation by activation checkpointing in backward."""
    return torch.compiler.is_compiling() or is_in_backward()

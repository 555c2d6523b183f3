"""The attention of context parallel models: a function that transformers calls in place of its own attention.

Sequences are split over the ranks of a group. There are two methods of attending to whole sequences:

- ``allgather``: each rank holds two chunks (:func:`get_head_tail_chunks`) and gathers the keys and values of the other
  ranks. Only key-value heads are communicated. The traffic does not fall as the number of ranks grows.
- ``ulysses`` (https://arxiv.org/abs/2309.14509): each rank holds one chunk. An all-to-all exchanges the chunk for the
  whole sequence of a share of the heads, and another all-to-all exchanges the result back.

A model makes its mask once per forward and passes it to each of its layers. Their attention passes the mask on to the
function here. A :class:`SequenceMask` takes the place of the mask tensor. It says which keys a query sees, by
position in the whole sequence, and which process group holds the sequence. Activation checkpointing keeps the mask for
the layers that are recomputed.
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_fsdp2.compat.torch import all_to_all_tensor
from lightning_fsdp2.compat.torch_simulation import with_values
from lightning_fsdp2.compat.transformers import forget_attention, get_attention, set_attention
from lightning_fsdp2.modules.structure import get_class_name
from lightning_fsdp2.parallel.context.attention_blocks import (
    Block,
    Chunk,
    Documents,
    Pattern,
    get_blocks,
    get_head_tail_chunks,
)
from lightning_fsdp2.parallel.context.block_attention import block_attention

Method = Literal["allgather", "ulysses"]

_PREFIX = "context_parallel_"

_uses: Counter[int] = Counter()
"""Number of models that have installed attention in a config, by the config's id."""

_configs: Counter[str] = Counter()
"""Number of configs that use each registered name."""


@dataclass(frozen=True)
class SequenceMask:
    """The keys that queries see, and how the sequence is split. Layers get this as their ``attention_mask``."""

    blocks: tuple[Block, ...]
    """Blocks of the queries whose attention this rank computes."""

    padding: Tensor | None
    """[batch, queries of ``blocks``], bool: True for queries that see nothing. None without padding."""

    length: int
    method: Method
    group: dist.ProcessGroup

    def __getitem__(self, index: tuple[slice, ...]) -> "SequenceMask":
        """Return the whole mask. Gemma 4 asks for the last ``logits_to_keep`` queries, where 0 means all.

        Raises:
            TypeError: If only a part is requested.
        """
        if any(part not in (slice(None), slice(0, None)) for part in index):
            raise TypeError(f"{type(self).__name__} has no part {index}")
        return self


@dataclass(frozen=True)
class _Forward:
    """A running forward of a model, with the whole sequences that this rank computes a part of."""

    model: str
    length: int
    batch_size: int
    positions: Tensor
    documents: Documents | None
    padding: Tensor | None
    method: Method
    group: dist.ProcessGroup
    attended: set[nn.Module] = field(default_factory=set)


_running: ContextVar[_Forward | None] = ContextVar("_running", default=None)


@contextmanager
def run_sharded(
    model: str,
    positions: Tensor,
    *,
    batch_size: int,
    documents: Documents | None,
    padding: Tensor | None,
    method: Method,
    group: dist.ProcessGroup,
) -> Iterator[set[nn.Module]]:
    """Make masks that are built inside the block cover whole sequences.

    Yields:
        The set of modules that call attention over the whole sequence in the block, except those in compiled code.

    Args:
        model: Name of the model, for messages.
        positions: [..., length], position ids of the whole sequences.
        batch_size: Number of sequences.
        documents: Documents of the sequences; positions of different documents do not see each other. None for one
            document.
        padding: [batch, length], bool: True for positions that see nothing. None without padding.
        method: Method by which the sequences are split.
        group: Process group of the ranks that the sequences are split over.
    """
    running = _Forward(model, positions.size(-1), batch_size, positions, documents, padding, method, group)
    token = _running.set(running)
    try:
        yield running.attended
    finally:
        _running.reset(token)


def is_running_sharded() -> bool:
    """Return whether the current code runs inside :func:`run_sharded`."""
    return _running.get() is not None


def get_optional_whole_positions() -> Tensor | None:
    """Return the position ids that :func:`run_sharded` was given; None outside of it."""
    running = _running.get()
    return running.positions if running is not None else None


def install_attention(config: Any) -> None:
    """Make modules with this ``config`` call context parallel attention inside :func:`run_sharded`, else their own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    _uses[id(config)] += 1
    original = get_attention(config)
    if isinstance(original, _AttentionName):
        return  # several models share one config object
    name = _AttentionName(original)
    AttentionInterface.register(name, _Attention(original))
    AttentionMaskInterface.register(name, _Mask(original))
    _configs[name] += 1
    set_attention(config, name)


def uninstall_attention(config: Any) -> None:
    """Undo one :func:`install_attention`. The last undo leaves transformers as it was."""
    _uses[id(config)] -= 1
    if _uses[id(config)]:
        return
    del _uses[id(config)]
    name = get_attention(config)
    set_attention(config, name.original)
    _configs[name] -= 1
    if not _configs[name]:
        del _configs[name]
        forget_attention(name)


class _AttentionName(str):
    """The name under which attention is registered. Copied or pickled, it becomes the name of the original attention.

    Configs contain the name, and saved hyper-parameters contain configs. A process that loads them has no attention
    registered under this name.
    """

    original: str

    def __new__(cls, original: str) -> "_AttentionName":
        # with "flash" in the name, models would prepare arguments that only flash attention takes
        name = super().__new__(cls, f"{_PREFIX}{original.replace('flash', 'fused')}")
        name.original = original
        return name

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.original,)


class _Mask:
    """A mask function that makes a :class:`SequenceMask` where transformers would make a tensor."""

    def __init__(self, original: str) -> None:
        self.original = original

    def __call__(self, *args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        running = _running.get()
        if running is None:
            from transformers import AttentionMaskInterface

            original = AttentionMaskInterface()[self.original]
            return original(*args, mask_function=mask_function, **kwargs)
        if kwargs.get("use_vmap"):
            raise ValueError(
                f"cp_size={running.group.size()}: {running.model} changes the causal mask by a function of its own,"
                " which may read tensors that are split over the ranks. Use cp_size=1 for it."
            )
        with with_values():
            window = _get_window(mask_function, running)
        return _make_mask(Pattern(window, running.documents), running)


def _make_mask(pattern: Pattern, running: _Forward) -> SequenceMask:
    group, length, padding = running.group, running.length, running.padding
    chunks: tuple[Chunk, ...] = (Chunk(0, length),)
    if running.method == "allgather":
        chunks = get_head_tail_chunks(length, group.rank(), group.size())
    blocks = get_blocks(chunks, pattern, batch_size=running.batch_size, device=running.positions.device)
    if padding is not None:
        padding = torch.cat([padding[:, chunk.start : chunk.end] for chunk in chunks], 1)
    return SequenceMask(blocks, padding, length, running.method, group)


def _get_window(mask_function: Callable[..., Any], running: _Forward) -> int | None:
    """Return the sliding window of a mask; None for a causal mask without a window."""
    try:
        key = _describe(mask_function)
    except TypeError:
        window = _find_window(mask_function, running.length)
    else:
        window = _find_window_once(_MaskFunction(key, mask_function), running.length)
    if window is None:
        raise ValueError(
            f"cp_size={running.group.size()}: {running.model} has an attention mask that is neither causal nor a"
            " causal sliding window, such as chunked or bidirectional attention. Use cp_size=1 for it."
        )
    return window if window < running.length else None


def _describe(value: Any) -> Hashable:
    """Return everything that the results of a mask function depend on: its code and the constants in its closure.

    Models make a new function for each forward, so the functions themselves cannot be compared.

    Raises:
        TypeError: If the function depends on anything else, such as a tensor, or is not one of transformers' own.
    """
    from transformers import masking_utils

    if isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return tuple(map(_describe, value))
    if isinstance(value, FunctionType) and value.__globals__ is vars(masking_utils) and not value.__defaults__:
        return (value.__code__, *(_describe(cell.cell_contents) for cell in value.__closure__ or ()))
    raise TypeError(f"{value!r} is no constant and no function of transformers")


@dataclass(frozen=True)
class _MaskFunction:
    """A mask function that equals every other one with the same description."""

    description: Hashable
    compute: Callable[..., Any] = field(compare=False)


@lru_cache(maxsize=256)
def _find_window_once(function: _MaskFunction, length: int) -> int | None:
    return _find_window(function.compute, length)


def _find_window(mask_function: Callable[..., Any], length: int) -> int | None:
    """Find the causal window of a mask by checking which keys a few queries see.

    Return ``length`` for a causal mask without a window, and None for a mask of any other kind.
    """
    last, keys = length - 1, torch.arange(length)

    def is_seen(query: int) -> Tensor:
        return mask_function(0, 0, torch.tensor(query), keys).expand(length)

    try:
        window = int(is_seen(last).sum())
        queries = {0, 1, last // 3, last // 2, min(window, last), last}
        is_window = all(torch.equal(is_seen(query), (keys <= query) & (keys > query - window)) for query in queries)
    except (IndexError, RuntimeError):  # the mask reads tensors that are split, or on the device
        return None
    return window if is_window else None


class _Attention:
    """Attention over the whole sequence, for the layers that were given a :class:`SequenceMask`."""

    def __init__(self, original: str) -> None:
        self.original = original

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not isinstance(attention_mask, SequenceMask):
            _check_not_sharded(module)
            original = _get_function(module, self.original)
            return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        _note(module)
        sinks = kwargs.pop("s_aux", None)
        _check_positions(module, query, key, attention_mask)
        _check_arguments(module, attention_mask.group.size(), {"dropout": dropout or None, **kwargs})
        scale = scaling if scaling is not None else query.size(-1) ** -0.5
        attend = _attend_exchanged if attention_mask.method == "ulysses" else _attend_gathered
        output = attend(query, key, value, sinks, scale, attention_mask)
        return output.transpose(1, 2).contiguous(), None


def _attend_gathered(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, mask: SequenceMask
) -> Tensor:
    return block_attention(
        query, key, value, blocks=mask.blocks, scale=scale, padding=mask.padding, sinks=sinks, group=mask.group
    )


def _attend_exchanged(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, mask: SequenceMask
) -> Tensor:
    heads, sequence = 1, 2
    whole = _Exchange.apply(heads, sequence, mask.group, query, key, value)
    if sinks is not None:
        sinks = sinks.chunk(mask.group.size())[mask.group.rank()]
    output = block_attention(*whole, blocks=mask.blocks, scale=scale, padding=mask.padding, sinks=sinks)
    return _Exchange.apply(sequence, heads, mask.group, output)[0]


class _Exchange(torch.autograd.Function):
    """An all-to-all that splits tensors over the ranks in one dim, and joins the ranks' parts in another dim."""

    @staticmethod
    def forward(
        ctx: Any, split_dim: int, join_dim: int, group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.split_dim, ctx.join_dim, ctx.group = split_dim, join_dim, group
        return _exchange(split_dim, join_dim, group, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *_exchange(ctx.join_dim, ctx.split_dim, ctx.group, gradients)


def _exchange(
    split_dim: int, join_dim: int, group: dist.ProcessGroup, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Exchange all tensors in one all-to-all."""
    shards = [torch.stack(tensor.chunk(group.size(), split_dim)) for tensor in tensors]
    received = all_to_all_tensor(torch.cat([shard.flatten(1) for shard in shards], 1), group)
    parts = received.split([shard[0].numel() for shard in shards], 1)
    return tuple(
        torch.cat(part.view(shard.shape).unbind(), join_dim) for part, shard in zip(parts, shards, strict=True)
    )


def _note(module: nn.Module) -> None:
    if not torch.compiler.is_compiling() and (running := _running.get()) is not None:
        running.attended.add(module)


def _check_not_sharded(module: nn.Module) -> None:
    running = _running.get()
    if running is not None:
        raise ValueError(
            f"cp_size={running.group.size()}: {get_class_name(module)} of {running.model} was given a mask that the"
            " model does not make by transformers' mask functions, or none. Use cp_size=1 for it."
        )


def _check_positions(module: nn.Module, query: Tensor, key: Tensor, mask: SequenceMask) -> None:
    ranks = mask.group.size()
    if not query.size(2) == key.size(2) == mask.length // ranks:
        raise ValueError(
            f"cp_size={ranks}: {get_class_name(module)} attends from {query.size(2)} to {key.size(2)} positions, where"
            f" this rank holds {mask.length // ranks}: it adds or leaves out some (a prefix, registers). Use cp_size=1."
        )


def _check_arguments(module: nn.Module, ranks: int, arguments: dict[str, Any]) -> None:
    given = [
        name
        for name in ("dropout", "softcap", "position_bias", "head_mask", "indices", "block_indices", "sinks")
        if arguments.get(name) is not None
    ]
    if given or arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        what = f"{', '.join(given)}={arguments[given[0]]!r}" if given else "is_causal=False"
        raise ValueError(
            f"cp_size={ranks}: {get_class_name(module)} asks its attention for {what}, which context parallel attention"
            " does not have. Set it to zero or None in the model's config, or use cp_size=1."
        )


def _get_function(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the function that transformers calls for an attention implementation.

    Each model file of transformers has its own ``eager_attention_forward``.
    """
    from transformers import AttentionInterface

    own = (getattr(sys.modules.get(base.__module__), "eager_attention_forward", None) for base in type(module).__mro__)
    function: Callable[..., Any] = AttentionInterface().get_interface(name, next(filter(None, own), _has_no_function))
    return function


def _has_no_function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{get_class_name(module)} has no attention function of transformers; use attn_implementation='sdpa'."
    )

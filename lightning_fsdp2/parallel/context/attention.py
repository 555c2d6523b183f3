"""Attention of context parallel models, which transformers calls instead of its own attention functions.

Sequences are split over the ranks of a group. There are two methods of attending to whole sequences:

- ``allgather``: each rank holds two chunks (:func:`get_head_tail_chunks`) and gathers the keys and values of all ranks.
  Only key-value heads are communicated. The traffic per rank does not decrease when the number of ranks increases.
- ``ulysses`` (https://arxiv.org/abs/2309.14509): each rank holds one chunk with all heads. Before attention, an
  all-to-all redistributes the data, so that each rank holds the whole sequence for some of the heads. After attention,
  a second all-to-all redistributes the result in the opposite direction.

A model builds its mask once per forward and passes the mask to each layer, and each layer passes it to the attention
function. In context parallel models, a :class:`SequenceMask` replaces the mask tensor. It says which keys of the whole
sequence each query sees, and which process group holds the sequence. Activation checkpointing keeps this object for the
recomputation.
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
"""Number of models that have installed context parallel attention in a config, by the ``id()`` of the config."""

_configs: Counter[str] = Counter()
"""Number of configs that use each registered attention name."""


@dataclass(frozen=True)
class SequenceMask:
    """Attention mask of a split sequence: the keys that each query sees, and how the sequence is split."""

    blocks: tuple[Block, ...]
    """Blocks of the queries whose attention this rank computes."""

    padding: Tensor | None
    """[batch, queries of ``blocks``], bool: True for queries that see no keys. None if there is no padding."""

    length: int
    method: Method
    group: dist.ProcessGroup

    def __getitem__(self, index: tuple[slice, ...]) -> "SequenceMask":
        """Return this mask itself. Indexing is allowed only if ``index`` selects the whole mask.

        Gemma 4 indexes its mask to select the last ``logits_to_keep`` queries, where 0 stands for all queries.

        Raises:
            TypeError: If ``index`` selects only a part of the mask.
        """
        if any(part not in (slice(None), slice(0, None)) for part in index):
            raise TypeError(
                f"{type(self).__name__} cannot be indexed with {index}, which selects only a part of the mask"
            )
        return self


@dataclass(frozen=True)
class _Forward:
    """State of a model's forward, including the position ids and documents of the whole sequences."""

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
    """Make models build masks and compute attention for whole sequences inside the block.

    Yields:
        The set of modules that have called attention over the whole sequence inside the block. It grows while the
        block runs. Calls in compiled code are not recorded.

    Args:
        model: Name of the model, for messages.
        positions: [..., length], position ids of the whole sequences.
        batch_size: Number of sequences.
        documents: Packed documents in the sequences. Attention does not cross the borders between documents. None if
            each sequence is one document.
        padding: [batch, length], bool: True for padding positions, which attend to no keys. None without padding.
        method: Method of attending to whole sequences.
        group: Process group of the ranks over which the sequences are split.
    """
    running = _Forward(model, positions.size(-1), batch_size, positions, documents, padding, method, group)
    token = _running.set(running)
    try:
        yield running.attended
    finally:
        _running.reset(token)


def is_running_sharded() -> bool:
    """Return whether the caller is inside a :func:`run_sharded` block."""
    return _running.get() is not None


def get_optional_whole_positions() -> Tensor | None:
    """Return the position ids of the whole sequences, or None outside a :func:`run_sharded` block."""
    running = _running.get()
    return running.positions if running is not None else None


def install_attention(config: Any) -> None:
    """Make modules with this config call context parallel attention inside a :func:`run_sharded` block.

    Outside such a block, the modules still call their original attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    _uses[id(config)] += 1
    original = get_attention(config)
    if isinstance(original, _AttentionName):
        return  # another model with the same config object has already installed the attention
    name = _AttentionName(original)
    AttentionInterface.register(name, _Attention(original))
    AttentionMaskInterface.register(name, _Mask(original))
    _configs[name] += 1
    set_attention(config, name)


def uninstall_attention(config: Any) -> None:
    """Undo one call of :func:`install_attention` for this config.

    When all calls for a config have been undone, the config gets its original attention back.
    """
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
    """Name under which context parallel attention is registered in transformers.

    When the name is copied or pickled, it becomes the name of the original attention. This is needed because saved
    hyperparameters may contain a config with this name, and the process that loads them may not have registered context
    parallel attention.
    """

    original: str

    def __new__(cls, original: str) -> "_AttentionName":
        # if the name contained "flash", models would prepare arguments that only flash attention takes
        name = super().__new__(cls, f"{_PREFIX}{original.replace('flash', 'fused')}")
        name.original = original
        return name

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.original,)


class _Mask:
    """Mask function for transformers that builds a :class:`SequenceMask` instead of a mask tensor."""

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
                f"cp_size={running.group.size()}: {running.model} modifies the causal mask with its own function, which"
                " may read tensors that are split over the ranks. Use cp_size=1 for this model."
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
    """Return the size of a causal mask's sliding window, or None if every query sees all earlier keys.

    Raises:
        ValueError: If the mask is not causal, or restricts the keys in any way other than a sliding window.
    """
    try:
        key = _describe(mask_function)
    except TypeError:
        window = _find_window(mask_function, running.length)
    else:
        window = _find_window_once(_MaskFunction(key, mask_function), running.length)
    if window is None:
        raise ValueError(
            f"cp_size={running.group.size()}: the attention mask of {running.model} is neither causal nor a causal"
            " sliding window. It may be chunked or bidirectional. Use cp_size=1 for this model."
        )
    return window if window < running.length else None


def _describe(value: Any) -> Hashable:
    """Return a description that is equal for mask functions with the same code and the same constants.

    Models create a new mask function for each forward, and Python never considers two function objects equal.

    Args:
        value: A mask function, or a value in the closure of one.

    Raises:
        TypeError: If the mask function does not belong to transformers, or uses values other than integers and mask
            functions, such as a tensor.
    """
    from transformers import masking_utils

    if isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return tuple(map(_describe, value))
    if isinstance(value, FunctionType) and value.__globals__ is vars(masking_utils) and not value.__defaults__:
        return (value.__code__, *(_describe(cell.cell_contents) for cell in value.__closure__ or ()))
    raise TypeError(f"{value!r} is neither a constant integer nor a mask function defined in transformers")


@dataclass(frozen=True)
class _MaskFunction:
    """Mask function as a cache key. Two keys are equal if the descriptions of their functions are equal."""

    description: Hashable
    compute: Callable[..., Any] = field(compare=False)


@lru_cache(maxsize=256)
def _find_window_once(function: _MaskFunction, length: int) -> int | None:
    return _find_window(function.compute, length)


def _find_window(mask_function: Callable[..., Any], length: int) -> int | None:
    """Find the size of a causal mask's sliding window, by checking which keys a few queries see.

    Return ``length`` for a causal mask without a window. Return None if the mask is not causal, or restricts the keys
    in any way other than a sliding window.
    """
    last, keys = length - 1, torch.arange(length)

    def is_seen(query: int) -> Tensor:
        return mask_function(0, 0, torch.tensor(query), keys).expand(length)

    try:
        window = int(is_seen(last).sum())
        queries = {0, 1, last // 3, last // 2, min(window, last), last}
        is_window = all(torch.equal(is_seen(query), (keys <= query) & (keys > query - window)) for query in queries)
    except (IndexError, RuntimeError):  # raised if the function reads a tensor that holds only a part of the sequence
        return None
    return window if is_window else None


class _Attention:
    """Attention function of context parallel models, which is registered in transformers.

    With a :class:`SequenceMask`, it attends to the whole sequence. With any other mask, it calls the original function.
    """

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
    """Differentiable all-to-all that splits tensors along one dim, and joins the received parts along another dim."""

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
    """Split several tensors along one dim, exchange the parts in one all-to-all, and join them along another dim."""
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
            f"cp_size={running.group.size()}: {get_class_name(module)} of {running.model} got no mask, or a mask that"
            " was not built by transformers' mask functions. Use cp_size=1 for this model."
        )


def _check_positions(module: nn.Module, query: Tensor, key: Tensor, mask: SequenceMask) -> None:
    ranks = mask.group.size()
    if not query.size(2) == key.size(2) == mask.length // ranks:
        raise ValueError(
            f"cp_size={ranks}: {get_class_name(module)} has {query.size(2)} queries and {key.size(2)} keys, but this"
            f" rank holds {mask.length // ranks} positions of the sequence. The model adds positions (a prefix,"
            " registers) or leaves some out. Use cp_size=1."
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
            f"cp_size={ranks}: {get_class_name(module)} calls its attention with {what}, which context parallel"
            " attention does not support. Disable this feature in the model's config, or use cp_size=1."
        )


def _get_function(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the function that ``module`` calls for the attention implementation ``name`` of transformers.

    For ``"eager"``, this depends on the module, because each model file of transformers defines its own function.
    """
    from transformers import AttentionInterface

    own = (getattr(sys.modules.get(base.__module__), "eager_attention_forward", None) for base in type(module).__mro__)
    function: Callable[..., Any] = AttentionInterface().get_interface(name, next(filter(None, own), _has_no_function))
    return function


def _has_no_function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{get_class_name(module)}: the file that defines this class has no `eager_attention_forward`; use"
        " attn_implementation='sdpa'."
    )

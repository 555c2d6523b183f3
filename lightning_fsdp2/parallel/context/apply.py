"""Context parallelism: each rank computes a part of every sequence (https://arxiv.org/abs/2411.01783).

Callers still pass whole sequences to a Hugging Face model. The model's forward selects this rank's positions from every
argument that has a value per position, and computes only these positions, with explicit position ids. Only attention
sees the whole sequence; see :mod:`~lightning_fsdp2.parallel.context.attention`.

Labels are shifted before they are split, and the model returns the loss over all positions. Other results, such as
``logits``, cover only this rank's positions. :func:`shard_sequence` selects this rank's positions from any other
tensor, and :func:`gather_sequence` joins the results of all ranks.
"""

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.modules.structure import ModelStructure, get_class_name, get_optional_embedding
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.context.checks import check_context_parallel, choose_method
from lightning_fsdp2.parallel.context.forward import ShardedForward, WholeRotary, computes_by_length
from lightning_fsdp2.parallel.context.sharding import SequenceSharding

_ATTRIBUTE = "_lightning_fsdp2_context_parallel"

_PER_POSITION: dict[str, int | None] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "token_type_ids": 1,
    "labels": 1,
    "shift_labels": 1,
}
"""Model arguments that have a value per position, as a mapping from their names to their sequence dims."""


def apply_context_parallel(
    structure: ModelStructure,
    group: dist.ProcessGroup,
    *,
    method: str = "auto",
    inputs: Mapping[str, int | None] | None = None,
    tp_size: int = 1,
    sequence_parallel: bool = False,
    assumes_unpacked: bool = False,
) -> None:
    """Split the input sequences of Hugging Face models over the ranks of ``group``.

    Args:
        structure: Structure of the module that contains the models. The module must not be sharded yet, and is changed
            in place.
        group: Process group of the context parallel ranks.
        method: ``"allgather"``, ``"ulysses"``, or ``"auto"``, which chooses ``"ulysses"`` if it moves less data and the
            heads can be divided over the ranks.
        inputs: Additional tensor arguments of the models' forwards, as a mapping from the name of each argument to its
            sequence dim, or to None if every rank gets the whole tensor.
        tp_size: Number of tensor parallel ranks, over which the attention heads are already divided.
        sequence_parallel: Whether the tensor parallel ranks further split this rank's part of the sequence.
        assumes_unpacked: Whether to assume that position ids never restart, and skip the search for packed documents.

    Raises:
        ValueError: If there is no Hugging Face model, if a model's layers mix positions by means other than
            transformers' attention, or if ``"ulysses"`` is requested and the heads cannot be divided over the ranks.
    """
    if not structure.models:
        raise ValueError(
            f"cp_size={group.size()} splits the input sequences of Hugging Face models, but"
            f" {get_class_name(structure.root)} contains no such model. Use cp_size=1."
        )
    for parts in structure.models:
        hf_model = parts.module
        check_context_parallel(parts, group.size())
        sharding = SequenceSharding(
            hf_model,
            group,
            method=choose_method(hf_model, method, group.size(), tp_size),
            inputs={**_PER_POSITION, **(inputs or {})},
            divisor=2 * group.size() * (tp_size if sequence_parallel else 1),
            assumes_unpacked=assumes_unpacked,
        )
        # also wrap the base model, because the user may call it directly
        called = [inner for inner in parts.hf_models if get_optional_embedding(inner) is not None]
        for inner in called:
            inner.__dict__[_ATTRIBUTE] = sharding
            wrap_method(inner, ShardedForward(inner, sharding))
        for inner in hf_model.modules():
            if inner not in called and computes_by_length(inner):
                wrap_method(inner, WholeRotary(sharding))
        sharding.activate()


def activate_context_parallel(model: nn.Module) -> None:
    """Reactivate context parallelism after :func:`deactivate_context_parallel`.

    The Hugging Face models in ``model`` then split their input sequences over the ranks again.
    """
    for sharding in _get_shardings(model):
        sharding.activate()


def deactivate_context_parallel(model: nn.Module) -> None:
    """Deactivate context parallelism, so that the models compute whole sequences with their original attention."""
    for sharding in _get_shardings(model):
        sharding.deactivate()


def shard_sequence(model: nn.Module, tensor: Tensor, dim: int = 1) -> Tensor:
    """Return the part of ``tensor`` for the positions that this rank computes in the forward of ``model``.

    Without context parallelism, this function returns the whole tensor.

    Args:
        model: A Hugging Face model, or a module that contains one.
        tensor: Tensor with a value for each position of the whole sequence along ``dim``.
        dim: Sequence dim of ``tensor``.
    """
    sharding = get_optional_sharding(model)
    return tensor if sharding is None else sharding.shard(tensor, dim)


def gather_sequence(model: nn.Module, tensor: Tensor, dim: int = 1) -> Tensor:
    """Gather the results of all ranks into one tensor for the whole sequence.

    The operation is differentiable. :func:`shard_sequence` is its inverse.

    Args:
        model: A Hugging Face model, or a module that contains one.
        tensor: Result of the model, such as logits, with a value for each of this rank's positions along ``dim``.
        dim: Sequence dim of ``tensor``.

    Returns:
        The result for the whole sequence, in the order of its positions. The backward pass sums the gradients of all
        ranks. FSDP later averages gradients over the ranks, which gives the gradient of the mean of the ranks' losses.
    """
    sharding = get_optional_sharding(model)
    return tensor if sharding is None else sharding.gather(tensor, dim)


def sum_over_positions(model: nn.Module, tensor: Tensor) -> Tensor:
    """Return the sum of ``tensor`` over the ranks that share the model's sequences.

    No gradient flows through the sum.
    """
    sharding = get_optional_sharding(model)
    if sharding is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=sharding.group)
    return total


def get_optional_sharding(model: nn.Module) -> "SequenceSharding | None":
    """Return the active :class:`SequenceSharding` of the first context parallel model in ``model``, or None."""
    return next((sharding for sharding in _get_shardings(model) if sharding.is_active), None)


def _get_shardings(model: nn.Module) -> Iterator[SequenceSharding]:
    return iter(dict.fromkeys(m.__dict__[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in m.__dict__))

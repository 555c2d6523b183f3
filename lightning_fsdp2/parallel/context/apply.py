"""Context parallelism: each rank computes a part of every sequence (https://arxiv.org/abs/2411.01783).

A Hugging Face model is given whole sequences, as without it. Its forward takes this rank's positions of every argument
that has a value per position, and runs on them as on a shorter sequence whose positions are told to it; only attention
sees more, see :mod:`~lightning_fsdp2.parallel.context.attention`. Labels are shifted while they are whole, and the
loss that the model returns is that of all positions. Other results, such as ``logits``, are of this rank's positions:
:func:`shard_sequence` takes the same positions of a tensor of yours, :func:`gather_sequence` puts results together.
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
"""Arguments of models that have a value per position, and the dim of the positions."""


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
    """Split the sequences that Hugging Face models are given over the ranks of ``group``.

    Args:
        structure: Of the module with the models, which is changed in place and not sharded yet.
        group: The context parallel ranks.
        method: ``"allgather"``, ``"ulysses"``, or ``"auto"``: whichever moves less, where heads can be exchanged.
        inputs: Further arguments of the models' forwards that are tensors, and the dim in which they have a value per
            position; None for those to leave whole.
        tp_size: Tensor parallel ranks, between which heads are divided already.
        sequence_parallel: Whether the tensor parallel ranks divide the rank's part of the sequence further.
        assumes_unpacked: Whether position ids are known not to restart, so that nobody need look.

    Raises:
        ValueError: When there is no Hugging Face model, or one whose layers mix positions by other means than
            transformers' attention, or whose heads cannot be exchanged.
    """
    if not structure.models:
        raise ValueError(
            f"cp_size={group.size()} splits the sequences that a Hugging Face model is given, but there is none in"
            f" {get_class_name(structure.root)}. Use cp_size=1."
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
        # its base model may be called by itself
        called = [inner for inner in parts.hf_models if get_optional_embedding(inner) is not None]
        for inner in called:
            inner.__dict__[_ATTRIBUTE] = sharding
            wrap_method(inner, ShardedForward(inner, sharding))
        for inner in hf_model.modules():
            if inner not in called and computes_by_length(inner):
                wrap_method(inner, WholeRotary(sharding))
        sharding.activate()


def activate_context_parallel(model: nn.Module) -> None:
    """Undo :func:`deactivate_context_parallel`."""
    for sharding in _get_shardings(model):
        sharding.activate()


def deactivate_context_parallel(model: nn.Module) -> None:
    """Let models compute whole sequences on every rank, with the attention that they had before."""
    for sharding in _get_shardings(model):
        sharding.deactivate()


def shard_sequence(model: nn.Module, tensor: Tensor, dim: int = 1) -> Tensor:
    """Take the positions that this rank's forward of ``model`` computes; all of them without context parallelism.

    Args:
        model: A Hugging Face model, or a module around one.
        tensor: With a value per position of the whole sequence along ``dim``.
        dim: Of the sequence.
    """
    sharding = get_optional_sharding(model)
    return tensor if sharding is None else sharding.shard(tensor, dim)


def gather_sequence(model: nn.Module, tensor: Tensor, dim: int = 1) -> Tensor:
    """Put together what the ranks have computed for their positions; differentiable, and undone by slicing alone.

    Args:
        model: A Hugging Face model, or a module around one.
        tensor: A result of it, such as logits, with a value per position of this rank along ``dim``.
        dim: Of the sequence.

    Returns:
        The same for the whole sequence, in its order. Gradients of all ranks are summed, so that the mean of their
        losses has the right one.
    """
    sharding = get_optional_sharding(model)
    return tensor if sharding is None else sharding.gather(tensor, dim)


def sum_over_positions(model: nn.Module, tensor: Tensor) -> Tensor:
    """Sum what the ranks have computed from their positions of the same sequences; without gradient."""
    sharding = get_optional_sharding(model)
    if sharding is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=sharding.group)
    return total


def get_optional_sharding(model: nn.Module) -> "SequenceSharding | None":
    """How the sequences of the (first) Hugging Face model in ``model`` are split; None if they are not."""
    return next((sharding for sharding in _get_shardings(model) if sharding.is_active), None)


def _get_shardings(model: nn.Module) -> Iterator[SequenceSharding]:
    return iter(dict.fromkeys(m.__dict__[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in m.__dict__))

"""Checkpoints of a model whose pipeline stages hold different tensors.

A checkpoint has the names of the whole model, whatever stages there are. What one stage saves is united with what the
others save. In what a stage loads, tensors that only other stages hold are on the meta device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2.checkpoint.files.chunks import compute_checksum
from lightning_fsdp2.checkpoint.nested import is_marked, map_tensors, pop_sharded
from lightning_fsdp2.compat.torch import tree_map_only
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.parallel.pipeline.apply import get_optional_pipeline
from lightning_fsdp2.ranks.coordination import gather_objects

T = TypeVar("T")


def list_names_elsewhere(model: nn.Module) -> set[str]:
    """Return the names of those tensors of the whole model that this rank's stages do not have."""
    stages = get_optional_stages(model)
    if stages is None:
        return set()
    own = model.state_dict().keys() | {name for name, _ in model.named_parameters()}
    return (stages.state.keys() | stages.parameters.keys()) - own


def get_optional_pipeline_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the CPU group of the ranks of the pipeline that ``model`` is divided over, or None if it is whole."""
    run = get_optional_pipeline(model)
    return None if run is None else run.control


def gather_over_stages(model: nn.Module, value: T) -> list[T]:
    """Return the values of all ranks of the pipeline, by pipeline rank; only ``value`` if ``model`` is whole."""
    group = get_optional_pipeline_group(model)
    return [value] if group is None else gather_objects(value, group)


def unite_groups(model: nn.Module, groups: list[list[str]]) -> list[list[str]]:
    """Return the parameters of all stages in each of an optimizer's groups, in the order that one process would have.

    Args:
        model: Model whose parameters are optimized.
        groups: Names of this rank's parameters, by group.

    Raises:
        ValueError: On all ranks of the pipeline, if the stages have different numbers of groups.
    """
    stages = get_optional_stages(model)
    if stages is None:
        return groups
    parts = gather_over_stages(model, groups)
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            f"pp_size={stages.num_ranks}: the optimizer has {', '.join(str(len(part)) for part in parts)} parameter"
            " groups on the ranks of the pipeline, but a checkpoint needs the same groups on all stages. In"
            " `configure_optimizers`, keep groups that have no parameters on a stage."
        )
    order = {name: index for index, name in enumerate(stages.parameters)}
    return [list(dict.fromkeys(merge(*names, key=order.__getitem__))) for names in zip(*parts, strict=True)]


def unite(values: Sequence[Any]) -> Any:
    """Return nested dicts with the entries of all ``values``; the first that has an entry decides its value.

    Lists of the same length are united item by item.
    """
    first = values[0]
    if isinstance(first, dict):
        dicts = [value for value in values if isinstance(value, dict)]
        keys = dict.fromkeys(chain.from_iterable(dicts))
        return {key: unite([value[key] for value in dicts if key in value]) for key in keys}
    if isinstance(first, list) and all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [unite(items) for items in zip(*values, strict=True)]
    return first


def check_lists(content: Any, group: dist.ProcessGroup) -> None:
    """Refuse lists of DTensors, because items of different stages would have the same place in a checkpoint.

    Args:
        content: Nested containers to save.
        group: CPU group of the ranks of the pipeline.

    Raises:
        ValueError: On all ranks of the pipeline, if there is such a list on any of them.
    """
    found = sorted(set(chain.from_iterable(gather_objects(list(_list_lists(content)), group))))
    if found:
        raise ValueError(
            f"pp_size={group.size()}: a checkpoint cannot hold the list of sharded tensors at {', '.join(found[:5])},"
            " because each stage has other tensors at the same places of the list. Save them in a dict by their names,"
            " such as dict(module.named_parameters())."
        )


def _list_lists(value: Any, path: str = "") -> Iterator[str]:
    """List the paths of lists and tuples with DTensors."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _list_lists(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        if any(isinstance(item, DTensor) for item in value):
            yield path
        for index, item in enumerate(value):
            yield from _list_lists(item, f"{path}.{index}")


def pop_sharded_of_stages(
    metadata: dict[str, Any], own: dict[str, Any], group: dist.ProcessGroup | None
) -> tuple[Any, dict[str, Any]]:
    """Separate the DTensors in a checkpoint's content from its other values, on all stages.

    Args:
        metadata: Content of the checkpoint. The values of the first stage are saved, and the DTensors of all stages.
        own: Content of the checkpoint. The entries of all stages are saved.
        group: CPU group of the ranks of the pipeline; None without a pipeline.

    Returns:
        The content with a placeholder for each DTensor of any stage, and this rank's DTensors; see
        :func:`~lightning_fsdp2.checkpoint.nested.pop_sharded`.

    Raises:
        ValueError: See :func:`check_lists`.
    """
    if group is not None:
        check_lists(metadata, group)
    marked, sharded = pop_sharded({**metadata, **own}, numbered=group is None)
    if group is None:
        return marked, sharded
    kept = {key: value for key in metadata if (value := _keep_marked(marked[key])) is not None}
    parts = gather_objects({**kept, **{key: marked[key] for key in own}}, group)
    return unite([marked, *parts]), sharded


def _keep_marked(value: Any) -> Any:
    """Return only the entries of nested dicts in which there are placeholders, or None if there are none."""
    if not isinstance(value, dict):
        return value if is_marked(value) else None
    return {key: kept for key, item in value.items() if (kept := _keep_marked(item)) is not None} or None


@dataclass(frozen=True)
class _Elsewhere:
    """Description of a tensor that a rank of the pipeline has."""

    rank: int
    index: int
    shape: torch.Size
    dtype: torch.dtype


def send_to_first_stage(values: Any, group: dist.ProcessGroup) -> Any:
    """Unite nested containers of all stages on the first rank of ``group``.

    Args:
        values: This rank's containers, with whole tensors in host memory.
        group: CPU group of the ranks of the pipeline.

    Returns:
        The containers with the entries of all ranks on the first rank, see :func:`unite`, and an empty dict on the
        other ranks.
    """
    own: list[Tensor] = []
    rank = group.rank()

    def describe(tensor: Tensor) -> _Elsewhere:
        own.append(tensor)
        return _Elsewhere(rank, len(own) - 1, tensor.shape, tensor.dtype)

    def send(tensor: _Elsewhere) -> Tensor | None:
        if tensor.rank == rank:
            if rank > 0:
                dist.send(own[tensor.index].contiguous(), group=group, group_dst=0)
            return own[tensor.index]
        if rank > 0:
            return None
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(received, group=group, group_src=tensor.rank)
        return received

    described = unite(gather_objects(map_tensors(describe, values), group))
    sent = tree_map_only(_Elsewhere, send, described)
    return sent if rank == 0 else {}


def check_same_on_all_ranks(
    name: str, state: dict[str, Any], group: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None
) -> None:
    """Refuse an optimizer state with plain tensors that differ between ranks, as only one rank's would be saved.

    This happens when an optimizer computes plain tensors from the local shards of its parameters. Only ranks of the
    same pipeline stage are compared.

    Args:
        name: Name of the optimizer in the checkpoint.
        state: State of the optimizer.
        group: Process group of all ranks.
        pipeline: CPU group of the ranks of the pipeline; None without a pipeline.

    Raises:
        ValueError: On all ranks, when the plain tensors differ.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    digests: dict[str, str] = {}
    for parameter, values in state["state"].items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
                digests[f"{parameter}.{key}"] = compute_checksum(value)
    firsts: dict[int, dict[str, str]] = {}
    different = set[str]()
    for stage, other in gather_objects((0 if pipeline is None else pipeline.rank(), digests), group):
        first = firsts.setdefault(stage, other)
        different |= {key for key in {*first, *other} if first.get(key) != other.get(key)}
    if different:
        raise ValueError(
            f"The state of {name} holds plain tensors that differ by rank ({', '.join(sorted(different)[:5])}), but a"
            " checkpoint can only hold those of one rank. Change the optimizer so that it computes its states from its"
            " DTensor parameters, not from their local shards: the states are then DTensors."
        )

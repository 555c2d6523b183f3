"""Checkpoints in a single file, as Lightning's other strategies write them: whole tensors, numbered parameters."""

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.checkpoint.directory import get_optimizer_keys, get_optimizer_states
from lightning_fsdp2.checkpoint.files.drafts import AnyPath, check_free_space, start_draft
from lightning_fsdp2.checkpoint.files.storage import DurableFile, load_pickled, save_plain, warn_of_objects
from lightning_fsdp2.checkpoint.nested import map_tensors
from lightning_fsdp2.checkpoint.state import number_parameters
from lightning_fsdp2.ranks.coordination import get_rank, on_every_rank, on_first_rank
from lightning_fsdp2.ranks.whole_tensors import gather as gather_tensor


def gather_state(state: dict[str, Any], *, copies: bool = True) -> dict[str, Any]:
    """Gather the tensors of nested containers on rank 0's host, one at a time; every rank must call it.

    Args:
        state: Nested containers with sharded and other tensors.
        copies: Whether to copy tensors that rank 0 already holds whole on its host, since they may change later.

    Returns:
        On rank 0, the containers with whole tensors; on the others, an empty dict.
    """
    keep = get_rank() == 0

    def gather(tensor: Tensor) -> Tensor | None:
        tensor = tensor.detach()
        whole, local = gather_tensor(tensor), tensor.to_local() if isinstance(tensor, DTensor) else tensor
        is_own = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return whole.to("cpu", copy=copies and is_own) if keep else None

    gathered: dict[str, Any] = map_tensors(gather, state)
    return gathered if keep else {}


def gather_whole(
    checkpoint: dict[str, Any], group: dist.ProcessGroup | None = None, *, copies: bool = True, trust: bool = False
) -> dict[str, Any]:
    """Gather a checkpoint as :func:`gather_state` does, and number the parameters in its optimizer states.

    Args:
        checkpoint: Checkpoint of the Trainer.
        group: Process group for coordination; a CPU group spares the accelerator.
        copies: See :func:`gather_state`; not needed if the result is written at once.
        trust: Whether the checkpoint will be trusted when it is loaded; if not, objects in it cause a warning.

    Returns:
        On rank 0, the checkpoint with whole tensors and numbered optimizer states; on the others, an empty dict.

    Raises:
        Exception: On every rank, when rank 0 could not copy the rest of the checkpoint.
    """
    gathered = gather_state(checkpoint, copies=copies)
    return on_every_rank(lambda: _detach(gathered, trust) if get_rank() == 0 else {}, group)


def write_file(path: AnyPath, checkpoint: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write the result of :func:`gather_whole` to a file that is complete or absent; every rank must call it.

    Raises:
        Exception: On every rank, when the file could not be written. An existing file at ``path``
            is kept, except in an object store.
    """
    on_first_rank(lambda: write_file_alone(path, checkpoint), group)


def write_file_alone(path: AnyPath, checkpoint: dict[str, Any]) -> None:
    """Write the same file as :func:`write_file` from this process alone, with or without a process group."""
    draft = start_draft(path)
    try:
        check_free_space(path, sum(_get_sizes(checkpoint)))
        with DurableFile(draft.path) as file:
            save_plain(checkpoint, file)
        draft.publish()
    except BaseException:
        draft.discard()
        raise


def read_file(path: AnyPath, *, with_optimizers: bool = True, trust: bool = False) -> dict[str, Any]:
    """Read a single file; the tensors of a local file are memory-mapped.

    Args:
        path: File that this package or Lightning saved under any strategy, that Lightning's
            ``consolidate_checkpoint`` wrote, or that holds a plain ``state_dict``.
        with_optimizers: Whether to return optimizer states.
        trust: Whether the file may hold any object, which can run code when it is loaded.

    Returns:
        The checkpoint as Lightning's Trainer keeps it; for a plain ``state_dict``, a dict with that key alone.

    Raises:
        ValueError: When the file is something else, is damaged, or holds objects and is not trusted.
    """
    content = load_pickled(path, trust=trust, mmap=True)
    if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        content = {"state_dict": content}
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(
            f"{str(path)!r} holds no checkpoint: neither a `state_dict` alone, nor one of Lightning, which has a key of"
            " that name."
        )
    states = content.pop("optimizer_states", None)
    if states is None and get_optimizer_keys(content):
        states = get_optimizer_states(content)  # as Lightning's `consolidate_checkpoint` leaves them
    rest = {key: value for key, value in content.items() if key not in get_optimizer_keys(content)}
    return {**rest, "optimizer_states": states} if with_optimizers and states is not None else rest


def _detach(gathered: dict[str, Any], trust: bool) -> dict[str, Any]:
    """Number the parameters in optimizer states, and copy the rest except the weights, since it may still change."""
    if not trust:
        warn_of_objects(gathered)
    if "optimizer_states" in gathered:
        gathered["optimizer_states"] = [number_parameters(state) for state in gathered["optimizer_states"]]
    tensors = ("state_dict", "optimizer_states")
    rest = copy.deepcopy({key: value for key, value in gathered.items() if key not in tensors})
    return {**gathered, **rest}


def _get_sizes(checkpoint: dict[str, Any]) -> list[int]:
    sizes: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(add, checkpoint)
    return sizes

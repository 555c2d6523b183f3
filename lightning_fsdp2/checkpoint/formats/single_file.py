"""Read and write checkpoints in a single file with whole tensors, as Lightning's non-sharding strategies do."""

import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.checkpoint.files.drafts import AnyPath, check_free_space, discard_on_error, start_draft
from lightning_fsdp2.checkpoint.files.errors import say_what_is_kept
from lightning_fsdp2.checkpoint.files.storage import DurableFile, load_pickled, save_plain, warn_of_objects
from lightning_fsdp2.checkpoint.formats.directory import get_optimizer_keys, get_optimizer_states
from lightning_fsdp2.checkpoint.nested import map_tensors
from lightning_fsdp2.checkpoint.stages import check_lists, send_to_first_stage
from lightning_fsdp2.checkpoint.state import number_parameters
from lightning_fsdp2.ranks.coordination import get_rank, on_every_rank, on_first_rank
from lightning_fsdp2.ranks.whole_tensors import gather as gather_tensor


def gather_state(
    state: dict[str, Any], *, copies: bool = True, pipeline: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Gather the tensors of nested containers on rank 0's host, one at a time. Every rank must call this.

    With pipeline stages, the first rank of each stage gathers the tensors of its stage, and then sends them to rank 0.

    Args:
        state: Nested containers with sharded and other tensors.
        copies: Whether to copy tensors that are already whole on rank 0's host, in case they change later.
        pipeline: CPU group of the ranks of the pipeline; None without a pipeline.

    Returns:
        The containers with whole tensors on rank 0, and an empty dict on the other ranks.
    """
    keep = get_rank() == 0 or (pipeline is not None and 0 in dist.get_process_group_ranks(pipeline))

    def gather(tensor: Tensor) -> Tensor | None:
        tensor = tensor.detach()
        whole, local = gather_tensor(tensor), tensor.to_local() if isinstance(tensor, DTensor) else tensor
        is_own = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return whole.to("cpu", copy=copies and is_own) if keep else None

    gathered: dict[str, Any] = map_tensors(gather, state)
    if keep and pipeline is not None:
        gathered = send_to_first_stage(gathered, pipeline)
    return gathered if keep else {}


def gather_whole(
    checkpoint: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    *,
    copies: bool = True,
    trust: bool = False,
    pipeline: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Gather a checkpoint on rank 0, and replace parameter names in its optimizer states with numbers.

    Args:
        checkpoint: Checkpoint of the Trainer.
        group: Process group for messages between the ranks. A CPU group keeps these messages off the accelerator.
        copies: Whether to copy tensors that may change later. False is enough if the result is written at once.
        trust: Whether users will trust the checkpoint when they load it. If not, arbitrary objects in it cause a
            warning.
        pipeline: See :func:`gather_state`.

    Returns:
        The checkpoint with whole tensors and parameter numbers on rank 0, and an empty dict on the other ranks.

    Raises:
        ValueError: See :func:`~lightning_fsdp2.checkpoint.stages.check_lists`.
        Exception: On every rank, when rank 0 could not copy a value other than weights and optimizer states.
    """
    if pipeline is not None:
        check_lists(checkpoint, pipeline)
    gathered = gather_state(checkpoint, copies=copies, pipeline=pipeline)
    return on_every_rank(lambda: _detach(gathered, trust) if get_rank() == 0 else {}, group)


def write_file(path: AnyPath, checkpoint: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write the result of :func:`gather_whole` atomically to a file. Every rank must call this.

    Raises:
        Exception: On every rank, when the file could not be written. An existing file at ``path`` is then kept, except
            in an object store.
    """
    on_first_rank(lambda: write_file_alone(path, checkpoint), group)


def write_file_alone(path: AnyPath, checkpoint: dict[str, Any]) -> None:
    """Write the same file as :func:`write_file`, but from this process alone. No other rank needs to call this."""
    draft = start_draft(path)
    with discard_on_error([draft]):
        check_free_space(path, sum(_get_sizes(checkpoint)))
        with say_what_is_kept(path):
            with DurableFile(draft.path) as file:
                save_plain(checkpoint, file)
            draft.publish()


def read_file(path: AnyPath, *, with_optimizers: bool = True, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint in a single file. The tensors of a local file are memory-mapped.

    Args:
        path: Checkpoint file of this package, of any Lightning strategy or of Lightning's ``consolidate_checkpoint``,
            or a file with a plain ``state_dict``.
        with_optimizers: Whether to return optimizer states.
        trust: Whether the file may hold arbitrary objects, which can run code when they are loaded.

    Returns:
        The checkpoint dict of Lightning's Trainer. For a plain ``state_dict``, the only key is ``state_dict``.

    Raises:
        ValueError: When the file is not a checkpoint, is damaged, or holds arbitrary objects while ``trust`` is False.
    """
    content = load_pickled(path, trust=trust, mmap=True)
    if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        content = {"state_dict": content}
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(
            f"{str(path)!r} is not a checkpoint: it is neither a plain `state_dict`, nor a checkpoint of Lightning,"
            " which has the key `state_dict`."
        )
    states = content.pop("optimizer_states", None)
    if states is None and get_optimizer_keys(content):
        # Lightning's `consolidate_checkpoint` saves optimizer states under the keys `optimizer_0`, `optimizer_1`, ...
        states = get_optimizer_states(content)
    rest = {key: value for key, value in content.items() if key not in get_optimizer_keys(content)}
    return {**rest, "optimizer_states": states} if with_optimizers and states is not None else rest


def _detach(gathered: dict[str, Any], trust: bool) -> dict[str, Any]:
    """Replace parameter names in optimizer states with numbers, and copy all values that may still change.

    Weights and optimizer states are not copied, since :func:`gather_state` has already copied them if necessary.
    """
    if not trust:
        warn_of_objects(gathered)
    if "optimizer_states" in gathered:
        gathered["optimizer_states"] = [number_parameters(state) for state in gathered["optimizer_states"]]
    tensors = ("state_dict", "optimizer_states")
    rest = copy.deepcopy({key: value for key, value in gathered.items() if key not in tensors})
    return {**gathered, **rest}


def _get_sizes(checkpoint: dict[str, Any]) -> list[int]:
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.nbytes), checkpoint)
    return sizes

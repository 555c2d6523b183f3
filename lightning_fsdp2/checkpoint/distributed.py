"""Save and load sharded checkpoints: complete or absent, and readable on any mesh.

A checkpoint is a directory::

    step=100.ckpt/
      .metadata, __0_0.distcp, ...   tensors: state_dict.<name>, optimizer_<i>.state.<name>.<key> (DCP)
      meta.pt                        everything else, as Lightning's ``ModelParallelStrategy`` names it
      meta.json                      format version, mesh and versions; written last

It is written under a hidden name and renamed once it is on disk, so that a directory of that name is complete.
"""

import json
import os
import pickle
import shutil
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as distributed_empty
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.folder import get_hidden_path, publish_folder, put_back, start_folder
from lightning_fsdp2.checkpoint.hf_description import DESCRIPTIONS_KEY, describe_hf_models
from lightning_fsdp2.checkpoint.packed import get_contiguous_placements, is_packed, pack_like, unpack_all
from lightning_fsdp2.checkpoint.state import get_optimizer_state, set_optimizer_state

FORMAT_VERSION = 1
METADATA_FILE = "meta.pt"
SUMMARY_FILE = "meta.json"

EXTRA_STATES_KEY = "extra_states"
"""Where ``meta.pt`` keeps what ``Module.get_extra_state`` returned, by its key in the state dict."""

_EXTRA_STATE = "_extra_state"

T = TypeVar("T")


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] = (), extra: Any = None
) -> None:
    """Save a model and its optimizers from a plain torch loop; every rank must call it.

    Args:
        path: The directory to write; one of that name is replaced once the new one is complete.
        model: Sharded or not.
        optimizers: One or several.
        extra: Anything ``torch.save`` takes (step, learning rate schedule); rank 0's is saved.
    """
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    tensors = {"state_dict": model.state_dict()}
    for index, optimizer in enumerate(optimizers):
        tensors[f"optimizer_{index}"] = get_optimizer_state(model, optimizer)
    write_checkpoint(path, tensors, {"extra": extra}, summary={DESCRIPTIONS_KEY: describe_hf_models(model)})


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> Any:
    """Load what :func:`save_checkpoint` wrote, on any number of ranks; every rank must call it.

    Args:
        path: The directory.
        model: Sharded or not; filled in place.
        optimizers: As many as were saved, or none to leave their state alone.
        strict: Whether the model and the checkpoint must have the same keys.
        weights_only: False unpickles arbitrary objects from ``extra``: only for files you trust.

    Returns:
        ``extra``.

    Raises:
        ValueError: When the checkpoint is incomplete, or of another model or optimizer.
    """
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    check_complete(path)
    model_state, optimizer_states = read_tensors(
        path, model, with_optimizers=bool(optimizers), in_place=True, weights_only=weights_only
    )
    metadata = read_metadata(path, weights_only=weights_only)
    load_model_state(path, model, {**model_state, **metadata.get(EXTRA_STATES_KEY, {})}, strict=strict)
    if optimizers:
        load_optimizer_states(path, model, optimizers, optimizer_states)
    return metadata["extra"]


def write_checkpoint(
    path: str | Path,
    tensors: dict[str, Any],
    metadata: dict[str, Any],
    *,
    summary: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint directory so that it is complete or absent; every rank must call it.

    Args:
        path: The directory; one of that name is replaced once the new one is complete.
        tensors: Nested dicts of tensors, DTensors and small objects, equal in keys on all ranks.
        metadata: The rest; rank 0's is saved.
        summary: For ``meta.json``, where people look.
        group: For coordination; a CPU group spares the accelerator.

    Raises:
        RuntimeError: On every rank, when any rank could not write. What stood at ``path`` before still does.
    """
    path = Path(path)
    # what `Module.get_extra_state` returned may be any object; DCP would take a mapping apart and lose its number keys
    extra = {name: value for name, value in tensors["state_dict"].items() if name.endswith(_EXTRA_STATE)}
    weights = {name: value for name, value in tensors["state_dict"].items() if name not in extra}
    tensors = unpack_all({**tensors, "state_dict": weights})
    metadata = {**metadata, EXTRA_STATES_KEY: extra}
    folder = get_hidden_path(path, _broadcast(uuid.uuid4().hex[:8], group))
    try:
        on_first_rank(lambda: start_folder(folder, path), group)
        _save_tensors(tensors, folder, group)
        on_first_rank(lambda: _finish_folder(folder, path, metadata, summary or {}), group)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read_metadata(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Read ``meta.pt``, which every rank may do on its own.

    Raises:
        pickle.UnpicklingError: When ``weights_only`` and the file holds more than tensors and plain types.
    """
    return torch.load(Path(path) / METADATA_FILE, map_location="cpu", weights_only=weights_only)


def read_tensors(
    path: str | Path,
    model: nn.Module,
    *,
    with_optimizers: bool = True,
    in_place: bool = False,
    weights_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the shards that this rank needs of a checkpoint's weights and optimizer states; every rank must call it.

    Args:
        path: The directory.
        model: Tensors are sharded like its parameters of the same name and shape.
        with_optimizers: Whether to read optimizer states.
        in_place: Read the model's own keys straight into its tensors, which spares a second copy of the weights.
        weights_only: False unpickles arbitrary objects.
        group: For coordination.

    Returns:
        The model's state and a list of optimizer states, with the checkpoint's keys.
    """
    path = Path(path)
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    keys = [key for key in metadata.state_dict_metadata if with_optimizers or _is_weight(metadata, key)]
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    flat = {key: _make_target(metadata, key, own, in_place) for key in keys}
    planner = LoadPlanner(weights_only)
    call_dcp(lambda: load(flat, storage_reader=reader, planner=planner, process_group=group), path)
    values = {
        key: _finish(value, _get_optional_like(metadata, key, own), in_place and _is_weight(metadata, key))
        for key, value in flat.items()
    }
    loaded = _unflatten({_path_of(metadata, key): value for key, value in values.items()})
    model_state = loaded.pop("state_dict", {})
    return model_state, [loaded[name] for name in sorted(loaded, key=lambda name: int(name.removeprefix("optimizer_")))]


def load_model_state(path: str | Path, model: nn.Module, state: dict[str, Any], *, strict: bool = True) -> None:
    """Load ``state`` into ``model``.

    Raises:
        ValueError: When keys (if ``strict``) or shapes differ: the checkpoint is of another model.
    """
    try:
        model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise ValueError(
            f"The checkpoint {str(path)!r} is not one of this {type(model).__name__}; build the model it was saved"
            f" from, or set `strict_loading = False` to load what fits. {error}"
        ) from error


def load_optimizer_states(
    path: str | Path, model: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
) -> None:
    """Load ``states`` into ``optimizers``.

    Raises:
        ValueError: When their number, their parameter groups or the parameters in them differ.
    """
    if len(states) != len(optimizers):
        raise ValueError(
            f"The checkpoint {str(path)!r} holds the state of {len(states)} optimizer(s), this run has"
            f" {len(optimizers)}; resume with the same optimizers."
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state(model, optimizer, state)


def check_complete(path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Refuse, on every rank, a checkpoint that is not all there; every rank must call it.

    Raises:
        FileNotFoundError: When there is none.
        ValueError: When it is incomplete, or no directory of ``torch.distributed.checkpoint``.
    """
    on_first_rank(lambda: _check_complete(Path(path)), group)


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 while the others wait, and return its result, or raise its error, on every rank."""
    outcome: list[Any] = [None, None]
    if _rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    result, failure = _broadcast(outcome, group)
    if failure is not None:
        raise failure
    return result


class LoadPlanner(DefaultLoadPlanner):
    """Reads flat keys as they are, and unpickles small objects only as far as ``weights_only`` allows."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


def _save_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    writer = FileSystemWriter(folder)
    call_dcp(lambda: save(tensors, storage_writer=writer, process_group=group), folder)


def call_dcp(action: Callable[[], Any], path: Path) -> None:
    """DCP reports failures of any rank as a ``BaseException``, which no ``except Exception`` of a user would see."""
    try:
        with warnings.catch_warnings():
            # one process without a process group is as good a use as any
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            action()
    except CheckpointException as error:
        raise RuntimeError(f"The checkpoint {str(path)!r} could not be written or read: {error}") from error


def _finish_folder(folder: Path, path: Path, metadata: dict[str, Any], summary: dict[str, Any]) -> None:
    with open(folder / METADATA_FILE, "wb") as file:
        torch.save(metadata, file)
        os.fsync(file.fileno())
    with open(folder / SUMMARY_FILE, "w") as file:
        json.dump({"format_version": FORMAT_VERSION, "torch": torch.__version__, **summary}, file, indent=2)
        os.fsync(file.fileno())
    publish_folder(folder, path)


def _check_complete(path: Path) -> None:
    put_back(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {str(path)!r}.")
    if path.is_file():
        raise ValueError(f"{str(path)!r} is a single file; this version loads checkpoint directories only.")
    missing = [name for name in (".metadata", METADATA_FILE) if not (path / name).is_file()]
    if not missing:
        try:
            metadata = FileSystemReader(path).read_metadata()
        except (EOFError, pickle.UnpicklingError):
            missing, metadata = [".metadata (truncated)"], Metadata({}, planner_data={})
        if metadata.planner_data is None:
            raise ValueError(
                f"The checkpoint {str(path)!r} does not say where its tensors belong (`planner_data`): it was not"
                " written by this package, Lightning or `torch.distributed.checkpoint.save`. Load it with what wrote"
                " it and save it again."
            )
        storage = metadata.storage_data or {}
        ends: dict[str, int] = {}
        for info in storage.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        sizes = {name: (path / name).stat().st_size if (path / name).is_file() else -1 for name in ends}
        missing += [name if sizes[name] < 0 else f"{name} (truncated)" for name in ends if sizes[name] < ends[name]]
    if missing:
        raise ValueError(
            f"The checkpoint {str(path)!r} is incomplete: {', '.join(sorted(missing))} is missing. It was copied only"
            " in part, or written by something that died; use an earlier one."
        )


def _path_of(metadata: Metadata, key: str) -> tuple[Any, ...]:
    return metadata.planner_data[key]


def _is_weight(metadata: Metadata, key: str) -> bool:
    return _path_of(metadata, key)[0] == "state_dict"


def _get_optional_like(metadata: Metadata, key: str, own: dict[str, Tensor]) -> Tensor | None:
    """The model's tensor that a stored tensor is, or is a state of, if it has the same shape."""
    entry = metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return None
    like = own.get(_path_of(metadata, key)[1 if _is_weight(metadata, key) else 2])
    return like if like is not None and like.shape == entry.size else None


def _make_target(metadata: Metadata, key: str, own: dict[str, Tensor], in_place: bool) -> Any:
    """What DCP should fill: a tensor sharded like the model's of that name; None for an object."""
    entry = metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return None
    like = _get_optional_like(metadata, key, own)
    dtype = entry.properties.dtype
    if is_packed(like):
        contiguous = get_contiguous_placements(like)
        return distributed_empty(entry.size, dtype=dtype, device_mesh=like.device_mesh, placements=contiguous)
    if like is not None:
        if in_place and _is_weight(metadata, key):
            return like
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    mesh = next((tensor.device_mesh for tensor in own.values() if isinstance(tensor, DTensor)), None)
    if _is_weight(metadata, key) and mesh is not None and len(entry.size) > 0:
        # a key that the model lacks, or has in another shape: a hook may rename it, so read it without a full copy
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return distributed_empty(entry.size, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(entry.size, dtype=dtype)


def _finish(value: Any, like: Tensor | None, in_place: bool) -> Any:
    """From what DCP has filled to what the model or the optimizer takes."""
    if not is_packed(like):
        return value
    packed = pack_like(value, like)
    if not in_place:
        return packed
    with torch.no_grad():
        return like.copy_(packed)


def _unflatten(values: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Nest values by their paths; integer steps are list indices."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = value
    return _lists_from_numbers(root)


def _lists_from_numbers(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _lists_from_numbers(value) for key, value in node.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[index] for index in sorted(items)]
    return items


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _broadcast(value: T, group: dist.ProcessGroup | None) -> T:
    if not dist.is_initialized():
        return value
    message = [value]
    dist.broadcast_object_list(message, src=0, group=group)
    return message[0]

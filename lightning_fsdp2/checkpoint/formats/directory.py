"""Checkpoint directories in the format of ``torch.distributed.checkpoint`` (DCP), written and read by all ranks.

::

    step=100.ckpt/
      .metadata, __0_0.distcp, ...   tensors, written by DCP under the keys state_dict.<name> and
                                     optimizer_<i>.state.<name>.<key>; DTensors that hooks and callbacks save have the
                                     keys metadata.<key>
      meta.pt                        everything else; Lightning's ``ModelParallelStrategy`` uses the same name
      checksums.json                 a checksum for each stored part of a tensor
      meta.json                      format version, mesh, versions, sizes of all files and checksums of small files.
                                     This file is written last.
"""

import errno
import io
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as distributed_empty

from lightning_fsdp2.checkpoint.files.chunks import CHECKSUMS_FILE, describe_bytes, describe_file
from lightning_fsdp2.checkpoint.files.drafts import (
    METADATA_FILE,
    SUMMARY_FILE,
    AnyPath,
    Draft,
    StoreDraft,
    check_free_space,
    discard_on_error,
    start_draft,
)
from lightning_fsdp2.checkpoint.files.errors import say_what_is_kept
from lightning_fsdp2.checkpoint.files.storage import (
    CheckpointReader,
    CheckpointWriter,
    DurableFile,
    load_archive,
    load_pickled,
    save_plain,
    warn_of_objects,
)
from lightning_fsdp2.checkpoint.formats.dcp import call_dcp
from lightning_fsdp2.checkpoint.nested import map_tensors, put_sharded, unflatten
from lightning_fsdp2.checkpoint.stages import check_same_on_all_ranks, list_names_elsewhere, pop_sharded_of_stages
from lightning_fsdp2.checkpoint.stored_shards import PiecewiseTensor, describe_shards, get_first_rows, is_unusual
from lightning_fsdp2.ranks.coordination import gather_objects, on_every_rank, on_first_rank
from lightning_fsdp2.ranks.pieces import without_uneven_axis

FORMAT_VERSION = 3
"""Version of the format that is written. Version 1 had no checksums, and version 2 had one per file.

Checkpoints with a higher version are refused.
"""

SHARDED_KEY = "metadata"
"""DCP key of the DTensors that were taken out of the content of ``meta.pt``, such as averaged weights."""

EXTRA_STATES_KEY = "lightning_fsdp2.extra_states"
"""Key in ``meta.pt`` of results of ``Module.get_extra_state``, and of dicts and lists in the state dict, by name."""

PLAIN_KEY = "lightning_fsdp2.plain_tensors"
"""Key in ``meta.pt`` of the names of those tensors in the state dict that were not DTensors."""

CONTAINERS_KEY = "lightning_fsdp2.optimizer_containers"
"""Key in ``meta.pt`` of dicts and lists in optimizer states, by optimizer, parameter and key."""

ADDED_KEY = "lightning_fsdp2.optimizer_added"
"""Key in ``meta.pt`` of values that optimizers save in addition to states and groups, by optimizer and key."""


@dataclass(frozen=True)
class Snapshot:
    """Content of a checkpoint at the time when the save began."""

    tensors: dict[str, Any]
    """Nested dicts of tensors, DTensors and small objects, with the same keys on all ranks."""

    metadata: bytes
    """Content of ``meta.pt``, on rank 0 only."""

    summary: dict[str, Any]
    """Entries for the human-readable file ``meta.json``."""

    first_rows: dict[int, int]
    """Result of :func:`~lightning_fsdp2.checkpoint.stored_shards.get_first_rows` for the tensors."""

    def with_tensors(self, tensors: dict[str, Any]) -> "Snapshot":
        """Return a copy of this snapshot that holds ``tensors`` instead of its own tensors."""
        return replace(self, tensors=tensors)


def take_snapshot(
    tensors: dict[str, Any],
    metadata: dict[str, Any],
    summary: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    pipeline: dist.ProcessGroup | None = None,
    trust: bool = False,
) -> Snapshot:
    """Collect the content of a checkpoint directory, without copying the tensors. Every rank must call this.

    Args:
        tensors: Nested dicts of tensors, DTensors and small objects, with the same keys on all ranks of a stage.
        metadata: All other content of the checkpoint. All ranks save the DTensors in it, and rank 0 saves the other
            values.
        summary: Entries for ``meta.json``.
        group: Process group for messages between the ranks. A CPU group keeps these messages off the accelerator.
        pipeline: CPU group of the ranks of the pipeline; None without a pipeline.
        trust: Whether users will trust the checkpoint when they load it. If not, arbitrary objects in it cause a
            warning.

    Raises:
        ValueError: When an optimizer's state has tensors that are not DTensors and that differ between ranks, or when
            ``metadata`` has a list of DTensors under pipeline parallelism.
        Exception: On every rank, the error of ``torch.save`` when ``metadata`` cannot be pickled.
    """
    # save dicts and lists in `meta.pt`, because DCP would flatten them and lose empty containers and numeric keys
    weights, extra = _partition(tensors["state_dict"], _is_extra_state)
    plain = {name: None for name, value in weights.items() if _is_plain(value)}
    optimizers = {name: state for name, state in tensors.items() if name != "state_dict"}
    containers: dict[str, Any] = {}
    added: dict[str, Any] = {}
    for name, state in optimizers.items():
        check_same_on_all_ranks(name, state, group, pipeline)
        optimizers[name], containers[name], added[name] = _part_optimizer(state)
        if pipeline is not None and not optimizers[name]["state"]:
            del optimizers[name]["state"]  # DCP would save the empty dict beside the states that other stages have
    others = {EXTRA_STATES_KEY: extra, PLAIN_KEY: plain, CONTAINERS_KEY: containers, ADDED_KEY: added}
    rest, sharded = pop_sharded_of_stages(metadata, others, pipeline)
    rest[PLAIN_KEY] = list(rest[PLAIN_KEY])
    tensors = {"state_dict": weights, **optimizers, **({SHARDED_KEY: sharded} if sharded else {})}
    buffer = io.BytesIO()

    def save_rest() -> None:
        save_plain(rest, buffer)
        if not trust:
            warn_of_objects((tensors, rest))

    on_first_rank(save_rest, group)
    return Snapshot(tensors, buffer.getvalue(), summary or {}, get_first_rows(_list_tensors(tensors), group))


def write_snapshot(path: AnyPath, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint directory atomically: it appears only when it is complete. Every rank must call this.

    Args:
        path: Directory to write. An existing checkpoint is replaced once the new one is complete.
        snapshot: Result of :func:`take_snapshot`.
        group: Process group for messages between the ranks. Nothing else may use it during the save.

    Raises:
        Exception: On every rank, when a rank could not write or was interrupted. An existing checkpoint at ``path`` is
            then kept, except in an object store.
    """
    tensors = _describe_unusual(snapshot)
    sizes = gather_objects(_get_size(tensors) + len(snapshot.metadata), group)
    drafts: list[Draft | StoreDraft] = []  # only rank 0 appends a draft

    def start() -> AnyPath:
        # start the draft first, because `start_draft` frees space by removing the drafts of dead processes
        drafts.append(start_draft(path))
        check_free_space(path, sum(sizes))
        return drafts[0].path

    with discard_on_error(drafts):
        writer = CheckpointWriter(on_first_rank(start, group))
        with say_what_is_kept(path):
            call_dcp(lambda: save(tensors, storage_writer=writer, process_group=group), path)
            written = gather_objects(writer.sizes, group)
            sizes_by_file = {name: size for sizes in written for name, size in sizes.items()}
            on_first_rank(lambda: _finish(drafts[0], snapshot, sizes_by_file, writer.checksums), group)


def read_directory(
    path: AnyPath,
    model: nn.Module | None = None,
    *,
    with_optimizers: bool = True,
    in_place: bool = False,
    verify: bool = True,
    trust: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read a checkpoint directory, either this rank's shards for a model, or whole tensors in one process.

    Args:
        path: Checkpoint directory.
        model: Model whose shards are read. A tensor is sharded like the model's tensor of the same name and shape, and
            on the meta device if only other pipeline stages have it. With a model, every rank must call this. None
            reads whole tensors to the host, on this rank alone.
        with_optimizers: Whether to read optimizer states.
        in_place: Whether to read weights directly into the model's tensors, which avoids a second copy.
        verify: Whether to compare the data with its checksums, if there are any.
        trust: Whether the checkpoint may hold arbitrary objects, which can run code when they are loaded.
        group: Process group for messages between the ranks.

    Returns:
        The checkpoint dict of Lightning's Trainer, with ``state_dict`` and, if there are any, ``optimizer_states``.

    Raises:
        ValueError: When the checkpoint is damaged, or holds objects other than tensors and plain types while ``trust``
            is False.
    """
    reader = CheckpointReader(path, trust=trust, verify=verify)

    def read_plain() -> tuple[Metadata, dict[str, Any]]:
        return reader.read_metadata(), load_pickled(path / METADATA_FILE, trust=trust)

    metadata, checkpoint = read_plain() if model is None else on_every_rank(read_plain, group)
    own = {} if model is None else {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    elsewhere = set[str]() if model is None else list_names_elsewhere(model)
    keys = [key for key in metadata.state_dict_metadata if with_optimizers or not _is_of_optimizer(metadata, key)]
    absent = {key: _make_placeholder(metadata, key) for key in keys if _get_optional_name(metadata, key) in elsewhere}
    plain = {("state_dict", name) for name in checkpoint.pop(PLAIN_KEY, ())}
    meshes = [tensor.device_mesh for tensor in own.values() if isinstance(tensor, DTensor)]
    largest = without_uneven_axis(max(meshes, key=DeviceMesh.size)) if meshes else None
    targets = {key: _make_target(metadata, key, own, in_place, plain, largest) for key in keys if key not in absent}
    first_rows = get_first_rows(targets.values(), group)
    flat = {
        key: describe_shards(target, first_rows.get(index, 0)) if is_unusual(target) else target
        for index, (key, target) in enumerate(targets.items())
    }
    options: dict[str, Any] = {"no_dist": True} if model is None else {"process_group": group}
    call_dcp(lambda: load(flat, storage_reader=reader, planner=LoadPlanner(path, trust), **options), path)
    flat_values = {
        _path_of(metadata, key): targets[key] if isinstance(value, PiecewiseTensor) else value
        for key, value in flat.items()
    }
    loaded = unflatten(flat_values | {_path_of(metadata, key): value for key, value in absent.items()})
    checkpoint = put_sharded(checkpoint, loaded.pop(SHARDED_KEY, {}))
    checkpoint["state_dict"] = {**loaded.pop("state_dict", {}), **checkpoint.pop(EXTRA_STATES_KEY, {})}
    for name, states in checkpoint.pop(CONTAINERS_KEY, {}).items():
        for key, moved in states.items() if with_optimizers else ():
            values = loaded[name].setdefault("state", {})
            values[key] = {**values.get(key, {}), **moved} if isinstance(moved, dict) else moved
    for name, values in checkpoint.pop(ADDED_KEY, {}).items():
        loaded.get(name, {}).update(values)
    if states := get_optimizer_states(loaded):
        checkpoint["optimizer_states"] = states
    return checkpoint


def get_optimizer_states(nested: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of ``optimizer_0``, ``optimizer_1``, ... in the order of their numbers."""
    return [nested[name] for name in get_optimizer_keys(nested)]


def get_optimizer_keys(nested: dict[str, Any]) -> list[str]:
    """Return the keys ``optimizer_0``, ``optimizer_1``, ... of ``nested`` in the order of their numbers."""
    numbers = sorted(int(match[1]) for name in nested if (match := re.fullmatch(r"optimizer_(\d+)", str(name))))
    return [f"optimizer_{number}" for number in numbers]


class LoadPlanner(DefaultLoadPlanner):
    """DCP load planner that reads values under their flat keys, and refuses objects that are not trusted."""

    def __init__(self, path: AnyPath, trust: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._path = path
        self._trust = trust

    def load_bytes(self, read_item: Any, value: Any) -> None:
        def open_archive() -> Any:
            value.seek(0)
            return value

        loaded = load_archive(open_archive, self._path, trust=self._trust)
        self.original_state_dict[read_item.dest_index.fqn] = loaded


def _finish(
    draft: Draft | StoreDraft, snapshot: Snapshot, sizes: dict[str, int], checksums: dict[str, dict[int, str]]
) -> None:
    unseen = [name for name in sizes if not (draft.path / name).exists()]
    if unseen:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{', '.join(unseen)} was written by another rank, but is not visible on rank 0: the checkpoint folder must"
            " be on a file system that all nodes share",
            str(draft.path),
        )
    files: dict[str, Any] = {name: {"bytes": size} for name, size in sizes.items()}
    files[METADATA_FILE] = _write(draft.path / METADATA_FILE, snapshot.metadata)
    files[CHECKSUMS_FILE] = _write(draft.path / CHECKSUMS_FILE, json.dumps(checksums).encode())
    files[".metadata"] = describe_file(draft.path / ".metadata")
    summary = {"format_version": FORMAT_VERSION, "torch": torch.__version__, **snapshot.summary, "files": files}
    _write(draft.path / SUMMARY_FILE, json.dumps(summary, indent=2).encode())
    draft.publish()


def _write(path: AnyPath, data: bytes) -> dict[str, Any]:
    """Write a small file to disk, and return its size and checksum."""
    with DurableFile(path) as file:
        file.write(data)
    return describe_bytes(data)


def _partition(values: dict[str, Any], is_second: Callable[[str, Any], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    second = {key: value for key, value in values.items() if is_second(key, value)}
    return {key: value for key, value in values.items() if key not in second}, second


def _part_optimizer(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split an optimizer's state into three: the part that DCP saves, the containers, and the additional entries.

    Containers are values that DCP would not restore unchanged, mostly dicts and lists in the states of parameters.
    Additional entries are those other than ``state`` and ``param_groups``.
    """
    state, added = _partition(state, lambda key, _: key not in ("state", "param_groups"))
    # The entry `state` holds one dict per parameter. It may also hold values that all parameters share. A shared value
    # need not be a dict.
    values, shared = _partition(state["state"], lambda _, value: not isinstance(value, dict))
    parted = {key: _partition(value, _is_container) for key, value in values.items()}
    kept = {**state, "state": {key: own for key, (own, _) in parted.items()}}
    return kept, {**{key: moved for key, (_, moved) in parted.items() if moved}, **shared}, added


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _is_extra_state(name: str, value: Any) -> bool:
    return name.rpartition(".")[2] == "_extra_state" or _is_container(name, value)


def _is_container(key: Any, value: Any) -> bool:
    # values whose keys are numbers go to `meta.pt` too, because DCP would turn these keys into strings
    return isinstance(value, dict | list | tuple) or not isinstance(key, str)


def _list_tensors(tensors: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tensors)
    return found


def _describe_unusual(snapshot: Snapshot) -> dict[str, Any]:
    indices = count()

    def describe(tensor: Tensor) -> Tensor:
        first_row = snapshot.first_rows.get(next(indices), 0)
        return describe_shards(tensor, first_row) if is_unusual(tensor) else tensor

    described: dict[str, Any] = map_tensors(describe, snapshot.tensors)
    return described


def _get_size(tensors: dict[str, Any]) -> int:
    """Return roughly how many bytes this rank writes.

    The size of a replicated tensor is divided among the ranks that hold it.
    """
    size = 0

    def add(tensor: Tensor) -> None:
        nonlocal size
        if isinstance(tensor, PiecewiseTensor):
            size += tensor.get_written_bytes()
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        replicas = 1
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for axis, placement in enumerate(tensor.placements):
                replicas *= mesh.size(axis) if placement.is_replicate() else 1
        elif dist.is_initialized():
            replicas = dist.get_world_size()
        size += local.nbytes // replicas

    map_tensors(add, tensors)
    return size


def _path_of(metadata: Metadata, key: str) -> tuple[Any, ...]:
    path: tuple[Any, ...] = metadata.planner_data[key]
    return path


def _is_weight(metadata: Metadata, key: str) -> bool:
    return _path_of(metadata, key)[0] == "state_dict"


def _is_of_optimizer(metadata: Metadata, key: str) -> bool:
    return str(_path_of(metadata, key)[0]).startswith("optimizer_")


def _get_optional_name(metadata: Metadata, key: str) -> str | None:
    """Return the name of the model's tensor that the stored tensor ``key`` is or belongs to; None for other values."""
    if not isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata):
        return None
    name: str = _path_of(metadata, key)[2 if _is_of_optimizer(metadata, key) else -1]
    return name


def _make_placeholder(metadata: Metadata, key: str) -> Tensor:
    entry: Any = metadata.state_dict_metadata[key]
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")


def _get_optional_like(metadata: Metadata, key: str, own: dict[str, Tensor]) -> Tensor | None:
    """Return the model's tensor that has the name and the shape of the stored tensor ``key``, or None if there is none.

    For a tensor of an optimizer state, return the parameter that the state belongs to.
    """
    name, entry = _get_optional_name(metadata, key), metadata.state_dict_metadata[key]
    like = None if name is None else own.get(name)
    return like if like is not None and like.shape == cast(Any, entry).size else None


def _make_target(
    metadata: Metadata,
    key: str,
    own: dict[str, Tensor],
    in_place: bool,
    plain: Collection[tuple[Any, ...]],
    mesh: DeviceMesh | None,
) -> Any:
    """Return a tensor for DCP to read ``key`` into, or None if ``key`` is not a tensor.

    The returned tensor is sharded like the tensor from :func:`_get_optional_like`. If that function returns None, the
    returned tensor is sharded over ``mesh``.
    """
    entry = metadata.state_dict_metadata[key]
    if not isinstance(entry, TensorStorageMetadata):
        return None
    like = _get_optional_like(metadata, key, own)
    dtype = entry.properties.dtype
    if like is not None:
        if in_place and _is_weight(metadata, key):
            return like
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    is_plain = _is_of_optimizer(metadata, key) or _path_of(metadata, key) in plain
    if not is_plain and mesh is not None and len(entry.size) > 0:
        # The model has no tensor with this key, but a hook may rename the key later. Until then, shard the tensor over
        # `mesh` to save memory. Later, `load_model_state` shards the tensor like the parameter with the new name.
        return distributed_empty(entry.size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
    return torch.empty(entry.size, dtype=dtype)

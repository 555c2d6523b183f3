"""Load Hugging Face weights from safetensors files into a sharded model. Each rank reads only its own slices."""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2._git_lfs import LFS_POINTER, is_lfs_pointer
from lightning_fsdp2._untrusted import check_inside, check_no_devices
from lightning_fsdp2.compat.transformers import finish_loading
from lightning_fsdp2.modules.structure import find_peft_models
from lightning_fsdp2.modules.stubs import get_absent_tensors, get_tensors, mark_initialized, with_skeletons
from lightning_fsdp2.ranks.failures import fail_together, list_names
from lightning_fsdp2.weights.adapters import without_adapters
from lightning_fsdp2.weights.materialize import get_groups, random_numbers_of_one_process
from lightning_fsdp2.weights.pretrained_adapters import load_adapters
from lightning_fsdp2.weights.pretrained_checks import check_loaded, check_ties, get_tied_names
from lightning_fsdp2.weights.pretrained_shards import Slot, get_targets, read_shards

_SOURCE_ATTRIBUTE = "_lightning_fsdp2_pretrained"

_FINGERPRINT_BYTES = 64
"""Number of bytes of each tensor that a fingerprint covers. A few suffice: training changes nearly all values."""

_LOADED_ATTRIBUTE = "_lightning_fsdp2_loaded"


@dataclass(frozen=True, kw_only=True)
class _Source:
    folder: Path

    conversions: list[Any]
    """transformers' ``WeightTransform``s, which convert names and shapes in the files to those of the model."""

    allow_missing: Sequence[str]


class PretrainedFiles:
    """Files from which a model's weights were read.

    Args:
        folder: Directory of the pretrained model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the files' tensors; see :func:`get_folder_fingerprint`.

        It is computed on first use, because a part of every tensor has to be read. The files must still exist then.
        """
        return get_folder_fingerprint(self.folder)


@dataclass(frozen=True)
class _Loaded:
    files: PretrainedFiles

    slots: frozenset[Slot]
    """Module and parameter name of each weight that was read. Full names would change when a model is wrapped."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Frozen weights of one model, which can be read again from its pretrained files."""

    files: PretrainedFiles

    names: list[str]
    """Names of the weights in the state dict of the root module."""


def set_pretrained(model: nn.Module, folder: str | Path, *, allow_missing: str | Sequence[str] = ()) -> None:
    """Choose ``folder`` as the directory from which ``model``, on the meta device, loads its weights after sharding.

    Args:
        model: A Hugging Face model, not sharded yet.
        folder: A local directory with ``*.safetensors`` files.
        allow_missing: Weights that the files may lack: names, or patterns such as ``"score.*"``. transformers
            initialises the missing weights.

    Raises:
        FileNotFoundError: If the directory has no ``*.safetensors`` files.
        ValueError: If ``folder`` is a file, or a checkpoint of a training run.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    get_weight_files(folder)
    source = _Source(
        folder=Path(folder),
        # look up conversions now, because the lookup uses class names, which `fully_shard` changes
        conversions=get_model_conversion_mapping(cast(Any, model)),
        allow_missing=[allow_missing] if isinstance(allow_missing, str) else list(allow_missing),
    )
    setattr(model, _SOURCE_ATTRIBUTE, source)


def load_pretrained(model: nn.Module, device: torch.device, device_mesh: DeviceMesh | None = None) -> None:
    """Load the weights of every Hugging Face model in ``model`` for which :func:`set_pretrained` was called.

    A model that already has its weights is skipped. A pipeline stage reads only its own weights. Base weights are read
    first, then peft's adapters if :func:`~lightning_fsdp2.weights.pretrained_adapters.set_adapter_weights` was called.
    If files lack weights that ``allow_missing`` names, transformers initialises them, to the same values on any mesh.
    Tied weights and non-persistent buffers are rebuilt. If the files pack tensors differently from the model, for
    example MoE experts, the tensors are converted while they are read.

    Args:
        model: Module whose tensors are on the meta device. It is sharded, unless there is only one rank.
        device: Device of the weights.
        device_mesh: Mesh whose first rank provides the random state; None for one process.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: On every rank of the mesh, if a file is damaged or does not fit the model. Files do not fit if they
            lack a tensor, hold a tensor with a different shape, hold an extra tensor for one of the model's modules, or
            hold different values for tied weights.
    """
    absent, loaded = get_absent_tensors(model), set[Tensor]()
    for module in model.modules():
        source = module.__dict__.pop(_SOURCE_ATTRIBUTE, None)
        if source is None:
            continue
        with with_skeletons(module), without_adapters(module):
            # a model that is not on the meta device already has its weights, for example from a checkpoint
            if any(parameter.is_meta for parameter in {*module.parameters()} - absent):
                own = {tensor for tensor in get_tensors(module) if tensor in absent}
                _load(module, source, device, device_mesh, own)
                loaded |= own
    mark_initialized(model, loaded)
    if find_peft_models(model):
        with fail_together(get_groups(device_mesh)):
            forget_loaded(model, load_adapters(model, device))


def list_frozen(root: nn.Module) -> list[Frozen]:
    """Return, for each pretrained model in ``root``, the frozen parameters that were read from its files."""
    models: list[_Loaded] = [m.__dict__[_LOADED_ATTRIBUTE] for m in root.modules() if _LOADED_ATTRIBUTE in m.__dict__]
    found = []
    for loaded in models:
        names = [
            f"{path}.{name}" if path else name
            for path, module in root.named_modules(remove_duplicate=False)
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad and (module, name) in loaded.slots
        ]
        found.append(Frozen(files=loaded.files, names=names))
    return found


@torch.no_grad()
def read_pretrained(model: Any, folder: str | Path, names: Collection[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read some of a model's tensors from ``folder`` into host memory, without sharding them.

    Args:
        model: A transformers model on the meta device. Do not use it for anything else, because the tensors are loaded
            into it.
        folder: See :func:`set_pretrained`.
        names: Names of the tensors to read, as they are in the model.
        dtype: Dtype of the floating-point tensors.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, or no file holds a wanted tensor.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    model.to(dtype)  # the loader converts each tensor to the dtype that it has in the model
    conversions = get_model_conversion_mapping(model)
    files = _open_files(Path(folder))
    wanted = {tied for name in names for tied in get_tied_names(model, name)}
    stored = {key: files[key] for key, made in get_targets(model, files, conversions).items() if wanted & {*made}}
    cpu = torch.device("cpu")
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        device_map={"": cpu},
        dtype=dtype,
        weight_mapping=cast(Any, conversions),
    )
    with _only_first_rank_reports():
        read_shards(model, stored, config, cpu)
    own = dict(model.named_parameters(remove_duplicate=False))
    found = {name: _find_read(own, get_tied_names(model, name)) for name in names}
    if missing := [name for name, tensor in found.items() if tensor is None]:
        raise ValueError(
            f"pretrained={str(folder)!r} lacks {list_names(missing)}; give the directory of a model that has them."
        )
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def get_folder_fingerprint(folder: str | Path) -> str:
    """Return a digest of the names, shapes, dtypes and first bytes of the tensors in a model directory.

    The digest does not depend on how the tensors are distributed over files.

    Raises:
        FileNotFoundError: If ``folder`` holds no safetensors files.
    """
    tensors = {}
    for name in get_weight_files(folder):
        with open(name, "rb") as file:
            size, header = _read_header(file, name)
            for key, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                tensors[key] = (entry["dtype"], entry["shape"], file.read(min(end - start, _FINGERPRINT_BYTES)).hex())
    return hashlib.sha256(json.dumps(sorted(tensors.items())).encode()).hexdigest()


def _read_header(file: BinaryIO, name: str) -> tuple[int, dict[str, Any]]:
    """Return the size in bytes of a safetensors file's header, and its entries by the names of the tensors."""
    size = int.from_bytes(file.read(8), "little")
    try:
        if size > os.fstat(file.fileno()).st_size:
            raise ValueError(f"a header of {size} bytes")
        header: dict[str, Any] = json.loads(file.read(size))
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{name} is damaged, or is no safetensors file ({type(error).__name__}: {error}); copy or download it"
            " again."
        ) from error
    return size, header


def get_weight_files(folder: str | Path) -> list[str]:
    """Return the safetensors files that transformers would read from a model directory, in order.

    Raises:
        FileNotFoundError: If the directory has no such files.
        ValueError: If ``folder`` is a file or a checkpoint of a training run, or if the directory's index is damaged.
    """
    folder = Path(folder)
    _check_model_folder(folder)
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [str(whole)]
    if index.exists():
        return [str(folder / name) for name in _read_index(index)]
    raise FileNotFoundError(
        f"pretrained={str(folder)!r} holds neither model.safetensors nor model.safetensors.index.json. Give the"
        " directory of a model saved by `save_pretrained()`; convert older `.bin` weights by loading and saving them"
        " once with transformers."
    )


def _read_index(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} is damaged, or is not an index of safetensors files ({type(error).__name__}: {error}); copy or"
            " download it again."
        ) from error
    check_inside(names, str(index))
    return names


def _check_model_folder(folder: Path) -> None:
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(
            f"pretrained={str(folder)!r} may not be read (Permission denied); let this user read the directory and its"
            " files."
        )
    check_no_devices(folder)
    if folder.is_file():
        raise ValueError(
            f"pretrained={str(folder)!r} is a file; give the directory of a model saved by `save_pretrained()`."
        )
    if (folder / ".metadata").exists():
        raise ValueError(
            f"pretrained={str(folder)!r} is a checkpoint of a training run. To resume that run, pass the checkpoint as"
            " `ckpt_path`; to start from its weights, export it first with `lightning_fsdp2.export_hf`."
        )


def _load(
    model: Any, source: _Source, device: torch.device, device_mesh: DeviceMesh | None, absent: Collection[Tensor]
) -> None:
    # Use transformers' own loader, because it can read shards. It is private, but did not change from 5.17 to 5.23.
    # The public functions of transformers either read the whole model on one rank or get packed experts wrong.
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(source.folder),
        device_map={"": device},
        dtype=next(model.parameters()).dtype,
        weight_mapping=cast(Any, source.conversions),
        ignore_mismatched_sizes=True,  # `check_loaded` raises an error that names the mismatched tensors
    )
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with fail_together(get_groups(device_mesh)), _only_first_rank_reports():
        files = _open_files(source.folder)
        info = read_shards(model, files, config, device, absent)
        check_loaded(model, info, source.folder, source.allow_missing, stored=files)
        check_ties(model, info, source.folder)
    with random_numbers_of_one_process(device, device_mesh), _only_first_rank_reports():
        finish_loading(model, config, info)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable[name])
    setattr(model, _LOADED_ATTRIBUTE, _Loaded(PretrainedFiles(source.folder), _get_loaded(model, info)))


class _StoredTensor:
    """Tensor in a file. Indexing it reads only the selected part, as with the slices that safetensors returns."""

    def __init__(self, reader: "_Reader", file: str, name: str, shape: list[int]) -> None:
        self._reader, self._file, self._name, self._shape = reader, file, name, shape

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        return self._reader.read(self._file, self._name, index)


class _Reader:
    """Reader of safetensors files that memory-maps one file at a time, and maps it again after ``_MOST_BYTES`` bytes.

    If files stayed mapped, the pages of a whole model would stay in memory. Mapping a file for every tensor would be
    slow: for an MoE expert, the mapping can take a hundred times longer than reading the expert. Several threads may
    read at once. If a thread finds that another thread has mapped a different file, it maps its own file again.
    """

    _MOST_BYTES = 64 * 1024**2

    def __init__(self) -> None:
        self._mapped: tuple[str, Any, int] = ("", None, 0)

    def read(self, file: str, name: str, index: Any) -> Tensor:
        mapped, handle, count = self._mapped
        if mapped != file:
            handle, count = safe_open(file, framework="pt", device="cpu"), 0
        stored = handle.get_slice(name)
        # a copy, because a memory-mapped weight would change whenever the file changes
        part: Tensor = stored[index].clone()
        count += math.prod(stored.get_shape()) * part.element_size()
        self._mapped = (file, handle, count) if count < self._MOST_BYTES else ("", None, 0)
        return part


def _open_files(folder: Path) -> dict[str, _StoredTensor]:
    tensors: dict[str, _StoredTensor] = {}
    reader = _Reader()
    for name in get_weight_files(folder):
        try:
            with safe_open(name, framework="pt", device="cpu") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - not a dict
        except FileNotFoundError as error:
            _check_readable(name, folder)  # safetensors says the same of a file that may not be read
            raise FileNotFoundError(
                f"{name} is missing, although the index of pretrained={str(folder)!r} lists it; copy or download the"
                " model again."
            ) from error
        except SafetensorError as error:
            if is_lfs_pointer(name):
                raise ValueError(f"{name} of pretrained={str(folder)!r} is {LFS_POINTER}.") from error
            raise ValueError(
                f"{name} of pretrained={str(folder)!r} is damaged or was copied only partly ({error}); copy or"
                " download it again."
            ) from error
        tensors.update({key: _StoredTensor(reader, name, key, shape) for key, shape in shapes.items()})
    return tensors


def _check_readable(file: str, folder: Path) -> None:
    try:
        with open(file, "rb"):
            return
    except PermissionError as error:
        raise ValueError(
            f"{file} of pretrained={str(folder)!r} may not be read ({error.strerror}); let this user read it."
        ) from error
    except FileNotFoundError:
        return


def _get_loaded(model: nn.Module, info: Any) -> frozenset[Slot]:
    read = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in info.missing_keys
    }
    return frozenset(
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in read
    )


def forget_loaded(root: nn.Module, slots: set[Slot]) -> None:
    """Remove ``slots`` (modules and parameter names) from the record of weights that came from pretrained files.

    Call this when these weights change, because the pretrained files can then no longer restore them.
    """
    for module in root.modules():
        if (loaded := module.__dict__.get(_LOADED_ATTRIBUTE)) is not None:
            setattr(module, _LOADED_ATTRIBUTE, replace(loaded, slots=loaded.slots - slots))


def _find_read(own: dict[str, nn.Parameter], names: set[str]) -> Tensor | None:
    return next((own[name] for name in names if name in own and not own[name].is_meta), None)


@contextmanager
def _only_first_rank_reports() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers inside the block, except on rank 0."""
    from transformers.utils import logging

    if not dist.is_initialized() or dist.get_rank() == 0:
        yield
        return
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()

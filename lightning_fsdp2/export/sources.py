"""Access to the tensors of a Hugging Face model that is sharded in memory, or stored in a checkpoint or in files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2.checkpoint.find import find_checkpoint
from lightning_fsdp2.checkpoint.stages import gather_over_stages, get_optional_pipeline_group
from lightning_fsdp2.checkpoint.whole import list_tensors, read_descriptions, read_left_out, read_whole_tensors
from lightning_fsdp2.modules.structure import get_class_name
from lightning_fsdp2.parallel.data.fully_shard import reshard
from lightning_fsdp2.ranks.coordination import get_rank
from lightning_fsdp2.ranks.failures import list_names
from lightning_fsdp2.ranks.whole_tensors import gather
from lightning_fsdp2.weights.adapters import get_plain_names
from lightning_fsdp2.weights.description import (
    Description,
    add_described_adapters,
    build_hf_skeleton,
    build_skeleton,
    describe_hf_models,
    get_model_class,
)
from lightning_fsdp2.weights.pretrained import get_folder_fingerprint, read_pretrained

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Wanted = Mapping[str, torch.dtype]
"""Names of the tensors to read, each with the dtype in which to return it."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Model without weights, and a function that reads its weights."""

    skeleton: "PreTrainedModel"
    """The model without weights."""

    description: Description

    specs: dict[str, Tensor]
    """The model's tensors on the meta device, by name."""

    read: Callable[[Sequence[Wanted]], dict[str, Tensor]]
    """Function that takes what each rank wants to read, and returns this rank's tensors, whole and in host memory.

    Every rank must call this function.
    """

    adapted: "PeftModel | None"
    """peft's model around ``skeleton``, if there is one. Tensors then have the names that peft's layers give them."""


def open_module(module: nn.Module, path: str | None) -> Weights:
    """Prepare to read the tensors of the Hugging Face model at ``path`` in ``module``, which may be sharded.

    Raises:
        TypeError: When ``module`` contains no such model.
        ValueError: When ``module`` contains several models and ``path`` is not the path of one of them, or when the
            model does not match its config.
    """
    description = _choose(describe_hf_models(module), path, get_class_name(module))
    model: Any = module.get_submodule(description["path"])
    reshard(module)
    skeleton = build_skeleton(get_model_class(model), type(model.config), description)
    adapted = add_described_adapters(skeleton, description)
    read = _Gather(model)
    _check_readable(read.specs, skeleton, description)
    return Weights(skeleton=skeleton, description=description, specs=read.specs, read=read, adapted=adapted)


def open_checkpoint(
    path: str | Path,
    model: str | None,
    *,
    pretrained: str | Path | None,
    needs_base: bool,
    verify: bool,
    trust: bool,
) -> Weights:
    """Prepare to read the tensors of a Hugging Face model that is stored in a checkpoint.

    Frozen weights that the checkpoint leaves out are read from the files of the pretrained model.

    Args:
        path: Path of the checkpoint.
        model: Path of the model in the module that was saved; None if there is only one model.
        pretrained: Current directory of the pretrained model's files; None if they have not moved.
        needs_base: Whether the pretrained model's files are needed even if the model has adapters.
        verify: Whether to compare data that is read from a checkpoint directory with its checksums.
        trust: Whether the checkpoint may contain arbitrary objects, which can run code when loaded.

    Raises:
        FileNotFoundError: When there is no checkpoint, or the files with frozen weights are missing.
        ValueError: See :func:`open_module`. Also when the checkpoint does not record which model it contains, or when
            the files belong to a different model than the one that training began with.
    """
    path = str(find_checkpoint(path, trust=trust))
    descriptions = read_descriptions(path, trust=trust)
    if not descriptions:
        raise ValueError(
            f"{str(path)!r} does not record which Hugging Face model it contains, so this package did not write it."
            " Build your module, load the checkpoint, and export the module."
        )
    description = _choose(descriptions, model, str(path))
    prefix = f"{description['path']}." if description["path"] else ""
    specs = {
        name.removeprefix(prefix): torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in list_tensors(path, trust=trust).items()
        if name.startswith(prefix)
    }
    skeleton = build_hf_skeleton(description)
    adapted = add_described_adapters(skeleton, description)
    base = _open_base(path, prefix, description, skeleton, pretrained, trust)
    if base is not None:
        specs |= base.specs(specs, skeleton)
        if needs_base or adapted is None:
            base.check(path)
    _check_readable(specs, skeleton, description)

    def read(wanted: Sequence[Wanted]) -> dict[str, Tensor]:
        own = wanted[get_rank()] if get_rank() < len(wanted) else {}
        tensors = {} if base is None else base.read(own)
        stored = {name: prefix + name for name in own if name not in tensors}
        whole = read_whole_tensors(path, list(stored.values()), verify=verify, trust=trust) if stored else {}
        tensors |= {name: whole.pop(key) for name, key in stored.items()}
        # `pop` lets each tensor be freed once it is converted, so that the tensors are not all in memory twice
        return {name: tensors.pop(name).to(dtype) for name, dtype in own.items()}

    return Weights(skeleton=skeleton, description=description, specs=specs, read=read, adapted=adapted)


@dataclass(frozen=True, kw_only=True)
class _Base:
    """Pretrained model whose frozen weights a checkpoint leaves out."""

    folder: Path

    fingerprint: str
    """Fingerprint of the model that training began with."""

    names: dict[str, str]
    """Name of each left-out weight in the model without adapters, by its name in the model with adapters."""

    description: Description

    def specs(self, stored: Mapping[str, Tensor], skeleton: nn.Module) -> dict[str, Tensor]:
        """Return meta tensors for the left-out weights, in the dtype of the checkpoint's weights, ``stored``."""
        own = skeleton.state_dict()
        dtype = next((tensor.dtype for tensor in stored.values() if tensor.is_floating_point()), None)
        return {name: own[name].to(dtype=dtype) for name in self.names}

    def check(self, path: str) -> None:
        what = f"The checkpoint {path!r} leaves out {len(self.names)} frozen weights of the pretrained model"
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{what}, but the model's directory {str(self.folder)!r} does not exist; give its new directory:"
                " export_hf(pretrained=...), or --pretrained on the command line."
            )
        if get_folder_fingerprint(self.folder) != self.fingerprint:
            raise ValueError(
                f"{what} from which training started, but {str(self.folder)!r} holds different tensors; give the"
                " directory of the original model: export_hf(pretrained=...), or --pretrained on the command line."
            )

    def read(self, names: Wanted) -> dict[str, Tensor]:
        wanted = {self.names[name]: name for name in names if name in self.names}
        if not wanted:
            return {}
        # float32 can represent every value in the files; the caller converts the tensors to the wanted dtype
        tensors = read_pretrained(build_hf_skeleton(self.description), self.folder, wanted, torch.float32)
        return {wanted[name]: tensor for name, tensor in tensors.items()}


class _Gather:
    """Reader that gathers a sharded model's tensors one by one. Each rank keeps only the tensors it asked for.

    If the model is divided into pipeline stages, a stage that has a tensor gathers it, and sends it to the rank that
    asked for it.

    Attributes:
        specs: Tensors of the whole model on the meta device, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._state: dict[str, Tensor] = model.state_dict()
        self._group = get_optional_pipeline_group(model)
        self._ranks = [] if self._group is None else dist.get_process_group_ranks(self._group)
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in self._state.items()}
        self._stages = gather_over_stages(model, own)
        self._stage = self._get_stage(get_rank())
        self.specs = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for stage in self._stages
            for name, (shape, dtype) in stage.items()
        }

    @torch.no_grad()
    def __call__(self, wanted: Sequence[Wanted]) -> dict[str, Tensor]:
        gathered: dict[str, Tensor] = {}
        failure: Exception | None = None
        for rank, name in ((rank, name) for rank, names in enumerate(wanted) for name in names):
            # all ranks of a stage gather, even after an error on one of them
            tensor = self._gather(name) if self._choose_stage(rank, name) == self._stage else None
            try:
                if failure is None and rank == get_rank():
                    gathered[name] = self._take(tensor, name, wanted[rank][name])
                elif failure is None and tensor is not None and self._sends_to(rank):
                    dist.send(_copy_to_host(tensor, wanted[rank][name]), rank, group=self._group)
            except Exception as error:
                gathered, failure = {}, error
        if failure is not None:
            raise failure
        return gathered

    def _gather(self, name: str) -> Tensor:
        tensor = self._state[name]
        if not isinstance(tensor, DTensor):
            return tensor
        # move offloaded shards to the device on which the mesh communicates
        sharded: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
        return gather(sharded)

    def _take(self, tensor: Tensor | None, name: str, dtype: torch.dtype) -> Tensor:
        """Return a copy of this stage's ``tensor`` in host memory, or receive that of another stage if it is None."""
        if tensor is not None:
            return _copy_to_host(tensor, dtype)
        received = torch.empty(self.specs[name].shape, dtype=dtype)
        dist.recv(received, self._ranks[self._choose_stage(get_rank(), name)], group=self._group)
        return received

    def _choose_stage(self, rank: int, name: str) -> int:
        """Return which stage gathers a tensor for ``rank``: that of the rank, or the first that has the tensor."""
        own = self._get_stage(rank)
        return own if name in self._stages[own] else next(i for i, names in enumerate(self._stages) if name in names)

    def _sends_to(self, rank: int) -> bool:
        """Return whether this rank sends what its stage gathers for ``rank``."""
        return rank in self._ranks and self._get_stage(rank) != self._stage

    def _get_stage(self, rank: int) -> int:
        """Return the index of the stage of ``rank``. The ranks of a stage are consecutive."""
        return rank * len(self._stages) // dist.get_world_size() if self._ranks else 0


def _copy_to_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype)


def _open_base(
    path: str,
    prefix: str,
    description: Description,
    skeleton: nn.Module,
    pretrained: str | Path | None,
    trust: bool,
) -> _Base | None:
    parts = [part for part in read_left_out(path, trust=trust) if part["names"][0].startswith(prefix)]
    if not parts:
        return None
    plain = get_plain_names(skeleton)
    names = [name.removeprefix(prefix) for name in parts[0]["names"]]
    return _Base(
        folder=Path(pretrained or parts[0]["folder"]),
        fingerprint=parts[0]["fingerprint"],
        names={name: plain[name] for name in names if name in plain},
        description=description,
    )


def _choose(descriptions: Sequence[Description], path: str | None, source: str) -> Description:
    if not descriptions:
        raise TypeError(
            f"export_hf: there is no transformers model in {source}. Pass a `PreTrainedModel`, or a module in which"
            " `configure_model` has already built one."
        )
    paths = [description["path"] for description in descriptions]
    if path is None and len(paths) == 1:
        return descriptions[0]
    if path not in paths:
        raise ValueError(
            f"export_hf(model={path!r}): {source} has the model(s) {', '.join(map(repr, paths))}; set model to one of"
            " them."
        )
    return descriptions[paths.index(path)]


def _check_readable(specs: Mapping[str, Tensor], skeleton: "PreTrainedModel", description: Description) -> None:
    """Raise an error if the exported weights would not match the model's config, and so could not be loaded."""
    expected = skeleton.state_dict()
    # earlier versions of this package did not record in checkpoints whether there are adapters
    has_adapters = description.get("has_adapters") or any(".base_layer." in name for name in specs)
    if has_adapters and len(description.get("adapters", ())) != 1:
        raise ValueError(
            f"The {type(skeleton).__name__} has peft adapters that cannot be exported: only a single LoRA adapter in a"
            " PeftModel can. Save the adapters with peft's `save_pretrained`. Or, except for prompt tuning, merge them"
            " in one process with `merge_and_unload`, and export the result."
        )
    problems = {
        "missing": expected.keys() - specs.keys(),
        "unexpected": specs.keys() - expected.keys(),
        "of a different shape": {
            name for name in expected.keys() & specs.keys() if expected[name].shape != specs[name].shape
        },
    }
    if any(problems.values()):
        found = "; ".join(f"{problem}: {list_names(names)}" for problem, names in problems.items() if names)
        raise ValueError(
            f"The weights do not match a {type(skeleton).__name__} with its config, so the exported model could not be"
            f" loaded: {found}. If you change the model, change its config too."
        )

"""Export of models in Hugging Face's format, from shards or a checkpoint, without a full copy of the model in memory.

The stored tensors get the names, shapes and files that ``save_pretrained`` of transformers would give them. Stored
tensors may differ from the model's tensors: for example, a tensor that packs all experts of a layer is stored as one
tensor per expert. This conversion is first run on the model without weights, to find out which of the model's tensors
are needed for each stored tensor. Then the ranks write the files in parallel. Each rank writes one file at a time, from
tensors that the ranks gather for this file.
"""

import errno
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.checkpoint.files.drafts import Draft, check_free_space, discard_on_error
from lightning_fsdp2.checkpoint.files.errors import name_file, say_what_is_kept
from lightning_fsdp2.checkpoint.find import find_checkpoint
from lightning_fsdp2.checkpoint.verify import verify_together
from lightning_fsdp2.compat.torch import get_group_timeout
from lightning_fsdp2.compat.transformers import load_without_code
from lightning_fsdp2.export.adapters import build_adapter_file_layout, merge_adapter, write_adapter_config
from lightning_fsdp2.export.files import FileLayout, build_file_layout
from lightning_fsdp2.export.sources import Weights, open_checkpoint, open_module
from lightning_fsdp2.ranks.coordination import get_rank, on_first_rank, wait_for_all_ranks
from lightning_fsdp2.ranks.failures import fail_together
from lightning_fsdp2.weights.description import build_skeleton
from lightning_fsdp2.weights.pretrained_checks import count_unbuilt_prediction_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ExportDtype = Literal["float32", "bfloat16", "float16"]


def export_hf(
    source: nn.Module | str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    tokenizer: Any = None,
    dtype: ExportDtype | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    merge: bool = False,
    pretrained: str | Path | None = None,
    overwrite: bool = False,
    verify: bool = True,
    trust_checkpoint: bool = False,
) -> Path:
    """Export a model in Hugging Face's format, as a directory for ``from_pretrained`` and other tools.

    For a model with a LoRA adapter, this function writes only the adapter, in peft's format, for
    ``PeftModel.from_pretrained`` and ``CausalLM(lora=...)``. With ``merge``, it writes the base model with the adapter
    merged into it.

    In a process group, every rank must call this function, even if ``source`` is a checkpoint. Each rank writes its
    share of the files. Tensors are gathered one by one, so a rank never has more in memory than the tensors of one file
    and one other tensor. For a checkpoint, one process without a process group is enough::

        export_hf("checkpoints/step=100.ckpt", "my-model")

    Args:
        source: A Hugging Face model, sharded or not, or any module around one, such as a LightningModule; or the path
            of a checkpoint that this package's strategies or ``save_checkpoint`` wrote.
        out: Directory to write. The files are first written to a hidden directory next to ``out``, which is renamed to
            ``out`` once it is complete.
        model: Path of the model in ``source``, such as ``"student"``, if there are several.
        tokenizer: Hugging Face tokenizer to save with the model, or its directory or hub id. None takes the tokenizer
            of the checkpoint's run or of the model, if it can be found. The exported model also stops generating at the
            tokenizer's end token, because a base model that was fine-tuned on chats has learned this token.
        dtype: Dtype of the floating-point weights, except those that the model's authors keep in float32. None keeps
            their dtypes.
        max_shard_size: Maximum size of a file, in bytes or as a string like ``"5GB"``. An adapter is always one file.
        merge: Whether to merge a LoRA adapter into the weights of its base and write a model without adapters.
        pretrained: Directory of the model that training began with, if this directory has moved since. It is needed for
            checkpoints without the frozen weights of this model (``CheckpointConfig(frozen_parameters=False)``).
        overwrite: Whether to replace ``out`` if it is a directory that is not empty. The old directory is kept until
            the new one is complete.
        verify: Whether to compare data that is read from a checkpoint with its checksums.
        trust_checkpoint: Whether a checkpoint may contain arbitrary objects, which can run code when loaded.

    Returns:
        ``out`` as an absolute path, with links resolved.

    Raises:
        TypeError: When ``source`` contains no Hugging Face model, or ``tokenizer`` is not a transformers tokenizer.
        ValueError: When ``source`` contains several models and ``model`` is not the path of one of them. When the model
            has adapters other than LoRA, no adapter to ``merge``, or weights that do not match its config. When the
            checkpoint is incomplete or does not record which model it contains. When ``pretrained`` is a different
            model. When ``out`` is remote, or when ``out`` is or contains the working directory or the checkpoint.
        FileExistsError: When ``out`` is not empty and ``overwrite`` is not set.
        OSError: When ``out`` cannot be created, the disk does not have enough free space, a file cannot be written, or
            ``tokenizer`` cannot be loaded.
        FileNotFoundError: When the checkpoint does not exist, or when it leaves out frozen weights of a pretrained
            model whose directory does not exist.
        RuntimeError: When a rank does not call this function within half the timeout of the process group's
            collectives. All errors are raised on every rank, and an existing ``out`` is kept.
    """
    _wait_for_all_ranks()
    if "://" in str(out):
        raise ValueError(f"export_hf(out={str(out)!r}) is not local: export to a local directory and upload it.")
    if pretrained is not None and not Path(pretrained).is_dir():
        raise FileNotFoundError(
            f"export_hf(pretrained={str(pretrained)!r}) is no directory; give the directory of the model that training"
            " began with, or leave it out."
        )
    out = Path(out).resolve()
    on_first_rank(lambda: check_free(out, overwrite, None if isinstance(source, nn.Module) else source))
    if verify and not isinstance(source, nn.Module):
        verify_together(on_first_rank(lambda: find_checkpoint(source, trust=trust_checkpoint)))
    with fail_together(_get_groups()):
        if isinstance(source, nn.Module):
            weights = open_module(source, model)
        else:
            options: dict[str, Any] = {
                "pretrained": pretrained,
                "needs_base": merge,
                "verify": verify,
                "trust": trust_checkpoint,
            }
            weights = open_checkpoint(source, model, **options)
        if merge:
            weights = _merge(weights)
        layout = _build_layout(weights, dtype, max_shard_size)
    _write_directory(out, weights, layout, tokenizer)
    return out


def _write_directory(out: Path, weights: Weights, layout: FileLayout, tokenizer: Any) -> None:
    """Write all files to a hidden directory, and rename it to ``out`` once it is complete."""
    drafts: list[Draft] = []  # only rank 0 appends a draft

    def start() -> Path:
        check_free_space(out, layout.total_size, what="export")
        drafts.append(start_draft(out))
        # write the small files first, so that a wrong tokenizer is reported before the weights are written
        loaded = _load_tokenizer(tokenizer, weights.description["tokenizer"])
        with say_what_is_kept(out, "export"), name_file(drafts[0].path):
            drafts[0].path.mkdir()
            _write_descriptions(drafts[0].path, weights, layout, loaded)
        return drafts[0].path

    with discard_on_error(drafts):
        folder = on_first_rank(start)
        with say_what_is_kept(out, "export"):
            _write_files(folder, weights, layout)
            on_first_rank(lambda: _publish(drafts[0]))


def check_free(out: Path, overwrite: bool, source: str | Path | None = None, *, name: str = "out") -> None:
    """Raise an error if an export to ``out`` would replace files that must be kept.

    Args:
        out: Absolute path, with links resolved.
        overwrite: Whether to replace a directory that is not empty.
        source: Path of the checkpoint to export, if there is one.
        name: Name of the user's option for ``out``, for error messages.

    Raises:
        FileExistsError: When ``out`` is a file, or a directory that is not empty and ``overwrite`` is not set.
        ValueError: When ``out`` is inside ``source``, or when ``out`` is or contains the working directory or
            ``source``, which are never replaced.
    """
    if out.is_file():
        raise FileExistsError(f"{name}={str(out)!r} is a file; choose a directory for the exported model.")
    kept = {"the working directory": Path.cwd(), **({} if source is None else {"the checkpoint": Path(source)})}
    for what, path in kept.items():
        if path.resolve().is_relative_to(out):
            raise ValueError(f"{name}={str(out)!r} would replace {what} {str(path)!r}; choose a different directory.")
    if source is not None and Path(source).is_dir() and out.is_relative_to(Path(source).resolve()):
        raise ValueError(f"{name}={str(out)!r} is inside the checkpoint {str(source)!r}; choose a directory outside.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{name}={str(out)!r} is not empty; choose a different directory, or set overwrite=True to replace it and"
            " everything in it."
        )


def start_draft(out: Path) -> Draft:
    """Start an export, and return its draft: a hidden directory that is renamed to ``out`` once it is complete.

    Raises:
        OSError: When the parent directory of ``out`` cannot be created or written to.
    """
    try:
        return Draft(out)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise OSError(
            error.errno, f"out={str(out)!r} cannot be created ({reason}); choose a different directory"
        ) from error


def check_exportable(
    module: nn.Module,
    *,
    model: str | None,
    tokenizer: Any,
    dtype: ExportDtype | torch.dtype | None,
    max_shard_size: int | str,
    merge: bool,
) -> None:
    """Check in advance whether :func:`export_hf` can export ``module`` with these options.

    If it cannot, this function raises the error that :func:`export_hf` would raise. The module need not have weights
    yet.

    Raises:
        TypeError: See :func:`export_hf`.
        ValueError: See :func:`export_hf`.
        OSError: When the tokenizer cannot be loaded.
    """
    weights = open_module(module, model)
    if merge:
        weights = _merge(weights)
    _build_layout(weights, dtype, max_shard_size)
    on_first_rank(lambda: bool(_load_tokenizer(tokenizer, weights.description["tokenizer"])))


def _wait_for_all_ranks() -> None:
    if dist.is_initialized():
        wait_for_all_ranks(
            "export a model",
            # Ranks that do not export may be waiting in another collective. Use a shorter timeout than that collective
            # has, so that the error below is raised first.
            get_group_timeout(dist.group.WORLD) / 2,  # type: ignore[arg-type]
            "Exporting is a collective: call `export_hf(...)` on all ranks, not under `if rank == 0`. A checkpoint can"
            " also be exported by one process without a process group.",
        )


def _merge(weights: Weights) -> Weights:
    if weights.adapted is None:
        raise ValueError(
            f"export_hf(merge=True): the {type(weights.skeleton).__name__} has no adapter; leave merge out."
        )
    model_class, config_class = type(weights.skeleton), type(weights.skeleton.config)
    return merge_adapter(weights, build_skeleton(model_class, config_class, weights.description))


def _build_layout(weights: Weights, dtype: ExportDtype | torch.dtype | None, max_shard_size: int | str) -> FileLayout:
    if not _is_size(max_shard_size):
        raise ValueError(
            f"export_hf(max_shard_size={max_shard_size!r}) must be a positive number of bytes, or a string like '5GB'."
        )
    if weights.adapted is not None:
        return build_adapter_file_layout(weights, _get_dtype(dtype))
    return build_file_layout(
        weights.skeleton,
        weights.specs,
        weights.description["tied"],
        dtype=_get_dtype(dtype),
        max_shard_size=max_shard_size,
    )


def _is_size(value: int | str) -> bool:
    """Return whether ``value`` is a positive file size in a format that huggingface_hub accepts."""
    if isinstance(value, str):
        number = re.fullmatch(r"(\d+(?:\.\d+)?) ?[KMGT]B", value, re.IGNORECASE)
        return number is not None and float(number[1]) > 0
    return value > 0


def _write_files(folder: Path, weights: Weights, layout: FileLayout) -> None:
    """Write the files of weights in rounds. In each round, every rank writes one file."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    files = list(layout.files.items())
    for start in range(0, len(files), ranks):
        with fail_together(_get_groups()):
            _write_round(folder, weights, layout, files[start : start + ranks])


def _write_round(folder: Path, weights: Weights, layout: FileLayout, files: Sequence[tuple[str, list[str]]]) -> None:
    """Gather the tensors of ``files`` (at most one file per rank), and write this rank's file, if there is one."""
    own = weights.read([layout.get_sources(names) for _, names in files])
    if own:
        file, names = files[get_rank()]
        _write_file(folder / file, layout.convert(own, names))


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # raised also for errors of the file system
        raise OSError(errno.EIO, str(error), str(path)) from error
    _sync(path)


def _write_descriptions(folder: Path, weights: Weights, layout: FileLayout, tokenizer: Any) -> None:
    """Write the configs, the tokenizer and all other files except the weights."""
    if weights.adapted is not None:
        write_adapter_config(folder, weights)
    else:
        _write_configs(folder, weights.skeleton, layout, tokenizer)
    _save_tokenizer(folder, tokenizer)


def _write_configs(folder: Path, skeleton: "PreTrainedModel", layout: FileLayout, tokenizer: Any) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    _set_dtype(skeleton.config, layout.dtype)
    skeleton.config.architectures = [type(skeleton).__name__]
    if count_unbuilt_prediction_layers(skeleton):
        skeleton.config.get_text_config().num_nextn_predict_layers = 0  # else inference engines look for their weights
    if skeleton.is_remote_code():
        custom_object_save(skeleton, folder, config=skeleton.config)  # type: ignore[arg-type]
    skeleton.config.save_pretrained(folder)
    if skeleton.can_generate():
        _stop_at_end_of(tokenizer, skeleton.generation_config)
        # do not call `save_pretrained`, which rejects some published configs, such as those that set a temperature
        # without sampling
        skeleton.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    if len(layout.files) > 1:
        index = {
            "metadata": {"total_parameters": skeleton.num_parameters(), "total_size": layout.total_size},
            "weight_map": {name: file for file, names in layout.files.items() for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _stop_at_end_of(tokenizer: Any, generation_config: Any) -> None:
    """Make generation also stop at the tokenizer's end token, which a model fine-tuned on chats has learned."""
    ends = generation_config.eos_token_id
    known = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    end = getattr(tokenizer, "eos_token_id", None)
    if end is not None and end not in known:
        generation_config.eos_token_id = [*known, end] if known else end


def _publish(draft: Draft) -> None:
    for path in draft.path.rglob("*"):
        if path.is_file():
            _sync(path)
    draft.publish()


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    config.dtype = dtype
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part.dtype is not None:
            _set_dtype(part, dtype)


def _load_tokenizer(tokenizer: Any, default: str) -> Any:
    """Load ``tokenizer`` if it is a directory or hub id; if it is None, load the tokenizer at ``default``, if any."""
    if isinstance(tokenizer, str | Path):
        if Path(tokenizer).is_dir() and not _has_tokenizer(tokenizer):
            raise ValueError(f"export_hf(tokenizer={str(tokenizer)!r}): the directory has no tokenizer files.")
        try:
            return load_without_code("AutoTokenizer", tokenizer)
        except (OSError, ValueError) as error:
            is_there = Path(tokenizer).is_dir()
            problem = (
                "the files cannot be read" if is_there else "neither a directory nor a readable tokenizer on the Hub"
            )
            raise ValueError(
                f"export_hf(tokenizer={str(tokenizer)!r}): {problem}: {str(error).partition(chr(10))[0]}"
            ) from error
    if tokenizer is None and _has_tokenizer(default):
        return load_without_code("AutoTokenizer", default, local_files_only=True)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(
            f"export_hf(tokenizer=<{type(tokenizer).__name__}>) is not a transformers tokenizer, since it has no"
            " `save_pretrained`. Pass a transformers tokenizer, its directory or its hub id, or save your tokenizer"
            " yourself."
        )
    return tokenizer


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    if tokenizer is None:
        logger.warning("The model is exported without a tokenizer; pass export_hf(tokenizer=...) to save it too.")
    else:
        tokenizer.save_pretrained(folder)


def _has_tokenizer(name: str | Path) -> bool:
    """Return whether a directory, or the local copy of a hub repository, has tokenizer files.

    If there are no such files, transformers may build a tokenizer that does not belong to the model.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
    if Path(name).is_dir() and name:
        return any((Path(name) / file).exists() for file in files)
    try:
        return any(isinstance(try_to_load_from_cache(str(name), file), str) for file in files)
    except HFValidationError:  # raised for an empty name, or for a path that no longer exists
        return False


def _get_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    known = {name: getattr(torch, name) for name in get_args(ExportDtype)}
    if dtype is None or dtype in known.values():
        return dtype  # type: ignore[return-value]
    if dtype not in known:
        raise ValueError(f"export_hf(dtype={dtype!r}) is unknown; use {', '.join(map(repr, known))} or None.")
    return known[dtype]


def _sync(path: Path) -> None:
    with name_file(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def _get_groups() -> list[Any]:
    return [dist.group.WORLD] if dist.is_initialized() else []

"""Read a checkpoint directory or file, and load it into a model, sharded or not, and its optimizers."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.find import find_checkpoint
from lightning_fsdp2.checkpoint.formats.directory import read_directory
from lightning_fsdp2.checkpoint.formats.single_file import read_file
from lightning_fsdp2.checkpoint.frozen import LeftOut, put_back_frozen
from lightning_fsdp2.checkpoint.stages import gather_over_stages, list_names_elsewhere
from lightning_fsdp2.checkpoint.state import find_misfits, set_optimizer_state, shard_all_like, shard_like
from lightning_fsdp2.checkpoint.verify import verify_together
from lightning_fsdp2.compat.torch import has_own_loading, is_of_torch
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.modules.structure import get_class_name, get_modules
from lightning_fsdp2.ranks.coordination import get_rank, on_every_rank, on_first_rank
from lightning_fsdp2.ranks.failures import list_names
from lightning_fsdp2.ranks.pieces import is_uneven
from lightning_fsdp2.ranks.whole_tensors import gather


def read_checkpoint(
    path: str | Path,
    model: nn.Module,
    *,
    with_optimizers: bool = True,
    in_place: bool = False,
    verify: bool = True,
    trust: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read a checkpoint directory or single file for a model. Every rank must call this; each reads only its part.

    Args:
        path: Checkpoint of this package or of any Lightning strategy, or a file with a plain ``state_dict``.
        model: Model to load. A tensor in a directory is sharded like the model's tensor of the same name and shape.
        with_optimizers: Whether to read optimizer states.
        in_place: Whether to read from a directory directly into the model's tensors. This has no effect on a model with
            its own loading code.
        verify: Whether to compare the data with its checksums.
        trust: Whether the checkpoint may hold arbitrary objects, which can run code when they are loaded.
        group: Process group for messages between the ranks. A CPU group keeps these messages off the accelerator.

    Returns:
        The checkpoint dict of Lightning's Trainer, with ``state_dict`` and, if there are any, ``optimizer_states``.
        Tensors of a single file are whole, and are only read from the file when they are used.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        ValueError: When the checkpoint is incomplete, is damaged, has a later version of the format, or holds arbitrary
            objects while ``trust`` is False.
    """
    found = on_first_rank(lambda: find_checkpoint(path, trust=trust), group)
    if verify:
        verify_together(found, group)
    if on_first_rank(found.is_dir, group):
        in_place = in_place and not _may_leave_out(model)
        options: dict[str, Any] = {
            "with_optimizers": with_optimizers,
            "in_place": in_place,
            "verify": verify,
            "trust": trust,
        }
        return read_directory(found, model, group=group, **options)
    return on_every_rank(lambda: read_file(found, with_optimizers=with_optimizers, trust=trust), group)


def load_model_state(
    path: str | Path,
    model: nn.Module,
    state: dict[str, Any],
    *,
    strict: bool = True,
    left_out: Sequence[LeftOut] = (),
) -> None:
    """Load the state dict ``state`` into ``model``, and shard whole tensors like the model's tensors.

    Weights in ``left_out`` keep the values that ``model`` has read from its pretrained files.

    Without ``strict``, tensors with a different shape than the model's are skipped with a warning that names them. A
    model with its own loading code decides for itself which tensors to skip.

    Raises:
        ValueError: When shapes or, if ``strict``, keys differ from the model's, or when ``model`` has not read the
            weights in ``left_out`` from pretrained files.
    """
    if left_out:
        state = on_every_rank(lambda: put_back_frozen(path, model, state, left_out))
    elsewhere = list_names_elsewhere(model)
    state = {name: value for name, value in state.items() if name not in elsewhere}
    own = model.state_dict()
    if not strict and not _may_leave_out(model):
        state = _take_what_fits(path, model, own, state)
    sharded = shard_all_like(state, own)
    try:
        with _shard_renamed(model, dict(sharded)):
            _load(model, sharded, strict=strict)
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):  # raised by a user's hook
            raise
        name = get_class_name(model)
        problems = _shorten(str(error)).replace(type(model).__name__, name)
        raise ValueError(
            f"The checkpoint {str(path)!r} does not fit this {name}{_get_remedy(own, state, strict)}. {problems}"
        ) from error


def load_optimizer_states(
    path: str | Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    states: Sequence[dict[str, Any]],
    weights: Mapping[str, Any],
) -> None:
    """Load a checkpoint's optimizer states into ``optimizers``.

    A parameter whose weight in the checkpoint has a different shape gets no state, as before its first step.

    Raises:
        ValueError: When ``optimizers`` differ from those of the checkpoint in number, in parameter groups, or in the
            parameters of a group.
    """
    if len(states) != len(optimizers):
        raise ValueError(
            f"The checkpoint {str(path)!r} holds the state of {len(states)} optimizer(s), but this run has"
            f" {len(optimizers)}; resume with the same optimizers."
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state(model, optimizer, state, weights)


def _load(model: nn.Module, state: dict[str, Any], *, strict: bool) -> None:
    """Load ``state`` into this rank's part of ``model``. Pipeline stages report together what does not fit.

    Raises:
        RuntimeError: On all ranks of the pipeline, if tensors of any stage do not fit, or keys are missing on their
            stage or unexpected on all stages.
    """
    stages = get_optional_stages(model)
    if stages is None or not is_of_torch(model.load_state_dict):
        model.load_state_dict(state, strict=strict)
        return
    report: tuple[list[str], list[str], str] = [], [], ""
    try:
        report = *model.load_state_dict(state, strict=False), ""
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        report = [], [], str(error).partition("\n")[2]
    missing, unexpected, misfits = zip(*gather_over_stages(model, report), strict=True)
    problems = list(filter(None, misfits))
    if strict:
        problems += _describe_keys("Missing", dict.fromkeys(chain.from_iterable(missing)))
        problems += _describe_keys(
            "Unexpected", [key for key in unexpected[0] if all(key in keys for keys in unexpected)]
        )
    if problems:
        raise RuntimeError("\n".join([f"Error(s) in loading state_dict for {type(model).__name__}:", *problems]))


def _describe_keys(kind: str, keys: Iterable[str]) -> list[str]:
    """Return torch's message on missing or unexpected keys as a list of lines."""
    quoted = ", ".join(f'"{key}"' for key in keys)
    return [f"\t{kind} key(s) in state_dict: {quoted}. "] if quoted else []


def _get_remedy(own: dict[str, Any], state: dict[str, Any], strict: bool) -> str:
    """Return what to do about a state dict ``state`` that does not fit a model's state dict ``own``.

    With an adapter, the weights that fit are no use: an adapter renames the weights of its base, and if another adapter
    is left out, the model's own one is untrained.
    """
    if not strict:
        return (
            "; build the model that was saved, or make its own `load_state_dict` or hook leave out the weights that do"
            " not fit"
        )
    has_adapter, is_saved = (any(".lora_A." in name for name in names) for names in (own, state))
    if has_adapter and is_saved:
        return "; build the model that was saved, with the same options of LoRA, such as `r` and `target_modules`"
    if is_saved:
        return (
            ": the checkpoint has a LoRA adapter, the model has none; build the model that was saved, with its adapter,"
            " or export the checkpoint with `--merge` and start from the exported model"
        )
    if has_adapter:
        return (
            ": the checkpoint has no LoRA adapter; build the model without one, or export the checkpoint and put the"
            " adapter around the exported model"
        )
    return (
        "; build the model that was saved, or set `strict_loading = False` in the LightningModule (`strict=False` in a"
        " plain loop) to load only the weights that fit"
    )


def _shorten(message: str, most: int = 3) -> str:
    """Return torch's message on keys and shapes that do not fit, with ``most`` names of each kind and their number."""
    lines = []
    mismatches = [line for line in message.split("\n") if line.lstrip().startswith("size mismatch")]
    for line in message.split("\n"):
        names = re.findall(r'"[^"]+"', line) if "key(s) in state_dict" in line else []
        if len(names) > most:
            line = f"{line.partition(':')[0]}: {', '.join(names[:most])} and {len(names) - most} more. "
        if line not in mismatches[most:]:
            lines.append(line)
    more = len(mismatches) - most
    return "\n".join([*lines, *([f"\tsize mismatch for {more} more tensors."] if more > 0 else [])])


@contextmanager
def _shard_renamed(model: nn.Module, read: dict[str, Any]) -> Iterator[None]:
    """Shard renamed tensors like the parameters with their new names, when ``load_state_dict`` is called in the block.

    A module's hooks may rename a tensor during ``load_state_dict``. Until then, the tensor is sharded like the
    parameter with its old name, or evenly if there is no such parameter.

    Args:
        model: Model that is loaded.
        read: State dict before any hook has changed it.
    """

    def shard(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value is not read.get(prefix + name):
                # If the tensor has uneven shards, gather it before sharding it like the parameter. Even with the same
                # mesh and placements, its shards may hold different rows than the parameter's shards.
                state[prefix + name] = shard_like(gather(value) if is_uneven(value) else value, parameter)

    handles = [module.register_load_state_dict_pre_hook(shard) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _may_leave_out(model: nn.Module) -> bool:
    """Return whether ``model`` has its own loading code, which may choose to keep some of the model's weights."""
    return not is_of_torch(model.load_state_dict) or any(has_own_loading(module) for module in get_modules(model))


def _take_what_fits(path: str | Path, model: nn.Module, own: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    other = {
        name: f"{name} {tuple(state[name].shape)}, here {tuple(own[name].shape)}" for name in find_misfits(own, state)
    }
    everywhere = dict.fromkeys(text for stage in gather_over_stages(model, other) for text in stage.values())
    if everywhere and get_rank() == 0:
        warnings.warn(
            f"Tensors of the checkpoint {str(path)!r} have a different shape than the model's and are not loaded,"
            f" and neither are their optimizer states: {list_names(everywhere)}.",
            stacklevel=3,
        )
    return {name: value for name, value in state.items() if name not in other}

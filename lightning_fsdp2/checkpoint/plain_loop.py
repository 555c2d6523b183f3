"""Save and load checkpoints in a plain torch loop, without Lightning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_fsdp2.checkpoint.files.drafts import get_path
from lightning_fsdp2.checkpoint.formats.directory import take_snapshot, write_snapshot
from lightning_fsdp2.checkpoint.frozen import LEFT_OUT_KEY
from lightning_fsdp2.checkpoint.loading import load_model_state, load_optimizer_states, read_checkpoint
from lightning_fsdp2.checkpoint.stages import get_optional_pipeline_group
from lightning_fsdp2.checkpoint.state import get_optimizer_state
from lightning_fsdp2.modules.sharder import get_optional_sharder
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY, describe_hf_models


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer] = (), extra: Any = None
) -> None:
    """Save a model and its optimizers from a plain torch loop. Every rank must call this.

    Args:
        path: Directory to write, local or in an object store that fsspec supports. An existing checkpoint is replaced
            once the new one is complete.
        model: Model, sharded or not. For a DDP or Megatron-FSDP wrapper, the wrapped model is saved.
        optimizers: One optimizer or several.
        extra: Any value that ``torch.save`` accepts, such as the step and the learning rate schedule. Rank 0's value is
            saved.

    Raises:
        Exception: On every rank, when a rank could not write. An existing checkpoint at ``path`` is then kept, except
            in an object store.
    """
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    model = _unwrap(model)
    tensors = {"state_dict": model.state_dict()}
    for index, optimizer in enumerate(optimizers):
        tensors[f"optimizer_{index}"] = get_optimizer_state(model, optimizer)
    summary = {DESCRIPTIONS_KEY: describe_hf_models(model)}
    snapshot = take_snapshot(tensors, {"extra": extra}, summary, pipeline=get_optional_pipeline_group(model))
    write_snapshot(get_path(path), snapshot)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    weights_only: bool = True,
    verify: bool = True,
) -> Any:
    """Load a checkpoint from :func:`save_checkpoint` or the Trainer, on any number of ranks. Every rank must call this.

    Args:
        path: Checkpoint directory or single file.
        model: Model or wrapper to load into. After an error, it may hold some of the checkpoint's weights.
        optimizers: Optimizers to load into, as many as were saved. If empty, the saved states are skipped.
        strict: Whether the model and the checkpoint must have the same keys.
        weights_only: Whether to refuse arbitrary objects in ``extra``. Use False only for files that you trust.
        verify: Whether to compare the data with its checksums.

    Returns:
        The saved ``extra``, or None if there is none.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        ValueError: When the checkpoint is incomplete, damaged, or from a different model or optimizer.
    """
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    model = _unwrap(model)
    checkpoint = read_checkpoint(
        path, model, with_optimizers=bool(optimizers), in_place=True, verify=verify, trust=not weights_only
    )
    left_out = checkpoint.get(LEFT_OUT_KEY, [])
    weights = checkpoint["state_dict"]
    load_model_state(path, model, weights, strict=strict, left_out=left_out)
    if optimizers:
        load_optimizer_states(path, model, optimizers, checkpoint.get("optimizer_states", []), weights)
    return checkpoint.get("extra")


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper, because checkpoints use the names of the model itself."""
    if isinstance(model, DistributedDataParallel):
        return model.module
    sharder = get_optional_sharder(model)
    return model if sharder is None else sharder.get_checkpointed_module()

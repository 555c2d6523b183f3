"""Function that loads a LightningModule or LightningDataModule from any kind of checkpoint, in one process."""

import warnings
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_fsdp2.checkpoint.convert import read_whole_checkpoint
from lightning_fsdp2.checkpoint.files.drafts import METADATA_FILE
from lightning_fsdp2.checkpoint.files.storage import load_pickled
from lightning_fsdp2.checkpoint.find import find_checkpoint
from lightning_fsdp2.checkpoint.frozen import LEFT_OUT_KEY, put_back_frozen
from lightning_fsdp2.checkpoint.whole import read_descriptions
from lightning_fsdp2.compat.lightning import load_from_state, migrate_checkpoint
from lightning_fsdp2.weights.description import DESCRIPTIONS_KEY, restore_generation_configs
from lightning_fsdp2.weights.materialize import is_meta, materialize
from lightning_fsdp2.weights.pretrained import load_pretrained

T = TypeVar("T", LightningModule, LightningDataModule)


def load_from_checkpoint(
    cls: type[T],
    path: str | Path,
    *,
    strict: bool | None = None,
    verify: bool = True,
    weights_only: bool | None = None,
    trust_checkpoint: bool = False,
    map_location: torch.device | str = "cpu",
    **kwargs: Any,
) -> T:
    """Build ``cls`` from the hyper-parameters in a checkpoint and load its weights, without a Trainer or other ranks.

    This function works like ``LightningModule.load_from_checkpoint``, but also reads checkpoint directories. A model
    that ``configure_model`` builds on the meta device gets the checkpoint's weights. Buffers that are not in the
    checkpoint are initialised by their modules::

        module = load_from_checkpoint(CausalLM, "checkpoints/last.ckpt").eval()

    Args:
        cls: Class of the LightningModule or LightningDataModule that was saved in the checkpoint.
        path: Checkpoint that this package or Lightning saved under any strategy, or a plain ``state_dict``.
        strict: Whether the module and the checkpoint must have the same keys; None uses the module's
            ``strict_loading``. If False, weights of a ``from_pretrained`` model that are not in the checkpoint are read
            from the model's files. Weights that ``CheckpointConfig(frozen_parameters=False)`` has left out are always
            read from the model's files.
        verify: Whether to compare the data with its checksums.
        weights_only: False has the same effect as ``trust_checkpoint=True``, as in ``torch.load``.
        trust_checkpoint: Whether the checkpoint may contain arbitrary objects, which can run code when loaded.
        map_location: Device of the module.
        **kwargs: Arguments of ``cls``; they take precedence over the hyper-parameters.

    Returns:
        The data module; or the module, in training mode unless its constructor sets evaluation mode.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        TypeError: When ``cls`` is not a LightningModule or LightningDataModule, or the checkpoint lacks an argument
            that ``cls`` requires.
        ValueError: When the checkpoint is incomplete, damaged or from a different model, or when it contains arbitrary
            objects and is not trusted. For a different model, the message lists missing and unexpected keys.
    """
    if not (isinstance(cls, type) and issubclass(cls, LightningModule | LightningDataModule)):
        raise TypeError(f"load_from_checkpoint(cls={cls!r}): pass a LightningModule or LightningDataModule class.")
    if trust_checkpoint and weights_only:
        raise ValueError("trust_checkpoint=True allows objects that weights_only=True rejects; leave one of them out.")
    is_trusted = trust_checkpoint if weights_only is None else not weights_only
    is_module = issubclass(cls, LightningModule)
    checkpoint = _read(path, with_weights=is_module, verify=verify, trust=is_trusted)
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    if not is_module:
        return cast(T, load_from_state(cls, checkpoint, **kwargs))
    left_out = checkpoint.pop(LEFT_OUT_KEY, [])
    is_strict = strict
    if left_out:  # the weights that the checkpoint leaves out are loaded later, from the pretrained files
        strict = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
            module: Any = load_from_state(cls, checkpoint, strict=strict, **kwargs)
        if is_meta(module):  # not loaded yet, since weights cannot be copied to the meta device
            strict = module.strict_loading if strict is None else strict
            if not strict:  # weights that the checkpoint lacks are in the pretrained files
                load_pretrained(module, torch.device("cpu"))
            materialize(module, torch.device("cpu"))
            module.load_state_dict(checkpoint["state_dict"], strict=strict)
        if left_out:
            state = put_back_frozen(path, module, checkpoint["state_dict"], left_out)
            module.load_state_dict(state, strict=module.strict_loading if is_strict is None else is_strict)
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        raise ValueError(
            f"The checkpoint {str(path)!r} does not match this {cls.__name__}: pass the arguments of the saved module"
            f" as keywords, or `strict=False` to ignore missing and unexpected keys. {error}"
        ) from error
    found = find_checkpoint(path, trust=is_trusted)
    descriptions = read_descriptions(found) if found.is_dir() else checkpoint.get(DESCRIPTIONS_KEY, [])
    restore_generation_configs(module, descriptions)
    return cast(T, module.to(map_location))


def _read(path: str | Path, *, with_weights: bool, verify: bool, trust: bool) -> dict[str, Any]:
    if not with_weights and (found := find_checkpoint(path, trust=trust)).is_dir():
        checkpoint: dict[str, Any] = load_pickled(found / METADATA_FILE, trust=trust)
    else:
        checkpoint = read_whole_checkpoint(path, with_optimizers=False, verify=verify, trust=trust)
    checkpoint.setdefault("pytorch-lightning_version", lightning.__version__)  # a plain `state_dict` has no version
    return migrate_checkpoint(checkpoint, str(path))

"""Checks before training: ranks must have the same config, and checkpoint folders be writable and on all nodes."""

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fsdp2._secrets import hide_secrets, is_secret
from lightning_fsdp2.checkpoint.files.drafts import check_folder, get_path, is_local
from lightning_fsdp2.ranks.coordination import gather_objects, on_first_rank
from lightning_fsdp2.ranks.failures import describe_ranks
from lightning_fsdp2.strategies.launch.rendezvous import refuse, tell_differences

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_OPTIONS_OF_TRAINER = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "num_sanity_val_steps",
    "precision",
    "reload_dataloaders_every_n_epochs",
    "val_check_interval",
)

_NAMES_OF_FILES = ("config", "ckpt_path")
"""Options that are not compared. Only the content of config files matters, and all ranks use rank 0's ``ckpt_path``."""

_TIME_TO_APPEAR = timedelta(minutes=1)
"""Longest time to wait for a file to appear on a network file system. The strategy's timeout can shorten it."""


def check_same_run(trainer: "Trainer", hosts: Sequence[str], group: dist.ProcessGroup) -> None:
    """Refuse to start if the ranks have different configs. Every rank must call this.

    In a run from the command line, the ranks compare the whole config. In a script, they compare the options of the
    Trainer and the strategy. Different saved hyperparameters cause only a warning, because a script may save the rank
    as a hyperparameter.

    Args:
        trainer: Trainer that has a module, and whose strategy has resolved its mesh sizes.
        hosts: Host names of all ranks.
        group: CPU group of all ranks.

    Raises:
        ValueError: On every rank, when configs differ. The message names the options, their values and the ranks.
    """
    if differences := _compare(_describe_config(trainer), hosts, group):
        raise ValueError(refuse(differences))
    if differences := _compare(_describe_hyperparameters(trainer), hosts, group):
        rank_zero_warn(f"The hyperparameters of the ranks differ, and each rank uses its own: {differences}.")


def check_folders(trainer: "Trainer", hosts: Sequence[str], group: dist.ProcessGroup) -> None:
    """Refuse a folder of a ``ModelCheckpoint`` that rank 0 cannot write to, or that not all hosts share.

    Every rank must call this.

    Args:
        trainer: Trainer whose callbacks are set up.
        hosts: Host names of all ranks.
        group: CPU group of all ranks.

    Raises:
        ValueError: On every rank. The message names the folder, and what is wrong with it or which ranks cannot see
            rank 0's test file in it.
    """
    if cast(Any, trainer).fast_dev_run:  # it saves no checkpoint
        return
    patience = min(_TIME_TO_APPEAR, cast(Any, trainer.strategy).group_timeout / 2)
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    for folder in (get_path(callback.dirpath) for callback in callbacks if callback.dirpath):
        on_first_rank(partial(check_folder, folder), group)
        if trainer.num_nodes > 1 and is_local(folder):
            _check_shared(folder, hosts, group, patience)


def _compare(description: dict[str, str], hosts: Sequence[str], group: dist.ProcessGroup) -> str:
    digest = sha256(json.dumps(description).encode()).digest()
    if len(set(gather_objects(digest, group))) == 1:  # compare digests first, since descriptions can be megabytes long
        return ""
    return tell_differences(gather_objects(description, group), hosts)


def _describe_config(trainer: Any) -> dict[str, str]:
    strategy = trainer.strategy
    config: dict[str, Any] = {"strategy": type(strategy).__name__, "mesh": strategy.sizes}
    for owner in (strategy.config, strategy.checkpoint_config):
        config |= {f"{type(owner).__name__}.{name}": value for name, value in vars(owner).items()}
    config |= {f"trainer.{name}": getattr(trainer, name, None) for name in _OPTIONS_OF_TRAINER}
    for callback in trainer.callbacks:
        if isinstance(callback, SaveConfigCallback):
            config |= {name: value for name, value in callback.config.items() if name not in _NAMES_OF_FILES}
    return {name: _write(name, value) for name, value in config.items()}


def _describe_hyperparameters(trainer: Any) -> dict[str, str]:
    return {
        f"{type(owner).__name__}.{name}": _write(name, value)
        for owner in (trainer.lightning_module, trainer.datamodule)
        for name, value in getattr(owner, "hparams_initial", {}).items()
    }


def _write(name: str, value: Any) -> str:
    """Return ``value`` as text, without memory addresses or secrets. Equal values give equal texts on all ranks."""
    if is_secret(name.rpartition(".")[2]):
        return "hidden"
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_write(str(key), item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_write(name, item) for item in value) + "]"
    if isinstance(value, set | frozenset):  # sort the items, as a set's order differs between processes
        return "{" + ", ".join(sorted(_write(name, item) for item in value)) + "}"
    if isinstance(value, torch.device):
        return value.type
    text = hide_secrets(repr(value))
    return type(value).__name__ if " at 0x" in text else text


def _check_shared(folder: Path, hosts: Sequence[str], group: dist.ProcessGroup, patience: timedelta) -> None:
    # use a new file name for each check, since a host may have cached that the file of an earlier check is missing
    probe = on_first_rank(lambda: _make_file(folder / f".shared-{uuid.uuid4().hex[:8]}"), group)
    sees = gather_objects(_appears(probe, patience), group)
    on_first_rank(lambda: probe.unlink(missing_ok=True), group)
    if blind := [rank for rank, does_see in enumerate(sees) if not does_see]:
        raise ValueError(
            f"ModelCheckpoint(dirpath={str(folder)!r}): all nodes must share the checkpoint folder, but a file that"
            f" rank {describe_ranks([0], hosts)} wrote is not visible to ranks {describe_ranks(blind, hosts)}. Choose a"
            " folder on a shared file system, or in an object store."
        )


def _make_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def _appears(path: Path, patience: timedelta) -> bool:
    deadline = time.monotonic() + patience.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # listing the folder makes a network file system ask its server for new files
        time.sleep(0.2)
    return True

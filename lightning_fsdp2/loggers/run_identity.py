"""Description of a run for loggers, with enough detail to compare or to repeat runs."""

import dataclasses
import platform
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning
import torch
import transformers
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2._secrets import HIDDEN, hide_secrets, is_secret
from lightning_fsdp2.compat.lightning import set_logged_hyperparameters
from lightning_fsdp2.managers.dtypes import get_dtypes
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.modules.structure import get_class, get_class_name, get_hf_models

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_MOST_ITEMS = 200
"""Maximum length of a list or dict that is described item by item. A longer list or dict may be a whole dataset."""

_GIT_TIMEOUT_SECONDS = 10


def describe_run(trainer: "Trainer", module: nn.Module) -> dict[str, Any]:
    """Describe a run in plain values, for ``log_hyperparams``. This function does not communicate with other ranks.

    Args:
        trainer: Trainer with a strategy of this package, after its setup.
        module: Module that the Trainer trains, after sharding.

    Returns:
        The strategy with its mesh and flags, the devices, the dtypes in effect, the numbers of parameters in total and
        on this rank, the model, the data, versions and, in a git repository, the revision. Options with names such as
        ``api_key``, and the secret parts of URLs, are left out.
    """
    strategy: Any = trainer.strategy
    return {
        "strategy": {
            "name": type(strategy).__name__,
            "mesh": strategy.world.axis_sizes,
            "config": _to_plain(strategy.manager.config),
            "checkpoint": _to_plain(strategy.checkpoint_config),
        },
        "devices": {
            "ranks": trainer.world_size,
            "hosts": trainer.num_nodes,
            "kind": _get_device_name(strategy.root_device),
        },
        "precision": {
            "trainer": str(trainer.precision),
            **_to_plain(get_dtypes(strategy.manager, module)),
            "policy": _to_plain(getattr(strategy.manager, "mp_policy", None)),
        },
        "parameters": _count_parameters(module),
        "model": _describe_model(module),
        "data": _describe_data(trainer),
        "versions": get_versions(),
        "git": _get_optional_revision(),
    }


def describe_step(trainer: Any) -> str | None:
    """Say how many samples and tokens an optimizer step has, or return None if this is not known.

    Args:
        trainer: Trainer with a strategy of this package, whose data loader for training is set up.
    """
    is_fixed = trainer.lightning_module.automatic_optimization and not any(
        isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks
    )
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not is_fixed or not isinstance(size, int):
        return None
    ranks, accumulation = trainer.strategy.data_parallel_size, trainer.accumulate_grad_batches
    samples, length = size * ranks * accumulation, getattr(trainer.datamodule, "sequence_length", None)
    tokens = f" ({samples * length:,} tokens)" if isinstance(length, int) else ""
    return (
        f"A step is {samples:,} samples{tokens}: {ranks} data parallel rank(s) x batches of {size} x"
        f" accumulate_grad_batches={accumulation}."
    )


def hide_hyperparameters(owner: Any) -> None:
    """Hide secrets in the hyper-parameters that loggers get, and warn of them, because checkpoints hold them too.

    Args:
        owner: LightningModule or data module that has called ``save_hyperparameters``; any other is left alone.
    """
    values = dict(getattr(owner, "hparams_initial", {}))
    shown = {name: _hide(name, value) for name, value in values.items()}
    if names := [name for name, value in values.items() if shown[name] is not value]:
        set_logged_hyperparameters(owner, shown)
        rank_zero_warn(
            f"{type(owner).__name__}.save_hyperparameters() takes {', '.join(names)}, which may hold secrets. Loggers"
            " do not get them, but checkpoints and config files hold them as they are. If they are secrets, use"
            f" save_hyperparameters(ignore={names}), and read them from the environment.",
            category=UserWarning,
        )


def _hide(name: str, value: Any) -> Any:
    """Return ``value`` itself, or a copy without the secrets in it."""
    if is_secret(name) and isinstance(value, str | bytes) and value:
        return HIDDEN
    if isinstance(value, str):
        shown = hide_secrets(value)
        return value if shown == value else shown
    if isinstance(value, Mapping):
        items = {key: _hide(str(key), item) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    if isinstance(value, list | tuple):
        parts = [_hide(name, item) for item in value]
        return value if all(part is item for part, item in zip(parts, value, strict=True)) else parts
    return value


def _count_parameters(module: nn.Module) -> dict[str, int]:
    parameters, stages = list(module.parameters()), get_optional_stages(module)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    # with a pipeline, this rank has only the parameters of its own stages
    whole: Any = parameters if stages is None else list(stages.parameters.values())
    return {
        "total": sum(parameter.shape.numel() for parameter in whole),
        "trainable": sum(parameter.shape.numel() for parameter in whole if parameter.requires_grad),
        "on_rank_0": sum(parameter.numel() for parameter in local),
    }


def _describe_model(module: Any) -> dict[str, Any]:
    models: list[Any] = get_hf_models(module)
    kind = get_class(module)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "pretrained": _to_plain(getattr(module, "pretrained", None)),
        "hugging_face": [{"class": get_class_name(m), "config": _to_plain(m.config.to_dict())} for m in models],
    }


def _describe_data(trainer: Any) -> dict[str, Any]:
    datamodule = trainer.datamodule
    if datamodule is None:
        return {}
    usual = vars(LightningDataModule())
    options = {name: value for name, value in vars(datamodule).items() if name not in usual and name[0] != "_"}
    batch_size, length = options.get("batch_size"), options.get("sequence_length")
    data: dict[str, Any] = {
        "class": f"{type(datamodule).__module__}.{type(datamodule).__name__}",
        "options": {**_to_plain(dict(getattr(datamodule, "hparams", {}))), **_to_plain(options)},
    }
    if isinstance(batch_size, int):
        data["global_batch_size"] = batch_size * trainer.accumulate_grad_batches * trainer.strategy.data_parallel_size
    if isinstance(batch_size, int) and isinstance(length, int):
        data["tokens_per_step"] = data["global_batch_size"] * length
    if isinstance(length, int) and hasattr(options.get("train_dataset"), "__len__"):
        data["tokens"] = len(options["train_dataset"]) * length
    return data


def get_versions() -> dict[str, Any]:
    """Return the versions of Python, CUDA, NCCL and the packages that determine the results of a training step."""
    import lightning_fsdp2

    return {
        "lightning_fsdp2": lightning_fsdp2.__version__,
        "lightning": lightning.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }


def _get_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _get_optional_revision() -> dict[str, Any] | None:
    """Return the commit of the working directory's git repository, and whether tracked files have changed since."""
    commit, changes = _run_git("rev-parse", "HEAD"), _run_git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None or changes is None else {"commit": commit, "is_dirty": bool(changes)}


def _run_git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):  # for example, there is no git, repository or commit
        return None
    return result.stdout.strip()


def _to_plain(value: Any) -> Any:
    """Convert a value to numbers, strings, short lists and dicts. Replace any other object with its name."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return hide_secrets(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping | list | tuple | set) and len(value) > _MOST_ITEMS:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items() if not is_secret(str(key))}
    if isinstance(value, list | tuple | set):
        return [_to_plain(item) for item in value]
    return getattr(value, "name_or_path", None) or getattr(value, "__name__", None) or type(value).__name__

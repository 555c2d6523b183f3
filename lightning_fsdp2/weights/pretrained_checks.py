"""Checks that the tensors of pretrained files fit the model that was read from them."""

import copy
import logging
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2.compat.transformers import drop_harmless_keys
from lightning_fsdp2.modules.structure import get_class_name
from lightning_fsdp2.ranks.failures import list_names

logger = logging.getLogger(__name__)


def check_loaded(
    model: Any, info: Any, folder: Path, allow_missing: Sequence[str], *, stored: Collection[str] = ()
) -> None:
    """Refuse files that do not fit the model. transformers would only warn, and some weights would be wrong.

    Args:
        model: Model whose weights were read.
        info: What transformers says of the names.
        folder: Folder of the files.
        allow_missing: Names, or patterns of names, of weights that the files may lack.
        stored: Names of all tensors in the files. transformers leaves some out of ``info`` that a class ignores.

    Raises:
        ValueError: If tensors are missing, left over, or of another shape. The message names them.
    """
    info = copy.copy(info)
    drop_harmless_keys(model, info)
    missing = {
        name
        for name in info.missing_keys
        if get_tied_names(model, name) <= info.missing_keys
        and not any(fnmatchcase(name, pattern) for pattern in allow_missing)
    }
    left_over = {name for name in info.unexpected_keys if _has_module_of(model, name)}
    problems = [
        *_describe("missing in the files", missing - info.conversion_errors.keys()),
        *_describe("in the files, but not in the module that would use them", left_over),
        *_describe("of another shape than the model's", {name for name, *_ in info.mismatched_keys}, model),
        *_describe("not convertible to the model's", info.conversion_errors),
        *(f"the first error is {_shorten(text)}" for text in [*info.conversion_errors.values()][:1]),
    ]
    if problems:
        raise ValueError(
            f"The tensors in pretrained={str(folder)!r} do not fit this {get_class_name(model)}:"
            f" {'; '.join(problems)}. Change the config of the model, or give the directory of a model of this"
            " architecture. If a part of the model is new, such as a head, name it in `allow_missing`. If the model"
            " should not use some tensors, remove them from the files."
        )
    # the files may name the layers differently from the model
    _warn_of_layers(
        model, _find_further_layers(model, stored) or _find_further_layers(model, info.unexpected_keys), folder
    )


def count_unbuilt_prediction_layers(model: Any) -> int:
    """Return how many layers for multi-token prediction the config of ``model`` has and the model has not.

    The files of DeepSeek V3 and GLM-4.5 have such layers, which predict further tokens. The classes of transformers
    leave them out.
    """
    layers = getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    is_built = any(part in name for name, _ in model.named_parameters() for part in ("mtp", "nextn"))
    return 0 if is_built else layers


def _find_further_layers(model: nn.Module, names: Collection[str]) -> dict[str, set[str]]:
    """Return the names of tensors in layers that the model does not have, by the name of the list of its layers."""
    layers: dict[str, set[str]] = {}
    for name in names:
        for prefix, number in _split_at_numbers(name):
            if isinstance(each := _find_module(model, prefix), nn.ModuleList) and number >= len(each):
                layers.setdefault(prefix, set()).add(name)
    return layers


def _warn_of_layers(model: Any, layers: dict[str, set[str]], folder: Path) -> None:
    """Warn on rank 0 if the files have more layers than the model. Somebody may want that, for a short trial."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    predicting = count_unbuilt_prediction_layers(model)
    remedy = (
        f" {predicting} of them predict further tokens (num_nextn_predict_layers), which {get_class_name(model)} does"
        " not train or export."
        if predicting
        else " For all layers, leave the number of layers (such as num_hidden_layers) in its config.json as it was."
    )
    for prefix, names in sorted(layers.items()):
        number = len(_find_module(model, prefix))  # type: ignore[arg-type]
        logger.warning(
            "pretrained=%r: %d tensors of the files are not used, because the model has only %d layers in %r: %s.%s",
            str(folder),
            len(names),
            number,
            prefix,
            list_names(names),
            remedy,
        )


def _split_at_numbers(name: str) -> list[tuple[str, int]]:
    """Return the parts before each number in a dotted name, with the number."""
    parts = name.split(".")
    return [(".".join(parts[:place]), int(part)) for place, part in enumerate(parts) if part.isdecimal()]


def _find_module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def check_ties(model: Any, info: Any, folder: Path) -> None:
    """Refuse different values for weights that the config ties, because they are sharded as one parameter."""
    for name, other in model.all_tied_weights_keys.items():
        if {name, other} & info.missing_keys:
            continue
        first, second = (_get_local(model.get_parameter_or_buffer(tied)) for tied in (name, other))
        if not (first.is_meta or second.is_meta) and not torch.equal(first, second):
            raise ValueError(
                f"The config of pretrained={str(folder)!r} ties {name} to {other}, but the files hold both with"
                ' different values. To train both, set `"tie_word_embeddings": false` in its config.json, or pass'
                ' `from_pretrained(..., config={"tie_word_embeddings": False})`. Otherwise remove one of the two from'
                " the files."
            )


def get_tied_names(model: Any, name: str) -> set[str]:
    """Return ``name`` and the names of all weights tied to it. The files need to hold only one of these weights."""
    ties: dict[str, str] = model.all_tied_weights_keys
    source = ties.get(name, name)
    return {name, source, *(target for target, other in ties.items() if other == source)}


def _has_module_of(model: nn.Module, name: str) -> bool:
    """Return whether an unexpected tensor in the files belongs to a module that the model has.

    Such a tensor, for example a bias or the scales of a quantised weight, must not be ignored, because the results
    would change. The tensors of a layer or head that the model does not have can be ignored.
    """
    module = _find_module(model, name.rpartition(".")[0])
    return module is not None and module is not model and bool(module._parameters)


def _describe(problem: str, names: Collection[str], model: nn.Module | None = None) -> list[str]:
    if not names:
        return []
    own = {} if model is None else model.state_dict()
    described = [f"{name} is {tuple(own[name].shape)} here" if name in own else name for name in names]
    return [f"{problem}: {list_names(described)}"]


def _shorten(error: str) -> str:
    """Return the last two lines of transformers' error about a conversion: the message and the failed operation."""
    return " ".join(error.strip().splitlines()[-2:])


def _get_local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local

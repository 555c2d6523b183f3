"""Checkpoints without the frozen weights of pretrained models, which are read from these models' files instead."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_fsdp2.checkpoint.stages import gather_over_stages, list_names_elsewhere
from lightning_fsdp2.ranks.coordination import on_first_rank
from lightning_fsdp2.weights.pretrained import Frozen, list_frozen

LEFT_OUT_KEY = "lightning_fsdp2.left_out"
"""Key in a checkpoint for the result of :func:`describe_left_out`."""

LeftOut = dict[str, Any]
"""Record of those weights of one pretrained model that a checkpoint does not hold, as a dict of plain types.

For example ``{"folder": "/models/llama", "fingerprint": "...", "names": [...]}``.
"""


def leave_out_frozen(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state``, the state dict of ``module``, without the weights that :func:`list_frozen` names."""
    names = {name for frozen in list_frozen(module) for name in frozen.names}
    return {name: value for name, value in state.items() if name not in names}


def describe_left_out(
    module: nn.Module, state: dict[str, Any], group: dist.ProcessGroup | None = None
) -> list[LeftOut]:
    """Return one record for each pretrained model in ``module`` that has frozen weights missing from ``state``.

    The record lists the names of these weights in all pipeline stages. Every rank must call this. All ranks get rank
    0's result.

    Raises:
        OSError: On every rank, when the files of a pretrained model can no longer be read.
    """
    read = list_frozen(module)
    stages = gather_over_stages(module, [part.names for part in read])
    left_out = [
        [name for name in dict.fromkeys(chain.from_iterable(names)) if name not in state]
        for names in zip(*stages, strict=True)
    ]

    def describe() -> list[LeftOut]:
        return [
            {"folder": str(part.files.folder), "fingerprint": part.files.fingerprint, "names": names}
            for part, names in zip(read, left_out, strict=True)
            if names
        ]

    return on_first_rank(describe, group)


def list_left_out(left_out: Sequence[LeftOut]) -> set[str]:
    """Return the names of all weights that a checkpoint does not hold, according to its ``left_out`` records."""
    return {name for part in left_out for name in part["names"]}


def put_back_frozen(
    path: str | Path, module: nn.Module, state: dict[str, Any], left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    """Return ``state`` plus the weights that the checkpoint does not hold, which are taken from ``module``.

    Raises:
        OSError: When the pretrained files of ``module`` can no longer be read.
        ValueError: When ``module`` has not read these weights from the pretrained model that the checkpoint names.
    """
    own = module.state_dict() if left_out else {}
    read = list_frozen(module) if left_out else []
    elsewhere = list_names_elsewhere(module) if left_out else set()
    for part in left_out:
        names = set(part["names"]) - elsewhere
        _check_read(path, part, names, read, own)
        state = {**{name: own[name] for name in names}, **state}
    return state


def _check_read(path: str | Path, part: LeftOut, names: set[str], read: Sequence[Frozen], own: dict[str, Any]) -> None:
    sources = [frozen for frozen in read if names & set(frozen.names)]
    has_all = names <= {name for frozen in sources for name in frozen.names} and names <= own.keys()
    what = (
        f"The checkpoint {str(path)!r} does not hold {len(part['names'])} frozen weights of the pretrained model"
        f" {part['folder']!r}"
    )
    if not has_all:
        raise ValueError(
            f"{what}, and this run cannot supply these weights, because it trains them or has not read them from"
            " pretrained files. Pass the pretrained model as `pretrained`, with the same `lora` and frozen parameters."
            " If the model's directory has moved, pass the new directory."
        )
    for frozen in sources:
        if frozen.files.fingerprint != part["fingerprint"]:
            raise ValueError(
                f"{what}, but this run has read a different model, {str(frozen.files.folder)!r}; pass the checkpoint's"
                " model as `pretrained`."
            )

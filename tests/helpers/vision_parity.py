"""Gradients of a tiny model that sees images, over two micro-batches, on two ranks and in one process, compared."""

import re
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from helpers.oracle import whole
from helpers.ranks import RankError, run_ranks
from helpers.vision import (
    get_family,
    get_vision_loss,
    make_image_batch,
    make_vision_config,
    make_vision_model,
)
from helpers.vision_families import FAMILIES
from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.parallel.tensor.families import FAMILIES as WITH_PLANS
from lightning_fsdp2.parallel.tensor.plans import NoPlanError

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "config": {"sequence_parallel": True}},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"ep_size": 2},
    "tp2 with ep2+sp": {"tp_size": 2, "ep_size": 2, "config": {"sequence_parallel": True}},
}
STEPS = 2
"""Micro-batches of each data parallel rank."""

_DEEPSTACK = (
    "cohere_compass",
    "cosmos3_omni",
    "granite4_vision",
    "granite_docling",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen3_vl_moe",
)
REFUSED = {
    **dict.fromkeys(_DEEPSTACK, "features of its images"),
    "gemma4": "cannot be sharded",
    **dict.fromkeys(("inkling2", "inkling2_loop"), "sequence_parallel=True is not possible for"),
    "udop": "are tied, but belong to different blocks",
}
"""Families that are refused, on some layouts at least, and a part of the reason that the package gives."""

LAYER = re.compile(r"\.\d+\.")
"""In the names of parameters of layers."""

TOWER = re.compile("vis|image|tower|projector")
"""In the names of parameters that only images reach."""


def get_vision_families() -> list[str]:
    """Return those that the installed transformers knows, in the order of their names."""
    return sorted(name for name in FAMILIES if get_family(name) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def get_vision_mixtures() -> list[str]:
    """Return those of :func:`get_vision_families` whose experts expert parallelism finds."""
    return [name for name in get_vision_families() if find_experts(make_vision_model(name).modules())]


def measure_vision_parity(name: str, layout: str) -> float:
    """Accumulate the gradients of a model of :data:`FAMILIES` on two ranks and alone, and compare them.

    Returns:
        The largest difference of a gradient, relative to its parameter's largest gradient (for parameters whose
        gradients are all small: to 0.1 % of the model's largest one).
    """
    expected = _train_alone(name)
    [gradients, _] = run_ranks(_train_on_mesh, 2, name, layout)
    return compare_gradients(gradients, expected)


def compare_gradients(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference, within 1e-5."""
    assert gradients.keys() == expected.keys()
    sizes = {name: float(value.abs().max()) for name, value in expected.items()}
    largest = max(sizes.values())
    # a gradient that is a sum of rounding, such as that of a bias of keys, is measured by the others
    errors = {
        name: float((gradients[name] - value).abs().max()) / (sizes[name] + 1e-3 * largest)
        for name, value in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-5, f"gradient of {worst} off by {errors[worst]:.1e}"
    return errors[worst]


def get_optional_vision_refusal(name: str, error: RankError) -> str | None:
    """Return what the package says of a model that it refuses for a reason of the model's; None for a failure."""
    if not isinstance(error.cause, ValueError):
        return None
    text = str(error.cause)
    has_no_plan = isinstance(error.cause, NoPlanError) and not _has_plan(name)
    return text if has_no_plan or (name in REFUSED and REFUSED[name] in text) else None


def _has_plan(name: str) -> bool:
    """Whether the installed transformers has a plan for the language model of ``name``, or this package."""
    family = make_vision_config(name).get_text_config().model_type
    own = getattr(CONFIG_MAPPING[family], "base_model_tp_plan", None) or ()
    return any("*" in pattern for pattern in own) or family in WITH_PLANS


@cache
def _train_alone(name: str) -> dict[str, Tensor]:
    [gradients] = run_ranks(lambda: _accumulate(name, make_vision_model(name), slice(None)), 1)
    towers = [float(value.abs().max()) > 0 for key, value in gradients.items() if TOWER.search(key)]
    assert sum(towers) * 2 >= len(towers), "the images do not reach the loss"
    return dict(gradients)


def _train_on_mesh(name: str, layout: str) -> dict[str, Tensor]:
    options = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    tp_size = options.get("tp_size", 1)
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **options.get("config", {}))
    mesh = create_device_mesh(tp_size=tp_size, ep_size=options.get("ep_size", 1), device_type="cpu")
    model = FSDP2Manager(config, mesh).parallelize(make_vision_model(name))
    parameters: list[Any] = [parameter for key, parameter in model.named_parameters() if LAYER.search(key)]
    placements = [parameter.placements for parameter in parameters if isinstance(parameter, DTensor)]
    is_sharded = any(len(placement) > 1 and not placement[-1].is_replicate() for placement in placements)
    assert tp_size == 1 or is_sharded, "the plan shards nothing in the layers"
    own = slice(dist.get_rank(), None, 2) if tp_size == 1 else slice(None)
    return _accumulate(name, model, own)


def _accumulate(name: str, model: nn.Module, own: slice) -> dict[str, Tensor]:
    """Return the gradients of the micro-batches that are this rank's."""
    batches = [make_image_batch(name, seed) for seed in range(2 * STEPS)][own]
    with defer_grad_sync(model):
        for batch in batches[:-1]:
            (get_vision_loss(model, batch) / len(batches)).backward()
    (get_vision_loss(model, batches[-1]) / len(batches)).backward()
    return whole({key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None})

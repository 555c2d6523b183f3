"""The oracle: one process, no strategy, the same global batch (DESIGN, "What correct means").

What a run leaves, and the tolerances within which losses, every gradient, the gradient norm and the weights of two runs
agree. :mod:`helpers.mesh_runs` has the runs of the Trainer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PretrainedConfig

LEARNING_RATE = 1e-3

EPSILON = 1e-6
"""Of AdamW: some gradients are mathematically zero (key biases), and its default makes steps of their rounding."""

Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], tuple[Tensor, int]]
"""(model, batch) -> (summed loss, weight): the loss of a step is the sum of sums over the sum of weights."""


@dataclass(kw_only=True)
class Record:
    """What a run leaves to compare; all tensors whole."""

    initial: dict[str, Tensor]
    """Weights and buffers."""

    trajectory: list[dict[str, Tensor]] = field(default_factory=list)
    """The same where the gradients of each step were computed, of runs that are not in float32."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    """Gradients after clipping, where they were recorded."""

    weights: dict[str, Tensor] = field(default_factory=dict)


def assert_equal_runs(actual: Record, expected: Record) -> None:
    """Compare two fp32 runs within the tolerances of DESIGN §5."""
    assert len(actual.losses) == len(expected.losses) > 0
    for step, (loss, reference) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert abs(loss - reference) <= 1e-5, f"step {step}: loss {loss} instead of {reference}"
    for step, (norm, reference) in enumerate(zip(actual.norms, expected.norms, strict=True)):
        assert abs(norm - reference) <= 1e-5 * reference * (1 if step == 0 else 10), f"step {step}: norm {norm}"
    for step, (gradients, references) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert_equal_gradients(gradients, references, step)
    for step, (gradients, references) in enumerate(zip(actual.clipped, expected.clipped, strict=True)):
        assert_equal_gradients(gradients, references, step)
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in actual.weights.items():
        error = (weight - expected.weights[name]).abs().max().item()
        assert error <= 5e-5, f"{name}: weight off by {error} after {len(actual.losses)} steps"


def assert_equal_gradients(
    gradients: Mapping[str, Tensor | None], references: Mapping[str, Tensor | None], step: int = 0
) -> None:
    """Compare the fp32 gradients of a step within the tolerances of DESIGN §5; None is the gradient of the unused."""
    assert gradients.keys() == references.keys()
    sizes = {n: reference.abs().max().item() for n, reference in references.items() if _has_elements(reference)}
    largest = max(sizes.values())
    assert largest > 0
    factor = 1 if step == 0 else 10
    for name, reference in references.items():
        gradient = gradients[name]
        assert (gradient is None) == (reference is None), f"{name}: {gradient} instead of {reference}"
        if gradient is None or reference is None or name not in sizes:
            continue
        assert gradient.shape == reference.shape, name
        error = (gradient - reference).abs().max().item()
        allowed = factor * (1e-5 * sizes[name] + 1e-7 * largest)
        assert error <= allowed, f"step {step}: gradient of {name} off by {error}, allowed {allowed}"


def _has_elements(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather DTensors; every rank must call it."""
    return {name: _gather(tensor.detach()).float().clone() for name, tensor in tensors.items()}


def _gather(tensor: Tensor) -> Tensor:
    """The whole tensor, without code of the package: Megatron-FSDP's shards are whole rows, put one after the other.

    Under tensor parallelism they are the rows of a part, and a packed weight has a piece of each projection in a part.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ()
    if "uneven_shard" not in names:
        return tensor.full_tensor()
    places = dict(zip(names, tensor.placements, strict=True))
    local = tensor.to_local()
    if not places["uneven_shard"].is_replicate():
        local = torch.cat(_gather_parts(local, tensor.device_mesh.get_group("uneven_shard")))
    place: Any = places.get("tensor_parallel", Replicate())
    if place.is_replicate():
        return local
    parts = _gather_parts(local, tensor.device_mesh.get_group("tensor_parallel"))
    projections = zip(*(part.chunk(getattr(place, "split_factor", 1), place.dim) for part in parts), strict=True)
    return torch.cat([piece for pieces in projections for piece in pieces], place.dim)


def _gather_parts(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, tensor, group=group)
    return parts


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def token_sum_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Sum over the label tokens of a causal language model, and their number."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int((labels != -100).sum())


def hf_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The mean loss that the model itself computes."""
    return model(**batch).loss, 1


def make_config(config: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    fields = dict(config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)

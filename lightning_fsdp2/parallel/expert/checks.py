"""Checks that the experts of a model can be distributed over ranks. They run before the model is changed."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_fsdp2.modules.experts import find_experts, get_optional_shard_dim
from lightning_fsdp2.modules.structure import ModelStructure, get_class_name

REFUSED = {
    "dbrx": "its experts are slices of 2-D parameters",
    "jetmoe": "each of its projections routes tokens by itself",
    "llama4_text": "each of its experts gets every token, multiplied by the routing weight",
    "longcat_flash": "some of its experts have no weights and return their input",
    "nllb-moe": "each of its experts is a module of its own",
    "switch_transformers": "each of its experts is a module of its own",
}
"""Families whose experts cannot be distributed, by ``model_type``, each with the reason."""


def check_experts(structure: ModelStructure, *, ranks: int, shards: int, reduce_dtype: torch.dtype | None) -> None:
    """Check that the packed experts of a module can be distributed over expert parallel ranks.

    Args:
        structure: Structure of a module that is not changed yet.
        ranks: Number of expert parallel ranks.
        shards: Number of ranks that each expert is sharded over.
        reduce_dtype: Dtype in which gradients are reduced.

    Raises:
        ValueError: If there are no packed experts, ``ranks`` does not divide their number, or ``shards`` divides no dim
            of a parameter. Also if the parameters have adapters, or are already sharded or quantised, or if torch would
            divide gradients twice when it reduces them in ``reduce_dtype``.
    """
    experts = find_experts(structure.modules)
    names = {module: name for name, module in structure.root.named_modules()}
    _check_families(structure, experts, ranks)
    adapted = [name for module, name in names.items() if getattr(module, "base_layer", None) in experts]
    if adapted:
        raise ValueError(
            f"ep_size={ranks} does not support adapters on the weights of experts (at {adapted[0]}); leave these"
            " weights out of target_parameters, or use ep_size=1."
        )
    if shards == 1 and reduce_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"ep_size={ranks} with mp_policy.reduce_dtype={reduce_dtype}: each expert is whole on its rank. In this"
            " case, torch would divide gradients of this dtype twice. Use float32 or bfloat16, or a smaller ep_size."
        )
    for module in experts:
        if module.num_experts % ranks:
            possible = math.gcd(module.num_experts, ranks * shards)
            raise ValueError(
                f"ep_size={ranks} does not divide the {module.num_experts} experts of {names[module]}; use one of"
                f" {[size for size in range(1, possible + 1) if possible % size == 0]}."
            )
        _check_parameters(module, names[module], ranks, shards)


def _check_families(structure: ModelStructure, experts: Sequence[nn.Module], ranks: int) -> None:
    for model in structure.hf_models:
        family = getattr(model.config, "model_type", "")
        if family in REFUSED and any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"ep_size={ranks} is not possible for {get_class_name(model)} (model_type {family!r}):"
                f" {REFUSED[family]}; use ep_size=1."
            )
    if not experts:
        models = [parts.module for parts in structure.models] or [structure.root]
        names_of_models = " and ".join(map(get_class_name, models))
        raise ValueError(
            f"ep_size={ranks} needs a mixture of experts, but {names_of_models} has no packed experts: modules whose"
            " stacked parameters hold one matrix per expert, and whose forward takes hidden states, expert indices and"
            " routing weights. Use ep_size=1."
        )


def _check_parameters(module: nn.Module, name: str, ranks: int, shards: int) -> None:
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"ep_size={ranks}: {name}.{parameter_name} is a DTensor already, so something else shards the experts;"
                " leave them whole, or use ep_size=1."
            )
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(
                f"ep_size={ranks}: {name}.{parameter_name} is quantised ({parameter.dtype}), which is not supported"
                " with expert parallelism; load the model without quantisation, or use ep_size=1."
            )
        sizes = (parameter.size(0) // ranks, *parameter.shape[1:])
        if get_optional_shard_dim(sizes, shards) is None:
            raise ValueError(
                f"ep_size={ranks}: {name}.{parameter_name} cannot be sharded. Each expert parallel rank holds a part of"
                f" shape {sizes}, and none of these sizes is divisible by {shards}, the number of ranks with the same"
                " experts. Use another ep_size, or more replicas (dp_replicate_size)."
            )

"""Checks that the experts of a model can be distributed over ranks, which run before the model is changed."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

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


def check_experts(structure: ModelStructure, experts: Sequence[Any], ranks: int) -> None:
    """Check that ``ranks`` expert parallel ranks can hold equal shares of all packed experts of a module.

    Raises:
        ValueError: If there are no packed experts, if ``ranks`` does not divide their number, or if their parameters
            have adapters, or are sharded or quantised already.
    """
    names = {module: name for name, module in structure.root.named_modules()}
    for model in structure.hf_models:
        family = getattr(model.config, "model_type", "")
        if family in REFUSED:
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
    adapted = [name for module, name in names.items() if getattr(module, "base_layer", None) in experts]
    if adapted:
        raise ValueError(
            f"ep_size={ranks} does not support adapters on the weights of experts (at {adapted[0]}); leave these"
            " weights out of target_parameters, or use ep_size=1."
        )
    for module in experts:
        if module.num_experts % ranks:
            raise ValueError(
                f"ep_size={ranks} does not divide the {module.num_experts} experts of {names[module]}; use one of"
                f" {[size for size in range(1, module.num_experts + 1) if module.num_experts % size == 0]}."
            )
        _check_parameters(module, names[module], ranks)


def _check_parameters(module: nn.Module, name: str, ranks: int) -> None:
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

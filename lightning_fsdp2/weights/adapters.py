"""Work with the adapters that peft adds to a model: remove them temporarily, find their names, and initialise them.

Each layer of peft replaces a module of the model, and keeps the replaced module as ``base_layer`` or
``original_module``. peft is imported only if a model has adapters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp2.modules.structure import find_peft_models

INSTALL = "install it with pip install 'lightning-fsdp2[lora]'"


def check_peft(root: nn.Module) -> None:
    """Refuse a version of peft that calls the inner model's ``forward`` directly, which skips the model's hooks.

    The hooks gather the weights and split the inputs. Without the hooks, the results would be wrong.

    Raises:
        ImportError: If ``root`` contains a ``PeftModel`` and peft is older than 0.21.
    """
    if find_peft_models(root) and tuple(map(int, version("peft").split(".")[:2])) < (0, 21):
        raise ImportError(f"peft {version('peft')} is too old for sharded models; {INSTALL}.")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run the block with peft's layers removed from ``model``, so that its modules have their original names."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def visit(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            base = _get_base(child)
            if base is not child:
                replaced.append((module, name, child))
                module._modules[name] = base
            visit(base)

    visit(model)
    try:
        yield
    finally:
        for module, name, child in replaced:
            module._modules[name] = child


def get_plain_names(model: nn.Module) -> dict[str, str]:
    """Map the current names of a model's parameters and buffers to the names that they had without peft."""
    with without_adapters(model):
        plain = _get_slots(model)
    return {name: plain[slot] for slot, name in _get_slots(model).items() if slot in plain}


def get_adapter_names(model: Any, adapter: str) -> dict[str, str]:
    """Map the names of an adapter's tensors in a ``PeftModel`` to their names in the files that peft saves."""
    from peft import get_peft_model_state_dict

    # give each name its own tensor, even if weights are tied, so that each tensor identifies exactly one name
    tensors = {name: torch.empty(0) for name in model.state_dict()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    stored = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    return {names[id(tensor)]: key for key, tensor in stored.items()}


def check_can_initialize(root: nn.Module) -> None:
    """Refuse adapters on the meta device that :func:`initialize_adapters` cannot initialise.

    The initial values of some kinds of adapters depend on the base weights. For other kinds, this package does not
    know how to compute the initial values.

    Raises:
        ValueError: If an adapter cannot be initialised.
    """
    for model in find_peft_models(root):
        for config in model.peft_config.values() if _has_meta_adapters(model) else ():
            init, has_variant = getattr(config, "init_lora_weights", None), getattr(config, "use_dora", False)
            if not hasattr(config, "init_lora_weights") or init not in (True, False, "gaussian") or has_variant:
                raise ValueError(
                    f"Adapters with {type(config).__name__}(init_lora_weights={init!r}, use_dora={has_variant}) cannot"
                    " be initialised for a model on the meta device, which has no weights yet. Use LoraConfig with"
                    " init_lora_weights=True, False or 'gaussian' and without DoRA, or add the adapters to a model that"
                    " has its weights (`from_pretrained(..., on_meta=False)`)."
                )


@torch.no_grad()
def initialize_adapters(root: nn.Module, is_new: Callable[[Tensor], bool]) -> None:
    """Initialise new adapters as peft does, and copy weights into new ``modules_to_save`` from their originals.

    Args:
        root: Module whose base weights are already loaded or initialised.
        is_new: Function that returns whether a tensor still lacks its values.
    """
    for model in find_peft_models(root):
        for layer in model.modules():
            if hasattr(layer, "reset_lora_parameters"):
                for name, config in model.peft_config.items():
                    _initialize_lora(layer, name, config.init_lora_weights, is_new)
            elif _is_kept(layer):
                for copy in layer.modules_to_save.values():
                    _copy_new(copy, layer.original_module, is_new)


def _initialize_lora(layer: Any, name: str, init: Any, is_new: Callable[[Tensor], bool]) -> None:
    pair = [group[name] for group in (layer.lora_A, layer.lora_B) if name in group]
    embeddings = [group[name] for group in (layer.lora_embedding_A, layer.lora_embedding_B) if name in group]
    if not any(map(is_new, [*embeddings, *(parameter for part in pair for parameter in part.parameters())])):
        return
    # draw values as peft's constructors do, because with `init_lora_weights=False`, `reset_lora_parameters` draws none
    for part in pair:
        part.reset_parameters()
    for parameter in embeddings:
        parameter.normal_()
    layer.reset_lora_parameters(name, init)


def _copy_new(copy: nn.Module, original: nn.Module, is_new: Callable[[Tensor], bool]) -> None:
    values = dict(original.named_parameters())
    for name, parameter in copy.named_parameters():
        if is_new(parameter):
            parameter.copy_(values[name])


def _get_slots(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Map the (module, key) of every parameter and buffer to its full name; a tied tensor has several entries."""
    return {
        (module, name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in (*module._parameters, *module._buffers)
    }


def _has_meta_adapters(model: nn.Module) -> bool:
    with without_adapters(model):
        base = set(model.parameters())
    return any(parameter.is_meta and parameter not in base for parameter in model.parameters())


def _get_base(module: Any) -> Any:
    while hasattr(module, "base_layer") or _is_kept(module):
        module = module.original_module if _is_kept(module) else module.base_layer
    return module


def _is_kept(module: Any) -> bool:
    return hasattr(module, "original_module") and hasattr(module, "modules_to_save")

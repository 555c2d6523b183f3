"""peft's adapters around a sharded model: temporarily removed, named as in files, and initialised.

peft puts each of its layers in the place of a module, which the layer keeps as ``base_layer`` or ``original_module``.
Only functions for models with adapters import peft.
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
    """Refuse a version of peft that calls the inner model's ``forward`` directly, and so skips its hooks.

    These hooks gather the model and divide its inputs: without them, the model would train on wrong numbers.

    Raises:
        ImportError: When ``root`` holds a ``PeftModel`` of peft before 0.21.
    """
    if find_peft_models(root) and tuple(map(int, version("peft").split(".")[:2])) < (0, 21):
        raise ImportError(f"peft {version('peft')} is too old for models that are sharded; {INSTALL}.")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Run the block with ``model`` as it was before peft changed it, with its own modules and names."""
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
    """Return the names that parameters of ``model`` had before peft changed it, by their current names."""
    with without_adapters(model):
        plain = _get_slots(model)
    return {name: plain[slot] for slot, name in _get_slots(model).items() if slot in plain}


def get_adapter_names(model: Any, adapter: str) -> dict[str, str]:
    """Return the names of an adapter's tensors in the files that peft saves, by their names in a ``PeftModel``."""
    from peft import get_peft_model_state_dict

    # one tensor per name, even if some are tied
    tensors = {name: torch.empty(0) for name in model.state_dict()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    stored = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    return {names[id(tensor)]: key for key, tensor in stored.items()}


def check_can_initialize(root: nn.Module) -> None:
    """Refuse adapters without weights if their initial values depend on the base's weights, or are not known.

    Raises:
        ValueError: When :func:`initialize_adapters` cannot initialise an adapter.
    """
    for model in find_peft_models(root):
        for config in model.peft_config.values() if _has_meta_adapters(model) else ():
            init, has_variant = getattr(config, "init_lora_weights", None), getattr(config, "use_dora", False)
            if not hasattr(config, "init_lora_weights") or init not in (True, False, "gaussian") or has_variant:
                raise ValueError(
                    f"Adapters with {type(config).__name__}(init_lora_weights={init!r}, use_dora={has_variant}) around"
                    " a model on the meta device have no weights to start from; use LoraConfig with"
                    " init_lora_weights=True, False or 'gaussian', without DoRA, or put them around a model that has"
                    " its weights (`from_pretrained(..., on_meta=False)`)."
                )


@torch.no_grad()
def initialize_adapters(root: nn.Module, is_new: Callable[[Tensor], bool]) -> None:
    """Initialise new adapters as peft does, and new trainable copies of modules with the originals' values.

    Args:
        root: Module whose base weights are loaded or initialised already.
        is_new: Function that returns whether a tensor has no values yet.
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
    # as the constructors do; `init_lora_weights=False` keeps these values
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
    """Return the names of parameters and buffers by module and key; a tied tensor has several."""
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

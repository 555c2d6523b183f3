"""Auxiliary load-balance loss of the Hugging Face models that have one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fsdp2.modules.structure import get_class_name

OTHER_LOSSES = ("doge", "llama4_text", "nllb-moe", "switch_transformers")
"""Families that have a coefficient in their config, but no auxiliary loss or a different one, by ``model_type``."""


@dataclass(frozen=True)
class RouterLoss:
    """Auxiliary loss of a model's routers."""

    coefficient: float
    """Number by which the auxiliary loss is multiplied before it is added to the loss of each token."""

    top_k: int
    """Number of experts that each token is sent to."""

    base_model: nn.Module
    """Model without the head, which can return the logits of its routers."""


def check_coefficient(coefficient: float | None) -> float | None:
    """Return ``coefficient`` if it can be that of an auxiliary loss.

    Raises:
        ValueError: When the coefficient is negative.
    """
    if coefficient is not None and coefficient < 0:
        raise ValueError(f"CausalLM(router_aux_loss_coef={coefficient}) is negative; use 0 or more.")
    return coefficient


def find_router_loss(model: Any, coefficient: float | None) -> RouterLoss | None:
    """Return the auxiliary loss to train a Hugging Face model with, or None to train the model without it.

    Args:
        model: Hugging Face model with a language modelling head.
        coefficient: Coefficient of the loss; 0 for no loss. None means the coefficient in the model's config if this
            config has ``output_router_logits: true``, and no loss otherwise.

    Raises:
        ValueError: When a loss is requested, but the model has no auxiliary loss, or one of a different kind.
    """
    config = model.config.get_text_config()
    if coefficient is None and not getattr(config, "output_router_logits", False):
        return None
    own = _find(model, config, "router_aux_loss_coef")
    coefficient = own if coefficient is None else coefficient
    if coefficient == 0:
        return None
    top_k = _find(model, config, "num_experts_per_tok")
    if own is None or top_k is None or config.model_type in OTHER_LOSSES:
        raise ValueError(
            f"router_aux_loss_coef={coefficient}: {get_class_name(model)} (model_type {config.model_type!r}) has no"
            " auxiliary load-balance loss, or one that is not the loss of Switch Transformer; use"
            " router_aux_loss_coef=0, or write a LightningModule that returns `model(...).loss`."
        )
    return RouterLoss(coefficient=coefficient, top_k=top_k, base_model=model.base_model)


@contextmanager
def record_routing(base_model: nn.Module, summarise: Callable[[Sequence[Tensor]], Tensor]) -> Iterator[list[Tensor]]:
    """Record what ``summarise`` makes of the router logits of each forward of ``base_model`` inside the block.

    Only the base model is asked for them. A model with a head would also compute transformers' auxiliary loss, during
    which the host waits for a GPU in each layer.

    Args:
        base_model: Model without the head, which can return the logits of its routers.
        summarise: Function that gets the logits of each layer's router [tokens, experts].
    """
    recorded: list[Tensor] = []

    def ask(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        return args, {**inputs, "output_router_logits": True}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if logits := getattr(output, "router_logits", None):
            recorded.append(summarise(logits))

    hooks = (
        base_model.register_forward_pre_hook(ask, with_kwargs=True),
        base_model.register_forward_hook(record),
    )
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def _find(model: nn.Module, config: Any, name: str) -> Any:
    """Return the attribute ``name`` of the model or, if the model has none, of its config.

    The model comes first, because some families keep the value in an inner config.
    """
    return getattr(model, name, getattr(config, name, None))

"""Models in float8 by torchao's own swap of modules, as one process trains them, and counts of products in float8.

torchao is imported where it is used, because its import starts CUDA, after which ranks on a GPU cannot be forked.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import LLAMA, make_causal_lm

RECIPES = ("rowwise_with_gw_hp", "rowwise", "tensorwise")

WIDE_LLAMA: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Every linear layer but the head has shards of multiples of 16 on two tensor parallel ranks."""


def convert(
    model: nn.Module,
    recipe: str,
    *,
    is_converted: Callable[[str], bool],
    emulate: bool = True,
    rounds: bool = True,
) -> nn.Module:
    """Give ``model`` torchao's own layers in place of the linear layers whose names ``is_converted`` takes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, emulate=emulate, round_scales_to_power_of_2=rounds)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: is_converted(name))


def make_reference(config: dict[str, Any], recipe: str, **options: Any) -> nn.Module:
    """A causal language model of which all linear layers but the head are in float8."""
    return convert(make_causal_lm(config), recipe, is_converted=lambda name: name != "lm_head", **options)


class MatrixProducts(TorchDispatchMode):
    """Numbers of matrix products, by the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "Float8TrainingTensor" for kind in types):
            return NotImplemented  # torchao's tensor calls the product of its data
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "_scaled_mm"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

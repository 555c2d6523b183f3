"""Linear layers that multiply in float8, changed in place.

Weights, their gradients, activations and checkpoints keep their dtypes. Before each of its products, a layer casts the
matrices to float8, with scales that are computed from them. All scales are rounded to powers of two. Such a scale
changes no bit of a value's mantissa, so it does not matter much whether it is computed from a shard or from the whole
matrix, and ranks need not agree on scales.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp2.compat.torchao import Casts, check_torchao
from lightning_fsdp2.config import Float8Config
from lightning_fsdp2.modules.structure import ModelStructure
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.layers.float8_conversion import Conversion, Shapes, choose_layers, set_conversion

logger = logging.getLogger(__name__)

_LAYER = "_lightning_fsdp2_float8_layer"


@dataclass(frozen=True)
class Float8Choice:
    """Linear layers that will multiply in float8."""

    layers: list[nn.Linear]
    casts: Casts
    conversion: Conversion


def choose_float8(
    structure: ModelStructure, config: Float8Config, device: torch.device | None, shapes: Shapes
) -> Float8Choice:
    """Choose the linear layers that will multiply in float8, and check that they can.

    This function does not change the model. Call it before expert and tensor parallelism.

    Args:
        structure: Structure of the model.
        config: Recipe, and layers to leave out.
        device: Device on which the model computes. None for a simulation, which says nothing of devices.
        shapes: Shapes that tensor parallelism will give to weights.

    Raises:
        ValueError: If torchao is missing, the device cannot multiply in float8, a pattern matches no layer, or no
            layer can be converted.
    """
    check_torchao()
    casts = Casts(config.recipe, emulate=config.emulate)
    if device is not None:
        _check_device(device, casts)
    layers, conversion = choose_layers(structure, config, shapes)
    return Float8Choice(layers, casts, conversion)


def _check_device(device: torch.device, casts: Casts) -> None:
    """Multiply small matrices in forward and backward, because which kernels there are depends on device and recipe."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device}"
    try:
        _try_products(device, Casts(casts.recipe, emulate=False))
    except (RuntimeError, ValueError) as error:  # the class and the text depend on the device
        if not casts.emulates:
            raise ValueError(make_device_error(name)) from error
    else:
        if casts.emulates and dist.get_rank() == 0:
            logger.warning("float8: emulate=True, although %s can multiply in float8; leave it out for speed.", name)


def _try_products(device: torch.device, casts: Casts) -> None:
    matrix = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        Float8Product.apply(matrix, matrix, casts).sum().backward()


def make_device_error(device: str) -> str:
    """Return the message that ``device`` has no units for float8, and what to do."""
    return (
        f"float8: {device} cannot multiply in float8, as NVIDIA's GPUs can since compute capability 8.9 (such as L40S"
        " and H100), and AMD's since MI300X. Use float8=None, or Float8Config(emulate=True) to see the results at low"
        " speed."
    )


def apply_float8(structure: ModelStructure, choice: Float8Choice) -> None:
    """Make the chosen linear layers multiply in float8, in place.

    Call this function before tensor parallelism, so that its communication surrounds the products.
    """
    for linear in choice.layers:
        linear.__dict__[_LAYER] = Float8Layer(linear, choice.casts)
        wrap_method(linear, linear.__dict__[_LAYER])
    set_conversion(structure.root, choice.conversion)


def find_float8_layers(root: nn.Module) -> "list[Float8Layer]":
    """Return the layers inside of ``root`` that multiply in float8."""
    return [module.__dict__[_LAYER] for module in root.modules() if _LAYER in module.__dict__]


class Float8Layer:
    """Wrapper that replaces the product of a linear layer's forward.

    Args:
        linear: Layer.
        casts: Casts of the layer's matrices.
    """

    def __init__(self, linear: nn.Linear, casts: Casts) -> None:
        self.linear = linear
        self.casts = casts

    def __call__(self, forward: Callable[[Tensor], Tensor], /, input: Tensor) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        is_autocast = torch.is_autocast_enabled(input.device.type)
        # no scale can be computed from an empty input; for sizes and dtypes that differ, torch has a clear error
        if input.numel() == 0 or input.size(-1) != weight.size(-1) or not (is_autocast or input.dtype == weight.dtype):
            return forward(input)
        if is_autocast:
            # leave the weight in its dtype, so that it is rounded only once
            input = input.to(torch.get_autocast_dtype(input.device.type))
        with torch.autocast(input.device.type, enabled=False):
            output: Tensor = Float8Product.apply(input.reshape(-1, input.size(-1)), weight, self.casts)
        output = output.reshape(*input.shape[:-1], output.size(-1))
        return output if bias is None else output + bias.to(output.dtype)


class Float8Product(torch.autograd.Function):
    """Product of an input [tokens, in] with the transpose of a weight [out, in], in float8.

    A frozen input or weight costs no product in backward.
    """

    is_local = True
    """Attribute for the verification of tensor parallel plans: the function does not communicate."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, casts: Casts) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.casts = casts
        return torch.mm(casts.cast_input(input), casts.cast_weight(weight.t()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        input, weight = ctx.saved_tensors
        casts: Casts = ctx.casts
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            transposed = casts.cast_weight_for_input(weight.t()).t()
            of_input = torch.mm(casts.cast_output_gradient(gradient), transposed)
        if ctx.needs_input_grad[1]:
            transposed = casts.cast_output_gradient_for_weight(gradient).t()
            of_weight = torch.mm(transposed, casts.cast_input_for_weight(input))
        return of_input, of_weight, None

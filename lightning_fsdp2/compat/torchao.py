"""Casts of torchao to float8, by modules that torchao does not document.

torchao is imported where it is used, because its import starts CUDA, after which processes cannot be forked.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

FLOAT8_PRODUCT = torch.ops.aten._scaled_mm.default
"""Operation of torch that multiplies matrices in float8. torch does not document it, and torchao calls it."""

VERSIONS = ("0.18.0",)
"""Versions whose results are tested."""


def check_torchao() -> None:
    """Check that a version of torchao is installed whose results are tested.

    Raises:
        ValueError: If there is none, or another version.
    """
    try:
        found = version("torchao")
    except PackageNotFoundError:
        found = None
    if found is None or found.partition("+")[0] not in VERSIONS:  # builds for a version of CUDA have a local version
        raise ValueError(
            f"float8 needs torchao {' or '.join(VERSIONS)}, but {f'version {found}' if found else 'none'} is installed;"
            f" run `pip install torchao=={VERSIONS[-1]}`, or use float8=None."
        )


class Casts:
    """Casts of the matrices of a linear layer's products, by a recipe of torchao with scales that are powers of two.

    Each cast is a function of a matrix. It returns a tensor of torchao's class, which ``torch.mm`` multiplies in
    float8, or the matrix itself if the recipe keeps it in high precision.

    Args:
        recipe: Name of a recipe of torchao.
        emulate: Whether to multiply in float32 after rounding to float8.
    """

    cast_input: Callable[[Tensor], Tensor]
    """Cast of the input [tokens, in]."""

    cast_weight: Callable[[Tensor], Tensor]
    """Cast of the transposed weight [in, out]."""

    cast_output_gradient: Callable[[Tensor], Tensor]
    """Cast of the gradient [tokens, out] of the output, for the gradient of the input."""

    cast_weight_for_input: Callable[[Tensor], Tensor]
    """Cast of the transposed weight [in, out], for the gradient of the input."""

    cast_output_gradient_for_weight: Callable[[Tensor], Tensor]
    """Cast of the gradient [tokens, out] of the output, for the gradient of the weight."""

    cast_input_for_weight: Callable[[Tensor], Tensor]
    """Cast of the input [tokens, in], for the gradient of the weight."""

    def __init__(self, recipe: str, *, emulate: bool) -> None:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

        # Like torchao's own conversion, keep triton from storing NaN (https://github.com/triton-lang/triton/issues/11111)
        _patch_inductor_min_max_codegen()
        self.recipe, self.emulates = recipe, emulate
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, round_scales_to_power_of_2=True)
        products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        # pad the inner dim, which is the number of tokens in the product for the weight's gradient
        modes = LinearMMConfig(*(ScaledMMConfig(emulate, product.use_fast_accum, False, True) for product in products))
        inputs, weights, gradients = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
        make = partial(self._make_cast, modes)
        self.cast_input = make(config.cast_config_input, inputs, -1)
        self.cast_weight = make(config.cast_config_weight, weights, 0)
        self.cast_output_gradient = make(config.cast_config_grad_output, gradients, -1)
        self.cast_weight_for_input = make(config.cast_config_weight_for_grad_input, weights, -1)
        self.cast_output_gradient_for_weight = make(config.cast_config_grad_output_for_grad_weight, gradients, 0)
        self.cast_input_for_weight = make(config.cast_config_input_for_grad_weight, inputs, 0)

    def _make_cast(self, modes: Any, cast: Any, role: Any, dim: int) -> Callable[[Tensor], Tensor]:
        """Make a cast whose scales, if there are several, each span the dim ``dim`` of a matrix."""
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim

        if cast.scaling_type is ScalingType.DISABLED:
            return _keep
        axis = get_maybe_axiswise_dim(dim, cast.scaling_granularity)
        return self._make_enabled_cast(modes, cast, role, axis)

    def _make_enabled_cast(self, modes: Any, cast: Any, role: Any, axis: int | None) -> Callable[[Tensor], Tensor]:
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

        return partial(
            hp_tensor_to_float8_dynamic,
            float8_dtype=cast.target_dtype,
            linear_mm_config=modes,
            gemm_input_role=role,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=axis,
            round_scales_to_power_of_2=True,
        )


class FusedCasts(Casts):
    """Casts with the memory traffic of compiled ones and without correct values, for simulations.

    ``torch.compile`` fuses a cast into two kernels. One reads the matrix for its largest values, and the other reads it
    again and writes the result.
    """

    def _make_enabled_cast(self, modes: Any, cast: Any, role: Any, axis: int | None) -> Callable[[Tensor], Tensor]:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor

        def cast_matrix(matrix: Tensor) -> Tensor:
            scale = matrix.amax() if axis is None else matrix.amax(axis, keepdim=True)
            data = matrix.to(cast.target_dtype)
            return Float8TrainingTensor(data, scale.float(), matrix.dtype, modes, role, axis)

        return cast_matrix


def _keep(matrix: Tensor) -> Tensor:
    return matrix

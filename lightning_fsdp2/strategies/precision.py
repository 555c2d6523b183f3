"""Precision plugin of the strategies. The plugin also clips gradients that are sharded over different meshes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2.config import DDPConfig, MegatronFSDPConfig
from lightning_fsdp2.modules.stages import PipelineRanks
from lightning_fsdp2.modules.structure import get_float32_tensors, get_hf_models
from lightning_fsdp2.parallel.data.gradients import clip_grad_value_, clip_to_norm

ConfigT = TypeVar("ConfigT", DDPConfig, MegatronFSDPConfig)

_REMEDIES = {
    "16-mixed": '"bf16-mixed"',
    "16-true": '"bf16-true"',
    "64-true": '"32-true"',
    "transformer-engine": '"bf16-mixed"',
    "transformer-engine-float16": '"bf16-mixed"',
}


class ShardedPrecision(Precision):
    """Precision plugin that selects FSDP2's mixed-precision policy, or autocast under the other strategies.

    The table shows the dtypes under FSDP2. For the other strategies see :func:`choose_autocast`.

    ==============  ================  ===========================  =====================================
    precision       weights           compute                      gradient reduction, optimizer state
    ==============  ================  ===========================  =====================================
    ``32-true``     float32           float32                      float32
    ``bf16-mixed``  float32           bfloat16, float32 outputs    float32
    ``bf16-true``   bfloat16          bfloat16                     float32 reduction, bfloat16 state
    ==============  ================  ===========================  =====================================

    Under ``bf16-mixed`` every model and layer inside the LightningModule casts its own inputs and returns float32,
    except the layers of a ``ModuleList``, which return bfloat16. The batch is not cast, and parameters held by the
    LightningModule itself stay in float32.

    Args:
        precision: A precision from the table.

    Raises:
        ValueError: For any other precision. The message names a supported one.
    """

    def __init__(self, precision: str) -> None:
        if precision not in ("32-true", "bf16-mixed", "bf16-true"):
            remedy = _REMEDIES.get(precision, '"32-true", "bf16-mixed" or "bf16-true"')
            raise ValueError(
                f"precision={precision!r} is not supported by this strategy, which has no gradient scaler and keeps"
                f" weights in float32 or bfloat16; use precision={remedy}."
            )
        self.precision = precision  # type: ignore[assignment]
        self.gradient_norm: Tensor | None = None
        """Total norm of the gradients before the last clipping by norm. [] float32."""
        self.pipeline: PipelineRanks | None = None
        """Ranks of the pipeline whose stages hold the gradients; the strategy sets them."""
        self.norm_observers: list[Callable[[Tensor], None]] = []
        """Functions to call with ``gradient_norm`` after each clipping by norm, before the optimizer step."""
        # for bf16-true, use Lightning's own plugin, which creates tensors in bfloat16
        self._half = HalfPrecision("bf16-true") if precision == "bf16-true" else None

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The FSDP2 mixed-precision policy for the plugin's ``precision``."""
        if self.precision == "bf16-mixed":
            return MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
            )
        if self.precision == "bf16-true":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self._half is None:
            return module
        kept = [(owner, name, tensor.data) for owner, name, tensor in _get_float32_tensors(module)]
        module = self._half.convert_module(module)
        for owner, name, value in kept:
            if name in owner._buffers:
                owner._buffers[name] = value
            else:
                owner._parameters[name].data = value.float()
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return self._half.convert_input(data) if self._half else data

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._half.tensor_init_context() if self._half else nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._half.module_init_context() if self._half else nullcontext()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self._half.forward_context() if self._half else nullcontext()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.gradient_norm = clip_to_norm(self.main_params(optimizer), clip_val, pipeline=self.pipeline)
        for observe in self.norm_observers:
            observe(self.gradient_norm)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value_(self.main_params(optimizer), clip_val)


def choose_precision(plugin: Precision | None, strategy: str) -> ShardedPrecision | None:
    """Return the :class:`ShardedPrecision` to use instead of ``plugin``, or None if ``plugin`` is None.

    Raises:
        ValueError: When ``plugin`` comes neither from Lightning nor from this package. The message names ``strategy``.
    """
    if plugin is None or isinstance(plugin, ShardedPrecision):
        return plugin
    if type(plugin).__module__.startswith("lightning."):
        return ShardedPrecision(str(plugin.precision))
    raise ValueError(
        f"Trainer(plugins=[{type(plugin).__name__}()]): {strategy} casts with a mixed-precision policy or autocast,"
        " and would not use this plugin; remove the plugin, and set Trainer(precision=...)."
    )


def get_compute_dtype(config: Any, precision: Precision) -> torch.dtype:
    """Return the dtype that layers compute in, given a strategy's ``config`` and the Trainer's ``precision``."""
    default = torch.float32 if precision.precision == "32-true" else torch.bfloat16
    policy = getattr(config, "mp_policy", None)
    return getattr(config, "autocast_dtype", None) or getattr(policy, "param_dtype", None) or default


def check_optimization(trainer: Trainer) -> None:
    """Refuse options that Lightning takes, but that no run can have.

    Raises:
        ValueError: When ``gradient_clip_val`` is negative or NaN, which would be ignored or make all gradients NaN,
            when ``accumulate_grad_batches`` is less than 1, when validation is to run every 0 steps or epochs, or when
            another number of steps is negative.
    """
    if trainer.accumulate_grad_batches < 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) must be at least 1, which is one batch"
            " per optimizer step."
        )
    for name in ("val_check_interval", "check_val_every_n_epoch"):
        value = getattr(trainer, name, None)
        if isinstance(value, int | float) and value <= 0:
            raise ValueError(f"Trainer({name}={value}) must be more than 0; use limit_val_batches=0 for no validation.")
    interval = getattr(trainer, "log_every_n_steps", 0)
    if interval < 0:
        raise ValueError(f"Trainer(log_every_n_steps={interval}) must be at least 1, or 0 to log no steps.")
    steps = getattr(trainer, "num_sanity_val_steps", 0)
    if steps < -1:
        raise ValueError(f"Trainer(num_sanity_val_steps={steps}) must be at least 0, or -1 for the whole validation.")
    least, most = getattr(trainer, "min_steps", None), trainer.max_steps
    if least is not None and 0 <= most < least:
        raise ValueError(f"Trainer(min_steps={least}, max_steps={most}): a run of at most {most} steps has no {least}.")
    bound = trainer.gradient_clip_val
    if bound is not None and not bound >= 0:
        raise ValueError(f"Trainer(gradient_clip_val={bound!r}) must be at least 0; leave it out for no clipping.")


def _get_float32_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors of Hugging Face models that must stay in float32, as (module, name, tensor).

    Non-persistent buffers stay in float32, since rounding errors in rotary frequencies, for example, grow with the
    position in the sequence. Parameters and buffers that the model's authors keep in float32, such as the weight and
    the bias of a router, stay in float32 too.
    """
    for model in get_hf_models(module):
        yield from get_float32_tensors(model, torch.bfloat16)
        for owner in model.modules():
            for name in owner._non_persistent_buffers_set:
                if owner._buffers[name] is not None:
                    yield owner, name, owner._buffers[name]


def choose_autocast(config: ConfigT, precision: str) -> ConfigT:
    """Return ``config`` with ``autocast_dtype`` set to bfloat16 under ``bf16-mixed``, unless the user has set it.

    Strategies other than FSDP2Strategy use this. FSDP2 casts according to its mixed-precision policy instead.
    """
    if precision == "bf16-mixed" and config.autocast_dtype is None:
        return replace(config, autocast_dtype=torch.bfloat16)
    return config


def get_mp_policy(precision: str, configured: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy that ``Trainer(precision=)`` and ``FSDP2Config.mp_policy`` ask for.

    A given ``mp_policy`` is returned as it is. The Trainer's default, ``32-true``, does not contradict any policy.

    Raises:
        ValueError: When the two settings contradict each other.
    """
    if configured is None:
        return ShardedPrecision(precision).mp_policy
    if precision != "32-true" and configured.param_dtype not in (None, torch.bfloat16):
        raise ValueError(
            f'Trainer(precision="{precision}") computes in bfloat16, but FSDP2Config.mp_policy.param_dtype is'
            f" {configured.param_dtype}; set only one of them, or set both to the same dtype."
        )
    if precision == "bf16-mixed" and configured.param_dtype is None:
        raise ValueError(
            'Trainer(precision="bf16-mixed") computes in bfloat16, but FSDP2Config.mp_policy has no param_dtype, so'
            " layers would compute in float32, like the weights; set mp_policy.param_dtype or leave the precision out."
        )
    return configured

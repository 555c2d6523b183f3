"""Megatron-FSDP with the argument names from the time when it was called nvFSDP."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.parallel.megatron.wrap import HAVE_MEGATRON_FSDP
from lightning_fsdp2.parallel.tensor.plans import PlanOption
from lightning_fsdp2.recipes.megatron_fsdp import parallelize_with_megatron_fsdp
from lightning_fsdp2.sizes import CONTEXT_PARALLEL, DATA_PARALLEL, TENSOR_PARALLEL

HAVE_NVFSDP = HAVE_MEGATRON_FSDP
"""Earlier name of ``HAVE_MEGATRON_FSDP``."""

_ZERO_DP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    nvfsdp_unit_modules: Sequence[str] | None = None,
    tp_shard_plan: PlanOption = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = True,
    preserve_fp32_weights: bool = True,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = DATA_PARALLEL,
    cp_mesh_name: str = CONTEXT_PARALLEL,
    tp_mesh_name: str = TENSOR_PARALLEL,
) -> tuple[Any, Optimizer | None]:
    """Shard a model with Megatron-FSDP, using argument names from the time when it was called nvFSDP.

    Arguments without a description here are the same as in
    :func:`~lightning_fsdp2.parallelizer.megatron_fsdp_strategy_parallelize`.

    * ``nvfsdp_unit_modules``: now ``megatron_fsdp_unit_modules``.
    * ``tp_shard_plan``: the field ``tp_plan`` of :class:`~lightning_fsdp2.MegatronFSDPConfig`.
    * ``data_parallel_sharding_strategy``: now ``zero_dp_strategy``. One of ``"no_shard"``, ``"optim"``,
      ``"optim_grads"`` and ``"optim_grads_params"``.
    * ``init_nvfsdp_with_meta_device``: now ``init_fsdp_with_meta_device``.
    * ``check_for_nan_in_grad``: now ``report_nan_in_param_grad``.
    * ``keep_fp8_transpose_cache_when_using_custom_fsdp``: now ``keep_fp8_transpose_cache``.
    * ``dp_mesh_name``, ``cp_mesh_name``, ``tp_mesh_name``: must be the names that these axes have in a mesh of
      :func:`~lightning_fsdp2.create_device_mesh`.

    Returns:
        The wrapper, which must be called in place of ``model``; and ``optimizer``, which now updates the shards.

    Raises:
        ImportError: When ``megatron-fsdp`` is not installed, or is too old.
        ValueError: When another axis name or an unknown sharding strategy is given. Also for the same reasons as in
            ``megatron_fsdp_strategy_parallelize``.
    """
    _check_axis_name("dp_mesh_name", dp_mesh_name, DATA_PARALLEL)
    _check_axis_name("cp_mesh_name", cp_mesh_name, CONTEXT_PARALLEL)
    _check_axis_name("tp_mesh_name", tp_mesh_name, TENSOR_PARALLEL)
    config = MegatronFSDPConfig(
        tp_plan=cast(Any, tp_shard_plan),
        megatron_fsdp_unit_modules=None if nvfsdp_unit_modules is None else list(nvfsdp_unit_modules),
        zero_dp_strategy=_get_zero_dp_strategy(data_parallel_sharding_strategy),
        init_fsdp_with_meta_device=init_nvfsdp_with_meta_device,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        preserve_fp32_weights=preserve_fp32_weights,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        report_nan_in_param_grad=check_for_nan_in_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache_when_using_custom_fsdp,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
    )
    return parallelize_with_megatron_fsdp(model, device_mesh, config, optimizer)


def _check_axis_name(option: str, name: str, axis: str) -> None:
    if name != axis:
        raise ValueError(
            f"{option}={name!r} must be {axis!r}, the name of this axis in a mesh from"
            f" lightning_fsdp2.create_device_mesh; use such a mesh and leave {option} out."
        )


def _get_zero_dp_strategy(name: str) -> int:
    if name not in _ZERO_DP_STRATEGIES:
        raise ValueError(
            f"data_parallel_sharding_strategy={name!r} is unknown; use"
            f" {', '.join(map(repr, _ZERO_DP_STRATEGIES[:-1]))} or {_ZERO_DP_STRATEGIES[-1]!r}."
        )
    return _ZERO_DP_STRATEGIES.index(name)

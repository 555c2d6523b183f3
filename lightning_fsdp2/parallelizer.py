"""Functions that parallelise a model. Each takes the options of a strategy as plain arguments."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer

from lightning_fsdp2.config import (
    ActivationCheckpointing,
    ActivationCheckpointingScope,
    ContextParallelMethod,
    DDPConfig,
    Float8Config,
    FSDP2Config,
    MegatronFSDPConfig,
    PipelineSchedule,
)
from lightning_fsdp2.mesh_axes import AxisNames
from lightning_fsdp2.modules.structure import find_parts, find_structure
from lightning_fsdp2.parallel.data.fully_shard import apply_fully_shard, unshard_model
from lightning_fsdp2.parallel.data.gradient_hooks import run_gradient_hooks
from lightning_fsdp2.parallel.data.units import build_layer_units
from lightning_fsdp2.parallel.megatron.wrap import HAVE_MEGATRON_FSDP
from lightning_fsdp2.parallel.tensor.matching import match_plan
from lightning_fsdp2.parallel.tensor.plans import PlanOption, get_plan, get_style, to_torch_style
from lightning_fsdp2.recipes.ddp import prepare_for_ddp
from lightning_fsdp2.recipes.fsdp2 import parallelize_with_fsdp2, resolve_mp_policy
from lightning_fsdp2.recipes.imports import import_class_from_path, import_classes_from_paths
from lightning_fsdp2.recipes.megatron_fsdp import parallelize_with_megatron_fsdp
from lightning_fsdp2.recipes.nvfsdp import HAVE_NVFSDP, nvfsdp_strategy_parallelize
from lightning_fsdp2.sizes import DATA_PARALLEL, DP_CP, TENSOR_PARALLEL

__all__ = [
    "HAVE_MEGATRON_FSDP",
    "HAVE_NVFSDP",
    "apply_fsdp_sharding_recursively",
    "ddp_strategy_parallelize",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_class_from_path",
    "import_classes_from_paths",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
]


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    param_dtype: torch.dtype = torch.bfloat16,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: ActivationCheckpointing = False,
    cpu_offload: bool = False,
    tp_shard_plan: PlanOption = None,
    dp_mesh_name: str | tuple[str, str] = DATA_PARALLEL,
    tp_mesh_name: str = TENSOR_PARALLEL,
    dp_cp_mesh_name: str = DP_CP,
    *,
    activation_checkpointing_scope: ActivationCheckpointingScope = "all",
    context_parallel_method: ContextParallelMethod = "auto",
    context_parallel_inputs: Mapping[str, int | None] | None = None,
    autocast_dtype: torch.dtype | None = None,
    enable_async_tensor_parallel: bool = False,
    enable_compile: bool = False,
    loss_parallel: bool = False,
    patch_is_packed_sequence: bool = False,
    reshard_after_forward: bool | int | None = None,
    enable_fsdp2_prefetch: bool = True,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    pp_schedule: PipelineSchedule = "1f1b",
    pp_microbatches: int | None = None,
    pp_stages_per_rank: int | None = None,
    pp_layers_per_stage: Sequence[int] | None = None,
    float8: bool | Float8Config | None = None,
    materializes: bool = True,
) -> nn.Module:
    """Shard a model with FSDP2, and initialise or load its weights.

    The same code runs on one rank and on a thousand. A model on the meta device never exists in full: each rank
    allocates only its shards, and initialises them or reads them from the files that
    :func:`~lightning_fsdp2.weights.pretrained.set_pretrained` names. If the model already has weights, the weights of
    rank 0 are first copied to all ranks.

    Arguments without a description here are the fields of :class:`~lightning_fsdp2.FSDP2Config` with the same name.

    * ``model``: a Hugging Face model, a LightningModule or any other module around one, or a plain module. It is
      changed in place.
    * ``device_mesh``: from :func:`~lightning_fsdp2.create_device_mesh`, or any mesh with the axes named below.
    * ``param_dtype``: compute dtype if ``mp_policy`` is None; gradients are then reduced in float32, and the output is
      float32.
    * ``cpu_offload``: shorthand for ``offload_policy=CPUOffloadPolicy(pin_memory=False)``.
    * ``tp_shard_plan``: the field ``tp_plan``, or a function that takes the model and returns a plan as a dict.
    * ``dp_mesh_name``: the axis to shard over, or two axes (replicate, shard).
    * ``tp_mesh_name``: the tensor parallel axis; a mesh without it has no tensor parallelism.
    * ``dp_cp_mesh_name``: the axis to shard over instead of ``dp_mesh_name``, if the mesh has it.
    * ``materializes``: whether a model on the meta device gets its weights. False leaves its shards on the meta device,
      for inspection.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: When a tensor parallel style does not fit its module.
        ValueError: When an option is not supported, the mesh lacks an axis, the model is sharded already or has no
            tensor parallel plan, or its parameters cannot be grouped into units.
    """
    config = FSDP2Config(
        sequence_parallel=sequence_parallel,
        tp_plan=cast(Any, tp_shard_plan),
        patch_is_packed_sequence=patch_is_packed_sequence,
        mp_policy=resolve_mp_policy(mp_policy, param_dtype),
        offload_policy=_choose_offload_policy(offload_policy, cpu_offload),
        autocast_dtype=autocast_dtype,
        activation_checkpointing=activation_checkpointing,
        activation_checkpointing_scope=activation_checkpointing_scope,
        reshard_after_forward=reshard_after_forward,
        loss_parallel=loss_parallel,
        context_parallel_method=context_parallel_method,
        context_parallel_inputs=dict(context_parallel_inputs or {}),
        enable_async_tensor_parallel=enable_async_tensor_parallel,
        enable_compile=enable_compile,
        enable_fsdp2_prefetch=enable_fsdp2_prefetch,
        fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
        fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
        pp_schedule=pp_schedule,
        pp_microbatches=pp_microbatches,
        pp_stages_per_rank=pp_stages_per_rank,
        pp_layers_per_stage=None if pp_layers_per_stage is None else list(pp_layers_per_stage),
        float8=float8,
    )
    names = AxisNames(dp=dp_mesh_name, tp=tp_mesh_name, dp_cp=dp_cp_mesh_name)
    return parallelize_with_fsdp2(model, device_mesh, config, names=names, materializes=materializes)


def _choose_offload_policy(policy: OffloadPolicy | None, cpu_offload: bool) -> CPUOffloadPolicy | None:
    if policy is None:
        return CPUOffloadPolicy(pin_memory=False) if cpu_offload else None
    # An instance of torch's base class `OffloadPolicy` means no offloading.
    # The config refuses all other objects that are not a CPUOffloadPolicy.
    return None if type(policy) is OffloadPolicy else cast(CPUOffloadPolicy, policy)


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    megatron_fsdp_unit_modules: Sequence[str] | None = None,
    zero_dp_strategy: int = 3,
    init_fsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = True,
    preserve_fp32_weights: bool = True,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    *,
    activation_checkpointing: ActivationCheckpointing = False,
    autocast_dtype: torch.dtype | None = None,
    tp_shard_plan: PlanOption = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> tuple[Any, Optimizer | None]:
    """Shard a model with NVIDIA's Megatron-FSDP.

    Arguments without a description here are the fields of :class:`~lightning_fsdp2.MegatronFSDPConfig` with the same
    name.

    * ``model``: as for :func:`fsdp2_strategy_parallelize`. Its dtype is the compute dtype. It is changed in place.
    * ``device_mesh``: from :func:`~lightning_fsdp2.create_device_mesh`.
    * ``optimizer``: an optimizer of the model's parameters that has not taken a step yet. Its groups are kept.
    * ``tp_shard_plan``: as for :func:`fsdp2_strategy_parallelize`.

    Returns:
        The wrapper, which must be called in place of ``model``; and ``optimizer``, which now updates the shards.

    Raises:
        ImportError: When ``megatron-fsdp`` is not installed, or is too old.
        TypeError: When a tensor parallel style does not fit its module.
        ValueError: When ``megatron-fsdp`` lacks a flag or handles it wrongly, or when the model has no units or no
            tensor parallel plan.
    """
    config = MegatronFSDPConfig(
        megatron_fsdp_unit_modules=None if megatron_fsdp_unit_modules is None else list(megatron_fsdp_unit_modules),
        zero_dp_strategy=zero_dp_strategy,
        init_fsdp_with_meta_device=init_fsdp_with_meta_device,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        preserve_fp32_weights=preserve_fp32_weights,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        activation_checkpointing=activation_checkpointing,
        autocast_dtype=autocast_dtype,
        tp_plan=cast(Any, tp_shard_plan),
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
    )
    return parallelize_with_megatron_fsdp(model, device_mesh, config, optimizer)


def ddp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    *,
    activation_checkpointing: ActivationCheckpointing = False,
    activation_checkpointing_scope: ActivationCheckpointingScope = "all",
    autocast_dtype: torch.dtype | None = None,
    materializes: bool = True,
) -> nn.Module:
    """Put the whole model on every rank, ready for :class:`torch.nn.parallel.DistributedDataParallel` to wrap.

    Arguments without a description here are the fields of :class:`~lightning_fsdp2.DDPConfig` with the same name.

    * ``model``: as for :func:`fsdp2_strategy_parallelize`; it may be on the meta device. It is changed in place.
    * ``device_mesh``: mesh of the ranks, which all get the same weights. If the model already has weights, all ranks
      get the weights of rank 0.
    * ``materializes``: as for :func:`fsdp2_strategy_parallelize`.

    Returns:
        ``model`` itself, on this rank's device.

    Raises:
        ValueError: When the model is sharded.
    """
    config = DDPConfig(
        activation_checkpointing=activation_checkpointing,
        activation_checkpointing_scope=activation_checkpointing_scope,
        autocast_dtype=autocast_dtype,
    )
    return prepare_for_ddp(model, device_mesh, config, materializes=materializes)


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard every block of every ``ModuleList`` in ``module``, and nothing else.

    The last block of a list stays gathered after forward, since backward needs it first.

    Args:
        module: Module that holds the lists. It is changed in place, but not sharded itself.
        mesh: Mesh to shard over: 1-D (shard) or 2-D (replicate x shard).
        mp_policy: Mixed precision policy of the blocks; None keeps the dtypes of the parameters.
        offload_policy: Policy that says where shards are stored; None keeps them on the mesh's device.
    """
    units = build_layer_units(find_structure(module), mesh=mesh)
    apply_fully_shard(units, module, mp_policy=mp_policy or MixedPrecisionPolicy(), offload_policy=offload_policy)
    run_gradient_hooks(module, mesh)


def unshard_fsdp2_model(model: nn.Module) -> AbstractContextManager[None]:
    """Gather all weights of ``model`` on every rank for the duration of a ``with`` block.

    Use it for ``generate``, to compute log-probabilities, or to read parameters. All ranks must enter the block, and
    each must have memory for the whole model. Changes to the parameters inside the block are lost.

    Inside the block, a single rank can call the model, unless the model uses tensor, context, expert or pipeline
    parallelism. The ranks of these groups communicate in each forward, so all of them must call the model equally
    often. If they ``generate`` from different prompts, pass ``synced_gpus=True``.

    Raises:
        RuntimeError: When a backward after the block needs the weights that were gathered inside it.
    """
    return unshard_model(model)


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the tensor parallel plan that transformers has for ``model``: patterns of module names and their styles.

    The plan merges the entries of the model's class, its config and its inner models. If no entry shards the input
    embedding, the plan shards the embedding over the vocabulary; likewise for the head. Styles are instances of torch's
    classes where torch has the style. The plan can be passed to
    ``torch.distributed.tensor.parallel.parallelize_module`` or to :func:`fsdp2_strategy_parallelize`.

    Raises:
        ValueError: When the model has no plan, or when the plan names a style that is unknown or refused. The error for
            a missing plan is an ``AssertionError`` too.
    """
    parts = find_parts(model)
    plan = get_plan(parts, "hf")
    # leave out entries that match nothing in this model: they are for other models of the same family
    unmatched = match_plan(parts, plan).unmatched
    return {name: to_torch_style(style) for name, style in plan.items() if name not in unmatched}


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return the :class:`torch.distributed.tensor.parallel.ParallelStyle` for a style name from transformers' plans.

    If torch has no such style, the class comes from :mod:`lightning_fsdp2.parallel.tensor.styles`.

    Raises:
        ValueError: When the style is unknown or refused.
    """
    return to_torch_style(get_style(style, style))

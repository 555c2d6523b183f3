"""Recipe for FSDP2 with tensor, sequence and context parallelism."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from lightning_fsdp2.config import Float8Config, FSDP2Config, MegatronFSDPConfig
from lightning_fsdp2.mesh import get_device, get_shard_size
from lightning_fsdp2.mesh_axes import AxisNames, MeshAxes, get_mesh_axes
from lightning_fsdp2.modules.kept_parameters import (
    KeptParameter,
    check_on_all_stages,
    find_kept_parameters,
    replace_kept_parameters,
)
from lightning_fsdp2.modules.sharder import check_not_sharded
from lightning_fsdp2.modules.structure import ModelStructure, find_structure
from lightning_fsdp2.parallel.context.apply import apply_context_parallel
from lightning_fsdp2.parallel.data.checks import explain_kept_parameters
from lightning_fsdp2.parallel.data.fully_shard import (
    apply_fully_shard,
    apply_prefetch,
    check_reshard_after_forward,
    get_fsdp_modules,
)
from lightning_fsdp2.parallel.data.gradient_hooks import run_gradient_hooks
from lightning_fsdp2.parallel.data.in_place import keep_changes_in_place
from lightning_fsdp2.parallel.data.units import UnitPlan, build_unit_plan
from lightning_fsdp2.parallel.expert.apply import apply_expert_parallel
from lightning_fsdp2.parallel.expert.checks import check_experts
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp2.parallel.layers.autocast import apply_autocast
from lightning_fsdp2.parallel.layers.compile import apply_compile
from lightning_fsdp2.parallel.layers.float8 import Float8Choice, apply_float8, choose_float8
from lightning_fsdp2.parallel.layers.packed_sequences import apply_unpacked_sequences
from lightning_fsdp2.parallel.pipeline.apply import apply_pipeline_parallel
from lightning_fsdp2.parallel.pipeline.split import Split, build_split
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel, get_optional_stack, get_shard_shapes
from lightning_fsdp2.parallel.tensor.fusion import CollectiveFusion, build_collective_fusion
from lightning_fsdp2.parallel.tensor.plans import get_style
from lightning_fsdp2.ranks.whole_values import treat_dtensors_as_whole
from lightning_fsdp2.recipes.imports import import_plan
from lightning_fsdp2.weights.adapters import check_peft
from lightning_fsdp2.weights.materialize import broadcast_from_first_rank, check_initialized, materialize
from lightning_fsdp2.weights.pretrained import load_pretrained

logger = logging.getLogger(__name__)

_DEFAULT_NAMES = AxisNames()


def parallelize_with_fsdp2(
    model: nn.Module,
    device_mesh: DeviceMesh,
    config: FSDP2Config,
    *,
    names: AxisNames = _DEFAULT_NAMES,
    moe_mesh: DeviceMesh | None = None,
    materializes: bool = True,
) -> nn.Module:
    """Shard a model with FSDP2, and initialise or load its weights.

    The same code runs on one rank and on a thousand. A model on the meta device never exists in full: each rank
    allocates only its shards, and initialises them or reads them from the files that
    :func:`~lightning_fsdp2.weights.pretrained.set_pretrained` names. If the model already has weights, the weights of
    rank 0 are first copied to all ranks.

    Args:
        model: A Hugging Face model, a LightningModule or any other module around one, or a plain module. It is changed
            in place.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`, or any mesh with the axes in ``names``.
        config: Flags of FSDP2.
        names: Names of the mesh's axes.
        moe_mesh: Mesh of the experts, if it is not part of ``device_mesh``; see
            :func:`~lightning_fsdp2.mesh_axes.get_expert_meshes`.
        materializes: Whether a model on the meta device gets its weights. False leaves its shards on the meta device,
            for inspection.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: When a tensor parallel style does not fit its module.
        ValueError: When an option is not supported, the mesh lacks an axis, the model is sharded already or has no
            tensor parallel plan, or its parameters cannot be grouped into units.
    """
    _check_model(model)
    treat_dtensors_as_whole(device_mesh, moe_mesh)
    structure = find_structure(model)
    axes = get_mesh_axes(device_mesh, names, moe_mesh)
    policy = resolve_mp_policy(config.mp_policy)
    _check_flags(structure, axes, config, policy)
    fusion = get_optional_fusion(axes.tp, config)
    _warn_of_flags(structure, axes, config, policy)
    device = get_device(device_mesh)
    split = None if axes.pp is None else _build_split(structure, axes.pp, config)
    float8 = _choose_float8(structure, axes, config, device if materializes else None)
    kept = _find_kept_parameters(model, split)
    broadcast_from_first_rank(model, device, device_mesh)
    if axes.ep is not None:
        apply_expert_parallel(structure, axes.ep, axes.tp)
    if float8 is not None:
        apply_float8(structure, float8)
        del float8  # it holds layers of other stages
    maybe_apply_tensor_parallel(structure, axes.tp, config)
    _apply_context_parallel(structure, axes, config)
    if split is not None:
        split.drop(get_optional_stack(split.layers))
        structure = find_structure(model)  # without the modules of other stages
    _apply_activation_checkpointing(structure, axes, config)
    if config.enable_compile:
        apply_compile(structure, tensor_parallel=axes.tp is not None, fusion=fusion)
    if config.patch_is_packed_sequence:
        apply_unpacked_sequences(structure)
    policy = _apply_autocast(structure, config, device, policy)
    offload_policy = get_optional_offload_policy(config, device)
    plan = build_unit_plan(structure, config.reshard_after_forward, mesh=axes.fsdp, expert_mesh=axes.experts)
    apply_fully_shard(plan.units, model, mp_policy=policy, offload_policy=offload_policy)
    _apply_prefetch(plan, config)
    _watch_parameters(model, device_mesh, is_pipelined=split is not None)
    if materializes:
        _give_weights(model, device if offload_policy is None else torch.device("cpu"), device_mesh)
    replace_kept_parameters(kept)
    if split is not None:
        apply_pipeline_parallel(model, split, device_mesh, config)
    logger.info("Sharded %s into %d units over %s.", type(model).__name__, len(plan.units), axes.fsdp)
    return model


def _check_model(model: nn.Module) -> None:
    """Check what does not depend on the mesh, before the model is changed."""
    check_not_sharded(model)
    check_peft(model)
    check_initialized(model)


def _find_kept_parameters(model: nn.Module, split: Split | None) -> list[KeptParameter]:
    """Find the parameters that are kept outside of modules, and make uses that cannot be right fail by name."""
    kept = find_kept_parameters(model)
    if split is not None:
        check_on_all_stages(kept, split.stages)
    explain_kept_parameters(model, kept)
    return kept


def _watch_parameters(model: nn.Module, device_mesh: DeviceMesh, *, is_pipelined: bool) -> None:
    """Run the user's hooks on gradients, and keep what a forward changes in its weights."""
    run_gradient_hooks(model, device_mesh)
    keep_changes_in_place(get_fsdp_modules(model), is_pipelined=is_pipelined)


def _give_weights(model: nn.Module, device: torch.device, device_mesh: DeviceMesh) -> None:
    """Read the weights of a model on the meta device from files, or initialise them."""
    load_pretrained(model, device, device_mesh)
    materialize(model, device, device_mesh)


def _build_split(structure: ModelStructure, pp_mesh: DeviceMesh, config: FSDP2Config) -> Split:
    """Divide the model into the stages of a pipeline, without changing it."""
    return build_split(
        structure,
        ranks=pp_mesh.size(),
        rank=pp_mesh.get_local_rank(),
        stages_per_rank=config.stages_per_rank,
        layers_per_stage=config.pp_layers_per_stage,
    )


def _check_flags(structure: ModelStructure, axes: MeshAxes, config: FSDP2Config, policy: MixedPrecisionPolicy) -> None:
    """Check flags that depend on the mesh, before the model is changed."""
    check_reshard_after_forward(config.reshard_after_forward, get_shard_size(axes.fsdp))
    check_unused_plan(axes.tp, config)
    _check_experts(structure, axes, config, policy)


def _check_experts(
    structure: ModelStructure, axes: MeshAxes, config: FSDP2Config, policy: MixedPrecisionPolicy
) -> None:
    """Check that expert parallelism is possible, before the model is changed."""
    if axes.ep is None or axes.experts is None:
        return
    ranks, shards = axes.ep.size(), get_shard_size(axes.experts)
    check_experts(structure, ranks=ranks, shards=shards, reduce_dtype=policy.reduce_dtype)
    is_full = config.activation_checkpointing in (True, "full")
    if config.enable_compile and is_full and axes.tp is not None and not config.sequence_parallel:
        raise ValueError(
            f"enable_compile=True with activation_checkpointing='full', tensor parallelism and ep_size={ranks}: in"
            " backward, torch would recompute a layer with graphs that differ from the graphs of its forward; use"
            " activation_checkpointing='selective', or sequence_parallel=True."
        )
    if shards > 1:  # a single shard is never gathered, so there is nothing to reshard
        check_reshard_after_forward(config.reshard_after_forward, shards, "experts")


def _choose_float8(
    structure: ModelStructure, axes: MeshAxes, config: FSDP2Config, device: torch.device | None
) -> Float8Choice | None:
    """Choose the layers that will multiply in float8, before the model is changed; None if the config asks for none."""
    if config.float8 is None:
        return None
    # the shapes that tensor parallelism will give to weights decide which layers can multiply in float8
    shapes = {} if axes.tp is None else get_shard_shapes(structure, axes.tp.size(), import_plan(config.tp_plan))
    # the cast is safe, because the config has already replaced a bool or a mapping with a Float8Config
    return choose_float8(structure, cast(Float8Config, config.float8), device, shapes)


def check_unused_plan(tp_mesh: DeviceMesh | None, config: FSDP2Config | MegatronFSDPConfig) -> None:
    """Check the tensor parallel plan if there is only one tensor parallel rank, so that a mistake in it shows early.

    With several ranks, the plan is checked when it is applied.

    Raises:
        TypeError: When ``tp_plan`` is not a plan.
        ValueError: When it cannot be imported, or has an unknown style.
    """
    if tp_mesh is not None:
        return
    plan = import_plan(config.tp_plan)
    for name, style in plan.items() if isinstance(plan, Mapping) else ():
        get_style(name, style)


def maybe_apply_tensor_parallel(
    structure: ModelStructure, tp_mesh: DeviceMesh | None, config: FSDP2Config | MegatronFSDPConfig
) -> None:
    """Apply tensor parallelism, if there are several tensor parallel ranks."""
    if tp_mesh is None:
        return
    apply_tensor_parallel(
        structure,
        tp_mesh,
        plan=import_plan(config.tp_plan),
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
    )


def _apply_context_parallel(structure: ModelStructure, axes: MeshAxes, config: FSDP2Config) -> None:
    """Apply context parallelism, if there are several context parallel ranks."""
    if axes.cp is None:
        return
    apply_context_parallel(
        structure,
        axes.cp.get_group(),
        method=config.context_parallel_method,
        inputs=config.context_parallel_inputs,
        tp_size=axes.tp_size,
        sequence_parallel=config.sequence_parallel,
        assumes_unpacked=config.patch_is_packed_sequence,
    )


def _apply_activation_checkpointing(structure: ModelStructure, axes: MeshAxes, config: FSDP2Config) -> None:
    """Apply activation checkpointing, if the config asks for it."""
    if not config.activation_checkpointing:
        return
    apply_activation_checkpointing(
        structure,
        config.activation_checkpointing,
        scope=config.activation_checkpointing_scope,
        compiles_collectives=config.enable_compile and (axes.tp is not None or axes.ep is not None),
    )


def _apply_autocast(
    structure: ModelStructure, config: FSDP2Config, device: torch.device, policy: MixedPrecisionPolicy
) -> MixedPrecisionPolicy:
    """Apply autocast, if the config asks for it, and return the policy for units, which then cast no inputs."""
    if config.autocast_dtype is None:
        return policy
    residual_dtype = torch.float32 if policy.output_dtype is torch.float32 else None
    apply_autocast(structure, config.autocast_dtype, device.type, residual_dtype=residual_dtype)
    return replace(policy, cast_forward_inputs=False)


def _apply_prefetch(plan: UnitPlan, config: FSDP2Config) -> None:
    """Make units gather their weights in advance, unless the config turns that off."""
    if config.enable_fsdp2_prefetch:
        forward_depth, backward_depth = config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth
        apply_prefetch(plan, forward_depth=forward_depth, backward_depth=backward_depth)


def resolve_mp_policy(
    mp_policy: MixedPrecisionPolicy | None, param_dtype: torch.dtype = torch.bfloat16
) -> MixedPrecisionPolicy:
    """Return a mixed-precision policy: ``mp_policy`` or, if that is None, a new policy for ``param_dtype``.

    If the policy has no ``reduce_dtype``, float32 is used. In torch up to 2.14, ``reduce_dtype=None`` means
    ``param_dtype``; from torch 2.15 on, it means the gradient's dtype.

    Raises:
        ValueError: When the compute dtype is float16 or float64.
    """
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=param_dtype, output_dtype=torch.float32)
    if policy.param_dtype in (torch.float16, torch.float64):
        option = "param_dtype" if mp_policy is None else "mp_policy.param_dtype"
        raise ValueError(
            f"{option}={policy.param_dtype} is not supported: there is no gradient scaler for float16, and float64 is"
            " not mixed precision; use bfloat16 or float32."
        )
    return replace(policy, reduce_dtype=policy.reduce_dtype or torch.float32)


def get_optional_offload_policy(config: FSDP2Config, device: torch.device) -> CPUOffloadPolicy | None:
    """Return the policy that keeps shards in host memory between uses, or None if the config has no such policy.

    The result is also None if ``device`` is a CPU: shards are in host memory anyway, and cannot be pinned.
    """
    # the cast is safe, because the config has already replaced a bool with a policy
    return None if device.type == "cpu" else cast(CPUOffloadPolicy | None, config.offload_policy)


def get_optional_fusion(tp_mesh: DeviceMesh | None, config: FSDP2Config) -> CollectiveFusion | None:
    """Return a ``CollectiveFusion``, which overlaps the collectives of compiled layers with matrix products.

    Return None if ``enable_async_tensor_parallel`` is not set.

    Raises:
        ValueError: When there are no collectives to overlap, or the devices cannot overlap them.
    """
    if not config.enable_async_tensor_parallel:
        return None
    return build_collective_fusion(tp_mesh)


def _warn_of_flags(
    structure: ModelStructure, axes: MeshAxes, config: FSDP2Config, policy: MixedPrecisionPolicy
) -> None:
    """Log warnings on global rank 0 about flags that have no effect on this mesh, or not the one to expect."""
    warn_of_tensor_parallel_flags(axes.tp, config)
    _warn_of_context_parallel_flags(axes.cp, config)
    _warn_of_pipeline_flags(axes.pp, config)
    _warn_of_uncompiled_experts(axes.ep, config)
    _warn_of_float8(structure, config, policy)


def warn_of_tensor_parallel_flags(tp_mesh: DeviceMesh | None, config: FSDP2Config | MegatronFSDPConfig) -> None:
    """Log a warning on global rank 0 if tensor parallel flags are set, but there is only one tensor parallel rank."""
    is_set = config.tp_plan or config.sequence_parallel or config.loss_parallel
    if tp_mesh is None and dist.get_rank() == 0 and is_set:
        logger.warning("tp_plan, sequence_parallel and loss_parallel have no effect with one tensor parallel rank.")


def _warn_of_context_parallel_flags(cp_mesh: DeviceMesh | None, config: FSDP2Config) -> None:
    is_set = config.context_parallel_method != "auto" or config.context_parallel_inputs
    if cp_mesh is None and dist.get_rank() == 0 and is_set:
        logger.warning(
            "context_parallel_method and context_parallel_inputs have no effect with one context parallel rank."
        )


def _warn_of_pipeline_flags(pp_mesh: DeviceMesh | None, config: FSDP2Config) -> None:
    is_set = (config.pp_schedule, config.pp_microbatches, config.pp_layers_per_stage) != ("1f1b", None, None)
    if pp_mesh is None and dist.get_rank() == 0 and is_set:
        logger.warning(
            "pp_schedule, pp_microbatches, pp_stages_per_rank and pp_layers_per_stage have no effect with one pipeline"
            " rank."
        )


def _warn_of_uncompiled_experts(ep_mesh: DeviceMesh | None, config: FSDP2Config) -> None:
    is_selective = config.enable_compile and config.activation_checkpointing == "selective"
    if ep_mesh is not None and dist.get_rank() == 0 and is_selective:
        logger.warning(
            "enable_compile=True with activation_checkpointing='selective' and ep_size=%d: torch cannot compile a"
            " selective checkpoint around an exchange of tokens, so layers with experts run uncompiled. Use"
            " activation_checkpointing='full' or False to compile them.",
            ep_mesh.size(),
        )


def _warn_of_float8(structure: ModelStructure, config: FSDP2Config, policy: MixedPrecisionPolicy) -> None:
    """Warn if float8 is slow because layers are not compiled, or less exact than the compute dtype promises."""
    float8 = cast(Float8Config | None, config.float8)
    if float8 is None or float8.emulate or dist.get_rank() != 0:
        return
    if not config.enable_compile:
        logger.warning(
            "float8 without enable_compile=True is usually slower than training without float8, because each cast takes"
            " several kernels that read and write the whole matrix; set enable_compile=True."
        )
    weights = next((parameter.dtype for parameter in structure.root.parameters()), torch.float32)
    compute = config.autocast_dtype or policy.param_dtype or weights
    if compute == torch.float32 and float8.recipe != "tensorwise":
        logger.warning(
            "float8 with recipe=%r rounds the results of its products to bfloat16, although this run computes in"
            ' float32; use Trainer(precision="bf16-mixed"), or recipe="tensorwise", whose products are float32.',
            float8.recipe,
        )

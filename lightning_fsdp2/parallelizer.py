"""THE RECIPE: the order in which the passes are applied to a model."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer

from lightning_fsdp2.config import ActivationCheckpointing, ActivationCheckpointingScope, ContextParallelMethod
from lightning_fsdp2.mesh import (
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    DP_CP,
    TENSOR_PARALLEL,
    get_fsdp_mesh,
    get_optional_mesh,
)
from lightning_fsdp2.modules.sharder import get_optional_sharder
from lightning_fsdp2.parallel.context.apply import apply_context_parallel
from lightning_fsdp2.parallel.data.fully_shard import (
    apply_fully_shard,
    apply_layer_sharding,
    apply_prefetch,
    unshard_model,
)
from lightning_fsdp2.parallel.data.units import check_shardable
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp2.parallel.layers.autocast import apply_autocast
from lightning_fsdp2.parallel.layers.compile import apply_compile
from lightning_fsdp2.parallel.layers.packed_sequences import apply_unpacked_sequences
from lightning_fsdp2.parallel.megatron.driver import take_over_optimizer
from lightning_fsdp2.parallel.megatron.wrap import (
    HAVE_MEGATRON_FSDP as HAVE_MEGATRON_FSDP,
)
from lightning_fsdp2.parallel.megatron.wrap import (
    apply_megatron_fsdp,
    check_supported,
    check_unit_classes,
    get_unit_classes,
    spread_parameters,
)
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel
from lightning_fsdp2.parallel.tensor.fusion import build_collective_fusion
from lightning_fsdp2.parallel.tensor.matching import match_plan
from lightning_fsdp2.parallel.tensor.plans import PlanOption, get_plan, get_style, to_torch_style
from lightning_fsdp2.weights.adapters import check_peft
from lightning_fsdp2.weights.materialize import broadcast_from_first_rank, materialize
from lightning_fsdp2.weights.pretrained import load_pretrained

logger = logging.getLogger(__name__)

HAVE_NVFSDP = HAVE_MEGATRON_FSDP
"""The earlier name."""

_ZERO_DP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


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
    materializes: bool = True,
) -> nn.Module:
    """Shard a model and give it its weights; on one rank the same code runs as on a thousand.

    A model on the meta device never exists in full: its shards are allocated and then initialised, or filled from the
    files of :func:`~lightning_fsdp2.weights.pretrained.set_pretrained`. A model with weights is made equal on all
    ranks first (rank 0's count).

    Args:
        model: A Hugging Face model, a LightningModule or any other module around one, or a plain module. Changed in
            place.
        device_mesh: From :func:`~lightning_fsdp2.create_device_mesh`, or any mesh with the axes named below.
        param_dtype: Compute dtype where ``mp_policy`` is None.
        mp_policy: Dtypes of compute, gradient reduction and the model's output. None: ``param_dtype``, float32,
            float32.
        offload_policy: Where shards live between uses.
        sequence_parallel: Whether to shard activations over the sequence where the tensor parallel plan leaves them
            whole.
        activation_checkpointing: True or ``"full"`` to compute layers again in backward, ``"selective"`` to keep
            their expensive results.
        cpu_offload: Short for ``offload_policy=CPUOffloadPolicy(pin_memory=False)``.
        tp_shard_plan: Patterns of module names and the styles of the modules, a function of the model that returns
            such a dict, or the import path of either; ``"hf"`` for the model's own plan. None chooses: see
            :func:`~lightning_fsdp2.parallel.tensor.plans.get_plan`.
        dp_mesh_name: Axis to shard over, or two axes (replicate, shard).
        tp_mesh_name: Tensor parallel axis; a mesh without it has no tensor parallelism.
        dp_cp_mesh_name: Axis that is sharded over instead of ``dp_mesh_name`` where the mesh has it.
        activation_checkpointing_scope: The parts of the model whose layers it applies to.
        context_parallel_method: ``"allgather"`` or ``"ulysses"``; ``"auto"`` chooses by heads and ranks.
        context_parallel_inputs: Further tensors of the models' forwards, and their dim of the sequence; None for those
            that have none.
        autocast_dtype: None, or that of matrix products in :class:`torch.autocast`, which then decides on casts in
            place of the units; with a policy whose ``output_dtype`` is float32 the residual stream is float32.
        enable_async_tensor_parallel: Whether the compiled layers' collectives overlap their matrix products; needs
            ``sequence_parallel`` and ``enable_compile``.
        enable_compile: Whether each layer is compiled with ``torch.compile``.
        loss_parallel: Whether logits stay sharded over the vocabulary, and the loss is computed on the shards.
        patch_is_packed_sequence: Whether transformers need not look for packed sequences, of which there are none.
        reshard_after_forward: None keeps the last block of each list gathered; True reshards every block, False none,
            an int reshards to that many ranks.
        enable_fsdp2_prefetch: Whether units start the all-gathers of the next ones.
        fsdp2_backward_prefetch_depth: How many of them in backward.
        fsdp2_forward_prefetch_depth: How many of them in forward.
        materializes: Whether a model on the meta device gets its weights; False leaves its shards there, to be looked
            at.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: When a tensor parallel style does not fit its module.
        ValueError: When an option is not supported, the mesh lacks an axis, the model is sharded already or has no
            tensor parallel plan, or its parameters cannot be grouped into units.
    """
    _check_not_sharded(model)
    check_peft(model)
    device = _get_device(device_mesh)
    fsdp_mesh = get_fsdp_mesh(device_mesh, dp_mesh_name=dp_mesh_name, dp_cp_mesh_name=dp_cp_mesh_name)
    tp_mesh = get_optional_mesh(device_mesh, tp_mesh_name)
    cp_mesh = get_optional_mesh(device_mesh, CONTEXT_PARALLEL)
    ranks = fsdp_mesh.size() * (tp_mesh.size() if tp_mesh is not None else 1)
    if ranks < device_mesh.size():
        raise ValueError(
            f"{dp_mesh_name!r} and {tp_mesh_name!r} cover {ranks} of the {device_mesh.size()} ranks of {device_mesh}:"
            " the others would train unsynchronised copies. Name all data parallel axes in dp_mesh_name, or pass a"
            " smaller mesh."
        )
    _check_reshard(reshard_after_forward, fsdp_mesh.size(-1))
    policy = resolve_mp_policy(mp_policy, param_dtype)
    fusion = (
        build_collective_fusion(tp_mesh, sequence_parallel=sequence_parallel, enable_compile=enable_compile)
        if enable_async_tensor_parallel
        else None
    )
    broadcast_from_first_rank(model, device, device_mesh)
    if tp_mesh is not None:
        apply_tensor_parallel(
            model,
            tp_mesh,
            plan=import_plan(tp_shard_plan),
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
        )
    elif (tp_shard_plan or sequence_parallel or loss_parallel) and dist.get_rank() == 0:
        logger.warning("tp_plan, sequence_parallel and loss_parallel have no effect with one tensor parallel rank.")
    if cp_mesh is not None:
        apply_context_parallel(
            model,
            cp_mesh.get_group(),
            method=context_parallel_method,
            inputs=context_parallel_inputs,
            tp_size=tp_mesh.size() if tp_mesh is not None else 1,
            sequence_parallel=sequence_parallel,
            assumes_unpacked=patch_is_packed_sequence,
        )
    elif (context_parallel_method != "auto" or context_parallel_inputs) and dist.get_rank() == 0:
        logger.warning(
            "context_parallel_method and context_parallel_inputs have no effect with one context parallel rank."
        )
    if activation_checkpointing:
        apply_activation_checkpointing(
            model,
            activation_checkpointing,
            scope=activation_checkpointing_scope,
            compiles_collectives=enable_compile and tp_mesh is not None,
        )
    if enable_compile:
        apply_compile(model, tensor_parallel=tp_mesh is not None, fusion=fusion)
    if patch_is_packed_sequence:
        apply_unpacked_sequences(model)
    if autocast_dtype is not None:
        apply_autocast(
            model,
            autocast_dtype,
            device.type,
            residual_dtype=torch.float32 if policy.output_dtype is torch.float32 else None,
        )
        policy = replace(policy, cast_forward_inputs=False)
    if cpu_offload and offload_policy is None:
        offload_policy = CPUOffloadPolicy(pin_memory=False)
    if device.type == "cpu":
        offload_policy = None  # the shards are in host memory anyway, and nothing could pin it
    plan = apply_fully_shard(
        model,
        fsdp_mesh,
        mp_policy=policy,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
    )
    if enable_fsdp2_prefetch:
        apply_prefetch(plan, forward_depth=fsdp2_forward_prefetch_depth, backward_depth=fsdp2_backward_prefetch_depth)
    if materializes:
        weights_device = torch.device("cpu") if isinstance(offload_policy, CPUOffloadPolicy) else device
        load_pretrained(model, weights_device, device_mesh)
        materialize(model, weights_device, device_mesh)
    logger.info("Sharded %s into %d units over %s.", type(model).__name__, len(plan.units), fsdp_mesh)
    return model


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
) -> tuple[Any, Optimizer | None]:
    """Shard a model with NVIDIA's Megatron-FSDP.

    Args:
        model: As for :func:`fsdp2_strategy_parallelize`. Its dtype is that of compute. Changed in place.
        device_mesh: From :func:`~lightning_fsdp2.create_device_mesh`, with replicas, shards and context parallel ranks.
        optimizer: Of the model's parameters, without steps so far; its groups are kept.
        megatron_fsdp_unit_modules: Import paths of the classes whose modules are gathered as one. None takes those of
            the model's layers and torch's ``MultiheadAttention``, whose forward reads its child's weights itself.
        zero_dp_strategy: What ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        init_fsdp_with_meta_device: Whether the model is on the meta device and gets its weights shard by shard. One
            that is there without this flag is whole on every rank before it is sharded.
        grad_reduce_in_fp32: Whether gradients are reduced in float32, and with ``preserve_fp32_weights`` also added up.
        preserve_fp32_weights: Whether the optimizer steps float32 copies of weights in less.
        overlap_grad_reduce: Whether gradients are reduced during backward.
        overlap_param_gather: Whether parameters are gathered ahead of their use.
        report_nan_in_param_grad: Whether a gradient that is not finite is an error that names the parameter.
        average_in_collective: Refused: it fails in the package.
        disable_bucketing: Whether each group of parameters is communicated as a whole.
        calculate_per_token_loss: Whether gradients are summed over the ranks, not averaged.
        keep_fp8_transpose_cache: Whether transposed copies of FP8 parameters are kept.
        nccl_ub: Whether communication buffers are registered with NCCL.
        fsdp_double_buffer: Whether units share two persistent buffers.
        activation_checkpointing: True or ``"full"`` to compute layers again in backward, ``"selective"`` to keep
            their expensive results.
        autocast_dtype: None, or that of matrix products in :class:`torch.autocast`.

    Returns:
        The wrapper, to be called in place of ``model``, and ``optimizer``, which steps the shards from now on.

    Raises:
        ImportError: When ``megatron-fsdp`` is not installed, or too old.
        ValueError: When the package gets a flag wrong or lacks it, the mesh has other axes, or there are no units.
    """
    _check_not_sharded(model)
    check_peft(model)
    check_supported(
        device_mesh,
        zero_dp_strategy=zero_dp_strategy,
        init_fsdp_with_meta_device=init_fsdp_with_meta_device,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        average_in_collective=average_in_collective,
        nccl_ub=nccl_ub,
    )
    unit_classes = (
        get_unit_classes(model)
        if megatron_fsdp_unit_modules is None
        else [_import_unit_class(path) for path in megatron_fsdp_unit_modules]
    )
    check_unit_classes(model, unit_classes, zero_dp_strategy=zero_dp_strategy)
    check_shardable(model, "Megatron-FSDP")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    device = _get_device(device_mesh)
    cp_mesh = get_optional_mesh(device_mesh, CONTEXT_PARALLEL)
    broadcast_from_first_rank(model, device, device_mesh)
    if cp_mesh is not None:
        apply_context_parallel(model, cp_mesh.get_group())
    if activation_checkpointing:
        apply_activation_checkpointing(model, activation_checkpointing)
    if autocast_dtype is not None:
        apply_autocast(model, autocast_dtype, device.type)
    if init_fsdp_with_meta_device:
        spread_parameters(model, device_mesh)
    load_pretrained(model, device, device_mesh)
    materialize(model, device, device_mesh)
    wrapper = apply_megatron_fsdp(
        model,
        device_mesh,
        device=device,
        unit_classes=unit_classes,
        zero_dp_strategy=zero_dp_strategy,
        main_params_dtype=torch.float32 if preserve_fp32_weights else None,
        # weights that are bfloat16 themselves take no gradients of another dtype
        main_grads_dtype=torch.float32 if grad_reduce_in_fp32 and preserve_fp32_weights else None,
        grad_comm_dtype=torch.float32 if grad_reduce_in_fp32 else None,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        report_nan_in_param_grad=report_nan_in_param_grad,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
    )
    if optimizer is not None:
        take_over_optimizer(optimizer, names, wrapper)
    return wrapper, optimizer


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
    """:func:`megatron_fsdp_strategy_parallelize` by the names of when the package was called nvFSDP.

    Args:
        model: As there.
        device_mesh: As there.
        optimizer: As there.
        nvfsdp_unit_modules: There ``megatron_fsdp_unit_modules``.
        tp_shard_plan: Refused: there is no tensor parallelism.
        data_parallel_sharding_strategy: There ``zero_dp_strategy``: ``"no_shard"``, ``"optim"``, ``"optim_grads"`` or
            ``"optim_grads_params"``.
        init_nvfsdp_with_meta_device: There ``init_fsdp_with_meta_device``.
        grad_reduce_in_fp32: As there.
        preserve_fp32_weights: As there.
        overlap_grad_reduce: As there.
        overlap_param_gather: As there.
        check_for_nan_in_grad: There ``report_nan_in_param_grad``.
        average_in_collective: As there.
        disable_bucketing: As there.
        calculate_per_token_loss: As there.
        keep_fp8_transpose_cache_when_using_custom_fsdp: There ``keep_fp8_transpose_cache``.
        nccl_ub: As there.
        fsdp_double_buffer: As there.
        dp_mesh_name: Only ``"data_parallel"``, the axis of :func:`~lightning_fsdp2.create_device_mesh`.
        cp_mesh_name: Only ``"context_parallel"``.
        tp_mesh_name: Only ``"tensor_parallel"``.

    Returns:
        As there.

    Raises:
        ImportError: As there.
        ValueError: As there, and for a plan, another axis or another word.
    """
    if tp_shard_plan is not None:
        raise ValueError(
            f"tp_shard_plan={tp_shard_plan!r}: Megatron-FSDP hangs on tensor parallel models"
            " (https://github.com/NVIDIA/Megatron-LM/issues/5786); use fsdp2_strategy_parallelize."
        )
    axes = {"dp_mesh_name": DATA_PARALLEL, "cp_mesh_name": CONTEXT_PARALLEL, "tp_mesh_name": TENSOR_PARALLEL}
    given = {"dp_mesh_name": dp_mesh_name, "cp_mesh_name": cp_mesh_name, "tp_mesh_name": tp_mesh_name}
    for option, name in given.items():
        if name != axes[option]:
            raise ValueError(
                f"{option}={name!r}: the mesh is one of lightning_fsdp2.create_device_mesh, whose axis is called"
                f" {axes[option]!r}; leave {option} out."
            )
    if data_parallel_sharding_strategy not in _ZERO_DP_STRATEGIES:
        raise ValueError(
            f"data_parallel_sharding_strategy={data_parallel_sharding_strategy!r} is unknown; use"
            f" {', '.join(map(repr, _ZERO_DP_STRATEGIES[:-1]))} or {_ZERO_DP_STRATEGIES[-1]!r}."
        )
    return megatron_fsdp_strategy_parallelize(
        model,
        device_mesh,
        optimizer,
        megatron_fsdp_unit_modules=nvfsdp_unit_modules,
        zero_dp_strategy=_ZERO_DP_STRATEGIES.index(data_parallel_sharding_strategy),
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


def ddp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    *,
    activation_checkpointing: ActivationCheckpointing = False,
    activation_checkpointing_scope: ActivationCheckpointingScope = "all",
    autocast_dtype: torch.dtype | None = None,
    materializes: bool = True,
) -> nn.Module:
    """Give every rank the whole model, for :class:`torch.nn.parallel.DistributedDataParallel` to wrap.

    Args:
        model: As for :func:`fsdp2_strategy_parallelize`, the meta device included. Changed in place.
        device_mesh: Its ranks get the same weights: those of rank 0 where there are any.
        activation_checkpointing: True or ``"full"`` to compute layers again in backward, ``"selective"`` to keep
            their expensive results.
        activation_checkpointing_scope: The parts of the model whose layers it applies to.
        autocast_dtype: None, or that of matrix products in :class:`torch.autocast`.
        materializes: As for :func:`fsdp2_strategy_parallelize`.

    Returns:
        ``model`` itself, on this rank's device.

    Raises:
        ValueError: When the model is sharded.
    """
    _check_not_sharded(model)
    check_peft(model)
    device = _get_device(device_mesh)
    broadcast_from_first_rank(model, device, device_mesh)
    if activation_checkpointing:
        apply_activation_checkpointing(model, activation_checkpointing, scope=activation_checkpointing_scope)
    if autocast_dtype is not None:
        apply_autocast(model, autocast_dtype, device.type)
    if not materializes:
        return model
    load_pretrained(model, device, device_mesh)
    materialize(model, device, device_mesh)
    return model.to(device)


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard every block of every ``ModuleList`` in ``module``, and nothing else.

    The last block of a list stays gathered after forward, since backward needs it first.

    Args:
        module: Changed in place; not sharded itself.
        mesh: 1-D (shard) or 2-D (replicate x shard).
        mp_policy: None for the dtypes of the parameters themselves.
        offload_policy: None keeps shards on the mesh's device.
    """
    apply_layer_sharding(module, mesh, mp_policy=mp_policy or MixedPrecisionPolicy(), offload_policy=offload_policy)


def unshard_fsdp2_model(model: nn.Module) -> AbstractContextManager[None]:
    """Gather all weights of ``model`` in the block, for log-probabilities, ``generate`` or reading parameters.

    All ranks must enter it; writes to the parameters are lost. It holds the whole model at once on every rank.

    Raises:
        RuntimeError: In a backward behind the block that needs its weights.
    """
    return unshard_model(model)


def import_class_from_path(name: str) -> Any:
    """Import a class (or any module-level object) from its dotted path, such as ``"torch.optim.AdamW"``.

    Raises:
        ValueError: When ``name`` is not a dotted path.
        ImportError: When its module does not exist.
        AttributeError: When the module has no such object.
    """
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute or name.startswith("."):
        raise ValueError(f"{name!r} is not a dotted import path; write it like 'torch.optim.AdamW'.")
    return getattr(importlib.import_module(module_name), attribute)


def import_classes_from_paths(class_paths: Sequence[str]) -> list[Any]:
    """Import those of ``class_paths`` that can be imported, in order; the others are skipped with a warning."""
    classes = []
    for path in class_paths:
        try:
            classes.append(import_class_from_path(path))
        except (ValueError, ImportError, AttributeError) as error:
            logger.warning("Could not import %r: %s", path, error)
    return classes


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the tensor parallel plan that transformers has for ``model``: patterns of module names and their styles.

    The class's, the config's and the inner models' entries are merged, and an input embedding or a head that they
    leave whole is sharded over the vocabulary. Styles that torch has are torch's own; all can be given to
    ``torch.distributed.tensor.parallel.parallelize_module`` or to :func:`fsdp2_strategy_parallelize`.

    Raises:
        ValueError: When the model has no plan; it is an ``AssertionError`` too. When the plan names a style that is
            unknown or refused.
    """
    plan = get_plan(model, "hf")
    unmatched = match_plan(model, plan).unmatched  # what other configurations of the family have
    return {name: to_torch_style(style) for name, style in plan.items() if name not in unmatched}


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return the :class:`torch.distributed.tensor.parallel.ParallelStyle` for a style's name in plans of transformers.

    Those that torch lacks are of :mod:`lightning_fsdp2.parallel.tensor.styles`.

    Raises:
        ValueError: When the style is unknown or refused.
    """
    return to_torch_style(get_style(style, style))


def import_plan(plan: PlanOption) -> PlanOption:
    """Replace an import path by what it names.

    Raises:
        TypeError: When it names neither a mapping nor a function.
        ValueError: When there is nothing of that name.
    """
    if not isinstance(plan, str) or plan == "hf":
        return plan
    try:
        found = import_class_from_path(plan)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"tp_plan={plan!r} cannot be imported ({error}); use 'hf', or the path of a dict or a function, such as"
            " 'my_package.plans.my_plan'."
        ) from error
    if isinstance(found, type) or not (isinstance(found, Mapping) or callable(found)):
        raise TypeError(f"tp_plan={plan!r} is a {type(found).__name__}; name a dict or a function that returns one.")
    return found


def _import_unit_class(path: str) -> type[nn.Module]:
    try:
        found = import_class_from_path(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(
            f"megatron_fsdp_unit_modules: {path!r} cannot be imported ({error}); give import paths of module classes,"
            " such as 'transformers.models.llama.modeling_llama.LlamaDecoderLayer'."
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TypeError(f"megatron_fsdp_unit_modules: {path!r} is no class of modules but {found!r}; name one.")
    return found


def resolve_mp_policy(
    mp_policy: MixedPrecisionPolicy | None, param_dtype: torch.dtype = torch.bfloat16
) -> MixedPrecisionPolicy:
    """Fill in what ``mp_policy`` leaves open: gradients are reduced in float32 unless it says otherwise.

    Raises:
        ValueError: For compute in float16 or float64.

    ``reduce_dtype=None`` means ``param_dtype`` up to torch 2.14 and the gradient's dtype from 2.15 on.
    """
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=param_dtype, output_dtype=torch.float32)
    if policy.param_dtype in (torch.float16, torch.float64):
        option = "param_dtype" if mp_policy is None else "mp_policy.param_dtype"
        raise ValueError(
            f"{option}={policy.param_dtype} is not supported: there is no gradient scaler for float16, and float64 is"
            " no mixed precision; use bfloat16 or float32."
        )
    return replace(policy, reduce_dtype=policy.reduce_dtype or torch.float32)


def _check_not_sharded(model: nn.Module) -> None:
    sharder = next(filter(None, map(get_optional_sharder, model.modules())), None)
    if sharder is not None:
        raise ValueError(
            f"{type(model).__name__} was wrapped by {sharder.name} before. A model is parallelised once; pass one that"
            " is not wrapped."
        )
    sharded = [name or "the root" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"{type(model).__name__} holds modules that `fully_shard` was applied to before: {', '.join(sharded[:5])}."
            " A model is parallelised once; pass one that is not sharded."
        )


def _check_reshard(reshard_after_forward: bool | int | None, ranks: int) -> None:
    if isinstance(reshard_after_forward, int) and ranks % int(reshard_after_forward or 1):
        divisors = [str(size) for size in range(2, ranks) if ranks % size == 0]
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} does not divide the {ranks} ranks that parameters are"
            f" sharded over; use {', '.join([*divisors, 'True or False'])}."
        )


def _get_device(device_mesh: DeviceMesh) -> torch.device:
    if device_mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device())

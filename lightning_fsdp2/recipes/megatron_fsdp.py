"""Recipe for NVIDIA's Megatron-FSDP."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.mesh import get_device, get_optional_mesh
from lightning_fsdp2.mesh_axes import check_no_expert_parallel, check_no_pipeline_parallel
from lightning_fsdp2.modules.kept_parameters import find_kept_parameters
from lightning_fsdp2.modules.sharder import check_not_sharded
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.context.apply import apply_context_parallel
from lightning_fsdp2.parallel.data.checks import check_no_hooks, check_shardable
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp2.parallel.layers.autocast import apply_autocast
from lightning_fsdp2.parallel.megatron.driver import take_over_optimizer
from lightning_fsdp2.parallel.megatron.kept_parameters import take_over_kept_parameters
from lightning_fsdp2.parallel.megatron.tensor_parallel import check_foreign_styles
from lightning_fsdp2.parallel.megatron.wrap import (
    apply_megatron_fsdp,
    check_supported,
    check_unit_classes,
    get_unit_classes,
    spread_parameters,
)
from lightning_fsdp2.ranks.whole_values import treat_dtensors_as_whole
from lightning_fsdp2.recipes.fsdp2 import check_unused_plan, maybe_apply_tensor_parallel, warn_of_tensor_parallel_flags
from lightning_fsdp2.recipes.imports import import_unit_classes
from lightning_fsdp2.sizes import CONTEXT_PARALLEL, TENSOR_PARALLEL
from lightning_fsdp2.weights.adapters import check_peft
from lightning_fsdp2.weights.materialize import broadcast_from_first_rank, check_initialized, materialize
from lightning_fsdp2.weights.pretrained import load_pretrained


def parallelize_with_megatron_fsdp(
    model: nn.Module, device_mesh: DeviceMesh, config: MegatronFSDPConfig, optimizer: Optimizer | None = None
) -> tuple[Any, Optimizer | None]:
    """Shard a model with NVIDIA's Megatron-FSDP.

    Args:
        model: See :func:`~lightning_fsdp2.recipes.fsdp2.parallelize_with_fsdp2`. Its dtype is the compute dtype. It is
            changed in place.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`.
        config: Flags of Megatron-FSDP.
        optimizer: Optimizer of the model's parameters that has not taken a step yet. Its parameter groups are kept.

    Returns:
        The wrapper, which must be called in place of ``model``; and ``optimizer``, which now updates the shards.

    Raises:
        ImportError: When ``megatron-fsdp`` is not installed, or is too old.
        TypeError: When a tensor parallel style does not fit its module.
        ValueError: When ``megatron-fsdp`` lacks a flag or handles it wrongly, or when the model has no units or no
            tensor parallel plan.
    """
    check_not_sharded(model)
    check_peft(model)
    check_initialized(model)
    treat_dtensors_as_whole(device_mesh)
    structure = find_structure(model)
    check_supported(device_mesh, config)
    check_no_expert_parallel(device_mesh, "Megatron-FSDP")
    check_no_pipeline_parallel(device_mesh, "Megatron-FSDP")
    tp_mesh = get_optional_mesh(device_mesh, TENSOR_PARALLEL)
    check_unused_plan(tp_mesh, config)
    warn_of_tensor_parallel_flags(tp_mesh, config)
    paths = config.megatron_fsdp_unit_modules
    unit_classes = get_unit_classes(structure) if paths is None else import_unit_classes(paths)
    check_unit_classes(model, unit_classes, zero_dp_strategy=config.zero_dp_strategy)
    check_shardable(model, "Megatron-FSDP")
    check_no_hooks(model)
    kept = find_kept_parameters(model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    device = get_device(device_mesh)
    broadcast_from_first_rank(model, device, device_mesh)
    maybe_apply_tensor_parallel(structure, tp_mesh, config)
    check_foreign_styles(model, config)
    cp_mesh = get_optional_mesh(device_mesh, CONTEXT_PARALLEL)
    if cp_mesh is not None:
        apply_context_parallel(
            structure,
            cp_mesh.get_group(),
            tp_size=1 if tp_mesh is None else tp_mesh.size(),
            sequence_parallel=config.sequence_parallel,
        )
    if config.activation_checkpointing:
        apply_activation_checkpointing(structure, config.activation_checkpointing)
    if config.autocast_dtype is not None:
        apply_autocast(structure, config.autocast_dtype, device.type)
    if config.init_fsdp_with_meta_device:
        spread_parameters(model, device_mesh)
    load_pretrained(model, device, device_mesh)
    materialize(model, device, device_mesh)
    wrapper = apply_megatron_fsdp(model, device_mesh, config, device=device, unit_classes=unit_classes)
    if optimizer is not None:
        take_over_optimizer(optimizer, names, wrapper)
    take_over_kept_parameters(kept, shards_weights=config.zero_dp_strategy == 3)
    return wrapper, optimizer

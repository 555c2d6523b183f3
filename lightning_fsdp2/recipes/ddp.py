"""Recipe that prepares a model for DDP. It does not apply DDP's wrapper."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_fsdp2.config import DDPConfig
from lightning_fsdp2.mesh import get_device
from lightning_fsdp2.modules.kept_parameters import find_kept_parameters, replace_kept_parameters
from lightning_fsdp2.modules.sharder import check_not_sharded
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp2.parallel.layers.autocast import apply_autocast
from lightning_fsdp2.weights.adapters import check_peft
from lightning_fsdp2.weights.materialize import broadcast_from_first_rank, check_initialized, is_meta, materialize
from lightning_fsdp2.weights.pretrained import load_pretrained


def prepare_for_ddp(
    model: nn.Module, device_mesh: DeviceMesh, config: DDPConfig, *, materializes: bool = True
) -> nn.Module:
    """Put the whole model on every rank, ready for :class:`torch.nn.parallel.DistributedDataParallel` to wrap.

    Args:
        model: See :func:`~lightning_fsdp2.recipes.fsdp2.parallelize_with_fsdp2`; it may be on the meta device. It is
            changed in place.
        device_mesh: Mesh of the ranks, which all get the same weights. If the model already has weights, all ranks get
            the weights of rank 0.
        config: Flags of DDP.
        materializes: Whether a model on the meta device gets its weights.

    Returns:
        ``model`` itself, on this rank's device.

    Raises:
        ValueError: When the model is sharded.
    """
    check_not_sharded(model)
    check_peft(model)
    check_initialized(model)
    structure = find_structure(model)
    device = get_device(device_mesh)
    kept = find_kept_parameters(model) if is_meta(model) else []  # those on the meta device are replaced below
    broadcast_from_first_rank(model, device, device_mesh)
    if config.activation_checkpointing:
        apply_activation_checkpointing(
            structure, config.activation_checkpointing, scope=config.activation_checkpointing_scope
        )
    if config.autocast_dtype is not None:
        apply_autocast(structure, config.autocast_dtype, device.type)
    if not materializes:
        return model
    load_pretrained(model, device, device_mesh)
    materialize(model, device, device_mesh)
    replace_kept_parameters(kept)
    return model.to(device)

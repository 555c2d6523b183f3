"""Wrapping of a model with NVIDIA's package megatron-fsdp.

The package keeps parameters, gradients and optimizer states in flat buffers that are sharded over the ranks. It wraps a
model, and switches the model between two sets of parameters. Forward and backward use *raw* parameters, which the
package gathers. The optimizer and checkpoints use *distributed* parameters. These are DTensors that are sharded by
rows. The number of rows may differ between ranks.
"""

import importlib.util
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_fsdp2.compat.megatron import keeps_buffers
from lightning_fsdp2.compat.torch import split_evenly
from lightning_fsdp2.config import MegatronFSDPConfig
from lightning_fsdp2.mesh import get_extra_group, get_fsdp_mesh, get_mesh, get_optional_mesh
from lightning_fsdp2.modules.structure import ModelStructure, get_class_name, get_modules, without_metrics
from lightning_fsdp2.parallel.megatron.driver import Driver
from lightning_fsdp2.parallel.megatron.tensor_parallel import (
    Lift,
    Part,
    build_tp_first_mesh,
    get_parts,
    install_parts,
)
from lightning_fsdp2.ranks.failures import fail_together
from lightning_fsdp2.ranks.pieces import UNEVEN_SHARD, get_packed_placements
from lightning_fsdp2.ranks.whole_tensors import copy_part_, make_dtensor
from lightning_fsdp2.ranks.whole_values import treat_dtensors_as_whole
from lightning_fsdp2.sizes import DP_CP, DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL

HAVE_MEGATRON_FSDP = importlib.util.find_spec("megatron_fsdp") is not None

DEVICE_TYPES = ("cuda",)
"""Types of devices on which megatron-fsdp runs."""

_INSTALL = 'pip install "lightning-fsdp2[megatron]"'

_OPTIONS = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "report_nan_in_param_grad",
    "disable_bucketing",
    "calculate_per_token_loss",
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
)
"""Flags that are passed to ``megatron_fsdp.fully_shard_model`` under the same names."""

_NCCL_ALLOCATORS = ("megatron.core.nccl_allocator", "apex.contrib.nccl_allocator")
"""Python modules that can allocate NCCL user buffers. With ``nccl_ub=True``, megatron-fsdp needs one of them."""


def import_megatron_fsdp() -> Any:
    """Import and return the package ``megatron_fsdp``.

    Raises:
        ImportError: If the package is not installed or is too old.
    """
    if not HAVE_MEGATRON_FSDP:
        raise ImportError(f"Megatron-FSDP needs the package megatron-fsdp, which is not installed: {_INSTALL}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*(Transformer Engine|Apex)")
        import megatron_fsdp
    if not hasattr(megatron_fsdp, "MixedPrecisionPolicy"):
        raise ImportError(f"megatron-fsdp {_get_version()} is too old: {_INSTALL}.")
    return megatron_fsdp


# ---------------------------------------------------------------------- before wrapping


def check_supported(device_mesh: DeviceMesh, config: MegatronFSDPConfig) -> None:
    """Refuse flags that megatron-fsdp handles wrongly up to version 0.6.1, or that cannot work with this mesh.

    Args:
        device_mesh: See :func:`apply_megatron_fsdp`.
        config: The flags.

    Raises:
        ImportError: See :func:`import_megatron_fsdp`.
        ValueError: If a flag is refused. The message names the flag, the reason and the remedy.
    """
    import_megatron_fsdp()
    zero_dp_strategy = config.zero_dp_strategy
    if device_mesh.device_type not in DEVICE_TYPES:
        raise ValueError(
            f"Megatron-FSDP runs on {' or '.join(DEVICE_TYPES)} devices, not on {device_mesh.device_type!r}; use"
            " FSDP2Strategy or DDPStrategy instead."
        )
    replicas, shards = (get_mesh(device_mesh, axis).size() for axis in (DP_REPLICATE, DP_SHARD_CP))
    if replicas > 1 and (shards == 1 or zero_dp_strategy == 0):
        raise ValueError(
            f"dp_replicate_size={replicas} needs sharded parameters, but with zero_dp_strategy={zero_dp_strategy} and"
            f" {shards} rank(s) to shard over, nothing is sharded. Use dp_replicate_size=1. To keep all parameters"
            " whole on each rank, also use zero_dp_strategy=0."
        )
    if config.init_fsdp_with_meta_device and zero_dp_strategy == 0:
        raise ValueError(
            "init_fsdp_with_meta_device=True initialises a model shard by shard, but zero_dp_strategy=0 shards nothing;"
            " leave out one of the two options."
        )
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if not getattr(config, name) and zero_dp_strategy in (1, 2):
            raise ValueError(
                f"{name}=False: with zero_dp_strategy={zero_dp_strategy}, megatron-fsdp then reduces gradients twice or"
                " computes with outdated weights (https://github.com/NVIDIA/Megatron-LM/pull/6357). Leave it True, or"
                " use zero_dp_strategy 0 or 3."
            )
    if (config.fsdp_double_buffer or config.nccl_ub) and not keeps_buffers():
        flag = "fsdp_double_buffer" if config.fsdp_double_buffer else "nccl_ub"
        raise ValueError(
            f"{flag}=True: megatron-fsdp {_get_version()} computes wrong gradients with two buffers, because backward"
            f" may read the weights of another unit. Use {flag}=False, or install megatron-fsdp 0.6.0 or later."
        )
    if config.nccl_ub and not any(_is_installed(name) for name in _NCCL_ALLOCATORS):
        raise ValueError(
            f"nccl_ub=True needs {' or '.join(_NCCL_ALLOCATORS)}, but neither is installed; use nccl_ub=False."
        )


def get_unit_classes(structure: ModelStructure) -> list[type[nn.Module]]:
    """Return the classes of the modules that become FSDP units: all layers, and torch's attention modules."""
    # the projection inside torch's attention cannot be a unit, because the attention reads the projection's weights
    # without calling the projection
    attentions = [module for module in structure.modules if isinstance(module, nn.MultiheadAttention)]
    return list({type(module): None for module in [*structure.layers, *attentions]})


def check_unit_classes(model: nn.Module, classes: Sequence[type[nn.Module]], *, zero_dp_strategy: int) -> None:
    """Refuse classes that cannot be units of ``model``, and an empty list with ``zero_dp_strategy=3``.

    Raises:
        ValueError: If a class or the empty list is refused. The message says which classes to use.
    """
    for unit_class in classes:
        if issubclass(unit_class, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"megatron_fsdp_unit_modules: {unit_class.__name__} is never called, so its weights would never be"
                " gathered; list the classes of the modules inside it."
            )
        if not any(isinstance(module, unit_class) for module in model.modules()):
            raise ValueError(
                f"megatron_fsdp_unit_modules: {get_class_name(model)} contains no {unit_class.__module__}."
                f"{unit_class.__qualname__}; list classes of modules in the model, such as the class of its layers."
            )
    if zero_dp_strategy == 3 and not classes:
        raise ValueError(
            f"zero_dp_strategy=3 gathers parameters unit by unit, but {get_class_name(model)} has no list of layers"
            " that could be units. List submodule classes in MegatronFSDPConfig(megatron_fsdp_unit_modules=[...]),"
            " or use zero_dp_strategy=2."
        )


def spread_parameters(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Convert parameters on the meta device to sharded DTensors, which are still on the meta device.

    As with FSDP2, they can then be initialised module by module, or loaded from files slice by slice.

    Raises:
        ValueError: If no parameter is on the meta device.
    """
    mesh = get_fsdp_mesh(device_mesh)
    placements = [Replicate() if axis == DP_REPLICATE else Shard(0) for axis in mesh.mesh_dim_names or ()]
    has_tp = get_optional_mesh(device_mesh, TENSOR_PARALLEL) is not None
    tp_first = build_tp_first_mesh(device_mesh, DP_SHARD_CP) if has_tp else None
    spread: dict[Tensor, nn.Parameter] = {}
    for module in get_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in spread:
                if tp_first is None:
                    sharded = distribute_tensor(parameter.detach(), mesh, placements if parameter.ndim else None)
                else:
                    sharded = _shard_part(cast(DTensor, parameter), tp_first)
                spread[parameter] = nn.Parameter(sharded, parameter.requires_grad)
                spread[parameter].__dict__.update(parameter.__dict__)
            module._parameters[name] = spread[parameter]
    if not spread:
        raise ValueError(
            f"init_fsdp_with_meta_device=True, but {get_class_name(model)} has no parameter on the meta device; build"
            ' the model inside `torch.device("meta")` in `configure_model`, or leave out the flag.'
        )


def _shard_part(parameter: DTensor, mesh: DeviceMesh) -> DTensor:
    """Shard this rank's part of a tensor parallel parameter over the data parallel ranks.

    If dim 0 packs several projections, this rank's part holds a piece of each. The part is then sharded along dim 1,
    because DTensor cannot shard the pieces further along dim 0.
    """
    dim = 1 if any(placement.dim == 0 for placement in get_packed_placements(parameter).values()) else 0
    shards = split_evenly(parameter.to_local().detach(), mesh[DP_SHARD_CP].size(), dim)
    local = shards[mesh.get_local_rank(DP_SHARD_CP)]
    return make_dtensor(local, mesh, [Replicate(), *parameter.placements, Shard(dim)], parameter.shape)


# ---------------------------------------------------------------------- wrapping


def apply_megatron_fsdp(
    model: nn.Module,
    device_mesh: DeviceMesh,
    config: MegatronFSDPConfig,
    *,
    device: torch.device,
    unit_classes: Sequence[type[nn.Module]],
) -> Any:
    """Wrap ``model`` with Megatron-FSDP, and put its distributed parameters into the model.

    Args:
        model: Model on ``device``, in its compute dtype. It has the same weights on every rank, or was sharded by
            :func:`spread_parameters`.
        device_mesh: Mesh from :func:`~lightning_fsdp2.create_device_mesh`.
        config: The flags.
        device: Device of this rank.
        unit_classes: Classes of the modules that become units. The parameters of a unit are gathered together.

    Returns:
        The ``megatron_fsdp.MegatronFSDP`` wrapper, which must be called instead of ``model``.

    Raises:
        ValueError: If the installed version lacks an option that is set, or cannot cut the model's parameters into rows
            for this number of ranks.
    """
    package = import_megatron_fsdp()
    options = _build_options(package, device_mesh, config)
    tp_mesh = get_optional_mesh(device_mesh, TENSOR_PARALLEL)
    parts = {} if tp_mesh is None else get_parts(model, tp_mesh)
    attributes = {name: dict(p.__dict__) for name, p in model.named_parameters() if p.__dict__}
    if tp_mesh is not None:
        install_parts(model, tp_mesh)
    weights = _take_spread_parameters(model, device, parts)
    units = [module for module in model.modules() if isinstance(module, tuple(unit_classes))]
    numels = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    groups = get_mesh(device_mesh, (DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL)).get_all_groups()
    with without_metrics(model):
        # megatron-fsdp may raise an error on only some ranks. With `nccl_ub`, the other ranks then wait in its
        # barriers, so the ranks cannot exchange their errors.
        with fail_together([] if config.nccl_ub else groups), _explain_rows(device_mesh):
            wrapper = package.fully_shard_model(
                model,
                dp_shard_dim=UNEVEN_SHARD,
                tp_dim=TENSOR_PARALLEL,
                fsdp_unit_modules=list(unit_classes),
                zero_dp_strategy=config.zero_dp_strategy,
                device=device,
                mixed_precision_policy=_build_precision_policy(package, config),
                **options,
            )
        driver = Driver(wrapper, None if tp_mesh is None else Lift(device_mesh, parts))
    if config.zero_dp_strategy >= 2 and numels:
        # By default, megatron-fsdp up to 0.6.1 prefetches at least 5e8 elements, so it gathers all weights of most
        # models at once. Prefetch only one unit, and start to reduce gradients when the gradients of two units are
        # waiting.
        wrapper.suggested_AG_prefetch_size = sum(numels) // len(numels)
        wrapper.suggested_RS_queue_capacity = 2 * wrapper.suggested_AG_prefetch_size
    _fill(driver, weights, attributes)
    return wrapper


@contextmanager
def _explain_rows(device_mesh: DeviceMesh) -> Iterator[None]:
    """Explain the error that megatron-fsdp up to 0.6.1 raises if it cuts a buffer within a row of a parameter."""
    try:
        yield
    except RuntimeError as error:
        if "is invalid for input of size" not in str(error):
            raise
        raise ValueError(
            f"megatron-fsdp cannot shard this model over {get_mesh(device_mesh, DP_SHARD_CP).size()} data parallel"
            " ranks: some parameters that are gathered together have rows of different sizes, and megatron-fsdp would"
            f" split one of these parameters in the middle of a row ({error}). Use another number of data parallel"
            " ranks, zero_dp_strategy=0, or FSDP2Strategy."
        ) from error


def _build_options(package: Any, device_mesh: DeviceMesh, config: MegatronFSDPConfig) -> dict[str, Any]:
    """Build the arguments of ``megatron_fsdp.fully_shard_model`` that depend on its version or on the mesh.

    Raises:
        ValueError: If the installed version lacks an option that is set.
    """
    known = inspect.signature(package.fully_shard_model).parameters
    options: dict[str, Any] = {name: getattr(config, name) for name in _OPTIONS}
    for name, value in options.items():
        if value and name not in known:
            raise ValueError(
                f"{name}={value!r}: megatron-fsdp {_get_version()} has no such option; leave the option out, or install"
                f" a version that has it: {_INSTALL}."
            )
    if "fsdp_group_ag" in known and config.zero_dp_strategy > 0:
        shards = dist.get_process_group_ranks(get_mesh(device_mesh, DP_SHARD_CP).get_group())
        # use a separate group for all-gathers: NCCL runs the collectives of a group in order, so in a shared group,
        # all-gathers would wait for reduce-scatters
        gathers = get_extra_group(device_mesh, "all-gathers of Megatron-FSDP", shards)
        options |= {"fsdp_group_ag": gathers, "expt_fsdp_group_ag": gathers}
    mesh = _build_wrapper_mesh(device_mesh)
    # pass the mesh twice, because megatron-fsdp uses `expt_device_mesh` for parameters with ".experts." in their names
    options |= {"device_mesh": mesh, "expt_device_mesh": mesh}
    if get_mesh(device_mesh, DP_REPLICATE).size() > 1:
        replicas = get_mesh(device_mesh, DP_CP).get_group()
        options |= {"dp_outer_dim": DP_REPLICATE, "hybrid_fsdp_group": replicas, "hybrid_fsdp_expt_group": replicas}
    return {name: value for name, value in options.items() if name in known}


def _build_wrapper_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """Build the mesh for the wrapper.

    The wrapper's DTensors are sharded unevenly. The special name of the shard axis lets this package recognise such
    DTensors. megatron-fsdp also requires a tensor parallel axis. This axis has a single rank, because tensor
    parallelism is hidden from megatron-fsdp.
    """
    axes = (DP_REPLICATE, DP_SHARD_CP, TENSOR_PARALLEL)
    view = get_mesh(device_mesh, axes)
    groups, ranks = [view.get_group(axis) for axis in axes], view.mesh
    if view.size(2) > 1:
        groups[2] = get_extra_group(device_mesh, "tensor parallelism of Megatron-FSDP", [dist.get_rank()])
        ranks = ranks[..., view.get_local_rank(2)].unsqueeze(-1)
    names = (DP_REPLICATE, UNEVEN_SHARD, TENSOR_PARALLEL)
    mesh = DeviceMesh.from_group(groups, view.device_type, mesh=ranks, mesh_dim_names=names)
    treat_dtensors_as_whole(mesh)
    return mesh


def _build_precision_policy(package: Any, config: MegatronFSDPConfig) -> Any:
    """Build megatron-fsdp's mixed-precision policy: dtypes of main weights, gradient sums and communication."""
    main = torch.float32 if config.preserve_fp32_weights else None
    reduced = torch.float32 if config.grad_reduce_in_fp32 else None
    # without float32 main weights, the optimizer updates bfloat16 weights directly, which needs bfloat16 gradients
    added_up = None if main is None else reduced
    return package.MixedPrecisionPolicy(main_params_dtype=main, main_grads_dtype=added_up, grad_comm_dtype=reduced)


def _take_spread_parameters(model: nn.Module, device: torch.device, parts: dict[str, Part]) -> dict[str, DTensor]:
    """Replace parameters that are DTensors with placeholders without values, and return the DTensors by name."""
    taken: dict[str, Any] = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    shapes = {name: parts[name].local_shape if name in parts else parameter.shape for name, parameter in taken.items()}
    empty = {parameter: _make_without_memory(parameter, shapes[name], device) for name, parameter in taken.items()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in empty:
                module._parameters[name] = empty[parameter]
    return taken


def _make_without_memory(like: DTensor, shape: torch.Size, device: torch.device) -> nn.Parameter:
    """Make a parameter with this ``shape`` and the dtype of ``like``, but with memory for only one element.

    All elements share this memory. megatron-fsdp copies the parameter into its buffers and then frees it.
    """
    element = torch.zeros(1, dtype=like.dtype, device=device)
    # do not use a view such as `element.expand(...)`, because megatron-fsdp would not free a view
    tensor = torch.empty(0, dtype=like.dtype, device=device)
    return nn.Parameter(tensor.set_(element.untyped_storage(), 0, shape, [0] * len(shape)), like.requires_grad)


@torch.no_grad()
def _fill(driver: Driver, weights: dict[str, DTensor], attributes: dict[str, dict[str, Any]]) -> None:
    """Give the distributed parameters their weights, and the attributes that users set, such as ``_no_weight_decay``.

    Args:
        driver: Driver of the Megatron-FSDP wrapper that holds the distributed parameters.
        weights: Weights by name, for the parameters that were passed to megatron-fsdp without values.
        attributes: Attributes of the parameters before wrapping, by name. megatron-fsdp drops them.
    """
    driver.install_distributed_parameters()
    parameters = dict(driver.wrapper.module.named_parameters())
    for name, weight in weights.items():
        copy_part_(parameters[name], weight)
    for name, values in attributes.items():
        parameters[name].__dict__.update(values)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # raised if the parent package of `module` is missing
        return False


def _get_version() -> str:
    try:
        return version("megatron-fsdp")
    except PackageNotFoundError:
        return "(of unknown version)"

"""Description of a model's sharding over any number of ranks, computed in one process without weights in memory.

The model is built on the meta device, as on rank 0 of a simulated world, and sharded by the same code as in training.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from lightning_fsdp2.config import DDPConfig, DistributedConfig, FSDP2Config, MegatronFSDPConfig
from lightning_fsdp2.managers import FSDP2Manager
from lightning_fsdp2.managers.dtypes import get_dtypes
from lightning_fsdp2.mesh import get_fsdp_mesh, get_mesh, get_optional_mesh
from lightning_fsdp2.mesh_axes import AxisNames, get_mesh_axes
from lightning_fsdp2.modules.structure import ModelStructure, find_structure, get_class_name
from lightning_fsdp2.parallel.data.units import Unit, build_unit_plan
from lightning_fsdp2.parallel.layers.float8_conversion import Conversion, get_optional_conversion
from lightning_fsdp2.parallel.megatron.wrap import check_unit_classes, get_unit_classes, spread_parameters
from lightning_fsdp2.plan.simulation.model import build_model
from lightning_fsdp2.plan.simulation.workers import run_in_processes
from lightning_fsdp2.recipes.fsdp2 import check_unused_plan, maybe_apply_tensor_parallel, warn_of_tensor_parallel_flags
from lightning_fsdp2.recipes.imports import import_class_from_path
from lightning_fsdp2.sizes import DP_REPLICATE, EFSDP, EXPERT_PARALLEL, PIPELINE_PARALLEL, TENSOR_PARALLEL
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True, kw_only=True)
class ParameterDescription:
    """A parameter, and rank 0's shard of it. No rank holds a larger shard."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool
    placements: dict[str, str]
    """Placement on each mesh axis with several ranks: ``"whole"``, or the dim that is sharded, such as ``"dim 0"``."""

    shard_shape: tuple[int, ...]
    shard_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnitDescription:
    """FSDP unit: a group of parameters that are gathered together."""

    modules: list[str]
    parameters: list[ParameterDescription]
    reshard_after_forward: bool | int
    gathered_bytes: int
    """Bytes of all parameters while the unit computes, in the dtype of the gathered weights; 0 if the parameters are
    not sharded over data parallel ranks."""

    shard_bytes: int
    """Bytes of the unit that rank 0 holds."""

    accumulated_bytes: int = 0
    """Bytes of the unit's gradients between the micro-batches of a step, if the run accumulates gradients without
    sharding them (``defer_fsdp_grad_sync``)."""

    is_inner: bool = False
    """Whether the unit lies inside the unit before it, as experts do under expert parallelism."""

    pipeline_rank: int = 0
    """Pipeline rank that holds the unit."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """Sharding of a model over a mesh.

    Sizes in bytes are those on the first rank, or on the first rank of each pipeline rank. No other rank holds more.
    """

    model: str
    strategy: str
    mesh: dict[str, int]
    precision: dict[str, str]
    """Dtypes by role: ``weights`` that are updated, ``gathered`` weights, ``compute``, and gradient ``reduction``."""

    units: list[UnitDescription]
    """Units in the order of registration, which for Hugging Face models is the order of forward."""

    notes: list[str]

    expert_mesh: dict[str, int]
    """Axes of the mesh of experts, which has the same ranks as ``mesh``. Empty without expert parallelism."""

    float8: Conversion | None = None
    """Linear layers that multiply in float8, and those that do not; None without float8."""

    @property
    def totals(self) -> dict[str, int]:
        """Totals of the model: the numbers of ranks and parameters, and the bytes on the rank that holds the most."""
        # two pipeline ranks may hold copies of a tied parameter
        parameters = {parameter.name: parameter for unit in self.units for parameter in unit.parameters}.values()
        weights, gradients, accumulated = Counter[int](), Counter[int](), Counter[int]()
        for unit in self.units:
            weights[unit.pipeline_rank] += sum(parameter.shard_bytes for parameter in unit.parameters)
            gradients[unit.pipeline_rank] += sum(p.shard_bytes for p in unit.parameters if p.is_trained)
            accumulated[unit.pipeline_rank] += unit.accumulated_bytes
        return {
            "ranks": math.prod(self.mesh.values()),
            "parameters": sum(math.prod(parameter.shape) for parameter in parameters),
            "trained_parameters": sum(math.prod(p.shape) for p in parameters if p.is_trained),
            "weight_bytes": max(weights.values(), default=0),
            "gradient_bytes": max(gradients.values(), default=0),
            "accumulated_gradient_bytes": max(accumulated.values(), default=0),
            "largest_gathered_bytes": max((unit.gathered_bytes for unit in self.units), default=0),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the description as plain values for JSON."""
        return {**asdict(self), "totals": self.totals}


def describe(trainer: "Trainer", module: "LightningModule", *, world_size: int) -> Description:
    """Describe how the Trainer's strategy would shard ``module`` over ``world_size`` ranks.

    Args:
        trainer: Trainer with one of this package's strategies. Its ``num_nodes`` is used; its devices are ignored.
        module: Module that was built on the meta device, or that builds its model there in ``configure_model``. It is
            sharded in place. Neither the trainer nor the module can be used afterwards.
        world_size: Number of ranks.

    Returns:
        The description.

    Raises:
        RuntimeError: When this process belongs to a process group.
        TypeError: When the strategy is not from this package, or ``module`` shards itself.
        ValueError: When the strategy would refuse these sizes or this model.
    """
    strategy: Any = trainer.strategy
    if not isinstance(strategy, MeshStrategy):
        raise TypeError(
            f"describe supports the strategies of lightning_fsdp2, not {type(strategy).__name__}; use one of them,"
            " such as trainer.strategy=fsdp2."
        )
    pipeline_ranks = strategy.asked_sizes.resolve(world_size=world_size, num_nodes=trainer.num_nodes).pp
    describe_rank = partial(_describe_rank, trainer, module, world_size)
    if pipeline_ranks == 1:
        return describe_rank(0)
    tasks = [partial(describe_rank, place * world_size // pipeline_ranks) for place in range(pipeline_ranks)]
    stages = [description for _, description in sorted(run_in_processes(tasks), key=itemgetter(0))]
    units = [replace(unit, pipeline_rank=place) for place, stage in enumerate(stages) for unit in stage.units]
    return replace(stages[0], units=units)


def _describe_rank(trainer: Any, module: Any, world_size: int, rank: int) -> Description:
    strategy = trainer.strategy
    with build_model(trainer, module, world_size=world_size, num_nodes=trainer.num_nodes, rank=rank) as mesh:
        strategy.precision_plugin.convert_module(module)
        if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
            raise TypeError(
                f"{get_class_name(module)} shards itself in `configure_model`, but describe shows only how a strategy"
                " shards; leave the sharding to the strategy."
            )
        dtypes = get_dtypes(strategy.manager, module)
        _shard(strategy.manager, module, mesh)
        return describe_sharded(strategy, module, mesh, dtypes)


def describe_sharded(
    strategy: MeshStrategy[Any], module: nn.Module, mesh: DeviceMesh, dtypes: dict[str, torch.dtype]
) -> Description:
    """Describe a module that is already sharded.

    Args:
        strategy: Strategy of the run.
        module: Sharded module, on any device.
        mesh: Mesh that the module was sharded over.
        dtypes: Result of :func:`~lightning_fsdp2.managers.dtypes.get_dtypes` for the module before it was sharded.
    """
    structure = find_structure(module)
    return Description(
        model=_get_model_name(structure),
        strategy=type(strategy).__name__,
        mesh=_get_sizes(mesh),
        precision={role: _get_name(dtype) for role, dtype in dtypes.items()},
        units=_describe_units(module, mesh, _get_units(structure, strategy.config, mesh), strategy.config, dtypes),
        notes=_get_notes(strategy.config, mesh),
        expert_mesh=_get_expert_sizes(mesh),
        float8=get_optional_conversion(module),
    )


def _shard(manager: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard ``module`` as far as possible without devices."""
    config = manager.config
    if isinstance(manager, FSDP2Manager):
        # turn off compilation, which may need CUDA and does not affect how the module is sharded
        manager.config = replace(config, enable_async_tensor_parallel=False, enable_compile=False)
        manager.parallelize(module, materializes=False)
    if not isinstance(config, MegatronFSDPConfig):
        return
    if config.zero_dp_strategy in (1, 2):
        raise ValueError(
            f"describe supports zero_dp_strategy 0 and 3, not {config.zero_dp_strategy}: with that value, Megatron-FSDP"
            " shards only gradients or optimizer states, in buffers that need CUDA. Use 0 or 3 here."
        )
    structure, tp_mesh = find_structure(module), get_optional_mesh(mesh, TENSOR_PARALLEL)
    check_unused_plan(tp_mesh, config)
    warn_of_tensor_parallel_flags(tp_mesh, config)
    classes = _get_unit_classes(structure, config)
    check_unit_classes(module, classes, zero_dp_strategy=config.zero_dp_strategy)
    if config.preserve_fp32_weights:
        module.float()
    maybe_apply_tensor_parallel(structure, tp_mesh, config)
    if config.zero_dp_strategy == 3:
        spread_parameters(module, mesh)


def _get_units(structure: ModelStructure, config: DistributedConfig, mesh: DeviceMesh) -> list[Unit]:
    """Return the FSDP units, each with the modules whose parameters are gathered together."""
    if isinstance(config, FSDP2Config):
        axes = get_mesh_axes(mesh, AxisNames())
        reshards = config.reshard_after_forward
        if axes.pp is not None and reshards is None:
            reshards = False  # the runner of the stages keeps units gathered from micro-batch to micro-batch
        return build_unit_plan(structure, reshards, mesh=axes.fsdp, expert_mesh=axes.experts).units
    if isinstance(config, DDPConfig):
        tops, is_sharded = structure.layers, False
    else:
        classes, is_sharded = tuple(_get_unit_classes(structure, config)), config.zero_dp_strategy == 3
        tops = [inner for inner in structure.modules if isinstance(inner, classes)]
    return [Unit(modules=[top], reshard_after_forward=is_sharded) for top in (*tops, structure.root)]


def _get_unit_classes(structure: ModelStructure, config: MegatronFSDPConfig) -> list[type[nn.Module]]:
    paths = config.megatron_fsdp_unit_modules
    return get_unit_classes(structure) if paths is None else [import_class_from_path(path) for path in paths]


def _describe_units(
    module: nn.Module, mesh: DeviceMesh, units: list[Unit], config: DistributedConfig, dtypes: dict[str, torch.dtype]
) -> list[UnitDescription]:
    names = {inner: name for name, inner in module.named_modules()}
    positions = {inner: index for index, inner in enumerate(names)}
    units = sorted(units, key=lambda unit: positions[unit.modules[0]])
    unit_of = {top: unit for unit in units for top in unit.modules}
    parameters: dict[Unit, list[tuple[str, Tensor]]] = {unit: [] for unit in units}
    for name, parameter in module.named_parameters():
        parameters[_get_unit(name, module, unit_of)].append((name, parameter))
    inner = {unit for outer in units for unit in outer.inner}
    is_single = math.prod(_get_sizes(mesh).values()) == 1  # a single rank reduces after every micro-batch
    accumulates_whole = isinstance(config, FSDP2Config) and config.defer_fsdp_grad_sync and not is_single
    descriptions = []
    for unit in (unit for unit in units if parameters[unit]):
        described = [_describe_parameter(name, parameter, mesh) for name, parameter in parameters[unit]]
        descriptions.append(
            UnitDescription(
                modules=[names[top] or "(root)" for top in unit.modules],
                parameters=described,
                reshard_after_forward=unit.reshard_after_forward,
                gathered_bytes=sum(_get_gathered_numel(p) for _, p in parameters[unit]) * dtypes["gathered"].itemsize,
                shard_bytes=sum(parameter.shard_bytes for parameter in described),
                accumulated_bytes=(
                    sum(_get_gathered_numel(p) for _, p in parameters[unit] if p.requires_grad)
                    * dtypes["reduction"].itemsize
                    * accumulates_whole
                ),
                is_inner=unit in inner,
            )
        )
    return descriptions


def _get_unit(name: str, module: nn.Module, unit_of: dict[nn.Module, Unit]) -> Unit:
    """Return the unit to which the parameter called ``name`` belongs.

    This is the unit of the innermost module that contains the parameter and has a unit of its own.
    """
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        if unit := unit_of.get(module.get_submodule(owner)):
            return unit
    raise KeyError(name)


def _describe_parameter(name: str, parameter: Tensor, mesh: DeviceMesh) -> ParameterDescription:
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return ParameterDescription(
        name=name,
        shape=tuple(parameter.shape),
        dtype=_get_name(parameter.dtype),
        is_trained=parameter.requires_grad,
        placements=_get_placements(parameter, mesh),
        shard_shape=tuple(shard.shape),
        shard_bytes=shard.numel() * shard.itemsize,
    )


def _get_placements(parameter: Tensor, mesh: DeviceMesh) -> dict[str, str]:
    """Return the placement of a parameter on each axis with several ranks, with tensor parallelism last."""
    axes: list[Any] = []
    if not isinstance(parameter, DTensor) or not _is_gathered(parameter):
        data = get_fsdp_mesh(mesh)
        axes += zip(cast(Any, data).mesh_dim_names, data.shape, [Replicate()] * data.ndim, strict=True)
    if isinstance(parameter, DTensor):
        own = parameter.device_mesh
        axes += zip(cast(Any, own).mesh_dim_names, own.shape, parameter.placements, strict=True)
    return {
        axis: "whole" if placement.is_replicate() else f"dim {placement.dim}"
        for axis, size, placement in sorted(axes, key=lambda described: described[0] == TENSOR_PARALLEL)
        if size > 1
    }


def _is_gathered(parameter: DTensor) -> bool:
    """Return whether a parameter is sharded over the data parallel ranks.

    This is also True if there is only one data parallel rank, whose shard is the whole parameter.
    """
    return parameter.device_mesh.mesh_dim_names != (TENSOR_PARALLEL,)


def _get_gathered_numel(parameter: Tensor) -> int:
    """Count the elements of a parameter that a rank gathers for its computation.

    A tensor parallel rank gathers only its own part, and an expert parallel rank only its own experts. For a parameter
    that is not sharded over data parallel ranks, the count is 0.
    """
    if not isinstance(parameter, DTensor) or not _is_gathered(parameter):
        return 0
    shape, mesh = list(parameter.shape), parameter.device_mesh
    for axis, size, placement in zip(cast(Any, mesh).mesh_dim_names, mesh.shape, parameter.placements, strict=True):
        if axis in (TENSOR_PARALLEL, EXPERT_PARALLEL) and not placement.is_replicate():
            dim = cast(Any, placement).dim
            shape[dim] = math.ceil(shape[dim] / size)
    return math.prod(shape)


def _get_model_name(structure: ModelStructure) -> str:
    name, models = get_class_name(structure.root), [parts.module for parts in structure.models]
    inner = [get_class_name(model) for model in models if model != structure.root]
    return f"{name} ({', '.join(inner)})" if inner else name


def _get_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each axis. The pipeline axis is left out if there is one stage."""
    pipeline = get_optional_mesh(mesh, PIPELINE_PARALLEL)
    sizes = dict(zip(cast(Any, mesh).mesh_dim_names, mesh.shape, strict=True))
    return sizes if pipeline is None else {PIPELINE_PARALLEL: pipeline.size(), **sizes}


def _get_expert_sizes(mesh: DeviceMesh) -> dict[str, int]:
    if get_optional_mesh(mesh, EXPERT_PARALLEL) is None:
        return {}
    return {axis: get_mesh(mesh, axis).size() for axis in (DP_REPLICATE, EFSDP, EXPERT_PARALLEL)}


def _get_notes(config: DistributedConfig, mesh: DeviceMesh) -> list[str]:
    notes = []
    replicas = get_mesh(mesh, DP_REPLICATE).size()
    if replicas > 1:
        notes.append(f"The {replicas} ranks of dp_replicate hold the same shards.")
    if isinstance(config, FSDP2Config) and isinstance(config.offload_policy, CPUOffloadPolicy):
        notes.append("Weights, gradients and optimizer states are in host memory between uses.")
    if isinstance(config, DDPConfig):
        notes.append("Every rank holds the whole model. DDP reduces gradients in buckets, last layers first.")
    if isinstance(config, MegatronFSDPConfig):
        notes.append(
            f"zero_dp_strategy={config.zero_dp_strategy}: Megatron-FSDP packs parameters into buffers on CUDA, which"
            " describe cannot see. A shard may be larger or smaller than shown here; the sum hardly differs."
        )
    return notes


def _get_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

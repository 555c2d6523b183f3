"""Simulation of one rank's training step, without devices, other ranks or tensor values.

The Trainer's own loop runs the strategy's own step on a module that was sharded as in training. Only the process group
and the tensors are fake. Collectives of torch's fake process group return at once. Fake tensors have shapes and dtypes,
but no memory.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp2.compat.lightning import begin_batch, call_module_hook, log_batch
from lightning_fsdp2.compat.torch import is_in_backward, tree_leaves, tree_map_only
from lightning_fsdp2.compat.torch_simulation import DATA_DEPENDENT_ERRORS, FakeTensorMode, with_values
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences
from lightning_fsdp2.managers.dtypes import get_dtypes
from lightning_fsdp2.mesh import get_mesh, get_views
from lightning_fsdp2.modules.structure import find_structure, get_class_name
from lightning_fsdp2.parallel.context.forward import assume_documents
from lightning_fsdp2.parallel.pipeline.apply import get_optional_pipeline
from lightning_fsdp2.parallel.pipeline.run import PipelineRun
from lightning_fsdp2.plan.simulation.even_routing import assume_even_routing
from lightning_fsdp2.plan.simulation.fake_managers import get_buckets, replace_manager
from lightning_fsdp2.plan.simulation.fused_casts import assume_fused_casts
from lightning_fsdp2.plan.simulation.model import build_model
from lightning_fsdp2.plan.simulation.recorder import (
    ACTIVATIONS,
    COMMUNICATION_BUFFERS,
    GRADIENTS,
    OPTIMIZER_STATES,
    WEIGHTS,
    Group,
    Recording,
    StepRecorder,
)
from lightning_fsdp2.plan.simulation.sharding import Description, describe_sharded
from lightning_fsdp2.plan.simulation.stages import (
    Boundary,
    get_boundary,
    get_layers,
    record_actions,
    simulate_neighbours,
)
from lightning_fsdp2.sizes import EFSDP, EXPERT_PARALLEL, TENSOR_PARALLEL
from lightning_fsdp2.strategies import DDPStrategy, FSDP2Strategy
from lightning_fsdp2.strategies.pipelining import check_pipelining

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_MICRO_BATCHES = 3
"""Number of micro-batches that represent an accumulation. The first creates gradients, the last reduces them, and one
in the middle stands for all others."""


@dataclass(frozen=True)
class Simulation:
    """Result of simulating a step on one rank."""

    description: Description
    recording: Recording
    is_even: bool
    """Whether all ranks, or all ranks of a pipeline stage, hold shards of the same sizes."""

    layers: tuple[int, ...] = ()
    """Number of layers of each pipeline stage; empty without pipeline parallelism."""

    boundary: Boundary | None = None
    """Boundary between the pipeline's stages; None without pipeline parallelism."""


def simulate(
    trainer: "Trainer",
    module: "LightningModule",
    batch: Any,
    *,
    world_size: int,
    num_nodes: int = 1,
    rank: int = 0,
    load: int = 1,
    boundary: Boundary | None = None,
    change: Callable[[nn.Module], None] = lambda module: None,
) -> Simulation:
    """Simulate an optimizer step on one of ``world_size`` ranks, after a first step that creates the optimizer states.

    Args:
        trainer: Trainer with ``FSDP2Strategy`` or ``DDPStrategy``, on the CPU. Its callbacks, loggers and devices are
            ignored.
        module: Module that was built on the meta device, or that builds its model there in ``configure_model``. It is
            sharded in place. Neither the trainer nor the module can be used afterwards.
        batch: Micro-batch of one data parallel rank. Only the values of ``position_ids`` are used, to find documents.
        world_size: Number of ranks.
        num_nodes: Number of nodes. With ``dp_replicate_size="auto"``, there is one replica per node.
        rank: Rank to simulate.
        load: Number of tokens that this rank's experts get in every layer, as a multiple of the number at even routing.
        boundary: Boundary that the simulation of the first pipeline rank has seen. None for the first rank.
        change: Function that is called with ``module`` after the model is built and before it is sharded.

    Raises:
        RuntimeError: When this process belongs to a process group.
        TypeError: When the trainer has a different strategy.
        ValueError: When the strategy would refuse these sizes or this model, or the step depends on the values of
            tensors.
    """
    strategy = check_strategy(trainer.strategy)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    packed = assume_documents(batch["position_ids"]) if is_packed(batch) else assume_unpacked_sequences()
    replace_manager(strategy, mode)
    with packed, build_model(trainer, module, world_size=world_size, num_nodes=num_nodes, rank=rank) as mesh:
        _check_has_no_values(module)
        if strategy.pp_size > 1:
            check_pipelining(trainer)
        change(module)
        dtypes = get_dtypes(strategy.manager, module)
        strategy.setup_module()
        assume_even_routing(module, load=load)
        if getattr(strategy.config, "enable_compile", False):
            assume_fused_casts(module)
        pipeline = simulate_neighbours(strategy, module, boundary)
        is_even = _is_even(module)
        description = describe_sharded(strategy, module, mesh, dtypes)
        with mode, _explain_dependence_on_data(module):
            strategy.setup_training(trainer)
            _choose_foreach(trainer.optimizers)
            module.log = partial(_log_with_values, module.log)  # type: ignore[method-assign]
            for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
                call_module_hook(trainer, hook)
            fake_batch = tree_map_only(Tensor, torch.empty_like, batch)
            # run two steps with DDP before recording, because DDP rebuilds its gradient buckets in the second step
            for _ in range(2 if isinstance(strategy, DDPStrategy) else 1):
                _run_step(trainer, fake_batch, micro_batches=1)
            recording = _record_step(trainer, module, fake_batch, mesh, pipeline)
    if all(name != "backward" for _, name in recording.phases):
        raise ValueError(
            f"{get_class_name(module)}: its step runs no backward, so there is nothing to plan; return a loss from"
            " training_step, or call manual_backward."
        )
    if pipeline is None:
        return Simulation(description, recording, is_even)
    return Simulation(description, recording, is_even, get_layers(pipeline), get_boundary(pipeline))


def describe_model(trainer: "Trainer", module: "LightningModule", *, world_size: int, num_nodes: int) -> str:
    """Build ``module`` as :func:`simulate` does, and describe its tensors, model configs and optimizers in a string."""
    strategy = check_strategy(trainer.strategy)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replace_manager(strategy, mode)
    with build_model(trainer, module, world_size=world_size, num_nodes=num_nodes):
        _check_has_no_values(module)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        texts = [repr((name, tensor.shape, tensor.dtype, tensor.requires_grad)) for name, tensor in tensors]
        texts += [str(cast(Any, parts.module).config) for parts in find_structure(module).models]
        strategy.setup_module()
        with mode:
            strategy.setup_training(trainer)
        return "\n".join([str(module), str(module.hparams), *texts, *map(repr, trainer.optimizers)])


def check_strategy(strategy: Any) -> FSDP2Strategy | DDPStrategy:
    """Return ``strategy`` unchanged if its steps can be simulated.

    Raises:
        TypeError: When the steps of ``strategy`` cannot be simulated.
    """
    if isinstance(strategy, FSDP2Strategy | DDPStrategy):
        return strategy
    raise TypeError(
        f"plan simulates the steps of FSDP2Strategy and DDPStrategy, but not of {type(strategy).__name__}: use"
        " FSDP2Strategy or DDPStrategy (such as trainer.strategy=fsdp2), or measure the run on devices. Megatron-FSDP"
        " cannot be simulated, because it needs buffers on CUDA."
    )


def is_packed(batch: Any) -> bool:
    """Return whether a sequence holds several documents. Like transformers, look for position ids that restart."""
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    return isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())


def _check_has_no_values(module: nn.Module) -> None:
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise ValueError(
            f"{get_class_name(module)}: {real[0]} and {len(real) - 1} other parameters have real values, but a plan"
            " needs parameters that have no values; build the module under `with torch.device('meta')`, or build its"
            " model in configure_model."
        )


def _choose_foreach(optimizers: list[Optimizer]) -> None:
    """Make optimizers update all parameters in one operation, as they do by default on a GPU but not on a CPU."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


def _record_step(trainer: Any, module: Any, batch: Any, mesh: DeviceMesh, pipeline: PipelineRun | None) -> Recording:
    with StepRecorder(_get_groups(mesh), _get_vocabulary(module, mesh)) as recorder:
        _label_state(recorder, module, trainer.optimizers, batch)
        recorder.label(get_buckets(trainer.strategy), COMMUNICATION_BUFFERS)
        if pipeline is not None:
            record_actions(pipeline, recorder)
        with _mark_blocks(recorder, module):
            _run_step(trainer, batch, micro_batches=_MICRO_BATCHES, recorder=recorder)
        return recorder.get_recording()


def _run_step(trainer: Any, batch: Any, *, micro_batches: int, recorder: StepRecorder | None = None) -> None:
    """Run an optimizer step as the Trainer's training loop does, with at most ``micro_batches`` micro-batches."""
    loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    micro_batches = min(accumulated, micro_batches)
    trainer.accumulate_grad_batches = micro_batches
    # start at 0, since the optimizer steps when the number of batches is a multiple of `accumulate_grad_batches`
    loop.batch_progress.current.reset()
    callbacks, trainer.callbacks = trainer.callbacks, [] if recorder is None else [_Phases(recorder)]
    for micro_batch in range(micro_batches):
        if recorder is not None:
            recorder.begin("forward")
            recorder.times = accumulated - 2 if micro_batch == 1 < micro_batches - 1 else 1
        index = loop.batch_progress.current.ready
        kwargs = begin_batch(trainer, batch, index)
        outputs: Any
        if trainer.lightning_module.automatic_optimization:
            outputs = loop.automatic_optimization.run(trainer.optimizers[0], index, kwargs)
        else:
            outputs = loop.manual_optimization.run(kwargs)
        call_module_hook(trainer, "on_train_batch_end", outputs, batch, index)
        with with_values():  # logged tensors are real zeros, see `_log_with_values`
            log_batch(trainer)
    trainer.accumulate_grad_batches, trainer.callbacks = accumulated, callbacks


def _log_with_values(log: Callable[..., None], name: str, value: Any, *args: Any, **options: Any) -> None:
    """Log zeros in place of fake tensors. Lightning can store and send zeros, but cannot copy fake tensors."""
    with with_values():
        log(name, torch.zeros(value.shape) if isinstance(value, Tensor) else value, *args, **options)


class _Phases(Callback):
    """Callback that tells the step recorder when the backward and the optimizer phase of a step begin."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder

    def on_before_backward(self, trainer: "Trainer", pl_module: "LightningModule", loss: Tensor) -> None:
        if get_optional_pipeline(pl_module) is not None:
            return  # its backwards have run in the training step
        self._recorder.label_rest(ACTIVATIONS, phase="forward")
        self._recorder.begin("backward", part=self._recorder.part.replace("forward", "backward"))

    def on_before_optimizer_step(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer) -> None:
        self._recorder.begin("optimizer")
        self._recorder.label(_get_gradients(pl_module), GRADIENTS)


@contextmanager
def _mark_blocks(recorder: StepRecorder, module: nn.Module) -> Iterator[None]:
    """Add hooks that tell the recorder which layer is running, and remove them after the ``with`` block.

    The output head (``lm_head``) gets no hooks, because the chunked loss refuses a head with forward hooks.
    """

    def begin_forward(name: str, block: nn.Module, args: Any) -> None:
        recorder.mark(f"{'recomputation' if is_in_backward() else 'forward'} of {name}")

    def end_forward(name: str, block: nn.Module, args: Any, output: Any) -> None:
        if is_in_backward():
            recorder.mark(f"backward of {name}")
            return
        recorder.mark(f"forward after {name}")
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: recorder.mark(f"backward of {name}"))

    names = {block: name for name, block in module.named_modules()}
    handles = []
    for block in find_structure(module).layers:
        # prepend the hook, so that it runs before FSDP2's own hook, which gathers the block's parameters
        handles.append(block.register_forward_pre_hook(partial(begin_forward, names[block]), prepend=True))
        handles.append(block.register_forward_hook(partial(end_forward, names[block])))
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def _explain_dependence_on_data(module: nn.Module) -> Iterator[None]:
    try:
        yield
    except DATA_DEPENDENT_ERRORS as error:
        where = _find_user(error.__traceback__)
        raise ValueError(
            f"{get_class_name(module)}: its step depends on the values of tensors, but a plan has no values:"
            f" {error.func} in {where}. Let that line depend only on shapes or options, or measure the run on devices."
        ) from error


def _find_user(trace: TracebackType | None) -> str:
    """Return the file name, line number and text of the traceback's innermost frame outside of torch."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if Path(torch.__file__).parent not in Path(frame.filename).parents
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"


def _label_state(recorder: StepRecorder, module: nn.Module, optimizers: list[Optimizer], batch: Any) -> None:
    recorder.label(module.parameters(), WEIGHTS)
    recorder.label(_get_gradients(module), GRADIENTS)
    for optimizer in optimizers:
        recorder.label((t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor)), OPTIMIZER_STATES)
    recorder.label((t for t in (*module.buffers(), *tree_leaves(batch)) if isinstance(t, Tensor)), ACTIVATIONS)


def _get_gradients(module: nn.Module) -> list[Tensor]:
    # gradients in DDP's buckets are real tensors: detach() returns the fake tensors that operations use instead
    return [parameter.grad.detach() for parameter in module.parameters() if parameter.grad is not None]


def _is_even(module: nn.Module) -> bool:
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            continue
        parts = [1] * parameter.ndim
        for ranks, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if not placement.is_replicate():
                parts[cast(Any, placement).dim] *= ranks
        if any(size % number for size, number in zip(parameter.shape, parts, strict=True)):
            return False
    return True


def _get_groups(mesh: DeviceMesh) -> dict[str, Group]:
    """Return the mesh axes and the ranks of each process group. The keys are torch's names of the groups.

    If several axes consist of the same ranks, the group of each is returned with the names of all these axes. The group
    of an expert axis is returned only with its own name, because the other axes may serve a different purpose. But if
    torch uses one group for an expert axis and for other axes, as it may for all ranks, this group is returned with the
    names of all these axes.
    """
    axes: dict[tuple[int, ...], list[str]] = {}
    others: dict[str, tuple[int, ...]] = {}
    groups: dict[str, Group] = {}
    for view in get_views(mesh):
        for axis in view.mesh_dim_names or ():
            group = view.get_group(axis)
            members = tuple(dist.get_process_group_ranks(group))
            if axis in (EFSDP, EXPERT_PARALLEL):
                groups[group.group_name] = Group((axis,), members)
            else:
                others[group.group_name] = members
                axes.setdefault(members, []).append(axis)
    for name, members in others.items():
        of_experts = groups[name].axes if name in groups else ()
        groups[name] = Group((*axes[members], *of_experts), members)
    return groups


def _get_vocabulary(module: nn.Module, mesh: DeviceMesh) -> set[int]:
    """Return the sizes of the models' vocabularies and of their tensor parallel shards, which identify logits.

    A size that is also a dim of another parameter is left out, because tensors of that size may not be logits.
    """
    tp = get_mesh(mesh, TENSOR_PARALLEL).size()
    sizes = {cast(Any, parts.module).config.get_text_config().vocab_size for parts in find_structure(module).models}
    others = {
        size for parameter in module.parameters() if sizes.isdisjoint(parameter.shape) for size in parameter.shape
    }
    return _add_parts(sizes, tp) - _add_parts(others, tp)


def _add_parts(sizes: set[int], parts: int) -> set[int]:
    return sizes | {-(-size // parts) for size in sizes}

"""FSDP2 for the Lightning Trainer: ``Trainer(strategy=FSDP2Strategy())``."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2._suggestions import with_suggestions
from lightning_fsdp2.compat.fsdp import initialize_root
from lightning_fsdp2.compat.gradients import replace_backward_inputs
from lightning_fsdp2.compat.transformers import assume_unpacked_sequences
from lightning_fsdp2.config import CheckpointConfig, FSDP2Config
from lightning_fsdp2.managers.fsdp2 import FSDP2Manager
from lightning_fsdp2.modules.structure import get_class_name, get_entrances
from lightning_fsdp2.modules.wrapping import show_signature
from lightning_fsdp2.parallel.context.apply import activate_context_parallel, deactivate_context_parallel
from lightning_fsdp2.parallel.data.fully_shard import get_fsdp_modules
from lightning_fsdp2.parallel.data.gradient_hooks import expect_new_hooks, run_gradient_hooks
from lightning_fsdp2.parallel.data.gradients import (
    choose_backward_inputs,
    defer_grad_sync,
    drop_deferred_gradients,
    extend_zero_grad,
)
from lightning_fsdp2.parallel.data.in_place import keep_changes_in_place
from lightning_fsdp2.parallel.layers.float8_conversion import get_optional_conversion
from lightning_fsdp2.parallel.pipeline.apply import get_optional_pipeline, get_pipeline
from lightning_fsdp2.ranks.coordination import DEFAULT_TIMEOUT
from lightning_fsdp2.ranks.whole_values import treat_dtensors_as_whole
from lightning_fsdp2.sizes import ParallelSizes
from lightning_fsdp2.strategies.arguments import RandomNumbers, check_timeouts, read_options
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy
from lightning_fsdp2.strategies.parallelisation import get_differences, tell_branches_apart
from lightning_fsdp2.strategies.parts.refusals import check_manual_optimization
from lightning_fsdp2.strategies.parts.step_region import StepRegion
from lightning_fsdp2.strategies.pipelining import Pipelining, check_pipelining
from lightning_fsdp2.strategies.precision import get_mp_policy
from lightning_fsdp2.weights.materialize import materialize

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


T = TypeVar("T")


@with_suggestions
class FSDP2Strategy(MeshStrategy[FSDP2Manager]):
    """Strategy that shards a LightningModule over a device mesh with PyTorch's FSDP2. The module needs no FSDP2 code.

    Build the model in ``__init__``, or under ``torch.device("meta")`` in ``configure_model`` if it is too large for
    one rank. If ``configure_model`` shards the module, the strategy checks the result and does not shard it again.

    Args:
        dp_size: Number of data parallel ranks, replicas x shards. ``"auto"``: all ranks that ``pp_size``, ``cp_size``
            and ``tp_size`` leave over.
        dp_replicate_size: Number of replicas of the sharded model (HSDP). ``"auto"``: one per node, or with several
            pipeline stages, one per node of a stage.
        tp_size: Number of tensor parallel ranks. They read the same batch, and each holds a part of every layer.
        cp_size: Number of context parallel ranks. Each computes a part of every sequence.
        ep_size: Number of expert parallel ranks. Each holds a part of the experts of every layer, and tokens travel
            between them. This adds no ranks: ``ep_size`` must divide the number of ranks in a model replica, or in a
            pipeline stage of it.
        pp_size: Number of pipeline parallel ranks. Each holds a part of the layers, and batches are split into
            micro-batches that pass through the ranks one after another.
        config: The flags of FSDP2.
        checkpoint: Options for writing and reading checkpoints.
        timeout: Timeout of collectives, after which a hang becomes an error. This timeout applies while a run starts,
            compiles, validates and saves.
        rendezvous_timeout: How long each rank waits at the start for the other ranks.
        steady_timeout: Timeout of collectives in training steps, from the second step on. None uses ``timeout``. See
            :class:`~lightning_fsdp2.callbacks.ProcessGroupTimeout`.
        random_numbers: Which random numbers ranks draw in training, such as for dropout, noise and augmentation.
            ``"per_data_rank"``: ranks that read different data draw different numbers. ``"shared"``: all ranks draw the
            same numbers.

    Raises:
        TypeError: When an argument is unknown or has the wrong type.
        ValueError: When sizes or flags are not supported, or contradict each other.

    Example::

        trainer = Trainer(strategy=FSDP2Strategy(dp_replicate_size=2), precision="bf16-mixed", gradient_clip_val=1.0)
        trainer.fit(module, datamodule)
    """

    strategy_name = "fsdp2"
    config: FSDP2Config
    manager_class: Callable[[FSDP2Config, DeviceMesh], FSDP2Manager] = FSDP2Manager

    def __init__(
        self,
        dp_size: int | Literal["auto"] | None = "auto",
        dp_replicate_size: int | Literal["auto"] = 1,
        tp_size: int = 1,
        cp_size: int = 1,
        ep_size: int = 1,
        pp_size: int = 1,
        config: FSDP2Config | None = None,
        checkpoint: CheckpointConfig | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        rendezvous_timeout: timedelta = timedelta(minutes=10),
        steady_timeout: timedelta | None = None,
        random_numbers: RandomNumbers = "per_data_rank",
    ) -> None:
        timeouts = {"timeout": timeout, "rendezvous_timeout": rendezvous_timeout, "steady_timeout": steady_timeout}
        check_timeouts(type(self).__name__, **timeouts)
        config = read_options(type(self).__name__, "config", config, FSDP2Config)
        checkpoint = read_options(type(self).__name__, "checkpoint", checkpoint, CheckpointConfig)
        sizes = ParallelSizes(
            dp_size=dp_size,
            dp_replicate_size=dp_replicate_size,
            tp_size=tp_size,
            cp_size=cp_size,
            ep_size=ep_size,
            pp_size=pp_size,
        )
        super().__init__(sizes=sizes, config=config, checkpoint=checkpoint, random_numbers=random_numbers, **timeouts)
        self._patches = ExitStack()
        self.pipelining: Pipelining | None = None

    @override
    def setup_environment(self) -> None:
        if self.pp_size > 1:
            check_pipelining(self.lightning_module.trainer)
        # raise errors about the precision early, before process groups exist
        get_mp_policy(str(self.precision_plugin.precision), self.config.mp_policy)
        super().setup_environment()

    @override
    def enter_mesh(self, mesh: DeviceMesh) -> None:
        super().enter_mesh(mesh)
        if self.pp_size > 1:
            self.pipelining = Pipelining(self.world, self.steps, self.resumption, self.config, self.root_device)

    @override
    def make_step_region(self, timeout: timedelta) -> StepRegion:
        if max(self.tp_size, self.cp_size, self.ep_size, self.pp_size) > 1:
            return StepRegion(timeout, alternative="")  # a forward needs several ranks even if all weights are gathered
        return super().make_step_region(timeout)

    @override
    def build_manager(self, device_mesh: DeviceMesh) -> FSDP2Manager:
        policy = get_mp_policy(str(self.precision_plugin.precision), self.config.mp_policy)
        return self.manager_class(replace(self.config, mp_policy=policy), device_mesh)

    @override
    def setup_module(self) -> None:
        if self.config.patch_is_packed_sequence:
            # keep this patch of transformers until teardown, because activation checkpointing reruns layers in backward
            self._patches.enter_context(assume_unpacked_sequences())
        super().setup_module()
        self._patches.enter_context(replace_backward_inputs(partial(choose_backward_inputs, self.lightning_module)))
        expect_new_hooks(self.lightning_module)
        activate_context_parallel(self.lightning_module)
        if self.pipelining is not None:
            cast(Any, self.precision_plugin).pipeline = get_pipeline(self.lightning_module).shared.ranks

    @override
    def teardown(self) -> None:
        self._patches.close()
        if self.lightning_module is not None:
            # Context parallelism may be active even if `setup` was never called. To load a checkpoint, the strategy
            # first shards the module, which activates context parallelism, and then reads the files, which may fail.
            deactivate_context_parallel(self.lightning_module)
        super().teardown()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # the whole model may not fit on the rank's device, so build it on the host or on the meta device
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def parallelize_module(self, module: "LightningModule") -> None:
        if self.pp_size > 1:
            _check_not_sharded_by_user(module, self.pp_size)
        # its `configure_model` may have sharded the module, on meshes of its own
        sharded = (parameter for parameter in module.parameters() if isinstance(parameter, DTensor))
        treat_dtensors_as_whole(self.full_device_mesh, *{parameter.device_mesh for parameter in sharded})
        if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
            _check_sharded_by_user(module, self.world_size)
            _check_flags_of_user(module, self.config)
            run_gradient_hooks(module, self.full_device_mesh)
            keep_changes_in_place(get_fsdp_modules(module))
            materialize(module, self.root_device, self.full_device_mesh)
        elif any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            _check_only_tensor_parallel(module, self.full_device_mesh)
            _check_flags_of_user(module, self.config)
            materialize(module, self.root_device, self.full_device_mesh)
        else:
            self.manager.parallelize(module, checks_batches=False)  # `Batches` checks them
            rank_zero_info(f"{type(self).__name__}: {self.manager.describe()}")
            if self.pp_size > 1:
                rank_zero_info(get_pipeline(module).describe())
            if (conversion := get_optional_conversion(module)) is not None:
                rank_zero_info(conversion.describe())
        if isinstance(module, FSDPModule):
            check_manual_optimization(module)
            for name in get_entrances(module):
                if name != "forward":  # FSDP2's hooks surround only `forward`, but the Trainer calls step methods
                    register_fsdp_forward_method(module, name)
                    show_signature(getattr(module, name))
            # make the module FSDP2's root now, since otherwise the first module that a hook calls would become the root
            initialize_root(module)
        units = get_fsdp_modules(module)
        tell_branches_apart(self.world, module, units, layers=units)

    @override
    def setup_optimizers(self, trainer: "Trainer") -> None:
        set_up = partial(super().setup_optimizers, trainer)
        if self.pipelining is None:
            set_up()
        else:
            self.pipelining.set_up_optimizers(self.lightning_module, set_up)

    @override
    def attach_optimizer(self, optimizer: Optimizer) -> None:
        def clear() -> None:
            # look up the parameters in each call, because callbacks that unfreeze layers add parameter groups
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            drop_deferred_gradients(self.lightning_module, parameters)

        extend_zero_grad(optimizer, clear)
        if self.pipelining is not None:
            self.pipelining.extend_zero_grad(optimizer)

    @override
    def run_training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().run_training_step
        if self.pipelining is None:
            return step(*args, **kwargs)
        return self.pipelining.train(step, self.lightning_module, *args, **kwargs)

    @override
    def run_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        if self.pipelining is None:
            super().run_backward(loss, optimizer, *args, **kwargs)
        else:
            self.pipelining.finish_backward(self.lightning_module)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        run = get_optional_pipeline(self.lightning_module)
        if run is not None and run.is_running and group in (None, dist.group.WORLD):  # Lightning fills in WORLD
            # only the last stage runs what follows the model in a step
            group = self.world.stage_group
        return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._check_no_micro_batch("barrier")
        super().barrier(name)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        self._check_no_micro_batch("broadcast")
        return super().broadcast(obj, src)

    def _check_no_micro_batch(self, method: str) -> None:
        run = None if self.pipelining is None else get_optional_pipeline(self.lightning_module)
        if run is not None and run.is_running:
            raise ValueError(
                f"pp_size={self.pp_size}: a step calls `strategy.{method}`, but the ranks of a pipeline run the step at"
                " different times, and would wait for each other forever. Call it in a hook instead, such as"
                " `on_train_batch_end`."
            )

    @override
    def run_evaluation_step(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.pipelining is None:
            return step(*args, **kwargs)
        return self.pipelining.evaluate(step, self.lightning_module, name, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        # Do not defer gradient reductions on a single rank. With a single rank, `training_step` may return None for
        # the last micro-batch. That micro-batch has no backward pass, so nothing would run the deferred reductions.
        reduce_scatter = not self.config.defer_fsdp_grad_sync or self.full_device_mesh.size() == 1
        if self.steps.reads_gradients(self.lightning_module.trainer):
            with self.steps.accumulating(defers=False):
                yield
        else:
            with self.steps.accumulating(), defer_grad_sync(self.model, reduce_scatter=reduce_scatter):
                yield


def _check_not_sharded_by_user(module: nn.Module, pp_size: int) -> None:
    """Refuse a module that the user has sharded, since only a whole model can be divided into pipeline stages."""
    names = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if names:
        raise ValueError(
            f"pp_size={pp_size}: `configure_model` of {get_class_name(module)} has sharded {names[0]}, but only a whole"
            " model can be divided into pipeline stages. Leave all sharding to the strategy, or use pp_size=1."
        )


def _check_flags_of_user(module: nn.Module, config: FSDP2Config) -> None:
    for name, (default, value) in get_differences(FSDP2Config(), replace(config, mp_policy=None)).items():
        raise ValueError(
            f"FSDP2Config.{name}={value!r} has no effect on {get_class_name(module)}, because its `configure_model`"
            f" shards the module. Leave the flag at {default!r} and implement its effect in `configure_model`, or"
            " leave all sharding to the strategy."
        )


def _check_only_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a module that the user made tensor parallel but did not shard over data and context parallel ranks."""
    copies = mesh.size() // mesh["tensor_parallel"].size()
    if copies > 1:
        names = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
        raise ValueError(
            f"`configure_model` made {get_class_name(module)} tensor parallel ({', '.join(names[:3])}, ...) but did not"
            f" shard it over the {copies} data and context parallel ranks, whose gradients would differ. Also call"
            " `fully_shard` there, on the mesh `self.device_mesh['data_parallel']`; or leave tensor parallelism to"
            " the strategy (FSDP2Config(tp_plan=...)); or set tp_size to the number of all ranks."
        )


def _check_sharded_by_user(module: nn.Module, world_size: int) -> None:
    """Refuse trainable parameters that the user did not shard over all ranks: their gradients would silently differ."""
    loose = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and (not isinstance(parameter, DTensor) or parameter.device_mesh.size() < world_size)
    ]
    if loose and world_size > 1:
        raise ValueError(
            f"`configure_model` sharded only a part of {get_class_name(module)}. The gradients of"
            f" {', '.join(loose[:10])} would differ by rank, because these parameters are not sharded over all"
            f" {world_size} ranks. Shard them too (`fully_shard(self, mesh=...)` shards all that are left), freeze"
            " them, or leave all sharding to the strategy."
        )

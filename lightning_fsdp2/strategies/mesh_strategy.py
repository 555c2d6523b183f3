"""Base class of the strategies that train on a device mesh. It implements the hooks that Lightning's Trainer calls."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2.compat.ledger import get_ledger
from lightning_fsdp2.compat.lightning import (
    decide_on_validation_together,
    end_signal_handling,
    has_trainer,
    set_device_mesh,
)
from lightning_fsdp2.config import CheckpointConfig, DistributedConfig
from lightning_fsdp2.parallel.data.branches import check_end
from lightning_fsdp2.parallel.data.fully_shard import reshard
from lightning_fsdp2.parallel.loss.token_mean import TokenMean
from lightning_fsdp2.sizes import ParallelSizes
from lightning_fsdp2.strategies.arguments import RandomNumbers, shares_random_numbers
from lightning_fsdp2.strategies.checkpoint_io import MeshCheckpointIO
from lightning_fsdp2.strategies.evaluating_strategy import EvaluatingStrategy
from lightning_fsdp2.strategies.launch.agreement import check_same_run
from lightning_fsdp2.strategies.launch.environment import check_variables
from lightning_fsdp2.strategies.launch.launcher import RankLauncher
from lightning_fsdp2.strategies.launch.process_groups import get_device_mesh
from lightning_fsdp2.strategies.launch.remedies import add_remedy
from lightning_fsdp2.strategies.monitored import agree_on_metrics
from lightning_fsdp2.strategies.parallelisation import Parallelisation, is_parallelised, set_parallelisation
from lightning_fsdp2.strategies.parts.batches import Batches
from lightning_fsdp2.strategies.parts.callbacks import OwnCallbacks, set_available_flops
from lightning_fsdp2.strategies.parts.checkpoints import Checkpoints
from lightning_fsdp2.strategies.parts.evaluation import Evaluation
from lightning_fsdp2.strategies.parts.refusals import (
    CALLBACKS_OF_WHOLE_WEIGHTS,
    OPTIMIZERS_WITHOUT_SHARDED_STEP,
    check_optimizers,
    refuse_layer_drop,
    refuse_options,
)
from lightning_fsdp2.strategies.parts.resumption import Resumption
from lightning_fsdp2.strategies.parts.step_region import OUTSIDE_CALL_TIMEOUT, StepRegion
from lightning_fsdp2.strategies.parts.steps import Steps, use_own_zero_grad
from lightning_fsdp2.strategies.parts.tracking import Tracking, log_whole_values
from lightning_fsdp2.strategies.parts.unsharded import (
    SharedBuffers,
    move_to_device,
    synchronise_batch_norm,
    synchronise_metrics,
)
from lightning_fsdp2.strategies.precision import choose_precision, get_compute_dtype

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

T = TypeVar("T")
ManagerT = TypeVar("ManagerT")


class MeshStrategy(EvaluatingStrategy, Generic[ManagerT]):
    """Base class of the strategies that train on a device mesh.

    A module may leave its models on the meta device. The strategy materialises their weights after sharding.

    Attributes:
        checkpoints: Saving and loading of checkpoints.
        resumption: Per-rank states that a checkpoint carries from one run to the next.
        tracking: Token counts and a description of the run, for the loggers.
        batches: Preparation of the data loaders.
        steps: State of the training steps.
        evaluation: Runner of validation, test and prediction steps.
    """

    materializes_models = True
    refused_callbacks: ClassVar[dict[type[Callback], str]] = CALLBACKS_OF_WHOLE_WEIGHTS
    """Lightning callbacks that do not work with the strategy's weights, each mapped to the reason and the remedy."""

    averages_gradients = True
    """Whether gradients are averaged over the data parallel ranks instead of summed."""

    shards_module = True
    """Whether each rank holds only a part of the module."""

    refused_optimizers: tuple[type[Optimizer], ...] = OPTIMIZERS_WITHOUT_SHARDED_STEP
    """Classes of torch optimizers that cannot step on the strategy's parameters."""

    def __init__(
        self,
        *,
        sizes: ParallelSizes,
        config: DistributedConfig,
        checkpoint: CheckpointConfig | None,
        random_numbers: RandomNumbers,
        timeout: timedelta,
        rendezvous_timeout: timedelta,
        steady_timeout: timedelta | None,
    ) -> None:
        super().__init__(sizes=sizes, config=config, timeout=timeout, rendezvous_timeout=rendezvous_timeout)
        self.world.shares_random_numbers = shares_random_numbers(type(self).__name__, random_numbers)
        self.tracking = Tracking(self.world.add_up_over_data, self._call_when_saved)
        self.resumption = Resumption(self.world, self.tracking)
        self.checkpoints = Checkpoints(checkpoint or CheckpointConfig(), self.world, self.resumption)
        self.batches = Batches(self.world)
        self.steps = Steps(self.world)
        self.evaluation = Evaluation(self.world, self.release_parameters)
        self._own_callbacks = OwnCallbacks(type(self).__name__, steady_timeout)
        self._buffers = SharedBuffers(self.world)
        self._step_region: Any = None
        self._manager: ManagerT | None = None

    # ------------------------------------------------------------------ methods that subclasses must or may override

    @abstractmethod
    def build_manager(self, device_mesh: DeviceMesh) -> ManagerT:
        """Build the manager, such as an ``FSDP2Manager``, for a mesh from ``create_device_mesh``."""

    @abstractmethod
    def parallelize_module(self, module: "LightningModule") -> None:
        """Parallelise a module with the manager. Called only if no earlier Trainer has parallelised the module."""

    def make_step_region(self, timeout: timedelta) -> StepRegion:
        """Build the guard that prevents a hang if only some ranks call the module outside of a Trainer step."""
        return StepRegion(timeout)

    def release_parameters(self) -> None:
        """Reshard parameters that are still gathered after a forward. Optimizers and checkpoints need the shards."""
        reshard(self.lightning_module)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Make ``optimizer`` handle weights and gradients that the strategy stores outside of the parameters."""

    def run_training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` on a batch."""
        return super().training_step(*args, **kwargs)

    def run_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``."""
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)

    def finish_manual_gradients(self, optimizer: Optimizer) -> None:
        """Check and scale the gradients of a manual optimizer step, after its closure, which may run the backward."""
        self.steps.apply_token_mean(self.lightning_module, averages_gradients=self.averages_gradients)

    def share_buffers(self) -> None:
        """Broadcast the module's buffers from the first rank of a pipeline stage to the others."""
        self._buffers.share()

    @override
    def begin_evaluation(self) -> None:
        self.share_buffers()

    @override
    def end_evaluation(self) -> None:
        # ranks whose batches differ in size may have drawn unequally many numbers
        self.world.share_random_state(self.root_device)

    # ------------------------------------------------------------------ properties for other code

    @property
    def manager(self) -> ManagerT:
        """The manager that parallelises the module. It exists once the Trainer has started its processes."""
        if self._manager is None:
            raise RuntimeError("The strategy has no manager yet: the Trainer creates it in `setup`.")
        return self._manager

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the module's layers compute in."""
        return get_compute_dtype(cast(Any, self.manager).config, self.precision_plugin)

    @property
    def token_mean(self) -> TokenMean | None:
        """Mean loss and token count of the last step, if the module uses :func:`~lightning_fsdp2.token_mean_loss`."""
        return self.steps.token_mean

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """The options for writing and reading checkpoints."""
        return self.checkpoints.config

    @checkpoint_config.setter
    def checkpoint_config(self, config: CheckpointConfig) -> None:
        self.checkpoints.config = config

    @property
    def saved_steps(self) -> dict[str, int | None]:
        """The global step of each saved checkpoint, by path."""
        return self.checkpoints.saved_steps

    @property
    @override
    def checkpoint_io(self) -> MeshCheckpointIO:
        return self.checkpoints.io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self.checkpoints.set_io(io, type(self).__name__)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = choose_precision(precision_plugin, type(self).__name__)

    # ------------------------------------------------------------------ stages, in the order of the Trainer's calls

    @override
    def connect(self, model: "LightningModule") -> None:
        super().connect(model)
        log_whole_values(model)  # replace `log` here, because callbacks copy it from the module before `setup`

    @override
    def setup_environment(self) -> None:
        trainer = self.lightning_module.trainer
        # refuse callbacks before the Trainer calls their `setup`, in which some of them copy the module
        refuse_options(trainer, self.refused_callbacks, traces_module=not self.shards_module)
        # check the environment variables here too, because in a notebook no launcher has checked them
        check_variables(self.cluster_environment, self.num_processes, self.num_nodes)
        self.world.sizes = self.asked_sizes.resolve_for_run(world_size=self.world_size, num_nodes=self.num_nodes)
        RankLauncher.note_start()
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self.world.start(self.config, cast(Any, self.cluster_environment), self.root_device, self.num_processes)
        check_same_run(trainer, self.hosts, cast(Any, self.world.control_group))
        self.enter_mesh(get_device_mesh(self.sizes, self.root_device.type, self.world.timeout))
        self.checkpoints.connect(self.root_device)
        self.resumption.begin_stage(trainer)
        self.tracking.attach(trainer)

    def enter_mesh(self, mesh: DeviceMesh) -> None:
        """Set the device mesh of this run, a mesh from ``create_device_mesh``, and build the manager for this mesh."""
        self.world.enter_mesh(mesh)
        self._manager = self.build_manager(mesh)
        self._step_region = self.make_step_region(self.world.shorten_timeout(OUTSIDE_CALL_TIMEOUT))
        set_device_mesh(self.lightning_module, self.device_mesh)

    @override
    def setup(self, trainer: "Trainer") -> None:
        decide_on_validation_together(trainer, partial(self.reduce_boolean_decision, all=False))
        set_available_flops(trainer, self.compute_dtype)
        self.accelerator.setup(trainer)
        self.evaluation.prepare_loops(trainer)
        self.checkpoints.begin_stage(trainer)
        self._own_callbacks.attach(trainer)
        with torch.inference_mode(False):  # a later fit could not train parameters made in inference mode
            self.setup_module()
        self.barrier("setup")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_training(trainer)
            refuse_layer_drop(self.lightning_module, apart=self.shards_module and self.world.has_own_random_numbers)
        else:
            self.setup_precision_plugin()
        self.world.share_random_state(self.root_device)
        self.batches.begin_stage(trainer)
        self.steps.begin_stage(self.lightning_module)

    def setup_module(self) -> None:
        """Shard the module, move it to this rank's device, and guard it against calls from only some ranks."""
        self.parallelize()
        self.release_parameters()
        self._step_region.watch(self.lightning_module)
        self.model_to_device()
        self._buffers.find(self.lightning_module)

    def parallelize(self) -> None:
        """Shard the LightningModule, unless it is sharded already. ``load_checkpoint`` and ``setup`` call this."""
        module = self.lightning_module
        parallelisation = Parallelisation(
            self.full_device_mesh,
            cast(Any, self.manager).config,
            has_half_weights=self.precision_plugin.precision == "bf16-true",
        )
        if is_parallelised(module, parallelisation):
            return
        synchronise_batch_norm(module, self._layer_sync, self.root_device)
        self.precision_plugin.convert_module(module)
        self.parallelize_module(module)
        synchronise_metrics(module, self.world.data_group)
        set_parallelisation(module, parallelisation)

    @override
    def model_to_device(self) -> None:
        move_to_device(self.lightning_module, self.root_device)

    def setup_training(self, trainer: "Trainer") -> None:
        """Set up the optimizers and the precision plugin."""
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # attach the optimizers last, because setting up the precision plugin makes Lightning wrap them again
        for optimizer, lightnings in zip(self.optimizers, self._lightning_optimizers, strict=True):
            self.attach_optimizer(optimizer)
            use_own_zero_grad(trainer, optimizer, lightnings)

    @override
    def setup_optimizers(self, trainer: "Trainer") -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        check_optimizers(self.lightning_module, self.optimizers, self.refused_optimizers, type(self).__name__)
        agree_on_metrics(trainer, self.lightning_module, self.world.control_group, self.world.timeout)

    @override
    def on_train_start(self) -> None:
        self.resumption.resume(self.lightning_module.trainer, self.root_device)

    @override
    def on_train_end(self) -> None:
        self.checkpoint_io.wait()
        self.resumption.keep_loader_states(self.lightning_module.trainer)
        # after training, a signal handler would have nothing left to save
        end_signal_handling(self.lightning_module.trainer)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        try:
            if has_trainer(module) and self.world.control_group is not None:
                self.tracking.detach(module.trainer)
                self.checkpoints.end_stage(module.trainer)
                self._own_callbacks.detach(module.trainer)
        finally:
            self.world.random_numbers.end()
            if has_trainer(module):
                get_ledger(module.trainer).put_back_all()
        # keep the process group, because the sharded module needs it in later stages
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        RankLauncher.note_end(exception)
        self.batches.end_without_samples(exception)
        own_numbers = self.shards_module and self.world.has_mesh and self.world.has_own_random_numbers
        add_remedy(exception, self.hosts, context_parallel=self.cp_size > 1, own_random_numbers=own_numbers)

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """False: Lightning loads checkpoints before :meth:`setup`, so :meth:`load_checkpoint` first shards the module.

        If it were True, ``Trainer._run`` (lightning 2.6.6) would ignore the user's ``trainer.fit(weights_only=)``, and
        would load the states of callbacks only after ``on_fit_start``, which needs them.
        """
        return False

    @override
    @torch.inference_mode(False)  # a later fit could not train parameters made in inference mode
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Shard the module, then read a checkpoint on all ranks; see :meth:`Checkpoints.load`."""
        self.parallelize()
        self.release_parameters()
        return self.checkpoints.load(checkpoint_path, self.lightning_module, weights_only=weights_only)

    @override
    @torch.inference_mode(False)
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.checkpoints.load_module_state(checkpoint, self.lightning_module, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizer_states(checkpoint, self.lightning_module, self.optimizers)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint. Every rank must call this."""
        self.checkpoints.wait_for_all_ranks_to_save(self.lightning_module.trainer)
        self.share_buffers()
        return self.checkpoints.get_module_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.release_parameters()
        return self.checkpoints.get_optimizer_state(self.lightning_module, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint on all ranks; see :meth:`Checkpoints.save`."""
        self.checkpoints.save(checkpoint, filepath, storage_options, self.lightning_module)

    def _call_when_saved(self, action: Callable[[], None]) -> None:
        self.checkpoint_io.then(action)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint now or, if a background save is in progress, once the save has succeeded."""
        self.checkpoint_io.remove_checkpoint(filepath)

    # ------------------------------------------------------------------ batches

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        state = self.lightning_module.trainer.state
        return self.batches.prepare(dataloader, state, resumed_epoch=self.resumption.epoch)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self.resumption.begin_batch(self.lightning_module.trainer)
        self.batches.check_same(batch, str(self.lightning_module.trainer.state.stage.dataloader_prefix), dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    # ------------------------------------------------------------------ training steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Broadcast buffers in every step. Otherwise only evaluations and saves would broadcast them, and the results of
        # training would depend on how often the run evaluates and saves.
        self.share_buffers()
        # poll often, so that the actions waiting for a background save run soon after it is complete
        self.checkpoint_io.poll()
        with self._step_region():
            return self.run_training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Repeat the base class's code, so that only backward itself runs in the step region, where forwards are not
        # checked. Forwards that users call in the hooks before and after backward are still checked.
        check_end(self.lightning_module, "the backward pass")
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._step_region():
            self.run_backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        # Under manual optimisation, scale the gradients only in the optimizer step, since another backward may follow.
        if self.lightning_module.automatic_optimization and not self.steps.is_accumulating:
            self.steps.apply_token_mean(self.lightning_module, averages_gradients=self.averages_gradients)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        finish = partial(self.finish_manual_gradients, optimizer)
        wait = self.checkpoint_io.wait_for_copies
        closure = self.steps.complete_closure(self.lightning_module, closure, finish, wait)
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self.release_parameters()
        self.steps.check_states(self.lightning_module, optimizer)
        return output

"""The common base of the mesh strategies: the Trainer's stages, steps and data loaders."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import (
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric
from typing_extensions import override

from lightning_fsdp2.checkpoint.state import check_optimizer_parameters, check_optimizer_states
from lightning_fsdp2.compat.ledger import get_ledger, has_own
from lightning_fsdp2.compat.lightning import (
    begin_epoch_after_complete_one,
    decide_on_validation_together,
    end_signal_handling,
    get_loaders,
    has_trainer,
    restore_loader_states,
    set_device,
    set_device_mesh,
    set_sampler_epoch,
)
from lightning_fsdp2.config import CheckpointConfig, DistributedConfig
from lightning_fsdp2.mesh import ParallelSizes
from lightning_fsdp2.modules.structure import find_metrics, get_modules
from lightning_fsdp2.parallel.data.branches import check_branches, check_end
from lightning_fsdp2.parallel.loss.token_mean import TokenMean, apply_token_mean_, drop_token_windows
from lightning_fsdp2.ranks.random_state import share_random_state
from lightning_fsdp2.ranks.whole_tensors import gather
from lightning_fsdp2.strategies.checkpointing import CheckpointingStrategy
from lightning_fsdp2.strategies.launch import process_groups as distributed
from lightning_fsdp2.strategies.launch.agreement import check_same_run
from lightning_fsdp2.strategies.launch.launcher import RankLauncher
from lightning_fsdp2.strategies.launch.remedies import get_optional_remedy, is_raised_in
from lightning_fsdp2.strategies.parallelisation import (
    Parallelisation,
    check_same_parallelisation,
    get_optional_parallelisation,
    set_parallelisation,
)
from lightning_fsdp2.strategies.parts.callbacks import (
    OwnCallbacks,
    refuse_callbacks,
    refuse_graphs,
    set_available_flops,
)
from lightning_fsdp2.strategies.parts.dataloading import get_batch_fingerprint, keep_in_step
from lightning_fsdp2.strategies.parts.step_region import StepRegion
from lightning_fsdp2.strategies.precision import ShardedPrecision, check_clipping

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

ManagerT = TypeVar("ManagerT")

OUTSIDE_CALL_TIMEOUT = timedelta(minutes=5)
"""Longest time that a rank waits for the others when it calls a sharded module outside of a step."""


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Run the block under ``no_grad`` instead of inference mode, whose tensors cannot be trained later."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


class MeshStrategy(CheckpointingStrategy, Generic[ManagerT]):
    """Base of the strategies that train on a device mesh.

    A module may leave its models on the meta device: the strategy gives them weights once they are sharded.

    Attributes:
        token_mean: Mean loss and token count of the last optimizer step, if the module uses
            :func:`~lightning_fsdp2.token_mean_loss`.
    """

    materializes_models = True
    refused_callbacks: ClassVar[dict[type[Callback], str]] = dict.fromkeys(
        (WeightAveraging, StochasticWeightAveraging, ModelPruning),
        "needs whole weights and fails on sharded ones; remove it, and average with"
        " lightning_fsdp2.callbacks.ExponentialMovingAverage, or average or prune checkpoints after training.",
    )
    """Lightning callbacks that do not work with the strategy's weights, each with what to do instead."""

    shards_module = True
    """Whether each rank holds only a part of the module."""

    averages_gradients = True
    """Whether gradients are the mean over the data parallel ranks; otherwise they are the sum."""

    refused_optimizers: tuple[type[Optimizer], ...] = (
        torch.optim.LBFGS,
        torch.optim.Adafactor,
        torch.optim.Rprop,
        ZeroRedundancyOptimizer,
    )
    """Optimizers of torch whose first step fails on sharded parameters, up to torch 2.15."""

    def __init__(
        self,
        *,
        sizes: ParallelSizes,
        config: DistributedConfig,
        checkpoint: CheckpointConfig | None,
        timeout: timedelta,
        rendezvous_timeout: timedelta,
        steady_timeout: timedelta | None,
    ) -> None:
        super().__init__(sizes=sizes, config=config, timeout=timeout, rendezvous_timeout=rendezvous_timeout)
        self._own_callbacks = OwnCallbacks(type(self).__name__, steady_timeout)
        self.checkpoint_config = checkpoint or CheckpointConfig()
        self.saved_steps = {}
        self.token_mean: TokenMean | None = None
        self._manager: ManagerT | None = None
        self._step_region: StepRegion | None = None
        self._is_accumulating = False
        self._checked_batches: set[tuple[str, int]] = set()
        self._checked_optimizers: set[Optimizer] = set()
        """Optimizers whose states have been checked after a step."""

        self._buffer_owners: list[tuple[nn.Module, str]] = []

    def _check_arguments(self, config_class: type[DistributedConfig], **arguments: Any) -> None:
        """Refuse arguments of the wrong type, such as a mapping for a config, and timeouts that are not positive."""
        kinds = {"config": config_class, "checkpoint": CheckpointConfig}
        for name, value in arguments.items():
            kind = kinds.get(name, timedelta)
            if not isinstance(value, kind) and (value is not None or name in ("timeout", "rendezvous_timeout")):
                raise TypeError(
                    f"{type(self).__name__}({name}={value!r}) must be a {kind.__name__}; pass {kind.__name__}(...)."
                )
            if isinstance(value, timedelta) and value <= timedelta(0):
                raise ValueError(f"{type(self).__name__}({name}={str(value)!r}) must be more than nothing.")

    @property
    def manager(self) -> ManagerT:
        """The manager that parallelises the module; it exists once the Trainer has started its processes."""
        if self._manager is None:
            raise RuntimeError("The manager exists once the Trainer has started its processes (`setup`).")
        return self._manager

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the layers of the module compute."""
        return _get_compute_dtype(cast(Any, self.manager).config, self.precision_plugin)

    @abstractmethod
    def build_manager(self, device_mesh: DeviceMesh) -> ManagerT:
        """Build the manager from the config and the Trainer's precision, for a mesh with all four axes."""

    def make_step_region(self, timeout: timedelta) -> StepRegion:
        """Build the guard that watches the module's forwards outside of steps."""
        return StepRegion(timeout)

    @abstractmethod
    def parallelize_module(self, module: "LightningModule") -> None:
        """Let the manager parallelise a module that no earlier Trainer has parallelised."""

    # ------------------------------------------------------------------ stages

    @override
    def setup_environment(self) -> None:
        # before the callbacks' `setup`, where some copy the module, and before any process group exists
        refuse_callbacks(self.lightning_module.trainer, self.refused_callbacks)
        check_clipping(self.lightning_module.trainer)
        if self.shards_module and self.lightning_module.example_input_array is not None:
            refuse_graphs(self.lightning_module.trainer)
        super().setup_environment()

    @override
    def enter_mesh(self, mesh: DeviceMesh) -> None:
        super().enter_mesh(mesh)
        self._manager = self.build_manager(mesh)
        self._step_region = self.make_step_region(min(self._timeout, OUTSIDE_CALL_TIMEOUT))
        set_device_mesh(self.lightning_module, self.device_mesh)

    @override
    def check_ranks(self) -> None:
        check_same_run(self.lightning_module.trainer, self.hosts, self._control_group)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        try:
            if has_trainer(module) and self._control_group is not None:
                self.finish_checkpoints()
                self._own_callbacks.detach(module.trainer)
        finally:
            if has_trainer(module):
                get_ledger(module.trainer).put_back_all()
        # Lightning calls this after every stage, but the sharded module, its mesh and process group live on
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # a `SystemExit`, which all ranks raise, is not a failure
        RankLauncher.has_failed = isinstance(exception, Exception)
        if isinstance(exception, AssertionError) and is_raised_in(
            UnrepeatedDistributedSampler.__init__.__code__, exception
        ):
            # Lightning's sampler for predict fails only on ranks without samples, and the others wait in `keep_in_step`
            keep_in_step((), self._control_group, may_drop=False)
        remedy = get_optional_remedy(exception, self.hosts)
        if remedy is not None:
            exception.args = (f"{exception}\n{remedy}",)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None or isinstance(precision_plugin, ShardedPrecision):
            self._precision_plugin = precision_plugin
        elif type(precision_plugin).__module__.startswith("lightning."):
            self._precision_plugin = ShardedPrecision(str(precision_plugin.precision))
        else:
            raise ValueError(
                f"Trainer(plugins=[{type(precision_plugin).__name__}()]): {type(self).__name__} casts by a"
                " mixed-precision policy or autocast and would not use it; remove the plugin, and set"
                " Trainer(precision=...)."
            )

    @override
    def connect(self, model: "LightningModule") -> None:
        super().connect(model)
        if not has_own(model, "log"):  # keep a `log` that the user has set
            # here and not in `setup`, because callbacks take their `log` from the module before `setup`
            log = partial(_log_whole, type(model).log, model)
            reason = "a metric made of a sharded parameter would be logged as this rank's part of it"
            get_ledger(model.trainer).replace(model, "log", log, reason=reason)

    @override
    def setup(self, trainer: "Trainer") -> None:
        decide_on_validation_together(trainer, partial(self.reduce_boolean_decision, all=False))
        set_available_flops(trainer, self.compute_dtype)
        self.accelerator.setup(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            get_ledger(trainer).replace(loop, "inference_mode", False, reason="what it gathers could not be trained")
        self.prepare_checkpoints(trainer)
        self._own_callbacks.attach(trainer)
        with torch.inference_mode(False):  # the user may run the Trainer in inference mode, and train later
            self.setup_module()
        self.barrier("setup")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_training(trainer)
            # the ranks of one replica read the same batch, and must drop the same activations
            share_random_state(self._replica_group, self.root_device)
        else:
            self.setup_precision_plugin()
        self._checked_batches.clear()
        drop_token_windows(self.lightning_module)  # left by a run that was aborted

    def setup_module(self) -> None:
        """Shard the module, move it to this rank's device and watch its forwards; every stage calls this."""
        self.parallelize()
        self.release_parameters()
        self._step_region.watch(self.lightning_module)
        self.model_to_device()
        self._buffer_owners = _get_buffer_owners(self.lightning_module)

    def tell_branches_apart(self, module: nn.Module, units: Iterable[Any]) -> None:
        """Make data parallel ranks check, before they gather weights, that they all run the same part of the model.

        Their batches differ, and not every batch needs every part.
        """
        if self.data_parallel_size > 1 and self._control_group is not None:
            check_branches(module, units, self._control_group)

    def setup_training(self, trainer: "Trainer") -> None:
        """Set up the optimizers and the precision plugin."""
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._attach_optimizers()  # after the precision plugin, which makes Lightning wrap the optimizers again

    @override
    def parallelize(self) -> None:
        module = self.lightning_module
        parallelisation = Parallelisation(
            self.full_device_mesh,
            cast(Any, self.manager).config,
            has_half_weights=self.precision_plugin.precision == "bf16-true",
        )
        earlier = get_optional_parallelisation(module)
        if earlier is not None:
            check_same_parallelisation(earlier, parallelisation)
            return
        self._apply_layer_sync(module)
        self.precision_plugin.convert_module(module)
        self.parallelize_module(module)
        self._synchronise_metrics_over_data(module)
        set_parallelisation(module, parallelisation)

    def _apply_layer_sync(self, module: nn.Module) -> None:
        """Apply ``Trainer(sync_batchnorm=True)`` before sharding, because it replaces layers with new ones."""
        if self._layer_sync is None:
            return
        if self.root_device.type == "cpu":
            raise ValueError(
                "Trainer(sync_batchnorm=True): torch's SyncBatchNorm runs on accelerators only; leave it out on a CPU."
            )
        self._layer_sync.apply(module)

    def _synchronise_metrics_over_data(self, module: nn.Module) -> None:
        """Make metrics synchronise over the data parallel ranks, so that ranks with the same batch count once."""
        for metric in find_metrics(module):
            if metric.process_group is None:
                metric.process_group = self._data_group

    @override
    def model_to_device(self) -> None:
        """Move everything that is not sharded to the device: buffers, metrics, and parameters outside of all units."""
        for parameter in self.lightning_module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(self.root_device)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(self.root_device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.root_device)
        set_device(self.lightning_module, self.root_device)

    @override
    def setup_optimizers(self, trainer: "Trainer") -> None:
        self._reset_optimizers_and_schedulers()
        self._checked_optimizers.clear()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, self.refused_optimizers):
                raise ValueError(
                    f"{type(optimizer).__name__} has no step for the shards of {type(self).__name__}; use another"
                    " optimizer, such as AdamW, or a strategy that does not shard."
                )
            check_optimizer_parameters(self.lightning_module, optimizer)

    def _attach_optimizers(self) -> None:
        ledger = get_ledger(self.lightning_module.trainer)
        for optimizer, lightnings in zip(self.optimizers, self._lightning_optimizers, strict=True):
            self.attach_optimizer(optimizer)
            reason = "it would call the method of the optimizer's class, not that of the optimizer"
            ledger.replace(lightnings, "zero_grad", optimizer.zero_grad, reason=reason)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Make steps and ``zero_grad`` of ``optimizer`` reach the weights and gradients that are stored elsewhere."""

    @override
    def on_train_end(self) -> None:
        self.checkpoint_io.wait()
        self.keep_loader_states()
        end_signal_handling(self.lightning_module.trainer)  # there is nothing left to save

    @override
    def on_train_start(self) -> None:
        begin_epoch_after_complete_one(self.lightning_module.trainer)
        self._resumed_epoch = 0
        self._restore_loader_positions()
        self.restore_random_state()

    def _restore_loader_positions(self) -> None:
        """Set Lightning's batch count to the position of the restored data loaders, in batches of this run.

        Lightning restores the count of the earlier run, which may have had another batch size or number of ranks.
        """
        trainer = self.lightning_module.trainer
        restore_loader_states(trainer)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        counts = [getattr(loader, "get_optional_restored_batches", lambda: None)() for loader in get_loaders(trainer)]
        if self._begins_epoch_anew:
            self._begins_epoch_anew = False
            counts = [] if progress.is_last_batch else [0]  # an epoch with no batch left only has to end
        for count in counts:
            if count is not None and count != progress.current.ready:
                shift = count - progress.current.ready
                progress.current = type(progress.current)(**{k: v + shift for k, v in asdict(progress.current).items()})

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.wait_for_all_ranks_to_save()
        self.share_buffers()
        return super().lightning_module_state_dict()

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, as DDP does: BatchNorm has seen different batches on each rank."""
        buffers = [module._buffers.get(name) for module, name in self._buffer_owners]
        distributed.broadcast_coalesced([buffer for buffer in buffers if buffer is not None])

    def begin_evaluation(self) -> None:
        """Prepare a validation, test or prediction before its first step."""
        self.share_buffers()

    def end_evaluation(self) -> None:
        """Finish a validation, test or prediction after its last step."""

    @override
    def on_validation_start(self) -> None:
        self.begin_evaluation()

    @override
    def on_test_start(self) -> None:
        self.begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self.end_evaluation()

    @override
    def on_test_end(self) -> None:
        self.end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self.end_evaluation()

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Run the block as an evaluation step, and then release the gathered weights, which no backward needs.

        Otherwise, hooks that write to the weights after the step would change only a gathered copy.
        """
        with _outside_inference_mode(), self._step_region():
            yield
            check_end(self.lightning_module, "the end of the step")
        self.release_parameters()

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # in every step, otherwise training would depend on how often an evaluation or a checkpoint interrupts it
        self.share_buffers()
        # in every micro-batch, so that links and removals follow a background save as soon as it is complete
        self.checkpoint_io.poll()
        with self._step_region():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.evaluate():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.evaluate():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.evaluate():
            predictions = super().predict_step(*args, **kwargs)
        self._predict_steps += 1
        for _ in range(self._steps_of_others.get(self._predict_steps, 0)):
            # other ranks have more batches, and their forwards are collectives: run along and discard the output
            with self.evaluate():
                super().predict_step(*args, **kwargs)
        return predictions

    @override
    def on_predict_start(self) -> None:
        self.begin_evaluation()
        own = torch.tensor(self.lightning_module.trainer.predict_loop.max_batches, dtype=torch.float64)
        most = own.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._control_group)
        # keys: this rank's number of steps at the end of each data loader; values: how many more the others make
        missing = (most - own).nan_to_num(posinf=0.0)
        self._predict_steps = 0
        self._steps_of_others = dict(zip(own.cumsum(0).tolist(), missing.int().tolist(), strict=True))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # the base class's code plus the step region, which must not cover the hooks before and after backward
        check_end(self.lightning_module, "the backward pass")
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._step_region(), self.surround_backward():
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def surround_backward(self) -> AbstractContextManager[None]:
        """Return a context manager that surrounds the backward itself."""
        return nullcontext()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        # under manual optimisation only the optimizer step shows which backward was the last one
        if self.lightning_module.automatic_optimization and not self._is_accumulating:
            self._apply_token_mean()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        is_manual = not self.lightning_module.automatic_optimization
        if is_manual and closure is do_nothing_closure:  # not every optimizer calls its closure
            self.finish_manual_gradients(optimizer)

        def closure_before_step() -> Any:
            # forward and backward run in the closure, while the tensors that the step will change are being copied
            output = closure()
            if is_manual and closure is not do_nothing_closure:
                self.finish_manual_gradients(optimizer)
            self.checkpoint_io.wait_for_copies()
            return output

        output = super().optimizer_step(optimizer, closure_before_step, *args, **kwargs)
        self.release_parameters()
        if optimizer not in self._checked_optimizers:
            check_optimizer_states(self.lightning_module, optimizer)
            self._checked_optimizers.add(optimizer)
        return output

    def finish_manual_gradients(self, optimizer: Optimizer) -> None:
        """Finish the gradients of a step under manual optimisation.

        This runs after the step's closure, if there is one, because the closure may run the backward.
        """
        self._apply_token_mean()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run the block as a micro-batch that is not followed by an optimizer step."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def _apply_token_mean(self) -> None:
        module = self.lightning_module
        divisor = float(module.trainer.accumulate_grad_batches if module.automatic_optimization else 1)
        if not self.averages_gradients:
            divisor /= self._loss_group.size()
        for submodule in module.modules():
            mean = apply_token_mean_(submodule, self._loss_group, loss_divisor=divisor)
            if mean is not None:
                self.token_mean = mean

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if isinstance(dataloader, DataLoader) and dataloader.generator is None:
            # every iterator draws a seed. If seeds came from the global generator, a resumed run would not draw as many
            # as an uninterrupted one, and its dropout would differ
            dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())
        if getattr(dataloader, "worker_init_fn", "none") is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning would seed by global rank, and the ranks of one replica would augment differently
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_parallel_rank)
        if self._resumed_epoch:
            set_sampler_epoch(dataloader, self._resumed_epoch)
        may_drop = self.lightning_module.trainer.state.fn != TrainerFn.PREDICTING
        return keep_in_step(dataloader, self._control_group, may_drop=may_drop)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._check_same_batch(batch, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _check_same_batch(self, batch: Any, dataloader_idx: int) -> None:
        """Check that the ranks of each replica read the same first batch from each data loader."""
        stage = str(self.lightning_module.trainer.state.stage.dataloader_prefix)
        if self._replica_group.size() == 1 or (stage, dataloader_idx) in self._checked_batches:
            return
        self._checked_batches.add((stage, dataloader_idx))
        # over all ranks and not in each replica separately, so that every rank raises
        fingerprints = [(0, "")] * self.full_device_mesh.size()
        own = (self.data_parallel_rank, get_batch_fingerprint(batch))
        dist.all_gather_object(fingerprints, own, group=self._control_group)
        if len(set(fingerprints)) > self.data_parallel_size:
            raise ValueError(
                f"The ranks of one model replica read different first batches from {stage}_dataloader {dataloader_idx},"
                " but they compute parts of one result. Shard the data by `trainer.strategy.data_parallel_rank` and"
                " `data_parallel_size`, not by the global rank, and seed shuffling alike."
            )


def check_manual_optimization(module: Any) -> None:
    """Refuse trainable parameters of the LightningModule itself under manual optimisation.

    These parameters are gathered once per training step, in which optimizers may step several times.

    Raises:
        ValueError: When there are such parameters. The message names them.
    """
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
    if own and not module.automatic_optimization:
        raise ValueError(
            f"The parameters {', '.join(own)} hang on the LightningModule itself, which cannot be trained under manual"
            " optimisation (`automatic_optimization = False`); put them into a child module with a forward of its own."
        )


def _get_compute_dtype(config: Any, precision: Precision) -> torch.dtype:
    default = torch.float32 if precision.precision == "32-true" else torch.bfloat16
    policy = getattr(config, "mp_policy", None)
    return getattr(config, "autocast_dtype", None) or getattr(policy, "param_dtype", None) or default


def _log_whole(log: Callable[..., None], module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    log(module, name, gather(value) if isinstance(value, DTensor) else value, *args, **kwargs)


def _get_buffer_owners(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module and the name of each buffer that checkpoints hold, in the same order on every rank."""
    return [
        (module, name)
        for module in get_modules(root)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set and not isinstance(buffer, DTensor)
    ]

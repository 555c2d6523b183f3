"""Megatron-FSDP for the Lightning Trainer: ``Trainer(strategy=MegatronFSDPStrategy())``."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2._suggestions import with_suggestions
from lightning_fsdp2.compat.gradients import replace_backward_inputs
from lightning_fsdp2.config import CheckpointConfig, MegatronFSDPConfig
from lightning_fsdp2.managers.megatron_fsdp import MegatronFSDPManager
from lightning_fsdp2.modules.structure import get_layer_lists
from lightning_fsdp2.parallel.context.apply import activate_context_parallel, deactivate_context_parallel
from lightning_fsdp2.parallel.megatron.driver import Driver, get_driver
from lightning_fsdp2.parallel.megatron.wrap import import_megatron_fsdp
from lightning_fsdp2.ranks.coordination import DEFAULT_TIMEOUT
from lightning_fsdp2.ranks.failures import list_names
from lightning_fsdp2.sizes import ParallelSizes
from lightning_fsdp2.strategies.arguments import RandomNumbers, check_timeouts, read_options
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy
from lightning_fsdp2.strategies.parallelisation import tell_branches_apart
from lightning_fsdp2.strategies.parts.refusals import check_manual_optimization
from lightning_fsdp2.strategies.parts.step_region import StepRegion
from lightning_fsdp2.strategies.precision import choose_autocast

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@with_suggestions
class MegatronFSDPStrategy(MeshStrategy[MegatronFSDPManager]):
    """Strategy that shards a LightningModule with NVIDIA's Megatron-FSDP.

    This strategy needs ``pip install "lightning-fsdp2[megatron]"``. Losses, clipping, checkpoints and logs are the same
    as with :class:`~lightning_fsdp2.FSDP2Strategy`, and either strategy reads the other's checkpoints.
    ``precision="bf16-true"`` computes and communicates in bfloat16 and keeps float32 weights for the optimizer;
    ``"bf16-mixed"`` keeps float32 weights and computes under autocast.

    Args:
        dp_size: Number of data parallel ranks, replicas x shards. ``"auto"``: the world size divided by ``cp_size`` x
            ``tp_size``.
        dp_replicate_size: Number of replicas of the sharded model (HSDP). ``"auto"``: one per node.
        tp_size: Number of tensor parallel ranks. They read the same batch, and each holds a part of every layer.
        cp_size: Number of context parallel ranks. Each computes a part of every sequence.
        config: The flags of Megatron-FSDP.
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
        ImportError: When ``megatron-fsdp`` is not installed, or too old.
        TypeError: When an argument is unknown or has the wrong type.
        ValueError: When sizes or flags are not supported, or contradict each other.

    Example::

        trainer = Trainer(strategy=MegatronFSDPStrategy(), precision="bf16-true", gradient_clip_val=1.0)
        trainer.fit(module, datamodule)
    """

    strategy_name = "megatron_fsdp"
    config: MegatronFSDPConfig
    refused_callbacks: ClassVar[dict[type[Callback], str]] = {
        **MeshStrategy.refused_callbacks,
        BaseFinetuning: "freezes and unfreezes parameters after Megatron-FSDP has made its buffers of the trainable"
        " parameters. Freeze in `__init__` or `configure_model`, or use FSDP2Strategy.",
    }
    refused_optimizers = (*MeshStrategy.refused_optimizers, torch.optim.Muon)

    def __init__(
        self,
        dp_size: int | Literal["auto"] | None = "auto",
        dp_replicate_size: int | Literal["auto"] = 1,
        tp_size: int = 1,
        cp_size: int = 1,
        config: MegatronFSDPConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        rendezvous_timeout: timedelta = timedelta(minutes=10),
        steady_timeout: timedelta | None = None,
        random_numbers: RandomNumbers = "per_data_rank",
    ) -> None:
        timeouts = {"timeout": timeout, "rendezvous_timeout": rendezvous_timeout, "steady_timeout": steady_timeout}
        check_timeouts(type(self).__name__, **timeouts)
        config = read_options(type(self).__name__, "config", config, MegatronFSDPConfig)
        checkpoint = read_options(type(self).__name__, "checkpoint", checkpoint, CheckpointConfig)
        import_megatron_fsdp()
        sizes = ParallelSizes(dp_size=dp_size, dp_replicate_size=dp_replicate_size, tp_size=tp_size, cp_size=cp_size)
        super().__init__(sizes=sizes, config=config, checkpoint=checkpoint, random_numbers=random_numbers, **timeouts)
        self.averages_gradients = not config.calculate_per_token_loss
        self._patches = ExitStack()

    @property
    def driver(self) -> Driver:
        """The driver, which controls the Megatron-FSDP wrapper around the LightningModule."""
        return get_driver(self.lightning_module)

    @override
    def build_manager(self, device_mesh: DeviceMesh) -> MegatronFSDPManager:
        config = choose_autocast(self.config, str(self.precision_plugin.precision))
        return MegatronFSDPManager(config, device_mesh)

    @override
    def make_step_region(self, timeout: timedelta) -> StepRegion:
        return StepRegion(
            timeout,
            holds_units=lambda module: self.driver.holds_parameters(module),
            after_forward=self._finish_outside_call,
            alternative="",
        )

    @override
    def release_parameters(self) -> None:
        self.driver.install_distributed_parameters()

    def _finish_outside_call(self, root: nn.Module) -> None:
        # after a forward with gradients, backward still needs the parameters that the forward used
        if not torch.is_grad_enabled():
            self.release_parameters()

    @override
    def setup(self, trainer: "Trainer") -> None:
        super().setup(trainer)
        self.model = self.driver.wrapper
        self.driver.expect_writes()
        self._trained = self._get_trained()
        self._patches.enter_context(replace_backward_inputs(self.driver.check_backward_inputs))
        activate_context_parallel(self.lightning_module)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        changed = self._trained ^ self._get_trained()
        if changed:
            raise ValueError(
                "These parameters were frozen or unfrozen after Megatron-FSDP had allocated its buffers for trainable"
                f" parameters: {list_names(changed)}. Freeze parameters in `__init__` or `configure_model`, or use"
                " FSDP2Strategy."
            )
        output = super().training_step(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization and not self.steps.is_accumulating:
            with self.driver.surround_backward():
                pass  # run no backward, but let the context's exit finish the gradients of earlier micro-batches
        # put the sharded parameters back for hooks, since Megatron-FSDP may have freed the gathered parameters
        self.release_parameters()
        return output

    def _get_trained(self) -> set[str]:
        return {name for name, parameter in self.lightning_module.named_parameters() if parameter.requires_grad}

    @override
    def teardown(self) -> None:
        self._patches.close()
        if self.lightning_module is not None:
            self.model = self.lightning_module
            deactivate_context_parallel(self.lightning_module)
        super().teardown()

    @override
    def parallelize_module(self, module: "LightningModule") -> None:
        check_manual_optimization(module)
        self.manager.parallelize(module, checks_batches=False)  # `Batches` checks them
        # other values of `zero_dp_strategy` gather no weights in a forward
        lists = get_layer_lists(module) if cast(Any, self.manager).config.zero_dp_strategy == 3 else []
        layers = [layer for blocks in lists for layer in blocks]
        units = (part for part in module.modules() if len(part._parameters))
        tell_branches_apart(self.world, module, units, layers=layers)

    @override
    def setup_optimizers(self, trainer: "Trainer") -> None:
        self.release_parameters()
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ValueError(
                f"`configure_optimizers` returned {names}: Megatron-FSDP keeps the gradients of all parameters in"
                " common buffers, so each optimizer would clear the gradients of the others. Return one optimizer with"
                " parameter groups, or use FSDP2Strategy."
            )
        self.driver.clear_gradients()

    @override
    def attach_optimizer(self, optimizer: Optimizer) -> None:
        self.driver.attach_optimizer(optimizer)

    @override
    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self.driver.expect_writes()

    @override
    def end_evaluation(self) -> None:
        super().end_evaluation()
        self.driver.expect_writes()

    @override
    def run_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        with self.driver.surround_backward():
            super().run_backward(loss, optimizer, *args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.steps.accumulating(), self.driver.defer_sync():
            yield

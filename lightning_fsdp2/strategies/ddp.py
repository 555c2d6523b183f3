"""DDP for the Lightning Trainer: ``Trainer(strategy=DDPStrategy())``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp2._suggestions import with_suggestions
from lightning_fsdp2.checkpoint.state import get_optimizer_state
from lightning_fsdp2.compat.lightning import DDPForwardRedirection
from lightning_fsdp2.config import CheckpointConfig, DDPConfig
from lightning_fsdp2.managers.ddp import DDPManager
from lightning_fsdp2.parallel.data.ddp import Replica
from lightning_fsdp2.ranks.coordination import DEFAULT_TIMEOUT, wait_for_all_ranks
from lightning_fsdp2.sizes import ParallelSizes
from lightning_fsdp2.strategies.arguments import RandomNumbers, check_timeouts, read_options
from lightning_fsdp2.strategies.mesh_strategy import MeshStrategy
from lightning_fsdp2.strategies.parts.step_region import OUTSIDE_CALL_TIMEOUT
from lightning_fsdp2.strategies.precision import choose_autocast

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


_UNFINISHED = "Expected to have finished reduction in the prior iteration"


@with_suggestions
class DDPStrategy(MeshStrategy[DDPManager]):
    """Strategy that trains a LightningModule with torch's ``DistributedDataParallel``: every rank holds all weights.

    Losses, clipping, checkpoints and logs are the same as with :class:`~lightning_fsdp2.FSDP2Strategy`, and either
    strategy reads the other's checkpoints. ``precision="bf16-mixed"`` keeps float32 weights and computes under
    autocast.

    Args:
        config: The flags of DDP.
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

    Example::

        trainer = Trainer(strategy=DDPStrategy(DDPConfig(static_graph=True)), precision="bf16-mixed")
        trainer.fit(module, datamodule)
    """

    strategy_name = "lightning_fsdp2_ddp"
    config: DDPConfig
    manager_class: Callable[[DDPConfig, DeviceMesh], DDPManager] = DDPManager
    refused_callbacks: ClassVar[dict[type[Callback], str]] = {}
    refused_optimizers = ()
    shards_module = False

    def __init__(
        self,
        config: DDPConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        rendezvous_timeout: timedelta = timedelta(minutes=10),
        steady_timeout: timedelta | None = None,
        random_numbers: RandomNumbers = "per_data_rank",
    ) -> None:
        timeouts = {"timeout": timeout, "rendezvous_timeout": rendezvous_timeout, "steady_timeout": steady_timeout}
        check_timeouts(type(self).__name__, **timeouts)
        config = read_options(type(self).__name__, "config", config, DDPConfig)
        checkpoint = read_options(type(self).__name__, "checkpoint", checkpoint, CheckpointConfig)
        super().__init__(
            sizes=ParallelSizes(), config=config, checkpoint=checkpoint, random_numbers=random_numbers, **timeouts
        )
        self._forward_redirection = DDPForwardRedirection()
        self._replica: Replica | None = None
        self._has_stepped = self._has_backward = False

    @override
    def build_manager(self, device_mesh: DeviceMesh) -> DDPManager:
        config = choose_autocast(self.config, str(self.precision_plugin.precision))
        return self.manager_class(config, device_mesh)

    @override
    def setup_training(self, trainer: "Trainer") -> None:
        super().setup_training(trainer)
        wrap = partial(self.manager.replicate, broadcast_buffers=False)
        self._replica = Replica(self.lightning_module, wrap, self.world.data_group, self._wait_to_wrap_again)
        self.model = self._replica.root

    @override
    def teardown(self) -> None:
        self.model, self._replica = self.lightning_module, None  # dropping the wrapper also removes its hooks
        super().teardown()

    @override
    def parallelize_module(self, module: "LightningModule") -> None:
        self.manager.prepare(module)

    @override
    def share_buffers(self) -> None:
        # the strategy broadcasts buffers itself, because torch's DDP does so only in some micro-batches
        if self.config.broadcast_buffers:
            super().share_buffers()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.replica.refresh()
        self.model = self.replica.root
        if self._has_stepped:
            self._has_stepped = self._has_backward = False
        return super().training_step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.replica.check_known()
        self._has_backward = True
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            prepare_for_backward(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.replica.finish_backward(is_manual=not self.lightning_module.automatic_optimization)
        super().post_backward(closure_loss)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self._has_stepped = True
        return output

    @override
    def finish_manual_gradients(self, optimizer: Optimizer) -> None:
        _check_manual_backward(optimizer, has_backward=self._has_backward)
        super().finish_manual_gradients(optimizer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if _UNFINISHED in str(exception):
            exception.args = (
                f"{exception}\nSome parameters do not contribute to the loss: freeze them, or set"
                " DDPConfig(find_unused_parameters=True). Under manual optimisation, another cause is a"
                " `loss.backward()`: call `self.manual_backward(loss)` instead. DDP also needs the gradients of all"
                " parameters, so `backward(inputs=...)` cannot leave out any.",
            )
        super().on_exception(exception)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not isinstance(inner, ZeroRedundancyOptimizer):
            return super().optimizer_state(optimizer)
        inner.consolidate_state_dict()  # torch gathers the whole state only on rank 0, so broadcast it below
        state = self.broadcast(inner.state_dict() if self.is_global_zero else None)
        return get_optimizer_state(self.lightning_module, inner, state)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.steps.accumulating(), self.replica.defer_sync():
            yield

    @property
    def replica(self) -> Replica:
        """The DDP replica of the module. It exists only during a fit."""
        if self._replica is None:
            raise RuntimeError("The module is wrapped in DDP only during a fit.")
        return self._replica

    def _wait_to_wrap_again(self) -> None:
        wait_for_all_ranks(
            "freeze or unfreeze parameters",
            self.world.shorten_timeout(OUTSIDE_CALL_TIMEOUT),
            "All ranks must train the same parameters: change `requires_grad` on all ranks in the same step.",
        )


def _check_manual_backward(optimizer: Optimizer, *, has_backward: bool) -> None:
    """Refuse gradients from a plain ``loss.backward()``, since such gradients would silently differ between ranks."""
    has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    if has_gradients and not has_backward:
        raise ValueError(
            "The optimizer has gradients that were not synchronised over the ranks; call `self.manual_backward(loss)`"
            " instead of `loss.backward()`."
        )

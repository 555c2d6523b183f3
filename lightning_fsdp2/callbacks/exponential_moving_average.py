"""Callback that keeps an exponential moving average of the weights, sharded in the same way as the weights."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2.checkpoint.stages import gather_over_stages, list_names_elsewhere
from lightning_fsdp2.checkpoint.state import shard_like
from lightning_fsdp2.ranks.failures import list_names

_WEIGHTS = "weights"
_UPDATES = "updates"


class ExponentialMovingAverage(Callback):
    """Callback that keeps an exponential moving average of the trained weights.

    Each rank averages its own shards, without communication. An update after an optimizer step computes
    ``average = decay * average + (1 - decay) * weight``, in float32. In the n-th update, ``decay`` is capped at
    ``(1 + n) / (10 + n)``, so that the average quickly forgets the initial weights. Buffers are not averaged, nor are
    parameters that are frozen when training starts.

    Validation, testing, prediction and ``HuggingFaceExport`` use the averages. Training continues with the weights
    themselves. Checkpoints hold both the weights and the averages. With a ``ckpt_path``, ``validate``, ``test`` and
    ``predict`` use the averages in that checkpoint.

    Args:
        decay: Weight of the old average, between 0 and 1.
        every_n_steps: Number of optimizer steps between updates.

    Raises:
        ValueError: When an argument is out of range, or when a checkpoint holds averages of parameters other than those
            that this run trains.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ExponentialMovingAverage(decay={decay}): decay must lie between 0 and 1.")
        if every_n_steps < 1:
            raise ValueError(
                f"ExponentialMovingAverage(every_n_steps={every_n_steps}): every_n_steps must be 1 or more."
            )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.averages: dict[str, Tensor] = {}
        """Averages by parameter name: float32, sharded like the parameters, and of this rank's pipeline stages."""
        self._module: LightningModule | None = None  # module whose weights are averaged
        self._updates = 0
        self._last_step = 0
        self._has_said = False  # whether the log says that evaluations use the averages
        self._loaded: dict[str, Tensor] | None = None
        # weight shards that currently hold averages, each paired with a copy of the weights to restore later
        self._replaced: list[tuple[Tensor, Tensor]] = []
        # the matching shards of averages and weights, cached because finding them takes one operation per shard
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {_WEIGHTS: self.averages, _UPDATES: self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded, self._updates = state_dict[_WEIGHTS], state_dict[_UPDATES]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._has_said = False

    # ------------------------------------------------------------------ averaging

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trained = _get_trained(pl_module)
        if self._loaded is not None:
            everywhere = {name for names in gather_over_stages(pl_module, list(trained)) for name in names}
            if changed := self._loaded.keys() ^ everywhere:
                raise ValueError(
                    "The checkpoint holds moving averages, but not for the same parameters that this run trains; these"
                    f" differ: {list_names(changed)}. Train the same parameters, or load only the checkpoint's weights."
                )
            self._take_loaded(pl_module)
        elif self._module is not pl_module or self.averages.keys() != trained.keys():
            self._module, self._updates = pl_module, 0
            self.averages = {name: _copy(parameter) for name, parameter in trained.items()}

    def _take_loaded(self, module: LightningModule) -> None:
        loaded, self._loaded = self._loaded, None
        parameters, elsewhere = dict(module.named_parameters()), list_names_elsewhere(module)
        self._module = module
        self.averages = {
            name: shard_like(average, parameters[name]) for name, average in loaded.items() if name not in elsewhere
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step
        self._pairs = None

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # update the averages at multiples of `every_n_steps`, so that a resumed run updates them at the same steps
        if trainer.global_step // self.every_n_steps == self._last_step // self.every_n_steps:
            return
        self._last_step = trainer.global_step
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        if self._pairs is None:
            self._pairs = self._pair(pl_module)
        averages, weights = self._pairs
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, weights, alpha=1 - decay)

    def _pair(self, module: LightningModule) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's shards of the averages, and the matching shards of the weights."""
        parameters = dict(module.named_parameters())
        pairs = [(_to_local(average), _to_local(parameters[name])) for name, average in self.averages.items()]
        pairs = [(average, weight) for average, weight in pairs if weight.numel()]
        return [average for average, _ in pairs], [weight for _, weight in pairs]

    # ------------------------------------------------------------------ using the averages

    @contextmanager
    def averaged(self, module: LightningModule) -> Iterator[None]:
        """Replace the module's weights with the averages inside a ``with`` block.

        All ranks must enter the block, outside of forward and backward.
        """
        self._put_in(module)
        try:
            yield
        finally:
            self._take_out()

    @torch.no_grad()
    def _put_in(self, module: LightningModule) -> None:
        averages, weights = self._pair(module)
        self._pairs = None
        self._replaced = [(weight, weight.clone()) for weight in weights]
        for weight, average in zip(weights, averages, strict=True):
            weight.copy_(average)

    @torch.no_grad()
    def _take_out(self) -> None:
        # do not look up parameters by name: after an error, the names may belong to all-gathered weights
        replaced, self._replaced = self._replaced, []
        for weight, own in replaced:
            weight.copy_(own)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loaded is not None:  # a checkpoint with averages was loaded for evaluation
            self._take_loaded(pl_module)
        elif trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is not None:
            self._module = None  # the weights were loaded from a checkpoint without averages
        if pl_module is self._module:
            self._put_in(pl_module)
            if not self._has_said:
                rank_zero_info("ExponentialMovingAverage: the averages are evaluated, not the weights themselves.")
            self._has_said = True
        else:
            rank_zero_warn(
                "ExponentialMovingAverage has no averages for this module, because it was not trained in this process,"
                " or its checkpoint holds none. The weights themselves are evaluated."
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_out()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._take_out()  # restore the weights before other callbacks save a checkpoint


@contextmanager
def use_averages(trainer: Trainer) -> Iterator[None]:
    """Replace the module's weights with their averages inside a ``with`` block, if the Trainer keeps averages.

    All ranks must enter the block.
    """
    averages = [each for each in cast(Any, trainer).callbacks if isinstance(each, ExponentialMovingAverage)]
    with averages[0].averaged(trainer.lightning_module) if averages else nullcontext():
        yield


def _get_trained(module: LightningModule) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

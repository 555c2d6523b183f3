"""One training run on a mesh through the Trainer, and the same in a plain torch loop on one process, compared."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.oracle import EPSILON, LEARNING_RATE, Batch, LossFunction, Record, assert_equal_runs, whole
from helpers.pipelines import merge_stages
from helpers.user_modules import make_trainer
from lightning_fsdp2 import FSDP2Strategy


@dataclass(kw_only=True)
class Case:
    """One training run to compare."""

    make_module: Callable[[], pl.LightningModule]
    """The LightningModule, whose model is (or becomes, in ``configure_model``) its attribute ``model``."""

    make_model: Callable[[], nn.Module]
    """The plain model for the oracle; its weights are replaced by the mesh's initial ones."""

    loss: LossFunction
    batches: Sequence[Batch]
    """Micro-batches; step s, micro-batch m of data parallel rank r is number ``(s * accumulate + m) * dp + r``."""

    joins_ranks: bool = False
    """Whether the oracle gets what all data parallel ranks compute at the same time as one micro-batch."""

    divides_gradients: bool = False
    """Whether the oracle divides the gradients of the summed loss instead of the loss, as ``CausalLM`` does.

    In exact numbers this is the same, but float8 rounds a multiple of a number to another multiple of its rounding.
    """

    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    precision: str = "32-true"
    strategy_class: Callable[..., Strategy] = FSDP2Strategy
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def is_float32(self) -> bool:
        """Whether everything is computed in float32."""
        return self.precision == "32-true" and getattr(self.strategy.get("config"), "autocast_dtype", None) is None


def check_parity(case: Case) -> None:
    """Train on this rank's mesh and alone, and compare; call it on every rank of ``run_ranks``."""
    actual = train_on_mesh(case)
    if torch.distributed.get_rank() == 0:
        dp_size = torch.distributed.get_world_size() // (
            case.strategy.get("tp_size", 1) * case.strategy.get("cp_size", 1) * case.strategy.get("pp_size", 1)
        )
        if case.is_float32:
            assert_equal_runs(actual, train_alone(case, actual.initial, dp_size))
        else:
            assert_bf16_gradients(case, actual, dp_size)


def train_on_mesh(case: Case) -> Record:
    """Train through the Trainer with the strategy and return what this rank saw."""
    module = case.make_module()
    recorder, logger = _Recorder(keeps_trajectory=not case.is_float32), MetricsLogger()
    trainer = make_trainer(
        case.strategy_class(**case.strategy),
        precision=case.precision,
        max_steps=case.steps,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        callbacks=[recorder],
        log_every_n_steps=1,
        logger=logger,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=RankBatches(case.batches))
    record = recorder.record
    record.losses = [metrics["train/loss"] for metrics in logger.history]
    record.norms = [metrics["train/gradient_norm"] for metrics in logger.history]
    record.weights = whole_of_stages(dict(module.model.named_parameters()), trainer)
    return record


def train_alone(case: Case, initial: dict[str, Tensor], dp_size: int) -> Record:
    """Train the same steps in one process."""
    model = case.make_model()
    model.load_state_dict(initial, strict=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON)
    record = Record(initial=initial)
    for step in range(case.steps):
        optimizer.zero_grad()
        record.losses.append(_compute_gradients(case, model, step, dp_size))
        record.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
        norm = torch.nn.utils.clip_grad_norm_(trained, case.clip or float("inf"))
        record.norms.append(norm.item())
        optimizer.step()
    record.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record


def _compute_gradients(case: Case, model: nn.Module, step: int, dp_size: int) -> float:
    """Accumulate into ``model`` the gradients of the whole global batch of a step, and return the loss."""
    window = case.accumulate * dp_size
    batches = case.batches[step * window : (step + 1) * window]
    if case.joins_ranks:
        batches = [join_batches(batches[start : start + dp_size]) for start in range(0, window, dp_size)]
    parts = [case.loss(model, batch) for batch in batches]
    loss, weight = sum(part for part, _ in parts), sum(weight for _, weight in parts)
    if not case.divides_gradients:
        (loss / weight).backward()
        return (loss / weight).item()
    (loss / case.accumulate).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(case.accumulate / weight)
    return (loss / weight).item()


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch of the samples of all."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def assert_bf16_gradients(
    case: Case, actual: Record, dp_size: int, *, make_exact_model: Callable[[], nn.Module] | None = None
) -> float:
    """The mesh's gradient error against fp32 is at most 1.25 times that of one bf16 process. Returns the ratio.

    Both are noise, and that of one step's gradients varies by a tenth or more; so the rule is for the steps together.
    ``make_exact_model`` makes the model of fp32 if that of the case is not exact there.
    """

    def compute_gradients(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
        make_exact = make_exact_model or case.make_model
        model = make_exact() if dtype == torch.float32 else case.make_model()
        model.load_state_dict(actual.trajectory[step], strict=False)
        _compute_gradients(case, model.to(dtype), step, dp_size)
        return {name: p.grad.float() for name, p in model.named_parameters() if p.requires_grad}

    error = reference = 0.0
    for step, gradients in enumerate(actual.gradients):
        exact, one_process = (compute_gradients(step, dtype) for dtype in (torch.float32, torch.bfloat16))
        error += _squared_distance(gradients, exact)
        reference += _squared_distance(one_process, exact)
    assert len(actual.gradients) == case.steps
    ratio = (error / reference) ** 0.5
    assert 0 < ratio <= 1.25, f"the gradient error is {ratio} times that of one bf16 process"
    return ratio


class RankBatches(pl.LightningDataModule):
    """Deals out batches to data parallel ranks, as :class:`Case` says."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Batch]:
        strategy: Any = self.trainer.strategy
        # of Lightning's own strategies every rank has its data
        rank = getattr(strategy, "data_parallel_rank", strategy.global_rank)
        size = getattr(strategy, "data_parallel_size", strategy.world_size)
        own = list(self.batches[rank::size])
        return DataLoader(own, batch_size=None)


class _Recorder(pl.Callback):
    """A callback that records what a user's own would see in ``on_before_optimizer_step``, before clipping.

    The weights of each step are gathered only where they are asked for, because that takes as long as the step.
    """

    def __init__(self, *, keeps_trajectory: bool) -> None:
        self.keeps_trajectory = keeps_trajectory

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.record = Record(initial=whole_of_stages(module.model.state_dict(), trainer))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if self.keeps_trajectory:
            self.record.trajectory.append(whole_of_stages(module.model.state_dict(), trainer))
        gradients = {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}
        self.record.gradients.append(whole_of_stages(gradients, trainer))


def whole_of_stages(tensors: dict[str, Tensor], trainer: pl.Trainer) -> dict[str, Tensor]:
    """The whole tensors of all pipeline stages; a copy on several stages must be the same on all of them."""
    own, strategy = whole(tensors), trainer.strategy
    return own if getattr(strategy, "pp_size", 1) == 1 else merge_stages(own, strategy.world.pipeline_control)


class MetricsLogger(Logger):
    """Keeps what a logger is given."""

    name = version = "metrics"

    def __init__(self) -> None:
        super().__init__()
        self.history: list[dict[str, float]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train/loss" in metrics:
            self.history.append(metrics)


class ScalarLossModule(pl.LightningModule):
    """A user's own module: it owns a model, returns a mean loss, and knows nothing of this package."""

    def __init__(self, make_model: Callable[[], nn.Module], loss: LossFunction, *, meta: bool = False) -> None:
        super().__init__()
        self.make_model, self.loss = make_model, loss
        self.model = None if meta else make_model()
        self.window: list[Tensor] = []

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = self.make_model()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss_sum, weight = self.loss(self.model, batch)
        self.window.append((loss_sum / weight).detach())
        return loss_sum / weight

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        gradients = whole({name: p.grad for name, p in self.model.named_parameters()})
        norm = torch.nn.utils.get_total_norm(gradients.values())
        self.log("train/gradient_norm", norm)
        self.log("train/loss", torch.stack(self.window).mean(), sync_dist=True)
        self.window.clear()
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, eps=EPSILON)


def _squared_distance(gradients: dict[str, Tensor], references: dict[str, Tensor]) -> float:
    return sum((gradients[name] - reference).square().sum().item() for name, reference in references.items())

"""The modules of a user that tests train, the loop that trains them in one process, and their Trainer."""

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from helpers.models import LLAMA, make_causal_lm
from helpers.oracle import QUIET, token_sum_loss, whole
from lightning_fsdp2 import CausalLM, FSDP2Strategy

WIDTH = 8


WORLD = 2


Batch = dict[str, Tensor]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class UserModule(pl.LightningModule):
    """The least that a user writes: layers, a loss, an optimizer; nothing of this package."""

    make_optimizer: Callable[[Any], torch.optim.Optimizer] = staticmethod(partial(torch.optim.SGD, lr=0.1))
    seed: int | None = None
    """What the weights are drawn from, if not from the random numbers of whoever makes the module."""

    def __init__(self) -> None:
        super().__init__()
        if self.seed is not None:
            torch.manual_seed(self.seed)
        self.build()

    def build(self) -> None:
        """Make the layers."""

    def loss(self, batch: Any) -> Tensor:
        return self(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class RowRecorder(UserModule):
    """Has one weight; writes down the rows of tokens of each batch that it trains on and validates on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[list[tuple[int, ...]]] = []
        self.validated: list[list[tuple[int, ...]]] = []

    def build(self) -> None:
        self.weight = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Batch) -> Tensor:
        return (self.weight * batch["input_ids"]).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.trained.append([tuple(row) for row in batch["input_ids"].tolist()])
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append([tuple(row) for row in batch["input_ids"].tolist()])


class WithModel(UserModule):
    """Has a model that ``make_model`` makes in ``configure_model``, and the loss that the model itself computes."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make_model = make_model
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make_model()

    def loss(self, batch: Batch) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Regressor(UserModule):
    """Blocks, a head, a parameter of its own."""

    seed = 0
    make_optimizer = staticmethod(make_optimizer)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return self.head(inputs * self.scale)

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch["inputs"]), batch["targets"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["inputs"])


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"inputs": torch.randn(2, WIDTH, generator=generator), "targets": torch.randn(2, 1, generator=generator)}
        for _ in range(count)
    ]


def make_loader(batches: Sequence[Batch]) -> DataLoader[Batch]:
    """Rank r of n reads the batches r, r + n, ..."""
    return DataLoader(list(batches[dist.get_rank() :: dist.get_world_size()]), batch_size=None)


def make_mixed_batch() -> dict[str, Any]:
    """Return a batch with values of every kind that batches are compared by."""
    return {
        "input_ids": torch.arange(6).reshape(2, 3),
        "pixels": torch.linspace(-1, 1, 4, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "texts": ["one", "two"],
        "nested": [{"a": (1, 2.5, None)}],
    }


class AtSteps(pl.Callback):
    """A callback that calls an action at the end of each given step, after ModelCheckpoint."""

    def __init__(self, actions: dict[int, Callable[[pl.Trainer], Any]]) -> None:
        self.actions = actions

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if action := self.actions.get(trainer.global_step):
            action(trainer)


def make_trainer(strategy: Any = None, **options: Any) -> pl.Trainer:
    """Return a Trainer of all ranks, or with "auto" of this one, that takes two steps and writes and shows nothing."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1 if strategy == "auto" else int(os.environ.get("WORLD_SIZE", 1)),
        "max_steps": -1 if "max_epochs" in options else 2,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=FSDP2Strategy() if strategy is None else strategy, **{**defaults, **QUIET, **options})


def train_alone(
    module: pl.LightningModule,
    batches: Sequence[Batch],
    *,
    steps: int = 2,
    window: int = WORLD,
    clip: Callable[[Any], Any] = lambda parameters: None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = make_optimizer,
) -> None:
    """The oracle: step s takes the next ``window`` batches, which are those of all ranks and micro-batches."""
    stepper = optimizer(module.parameters())
    for step in range(steps):
        stepper.zero_grad()
        (sum(module.loss(batch) for batch in batches[step * window : (step + 1) * window]) / window).backward()
        clip(module.parameters())
        stepper.step()


def assert_same_weights(module: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(whole(dict(module.named_parameters())), dict(expected.named_parameters()))


class Normalized(UserModule):
    """Has a batch norm, whose statistics every rank keeps for itself."""

    seed = 0

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


class Gan(UserModule):
    """Two optimizers, each stepped every ``accumulate`` batches."""

    seed = 0

    def __init__(self, accumulate: int, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate, self.order = accumulate, order
        self.gradients: list[dict[str, Tensor]] = []

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def loss(self, player: str, batch: Batch) -> Tensor:
        noise, real = batch["inputs"], batch["inputs"] ** 2
        if player == "generator":
            return F.softplus(-self.discriminator(self.generator(noise))).mean()
        with torch.no_grad():
            fake = self.generator(noise)
        return F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers = dict(zip(("generator", "discriminator"), self.optimizers(), strict=True))
        steps = (batch_idx + 1) % self.accumulate == 0
        for player in self.order.split(", "):
            optimizer = optimizers[player]
            with optimizer.toggle_model(sync_grad=steps):
                self.manual_backward(self.loss(player, batch) / self.accumulate)
                if steps:
                    self.gradients.append(whole({n: p.grad for n, p in getattr(self, player).named_parameters()}))
                    optimizer.step()
                    optimizer.zero_grad()

    def train_alone(self, batches: Sequence[Batch]) -> None:
        optimizers = dict(zip(("generator", "discriminator"), self.configure_optimizers(), strict=True))
        for micro_batch in range(len(batches) // WORLD):
            for player in self.order.split(", "):
                parameters = dict(getattr(self, player).named_parameters())
                losses = [self.loss(player, batch) for batch in batches[micro_batch * WORLD :][:WORLD]]
                loss = sum(losses) / WORLD / self.accumulate
                loss.backward(inputs=list(parameters.values()))
                if (micro_batch + 1) % self.accumulate == 0:
                    self.gradients.append({name: p.grad.clone() for name, p in parameters.items()})
                    optimizers[player].step()
                    optimizers[player].zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [make_optimizer(model.parameters()) for model in (self.generator, self.discriminator)]


PROMPT = torch.tensor([[1, 5, 9, 7]])


SMALL_LLAMA = {**LLAMA, "num_hidden_layers": 2}


def make_language_model() -> CausalLM:
    torch.manual_seed(0)
    module = CausalLM(config=SMALL_LLAMA, optimizer=partial(torch.optim.SGD, lr=0.3))
    module.model = make_causal_lm(SMALL_LLAMA)
    return module


def generate(model: Any) -> Tensor:
    return model.generate(PROMPT, max_new_tokens=2, do_sample=False)


def train_language_model_alone(batches: Sequence[Batch], steps: int, window: int) -> tuple[list[nn.Module], float]:
    """The models after 0, 1, 2, ... steps, and the last step's gradient norm before clipping."""
    models, norm = [make_language_model().model], torch.tensor(0.0)
    for step in range(steps):
        model = copy.deepcopy(models[-1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        parts = [token_sum_loss(model, batch) for batch in batches[step * window : (step + 1) * window]]
        optimizer.zero_grad()
        (sum(loss for loss, _ in parts) / sum(tokens for _, tokens in parts)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        models.append(model)
    return models, norm.item()


class ByHand(Regressor):
    """One optimizer, stepped by hand every second batch; each backward may be synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.scale
        self.scale = torch.ones(())  # no parameter: FSDP2 refuses one that hangs here

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad()


class ThrowsAway(ByHand):
    """The first micro-batch of three is not to count."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 3 == 2):
            self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 3 == 0:
            optimizer.zero_grad()
        elif batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class Scheduled(Regressor):
    """Two groups of parameters, and a schedule."""

    def configure_optimizers(self) -> Any:
        biases = [parameter for name, parameter in self.named_parameters() if name.endswith("bias")]
        others = [parameter for name, parameter in self.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.98**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train_scheduled_alone(module: Scheduled, batches: list[Batch], window: int, clip: float | None) -> list[float]:
    configured = module.configure_optimizers()
    optimizer, schedule, losses = configured["optimizer"], configured["lr_scheduler"]["scheduler"], []
    for start in range(0, len(batches), window):
        optimizer.zero_grad()
        loss = sum(module.loss(batch) for batch in batches[start : start + window]) / window
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


class CountsSamples(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.counter = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counter.update(1.0)
        self.log("batches", self.counter)

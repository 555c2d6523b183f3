"""Layouts that write and read checkpoints, and one training run that is the same on all of them."""

import math
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.mesh_runs import whole_of_stages
from helpers.models import LLAMA, VOCABULARY, make_causal_lm
from helpers.oracle import EPSILON, LEARNING_RATE, whole
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from lightning_fsdp2 import (
    CheckpointConfig,
    DDPConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2Strategy,
    MegatronFSDPConfig,
    MegatronFSDPStrategy,
)
from lightning_fsdp2.ranks.coordination import gather_objects

SAVED_AT = 2
STEPS = 4
ROWS = 12
"""Sequences of the global batch: as many on each data parallel rank, be they 1, 2, 3 or 4."""

TOKENS = torch.randint(3, VOCABULARY, (STEPS, ROWS, 12), generator=torch.Generator().manual_seed(1))


class Model(pl.LightningModule):
    """A user's module with all that naive checkpoint code loses or doubles.

    Tied embeddings, a frozen parameter, one that no loss uses, two groups of the optimizer, and running statistics
    that the loss depends on. The batch of a step is known by its number: where data loaders go on is tested elsewhere.
    What a data loader gives are the rows of the batch, which a pipeline divides into micro-batches.

    Args:
        seed: Of the first weights.
        optimize_unused: Whether the optimizer gets the parameter that no loss uses, and for which it has no state.
    """

    config: ClassVar[dict[str, Any]] = LLAMA

    def __init__(self, seed: int, *, optimize_unused: bool = True) -> None:
        super().__init__()
        self.optimize_unused = optimize_unused
        torch.manual_seed(seed)
        self.model: Any = make_causal_lm({**self.config, "num_hidden_layers": 4, "tie_word_embeddings": True})
        self.model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.register_buffer("running_mean", torch.zeros(()))
        self.order = [name for name, _ in self.named_parameters()]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        # of the whole global batch, which a layer that normalises over the ranks would see too
        self.running_mean.lerp_(TOKENS[self.trainer.global_step].float().mean() / VOCABULARY, 0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = TOKENS[self.trainer.global_step][batch.cpu()]
        rank, size = 0, 1
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            rank, size = mesh.get_local_rank(), mesh.size()
        rows = tokens.chunk(size)[rank]
        return self.model(input_ids=rows, labels=rows, use_cache=False).loss * (1 + self.running_mean)

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        """Without a step, no Trainer would load weights to predict with."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.arange(ROWS).expand(STEPS, ROWS), batch_size=None)

    def configure_optimizers(self) -> Any:
        parameters = list((self if self.optimize_unused else self.model).parameters())
        matrices = {"params": [parameter for parameter in parameters if parameter.ndim > 1]}
        vectors = {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([matrices, {**vectors, "lr": LEARNING_RATE / 2}], lr=LEARNING_RATE, eps=EPSILON)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Mixture(Model):
    """The same with a mixture of experts, whose weights files hold one by one and the model packed."""

    config: ClassVar[dict[str, Any]] = {
        **LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }


class ShardedModel(Model):
    """The same, sharded by hand as Lightning's ``ModelParallelStrategy`` wants it."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        fully_shard(self.unused, mesh=mesh)


@dataclass(frozen=True)
class Layout:
    """How many ranks, and what the Trainer gets."""

    world_size: int
    make_strategy: Callable[[], Any]
    make_module: Callable[..., pl.LightningModule] = Model
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    """What stands in for hardware that the tests do without."""

    optimizes_unused: bool = True
    """Whether an optimizer leaves a parameter alone that no loss uses."""

    data_parallel_size: int = 1

    features: dict[str, Hashable] = field(default_factory=dict)
    """What decides which parts of a tensor a rank has, and how it writes them.

    A kind of parallelism has the strategy as its value, since each strategy cuts tensors in its own way. Its size is no
    feature: two ranks and four run the same lines. Neither is that of data parallelism, except that three ranks cut
    unevenly. Each layout reads its own checkpoint in any case.
    """

    @property
    def is_mixture(self) -> bool:
        return self.make_module is Mixture

    @property
    def cost(self) -> float:
        """What a run costs, as a multiple of one rank's."""
        return self.world_size * (1 if self.context is nullcontext else 1.5)

    def run(self, function: Callable[[], Any]) -> list[Any]:
        """Call ``function`` on as many ranks as there are."""

        def run_in_context() -> Any:
            with self.context():
                return function()

        return run_ranks(run_in_context, self.world_size, group=False)


def _fsdp2(
    world_size: int, flags: dict[str, Any] | None = None, *, checkpoint: CheckpointConfig | None = None, **sizes: int
) -> Layout:
    checkpoint = checkpoint or CheckpointConfig()
    strategy = partial(FSDP2Strategy, config=FSDP2Config(**(flags or {})), checkpoint=checkpoint, **sizes)
    layout = Layout(world_size, strategy)
    return _describe(layout, "fsdp2", flags, sizes, format=checkpoint.format, async_save=checkpoint.async_save)


def _megatron_fsdp(world_size: int, flags: dict[str, Any] | None = None, **sizes: int) -> Layout:
    strategy = partial(MegatronFSDPStrategy, config=MegatronFSDPConfig(**(flags or {})), **sizes)
    layout = Layout(world_size, strategy, context=cuda_on_cpu, optimizes_unused=False)
    return _describe(layout, "megatron_fsdp", flags, sizes, format="sharded", async_save=False)


def _describe(
    layout: Layout, strategy: str, flags: dict[str, Any] | None, sizes: dict[str, int], **features: Hashable
) -> Layout:
    data_parallel_size = layout.world_size // math.prod(
        sizes.get(axis, 1) for axis in ("tp_size", "cp_size", "pp_size")
    )
    features |= {"strategy": strategy, **dict.fromkeys(sizes, strategy)}
    features |= {flag: (strategy, value) for flag, value in (flags or {}).items() if flag != "pp_microbatches"}
    return replace(layout, data_parallel_size=data_parallel_size, features=features)


def _with(layout: Layout, **features: Hashable) -> Layout:
    return replace(layout, features={**layout.features, **features})


_DENSE = {
    "plain": Layout(1, lambda: "auto", features={"strategy": "one process"}),
    "dp1": _fsdp2(1),
    "dp2": _fsdp2(2),
    "dp3": _with(_fsdp2(3), uneven=True),
    "dp4": _fsdp2(4),
    "tp2": _fsdp2(2, tp_size=2),
    "dp2-tp2": _fsdp2(4, tp_size=2),
    "dp2-tp2-sp": _fsdp2(4, {"sequence_parallel": True}, tp_size=2),
    "cp2": _fsdp2(2, cp_size=2),
    "dp2-cp2": _fsdp2(4, cp_size=2),
    "hsdp2x2": _fsdp2(4, dp_replicate_size=2),
    "pp2": _fsdp2(2, pp_size=2),
    "pp4": _fsdp2(4, checkpoint=CheckpointConfig(async_save=True), pp_size=4),
    "pp2-full": _fsdp2(2, checkpoint=CheckpointConfig(format="full"), pp_size=2),
    "pp2-interleaved": _fsdp2(2, {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 2}, pp_size=2),
    "pp2-dp2": _fsdp2(4, {"pp_microbatches": 2}, pp_size=2),
    "pp2-tp2-sp": _fsdp2(4, {"sequence_parallel": True}, pp_size=2, tp_size=2),
    "ddp2": Layout(
        2,
        partial(DDPStrategy, DDPConfig(find_unused_parameters=True)),
        data_parallel_size=2,
        features={"strategy": "ddp", "format": "sharded", "async_save": False},
    ),
    "megatron2": _megatron_fsdp(2),
    "megatron-hsdp2x2": _megatron_fsdp(4, dp_replicate_size=2),
    "megatron-dp2-tp2": _megatron_fsdp(4, tp_size=2),
    "megatron-dp2-tp2-sp-zero1": _megatron_fsdp(4, {"sequence_parallel": True, "zero_dp_strategy": 1}, tp_size=2),
    # Lightning's own strategy asks every checkpoint for a state of each parameter that its optimizer holds
    "theirs": Layout(
        2,
        partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1),
        ShardedModel,
        optimizes_unused=False,
        data_parallel_size=2,
        features={"strategy": "lightning"},
    ),
}
"""``plain`` is one process without a strategy, and a single file; ``theirs`` Lightning's own directory."""


def _mixture(layout: Layout) -> Layout:
    return replace(layout, make_module=Mixture)


LAYOUTS = {
    **_DENSE,
    "mixture-plain": _mixture(_DENSE["plain"]),
    "mixture-dp2": _mixture(_DENSE["dp2"]),
    "mixture-dp2-tp2-sp": _mixture(_DENSE["dp2-tp2-sp"]),
    "mixture-hsdp2x2": _mixture(_DENSE["hsdp2x2"]),
    "mixture-ddp2": _mixture(_DENSE["ddp2"]),
    "mixture-megatron-dp2-tp2": _mixture(_DENSE["megatron-dp2-tp2"]),
    "ep2": _mixture(_fsdp2(2, ep_size=2)),
    "ep4": _mixture(_fsdp2(4, ep_size=4)),
    "ep2-efsdp2": _with(_mixture(_fsdp2(4, ep_size=2)), experts_sharded=True),
    "hsdp2-ep2": _mixture(_fsdp2(4, ep_size=2, dp_replicate_size=2)),
    "pp2-ep2": _mixture(_fsdp2(4, {"pp_microbatches": 2}, pp_size=2, ep_size=2)),
    "cp2-ep2": _mixture(_fsdp2(2, ep_size=2, cp_size=2)),
    "dp2-tp2-ep4-sp": _mixture(_fsdp2(4, {"sequence_parallel": True}, ep_size=4, tp_size=2)),
}
"""Those of a dense model, and those of a mixture of experts, with and without expert parallelism."""


@dataclass
class State:
    """What a checkpoint must bring back; all tensors whole."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """By the parameter's name and the kind of its state."""

    groups: list[dict[str, Any]]
    schedule: dict[str, Any]
    step: int


@dataclass
class Run:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    """As it was "saved", or at the "start" of a run that goes on, and at the "end"."""


class Observer(pl.Callback):
    """Saves on the way if ``path`` is given, and fills in ``run``."""

    def __init__(self, run: Run, path: Path | None) -> None:
        self.run, self.path = run, path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.path is None:
            self.run.states["start"] = get_state(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.run.losses.append(outputs["loss"].item())
        if trainer.global_step == SAVED_AT and self.path is not None:
            trainer.save_checkpoint(self.path)
            self.run.states["saved"] = get_state(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.run.states["end"] = get_state(trainer)


def get_state(trainer: pl.Trainer) -> State:
    """Gather what ``trainer`` holds; every rank must call it."""
    (optimizer,) = trainer.optimizers
    names = {parameter: name for name, parameter in trainer.lightning_module.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    return State(
        weights=whole_of_stages(trainer.lightning_module.state_dict(), trainer),
        optimizer=whole_of_stages(moments, trainer),
        groups=[
            {**_without_names(group), "params": own}
            for group, own in zip(optimizer.param_groups, _groups_of_stages(groups, trainer), strict=True)
        ],
        schedule=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        step=trainer.global_step,
    )


def _groups_of_stages(groups: list[list[str]], trainer: pl.Trainer) -> list[list[str]]:
    """The names of all pipeline stages in each group, in the order of a module that is not divided."""
    if getattr(trainer.strategy, "pp_size", 1) == 1:
        return groups
    stages = gather_objects(groups, trainer.strategy.world.pipeline_control)
    order = trainer.lightning_module.order
    return [[name for name in order if any(name in names for names in parts)] for parts in zip(*stages, strict=True)]


def _without_names(group: dict[str, Any]) -> dict[str, Any]:
    """Torch keeps them if the file has them, as one that was a directory does."""
    return {key: value for key, value in group.items() if key != "param_names"}


def train(name: str, *, seed: int, optimize_unused: bool, save: Path | None = None, resume: Path | None = None) -> Run:
    """Train to the end, from ``seed`` or from the checkpoint ``resume`` on; every rank of the layout must call it."""
    run = Run()
    layout = LAYOUTS[name]
    module = layout.make_module(seed, optimize_unused=optimize_unused)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The checkpoint holds the random states")  # of another number of ranks
        warnings.filterwarnings("ignore", r"The loss does not use .*unused\.bias, unused\.weight")
        trainer = make_trainer(layout.make_strategy(), max_steps=STEPS, callbacks=[Observer(run, save)])
        trainer.fit(module, ckpt_path=resume)
    return run


def load_weights(name: str, *, seed: int, path: Path) -> dict[str, Tensor]:
    """Load the weights of a checkpoint, as a test or a prediction does; every rank of the layout must call it."""
    module = LAYOUTS[name].make_module(seed)
    trainer = make_trainer(LAYOUTS[name].make_strategy(), limit_predict_batches=0)
    trainer.predict(module, module.train_dataloader(), ckpt_path=path)
    return whole(module.state_dict())

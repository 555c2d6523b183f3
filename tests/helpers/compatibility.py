"""The table of the Trainer's options: what each is to do, how that is checked, which strategy refuses it and why.

A check trains on all ranks, and beside that in one process that sees the same global batches, with Lightning's own
Trainer: what an option does there, it does here.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from helpers.oracle import QUIET
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import WORLD, Batch, Regressor, assert_same_weights, make_batches, make_loader

Check = Callable[[Kind, Path], None]
"""Called on every rank with a strategy and an empty folder that all ranks share."""


@dataclass(frozen=True)
class Option:
    """A row: an argument of the Trainer, a callback or a method of the Tuner."""

    group: str
    name: str
    tried: str
    """What the check has seen, for the reader of the document."""

    check: Check | None
    """None for what cannot be tried on this machine."""

    refused: dict[str, str] = field(default_factory=dict)
    """The reasons, by strategy; refusals are errors before training that name the option."""

    named: str = ""
    """The pattern of the refusal where it is not the option's name."""

    slow: bool = False

    def describe(self, strategy: str) -> str:
        """The cell of the document."""
        if self.check is None:
            return "not tried here"
        return f"refused: {self.refused[strategy]}" if strategy in self.refused else "works"

    def run(self, strategy: str, folder: Path) -> None:
        """Check the option, or that it is refused before training."""
        if self.check is None:
            return
        kind = STRATEGIES[strategy]
        with _global_state_kept():
            if strategy not in self.refused:
                self.check(kind, folder)
                return
            steps = patch.object(kind.strategy, "training_step", side_effect=AssertionError("trained before"))
            error = pytest.raises((ValueError, MisconfigurationException), match=self.named or re.escape(self.name))
            with steps, error:
                self.check(kind, folder)


OPTIONS: list[Option] = []


def option(
    group: str, name: str, tried: str, *, refused: dict[str, str] | str = "", named: str = "", slow: bool = False
) -> Callable[[Check], Check]:
    """Add a row with the decorated check; one reason stands for all strategies."""
    reasons = dict.fromkeys(STRATEGIES, refused) if isinstance(refused, str) and refused else dict(refused or {})

    def add(check: Check) -> Check:
        OPTIONS.append(Option(group, name, tried, check, reasons, named, slow))
        return check

    return add


trainer_option = partial(option, "Trainer")
callback_option = partial(option, "callbacks")
tuner_option = partial(option, "Tuner")


def try_options(strategy: str, options: Sequence[Option], folder: Path) -> None:
    """Check ``options`` one after another, all in one start of the ranks.

    Raises:
        RankError: For the first that fails; it names the option.
    """
    STRATEGIES[strategy].run(_try_on_rank, WORLD, strategy, options, folder)


def _try_on_rank(strategy: str, options: Sequence[Option], folder: Path) -> None:
    for row in options:
        own = folder / row.group / row.name
        own.mkdir(parents=True, exist_ok=True)
        try:
            row.run(strategy, own)
        except BaseException as error:
            raise AssertionError(f"{row.group}, {row.name}: {type(error).__name__}: {error}") from error
        dist.barrier()  # the next one is not to begin where a rank may still fail


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Undo what Trainers set for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    anomaly, benchmark = torch.is_anomaly_enabled(), torch.backends.cudnn.benchmark
    with patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(deterministic)
    torch.autograd.set_detect_anomaly(anomaly)
    torch.backends.cudnn.benchmark = benchmark


# ---------------------------------------------------------------------- the document

HEADINGS = {"Trainer": "Arguments of the Trainer", "callbacks": "Callbacks", "Tuner": "Tuner"}


class Difference(NamedTuple):
    """What is not as under Lightning's own strategy, by design or because it cannot be."""

    what: str
    under_ddp: str
    here: str
    reason: str


DIFFERENCES = (
    Difference(
        "`X.ckpt`",
        "a file",
        'a directory; a file with `CheckpointConfig(format="full")`; `lightning_fsdp2.load_from_checkpoint` reads both,'
        " for modules and data modules, where `load_from_checkpoint` of the class reads files",
        "each rank writes what it holds",
    ),
    Difference(
        "end of a fit with `ModelCheckpoint`",
        "keeps the last checkpoint that was saved before",
        "`last.ckpt` has the last step, unless `CheckpointConfig(save_at_end=False)`",
        "no step is lost",
    ),
    Difference(
        "a run that resumes from `trainer.save_checkpoint(...)` after a fit with `max_steps`",
        "skips the rest of an epoch that was cut short, and begins the next epoch too far on",
        "continues where the fit ended",
        "if data loaders have a state, the run trains what an uninterrupted run would have trained",
    ),
    Difference(
        "the order of a `DistributedSampler` in a resumed run",
        "the first epoch has the order of epoch 0",
        "the first epoch has its own order",
        "Lightning creates the iterators before it calls `set_epoch` (2.6.6)",
    ),
    Difference(
        "`ModelCheckpoint(every_n_train_steps=...)` with accumulation",
        "may save in the middle of an accumulation",
        "saves after optimizer steps",
        "a checkpoint does not hold accumulated gradients",
    ),
    Difference(
        "`on_load_checkpoint` before an evaluation",
        "gets `optimizer_states`",
        "does not get them",
        "reading them would take time and memory",
    ),
    Difference(
        "a checkpoint of another model",
        "`RuntimeError`",
        "`ValueError` on every rank, with a remedy",
        "a user's mistake is a `ValueError`",
    ),
    Difference(
        "`self.log(..., sync_dist=True)` with different numbers of samples on the ranks",
        "divides by the mean number, rounded down: 3 for 4 and 3 samples",
        "the mean over all samples",
        "the rounding makes Lightning's result inexact (2.6.6)",
    ),
    Difference(
        "`trainer.predict` with fewer samples than ranks",
        "hangs until its timeout",
        "a `ValueError` on every rank",
        "a rank without a batch cannot take part",
    ),
    Difference(
        "`trainer.init_module(empty_init=True)`",
        "memory without values on the device",
        "the meta device under FSDP2; weights come from the module's `reset_parameters`, or a checkpoint",
        "no rank holds the whole module",
    ),
    Difference(
        "random numbers after `seed_everything`",
        "iterators of loaders draw their seed from the global generator",
        "iterators have their own generator: the same seed gives other dropout masks, and another order for a loader"
        " with `shuffle=True` and `use_distributed_sampler=False`",
        "a resumed run draws the same numbers as an uninterrupted one",
    ),
    Difference(
        "`trainer.callbacks` during a run, reports of profilers",
        "contain the user's callbacks",
        "also contain one or two callbacks of the strategy until the run ends",
        "they handle signals and logs: [callbacks.md](callbacks.md)",
    ),
    Difference(
        "rows and hyperparameters in loggers",
        "a row for each call",
        "one row per step, and the hyperparameter `run`",
        "[tracking.md](tracking.md)",
    ),
    Difference(
        "`trainer.fit(torch.compile(module))`",
        "compiles the module",
        "Lightning's error, which names its own strategies; use `enable_compile` of the config",
        "layers are compiled one by one, before they are wrapped",
    ),
    Difference(
        '`precision="bf16-mixed"`, output of the module',
        "bfloat16",
        "float32 under FSDP2",
        "losses are computed in float32",
    ),
    Difference(
        "`trainer.model` while it trains",
        "`DistributedDataParallel`",
        "the LightningModule itself under FSDP2",
        "torch shards it in place",
    ),
    Difference(
        "parameters that the loss does not use",
        "an error, or `find_unused_parameters`",
        "not changed under FSDP2; the same as in Lightning under DDP",
        "nothing waits for their gradients",
    ),
    Difference(
        "weights that are used without calling their module: `F.linear(x, self.layer.weight)`, a penalty on"
        " `self.parameters()`",
        "work",
        "under FSDP2 an error that says what to do instead; for a penalty, use the optimizer's `weight_decay`",
        "weights are whole only in the forward of their module",
    ),
    Difference(
        "`self.load_state_dict(...)` with whole tensors in `on_fit_start` or later",
        "works",
        "under FSDP2 an error; load in `__init__`, `setup` or `configure_model`",
        "the module is sharded between `setup` and `on_fit_start`",
    ),
    Difference(
        "a gradient of a gradient (`create_graph=True`)",
        "works",
        "under FSDP2 an error that says so",
        "weights are freed after their forward",
    ),
    Difference(
        "parameters without a dimension, embeddings with `sparse=True`",
        "work",
        "refused if parameters are sharded",
        "there is nothing to shard; sparse gradients have no reduce-scatter",
    ),
    Difference(
        "parameters of the LightningModule itself under manual optimisation",
        "work",
        "refused if parameters are sharded",
        "they are gathered once for the whole step",
    ),
    Difference(
        "`LBFGS`, `Rprop`, `Adafactor`",
        "work",
        "refused if parameters are sharded",
        "torch's implementations cannot step on shards",
    ),
    Difference(
        "`Muon` for a matrix of one row",
        "works",
        "under FSDP2 torch's error; use another optimizer for this matrix, as for a vector",
        "its products change how the row is sharded",
    ),
    Difference(
        "`lightning.pytorch.utilities.grad_norm`",
        "works",
        "under FSDP2 an error that says what to use, such as the callback `GradientNorm`",
        "it reads gradients as if they were whole",
    ),
    Difference(
        "`TensorBoardLogger(log_graph=True)` with an `example_input_array`",
        "traces on rank 0",
        "refused if parameters are sharded",
        "a forward needs all ranks",
    ),
    Difference(
        "`copy.deepcopy(module)`, `module.to_torchscript()` after a fit",
        "work",
        "torch's error if parameters are sharded; load a checkpoint into a new module",
        "a rank has only a part of the module",
    ),
)


def describe_differences() -> list[str]:
    """Return the section of the document on what a user of Lightning's own strategy may not expect."""
    return [
        "",
        "## What differs from Lightning's `ddp`",
        "",
        "We ran about 175 uses of `fit`, `validate`, `test`, `predict`, loops, checkpoints, callbacks and the Tuner",
        'under Lightning\'s `"ddp"`, `FSDP2Strategy` and `DDPStrategy`, on two ranks and most of them also on one. We',
        "compared values, files, errors and the order of hooks. `tests/strategies/test_beside_ddp.py` keeps a part of",
        "these comparisons. These uses differ:",
        "",
        "| | Lightning's `ddp` | here | because |",
        "|---|---|---|---|",
        *(f"| {' | '.join(difference)} |" for difference in DIFFERENCES),
    ]


def describe_options(made_with: str) -> str:
    """The document, in Markdown; ``made_with`` says when and with which versions the checks ran."""
    lines = [
        "# What works under which strategy",
        "",
        made_with,
        "",
        "This page lists every argument of Lightning's Trainer, every callback of Lightning, and its Tuner. *works*",
        "means that on two CPU ranks the option did the same as in one process, with the values and at the times in",
        "the second column. If the option can change weights, they were compared. *refused* means that an error before",
        "the first step names the option. Megatron-FSDP needs GPUs, so it ran with a stand-in for CUDA's streams.",
        "Other common features of the strategies are in [strategies.md](strategies.md).",
    ]
    for group, heading in HEADINGS.items():
        names = [f"`{kind.strategy.__name__}`" for kind in STRATEGIES.values()]
        lines += ["", f"## {heading}", "", f"| | tried | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
        for row in OPTIONS:
            if row.group == group:
                cells = " | ".join(row.describe(strategy) for strategy in STRATEGIES)
                lines.append(f"| `{row.name}` | {row.tried} | {cells} |")
    return "\n".join([*lines, *describe_differences(), ""])


# ---------------------------------------------------------------------- runs to compare


class Both(NamedTuple):
    """A run on the mesh, and the same in one process."""

    mesh: pl.Trainer
    alone: pl.Trainer


def fit(kind: Kind, batches: Sequence[Batch], module: Any = None, validation: Any = (), **options: Any) -> pl.Trainer:
    """Train on the mesh: rank r reads the batches r, r + 2, ..."""
    trainer = kind.make_trainer(**options)
    trainer.fit(module or Regressor(), make_loader(batches), make_loader(validation) if validation else None)
    return trainer


def make_lone_trainer(**options: Any) -> pl.Trainer:
    """Lightning's own, for this process alone."""
    with patch.dict(os.environ):
        for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK"):
            os.environ.pop(name)
        return pl.Trainer(accelerator="cpu", devices=1, **{"max_steps": 2, **QUIET, **options})


def join(batches: Sequence[Batch]) -> list[Batch]:
    """One batch for those that the ranks read at the same time."""
    return [
        {key: torch.cat([batch[key] for batch in batches[start : start + WORLD]]) for key in batches[start]}
        for start in range(0, len(batches), WORLD)
    ]


@contextmanager
def as_one_process() -> Iterator[None]:
    """Let every rank be the one process of a Trainer of its own."""
    rank = rank_zero_only.rank
    try:
        yield
    finally:
        rank_zero_only.rank = rank


def fit_alone(batches: Sequence[Batch], module: Any = None, validation: Any = (), **options: Any) -> pl.Trainer:
    """The same in one process, on the same global batches."""
    with as_one_process():
        trainer = make_lone_trainer(**options)
        loaders = [DataLoader(join(part), batch_size=None) if part else None for part in (batches, validation)]
        trainer.fit(module or Regressor(), *loaders)
    return trainer


def fit_both(
    kind: Kind,
    batches: int = 4,
    *,
    make_module: Callable[[], pl.LightningModule] = Regressor,
    make_callbacks: Callable[[], list[pl.Callback]] = list,
    validation: int = 0,
    **options: Any,
) -> Both:
    """Train twice, and compare the weights."""
    data = make_batches(batches * WORLD)
    runs = (partial(fit, kind), fit_alone)
    mesh, alone = (
        run(data, make_module(), data[: validation * WORLD], callbacks=make_callbacks(), **options) for run in runs
    )
    assert_same_weights(mesh.lightning_module, alone.lightning_module)
    for counter in ("global_step", "current_epoch"):
        assert getattr(mesh, counter) == getattr(alone, counter), counter
    return Both(mesh, alone)

"""A signal on any rank: all ranks save behind a step, exit, and the same command goes on as if nothing had been."""

import csv
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import RankError, run_ranks
from helpers.user_modules import WORLD, Gan, Regressor, make_batches, make_loader, make_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_fsdp2 import CheckpointConfig, FSDP2Strategy
from lightning_fsdp2.callbacks import Preemption

BATCHES = make_batches(32)


class Signal(pl.Callback):
    """Sends itself a signal amid a step or validation of one rank."""

    def __init__(self, rank: int = 1, name: str = "SIGTERM", step: int = 2, hook: str = "on_before_backward") -> None:
        self.rank, self.number, self.step = rank, signal.Signals[name], step
        setattr(self, hook, self.send)

    def send(self, trainer: pl.Trainer, *args: Any, **options: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.number)
            time.sleep(0)  # Python handles it here


def make_stateful_loader() -> StatefulDataLoader[Any]:
    return StatefulDataLoader(BATCHES[dist.get_rank() :: dist.get_world_size()], batch_size=None)


def get_step(path: Path) -> int:
    return torch.load(path / "meta.pt", weights_only=False)["global_step"]


def make_checkpoints(folder: Path, **options: Any) -> ModelCheckpoint:
    defaults = {"every_n_train_steps": 100, "save_last": "link", "enable_version_counter": False}
    return ModelCheckpoint(folder, **{**defaults, **options})


def train(folder: Path, *callbacks: pl.Callback, module: pl.LightningModule | None = None, **options: Any) -> Any:
    """Fit for six steps from the last checkpoint, as the command line does; the exit code where it ended early."""
    strategy = options.pop("strategy", None) or FSDP2Strategy()
    checkpoints, ckpt_path = options.pop("checkpoints", {}), options.pop("ckpt_path", "last")
    trainer = make_trainer(
        strategy,
        max_steps=6,
        callbacks=[*callbacks, make_checkpoints(folder, **checkpoints)],
        **{"enable_checkpointing": True, "default_root_dir": folder, **options},
    )
    module = module or Regressor()
    code = None
    try:
        trainer.fit(module, make_stateful_loader(), make_loader(BATCHES[:8]), ckpt_path=ckpt_path)
    except SystemExit as end:
        code = end.code
    return code, trainer, whole(dict(module.named_parameters()))


def assert_goes_on_as_if_nothing_had_been(
    folder: Path, *, saved: int, code: int, signals: Signal, **options: Any
) -> None:
    def run() -> None:
        _, _, expected = train(folder / "whole", **options)
        ended, trainer, _ = train(folder / "run", signals, **options)
        assert (ended, trainer.global_step) == (code, saved)
        assert (folder / "run" / "last.ckpt").is_dir()
        ended, trainer, weights = train(folder / "run", **options)
        assert (ended, trainer.global_step) == (None, 6)
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)

    run_ranks(run, WORLD)


@pytest.mark.guarantees("sigterm", "exit-codes")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_amid_accumulation_saves_behind_the_step(tmp_path: Path, rank: int) -> None:
    assert_goes_on_as_if_nothing_had_been(
        tmp_path, saved=3, code=143, signals=Signal(rank), accumulate_grad_batches=2, limit_val_batches=0
    )


def test_one_that_comes_behind_the_backward_saves_behind_the_next_step(tmp_path: Path) -> None:
    signals = Signal(name="SIGUSR1", hook="on_before_zero_grad")
    assert_goes_on_as_if_nothing_had_been(tmp_path, saved=3, code=138, signals=signals, limit_val_batches=0)


class Validates(Regressor):
    """Logs a metric at the end of each validation, and notes it: the step, and the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[list[int]] = []

    def on_validation_start(self) -> None:
        self.validated.append([self.trainer.global_step])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated[-1].append(batch_idx)
        self.log("loss/validation", 1.0 - 0.1 * self.trainer.global_step)


EVERY_SECOND_STEP = {"val_check_interval": 2, "check_val_every_n_epoch": None}
EVERY_EPOCH = {"limit_train_batches": 2}  # the epoch has not ended before the validation has


@pytest.mark.parametrize(
    ("options", "hook"),
    [
        (EVERY_SECOND_STEP, "on_before_backward"),
        *(
            pytest.param(options, hook, marks=pytest.mark.slow)
            for options, hook in (
                (EVERY_SECOND_STEP, "on_validation_batch_start"),
                (EVERY_SECOND_STEP, "on_validation_start"),
                (EVERY_EPOCH, "on_before_backward"),
                (EVERY_EPOCH, "on_validation_batch_start"),
                (EVERY_EPOCH, "on_validation_start"),
            )
        ),
    ],
)
def test_a_validation_that_is_left_out_is_made_up_for(tmp_path: Path, hook: str, options: Any) -> None:
    options = {**options, "num_sanity_val_steps": 0}

    def run() -> None:
        stopping = partial(EarlyStopping, "loss/validation", patience=5)
        first, second, third = Validates(), Validates(), Validates()
        _, _, expected = train(tmp_path / "whole", stopping(), module=first, **options)
        # where ModelCheckpoint has saved in this very step, too
        every = {"every_n_train_steps": 2, "save_top_k": -1}
        is_before = hook == "on_before_backward"
        signals = Signal(hook=hook, step=1 if is_before else 2)
        ended, trainer, _ = train(tmp_path / "run", stopping(), signals, module=second, checkpoints=every, **options)
        assert (ended, trainer.global_step) == (143, 2)
        assert second.validated in ([[]] if is_before else [[[2, 0]], [[2, 0, 1]]])
        last = stopping()
        ended, trainer, weights = train(tmp_path / "run", last, module=third, checkpoints=every, **options)
        assert (ended, trainer.global_step) == (None, 6)
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
        assert third.validated == first.validated == [[step, 0, 1, 2, 3] for step in (2, 4, 6)]
        assert last.best_score == pytest.approx(0.4)

    run_ranks(run, WORLD)


@pytest.mark.slow
def test_a_validation_by_the_clock(tmp_path: Path) -> None:
    def run() -> None:
        options = {"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        options["logger"] = CSVLogger(tmp_path, name="", version="")
        ended, trainer, _ = train(tmp_path, Signal(hook="on_validation_batch_start"), module=Validates(), **options)
        assert (ended, trainer.global_step) == (143, 2)
        module = Validates()
        ended, trainer, _ = train(tmp_path, module=module, **options)
        assert (ended, trainer.global_step) == (None, 6)
        assert module.validated == [[step, 0, 1, 2, 3] for step in (2, 3, 4, 5, 6)]

    run_ranks(run, WORLD)


class Records(Regressor):
    """Writes down what happens, and trains with a scheduler."""

    def __init__(self, scheduler: dict[str, Any] | None) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.events: list[Any] = []

    def note(self, *what: Any) -> None:
        self.events.append((*what, self.current_epoch, self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        [optimizer] = self.trainer.optimizers
        self.note("batch", batch_idx, batch["inputs"].sum().item(), optimizer.param_groups[0]["lr"])
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", 1.0 + self.global_step)  # worse and worse

    def on_validation_end(self) -> None:
        self.note("validation")

    def on_train_epoch_end(self) -> None:
        self.note("epoch")

    def on_train_end(self) -> None:
        self.note("end")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.scheduler is None:
            return optimizer
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, mode="min", threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **self.scheduler}}


NO_VALIDATION = {"limit_val_batches": 0}
RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # options of the Trainer, and the rest: batches of an epoch, a scheduler, callbacks, options of ModelCheckpoint
    "validation-every-second-step": (EVERY_SECOND_STEP, {}),
    "validation-amid-accumulation": (
        {"val_check_interval": 3, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2},
        {},
    ),
    "validation-at-the-end-of-epochs": ({"max_epochs": 3, "max_steps": -1}, {"batches": 2}),
    "validation-twice-an-epoch": ({"val_check_interval": 0.5}, {"batches": 4}),
    "validation-every-second-epoch": ({"check_val_every_n_epoch": 2}, {"batches": 2}),
    "epochs-without-validation": ({"max_epochs": 3, "max_steps": -1, **NO_VALIDATION}, {"batches": 2}),
    "epochs-and-steps": (NO_VALIDATION, {"batches": 3}),
    "epochs-and-accumulation": ({"accumulate_grad_batches": 2}, {"batches": 5}),
    "plateau-by-epoch": (
        {"max_epochs": 3, "max_steps": -1},
        {"batches": 2, "scheduler": {"monitor": "validation"}},
    ),
    "plateau-by-step": (NO_VALIDATION, {"scheduler": {"monitor": "train", "interval": "step"}}),
    "plateau-by-step-on-a-validation": (
        EVERY_SECOND_STEP,
        {"scheduler": {"monitor": "validation", "interval": "step", "frequency": 2}},
    ),
    "metrics-of-training-behind-a-validation": (
        EVERY_SECOND_STEP,
        {"callbacks": partial(EarlyStopping, "train", patience=9), "checkpoints": {"monitor": "train"}},
    ),
    "early-stopping": (
        EVERY_SECOND_STEP,
        {"callbacks": partial(EarlyStopping, "validation", patience=1), "checkpoints": {"monitor": "validation"}},
    ),
    "reloaded-data": ({"reload_dataloaders_every_n_epochs": 1}, {"batches": 2}),
}
SAMPLED = ("epochs-without-validation",)


@pytest.mark.guarantees("same-command", "nothing-is-repeated")
@pytest.mark.parametrize(
    "hook", ["on_before_backward", pytest.param("on_validation_batch_start", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.slow) for name in RESUMES]
)
def test_what_follows_a_step_comes_once(tmp_path: Path, name: str, hook: str) -> None:
    """A run that is told to go in any of its steps, twice, and goes on, does what one does that nobody disturbs."""
    trainer_options, rest = RESUMES[name]

    def fit(folder: Path, module: Records, step: int) -> tuple[int | None, Any]:
        callbacks = [rest["callbacks"]()] if "callbacks" in rest else []
        trainer = make_trainer(
            callbacks=[
                *callbacks,
                Signal(0, step=step, hook=hook),
                make_checkpoints(folder, **rest.get("checkpoints", {})),
            ],
            **{"max_steps": 6, "enable_checkpointing": True, "num_sanity_val_steps": 0, **trainer_options},
        )
        code = None
        try:
            loader = StatefulDataLoader(BATCHES[: rest.get("batches")], batch_size=None)
            trainer.fit(module, loader, make_loader(BATCHES[:4]), ckpt_path="last")
        except SystemExit as end:
            code = end.code
        return code, (whole(dict(module.named_parameters())), trainer.fit_loop.epoch_loop._batches_that_stepped)

    def run() -> None:
        undisturbed = Records(rest.get("scheduler"))
        _, expected = fit(tmp_path / "whole", undisturbed, -2)
        for step in range(6):
            events: list[Any] = []
            for told_in in (step, step + 1, -2):
                module = Records(rest.get("scheduler"))
                code, found = fit(tmp_path / str(step), module, told_in)
                events += module.events
                if hook == "on_before_backward" and told_in in (0, 1):
                    assert code == 143
                if code is None:
                    break
            assert events == undisturbed.events
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    run_ranks(run, 1)


def test_a_run_that_is_told_in_its_last_step_saves_and_ends_by_itself(tmp_path: Path) -> None:
    class Validates(Regressor):
        def on_validation_end(self) -> None:
            saved.append(get_step(tmp_path / "last.ckpt"))

    saved: list[int] = []

    def run() -> list[int]:
        options = {"val_check_interval": 6, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        code, trainer, _ = train(tmp_path, Signal(step=5), module=Validates(), **options)
        assert (code, trainer.global_step) == (None, 6)
        return saved

    assert run_ranks(run, WORLD)[0] == [6]


def test_what_users_put_among_the_metrics_is_no_reason_not_to_save(tmp_path: Path) -> None:
    class Puts(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.callback_metrics.update({"own": 0.5, "note": "text", "many": torch.ones(2)})  # type: ignore[dict-item]

    def run() -> None:
        assert train(tmp_path, Puts(), Signal(0), limit_val_batches=0)[0] == 143
        assert train(tmp_path, limit_val_batches=0)[0] is None

    run_ranks(run, 1)


def test_the_step_is_over_for_everybody_else(tmp_path: Path) -> None:
    """The module's hook, callbacks that come behind, and the metrics of the step, which a resumed run does not log."""

    class Logs(Regressor):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("train/step", float(self.trainer.global_step))

    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.steps = state_dict["steps"]

    def run() -> int:
        for last in (False, True):
            signals = Signal() if not last else Signal(step=-2)
            counts = Counts()
            logger = CSVLogger(tmp_path, name="", version=str(last))
            options = {"logger": logger, "log_every_n_steps": 1, "limit_val_batches": 0}
            train(tmp_path / "run", Preemption(), signals, counts, module=Logs(), **options)
        return counts.steps

    assert run_ranks(run, WORLD)[0] == 6
    files = [(tmp_path / str(is_last) / "metrics.csv").read_text() for is_last in (False, True)]
    rows = [row for file in files for row in csv.DictReader(file.splitlines())]
    assert [(row["step"], float(row["train/step"])) for row in rows] == [(str(n), n + 1.0) for n in range(6)]


def test_nothing_is_saved_before_the_first_step(tmp_path: Path) -> None:
    def run() -> None:
        ended, trainer, _ = train(tmp_path, Signal(step=0, hook="on_sanity_check_start"))
        assert (ended, trainer.global_step) == (143, 0)
        assert not (tmp_path / "last.ckpt").exists()

    run_ranks(run, WORLD)


@pytest.mark.slow
def test_two_optimizers_by_hand(tmp_path: Path) -> None:
    def run() -> None:
        modules = [Gan(1, "generator, discriminator") for _ in range(3)]
        _, _, expected = train(tmp_path / "whole", module=modules[0])
        ended, trainer, _ = train(tmp_path / "run", Signal(), module=modules[1])
        assert (ended, trainer.global_step) == (143, 4)
        _, _, weights = train(tmp_path / "run", module=modules[2])
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)

    run_ranks(run, WORLD)


LAST = [
    {"save_last": "link", "every_n_train_steps": 1},
    {"save_last": "link", "every_n_train_steps": 2, "save_top_k": 2, "monitor": "step", "mode": "max"},
    {"save_last": True, "every_n_train_steps": 2},
    {"save_last": None, "every_n_train_steps": 2},
    {"save_last": "link", "every_n_train_steps": 2, "enable_version_counter": True},
    {"save_last": "link", "every_n_train_steps": 2, "save_weights_only": True},
]


@pytest.mark.parametrize(
    ("checkpoints", "async_save"),
    [
        (LAST[1], True),
        pytest.param(LAST[0], True, marks=pytest.mark.slow),
        *(pytest.param(options, False, marks=pytest.mark.slow) for options in LAST),
    ],
)
def test_last_is_the_newest_whatever_model_checkpoint_keeps(tmp_path: Path, checkpoints: Any, async_save: bool) -> None:
    def run() -> None:
        config = CheckpointConfig(async_save=async_save)
        options = {"checkpoints": checkpoints, "limit_val_batches": 0}
        for start, step in enumerate((1, 2, 3)):  # the signal comes in the next step
            signals = Signal(step=step)
            code, trainer, _ = train(tmp_path, signals, strategy=FSDP2Strategy(checkpoint=config), **options)
            assert (code, trainer.global_step) == (143, step + 1), start
            assert trainer.checkpoint_callback.last_model_path
            assert get_step(Path(trainer.checkpoint_callback.last_model_path)) == step + 1
        code, trainer, _ = train(tmp_path, strategy=FSDP2Strategy(checkpoint=config), **options)
        assert (code, trainer.global_step) == (None, 6)
        last = tmp_path / "last.ckpt"
        assert last.is_symlink() == (checkpoints["save_last"] == "link")
        if checkpoints["save_last"]:
            assert get_step(last) == 6

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- SLURM


class Slurm(SLURMEnvironment):
    """The ranks are those of the test."""

    global_rank = lambda self: int(os.environ["RANK"])  # noqa: E731
    local_rank = node_rank = lambda self: int(os.environ["RANK"])
    world_size = lambda self: WORLD  # noqa: E731
    validate_settings = lambda self, *args, **options: None  # noqa: E731
    main_address = property(lambda self: os.environ["MASTER_ADDR"])
    main_port = property(lambda self: int(os.environ["MASTER_PORT"]))


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in; what is on the disk when the job is queued again is what it will find."""
    calls, command = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nls {tmp_path}/run > {calls}\necho "$@" >> {calls}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_NTASKS", str(WORLD))  # Lightning looks for a checkpoint of its own where SLURM is
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", str(WORLD))
    (tmp_path / "run").mkdir()
    return calls


@pytest.mark.parametrize("ckpt_path", [pytest.param(None, marks=pytest.mark.slow), "last"])
def test_slurm_queues_the_job_again_and_finds_the_checkpoint(
    tmp_path: Path, scontrol: Path, ckpt_path: str | None
) -> None:
    def run() -> None:
        _, _, expected = train(tmp_path / "whole")
        options = {"plugins": [Slurm()], "ckpt_path": ckpt_path}
        ended, trainer, _ = train(tmp_path / "run", Signal(name="SIGUSR1"), **options)
        assert (ended, trainer.global_step) == (138, 3)
        ended, trainer, weights = train(tmp_path / "run", checkpoints={"every_n_train_steps": 5}, **options)
        assert (ended, trainer.global_step) == (None, 6)
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)

    run_ranks(run, WORLD)
    assert scontrol.read_text().split() == ["hpc_ckpt_1.ckpt", "last.ckpt", "requeue", "77"]
    assert get_step(tmp_path / "run" / "hpc_ckpt_1.ckpt") == 6  # not that of the signal


def test_a_job_that_is_cancelled_is_not_queued_again(tmp_path: Path, scontrol: Path) -> None:
    def run() -> None:
        assert train(tmp_path / "run", Signal(name="SIGTERM"), plugins=[Slurm()])[0] == 143

    run_ranks(run, WORLD)
    assert not scontrol.exists()
    assert get_step(tmp_path / "run" / "last.ckpt") == 3


def test_a_job_whose_time_is_over_is_queued_again_though_some_ranks_get_sigterm(tmp_path: Path, scontrol: Path) -> None:
    def run() -> None:
        signals = [Signal(rank=0, name="SIGUSR1"), *(Signal(rank, "SIGTERM") for rank in range(WORLD))]
        assert train(tmp_path / "run", *signals, plugins=[Slurm()])[0] == 138

    run_ranks(run, WORLD)
    assert scontrol.exists()


def test_an_array_without_checkpoints_is_queued_again(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")

    def run() -> None:
        trainer = make_trainer(max_steps=6, callbacks=[Signal(name="SIGUSR1")], default_root_dir=tmp_path / "run")
        trainer.strategy.cluster_environment = Slurm()
        with pytest.raises(SystemExit):
            trainer.fit(Regressor(), make_loader(BATCHES))

    run_ranks(run, WORLD)
    assert scontrol.read_text().split() == ["slurm_array_70", "requeue", "70_7"]
    assert get_step(tmp_path / "run/slurm_array_70/task_7/hpc_ckpt_1.ckpt") == 3


class NotesStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


def test_tasks_of_an_array_that_share_a_folder_go_on_from_their_own_checkpoints(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning resumes from the newest ``hpc_ckpt`` of the folder, whichever task has saved it."""
    folder = tmp_path / "run"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")

    def run() -> None:
        first_steps: dict[str, list[int]] = {}
        for task, signals in [("0", [Signal(name="SIGUSR1", step=1)]), ("1", [Signal(name="SIGUSR1", step=3)])] * 2:
            os.environ["SLURM_ARRAY_TASK_ID"] = task
            begin = NotesStart()
            train(folder, begin, *([] if task in first_steps else signals), plugins=[Slurm()], ckpt_path=None)
            first_steps.setdefault(task, []).append(begin.step)
        assert first_steps == {"0": [0, 2], "1": [0, 4]}

    run_ranks(run, WORLD)


def test_a_job_that_cannot_be_queued_again_says_so(tmp_path: Path, scontrol: Path) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")

    says = pytest.warns(UserWarning, match="job 77 was not queued again.*`scontrol requeue 77`")

    def run() -> None:
        with says if os.environ["RANK"] == "0" else nullcontext():
            assert train(tmp_path / "run", Signal(name="SIGUSR1"), plugins=[Slurm()])[0] == 138

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- what is said, and what is left alone


def test_without_model_checkpoint_it_says_that_nothing_is_saved(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer(callbacks=[Signal(rank=0, step=1)], max_steps=6, default_root_dir=tmp_path)
        with (
            pytest.raises(SystemExit),
            pytest.warns(UserWarning, match="ended after step 2, and nothing was"),
        ):
            trainer.fit(Regressor(), make_loader(BATCHES))

    run_ranks(run, 1)


@pytest.mark.guarantees("sigterm")
def test_exit_code_and_signals_are_options(tmp_path: Path) -> None:
    def run() -> None:
        options = Preemption(signals=["SIGUSR2"], exit_code=85)
        assert train(tmp_path, options, Signal(rank=0, name="SIGUSR2"))[0] == 85
        assert train(tmp_path, options, Signal(rank=0, step=4))[0] == 85

    run_ranks(run, 1)


def test_one_of_the_users_own_class_is_the_only_one(tmp_path: Path) -> None:
    class Own(Preemption):
        pass

    assert run_ranks(lambda: train(tmp_path, Own(exit_code=85), Signal(rank=0))[0], 1) == [85]


def test_handlers_of_the_program(tmp_path: Path) -> None:
    """SIGTERM reaches both, others reach the program alone, and all are back behind the fit."""

    def run() -> None:
        received = []
        for name in ("SIGTERM", "SIGUSR1"):
            signal.signal(signal.Signals[name], lambda number, frame: received.append(number))
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
        assert train(tmp_path / "user", Preemption(["SIGUSR1", "SIGUSR2"]), Signal(0, "SIGUSR1"))[0] is None
        assert train(tmp_path / "term", Signal(0, "SIGTERM"))[0] == 143
        assert received == [signal.SIGUSR1, signal.SIGTERM]
        assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]

    run_ranks(run, 1)


def test_a_forked_process_dies_of_the_signal(tmp_path: Path) -> None:
    class Forks(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            is_there, says = os.pipe()
            if (child := os.fork()) == 0:
                os.write(says, b"!")  # Python forgets signals that come before
                for _ in range(600):  # one that comes just before a sleep is handled after that sleep
                    time.sleep(0.1)
                os._exit(0)
            os.read(is_there, 1)
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM

    def run() -> None:
        train(tmp_path, Forks(), limit_val_batches=0)

    run_ranks(run, 1)


@pytest.mark.parametrize("is_handled", [False, True])
def test_an_evaluation_ends_at_once(is_handled: bool) -> None:
    """Unless the program has a handler of its own, which is all that is called."""

    class Tells(pl.Callback):
        def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)

    def run() -> tuple[int, bool]:
        received: list[int] = []
        if is_handled:
            signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        trainer = make_trainer(callbacks=[Tells()])
        trainer.validate(Regressor(), make_loader(BATCHES[:8]), verbose=False)
        return len(received), "_sigterm_notifier_fn" in vars(trainer._signal_connector)

    if is_handled:
        assert run_ranks(run, WORLD) == [(0, False), (1, False)]
    else:
        with pytest.raises(RankError, match="rank 1 died or hung without a result"):
            run_ranks(run, WORLD, patience=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": "SIGUSR1"}, r"Preemption\(signals='SIGUSR1'\) must be a list"),
        ({"signals": ["USR1"]}, r"Preemption\(signals=\['USR1'\]\) must be a list of names"),
        ({"signals": ["SIGKILL"]}, "that a process can handle"),
        ({"exit_code": 256}, r"Preemption\(exit_code=256\) must be from 0 to 255"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preemption(**options)


def test_other_strategies_are_refused() -> None:
    trainer = make_trainer(SingleDeviceStrategy(torch.device("cpu")), devices=1, callbacks=[Preemption()])
    with pytest.raises(ValueError, match="Preemption needs a strategy of lightning_fsdp2, not SingleDeviceStrategy"):
        trainer.fit(Regressor(), make_batches(2))


def test_a_lightning_that_has_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_SignalConnector, "_slurm_sigusr_handler_fn")

    def run() -> None:
        with pytest.raises(RuntimeError, match=r"lightning 2\.\S+ has no _SignalConnector\._slurm_sigusr_handler_fn"):
            train(tmp_path)

    run_ranks(run, 1)


def test_one_number_per_step_on_the_host() -> None:
    """And Lightning's own broadcast in every micro-batch is gone."""
    counts: list[Counter[str]] = []

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            counts.append(Counter())

    def run() -> list[Counter[str]]:
        originals = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "barrier")}
        for name, original in originals.items():
            setattr(dist, name, partial(count, name, original))
        trainer = make_trainer(callbacks=[Counts()], max_steps=3, accumulate_grad_batches=2)
        trainer.fit(Regressor(), make_loader(BATCHES))
        return counts

    def count(name: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if counts:
            counts[-1][name] += 1
        return original(*args, **options)

    *steps, _ = run_ranks(run, WORLD)[0]
    assert steps == [Counter(), Counter(all_reduce=1)] * 2 + [Counter()]

"""What the progress bar shows, and that it fits into a terminal."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import LLAMA, make_token_batches
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from lightning_fsdp2 import CausalLM
from lightning_fsdp2.callbacks import MemoryUsage, Throughput, TrainingProgressBar
from lightning_fsdp2.callbacks.progress_bar import _get_costs


class Screen(pl.Callback):
    """Draws the bar behind each batch as a terminal of 100 columns shows it."""

    def __init__(self, bar: TrainingProgressBar) -> None:
        self.bar = bar
        self.lines: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.bar.is_disabled:  # on all ranks but the first
            return
        console = Console(width=100, force_terminal=True, color_system=None)
        with console.capture() as capture:
            console.print(self.bar.progress.get_renderable())
        self.lines.append(capture.get().strip())


def test_a_line_of_a_hundred_columns_shows_loss_tokens_and_memory() -> None:
    def run() -> tuple[list[str], float]:
        bar = TrainingProgressBar()
        screen = Screen(bar)
        callbacks = [Throughput(flops_per_token=1.0, peak_flops=1e3), MemoryUsage(), bar, screen]
        options = {"enable_progress_bar": True, "max_steps": 5, "log_every_n_steps": 2, "val_check_interval": 4}
        trainer = make_trainer(callbacks=callbacks, **options)
        loader = make_loader(make_token_batches(10))
        trainer.fit(CausalLM(config=LLAMA), loader, loader)
        return screen.lines, float(trainer.callback_metrics["train/loss"])

    lines, loss = run_ranks(run, 2)[0]
    assert " loss" not in lines[1], "a number before the first logging step"
    for line in lines:
        assert "\n" not in line, line
    for part in ("4/5", f" loss: {loss:.3f}", "val/loss: ", "tok/s: ", "mfu: ", "mem: ", "GiB"):
        assert part in lines[4], lines[4]
    assert lines[3].partition("loss")[2] == lines[2].partition("loss")[2], "changed without a log"


@pytest.mark.parametrize("has_terminal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_log_file_gets_a_line_per_logging_step_and_validation(
    has_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if has_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for a terminal

    def run() -> tuple[list[str], float]:
        options = {"enable_progress_bar": True, "max_steps": 5, "log_every_n_steps": 2, "val_check_interval": 5}
        trainer = make_trainer(callbacks=[Throughput(), TrainingProgressBar()], **options)
        loader = make_loader(make_token_batches(10))
        with caplog.at_level("INFO"):
            trainer.fit(CausalLM(config=LLAMA), loader, loader)
        lines = [line for line in caplog.messages if line.startswith("Epoch ")]
        return lines, float(trainer.callback_metrics["val/loss"])

    (lines, loss), (of_other_rank, _) = run_ranks(run, 2)
    assert of_other_rank == []
    if has_terminal:
        assert lines == []
        return
    assert [line.partition(":")[0] for line in lines] == [
        f"Epoch 0, step {step}/5" for step in (2, 4, 5)
    ]  # none of the sanity check
    assert all(" loss " in line and "tok/s " in line for line in lines)
    assert ["val/loss" in line for line in lines] == [False, False, True]
    assert f"val/loss {loss:.4g}" in lines[2]


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "batches", "total"),
    [(-1, 5, 100, 8), (-1, 5, 6, 6), (3, 5, 100, 100), (3, -1, 100, 100)],
    ids=["steps-end-it", "an-epoch-ends-first", "both", "epochs"],
)
def test_the_end_of_the_bar_is_a_number_of_batches(max_epochs: int, max_steps: int, batches: int, total: int) -> None:
    options = {"max_epochs": max_epochs, "max_steps": max_steps, "num_training_batches": batches, "global_step": 1}
    epoch = SimpleNamespace(current=SimpleNamespace(ready=1, started=0))
    loops = SimpleNamespace(epoch_progress=epoch)
    bar = TrainingProgressBar()
    bar._trainer = SimpleNamespace(**options, accumulate_grad_batches=2, fit_loop=loops)  # type: ignore
    assert bar.total_train_batches == total


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_goes_on_counts_to_its_end(tmp_path: Path, accumulate: int) -> None:
    def run() -> list[str]:
        options = {"enable_progress_bar": True, "enable_checkpointing": True, "default_root_dir": tmp_path}
        options |= {"accumulate_grad_batches": accumulate}
        for ckpt_path in (None, tmp_path / "step=3.ckpt"):
            bar = TrainingProgressBar()
            screen = Screen(bar)
            save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
            trainer = make_trainer(callbacks=[bar, screen, save], max_steps=7, **options)
            trainer.fit(CausalLM(config=LLAMA), make_loader(make_token_batches(20, ragged=False)), ckpt_path=ckpt_path)
        return screen.lines

    assert [line.split()[3] for line in run_ranks(run, 1)[0][1:]] == [
        f"{number}/{7 * accumulate}" for number in range(3 * accumulate + 1, 7 * accumulate)
    ]


@pytest.mark.parametrize(
    ("stop", "end"),
    [(8, 40), pytest.param(8, 18, marks=pytest.mark.slow), pytest.param(20, 40, marks=pytest.mark.slow)],
)
def test_a_run_that_goes_on_after_a_validation_counts_from_its_place_in_the_epoch(
    tmp_path: Path, stop: int, end: int
) -> None:
    def run(end: int, ckpt_path: Path | None) -> list[tuple[int, ...]]:
        bar = TrainingProgressBar()
        screen = Screen(bar)
        save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        options = {"enable_progress_bar": True, "enable_checkpointing": True, "val_check_interval": 4}
        trainer = make_trainer(callbacks=[bar, screen, save], max_steps=end, **options)
        loader = make_loader(make_batches(20))
        trainer.fit(Regressor(), loader, make_loader(make_batches(2)), ckpt_path=ckpt_path)
        shown = [re.search(r"Epoch (\d+) .* (\d+)/(\d+)", line) for line in screen.lines]
        return [tuple(map(int, found.groups())) for found in shown if found]

    def stop_and_go_on() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        run(stop, None)
        return run(end, tmp_path / f"step={stop}.ckpt"), run(end, None)

    [(resumed, whole)] = run_ranks(stop_and_go_on, 1)
    assert resumed == whole[-len(resumed) :]
    assert len(resumed) >= end - stop - 1  # the bar of a resumed run appears with its second batch


def test_numbers_are_short() -> None:
    throughput, memory = Throughput(), MemoryUsage()
    trainer: Any = type("Trainer", (), {"callbacks": [throughput, memory]})
    assert _get_costs(trainer) == {}
    throughput.latest = {"throughput/tokens_per_second": 1_234_567.0, "throughput/mfu": 0.4123}
    memory.latest = {"memory/allocated_gib": 50.0, "memory/reserved_gib": 61.26}
    assert _get_costs(trainer) == {"tok/s": "1234.6k", "mfu": "41.2%", "mem": "61GiB"}
    throughput.latest = {"throughput/tokens_per_second": 9876.5}
    memory.latest = {"memory/process_gib": torch.tensor(0.5).item()}
    assert _get_costs(trainer) == {"tok/s": "9,876", "mem": "0.5GiB"}

"""What RunReport says at the end of a run."""

import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fsdp2 import CausalLM, TextDataModule
from lightning_fsdp2.callbacks import RunReport, Throughput
from lightning_fsdp2.callbacks.run_report import _describe_resume, _get_raised_limits


def train(
    folder: Path, ckpt_path: str | None, max_steps: int, kind: Kind = STRATEGIES["fsdp2"]
) -> tuple[str, list[float]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    sys.argv = ["lightning-fsdp2", "fit", "--config", "my run.yaml", "--trainer.max_steps", str(max_steps)]
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["val/loss"]))

    pl.seed_everything(1, verbose=False)
    trainer = kind.make_trainer(
        max_steps=max_steps,
        num_sanity_val_steps=-1,
        val_check_interval=2,
        callbacks=[
            Losses(),
            Throughput(),
            RunReport(prompt="do", max_new_tokens=5),
            ModelCheckpoint(folder / "run", every_n_train_steps=2, save_top_k=0, save_last=True),
        ],
        enable_checkpointing=True,
    )
    module = CausalLM(config={**LLAMA, "vocab_size": 257, "eos_token_id": 256})
    data = TextDataModule(path=str(folder / "text"), sequence_length=16, batch_size=2, validation_fraction=0.3)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return next((text for text in records if text.startswith("Training ended")), ""), losses


def write_documents(folder: Path) -> None:
    folder.mkdir()
    for index in range(12):
        (folder / f"{index}.txt").write_text(f"document {index} says {'again and again ' * 8}{index}")


@pytest.mark.guarantees("quickstart-report")
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_report_in_plain_words_and_again_after_resuming(resumes: bool, tmp_path: Path) -> None:
    write_documents(tmp_path / "text")
    (report, losses), (other, _) = run_ranks(train, 2, tmp_path, None, 2)
    assert other == "", "every rank reported"
    assert "Training ended after 2 steps." in report
    before = losses[0]
    assert f"Validation loss: {losses[-1]:.3f} nats per token (before training: {before:.3f})" in report
    assert re.search(r"Speed: [\d,]+ tokens per second on 2 rank\(s\)", report)
    assert f"Checkpoint: {tmp_path / 'run' / 'last.ckpt'} (step 2)" in report
    command = "torchrun --nproc-per-node 2 -m lightning_fsdp2 fit --config 'my run.yaml'"
    assert f"{command} --ckpt_path=last --trainer.max_steps=4" in report
    assert "A sample, continuing 'do':\ndo" in report

    if resumes:
        report, losses = run_ranks(train, 2, tmp_path, "last", 4)[0]
        assert losses, "no validation ran"
        assert f"(before training: {before:.3f})" in report


@pytest.mark.slow
def test_a_sample_under_megatron_fsdp_is_that_under_fsdp2(tmp_path: Path) -> None:
    write_documents(tmp_path / "text")
    kinds = (STRATEGIES["fsdp2"], STRATEGIES["megatron_fsdp"])
    reports = [kind.run(train, 2, tmp_path, None, 2, kind, group=False)[0][0] for kind in kinds]
    samples = {report.partition("A sample")[2] for report in reports}
    assert len(samples) == 1
    assert len(samples.pop()) > len(", continuing 'do':\ndo")


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["/bin/lightning-fsdp2", "fit", "--ckpt_path", "x"], {}, "lightning-fsdp2 fit --ckpt_path=last"),
        (["/lib/lightning_fsdp2/__main__.py", "fit"], {}, "lightning-fsdp2 fit --ckpt_path=last"),
        (
            ["/lib/lightning_fsdp2/__main__.py", "fit"],
            {**TORCHRUN, "GROUP_WORLD_SIZE": "1"},
            "torchrun --nproc-per-node 8 -m lightning_fsdp2 fit --ckpt_path=last",
        ),
        (
            ["/lib/lightning_fsdp2/__main__.py", "fit"],
            {**TORCHRUN, "GROUP_WORLD_SIZE": "2"},
            "lightning-fsdp2 fit --ckpt_path=last",
        ),
        (
            ["lightning-fsdp2", "fit", "--data.init_args.dsn", "db://u:s3cret@h/x", "--data.url=db://u:s3cret@h/x"],
            {},
            "lightning-fsdp2 fit --data.init_args.dsn hidden --data.url=db://h/x --ckpt_path=last",
        ),
        (["train.py", "--mine"], {}, "Trainer(...).fit(..., ckpt_path='run/last.ckpt')"),
    ],
    ids=["command", "module", "torchrun", "nodes", "secrets", "script"],
)
def test_how_to_resume(
    arguments: list[str], environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _describe_resume("run/last.ckpt", {}) == expected


def test_the_limit_that_ended_the_run_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2", "fit", "--trainer.max_epochs", "3", "--trainer.max_steps=-1"])
    for max_steps, max_epochs, step, epoch, expected in (
        (10, 1000, 10, 2, {"max_steps": 20}),
        (-1, 3, 10, 3, {"max_epochs": 6}),
        (20, 3, 10, 3, {"max_epochs": 6}),
        (-1, None, 10, 3, {}),
    ):
        trainer = SimpleNamespace(max_steps=max_steps, max_epochs=max_epochs, global_step=step, current_epoch=epoch)
        assert _get_raised_limits(trainer) == expected
    assert _describe_resume("x", {"max_epochs": 6}) == (
        "lightning-fsdp2 fit --trainer.max_steps=-1 --ckpt_path=last --trainer.max_epochs=6"
    )


@pytest.mark.parametrize("strategy", ["auto"])
def test_it_works_under_any_strategy_and_without_validation_or_checkpoint(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("again and again " * 40)

    def run() -> None:
        trainer = make_trainer(strategy, max_steps=1, callbacks=[RunReport()])
        data = TextDataModule(
            path=str(tmp_path / "text.txt"), sequence_length=16, batch_size=2, validation_fraction=0.0
        )
        trainer.fit(CausalLM(config={**LLAMA, "vocab_size": 257}), data)

    run_ranks(run, 1, group=False)

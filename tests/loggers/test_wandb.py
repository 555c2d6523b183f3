"""The real wandb client, offline; what it has written is read back."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import wandb
from helpers.ranks import run_ranks
from helpers.tracked_jobs import LENGTHS, run_job
from helpers.wandb_reader import WandbRun, read_runs
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fsdp2.loggers import WandbLogger

TOKENS, STEP = "train/total_tokens", "trainer/global_step"


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def make_logger(folder: Path, **options: Any) -> WandbLogger:
    return WandbLogger(**{"project": "tests", "save_dir": str(folder), "offline": True, **options})


def run_offline(folder: Path, *, logger: dict[str, Any] | None = None, **options: Any) -> WandbRun:
    """The run of a job on two ranks; there must be one more than before."""
    before = len(read_runs(folder))
    run_job(folder, lambda: [make_logger(folder, **(logger or {}))], **options)
    runs = read_runs(folder)
    assert len(runs) == before + 1
    return runs[-1]


class TouchesEverywhere(pl.Callback):
    """Uses the run in all ways on all ranks."""

    def touch(self, trainer: pl.Trainer) -> None:
        run: Any = trainer.loggers[0].experiment
        run.config["touched"] = True
        run.config.update({"by": "everyone"}, allow_val_change=True)
        run.summary["rank"] = trainer.global_rank
        run.log({"own": 1.0})

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.touch(trainer)

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.touch(trainer)


class Scores(pl.Callback):
    """The later the worse."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.callback_metrics["score"] = torch.tensor(float(trainer.global_step))


@pytest.mark.guarantees("one-run-per-job", "logged-checkpoints")
def test_a_job_is_one_run_with_config_both_axes_and_checkpoints(tmp_path: Path) -> None:
    def make_callbacks() -> list[pl.Callback]:
        options = {"every_n_train_steps": 2, "save_top_k": -1}
        best = ModelCheckpoint(tmp_path / "best", "{step}", monitor="score", **options)
        newest = ModelCheckpoint(tmp_path / "newest", "{step}", monitor="step", mode="max", **options)
        return [TouchesEverywhere(), Scores(), best, newest]

    run = run_offline(tmp_path, logger={"tags": ["a", "b"]}, callbacks=make_callbacks, checkpoint={"async_save": True})
    assert (run.project, run.tags) == ("tests", ["a", "b"])
    assert run.config["run"]["strategy"]["mesh"]["dp_shard"] == 2
    assert (run.config["touched"], run.config["by"], run.config["loss"]) == (True, "everyone", "full")
    assert run.get_column("own") == [1, 1]
    assert run.step_metrics == {STEP: "", TOKENS: "", "*": STEP}

    own = [row for row in run.rows if "own" not in row]
    assert [(row[STEP], row[TOKENS]) for row in own] == [(step, 2 * sum(LENGTHS[: 2 * (step + 1)])) for step in (1, 3)]
    assert all({"throughput/tokens_per_second", "train/loss"} <= row.keys() for row in own)

    best = {}
    for artifact in run.artifacts:
        metadata = json.loads(artifact.metadata)
        folder, step = Path(metadata["path"]), metadata["step"]
        if folder.parent.name == "newest":
            assert "best" not in artifact.aliases
        if "score" in metadata:
            best[step] = (metadata["score"], "best" in artifact.aliases)
        assert set(artifact.aliases) - {"best"} == {"latest", f"step-{step}"}
        assert (artifact.name, artifact.type, folder.name) == (f"model-{run.id}", "model", f"step={step}.ckpt")
        contents = {entry.path: entry for entry in artifact.manifest.contents}
        # complete, as it is on the disk under its own name
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert {path: entry.size for path, entry in contents.items()} == sizes
        assert contents["meta.pt"].ref == (folder / "meta.pt").as_uri()
    assert len(run.artifacts) == 6
    assert best == {2: (2.0, True), 4: (4.0, False)}


@pytest.mark.guarantees("logged-checkpoints")
@pytest.mark.slow
def test_checkpoints_are_uploaded_in_the_background(tmp_path: Path) -> None:
    artifacts = run_offline(tmp_path, logger={"checkpoints": "upload"}).artifacts
    assert [sorted(artifact.aliases) for artifact in artifacts] == [["latest", "step-2"], ["latest", "step-4"]]
    for artifact in artifacts:
        contents = {entry.path: entry for entry in artifact.manifest.contents}
        folder = Path(json.loads(artifact.metadata)["path"])
        assert contents.keys() == {file.name for file in folder.iterdir()}
        # from where they are: W&B has made no copy
        assert all(not entry.ref for entry in contents.values())
        assert {Path(entry.local_path).resolve() for entry in contents.values()} == {*folder.resolve().iterdir()}


@pytest.mark.slow
def test_single_files_and_no_checkpoints(tmp_path: Path) -> None:
    first, second = run_offline(tmp_path, checkpoint={"format": "full"}).artifacts
    assert [entry.path for entry in second.manifest.contents] == ["step=4.ckpt"]
    assert first.digest != second.digest
    assert run_offline(tmp_path / "none", logger={"checkpoints": None}).artifacts == []


@pytest.mark.guarantees("one-run-per-job")
def test_a_resumed_job_goes_on_with_its_run(tmp_path: Path) -> None:
    first = run_offline(tmp_path, world_size=1, max_steps=2, log_every_n_steps=1)
    resumed = run_offline(
        tmp_path,
        world_size=1,
        log_every_n_steps=1,
        ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt",
        checkpoint={"async_save": True},
    )
    assert resumed.id == first.id
    assert [row[STEP] for row in (*first.rows, *resumed.rows)] == [0, 1, 2, 3]
    numbers = [row["_step"] for row in (*first.rows, *resumed.rows)]
    assert numbers == sorted(set(numbers))
    read = [2 * length for length in LENGTHS[:2]] * 2  # a plain loader begins anew
    assert [row[TOKENS] for row in (*first.rows, *resumed.rows)] == list(accumulate(read))


@pytest.mark.slow
def test_a_given_id_and_a_job_without_a_checkpoint_are_other_runs(tmp_path: Path) -> None:
    first = run_offline(tmp_path, max_steps=2)
    given = run_offline(tmp_path, logger={"id": "mine"}, ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt")
    anew = run_offline(tmp_path, max_steps=1)
    assert given.id == "mine"
    assert len({first.id, given.id, anew.id}) == 3


class KillsService(pl.Callback):
    """Kills every child process of rank 0 in the second step, which are wandb's."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.is_global_zero:
            import psutil

            children = psutil.Process().children(recursive=True)
            assert children
            for child in children:
                child.kill()
            psutil.wait_procs(children)
            trainer.loggers[0].experiment.log({"own": 1.0})


class KeepsWarnings(pl.Callback):
    def __init__(self) -> None:
        import warnings

        self.result: list[str] = []
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: self.result.append(str(message))


def get_messages(results: Sequence[Any], index: int = 0) -> list[list[str]]:
    """Of W&B, by rank."""
    return [[message for message in result[index] if message.startswith("W&B")] for result in results]


@pytest.mark.guarantees("failures-of-wandb")
@pytest.mark.slow
def test_training_goes_on_when_the_service_dies(tmp_path: Path) -> None:
    results = run_job(
        tmp_path,
        lambda: [make_logger(tmp_path, checkpoints=None), CSVLogger(tmp_path, "csv", "0")],
        callbacks=lambda: [KeepsWarnings(), KillsService(), TouchesEverywhere()],
        log_every_n_steps=1,
    )
    (message,), others = get_messages(results)
    assert message.startswith("W&B: logging metrics failed (ConnectionResetError")
    assert f"metrics still go to CSVLogger ({tmp_path / 'csv' / '0'})" in message
    assert others == []
    assert (tmp_path / "checkpoints" / "step=4.ckpt").exists()
    assert (tmp_path / "csv" / "0" / "metrics.csv").read_text().count("\n") == 1 + 4


@pytest.mark.slow
def test_a_run_that_does_not_start_online_is_recorded_offline(tmp_path: Path) -> None:
    account = {"WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "3"}
    with patch.dict("os.environ", account):
        results = run_job(tmp_path, lambda: [make_logger(tmp_path, offline=False)], callbacks=lambda: [KeepsWarnings()])
    (message,), others = get_messages(results)
    assert re.match(r"W&B: the run could not be started \(CommError.* and is recorded offline; upload it with", message)
    assert Path(message.split("`wandb sync ")[1].rstrip("`.")).name.startswith("offline-run-")
    assert others == []
    (run,) = [run for run in read_runs(tmp_path) if run.rows]
    assert len(run.get_column("train/loss")) == 2
    assert len(run.artifacts) == 2


@pytest.mark.guarantees("failures-of-wandb")
@pytest.mark.slow
def test_training_goes_on_where_no_run_starts(tmp_path: Path) -> None:
    def init(**options: Any) -> Any:
        if options["mode"] != "disabled":
            raise OSError("no space left")
        return real(**options)

    real = wandb.init
    with patch.object(wandb, "init", init):
        results = run_job(tmp_path, lambda: [make_logger(tmp_path)], callbacks=lambda: [KeepsWarnings()])
    (message,), others = get_messages(results)
    assert message == (
        "W&B: starting the run failed (OSError('no space left')). Training goes on without W&B; no other logger keeps"
        " its metrics."
    )
    assert others == []
    assert not read_runs(tmp_path)
    assert (tmp_path / "checkpoints" / "step=4.ckpt").exists()


@pytest.mark.guarantees("missing-key")
def test_no_key_is_an_error_on_every_rank_before_anything_starts(tmp_path: Path) -> None:
    def run() -> str:
        from helpers.user_modules import Regressor, make_trainer

        with pytest.raises(ValueError, match="has no API key") as caught:
            make_trainer(logger=make_logger(tmp_path, offline=False)).fit(Regressor())
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "set WANDB_API_KEY, run `wandb login` once, or use offline: true" in first
    assert not read_runs(tmp_path)


@pytest.mark.parametrize("mode", ["disabled", pytest.param("offline", marks=pytest.mark.slow)])
def test_the_environment_switches_wandb_off(tmp_path: Path, mode: str) -> None:
    with patch.dict("os.environ", WANDB_MODE=mode):
        run_job(tmp_path, lambda: [make_logger(tmp_path, offline=mode == "disabled")], max_steps=2)
    assert len(read_runs(tmp_path)) == (mode == "offline")


@pytest.mark.slow
def test_a_run_that_was_started_too_early_stays_its_own(tmp_path: Path) -> None:
    class Early(pl.Callback):
        def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
            trainer.loggers[0].experiment.config["early"] = True

    first = run_offline(tmp_path, max_steps=2)
    path = tmp_path / "checkpoints" / "step=2.ckpt"
    results = run_job(
        tmp_path, lambda: [make_logger(tmp_path)], callbacks=lambda: [KeepsWarnings(), Early()], ckpt_path=path
    )
    (message,), _ = get_messages(results)
    assert f"was started before the checkpoint of run {first.id} was read" in message
    second = read_runs(tmp_path)[-1]
    assert second.id != first.id
    assert second.config["early"]


@pytest.mark.slow
def test_what_cannot_be_logged_is_left_out_and_said_once(tmp_path: Path) -> None:
    class LogsNonsense(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.loggers[0].log_metrics({3: 1.0})  # type: ignore[dict-item]

    results = run_job(tmp_path, lambda: [make_logger(tmp_path)], callbacks=lambda: [KeepsWarnings(), LogsNonsense()])
    (message,), _ = get_messages(results)
    assert message.startswith("W&B: logging metrics failed (")
    assert len(read_runs(tmp_path)[0].get_column("train/loss")) == 2


def test_an_unknown_way_to_log_checkpoints_is_named() -> None:
    with pytest.raises(ValueError, match=r"WandbLogger\(checkpoints='all'\) is unknown"):
        WandbLogger(checkpoints="all")  # type: ignore[arg-type]


@pytest.mark.slow
def test_importing_the_package_does_not_import_wandb() -> None:
    code = "import sys, lightning_fsdp2.loggers; sys.exit('wandb' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

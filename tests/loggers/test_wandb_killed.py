"""A job from YAML alone, killed and started again with the same command: one run, without a gap."""

import signal
from pathlib import Path

import pytest
import yaml
from helpers.fork_server import get_python
from helpers.models import LLAMA
from helpers.tracked_jobs import get_rows, start_job
from helpers.wandb_reader import read_runs

STEPS, KILLED_BEHIND = 8, 5


def write_config(folder: Path) -> Path:
    (folder / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(200)))
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {"class_path": "lightning_fsdp2.FSDP2Strategy"},
            "max_steps": STEPS,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "logger": {
                "class_path": "lightning_fsdp2.loggers.WandbLogger",
                "init_args": {"project": "killed", "save_dir": str(folder), "offline": True},
            },
            "callbacks": [
                {"class_path": "lightning_fsdp2.callbacks.Throughput"},
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": str(folder / "checkpoints"),
                        "filename": "{step}",
                        "every_n_train_steps": 2,
                        "save_top_k": -1,
                        "save_last": "link",
                    },
                },
                {"class_path": "helpers.tracked_jobs.DiesOnce", "init_args": {"marker": str(folder / "died")}},
            ],
        },
        "model": {
            "class_path": "lightning_fsdp2.CausalLM",
            "init_args": {"config": {**LLAMA, "vocab_size": 257, "eos_token_id": 256}},
        },
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {
                "path": str(folder / "text.txt"),
                "sequence_length": 16,
                "batch_size": 2,
                "validation_fraction": 0.0,
                "cache_dir": str(folder / "cache"),
            },
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.guarantees("one-run-per-job", "same-run-after-a-kill")
@pytest.mark.slow
def test_a_job_that_was_killed_goes_on_with_its_run(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    killed = start_job(config, "--ckpt_path=last", python=get_python())
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    resumed = start_job(config, "--ckpt_path=last", python=get_python())
    assert resumed.returncode == 0, resumed.stderr[-4000:]

    first, second = read_runs(tmp_path)
    assert first.id == second.id
    assert first.config["run"] == second.config["run"]
    before, after = get_rows(first), get_rows(second)
    assert list(before) == list(range(KILLED_BEHIND))
    assert list(after) == list(range(4, STEPS))
    for step, row in {**before, **after}.items():
        assert row["train/total_tokens"] == (step + 1) * 2 * 2 * 16
    # the step behind the last checkpoint was computed twice, to the last bit
    assert before[4]["train/loss"] == after[4]["train/loss"]
    steps = [
        step for run in (first, second) for artifact in run.artifacts for step in artifact.aliases if step != "latest"
    ]
    assert steps == ["step-2", "step-4", "step-6", "step-8"]


@pytest.mark.slow
def test_no_key_is_one_line_before_the_first_step(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    environment = {"WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    options = "--trainer.logger.init_args.offline=false"
    result = start_job(config, options, python=get_python(), **environment)
    assert result.returncode == 2
    (line,) = {line for line in result.stderr.splitlines() if "error" in line.lower()}
    assert line.startswith("error: WandbLogger(offline=False) has no API key for https://")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "checkpoints").exists()

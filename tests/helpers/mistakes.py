"""Mistakes that people make on the command line, and the runs that have to say so: shared by the tables of them.

Each case runs the real command line in a forked process of its own, or in one that starts as a person's does.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

import lightning_fsdp2.cli.app  # noqa: F401  imported once, for all forks
from helpers.models import LLAMA
from lightning_fsdp2.cli import main
from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer

SECONDS = 60
"""Within which a mistake has to end the process; most take one or two."""

SMALL = {**LLAMA, "vocab_size": 257}
QUESTION = {"role": "user", "content": "hello"}
CALLBACKS = "lightning.pytorch.callbacks"
TRAINED: list[Path] = []
"""The checkpoint that `TrainFirst` copies, once `train_checkpoint` has written it."""


@dataclass(frozen=True)
class Case:
    """A mistake, and what a person has to read who makes it."""

    says: str | tuple[str, ...]
    """Words that stderr has to contain, in any case of letters; of several, all."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values at dotted keys of the config; None at a key of `remove` leaves it out."""

    args: tuple[str, ...] = ()
    """What follows the config on the command line."""

    command: tuple[str, ...] | None = None
    """In place of `fit --config run.yaml` and `args`."""

    prepare: Callable[[Path], None] | None = None
    """Called with the folder of the run, in which it is started, before the run."""

    env: dict[str, str] = field(default_factory=dict)
    """Variables of the process."""

    @property
    def begins_with_checkpoint(self) -> bool:
        """Whether the fixture `_trained` has to come first."""
        return isinstance(self.prepare, TrainFirst)

    def get_arguments(self) -> tuple[str, ...]:
        """Return what is typed after the program's name."""
        return self.command or ("fit", "--config=run.yaml", *self.args)


def text(content: str | bytes) -> Callable[[Path], None]:
    """Write the training data."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "text.txt").write_bytes(data) and None


def file(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Write a file into the folder of the run."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data) and None


def change_config(old: str, new: str) -> Callable[[Path], None]:
    """Change the config as text."""

    def change(folder: Path) -> None:
        content = (folder / "run.yaml").read_text()
        assert old in content
        (folder / "run.yaml").write_text(content.replace(old, new, 1))

    return change


@dataclass(frozen=True)
class TrainFirst:
    """A preparation that leaves `run.ckpt` in the folder, as a run of two steps made it, and changes it."""

    change: Callable[[Path], None] | None = None

    def __call__(self, folder: Path) -> None:
        """Copy the checkpoint that the fixture has trained."""
        shutil.copytree(TRAINED[0], folder / "run.ckpt")
        if self.change is not None:
            self.change(folder / "run.ckpt")


def flip_byte(checkpoint: Path) -> None:
    """Damage the largest file in its middle."""
    path = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_bytes(checkpoint: Path) -> None:
    """Damage the largest file all over: what is exported of it is a third."""
    path = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    for position in range(len(data) // 40, len(data), len(data) // 20):
        data[position] ^= 1
    path.write_bytes(data)


def cut_off(checkpoint: Path) -> None:
    """Lose the end of the largest file."""
    path = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(name: str) -> Callable[[Path], None]:
    """Lose a file."""
    return lambda checkpoint: next(checkpoint.glob(name)).unlink()


def chat(says: str | tuple[str, ...], row: dict[str, Any]) -> Case:
    """Train on a file of conversations that are all the same."""

    def prepare(folder: Path) -> None:
        (folder / "chat.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
        tokenizer = build_byte_tokenizer()
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
        )
        tokenizer.save_pretrained(folder / "tokenizer")

    options = {"path": "chat.jsonl", "sequence_length": 64, "batch_size": 2, "tokenizer": "./tokenizer"}
    return Case(says, {"data": optimizer("lightning_fsdp2.ChatDataModule", **options)}, prepare=prepare)


TRAINER, MODEL, CONFIG = "trainer", "model.init_args", "model.init_args.config"
DATA, STRATEGY = "data.init_args", "trainer.strategy.init_args"
FLAGS = f"{STRATEGY}.config"


def trainer(value: Any, says: str | tuple[str, ...], key: str, **others: Any) -> Case:
    return Case(says, {f"{TRAINER}.{key}": value}, **others)


def strategy(value: Any, says: str | tuple[str, ...], key: str, **others: Any) -> Case:
    return Case(says, {f"{STRATEGY}.{key}": value}, **others)


def flag(value: Any, says: str | tuple[str, ...], key: str, **others: Any) -> Case:
    return Case(says, {f"{FLAGS}.{key}": value}, **others)


def model(value: Any, says: str | tuple[str, ...], key: str, **others: Any) -> Case:
    return Case(says, {f"{MODEL}.{key}": value}, **others)


def data(value: Any, says: str | tuple[str, ...], key: str, **others: Any) -> Case:
    return Case(says, {f"{DATA}.{key}": value}, **others)


def optimizer(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


def write_run(folder: Path, case: Case) -> None:
    """Write a run of two steps that is right except for what ``case`` says."""
    (folder / "text.txt").write_text("again and again " * 200)
    config: dict[str, Any] = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": str(folder),
            "max_steps": 2,
            "limit_val_batches": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any("ModelCheckpoint" in str(value) for value in case.options.values()),
            "strategy": {"class_path": "lightning_fsdp2.FSDP2Strategy", "init_args": {"config": {}}},
        },
        "model": {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": SMALL}},
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {
                "path": "text.txt",
                "sequence_length": 16,
                "batch_size": 2,
                "cache_dir": str(folder / "cache"),
            },
        },
    }
    for key, value in case.options.items():
        *path, last = key.split(".")
        section = config
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    if case.prepare is not None:
        case.prepare(folder)


def run_forked(folder: Path, args: tuple[str, ...], env: dict[str, str]) -> tuple[int | None, str, list[str]]:
    """Return the exit code (None if it hung), what was said on stdout and stderr, and which processes were left."""
    path = folder / "output.log"

    def run() -> None:
        os.setsid()
        with path.open("w", buffering=1) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = log
            os.chdir(folder)
            os.environ.update(env)
            sys.argv = ["lightning-fsdp2", *args]
            code = 0
            try:
                main(list(args))
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 1
            except BaseException:
                traceback.print_exc()
                code = 1
            log.flush()
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(SECONDS)
    left = end_group(process.pid)
    process.join(5)
    return (None if str(process.pid) in left else process.exitcode), path.read_text(errors="replace"), left


def run_really(
    folder: Path, args: tuple[str, ...], env: dict[str, str], *, python: str = sys.executable
) -> tuple[int | None, str, list[str]]:
    """Do the same with a process that starts as a person's does."""
    with (folder / "output.log").open("w") as log:
        process = subprocess.Popen(
            [python, "-m", "lightning_fsdp2", *args],
            cwd=folder,
            env={**os.environ, **env},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        left = end_group(process.pid)
        process.wait(5)
    hung = str(process.pid) in left
    return (None if hung else process.returncode), (folder / "output.log").read_text(errors="replace"), left


def end_group(session: int | None) -> list[str]:
    """End the processes of a session that still run, and return their numbers."""
    left = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                left.append(str(process.pid))
                process.send_signal(signal.SIGKILL)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
    return left


def check(case: Case, result: tuple[int | None, str, list[str]]) -> None:
    """Fail if the mistake was passed over, hung, left a process, or did not end in one line with the words."""
    code, output, left = result
    assert code is not None, f"it hung:\n{output[-3000:]}"
    assert not left, f"processes {left} were left:\n{output[-3000:]}"
    assert code != 0, f"nobody noticed:\n{output[-3000:]}"
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert (code, len(lines)) == (2, 1), f"it is not one line with code 2, but code {code}:\n{output[-3000:]}"
    assert "Traceback" not in output
    for words in (case.says,) if isinstance(case.says, str) else case.says:
        assert words.lower() in lines[0].lower(), f"not a word of {words!r}:\n{lines[0]}"


def check_run(case: Case, folder: Path, run: Callable[..., tuple[int | None, str, list[str]]] = run_forked) -> None:
    """Write the run with the mistake into ``folder``, start it and check what it says."""
    write_run(folder, case)
    check(case, run(folder, case.get_arguments(), case.env))


def train_checkpoint(folder: Path) -> None:
    """Train two steps in ``folder``, for the cases that begin with a checkpoint."""
    callback = optimizer(
        f"{CALLBACKS}.ModelCheckpoint", dirpath=str(folder), filename="run", every_n_train_steps=2, save_top_k=-1
    )
    write_run(folder, Case("", {"trainer.callbacks": [callback]}))
    code, output, _ = run_forked(folder, ("fit", "--config=run.yaml"), {})
    assert code == 0, output
    TRAINED[:] = [folder / "run.ckpt"]

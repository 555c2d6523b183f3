"""The real launchers, in real processes: ``python script.py``, torchrun and the command line.

Each launcher starts fresh interpreters in one test, and Ctrl-C and a killed torchrun find them; otherwise the processes
are forks that have all imports (:mod:`helpers.fork_server`). What needs no training is in `launch/test_launcher.py`.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import pytest
import yaml
from helpers.cover import Matrix
from helpers.fork_server import get_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORLD = 2
TIMEOUT_SECONDS = 240.0
"""Limit of one launch; most of it is two imports of torch on a machine that does other things."""

END_SECONDS = 25.0
"""How soon after a rank failed, or after Ctrl-C, all processes must have ended. Others would wait for half an hour.

A killed stage of a pipeline takes longest: 6.5 seconds on a machine with twice as many busy processes as processors.
"""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "bos_token_id": None,
    "eos_token_id": 256,
}

SCRIPT = f"""
import os
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, FSDP2Strategy
from lightning_fsdp2.strategies.launch import launcher

launcher._SECONDS_AFTER_ERROR = 0.5

LLAMA = {LLAMA!r}
MODE, FOLDER, PP_SIZE = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1


def pause(moment, rank):
    if MODE == f"pause-{{moment}}":
        (FOLDER / f"paused-{{rank}}").write_text("")
        time.sleep(1000)


class Tokens(pl.LightningDataModule):
    def prepare_data(self):
        pause("data", 0)

    def train_dataloader(self):
        tokens = torch.randint(0, 256, (16, 8), generator=torch.Generator().manual_seed(1))
        return DataLoader([{{"input_ids": row, "labels": row}} for row in tokens], batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


class Model(CausalLM):
    def configure_optimizers(self):
        pause("setup", self.global_rank)
        return super().configure_optimizers()

    def on_train_end(self):
        pause("train-end", self.global_rank)

    def teardown(self, stage):
        pause("teardown" if stage == "fit" else "", self.global_rank)

    def test_step(self, batch, batch_idx):
        pause("test", self.global_rank)
        return super().test_step(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        if MODE == f"fail-{{self.global_rank}}" and batch_idx == 1:
            (FOLDER / "failed").write_text("")
            raise RuntimeError(f"rank {{self.global_rank}} fails on purpose")
        if MODE == f"leave-{{self.global_rank}}" and batch_idx == 1:
            (FOLDER / "left").write_text("")
            sys.exit(3)
        if MODE == f"die-{{self.global_rank}}" and batch_idx == 1:
            (FOLDER / "failed").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "endless":
            (FOLDER / f"trains-{{self.global_rank}}").write_text("")
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def on_fit_end(self):
        pause("fit-end", self.global_rank)
        assert dist.get_world_size() == {WORLD}
        (FOLDER / f"fitted-{{self.global_rank}}").write_text(str(self.trainer.global_step))

    def on_test_end(self):
        (FOLDER / f"tested-{{self.global_rank}}").write_text(str(self.trainer.callback_metrics["test/loss"].item()))


if __name__ == "__main__":
    # by the launch time, not by rank: torchrun and Lightning number the processes in other places
    (FOLDER / f"pid-{{os.getpid()}}").write_text("")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices={WORLD},
        strategy=FSDP2Strategy(pp_size=PP_SIZE),
        max_steps=-1 if MODE == "endless" else 3,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = Model(config=LLAMA), Tokens()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    print("the end of the script")
"""


@dataclass(kw_only=True)
class Ended:
    """A launch that came to its end."""

    code: int
    output: str
    seconds_after_mark: float
    """From the moment that ``mark`` existed, or that the signal was sent, until the launched process and all ranks
    ended; infinite if a rank had to be killed."""


def launch(
    command: list[str],
    folder: Path,
    *,
    is_fresh: bool = False,
    mark: str | None = None,
    on_start: Callable[[int], None] | None = None,
) -> Ended:
    """Run ``command`` in a process group of its own; what does not end in time is killed.

    Args:
        command: Arguments of ``python``.
        folder: Where the script leaves its files.
        is_fresh: Whether each process is an interpreter that imports everything anew.
        mark: Name of a file whose time of writing ``seconds_after_mark`` counts from; default: from ``on_start``.
        on_start: Called with the id of the process group, once it runs.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PL_", "TORCHELASTIC"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
        environment.pop(name, None)
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    log = folder / "output.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable if is_fresh else get_python(), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=use_default_signals,
        )
    try:
        if on_start is not None:
            on_start(process.pid)
        moment = time.time()
        process.wait(TIMEOUT_SECONDS)
        # a rank that Lightning started notices the end of the first one by its broken connections
        all_ended = wait_for(lambda: not get_running_ranks(folder), END_SECONDS)
        ended = time.time() if all_ended else float("inf")
    except BaseException as error:
        text = log.read_text(errors="replace")[-6000:]
        raise AssertionError(f"{' '.join(command)}: {error!r}. Its output:\n{text}") from error
    finally:
        kill_all(process.pid, folder)
        process.wait()
    text = log.read_text(errors="replace")
    if mark is not None:
        assert (folder / mark).exists(), text[-6000:]
        moment = (folder / mark).stat().st_mtime
    return Ended(code=process.returncode, output=text, seconds_after_mark=ended - moment)


def use_default_signals() -> None:
    """Reset the signals that a shell or `nohup` ignores."""
    for name in ("SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(signal.Signals[name], signal.SIG_DFL)


def kill_all(group: int, folder: Path) -> None:
    """Kill what is left of a launch; torchrun's workers have process groups of their own."""
    for pid in get_running_ranks(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def get_running_ranks(folder: Path) -> list[int]:
    """Ids of the processes that ran the script in ``folder`` and have not ended."""
    running = []
    for path in folder.glob("pid-*"):
        pid = int(path.name.removeprefix("pid-"))
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").readlink() == folder:  # and not another process that got the number
                running.append(pid)
    return running


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def write_script(folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return str(path)


LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)],
}
"""What stands before the script's name; ``torchrun`` is the console script of this module."""


def assert_clean(output: str) -> None:
    for trace in ("Traceback", "destroy_process_group", "leaked", "Exception ignored", "terminate called"):
        assert trace not in output, output[-6000:]


@pytest.mark.guarantees("launchers")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fit_then_test(launcher: str, tmp_path: Path) -> None:
    ended = launch([*LAUNCHERS[launcher], write_script(tmp_path), "train", str(tmp_path)], tmp_path, is_fresh=True)
    assert ended.code == 0, ended.output[-6000:]
    assert len(list(tmp_path.glob("pid-*"))) == WORLD
    assert [(tmp_path / f"fitted-{rank}").read_text() for rank in range(WORLD)] == ["3"] * WORLD
    losses = {float((tmp_path / f"tested-{rank}").read_text()) for rank in range(WORLD)}
    assert len(losses) == 1, "the ranks disagree about the loss"
    assert 4 < losses.pop() < 7, "log(257) = 5.5 is the loss of guessing"
    assert ended.output.count("the end of the script") == WORLD
    assert_clean(ended.output)


FAILURES = {
    f"{launcher}-rank{rank}-pp{pp_size}": {"launcher": launcher, "rank": rank, "pp_size": pp_size}
    for launcher, rank, pp_size in product(LAUNCHERS, range(WORLD), (1, 2))
}
FAILING_RANKS = Matrix("ranks that fail", FAILURES)


@pytest.mark.guarantees("errors-of-a-stage")
@pytest.mark.parametrize(
    ("launcher", "rank", "pp_size"),
    FAILING_RANKS.list_parameters({name: tuple(cell.values()) for name, cell in FAILURES.items()}),
)
def test_a_failing_rank_ends_all(launcher: str, rank: int, pp_size: int, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], write_script(tmp_path), f"fail-{rank}", str(tmp_path), str(pp_size)]
    ended = launch(command, tmp_path, mark="failed")
    assert ended.code != 0
    assert ended.seconds_after_mark < END_SECONDS
    own = re.search(
        rf"Traceback.*in training_step.*RuntimeError: rank {rank} fails on purpose", ended.output, re.DOTALL
    )
    assert own, ended.output[-6000:]
    assert "the end of the script" not in ended.output


def test_the_first_rank_ends_all_when_it_leaves_alone(tmp_path: Path) -> None:
    """The other one waits for it in a collective, and it would wait for the other one to end."""
    ended = launch([write_script(tmp_path), "leave-0", str(tmp_path)], tmp_path, mark="left")
    assert ended.code == 3, ended.output[-6000:]
    assert ended.seconds_after_mark < END_SECONDS
    assert "This process leaves the run by SystemExit(3)" in ended.output


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_stage_of_a_pipeline_ends_all_and_is_named(launcher: str, rank: int, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], write_script(tmp_path), f"die-{rank}", str(tmp_path), "2"]
    ended = launch(command, tmp_path, mark="failed")
    assert ended.code != 0
    assert ended.seconds_after_mark < END_SECONDS
    assert "the end of the script" not in ended.output
    if launcher == "torchrun":
        assert re.search(rf"rank +: {rank} .*Signal 9 \(SIGKILL\)", ended.output, re.DOTALL)
    elif rank > 0:  # with rank 0, the process ends that would name the others
        assert re.search(r"Rank 1 \(process \d+\) was killed by SIGKILL", ended.output)


@pytest.mark.guarantees("no-orphans")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_ends_all(launcher: str, tmp_path: Path) -> None:
    def interrupt(group: int) -> None:
        trains = [tmp_path / f"trains-{rank}" for rank in range(WORLD)]
        assert wait_for(lambda: all(path.exists() for path in trains), TIMEOUT_SECONDS), "training did not start"
        os.killpg(group, signal.SIGINT)

    command = [*LAUNCHERS[launcher], write_script(tmp_path), "endless", str(tmp_path)]
    # torchrun's workers are in groups of their own, others have to be in that of the first process
    ended = launch(command, tmp_path, is_fresh=launcher == "python", on_start=interrupt)
    assert ended.seconds_after_mark < END_SECONDS
    assert ended.code != 0
    assert "the end of the script" not in ended.output
    assert "destroy_process_group" not in ended.output


MOMENTS = ("data", "setup", "train-end", "fit-end", "teardown", "test")
SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")


@pytest.mark.guarantees("no-orphans")
@pytest.mark.parametrize(
    ("moment", "name"),
    # each moment with the signal that nobody can handle and one other, each signal at several moments
    [(moment, name) for index, moment in enumerate(MOMENTS) for name in ("SIGKILL", SIGNALS[index % 3])],
)
def test_no_rank_outlives_the_process_that_started_it(moment: str, name: str, tmp_path: Path) -> None:
    def end_first(pid: int) -> None:
        is_reached = lambda: (tmp_path / "paused-0").exists() and len(get_running_ranks(tmp_path)) == WORLD  # noqa: E731
        assert wait_for(is_reached, TIMEOUT_SECONDS), f"{moment} was not reached"
        os.kill(pid, signal.Signals[name])

    ended = launch([write_script(tmp_path), f"pause-{moment}", str(tmp_path)], tmp_path, on_start=end_first)
    if moment != "setup" or name == "SIGKILL":  # before the first step Preemption has noted it
        assert ended.code == -signal.Signals[name]
    assert ended.seconds_after_mark < END_SECONDS


@pytest.mark.guarantees("torchrun-is-killed")
def test_no_worker_of_torchrun_outlives_its_agent(tmp_path: Path) -> None:
    workers: list[psutil.Process] = []

    def kill_agent(pid: int) -> None:
        assert wait_for(lambda: all((tmp_path / f"trains-{rank}").exists() for rank in range(WORLD)), TIMEOUT_SECONDS)
        workers.extend(psutil.Process(pid).children(recursive=True))
        os.kill(pid, signal.SIGKILL)

    command = [*LAUNCHERS["torchrun"], write_script(tmp_path), "endless", str(tmp_path)]
    launch(command, tmp_path, is_fresh=True, on_start=kill_agent)
    assert len(workers) >= WORLD
    _, alive = psutil.wait_procs(workers, END_SECONDS)
    assert alive == []


@pytest.mark.guarantees("environment-of-the-launcher")
def test_a_rank_that_has_more_to_do_is_waited_for(tmp_path: Path) -> None:
    """And nothing is left in the environment of the first process."""
    last = """
    if trainer.global_rank == 1:
        time.sleep(4 * launcher._SECONDS_AFTER_ERROR)
    else:
        assert not [name for name in os.environ if name.startswith("LIGHTNING_FSDP2")]
    (FOLDER / f"last-{trainer.global_rank}").write_text("")
"""
    (tmp_path / "script.py").write_text(SCRIPT + last)
    ended = launch([str(tmp_path / "script.py"), "train", str(tmp_path)], tmp_path)
    assert ended.code == 0, ended.output[-6000:]
    assert (tmp_path / "last-1").exists()
    assert_clean(ended.output)


CATCHES = """
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.strategies.launch import launcher

launcher._SECONDS_AFTER_ERROR = 0.5


class Fails(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        if self.global_rank == 0:
            raise ValueError("mine")
        time.sleep(600)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


try:
    pl.Trainer(accelerator="cpu", devices=2, strategy=FSDP2Strategy(), logger=False, enable_checkpointing=False).fit(
        Fails(), DataLoader(torch.ones(8, 4))
    )
except ValueError as error:
    sys.exit(f"caught {error}")
"""


ALL_LEAVE = """
import os
import sys
import time

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.strategies.launch import launcher

launcher._SECONDS_AFTER_ERROR = 2


class Leaves(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.linear(batch).sum()

    def on_train_batch_end(self, *args):
        sys.exit(0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


try:
    pl.Trainer(accelerator="cpu", devices=2, strategy=FSDP2Strategy(), logger=False, enable_checkpointing=False).fit(
        Leaves(), DataLoader(torch.ones(8, 4))
    )
finally:
    if os.environ["LOCAL_RANK"] == "1":
        time.sleep(6)  # it uploads what it has saved
        print("rank 1 has ended", flush=True)
"""


def test_all_ranks_that_leave_have_the_time_that_they_need(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ALL_LEAVE)
    ended = launch([str(tmp_path / "script.py")], tmp_path)
    assert ended.code == 0, ended.output[-6000:]
    assert "rank 1 has ended" in ended.output


def test_an_error_that_the_script_catches_ends_all_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CATCHES)
    ended = launch([str(tmp_path / "script.py")], tmp_path)
    assert ended.code == 1, ended.output[-6000:]
    assert "caught mine" in ended.output


@pytest.mark.guarantees("launchers")
def test_command_line_fits_and_then_tests_the_checkpoint(tmp_path: Path) -> None:
    for name in ("text", "held-out"):
        (tmp_path / name).mkdir()
        for index in range(12):
            (tmp_path / name / f"{index}.txt").write_text(f"{name} {index} says {'again and again ' * 3}{index}")
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": WORLD,
            "strategy": "fsdp2",
            "max_steps": 3,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(tmp_path), "name": "run", "version": ""},
            },
            "log_every_n_steps": 1,
            "val_check_interval": 3,
            "enable_progress_bar": False,
            "callbacks": {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"dirpath": str(tmp_path / "run"), "save_last": True, "every_n_train_steps": 3},
            },
        },
        "model": {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": LLAMA}},
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {
                "path": str(tmp_path / "text"),
                "sequence_length": 16,
                "batch_size": 2,
                "validation_path": str(tmp_path / "held-out"),
                "test_path": str(tmp_path / "held-out"),
            },
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    fitted = launch(["-m", "lightning_fsdp2", "fit", "--config", "run.yaml"], tmp_path, is_fresh=True)
    assert fitted.code == 0, fitted.output[-6000:]
    assert_clean(fitted.output)
    checkpoint = tmp_path / "run" / "last.ckpt"
    assert checkpoint.is_dir()
    loss_after_fit = get_last_value(tmp_path / "run" / "metrics.csv", "val/loss")

    command = ["-m", "lightning_fsdp2", "test", "--config", "run.yaml", f"--ckpt_path={checkpoint}"]
    tested = launch([*command, f"--trainer.logger.init_args.name={tmp_path / 'tested'}"], tmp_path)
    assert tested.code == 0, tested.output[-6000:]
    assert_clean(tested.output)
    loss = get_last_value(tmp_path / "tested" / "metrics.csv", "test/loss")
    assert loss == pytest.approx(loss_after_fit, rel=1e-6)


def get_last_value(path: Path, name: str) -> float:
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    column = header.index(name)
    return float([row[column] for row in rows if row[column]][-1])

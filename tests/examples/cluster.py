"""A directory in which the launch scripts find what they name, and stand-ins for the programs of a cluster."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
JOB = "4711"
TOY = [
    "--data.path=text",
    "--data.validation_fraction=0.2",
    "--data.sequence_length=32",
    "--data.batch_size=2",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.limit_val_batches=1",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
]


@dataclass
class Cluster:
    """Where jobs run with ``python``, with the command lines of `scontrol` in the order of their calls."""

    folder: Path
    python: str = sys.executable
    variables: dict[str, str] = field(default_factory=dict)
    jobs: "list[Job]" = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("configs", "examples"):
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / "text").mkdir()
        (self.folder / "text" / "lines.txt").write_text("".join(f"line {i} of the text\n" for i in range(400)))
        activate = self.folder / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text("# the stand-ins are found without\n")
        self.put("lightning-fsdp2", f'exec "{self.python}" -m lightning_fsdp2 "$@"')
        self.put("torchrun", f'exec "{self.python}" -m torch.distributed.run "$@"')
        self.put("srun", f'exec "{sys.executable}" "{Path(__file__).parent / "srun.py"}" "$@"')
        self.put("scontrol", 'echo "$*" >> scontrol.log; if [[ $1 == show ]]; then echo 127.0.0.1; fi')

    def put(self, name: str, text: str) -> None:
        """Place a program on the path of all jobs."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    @property
    def requeued(self) -> list[str]:
        """The jobs that were queued again."""
        log = self.folder / "scontrol.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.removeprefix("requeue ") for line in lines if line.startswith("requeue ")]

    def start(self, command: list[str], **variables: str) -> "Job":
        """Run a command as on a node of the cluster."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PL_"))}
        environment |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
        environment |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"} | self.variables | variables
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}-{Path(command[0]).name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        self.jobs.append(Job(process, log))
        return self.jobs[-1]

    def kill_jobs(self) -> None:
        """Kill what still runs of all jobs."""
        for job in self.jobs:
            job.kill()

    def submit(self, script: str, *arguments: str, nodes: int, tasks: int, gpus: int = 1) -> "Job":
        """Run a batch script as SLURM does, on the first of the nodes."""
        variables = {
            "JOB_ID": JOB,
            "JOB_NAME": "train",
            "NNODES": str(nodes),
            "NTASKS": str(nodes * tasks),
            "NTASKS_PER_NODE": str(tasks),
            "GPUS_ON_NODE": str(gpus),
            "CPUS_PER_TASK": "1",
            "JOB_NODELIST": "127.0.0.1",
            "NODELIST": "127.0.0.1",
        }
        names = {f"SLURM_{name}": value for name, value in variables.items()}
        return self.start(["bash", f"examples/slurm/{script}", *arguments], **names)


@dataclass
class Job:
    """A process of a job, and what it has written."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 240) -> int:
        """Its exit code; whatever it has started is killed if it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}. Its output:\n{self.text[-6000:]}") from error
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it and whatever it has started, if it has not ended."""
        if self.process.poll() is None:
            for pid in get_descendants(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"waited in vain. The output:\n{self.text[-6000:]}")
            time.sleep(0.05)


def get_descendants(pid: int) -> list[int]:
    """A process and all that descend from it, the last ones first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [descendant for child in children for descendant in get_descendants(int(child))] + [pid]


def read_manifest(name: str) -> tuple[dict, dict]:
    """A Kubernetes manifest, and the one container of its pods."""
    manifest = yaml.safe_load((ROOT / "examples" / "kubernetes" / name).read_text())
    job = manifest["spec"]
    if manifest["kind"] == "JobSet":
        [replicated] = job["replicatedJobs"]
        job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    return manifest, container


def get_sbatch_options(name: str) -> dict[str, str]:
    """What a batch script asks SLURM for."""
    text = (ROOT / "examples" / "slurm" / name).read_text()
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH --")
    return dict(options)

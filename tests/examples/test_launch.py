"""The launch scripts and manifests of ``examples/`` and ``docker/compose.yaml``, run on this machine by stand-ins."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.fork_server import get_python
from helpers.programs import is_running
from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job import IoK8sApiBatchV1Job
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from torch.distributed.run import get_args_parser

import lightning_fsdp2
from lightning_fsdp2.cli import FSDP2CLI

from .cluster import JOB, ROOT, TOY, Cluster, Job, get_sbatch_options, read_manifest

SBATCH = sorted(path.name for path in (ROOT / "examples" / "slurm").glob("*.sbatch"))
SCRIPTS = sorted(path for folder in ("slurm", "torchrun") for path in (ROOT / "examples" / folder).glob("*.s*"))
MANIFESTS = {"one_node.yaml": IoK8sApiBatchV1Job, "jobset.yaml": JobsetV1alpha2JobSet}
LAUNCH_FILES = [
    path for folder in ("slurm", "torchrun", "kubernetes") for path in (ROOT / "examples" / folder).iterdir()
]
LAUNCH_FILES += [ROOT / "examples" / "README.md", *(ROOT / "docker").iterdir()]

QUICKSTART = "configs/quickstart.yaml"
HYBRID = ["--trainer.strategy.dp_replicate_size=auto"]
TWO_NODES = "--trainer.num_nodes=2"


pytestmark = pytest.mark.timeout(600)  # longer than a wait for a job, which shows its output


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(tmp_path)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose programs have imported everything when they start."""
    yield from make_cluster(tmp_path, get_python())


def make_cluster(folder: Path, python: str = sys.executable) -> Iterator[Cluster]:
    """Yield a cluster whose jobs end at the latest when the test does, also if it has timed out."""
    cluster = Cluster(folder, python)
    yield cluster
    cluster.kill_jobs()


def get_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_jobs_end_with_the_test(tmp_path: Path) -> None:
    clusters = make_cluster(tmp_path)
    cluster = next(clusters)
    job = cluster.start(["bash", "-c", "sleep 1000 & echo $!; wait"])
    job.wait_for(lambda: job.text.endswith("\n"))
    assert next(clusters, None) is None
    assert job.process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while is_running(int(job.text)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(job.text))


# ---------------------------------------------------------------------- what they say


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_the_scripts(path: Path) -> None:
    if path.suffix != ".py":
        subprocess.run(["bash", "-n", path], check=True)


def test_the_linters_of_make_lint_find_nothing() -> None:
    lines = re.findall(r"^\t\$\(BIN\)/((?:shellcheck|hadolint) .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(lines) == 2
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in lines:
        subprocess.run(line, shell=True, cwd=ROOT, env={**os.environ, "PATH": path}, check=True)


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(r"\b(?:configs|examples|docker)/[\w./-]*\w", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", SBATCH)
def test_a_job_that_is_over_in_time_is_queued_again_and_appends(name: str) -> None:
    options = get_sbatch_options(name)
    assert {"requeue", "open-mode"} <= set(options)
    assert options["open-mode"] == "append"
    assert re.fullmatch(r"(B:)?USR1@\d+", options["signal"])
    assert options["signal"].startswith("B:") == ("torchrun" in name)
    assert options["ntasks-per-node"] == ("1" if "torchrun" in name else options["gpus-per-node"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_have_the_fields_of_their_schema(name: str) -> None:
    manifest, container = read_manifest(name)
    assert MANIFESTS[name].from_dict(manifest).to_dict() == manifest
    assert container["image"].endswith(f":{lightning_fsdp2.__version__}")
    assert container["args"][0] == "lightning-fsdp2"


def test_the_number_of_nodes_is_the_same_in_all_places() -> None:
    manifest, container = read_manifest("jobset.yaml")
    [replicated] = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert f"--trainer.num_nodes={job['completions']}" in container["args"]
    assert job["parallelism"] == job["completions"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    name = manifest["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_that_saved_are_started_again_without_limit(name: str) -> None:
    """143 is what `Preemption` ends with after the SIGTERM of Kubernetes."""
    manifest, container = read_manifest(name)
    is_set = manifest["kind"] == "JobSet"
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"] if is_set else manifest["spec"]
    codes = [rule for rule in job["podFailurePolicy"]["rules"] if 143 in rule.get("onExitCodes", {}).get("values", [])]
    assert [rule["action"] for rule in codes] == ["FailJob" if is_set else "Ignore"]
    assert codes[0]["onExitCodes"]["containerName"] == container["name"]
    if is_set:
        [rule] = manifest["spec"]["failurePolicy"]["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_command_line_parses_what_manifests_give_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, container = read_manifest(name)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI([*container["args"][1:], "--print_config"])
    assert exit_.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert int(printed["trainer"]["devices"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert printed["ckpt_path"] == "last"


def read_compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def test_the_nodes_of_compose_are_told_apart_and_share_what_they_write() -> None:
    services = read_compose()["services"]
    assert [service["hostname"] for service in services.values()] == list(services)
    assert services["node0"]["volumes"] == services["node1"]["volumes"]
    environments = [service["environment"] for service in services.values()]
    assert [environment.pop("IS_HOST") for environment in environments] == ["true", "false"]
    assert environments[0] == environments[1]
    assert environments[0]["STORE"].split(":")[0] == "node0"


# ---------------------------------------------------------------------- what they do at a signal, without training

WAITS = "trap 'exit {}' USR1 TERM; echo waits; for ((i = 0; i < 300; i++)); do sleep 0.1; done; exit 9"


def count(job: Job, text: str) -> int:
    return job.text.splitlines().count(text)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("name", ["one_node.sbatch", "nodes.sbatch"])
def test_tasks_that_saved_are_queued_again(name: str, number: int, cluster: Cluster) -> None:
    cluster.put("lightning-fsdp2", WAITS.format(128 + number))
    job = cluster.submit(name, QUICKSTART, nodes=2, tasks=1)
    job.wait_for(lambda: count(job, "waits") == 2)
    for pid in get_tasks(job):
        os.kill(pid, number)
    assert job.wait() == 128 + number
    assert cluster.requeued == [JOB]


@pytest.mark.parametrize("name", ["one_node.sbatch", "nodes.sbatch"])
def test_a_job_that_is_cancelled_is_not_queued_again(name: str, cluster: Cluster) -> None:
    """`scancel` sends SIGTERM to the tasks and to the script."""
    cluster.put("lightning-fsdp2", WAITS.format(143))
    job = cluster.submit(name, QUICKSTART, nodes=2, tasks=1)
    job.wait_for(lambda: count(job, "waits") == 2)
    for pid in [job.process.pid, *get_tasks(job)]:
        os.kill(pid, signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    assert cluster.requeued == []


def get_tasks(job: Job) -> list[int]:
    """Whom SLURM sends a signal that is not for the script."""
    children = lambda pid: [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]  # noqa: E731
    [srun] = children(job.process.pid)
    return children(srun)


@pytest.mark.parametrize("name", SBATCH)
@pytest.mark.parametrize("code", [0, 1])
def test_what_ends_by_itself_is_not_queued_again(name: str, code: int, cluster: Cluster) -> None:
    for program in ("lightning-fsdp2", "torchrun"):
        cluster.put(program, f"exit {code}")
    ended = cluster.submit(name, QUICKSTART, nodes=2, tasks=1).wait()
    assert (ended != 0) == (code != 0)
    assert cluster.requeued == []


@pytest.mark.parametrize("code", [0, 1])
def test_the_signal_for_the_script_reaches_torchrun(code: int, cluster: Cluster) -> None:
    """It ends with 1 after a signal, and with 0 if the training was at its end just then."""
    cluster.put("torchrun", WAITS.format(code))
    job = cluster.submit("nodes_torchrun.sbatch", QUICKSTART, nodes=2, tasks=1)
    job.wait_for(lambda: count(job, "waits") == 2)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.wait() == code
    assert cluster.requeued == [JOB] * code


def test_each_node_gets_the_options_of_its_torchrun(cluster: Cluster) -> None:
    cluster.put("torchrun", 'echo "$SLURM_NODEID $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $PET_SIGNALS_TO_HANDLE $*"')
    job = cluster.submit("nodes_torchrun.sbatch", QUICKSTART, "--trainer.max_steps=3", nodes=2, tasks=1, gpus=8)
    assert job.wait() == 0
    parsed = {}
    for line in job.text.splitlines():
        node, is_shared, signals, *words = line.split()
        assert (is_shared, "SIGUSR1" in signals) == ("1", True)
        parsed[int(node)] = get_args_parser().parse_args(words)
    for node, options in parsed.items():
        assert f"is_host={int(node == 0)}," in options.rdzv_conf
        assert (options.nnodes, options.nproc_per_node) == ("1:2", "8")
        assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", f"127.0.0.1:{20000 + int(JOB)}")
        assert options.module
        assert options.training_script == "lightning_fsdp2"
        command = ["fit", "--config", QUICKSTART, "--trainer.devices", "8", "--ckpt_path", "last"]
        assert options.training_script_args == [*command, "--trainer.max_steps=3"]
    assert len(parsed) == 2


# ---------------------------------------------------------------------- training


def assert_trained(job: Job, cluster: Cluster, resumed: bool = False) -> None:
    assert job.wait() == 0, job.text[-6000:]
    assert ("Restored all states" in job.text) == resumed
    assert (cluster.folder / "outputs" / "quickstart" / "last.ckpt").is_dir()
    assert cluster.requeued == []


@pytest.mark.guarantees("launch-scripts")
@pytest.mark.slow
def test_slurm_trains(cluster: Cluster) -> None:
    """The other scripts train below, until a signal comes."""
    assert_trained(cluster.submit("nodes.sbatch", QUICKSTART, *TOY, *HYBRID, nodes=2, tasks=1), cluster)


@pytest.mark.guarantees("same-command")
@pytest.mark.slow
def test_torchrun_trains_on_one_node_and_goes_on(warm: Cluster) -> None:
    for steps in (2, 4):
        command = ["bash", "examples/torchrun/one_node.sh", QUICKSTART, *TOY, f"--trainer.max_steps={steps}"]
        assert_trained(warm.start(command, PROCESSES_PER_NODE="2"), warm, resumed=steps > 2)


def train_on_two_nodes(cluster: Cluster, port: str, host: int | None) -> None:
    """Train with the store on the node ``host``, or where it is served."""
    variables = {"STORE": f"127.0.0.1:{port}", "NODES": "2", "PROCESSES_PER_NODE": "1", "ADDRESS": "127.0.0.1"}
    command = ["bash", "examples/torchrun/nodes.sh", QUICKSTART, *TOY, *HYBRID]
    for job in [cluster.start(command, **variables, IS_HOST=str(node == host).lower()) for node in range(2)]:
        assert_trained(job, cluster)


@pytest.mark.guarantees("launch-scripts")
@pytest.mark.slow
def test_torchrun_trains_on_two_nodes_with_a_store_on_a_third(warm: Cluster) -> None:
    port = str(get_free_port())
    store = warm.start([warm.python, "examples/torchrun/serve_store.py", port])
    train_on_two_nodes(warm, port, host=None)
    store.process.terminate()
    assert store.wait() == 0


@pytest.mark.release
def test_torchrun_trains_on_two_nodes_with_the_store_on_the_first(warm: Cluster) -> None:
    train_on_two_nodes(warm, str(get_free_port()), host=0)


@pytest.mark.guarantees("launch-scripts")
@pytest.mark.slow
def test_compose_trains_on_two_nodes(warm: Cluster) -> None:
    services = read_compose()["services"]
    port = get_free_port()
    jobs = []
    for service in services.values():
        here = {"STORE": f"127.0.0.1:{port}", "ADDRESS": "127.0.0.1", "NODES": "2"}
        jobs.append(warm.start([*service["command"], *TOY], **service["environment"] | here))
    for job in jobs:
        assert_trained(job, warm)


@pytest.mark.guarantees("launch-scripts")
@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_command_of_a_pod_trains(name: str, warm: Cluster) -> None:
    """As many pods as two, of one process each or of two, with the variables of the manifest."""
    _, container = read_manifest(name)
    is_set = name == "jobset.yaml"
    arguments = [f"--config={QUICKSTART}" if "--config=" in word else word for word in container["args"]]
    arguments += [*TOY, *HYBRID, f"--trainer.devices={1 if is_set else 2}", *([TWO_NODES] if is_set else [])]
    variables = {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}
    if is_set:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    pods = [warm.start(arguments, **variables | {"NODE_RANK": str(pod)}) for pod in range(2 if is_set else 1)]
    for pod in pods:
        assert_trained(pod, warm)


# ---------------------------------------------------------------------- pre-emption

ENDLESS = ["--trainer.max_steps=1000000"]


def has_saved(cluster: Cluster) -> bool:
    return (cluster.folder / "outputs" / "quickstart" / "last.ckpt").is_dir()


@pytest.mark.guarantees("exit-codes", "launch-scripts")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.release) if n == "nodes.sbatch" else n for n in SBATCH]
)
def test_slurm_saves_queues_again_and_goes_on(name: str, warm: Cluster) -> None:
    nodes, tasks = (1, 2) if name == "one_node.sbatch" else (2, 1)
    job = warm.submit(name, QUICKSTART, *TOY, *ENDLESS, nodes=nodes, tasks=tasks)
    job.wait_for(lambda: has_saved(warm))
    receivers = [job.process.pid] if "torchrun" in name else get_tasks(job)
    for pid in receivers:
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == (1 if "torchrun" in name else 138), job.text[-6000:]
    assert JOB in warm.requeued
    saved = torch.load(warm.folder / "outputs" / "quickstart" / "last.ckpt" / "meta.pt", weights_only=False)
    two_more = f"--trainer.max_steps={saved['global_step'] + 2}"
    again = warm.submit(name, QUICKSTART, *TOY, two_more, nodes=nodes, tasks=tasks)
    assert again.wait() == 0, again.text[-6000:]
    assert "Restored all states" in again.text


@pytest.mark.slow
def test_a_signal_to_one_pod_ends_all_with_the_code_of_the_manifest(warm: Cluster) -> None:
    _, container = read_manifest("jobset.yaml")
    arguments = [f"--config={QUICKSTART}" if "--config=" in word else word for word in container["args"]]
    arguments += [*TOY, *ENDLESS, "--trainer.devices=2", TWO_NODES]
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    pods = [warm.start(arguments, **here, NODE_RANK=str(pod)) for pod in range(2)]
    pods[0].wait_for(lambda: has_saved(warm))
    pods[1].process.terminate()
    assert [pod.wait() for pod in pods] == [143, 143], pods[0].text[-3000:] + pods[1].text[-3000:]


@pytest.mark.slow
def test_torchrun_ends_with_1_whatever_its_processes_end_with(tmp_path: Path) -> None:
    """The scripts are written for it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(143))\nprint('waits', flush=True)\nsignal.pause()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        process.terminate()
        assert process.wait(60) == 1

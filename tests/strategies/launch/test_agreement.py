"""Nodes that run something else, or keep checkpoints for themselves, are found before they train."""

import ctypes
import os
import platform
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback, ModelCheckpoint

from lightning_fsdp2 import CheckpointConfig, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.cli import main
from lightning_fsdp2.strategies.launch import agreement
from lightning_fsdp2.strategies.launch import process_groups as distributed

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank each."""
    monkeypatch.setattr(platform, "node", lambda: f"node-{os.environ['RANK']}")


class Module(Regressor):
    def __init__(self, lr: float, api_key: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()


def fit(*, lr: float = 0.1, api_key: str = "", strategy: dict[str, Any] | None = None, **options: Any) -> None:
    trainer = make_trainer(FSDP2Strategy(**(strategy or {})), **options)
    trainer.fit(Module(lr, api_key), make_loader(make_batches(8)))


def say(function: Callable[..., None], *of_rank: dict[str, Any], **options: Any) -> list[str]:
    """What each rank says."""

    def run() -> str:
        with pytest.raises(ValueError, match="All ranks of a run must have the same config and versions") as error:
            function(**of_rank[int(os.environ["RANK"])])
        return str(error.value)

    return run_ranks(run, len(of_rank), **options)


@pytest.mark.guarantees("nodes-agree", "compared-at-the-start")
@pytest.mark.parametrize(
    ("own", "other", "difference"),
    [
        ({"max_steps": 2}, {"max_steps": 3}, "trainer.max_steps is 2 on rank 0 (node-0) and 3 on rank 1 (node-1)"),
        ({"strategy": {}}, {"strategy": {"dp_replicate_size": 2}}, "mesh is MeshSizes("),
        (
            {"strategy": {}},
            {"strategy": {"pp_size": 2}},
            "and MeshSizes(pp=2, dp_replicate=1, ",
        ),
        ({}, {"strategy": {"config": FSDP2Config(pp_microbatches=8)}}, "FSDP2Config.pp_microbatches is None on"),
        ({}, {"strategy": {"config": FSDP2Config(reshard_after_forward=True)}}, "FSDP2Config.reshard_after_forward is"),
        (
            {},
            {"strategy": {"checkpoint": CheckpointConfig(async_save=True)}},
            "CheckpointConfig.async_save is False on",
        ),
        ({}, {"api_key": "s3cr3t"}, None),
    ],
)
def test_another_config_is_refused_on_all_ranks(own: Any, other: Any, difference: str | None) -> None:
    if difference is None:
        run_ranks(lambda: fit(**(own, other)[int(os.environ["RANK"])]), 2)
        return
    for message in say(fit, own, other):
        assert difference in message
        assert "Install the same versions on all nodes, and start all ranks with the same config." in message


def test_other_hyperparameters_of_a_script_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hold a rank or a folder of its own."""
    text = (
        r"hyperparameters of the ranks differ.*: Module.lr is 0.1 on rank 0 \(node-0\) and 0.2 on rank 1 \(node-1\)\."
    )

    def run() -> None:
        with pytest.warns(UserWarning, match=text) if os.environ["RANK"] == "0" else nullcontext():
            fit(lr=(0.1, 0.2)[int(os.environ["RANK"])])

    run_ranks(run, 2)


@pytest.mark.guarantees("nodes-agree", "compared-at-the-start")
@pytest.mark.parametrize("of_rank_0", [False, True])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, of_rank_0: bool) -> None:
    versions = distributed.get_versions()

    def differ() -> dict[str, Any]:
        if (os.environ["RANK"] == "0") is of_rank_0:
            return {**versions, "lightning_fsdp2": "0.0.9", "torch": "2.11.0"}
        return {**versions, "python": "3.11.99"}

    monkeypatch.setattr(distributed, "get_versions", differ)

    def run() -> None:
        os.environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
        make_trainer(devices=3).fit(Regressor(), make_batches(1))

    old, new = ("0.0.9", versions["lightning_fsdp2"]) if of_rank_0 else (versions["lightning_fsdp2"], "0.0.9")
    for message in say(run, {}, {}, {}, group=False):
        assert (
            f"versions, but the version of lightning_fsdp2 is {old} on rank 0 (node-0) and {new} on ranks 1 (node-1), 2"
            in (message)
        )
        assert "; the version of torch is" in message
        assert "python" not in message


def test_other_backends_are_refused() -> None:
    def run() -> None:
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        backend = ("gloo", "cpu:gloo")[int(os.environ["RANK"])]
        strategy = FSDP2Strategy(config=FSDP2Config(backend=backend))
        make_trainer(strategy).fit(Regressor(), make_batches(1))

    for message in say(run, {}, {}, group=False):
        assert "versions, but the backend is gloo on rank 0 (node-0) and cpu:gloo on rank 1 (node-1)." in message


def test_the_whole_config_of_the_command_line_counts() -> None:
    arguments = [
        "fit",
        "--model=lightning.pytorch.demos.boring_classes.BoringModel",
        "--data=lightning.pytorch.demos.boring_classes.BoringDataModule",
        "--trainer.strategy=fsdp2",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
    ]

    def run() -> str:
        rank, said = os.environ["RANK"], StringIO()
        os.environ["LOCAL_RANK"] = "0"  # the first of its node, which speaks
        with pytest.raises(SystemExit) as end, redirect_stderr(said):
            main([*arguments, f"--trainer.limit_predict_batches={rank}"])
        assert end.value.code == 2
        return said.getvalue()

    for message in run_ranks(run, 2):
        assert message.startswith(
            "error: All ranks of a run must have the same config and versions, but trainer.limit_predict_batches"
        )


def join_nodes() -> None:
    """As torchrun would, with a node for each rank."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE="2")


def keep_apart(folder: Path) -> None:
    """From now on, ``folder`` is another one in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, None) == 0


@pytest.mark.guarantees("compared-at-the-start")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_folder_of_checkpoints_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def run() -> str:
        join_nodes()
        if os.environ["RANK"] == "1":
            keep_apart(folder)
        options = {"callbacks": [ModelCheckpoint(folder / "checkpoints")], "enable_checkpointing": True}
        options["strategy"] = {"timeout": timedelta(seconds=4)}  # in which the others wait
        with pytest.raises(ValueError, match="must share the checkpoint folder") as error:
            fit(devices=1, num_nodes=2, **options)
        return str(error.value)

    for message in run_ranks(run, 2):
        assert message == (
            f"ModelCheckpoint(dirpath='{folder}/checkpoints'): all nodes must share the checkpoint folder, but a file"
            " that rank 0 (node-0) wrote is not visible to ranks 1 (node-1). Choose a folder on a shared file system,"
            " or in an object store."
        )
    assert list((folder / "checkpoints").iterdir()) == []


def test_a_file_is_looked_for_in_a_list_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a network file system may know only from then on that the file exists."""
    file = tmp_path / "file"
    monkeypatch.setattr(os, "listdir", lambda folder: file.touch() if folder == tmp_path else [])
    assert agreement._appears(file, timedelta(seconds=2))


def test_a_shared_folder_is_left_as_it_was(tmp_path: Path) -> None:
    def run() -> None:
        join_nodes()
        callbacks = [ModelCheckpoint(tmp_path, save_top_k=0)]
        fit(devices=1, num_nodes=2, callbacks=callbacks, enable_checkpointing=True)

    run_ranks(run, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_checkpoints_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    folder = tmp_path / "notes.txt" / "checkpoints"

    def run() -> str:
        steps: list[int] = []
        callbacks = [ModelCheckpoint(folder), LambdaCallback(on_train_batch_start=lambda *args: steps.append(1))]
        with pytest.raises(ValueError, match="could not save") as error:
            fit(callbacks=callbacks, enable_checkpointing=True)
        assert steps == []
        return str(error.value)

    assert set(run_ranks(run, 2)) == {
        f"ModelCheckpoint(dirpath='{folder}'): this run could not save checkpoints there, because"
        f" '{tmp_path}/notes.txt' is a file. Choose another folder (ModelCheckpoint(dirpath=...),"
        " Trainer(default_root_dir=...))."
    }


class OwnCheckpoint(Checkpoint):
    """Callback of a user, of which only the first rank knows a folder."""

    def __init__(self, folder: Path) -> None:
        if int(os.environ["RANK"]) == 0:
            self.dirpath = str(folder)


def test_only_folders_of_model_checkpoints_are_tested(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_ranks(lambda: fit(callbacks=[OwnCheckpoint(tmp_path / "file")], enable_checkpointing=True), 2)


def test_a_run_without_checkpoints_needs_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def run() -> None:
        fit(callbacks=[ModelCheckpoint(tmp_path / "file")], enable_checkpointing=True, fast_dev_run=True)

    run_ranks(run, 1)


# ---------------------------------------------------------------------- torchrun's number of nodes


def test_torchrun_says_how_many_nodes_there_are() -> None:
    def run() -> tuple[int, tuple[int, ...], int]:
        join_nodes()
        trainer = make_trainer(FSDP2Strategy(dp_replicate_size="auto"), devices=1, num_nodes=4)
        trainer.fit(Regressor(), make_loader(make_batches(4)))
        return trainer.num_nodes, trainer.strategy.full_device_mesh.shape, trainer.strategy.data_parallel_rank

    assert run_ranks(run, 2) == [(2, (2, 1, 1, 1), 0), (2, (2, 1, 1, 1), 1)]


def test_torchrun_with_another_number_of_processes_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="torchrun has started") as error:
            make_trainer(FSDP2Strategy(), devices=3)
        assert str(error.value) == (
            "torchrun has started 2 process(es), but Trainer(devices=3, num_nodes=1) asks for 3. Set num_nodes to the"
            " value of `torchrun --nnodes`, and devices to the value of `--nproc-per-node`."
        )

    run_ranks(run, 2)

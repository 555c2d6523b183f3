"""How many processes are started, and what launchers have started."""

import os
from contextlib import nullcontext

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from lightning_fsdp2.strategies.launch import environment
from lightning_fsdp2.strategies.launch.environment import check_variables, make_launcher


def test_far_more_processes_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert make_launcher(LightningEnvironment(), 16, 1) is not None
    with pytest.raises(
        ValueError, match=r"devices=17 would start 17 processes.* 2 processor.* use at most 16.*torchrun"
    ):
        make_launcher(LightningEnvironment(), 17, 1)


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: int | str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_slurm_has_started_as_many_tasks_on_each_node_as_the_trainer_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, SLURM_NTASKS=4, SLURM_NNODES=2, SLURM_NTASKS_PER_NODE=2, SLURM_LOCALID=0)
    assert make_launcher(SLURMEnvironment(), 2, 2) is None
    with pytest.raises(ValueError, match=r"`devices=4` .* `--ntasks-per-node=2` does not match"):
        make_launcher(SLURMEnvironment(), 4, 1)
    set_variables(monkeypatch, SLURM_NTASKS=3)
    with pytest.raises(ValueError, match=r"SLURM has started 3 task\(s\) .* asks for 4"):
        make_launcher(SLURMEnvironment(), 2, 2)


def test_only_ranks_of_an_agent_of_torchrun_end_with_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launchers may start ranks in a thread that ends before them."""
    parents: list[int] = []
    monkeypatch.setattr(environment, "end_with_parent", parents.append)
    set_variables(monkeypatch, WORLD_SIZE=1, LOCAL_RANK=0, SLURM_NTASKS=1, SLURM_LOCALID=0)
    make_launcher(TorchElasticEnvironment(), 1, 1)
    set_variables(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="False")
    make_launcher(SLURMEnvironment(), 1, 1)
    assert parents == []
    make_launcher(TorchElasticEnvironment(), 1, 1)
    assert parents == [os.getppid()]


@pytest.mark.guarantees("new-errors", "contradicting-variables")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODE_RANK": 2}, r"NODE_RANK=2 is out of range for Trainer\(devices=4, num_nodes=2\), .* are 0 to 1\."),
        ({"GROUP_RANK": 2}, r"GROUP_RANK=2 is out of range .* unset GROUP_RANK\."),
        ({"WORLD_SIZE": 4}, r"WORLD_SIZE=4 contradicts .* needs WORLD_SIZE=8 .*NODE_RANK=0, LOCAL_RANK=0"),
        ({"NODE_RANK": 1, "LOCAL_RANK": 3, "RANK": 6}, r"RANK=6 contradicts .* needs RANK=7 .*LOCAL_RANK=3"),
        ({"NODE_RANK": 1, "LOCAL_RANK": 3, "RANK": 7, "WORLD_SIZE": 8}, None),
        ({}, None),
    ],
)
def test_variables_of_an_earlier_run_are_named(
    variables: dict[str, int], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    set_variables(monkeypatch, **variables)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_variables(LightningEnvironment(), 4, 2)
    check_variables(SLURMEnvironment(), 4, 2)  # which sets its own

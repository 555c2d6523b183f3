"""A job that is killed around a save, whoever dies and whenever, goes on from a complete checkpoint to the last bit."""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.fault_job import WORLD_SIZE, Job, Settings, get_checkpoints, kill
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Victim = Literal["rank", "all", "launcher"]
VICTIMS: tuple[Victim, ...] = ("rank", "all", "launcher")

KILLS = {0: 2} | dict.fromkeys(range(1, 8), 4)
"""By seed, and together 30."""

SLOW_SEEDS = range(4)
"""Seeds of `make test-all`; together they kill each victim at each kind of save."""

MANY_STEPS = 80
"""More than four killed launches come to."""

EVENTS = 10
"""Entries that appear in the directory, hidden or not, before a kill, at most: those of two or three saves."""

LONGEST_DELAY = 0.03
"""Seconds from such an event to the kill, at most; a save takes about as long."""

LONGEST_ORPHANAGE = 0.2
"""Seconds that the ranks live on without their launcher, at most."""

LONGEST_END = 60.0
"""Seconds in which a job ends by itself; torch's agent gives a rank 30 to end on a signal that can be caught."""

Losses = list[dict[int, str]]
"""By rank, of each step."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with run_job(folder, 0, Settings(MANY_STEPS, save_every=MANY_STEPS)) as job:
        assert wait_for_end(job) == 0, job.output
    losses = [job.read_log(rank)[1] for rank in range(WORLD_SIZE)]
    assert [list(own) for own in losses] == [list(range(1, MANY_STEPS + 1))] * WORLD_SIZE
    return losses


@pytest.mark.guarantees("complete-or-absent", "bit-for-bit", "complete-last")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed in SLOW_SEEDS else pytest.mark.release) for seed in KILLS],
)
def test_a_killed_job_goes_on_from_its_last_complete_checkpoint(
    seed: int, uninterrupted: Losses, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    save_last: Any = True if seed % 2 == 0 else "link"
    published = 0
    for number in range(KILLS[seed]):
        settings = Settings(MANY_STEPS, number % 2 == 1, save_last, save_every=chance.choice([1, 2]))
        victim = VICTIMS[(seed + number) % len(VICTIMS)]
        with run_job(tmp_path, number, settings) as job:
            wait_for_event(job, get_checkpoints(tmp_path), chance.randint(1, EVENTS))
            time.sleep(chance.uniform(0, LONGEST_DELAY))
            end(job, victim, chance)
        assert_goes_on(job, uninterrupted, published)
        earlier, published = published, get_published_step(get_checkpoints(tmp_path))
        assert published >= earlier
    settings = replace(settings, max_steps=published + 4, save_every=1)
    with run_job(tmp_path, KILLS[seed], settings) as job:
        assert wait_for_end(job) == 0, job.output
    assert_goes_on(job, uninterrupted, published)
    assert get_published_step(get_checkpoints(tmp_path)) == settings.max_steps
    assert [path.name for path in get_checkpoints(tmp_path).iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_a_pipeline_whose_stage_is_killed_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """Dropout included: every stage takes up its own random numbers."""
    steps = 16
    (whole := tmp_path / "whole").mkdir()
    with run_job(whole, 0, Settings(steps, save_every=steps, pp_size=2)) as job:
        assert wait_for_end(job) == 0, job.output
    uninterrupted = [job.read_log(rank)[1] for rank in range(WORLD_SIZE)]
    assert [list(own) for own in uninterrupted] == [list(range(1, steps + 1))] * WORLD_SIZE
    published = 0
    for stage in range(WORLD_SIZE):
        with run_job(tmp_path, stage, Settings(steps, stage == 1, pp_size=2)) as job:
            wait_for_event(job, get_checkpoints(tmp_path), 6)
            kill([job.ranks[stage]])
            assert wait_for_end(job) != 0
        assert_goes_on(job, uninterrupted, published)
        published = get_published_step(get_checkpoints(tmp_path))
        assert published > 0
    settings = Settings(published + 2, pp_size=2)
    with run_job(tmp_path, WORLD_SIZE, settings) as job:
        assert wait_for_end(job) == 0, job.output
    assert_goes_on(job, uninterrupted, published)
    assert get_published_step(get_checkpoints(tmp_path)) == settings.max_steps


@contextlib.contextmanager
def run_job(folder: Path, number: int, settings: Settings) -> Iterator[Job]:
    job = Job(folder, number, settings)
    try:
        yield job
    finally:
        kill([job.launcher.pid, *job.ranks])
        job.launcher.join()


def wait_for_event(job: Job, folder: Path, count: int) -> None:
    """Return as soon as ``count`` entries have appeared in ``folder``, or taken the place of others."""
    seen = get_entries(folder)
    while count > 0:
        assert job.launcher.is_alive(), job.output
        entries = get_entries(folder)
        count -= len(entries - seen)
        seen |= entries
        time.sleep(0.0005)


def get_entries(folder: Path) -> set[tuple[str, int]]:
    if not folder.exists():
        return set()
    with os.scandir(folder) as entries:
        return {(entry.name, entry.inode()) for entry in entries}


def end(job: Job, victim: Victim, chance: random.Random) -> None:
    """Kill the victim, and let the job end as it then does."""
    if victim == "rank":
        kill([chance.choice(job.ranks)])
        assert wait_for_end(job) != 0  # the agent has noticed, and ended the other
    elif victim == "all":
        kill([job.launcher.pid, *job.ranks])
    else:
        # torchrun's scripts outlive it, and save on, until the scheduler or the container ends them as well
        kill([job.launcher.pid])
        time.sleep(chance.uniform(0, LONGEST_ORPHANAGE))
        kill(job.ranks)


def wait_for_end(job: Job) -> int:
    job.launcher.join(LONGEST_END)
    assert job.launcher.exitcode is not None, job.output
    return job.launcher.exitcode


def assert_goes_on(job: Job, uninterrupted: Losses, published: int) -> None:
    """The job started from ``published`` or a later step, and computed what an uninterrupted one does."""
    for rank, losses in enumerate(uninterrupted):
        if not job.has_begun(rank):
            assert job.launcher.exitcode != 0, f"the job ended, and rank {rank} never began"
            continue  # it was killed before
        resumed, own = job.read_log(rank)
        assert published <= resumed
        assert own == {step: losses[step] for step in own}
        assert list(own) == list(range(resumed + 1, resumed + 1 + len(own)))


def get_published_step(folder: Path) -> int:
    """The newest step that `ckpt_path="last"` could mean; all that has its final name is complete.

    What does not exist is a link: a resumed run gives its own another name, and Lightning forgets the one before when
    it removes what that points to.
    """
    steps = {path.name: read_step(path) for path in folder.glob("[!.]*") if path.exists()}
    return max((step for name, step in steps.items() if name.startswith("last")), default=0)


def read_step(path: Path) -> int:
    """Read a whole checkpoint with torch alone."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path)
    assert tensors
    return torch.load(path / "meta.pt", weights_only=True)["global_step"]

"""One save at a time in the background, which all ranks begin and end together."""

import threading

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks

from lightning_fsdp2.checkpoint.asynchronous import BackgroundWriter


def make_writer() -> BackgroundWriter:
    return BackgroundWriter(torch.device("cpu"), dist.new_group(), dist.new_group())


@pytest.mark.parametrize("last", [0, 1])
def test_a_save_ends_when_the_last_rank_has_written(last: int) -> None:
    def run() -> None:
        writer, gate, done = make_writer(), threading.Event(), []
        is_last = dist.get_rank() == last
        writer.start({"x": torch.ones(2)}, lambda copies: None if not is_last else gate.wait(20))
        writer.then(lambda: done.append("then"))
        if not is_last:
            writer._save.exception(60)
        writer.poll()
        assert (writer.is_writing, done) == (True, [])
        gate.set()
        if is_last:
            writer._save.exception(60)
        writer.poll()
        assert (writer.is_writing, done) == (False, ["then"])

    run_ranks(run, 2)

"""One save at a time in the background, which all ranks begin and end together."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_fsdp2.checkpoint.asynchronous import BackgroundWriter


def make_model() -> nn.Module:
    """Build a sharded model with a batch norm, whose statistics every rank keeps for itself."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return fully_shard(model)


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


def test_the_memory_of_the_copies_is_used_again() -> None:
    def run() -> None:
        pointers: list[list[int]] = []
        module = make_model()
        tensors = {"state_dict": module.state_dict()}
        writer = BackgroundWriter(torch.device("cpu"))
        for _ in range(2):
            writer.start(tensors, lambda copies: pointers.append(get_pointers(copies["state_dict"])))
        writer.wait()
        assert pointers[0] == pointers[1]
        assert not set(pointers[0]) & set(get_pointers(module.state_dict()))

    def get_pointers(state: dict[str, Any]) -> list[int]:
        locals_ = [getattr(value, "_local_tensor", value) for value in state.values()]
        return [local.data_ptr() for local in locals_ if local.numel()]

    run_ranks(run, 2)


class SomeStream(nullcontext[None]):
    """An accelerator's, where there is none."""

    def synchronize(self, *args: Any) -> None:
        pass

    def is_available(self) -> bool:
        return False


CHANGED = r"changed in place between a save.*async_save=False"


def test_weights_that_are_changed_while_they_are_copied_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, whose copies run beside the next forward."""

    def run() -> None:
        module = make_model()
        writer = BackgroundWriter(torch.device("cpu"))
        weights = module.state_dict()
        writer._stream = SomeStream()
        monkeypatch.setattr(torch, "get_device_module", lambda device: SomeStream())
        for changes in (False, True):
            held, started = threading.Event(), threading.Event()
            stage = writer._stager.stage

            def stage_after_event(
                *args: Any, held: Any = held, started: Any = started, stage: Any = stage, **options: Any
            ) -> Any:
                started.set()
                assert held.wait(60)
                return stage(*args, **options)

            monkeypatch.setattr(writer._stager, "stage", stage_after_event)
            statistics = {name: value.clone() for name, value in weights.items() if "running" in name}
            copied: dict[str, Any] = {}
            writer.start({"state_dict": weights}, lambda copies, copied=copied: copied.update(copies["state_dict"]))
            assert started.wait(60)  # the copies run beside
            if changes:
                with torch.no_grad():
                    next(iter(weights.values())).clamp_(0, 1)
            next(value for name, value in weights.items() if "running" in name).add_(1)  # as the next forward does
            held.set()
            writer.wait_for_copies()
            with pytest.raises(RuntimeError, match=CHANGED) if changes else nullcontext():
                writer.wait()
            assert changes or all(copied[name].equal(value) for name, value in statistics.items())
            monkeypatch.undo()
            monkeypatch.setattr(torch, "get_device_module", lambda device: SomeStream())

    run_ranks(run, 2)


def test_optimizers_that_are_stepped_by_hand_wait_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator; Lightning's own steps wait after forward and backward, not before."""

    def clone(state: dict[str, Any]) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in whole(state).items()}

    def run() -> None:
        module = make_model()
        writer = BackgroundWriter(torch.device("cpu"))
        writer._stream = SomeStream()
        monkeypatch.setattr(torch, "get_device_module", lambda device: SomeStream())
        stage, asked = writer._stager.stage, threading.Event()

        def stage_late(*args: Any, **options: Any) -> Any:
            assert asked.wait(60)
            return stage(*args, **options)

        def wait_for_copies() -> None:
            asked.set()
            BackgroundWriter.wait_for_copies(writer)

        monkeypatch.setattr(writer._stager, "stage", stage_late)
        monkeypatch.setattr(writer, "wait_for_copies", wait_for_copies)
        before, copied = clone(module.state_dict()), []
        optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, foreach=True)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(2):
            writer.start({"state_dict": module.state_dict()}, lambda copies: copied.append(clone(copies["state_dict"])))
            optimizer.step()
            writer.wait()
            asked.clear()
        assert all(copied[0][name].equal(value) for name, value in before.items())
        assert not all(copied[1][name].equal(value) for name, value in before.items())

    run_ranks(run, 1)

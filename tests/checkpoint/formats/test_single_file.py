"""What rank 0 gathers for a single file: of the moment of the save, or an error on every rank."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import WIDTH, Normalized, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import CheckpointConfig, FSDP2Strategy
from lightning_fsdp2.checkpoint.formats.single_file import gather_whole, read_file, write_file
from lightning_fsdp2.checkpoint.state import get_optimizer_state
from lightning_fsdp2.strategies import checkpoint_io


class UsesAdam(Normalized):
    make_optimizer = staticmethod(partial(torch.optim.AdamW, lr=0.1))


def fit(config: CheckpointConfig, *callbacks: pl.Callback) -> pl.Trainer:
    trainer = make_trainer(FSDP2Strategy(checkpoint=config), max_steps=3, callbacks=list(callbacks))
    trainer.fit(UsesAdam(), DataLoader(torch.rand(32, WIDTH), batch_size=4))  # type: ignore[arg-type]
    return trainer


@pytest.mark.guarantees("async-save")
def test_an_asynchronous_save_has_the_weights_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is gathered: on a single rank a sharded tensor's whole is its own memory."""
    opened, saved = threading.Event(), {}
    write = checkpoint_io.write_file

    def write_behind_event(*args: Any) -> None:
        assert opened.wait(60)
        write(*args)

    class SavesFirst(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                saved.update({name: value.clone() for name, value in whole(module.state_dict()).items()})
            elif trainer.global_step == 3:
                assert not torch.equal(whole(module.state_dict())["net.0.weight"], saved["net.0.weight"])
                opened.set()

    def run() -> None:
        monkeypatch.setattr(checkpoint_io, "write_file", write_behind_event)
        fit(CheckpointConfig(format="full", async_save=True), SavesFirst())
        written = torch.load(tmp_path / "a.ckpt", weights_only=True)
        assert all(torch.equal(written["state_dict"][name], value) for name, value in saved.items())
        assert {state["step"].item() for state in written["optimizer_states"][0]["state"].values()} == {1}

    run_ranks(run, 1)


class CannotBeCopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this cannot be copied")


def test_what_cannot_be_copied_is_an_error_on_every_rank(tmp_path: Path) -> None:
    class Holds(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"object": CannotBeCopied()}

    def run() -> None:
        trainer = fit(CheckpointConfig(format="full", trust_checkpoint=True), Holds())
        with pytest.raises(TypeError, match="this cannot be copied"):
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    run_ranks(run, 2)
    assert not (tmp_path / "a.ckpt").exists()


def test_optimizer_states_have_numbers_as_those_of_torch(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = {"lists": [1]}
    checkpoint = {
        "state_dict": model.state_dict(),
        "optimizer_states": [get_optimizer_state(model, optimizer)],
        "options": options,
    }
    gathered = gather_whole(checkpoint, None, copies=False)
    options["lists"].append(2)  # after the save has begun
    write_file(tmp_path / "a.ckpt", gathered)
    read = read_file(tmp_path / "a.ckpt")
    assert read["options"] == {"lists": [1]}
    [state], expected = read["optimizer_states"], optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    assert all(state["state"][0][key].equal(value) for key, value in expected["state"][0].items())
    assert "optimizer_states" not in gather_whole({"state_dict": model.state_dict()}, None, copies=False)


def test_a_file_may_have_other_forms(tmp_path: Path) -> None:
    path, weights = tmp_path / "a.ckpt", {"weight": torch.ones(1)}
    for content, expected in (
        (weights, {"state_dict": weights}),
        ({"state_dict": weights, "epoch": 1}, {"state_dict": weights, "epoch": 1}),
        ({"state_dict": weights, "optimizer_states": [1]}, {"state_dict": weights, "optimizer_states": [1]}),
        (
            {"state_dict": weights, "optimizer_1": 1, "optimizer_0": 0},  # of Lightning's `consolidate_checkpoint`
            {"state_dict": weights, "optimizer_states": [0, 1]},
        ),
    ):
        torch.save(content, path)
        assert read_file(path) == expected
        assert read_file(path, with_optimizers=False).keys() == expected.keys() - {"optimizer_states"}
    for content in ({}, {"epoch": 1}, {"state_dict": 3}, [weights], torch.ones(2)):
        torch.save(content, path)
        with pytest.raises(ValueError, match="is not a checkpoint: it is neither a plain"):
            read_file(path)

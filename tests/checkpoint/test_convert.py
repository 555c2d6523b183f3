"""A directory becomes the single file that other strategies resume from, with nothing lost."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mesh_runs import MetricsLogger
from helpers.models import LLAMA, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, whole
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import (
    CausalLM,
    FSDP2Strategy,
    consolidate_checkpoint,
    load_checkpoint,
    load_from_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.checkpoint.convert import read_whole_checkpoint

BATCHES = make_token_batches(3, ragged=False)


class TwoOptimizers(CausalLM):
    """One in groups, and a schedule for each."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config=config)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.log("train/loss", loss, sync_dist=True)
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def configure_optimizers(self) -> Any:
        head, *others = list(self.parameters())[::-1]
        first = torch.optim.AdamW([head, others[0]], lr=LEARNING_RATE, eps=EPSILON)
        second = torch.optim.SGD([{"params": others[1:4], "lr": 0.1}, {"params": others[4:]}], lr=0.2, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (first, second)]


def make_causal_lm_module() -> CausalLM:
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    return CausalLM(config=LLAMA, optimizer=optimizer, lr_scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1))


MODULES = {"scheduled": make_causal_lm_module, "two-optimizers": lambda: TwoOptimizers(LLAMA)}


def train(make_module: Any, strategy: Any, epochs: int, ckpt_path: Path | None = None, save: Path | None = None) -> Any:
    """Train on the same batches on every rank; return the losses and the weights."""
    torch.manual_seed(0 if ckpt_path is None else 1)
    logger = MetricsLogger()
    trainer = make_trainer(strategy, max_epochs=epochs, log_every_n_steps=1, logger=logger)
    module = make_module()
    trainer.fit(module, DataLoader(BATCHES, batch_size=None), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return [metrics["train/loss"] for metrics in logger.history], whole(dict(module.named_parameters()))


@pytest.mark.guarantees("checkpoint-commands", "consolidated")
@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")  # of another mesh
@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_consolidated_checkpoint_resumes_in_one_process_and_on_shards(name: str, tmp_path: Path) -> None:
    make_module = MODULES[name]
    directory, file = tmp_path / "a.ckpt", tmp_path / "b.ckpt"

    def train_without_interruption() -> Any:
        train(make_module, FSDP2Strategy(), 1, save=directory)
        return train(make_module, FSDP2Strategy(), 2)

    losses, weights = run_ranks(train_without_interruption, 2)[0]
    consolidate_checkpoint(directory, file)
    assert set(torch.load(file, weights_only=True)) >= {"state_dict", "optimizer_states", "lr_schedulers", "loops"}

    alone = run_ranks(lambda: train(make_module, "auto", 2, ckpt_path=file), 1, group=False)[0]
    tensor_parallel = run_ranks(lambda: train(make_module, FSDP2Strategy(tp_size=2), 2, ckpt_path=file), 2)[0]
    for other_losses, other_weights in (alone, tensor_parallel):
        assert other_losses == pytest.approx(losses[len(BATCHES) :], abs=1e-6)
        for key, weight in weights.items():
            assert (other_weights[key] - weight).abs().max() <= 5e-6, key


@pytest.mark.guarantees("consolidated")
def test_lightnings_own_load_from_checkpoint_reads_it(tmp_path: Path) -> None:
    run_ranks(lambda: train(make_causal_lm_module, FSDP2Strategy(), 1, save=tmp_path / "a.ckpt"), 2)
    consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt", with_optimizers=False)
    assert "optimizer_states" not in torch.load(tmp_path / "b.ckpt", weights_only=True)
    theirs = CausalLM.load_from_checkpoint(tmp_path / "b.ckpt", map_location="cpu").state_dict()
    ours = load_from_checkpoint(CausalLM, tmp_path / "a.ckpt").state_dict()
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def make_checkpoint(path: Path) -> Path:
    torch.manual_seed(0)
    save_checkpoint(path, nn.Linear(64, 64), extra={"step": 3})
    return path


def test_a_file_is_replaced_once_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make_checkpoint(tmp_path / "a.ckpt"), tmp_path / "b.ckpt"
    torch.save({"state_dict": {"old": torch.ones(1)}}, target)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            consolidate_checkpoint(source, target)
    assert list(torch.load(target)["state_dict"]) == ["old"]
    consolidate_checkpoint(source, target)
    model = nn.Linear(64, 64)
    assert load_checkpoint(target, model) == {"step": 3}
    assert torch.equal(model.weight, read_whole_checkpoint(source)["state_dict"]["weight"])
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.ckpt", "b.ckpt"}


def test_one_rank_of_several_consolidates_alone(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a.ckpt")

    def run() -> None:
        if torch.distributed.get_rank() == 1:
            consolidate_checkpoint(source, tmp_path / "b.ckpt")

    run_ranks(run, 2)
    assert load_checkpoint(tmp_path / "b.ckpt", nn.Linear(64, 64)) == {"step": 3}


def test_bad_paths_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a.ckpt")
    consolidate_checkpoint(source, tmp_path / "file.ckpt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"file\.ckpt' is a single file already"):
        consolidate_checkpoint(tmp_path / "file.ckpt", tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match=r"output='.*' is a directory; give the path of a file"):
        consolidate_checkpoint(source, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint '.*absent'"):
        consolidate_checkpoint(tmp_path / "absent", tmp_path / "b.ckpt")
    with pytest.raises((NotADirectoryError, FileExistsError), match=r"file\.ckpt"):
        consolidate_checkpoint(source, tmp_path / "file.ckpt" / "b.ckpt")
    assert sorted(tmp_path.rglob("*")) == before


def test_damage_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a.ckpt")
    os.truncate(source / "__0_0.distcp", 1000)
    with pytest.raises(ValueError, match=r"incomplete: __0_0\.distcp \(truncated\)"):
        consolidate_checkpoint(source, tmp_path / "b.ckpt")
    (source / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"incomplete: __0_0\.distcp is missing"):
        consolidate_checkpoint(source, tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists()


def test_a_folder_without_permission_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's are closed to the user that root becomes
        os.chmod(folder, 0o755)
        source, closed = make_checkpoint(Path(folder) / "a.ckpt"), Path(folder) / "closed"
        closed.mkdir(mode=0o500)

        def consolidate() -> str:
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)  # permissions do not hold root back
            with pytest.raises(PermissionError) as caught:
                consolidate_checkpoint(source, closed / "b.ckpt")
            os.seteuid(user)
            return str(caught.value)

        assert str(closed) in run_ranks(consolidate, 1, group=False)[0]
        assert list(closed.iterdir()) == []

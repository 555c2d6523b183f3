"""The averages of one process, sharded; evaluated, exported, saved and resumed."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.mesh_runs import whole_of_stages
from helpers.models import make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import (
    Regressor,
    make_batches,
    make_language_model,
    make_loader,
    make_optimizer,
    make_trainer,
)
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import CheckpointConfig, FSDP2Strategy
from lightning_fsdp2.callbacks import ExponentialMovingAverage, HuggingFaceExport

DECAY = 0.2
"""From the second update on; the first takes (1 + 1) / (10 + 1)."""

each_strategy = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if name == "fsdp2" else pytest.mark.slow) for name, kind in STRATEGIES.items()],
    ids=STRATEGIES,
)


def average_alone(batches: Any, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights, averages, and the validation loss of the averages after every step."""
    module, losses = Regressor(), []
    optimizer = make_optimizer(module.parameters())
    averages = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for step in range(steps):
        optimizer.zero_grad()
        (sum(module.loss(batch) for batch in batches[step * 2 : step * 2 + 2]) / 2).backward()
        optimizer.step()
        decay = min(DECAY, (2 + step) / (11 + step))
        for name, parameter in module.named_parameters():
            averages[name] = decay * averages[name] + (1 - decay) * parameter.detach()
        averaged = Regressor()
        averaged.load_state_dict(averages)
        losses.append(float(sum(averaged.loss(batch) for batch in batches[:2]) / 2))
    return {name: parameter.detach() for name, parameter in module.named_parameters()}, averages, losses


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))


@pytest.mark.guarantees("guarding-callbacks", "weight-averaging")
@each_strategy
@pytest.mark.parametrize("file_format", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_averages_are_those_of_one_process_and_are_resumed(kind: Kind, file_format: Any, tmp_path: Path) -> None:
    batches = make_batches(8)

    def run() -> None:
        weights, averages, expected_losses = average_alone(batches, 4)
        for steps, path in ((2, None), (4, tmp_path / "first.ckpt")):
            average, losses = ExponentialMovingAverage(DECAY), Losses()
            trainer = kind.make_trainer(
                checkpoint=CheckpointConfig(format=file_format),
                callbacks=[average, losses],
                max_steps=steps,
                val_check_interval=1,
                check_val_every_n_epoch=None,
                num_sanity_val_steps=0,
                limit_val_batches=1,
            )
            module = Regressor()
            own_batches = batches[2 * steps - 4 : 2 * steps]
            trainer.fit(module, make_loader(own_batches), make_loader(batches), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / "first.ckpt")
            assert losses.values == pytest.approx(expected_losses[steps - 2 : steps], rel=1e-5)
        torch.testing.assert_close(whole(dict(module.named_parameters())), weights)
        torch.testing.assert_close(whole(average.averages), averages)
        assert trainer.validate(module, make_loader(batches[:2]))[0]["loss"] == pytest.approx(
            expected_losses[-1], rel=1e-5
        )
        torch.testing.assert_close(whole(dict(module.named_parameters())), weights)

    kind.run(run, 2)


@pytest.mark.slow
@each_strategy
def test_the_averages_are_exported(kind: Kind, tmp_path: Path) -> None:
    def run() -> tuple[Any, Any]:
        average = ExponentialMovingAverage(DECAY)
        export = HuggingFaceExport(tmp_path / "exported")
        module = make_language_model()
        trainer = kind.make_trainer(callbacks=[average, export], max_steps=2)
        trainer.fit(module, make_loader(make_token_batches(4)))
        return whole(average.averages), whole(dict(module.named_parameters()))

    averages, weights = kind.run(run, 2)[0]
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").named_parameters())
    torch.testing.assert_close(exported, {name.removeprefix("model."): value for name, value in averages.items()})
    assert not torch.equal(weights["model.lm_head.weight"], averages["model.lm_head.weight"])


@pytest.mark.guarantees("averages-on-any-mesh")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "file_format"),
    [
        pytest.param([{}, {"tp_size": 2}], "sharded", id="tp2"),
        pytest.param([{}, {"pp_size": 2}, {}], "sharded", id="pp2"),
        pytest.param([{}, {"pp_size": 2}, {"pp_size": 2}, {}], "full", id="pp2-full"),
    ],
)
@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")
def test_averages_are_resumed_on_another_mesh(sizes: list[dict[str, int]], file_format: Any, tmp_path: Path) -> None:
    def run() -> None:
        batches = make_token_batches(4)
        averages: list[Any] = []
        for index, own in enumerate(sizes):
            average = ExponentialMovingAverage(DECAY, every_n_steps=10 if index else 2)  # only in the second step
            path = tmp_path / "first.ckpt" if index else None
            strategy = FSDP2Strategy(checkpoint=CheckpointConfig(format=file_format), **own)
            trainer = make_trainer(strategy, callbacks=[average], max_steps=2 + index)
            loader = DataLoader(batches[:1], batch_size=None) if own else make_loader(batches)
            trainer.fit(make_language_model(), loader, ckpt_path=path)
            averages.append(whole_of_stages(average.averages, trainer))
            trainer.save_checkpoint(tmp_path / "first.ckpt")
        for resumed in averages[1:]:
            torch.testing.assert_close(resumed, averages[0], rtol=0, atol=0)

    STRATEGIES["fsdp2"].run(run, 2)


def test_a_resumed_run_averages_at_the_same_steps(tmp_path: Path) -> None:
    def run() -> None:
        def train(steps: int, ckpt_path: Path | None = None) -> Any:
            average = ExponentialMovingAverage(DECAY, every_n_steps=2)
            trainer = make_trainer(FSDP2Strategy(), callbacks=[average], max_steps=steps)
            trainer.fit(Regressor(), make_loader(make_batches(1) * 16), ckpt_path=ckpt_path)
            trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
            return whole(average.averages)

        expected = train(2)
        train(1)
        torch.testing.assert_close(train(2, tmp_path / "1.ckpt"), expected, rtol=0, atol=0)

    run_ranks(run, 2)


@pytest.mark.slow
def test_averages_of_half_precision_weights_are_float32() -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        average = ExponentialMovingAverage(0.99)
        options = {"max_steps": 8, "precision": "bf16-true", "callbacks": [average]}
        module = Regressor()
        expected = {name: value.detach().bfloat16().float() for name, value in module.named_parameters()}
        trainer = make_trainer(FSDP2Strategy(), **options)

        class Follows(pl.Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                decay = (1 + trainer.global_step) / (10 + trainer.global_step)
                for name, value in whole(dict(pl_module.named_parameters())).items():
                    expected[name] = decay * expected[name] + (1 - decay) * value.float()

        trainer.callbacks.append(Follows())
        trainer.fit(module, make_loader(make_batches(16)))
        return whole(average.averages), expected

    for averages, expected in STRATEGIES["fsdp2"].run(run, 2):
        assert {value.dtype for value in averages.values()} == {torch.float32}
        torch.testing.assert_close(averages, expected)


@pytest.mark.slow
def test_an_error_in_validation_leaves_the_weights(tmp_path: Path) -> None:
    class Fails(Regressor):
        def on_validation_epoch_end(self) -> None:
            raise ZeroDivisionError

    batches = make_batches(2)

    def run() -> None:
        module = Fails()
        trainer = STRATEGIES["fsdp2"].make_trainer(
            callbacks=[ExponentialMovingAverage(DECAY)], max_steps=1, num_sanity_val_steps=0
        )
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module, make_loader(batches), make_loader(batches))
        torch.testing.assert_close(whole(dict(module.named_parameters())), average_alone(batches, 1)[0])

    STRATEGIES["fsdp2"].run(run, 2)


@pytest.mark.slow
def test_a_module_that_was_not_trained_keeps_its_weights() -> None:
    def run() -> None:
        batches = make_batches(4)
        average = ExponentialMovingAverage(DECAY)
        trainer = make_trainer(FSDP2Strategy(), callbacks=[average], max_steps=1)
        trainer.fit(Regressor(), make_loader(batches))
        other = Regressor()
        expected = {name: value.detach().clone() for name, value in other.named_parameters()}
        is_first = trainer.is_global_zero
        with pytest.warns(UserWarning, match="has no averages") if is_first else nullcontext():
            trainer.validate(other, make_loader(batches))
        torch.testing.assert_close(whole(dict(other.named_parameters())), expected)
        trainer = make_trainer(FSDP2Strategy(), callbacks=[average], max_steps=1)
        trainer.fit(other, make_loader(batches))
        torch.testing.assert_close(whole(average.averages), average_alone(batches, 1)[1])

    STRATEGIES["fsdp2"].run(run, 2)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if name == "ddp" else pytest.mark.slow) for name, kind in STRATEGIES.items()],
    ids=STRATEGIES,
)
def test_a_checkpoint_is_evaluated_with_its_own_averages_and_the_log_says_so(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = make_batches(8)

    def count_lines() -> int:
        return caplog.messages.count(
            "ExponentialMovingAverage: the averages are evaluated, not the weights themselves."
        )

    def run() -> None:
        caplog.set_level("INFO")
        weights, _, losses = average_alone(batches, 2)
        plain = Regressor()
        plain.load_state_dict(weights)
        trainer = kind.make_trainer(callbacks=[ExponentialMovingAverage(DECAY)], max_steps=2)
        module = Regressor()
        trainer.fit(module, make_loader(batches))
        trainer.save_checkpoint(tmp_path / "early.ckpt")
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        options = {"max_steps": 3, "val_check_interval": 1, "num_sanity_val_steps": 0}
        trainer = kind.make_trainer(callbacks=[ExponentialMovingAverage(DECAY)], **options)
        is_first = trainer.is_global_zero
        trainer.fit(module, make_loader(batches[4:]), make_loader(batches[:2]))  # two validations
        assert count_lines() == is_first
        for fresh in (trainer, kind.make_trainer(callbacks=[ExponentialMovingAverage(DECAY)])):
            measured = fresh.validate(module, make_loader(batches[:2]), ckpt_path=tmp_path / "early.ckpt")
            assert measured[0]["loss"] == pytest.approx(losses[-1], rel=1e-5)
        assert count_lines() == 3 * is_first
        with pytest.warns(UserWarning, match="has no averages") if is_first else nullcontext():
            measured = trainer.validate(module, make_loader(batches[:2]), ckpt_path=tmp_path / "weights.ckpt")
        expected = float(sum(plain.loss(batch) for batch in batches[:2]) / 2)
        assert measured[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert count_lines() == 3 * is_first

    kind.run(run, 2)


@pytest.mark.slow
def test_averages_of_other_parameters_are_refused(tmp_path: Path) -> None:
    def run() -> None:
        batches = make_batches(2)
        trainer = STRATEGIES["fsdp2"].make_trainer(callbacks=[ExponentialMovingAverage()], max_steps=1)
        trainer.fit(Regressor(), make_loader(batches))
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        module = Regressor()
        module.head.requires_grad_(False)
        trainer = STRATEGIES["fsdp2"].make_trainer(callbacks=[ExponentialMovingAverage()], max_steps=2)
        with pytest.raises(ValueError, match=r"that this run trains; these differ: head\.bias, head\.weight\."):
            trainer.fit(module, make_loader(batches), ckpt_path=tmp_path / "first.ckpt")

    STRATEGIES["fsdp2"].run(run, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"decay=1\.0\): decay must lie between 0 and 1"),
        ({"every_n_steps": 0}, r"every_n_steps=0\): every_n_steps must be 1"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentialMovingAverage(**options)

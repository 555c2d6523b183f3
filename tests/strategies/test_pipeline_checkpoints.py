"""Checkpoints, and callbacks that count the whole model, on pipeline stages; layouts are in ``test_layouts.py``."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.mesh_runs import RankBatches, whole_of_stages
from helpers.models import make_causal_lm, make_token_batches
from helpers.pipelines import CONFIGS
from helpers.ranks import raises_on_all_ranks, run_ranks
from helpers.recorder import Recorder
from helpers.user_modules import make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import CausalLM, CheckpointConfig, FSDP2Strategy, load_from_checkpoint, verify_checkpoint
from lightning_fsdp2.callbacks import (
    ExponentialMovingAverage,
    GradientNorm,
    HuggingFaceExport,
    LossOverRanks,
    NaNGuard,
    Preemption,
    RunReport,
    Throughput,
)
from lightning_fsdp2.callbacks.model_flops import get_flops_per_token

LENGTH = 16


def make_module(family: str = "llama", **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(config={**CONFIGS[family], **changes}, optimizer=partial(torch.optim.AdamW, lr=1e-2))


def fit(module: pl.LightningModule, *, steps: int = 1, ckpt_path: Path | None = None, **options: Any) -> Any:
    trainer = make_trainer(options.pop("strategy", FSDP2Strategy(pp_size=2)), max_steps=steps, **options)
    batches = make_token_batches(4, size=4, length=LENGTH)
    trainer.fit(module, datamodule=RankBatches(batches), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two stages of a tied model, and the weights in it."""
    path = tmp_path_factory.mktemp("saved") / "step.ckpt"

    def run() -> dict[str, Tensor]:
        module = make_module("qwen3")
        trainer = fit(module)
        trainer.save_checkpoint(path)
        return whole_of_stages(module.state_dict(), trainer)

    return path, run_ranks(run, 2)[0]


@pytest.mark.guarantees("checkpoints-of-stages")
def test_one_process_reads_a_checkpoint_of_stages(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, weights = saved

    def run() -> None:
        module = load_from_checkpoint(CausalLM, path)
        torch.testing.assert_close(dict(module.state_dict()), weights, rtol=0, atol=0)
        assert len(verify_checkpoint(path)) > 2

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (5, r"Missing key\(s\) in state_dict: \"model.model.layers.4.self_attn.q_proj.weight\""),
        pytest.param(
            3,
            r"Unexpected key\(s\) in state_dict: \"model.model.layers.3.self_attn.q_proj.weight\"",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_stages_tell_what_does_not_fit_any_of_them(
    layers: int, message: str, saved: tuple[Path, dict[str, Tensor]]
) -> None:
    def run() -> str:
        with pytest.raises(ValueError, match=message) as caught:
            fit(make_module("qwen3", num_hidden_layers=layers), ckpt_path=saved[0])
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second


class Grouped(CausalLM):
    """Of whose two groups, one has no parameters on the second stage."""

    drops_empty = False

    def configure_optimizers(self) -> Any:
        groups: list[list[Any]] = [[], []]
        for name, parameter in self.named_parameters():
            groups["embed_tokens" not in name].append(parameter)
        kept = [group for group in groups if group or not self.drops_empty]
        return torch.optim.AdamW([{"params": group} for group in kept], lr=1e-2)


@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")  # of another mesh
def test_groups_of_an_optimizer_are_those_of_all_stages(tmp_path: Path) -> None:
    def save() -> None:
        fit(Grouped(config=CONFIGS["llama"])).save_checkpoint(tmp_path / "step.ckpt")

    def load() -> list[list[str]]:
        module = Grouped(config=CONFIGS["llama"])
        trainer = fit(module, strategy=FSDP2Strategy(), steps=2, ckpt_path=tmp_path / "step.ckpt")
        assert len(trainer.optimizers[0].state) == len(list(module.parameters()))
        return [[state["step"].item() for state in trainer.optimizers[0].state.values()]]

    run_ranks(save, 2)
    [steps] = run_ranks(load, 1)[0]
    assert set(steps) == {2.0}


@pytest.mark.slow
def test_stages_with_other_numbers_of_groups_are_refused_before_the_first_step() -> None:
    class Dropping(Grouped):
        drops_empty = True

    def run() -> None:
        fit(Dropping(config=CONFIGS["llama"]))

    with raises_on_all_ranks(ValueError, match=r"other numbers of parameter groups on each stage \(\[\[2\], \[1\]\]\)"):
        run_ranks(run, 2)


# ---------------------------------------------------------------------- callbacks


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mixtral"))]
)
def test_callbacks_count_the_whole_model(family: str) -> None:
    callbacks = [GradientNorm(), LossOverRanks(), NaNGuard(), Throughput(peak_flops=1e12)]

    def run(**sizes: int) -> dict[str, float]:
        recorder = Recorder()
        fit(
            make_module(family),
            strategy=FSDP2Strategy(**sizes),
            callbacks=callbacks,
            logger=recorder,
            log_every_n_steps=1,
        )
        [metrics] = recorder.rows.values()
        # what it takes on one device; and that a batch counts once
        per_token = metrics["throughput/tflops_per_device"] / metrics["throughput/tokens_per_second_per_device"] * 1e12
        tokens = metrics["throughput/tokens_per_second"] * metrics["throughput/step_seconds"]
        kept = ("gradients/norm", "loss/mean", "loss/max", "train/loss", "train/tokens", "train/gradient_norm")
        return {"per_token": per_token, "tokens": tokens, **{name: metrics[name] for name in kept}}

    [expected] = run_ranks(run, 1)
    assert expected["per_token"] == pytest.approx(get_flops_per_token(make_causal_lm(CONFIGS[family]), LENGTH))
    assert expected["tokens"] == pytest.approx(4 * LENGTH)
    for actual in run_ranks(lambda: run(pp_size=2), 2):
        assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_all_stages() -> None:
    class Poisoned(CausalLM):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for name, parameter in self.named_parameters():
                if "embed_tokens" in name:
                    parameter.grad.mul_(float("nan"))
            super().on_before_optimizer_step(optimizer)

    def run() -> None:
        with pytest.raises(RuntimeError, match="the norm of the gradients of step 1 is not finite"):
            fit(Poisoned(config=CONFIGS["llama"]), callbacks=[NaNGuard()], gradient_clip_val=1.0)

    run_ranks(run, 2)


class Listing(pl.Callback):
    """Saves sharded tensors in a list."""

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"weights": [weight.detach() for weight in module.parameters()]}


@pytest.mark.parametrize("checkpoint_format", [pytest.param("sharded", marks=pytest.mark.slow), "full"])
def test_a_list_of_sharded_tensors_is_refused_instead_of_losing_those_of_a_stage(
    tmp_path: Path, checkpoint_format: Any
) -> None:
    def run() -> None:
        config = CheckpointConfig(format=checkpoint_format)
        trainer = fit(make_module(), strategy=FSDP2Strategy(pp_size=2, checkpoint=config), callbacks=[Listing()])
        with pytest.raises(ValueError, match=r"list of sharded tensors at kept\.weights, .* in a dict by their names"):
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    run_ranks(run, 2)


def test_a_report_with_a_sample_is_refused_before_the_first_step() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"prompt='A'\): with pp_size=2, the model cannot generate text"):
            fit(make_module(), callbacks=[RunReport(prompt="A")])

    run_ranks(run, 2)


@pytest.mark.slow
def test_averages_of_all_stages_are_exported(tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        average = ExponentialMovingAverage(0.2)
        trainer = fit(make_module("qwen3"), steps=2, callbacks=[average, HuggingFaceExport(tmp_path / "exported")])
        return whole_of_stages(average.averages, trainer)

    averages = run_ranks(run, 2)[0]
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").named_parameters())
    expected = {name.removeprefix("model."): average for name, average in averages.items()}
    torch.testing.assert_close(exported, expected, rtol=0, atol=0)


@pytest.mark.guarantees("sigterm")
@pytest.mark.slow
def test_a_signal_to_the_rank_of_one_stage_saves_all(tmp_path: Path) -> None:
    class Signal(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if (trainer.global_step, trainer.global_rank) == (1, 1):
                os.kill(os.getpid(), signal.SIGUSR1)

    def run() -> Any:
        callbacks = [Preemption(), Signal(), ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)]
        with pytest.raises(SystemExit) as caught:
            fit(make_module(), steps=3, callbacks=callbacks, enable_checkpointing=True)
        return caught.value.code

    def resume() -> int:
        return fit(make_module(), steps=3, ckpt_path=tmp_path / "last.ckpt").global_step

    assert run_ranks(run, 2) == [128 + signal.SIGUSR1] * 2
    assert run_ranks(resume, 2) == [3, 3]


@pytest.mark.slow
def test_a_second_trainer_with_other_stages_is_refused() -> None:
    def run() -> None:
        module = make_module()
        fit(module)
        fit(module, steps=2)
        with pytest.raises(ValueError, match=r"sharded over 2 pipeline stages of .* load a checkpoint into"):
            fit(module, strategy=FSDP2Strategy(), steps=3)

    run_ranks(run, 2)

"""Training in float8 through the Trainer: the numbers of one process whose layers torchao itself has converted."""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers import lora
from helpers.cover import Matrix
from helpers.float8 import RECIPES, WIDE_LLAMA, convert, make_reference
from helpers.mesh_runs import Case, RankBatches, assert_bf16_gradients, train_alone, train_on_mesh
from helpers.models import make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, Batch, Record, assert_equal_runs, token_sum_loss, whole
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import CausalLM, Float8Config, FSDP2Config, FSDP2Strategy, export_hf
from lightning_fsdp2.callbacks import ExponentialMovingAverage
from lightning_fsdp2.callbacks.exponential_moving_average import use_averages
from lightning_fsdp2.parallel.layers.float8_conversion import get_optional_conversion

MESHES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "tp2": (2, {"tp_size": 2}, {}),
    "tp2+sp": (2, {"tp_size": 2}, {"sequence_parallel": True}),
    "dp2 x tp2+sp": (4, {"tp_size": 2}, {"sequence_parallel": True}),
    "hsdp2x2": (4, {"dp_replicate_size": 2}, {}),
    "cp2": (2, {"cp_size": 2}, {}),
    "pp2": (2, {"pp_size": 2}, {}),
    "ep2": (2, {"ep_size": 2}, {}),
}
MIXTURE = {**WIDE_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {mesh: MIXTURE if mesh == "ep2" else WIDE_LLAMA for mesh in MESHES}
CONVERTED = {"llama": 14, "mixtral": 8}
"""Of a layer's linear layers: seven, or the four of attention, because experts are packed."""

optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)


def make_model(config: dict[str, Any], recipe: str, **options: Any) -> nn.Module:
    """The model in one process, with torchao's layers."""
    return make_reference(config, recipe, **options)


def make_case(mesh: str, recipe: str, flags: dict[str, Any] | None = None, **overrides: Any) -> Case:
    """One step: after it, weights differ by rounding, which tips the rounding to float8 of some values.

    One process reads the whole global batch at once, so that its scales are not those of the ranks.
    """
    _, sizes, mesh_flags = MESHES[mesh]
    config = CONFIGS[mesh]
    float8 = Float8Config(recipe=recipe, emulate=True)
    options = {
        "steps": 1,
        "batches": make_token_batches(8, size=4, length=16),
        "joins_ranks": True,
        "divides_gradients": True,
    }
    options |= overrides
    return Case(
        make_module=partial(CausalLM, config=config, optimizer=optimizer, decay_norms_and_biases=True),
        make_model=partial(make_model, config, recipe),
        loss=token_sum_loss,
        strategy={**sizes, "config": FSDP2Config(float8=float8, **mesh_flags, **(flags or {}))},
        **options,
    )


def train_and_count(case: Case) -> Record:
    """Train on the mesh, and check how many layers were in float8."""
    module = case.make_module()
    record = train_on_mesh(replace(case, make_module=lambda: module))
    assert len(get_optional_conversion(module).converted) == CONVERTED[module.model.config.model_type]
    return record


def get_dp_size(mesh: str) -> int:
    ranks, sizes, _ = MESHES[mesh]
    return ranks // (sizes.get("tp_size", 1) * sizes.get("cp_size", 1) * sizes.get("pp_size", 1))


def get_error(record: Record, exact: Record) -> float:
    """The distance of all gradients of the first step from the exact ones, relative to these."""
    ours, theirs = record.gradients[0], exact.gradients[0]
    distance = sum((ours[name] - gradient).square().sum().item() for name, gradient in theirs.items())
    return (distance / sum(gradient.square().sum().item() for gradient in theirs.values())) ** 0.5


MODES = (False, "full", "selective")
CELLS = {
    f"{mesh}-{recipe}-{mode}": {
        **{"dp_replicate_size": 1, "cp_size": 1, "tp_size": 1, "pp_size": 1, "ep_size": 1, **sizes},
        "dp_shards": ranks // math.prod(size for name, size in sizes.items() if name != "ep_size"),
        "sequence_parallel": "sequence_parallel" in flags,
        "recipe": recipe,
        "activation_checkpointing": mode,
    }
    for mesh, (ranks, sizes, flags) in MESHES.items()
    for recipe in RECIPES
    for mode in MODES
}
MATRIX = Matrix(
    "recipes of float8",
    CELLS,
    fast=("tp2-rowwise_with_gw_hp-full",),
    costs={name: MESHES[name.split("-")[0]][0] for name in CELLS},
)


@pytest.mark.guarantees("float8-in-float32", "layouts-in-float8")
@pytest.mark.parametrize(
    ("mesh", "recipe", "mode"),
    MATRIX.list_parameters(
        {f"{mesh}-{recipe}-{mode}": (mesh, recipe, mode) for mesh, recipe, mode in product(MESHES, RECIPES, MODES)}
    ),
)
def test_gradients_norm_and_weights_are_those_of_one_process(mesh: str, recipe: str, mode: Any) -> None:
    def run() -> None:
        torch.manual_seed(1)
        case = make_case(mesh, recipe, {"activation_checkpointing": mode}, clip=0.1)
        actual = train_and_count(case)
        if dist.get_rank() == 0:
            expected = train_alone(case, actual.initial, get_dp_size(mesh))
            assert_equal_runs(actual, expected)
            exact = train_alone(
                replace(case, make_model=partial(make_causal_lm, CONFIGS[mesh])), actual.initial, get_dp_size(mesh)
            )
            assert get_error(actual, exact) > 0.01  # so float8 ran

    run_ranks(run, MESHES[mesh][0])


@pytest.mark.guarantees("float8-in-float32", "unrounded-scales")
@pytest.mark.parametrize("mesh", ["dp2", pytest.param("tp2+sp", marks=pytest.mark.slow)])
def test_scales_that_are_no_powers_of_two_fail_this_comparison(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are torchao's own for this recipe, and differ from rank to rank in all bits."""
    monkeypatch.setattr("torchao.float8.float8_utils._round_scale_down_to_power_of_2", lambda scale: scale)

    def run() -> float:
        torch.manual_seed(1)
        case = make_case(mesh, "tensorwise")
        case = replace(case, make_model=partial(make_model, CONFIGS[mesh], "tensorwise", rounds=False))
        actual = train_and_count(case)
        expected = train_alone(case, actual.initial, get_dp_size(mesh))
        return max(
            ((gradient - reference).abs().max() / reference.abs().max()).item()
            for gradient, reference in (
                (actual.gradients[0][name], reference) for name, reference in expected.gradients[0].items()
            )
        )

    assert run_ranks(run, MESHES[mesh][0])[0] > 0.1


@pytest.mark.guarantees("float8-in-bfloat16")
@pytest.mark.parametrize(
    ("mesh", "recipe", "precision"),
    [
        pytest.param(*cell, marks=() if cell == ("dp2", "tensorwise", "bf16-mixed") else pytest.mark.slow)
        for cell in (
            ("dp2 x tp2+sp", "tensorwise", "bf16-mixed"),
            *(("dp2", recipe, "bf16-mixed") for recipe in RECIPES),
            *(("tp2", recipe, "bf16-true") for recipe in RECIPES),
            *(("pp2", recipe, "bf16-mixed") for recipe in RECIPES),
            *(("tp2+sp", recipe, "autocast") for recipe in RECIPES),
        )
    ],
)
def test_the_error_in_bfloat16_is_that_of_one_process(mesh: str, recipe: str, precision: str) -> None:
    def run() -> None:
        torch.manual_seed(1)
        flags = {"autocast_dtype": torch.bfloat16} if precision == "autocast" else {}
        case = make_case(mesh, recipe, flags, steps=2, precision="32-true" if flags else precision)
        actual = train_and_count(case)
        if dist.get_rank() == 0:
            exact = partial(make_causal_lm, CONFIGS[mesh])
            ratio = assert_bf16_gradients(case, actual, get_dp_size(mesh), make_exact_model=exact)
            assert ratio > 0.8  # without float8 it would be a tenth

    run_ranks(run, MESHES[mesh][0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_agrees_with_itself_on_halves_of_a_batch(recipe: str) -> None:
    """Whose scales differ, as those of ranks do."""

    def run() -> None:
        torch.manual_seed(1)
        whole_batch = make_case("dp2", recipe)
        halves = replace(whole_batch, accumulate=2, joins_ranks=False)
        initial = make_causal_lm(WIDE_LLAMA).state_dict()
        assert_equal_runs(train_alone(halves, initial, 1), train_alone(whole_batch, initial, 2))

    run_ranks(run, 1)


@pytest.mark.parametrize("mesh", ["dp2", pytest.param("tp2+sp", marks=pytest.mark.slow)])
def test_micro_batches_add_up_as_in_one_process(mesh: str) -> None:
    def run() -> None:
        torch.manual_seed(1)
        case = make_case(mesh, "rowwise", accumulate=3, batches=make_token_batches(6, size=4, length=16))
        actual = train_and_count(case)
        if dist.get_rank() == 0:
            assert_equal_runs(actual, train_alone(case, actual.initial, get_dp_size(mesh)))

    run_ranks(run, MESHES[mesh][0])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp2", "tp2+sp"])
def test_adapters_train_beside_a_frozen_base_in_float8(mesh: str, tmp_path: Path) -> None:
    recipe = "rowwise"
    folder = tmp_path / "base"
    torch.manual_seed(0)
    make_causal_lm(WIDE_LLAMA).save_pretrained(folder)

    def make_plain() -> nn.Module:
        model = lora.make_plain(str(folder))
        return convert(model, recipe, is_converted=lambda name: "lora_" not in name and "lm_head" not in name)

    def run() -> None:
        torch.manual_seed(1)
        case = replace(
            make_case(mesh, recipe), make_module=partial(lora.make_module, str(folder)), make_model=make_plain
        )
        actual = train_and_count(case)
        if dist.get_rank() == 0:
            assert_equal_runs(actual, train_alone(case, actual.initial, get_dp_size(mesh)))

    run_ranks(run, MESHES[mesh][0])


# ---------------------------------------------------------------------- checkpoints and evaluation

RECIPE = "rowwise_with_gw_hp"


def make_strategy(*, float8: bool, **sizes: int) -> FSDP2Strategy:
    config = FSDP2Config(float8=Float8Config(recipe=RECIPE, emulate=True) if float8 else None)
    return FSDP2Strategy(config=config, **sizes)


def fit(
    *, float8: bool, steps: int, ckpt_path: Path | None = None, sizes: dict[str, int] | None = None, **options: Any
) -> tuple[pl.Trainer, CausalLM]:
    module = CausalLM(config=WIDE_LLAMA, optimizer=optimizer, decay_norms_and_biases=True)
    trainer = make_trainer(make_strategy(float8=float8, **(sizes or {})), max_steps=steps, **options)
    # each rank reads the same batch again and again, wherever its data loader goes on
    trainer.fit(module, datamodule=Batches(make_token_batches(2) * 4), ckpt_path=ckpt_path)
    return trainer, module


class Batches(RankBatches):
    def val_dataloader(self) -> DataLoader[Batch]:
        return self.train_dataloader()


class Weights(pl.Callback):
    """What training starts with, and a checkpoint after two steps with the weights in it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.first = whole(module.state_dict())

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if self.path is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
            self.saved = whole(module.state_dict())


@pytest.mark.guarantees("checkpoints-with-float8")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [(True, True), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((True, False), (False, True)))],
)
def test_a_run_goes_on_bitwise_with_or_without_float8(writer: bool, reader: bool, tmp_path: Path) -> None:
    def run() -> None:
        torch.manual_seed(1)
        before, after = Weights(tmp_path / "run.ckpt"), Weights()
        options = {"steps": 3, "limit_val_batches": 0}
        _, straight = fit(float8=writer, callbacks=[before], **options)
        _, resumed = fit(float8=reader, callbacks=[after], ckpt_path=tmp_path / "run.ckpt", **options)
        lora.assert_equal_tensors(after.first, before.saved)
        if reader == writer:  # then it is the run without the interruption
            lora.assert_equal_tensors(whole(resumed.state_dict()), whole(straight.state_dict()))

    run_ranks(run, 2)


class Evaluated(pl.Callback):
    """The validation loss and the logits of a batch, in evaluation."""

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.loss = float(trainer.callback_metrics["val/loss"])
        self.logits = module.model(input_ids=make_token_batches(1)[0]["input_ids"], use_cache=False).logits


@pytest.mark.guarantees("evaluation-in-float8")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}], ids=["dp2", "tp2"])
def test_averages_are_evaluated_in_float8_and_exported_without(sizes: dict[str, int], tmp_path: Path) -> None:
    """With the numbers of one process; `generate` writes its tokens, too."""

    def run() -> None:
        torch.manual_seed(1)
        average, evaluated = ExponentialMovingAverage(0.5), Evaluated()
        trainer, module = fit(
            float8=True,
            steps=2,
            sizes=sizes,
            callbacks=[evaluated, average],  # before the averages leave the module
            limit_val_batches=2,
            val_check_interval=2,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
        )
        averages = {name.removeprefix("model."): tensor for name, tensor in whole(average.averages).items()}
        with use_averages(trainer):
            export_hf(module, tmp_path / "exported")
        generated = module.model.eval().generate(
            make_token_batches(1)[0]["input_ids"][:, :5], max_new_tokens=6, do_sample=False, synced_gpus=True
        )
        weights = {name.removeprefix("model."): tensor for name, tensor in whole(module.state_dict()).items()}
        if dist.get_rank() == 0:
            reference = make_reference(WIDE_LLAMA, RECIPE).eval()
            with torch.no_grad():
                reference.load_state_dict(averages, strict=False)
                logits = reference(input_ids=make_token_batches(1)[0]["input_ids"], use_cache=False).logits
                torch.testing.assert_close(evaluated.logits, logits, rtol=1e-4, atol=1e-5)
                batches = make_token_batches(2)
                parts = [token_sum_loss(reference, batch) for batch in batches]
                expected = float(sum(loss for loss, _ in parts) / sum(number for _, number in parts))
                assert evaluated.loss == pytest.approx(expected, rel=1e-5)
                reference.load_state_dict(weights, strict=False)
                tokens = reference.generate(
                    make_token_batches(1)[0]["input_ids"][:, :5], max_new_tokens=6, do_sample=False
                )
                assert torch.equal(generated, tokens)
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
            assert type(exported.model.layers[0].mlp.up_proj) is nn.Linear
            assert "quantization" not in str(exported.config)
            lora.assert_equal_tensors(
                {name: tensor for name, tensor in exported.state_dict().items() if name in averages}, averages
            )

    run_ranks(run, 2)


def test_a_second_trainer_must_agree_on_float8() -> None:
    def run() -> None:
        _, module = fit(float8=True, steps=1)
        trainer = make_trainer(make_strategy(float8=False), max_steps=2)
        with pytest.raises(ValueError, match=r"was parallelised with float8=Float8Config\(.*asks for None"):
            trainer.fit(module, datamodule=RankBatches(make_token_batches(4)))

    run_ranks(run, 1)

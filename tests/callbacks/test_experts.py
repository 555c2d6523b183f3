"""Loads of experts and biases that even them out, against one process that counts by itself."""

import math
import re
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.collectives import CountsStep
from helpers.cover import Matrix
from helpers.families import make_family_config, make_family_model
from helpers.mesh_runs import RankBatches, whole_of_stages
from helpers.models import make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, token_sum_loss, whole
from helpers.ranks import run_ranks
from helpers.recorder import Recorder
from helpers.strategies import STRATEGIES
from helpers.user_modules import make_trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.callbacks import ExpertBias, ExpertLoad
from lightning_fsdp2.callbacks.progress_bar import _get_costs
from lightning_fsdp2.modules.experts import find_experts

RATE = 0.05
"""Large, so that a few steps change the routing."""

STEPS, ACCUMULATE = 3, 2

MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp2, full": (2, {}, {"activation_checkpointing": "full"}),
    "ep2": (2, {"ep_size": 2}, {}),
    "ep2, full": (2, {"ep_size": 2}, {"activation_checkpointing": "full"}),
    "ep2, selective": (2, {"ep_size": 2}, {"activation_checkpointing": "selective"}),
    "ep2 x efsdp2": (4, {"ep_size": 2}, {}),
    "hsdp2 x ep2": (4, {"ep_size": 2, "dp_replicate_size": 2}, {}),
    "tp2": (2, {"tp_size": 2}, {}),
    "dp2 x tp2 with ep4+sp": (4, {"ep_size": 4, "tp_size": 2}, {"sequence_parallel": True}),
    "dp2 x cp2 with ep2": (4, {"ep_size": 2, "cp_size": 2}, {}),
    "pp2": (2, {"pp_size": 2}, {"pp_microbatches": 2}),
    "pp2 x ep2": (4, {"pp_size": 2, "ep_size": 2}, {"pp_microbatches": 2}),
}


MATRIX = Matrix(
    "loads of experts",
    {
        mesh: {**sizes, "is sharded": ranks > math.prod(sizes.values()), **flags}
        for mesh, (ranks, sizes, flags) in MESHES.items()
    },
    fast=("ep2",),
    whole=True,
)


def make_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return make_family_model(family, **changes).train()


def make_module(family: str, **changes: Any) -> CausalLM:
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    config = make_family_config(family, **changes).to_dict()
    module = CausalLM(config=config, optimizer=optimizer, decay_norms_and_biases=True)
    module.model = make_model(family, **changes)
    return module


def get_biases(model: nn.Module) -> dict[str, Tensor]:
    """The biases in the order of layers, whatever holds them."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    names = [name for name in tensors if name.endswith(("correction_bias", "expert_bias"))]
    return {name: tensors[name] for name in sorted(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])}


@dataclass(frozen=True)
class Alone:
    """What one process without a strategy leaves."""

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    loads: list[Tensor]
    """[layers, experts] of each step."""


@cache
def train_alone(family: str, dp_size: int, rate: float) -> Alone:
    """Return what one process leaves, which a mesh of this size should leave too."""
    return run_ranks(_train_alone, 1, family, dp_size, rate, group=False)[0]


def _train_alone(family: str, dp_size: int, rate: float) -> Alone:
    model, loads = make_model(family), []
    layers = find_experts(model.modules())
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: seen[module].append(args[1].flatten()))
    batches = make_token_batches(STEPS * ACCUMULATE * dp_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    for _ in range(STEPS):
        window = [batches.pop(0) for _ in range(ACCUMULATE * dp_size)]
        optimizer.zero_grad()
        parts = [token_sum_loss(model, batch) for batch in window]
        (sum(part for part, _ in parts) / sum(count for _, count in parts)).backward()
        counts = [torch.cat(seen[layer]).bincount(minlength=layer.num_experts) for layer in layers]
        loads.append(torch.stack(counts).double())
        for layer in layers:
            seen[layer].clear()
        with torch.no_grad():
            for bias, count in zip(get_biases(model).values() if rate else (), counts, strict=False):
                bias += rate * torch.sign(count.double().mean() - count).view_as(bias)
        optimizer.step()
    return Alone({name: weight.detach() for name, weight in model.named_parameters()}, get_biases(model), loads)


def get_dp_size(mesh: str) -> int:
    ranks, sizes, _ = MESHES[mesh]
    return ranks // math.prod(sizes.get(size, 1) for size in ("tp_size", "cp_size", "pp_size"))


def fit(module: CausalLM, mesh: str, callback: Any, **options: Any) -> Recorder:
    _, sizes, flags = MESHES[mesh]
    recorder = Recorder()
    trainer = make_trainer(
        FSDP2Strategy(config=FSDP2Config(**flags), **sizes),
        callbacks=callback if isinstance(callback, list) else [callback],
        accumulate_grad_batches=ACCUMULATE,
        logger=recorder,
        **{"max_steps": STEPS, "log_every_n_steps": 1, **options},
    )
    trainer.fit(module, datamodule=RankBatches(make_token_batches(STEPS * ACCUMULATE * get_dp_size(mesh))))
    return recorder


@pytest.mark.guarantees("routers", "bias-of-routers", "loads")
@pytest.mark.parametrize("mesh", MATRIX.list_parameters({mesh: (mesh,) for mesh in MESHES}))
def test_biases_weights_and_loads_are_those_of_one_process(mesh: str) -> None:
    check_run("deepseek_v3", mesh, [ExpertBias(RATE), ExpertLoad()])


@pytest.mark.slow
def test_loads_alone_are_those_of_one_process() -> None:
    check_run("qwen3_moe", "ep2, full", [ExpertLoad()])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe", "afmoe", "laguna", "minimax_m2", "kimi_linear"])
def test_every_place_of_the_bias_is_found(family: str) -> None:
    check_run(family, "ep2", [ExpertBias(RATE)])


def check_run(family: str, mesh: str, callbacks: list[pl.Callback]) -> None:
    """Compare weights, biases and loads on every rank with one process."""

    def run() -> tuple[Any, ...]:
        module = make_module(family)
        before = {name: bias.clone() for name, bias in get_biases(module.model).items()}
        recorder = fit(module, mesh, callbacks)
        biases, weights = (
            whole_of_stages(tensors, module.trainer)
            for tensors in (get_biases(module.model), dict(module.model.named_parameters()))
        )
        return before, biases, weights, recorder.rows

    with_bias = any(isinstance(callback, ExpertBias) for callback in callbacks)
    expected = train_alone(family, get_dp_size(mesh), RATE if with_bias else 0)
    for before, biases, weights, rows in run_ranks(run, MESHES[mesh][0]):
        if with_bias:
            assert all(not torch.equal(bias, before[name]) for name, bias in biases.items())
            torch.testing.assert_close(biases, expected.biases)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected.weights[name], atol=1e-5, rtol=1e-4, msg=name)
        if any(isinstance(callback, ExpertLoad) for callback in callbacks):
            for metrics, load in zip(rows.values(), expected.loads, strict=True):
                check_loads(metrics, load, mesh)


def check_loads(metrics: dict[str, float], load: Tensor, mesh: str) -> None:
    for layer, row in enumerate(load.tolist()):
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        assert metrics[f"experts/max_load_{layer}"] == pytest.approx(max(row) / mean)
        assert metrics[f"experts/variation_{layer}"] == pytest.approx(variance**0.5 / mean)
        assert metrics[f"experts/unused_{layer}"] == pytest.approx(row.count(0) / len(row))
    assert metrics["experts/max_load"] == pytest.approx((load.amax(1) / load.mean(1)).max().item())
    ranks, sizes, flags = MESHES[mesh]
    if "ep_size" in sizes:
        forwards = len(load) * ranks // sizes.get("pp_size", 1) * ACCUMULATE * flags.get("pp_microbatches", 1)
        assert metrics["experts/rows"] == pytest.approx(load.sum().item() / forwards)
        assert metrics["experts/max_rows"] >= metrics["experts/rows"]


@pytest.mark.guarantees("no-waiting")
def test_steps_that_do_not_log_neither_communicate_nor_wait() -> None:
    def run() -> list[tuple[int, int]]:
        found = []
        for callbacks in ([], [ExpertLoad()]):
            counts = CountsStep(1)
            fit(make_module("qwen3_moe"), "ep2", [*callbacks, counts], max_steps=2, log_every_n_steps=100)
            found.append((sum(counts.counter.collectives.values()), counts.counter.host_syncs))
        return found

    for without, with_load in run_ranks(run, 2):
        assert with_load == without


def test_a_progress_bar_shows_the_highest_load() -> None:
    load = ExpertLoad()
    load.latest = {"experts/max_load": 1.25}
    trainer = make_trainer("auto", callbacks=[load])
    assert _get_costs(trainer) == {"load": "1.2x"}


@pytest.mark.parametrize(
    ("callback", "family", "message"),
    [
        (ExpertLoad(), "llama", "CausalLM has no packed experts"),
        (ExpertBias(), "llama", "CausalLM has no packed experts"),
        (
            ExpertBias(),
            "qwen3_moe",
            "ExpertBias: the router of model.model.layers.* has no bias .*router_aux_loss",
        ),
    ],
)
def test_a_model_that_it_is_not_for_is_refused_before_the_first_step(callback: Any, family: str, message: str) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=message):
            fit(make_module(family), "dp2", callback)

    run_ranks(run, 2)


def test_a_rate_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ExpertBias\(rate=0\): use a positive rate, or remove the callback"):
        ExpertBias(0)


class Distillation(CausalLM):
    """A module with a frozen copy of the model, which gets the same tokens, and has other experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reference = make_model("deepseek_v3").requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.reference(input_ids=batch["input_ids"], use_cache=False)
        return super().training_step(batch, batch_idx)


def test_a_frozen_reference_is_neither_counted_nor_changed() -> None:
    def run() -> None:
        module = Distillation(config=make_family_config("deepseek_v3").to_dict())
        module.model = make_model("deepseek_v3").eval()  # the mode does not matter
        before = {name: bias.clone() for name, bias in get_biases(module).items()}
        fit(module, "dp2", ExpertBias(RATE), max_steps=1)
        for name, bias in whole(get_biases(module)).items():
            assert torch.equal(bias, before[name]) == name.startswith("reference"), name

    run_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_a_changed_bias_of_a_pretrained_model_is_saved(family: str, tmp_path: Path) -> None:
    """Also one that is a frozen parameter: a checkpoint leaves out what the pretrained files hold."""
    make_model(family).save_pretrained(tmp_path / "model")

    def run() -> None:
        saved: dict[str, Tensor] = {}
        for max_steps, path in ((1, None), (2, tmp_path / "run.ckpt")):
            module = CausalLM(pretrained=str(tmp_path / "model"))
            trainer = make_trainer(FSDP2Strategy(ep_size=2), callbacks=[ExpertBias(RATE)], max_steps=max_steps)
            loaded = Loaded()
            trainer.callbacks.append(loaded)
            trainer.fit(module, datamodule=RankBatches(make_token_batches(4)), ckpt_path=path)
            if path is not None:
                for name, bias in loaded.biases.items():
                    torch.testing.assert_close(bias, saved[name], rtol=0, atol=0)
            saved = whole(get_biases(module.model))
            trainer.save_checkpoint(tmp_path / "run.ckpt")

    run_ranks(run, 2)


class Loaded(pl.Callback):
    """Keeps the biases with which training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.biases = whole(get_biases(module.model))


def make_bfloat16(module: CausalLM) -> None:
    module.model = module.model.bfloat16()


def add_adapters(module: CausalLM) -> None:
    module.model = get_peft_model(module.model, LoraConfig(target_modules=["o_proj"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (make_bfloat16, "is torch.bfloat16, in which a change"),
        (add_adapters, "trains adapters; remove the callback"),
    ],
)
def test_a_change_that_would_be_lost_is_refused(change: Any, message: str) -> None:
    def run() -> None:
        module = make_module("deepseek_v3")
        change(module)
        with pytest.raises(ValueError, match=message):
            fit(module, "dp2", ExpertBias())

    run_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "fsdp2"])
def test_other_strategies_count_the_same(name: str) -> None:
    kind = STRATEGIES[name]
    expected = train_alone("deepseek_v3", 2, RATE)

    def run() -> None:
        module, recorder = make_module("deepseek_v3"), Recorder()
        trainer = kind.make_trainer(
            callbacks=[ExpertBias(RATE), ExpertLoad()],
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATE,
            log_every_n_steps=1,
            logger=recorder,
        )
        trainer.fit(module, datamodule=RankBatches(make_token_batches(STEPS * ACCUMULATE * 2)))
        torch.testing.assert_close(whole(get_biases(module.model)), expected.biases)
        for metrics, load in zip(recorder.rows.values(), expected.loads, strict=True):
            assert metrics["experts/max_load"] == pytest.approx((load.amax(1) / load.mean(1)).max().item())

    kind.run(run, 2)


@pytest.mark.slow
def test_compiled_layers_count_in_a_second_fit_too(compile_without_code: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MESHES, "ep2, compiled", (2, {"ep_size": 2}, {"enable_compile": True}))

    def run() -> None:
        module = make_module("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
        fit(module, "ep2, compiled", [], max_steps=1)
        recorder = fit(module, "ep2, compiled", ExpertLoad(), max_steps=1)
        assert all(metrics["experts/max_load"] >= 1 for metrics in recorder.rows.values())

    run_ranks(run, 2)

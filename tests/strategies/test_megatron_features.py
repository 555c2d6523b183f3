"""What users do beside plain training under tensor parallelism with Megatron-FSDP, compared with one process."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.cases import make_case
from helpers.lora import (
    FAMILIES,
    LORA,
    assert_equal_tensors,
    get_logits,
    make_plain,
    save_base,
)
from helpers.lora import make_module as make_adapted
from helpers.mesh_runs import (
    Case,
    MetricsLogger,
    RankBatches,
    check_parity,
    train_alone,
    train_on_mesh,
)
from helpers.models import GPT2, LLAMA, make_token_batches
from helpers.oracle import (
    EPSILON,
    LEARNING_RATE,
    Batch,
    assert_equal_gradients,
    assert_equal_runs,
    token_sum_loss,
    whole,
)
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.tensor_parallel import make_rough_model
from helpers.user_modules import WithModel, generate, make_trainer
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import (
    CausalLM,
    CheckpointConfig,
    FSDP2Strategy,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    MegatronFSDPStrategy,
    create_device_mesh,
    export_hf,
)
from lightning_fsdp2.callbacks import ExponentialMovingAverage, GradientNorm, NaNGuard
from lightning_fsdp2.modules.structure import find_parts
from lightning_fsdp2.parallel.tensor.plans import get_plan
from lightning_fsdp2.ranks.whole_tensors import gather

KIND = STRATEGIES["megatron_fsdp"]
SMALL = {**LLAMA, "num_hidden_layers": 2, "initializer_range": 0.2}
QWEN3 = {**SMALL, "model_type": "qwen3", "head_dim": 8}
PHI3 = {**SMALL, "model_type": "phi3", "pad_token_id": 0}
CONFIGS = {"llama": SMALL, "gpt2": {**GPT2, "initializer_range": 0.2}, "qwen3": QWEN3, "phi3": PHI3}
"""Rough weights, so that no gradient is too small to matter. GPT-2 packs along dim 1 of a weight, Phi-3 along dim 0."""

SP = {"sequence_parallel": True}

four_or_two = pytest.mark.parametrize(
    "ranks", [pytest.param(4, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.release)]
)
"""Tensor parallelism with two data parallel ranks, or alone."""


def make_strategy(flags: dict[str, Any] | None = None, **options: Any) -> MegatronFSDPStrategy:
    return MegatronFSDPStrategy(tp_size=2, config=MegatronFSDPConfig(**(flags or {})), **options)


def adamw(parameters: Any, fused: bool | None = True) -> torch.optim.Optimizer:
    """Return a fused optimizer, for whose few operations torch finds placements in half of the time."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=LEARNING_RATE, eps=EPSILON, fused=fused)


class User(WithModel):
    """Has a Hugging Face model with rough weights."""

    make_optimizer = staticmethod(adamw)

    def __init__(self, config: dict[str, Any] = SMALL) -> None:
        super().__init__(partial(make_rough_model, config))
        self.model = self.make_model()

    def loss(self, batch: Batch) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step


class NotFused(User):
    """A module with torch's default optimizer."""

    make_optimizer = staticmethod(partial(adamw, fused=None))


def make_batches(count: int) -> list[Batch]:
    return make_token_batches(count, ragged=False)


def train_one(module: Any, batches: list[Batch], window: int, clip: Callable[[Any], Any] = lambda _: None) -> Any:
    """The oracle: each step takes the next ``window`` batches. Returns the module."""
    optimizer = module.configure_optimizers()
    for start in range(0, len(batches), window):
        optimizer.zero_grad()
        (sum(module.loss(batch) for batch in batches[start : start + window]) / window).backward()
        clip(module.parameters())
        optimizer.step()
    return module


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    actual = whole(dict(module.named_parameters()))
    assert_equal_tensors(actual, {name: p.detach() for name, p in expected.named_parameters()}, atol=5e-5)


def fit(module: Any, batches: list[Batch], strategy: Any, **options: Any) -> pl.Trainer:
    steps = len(batches) // (dist.get_world_size() // 2)
    ckpt_path, loaders = options.pop("ckpt_path", None), options.pop("val_dataloaders", None)
    trainer = make_trainer(strategy, **{"max_steps": steps, **options})
    trainer.fit(module, RankBatches(batches), ckpt_path=ckpt_path) if loaders is None else trainer.fit(
        module, deal(batches), loaders
    )
    return trainer


def deal(batches: list[Batch]) -> DataLoader[Batch]:
    return DataLoader(batches[dist.get_rank() // 2 :: dist.get_world_size() // 2], batch_size=None)


# ---------------------------------------------------------------------- weights in and out


class KeepsFirstWeights(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.weights = whole(dict(module.model.named_parameters()))


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(pytest.param(family, 4, marks=pytest.mark.slow) for family in ("gpt2", "qwen3", "phi3")),
        *(pytest.param(*cell, marks=pytest.mark.release) for cell in (("llama", 4), ("gpt2", 2))),
    ],
)
def test_pretrained_weights_come_in_and_trained_ones_go_out(family: str, ranks: int, tmp_path: Path) -> None:
    model = make_rough_model(CONFIGS[family])
    model.save_pretrained(tmp_path / "base")

    def run() -> dict[str, Tensor]:
        for way in ("shards", "whole"):
            first, module = KeepsFirstWeights(), CausalLM(pretrained=str(tmp_path / "base"))
            strategy = make_strategy({"init_fsdp_with_meta_device": way == "shards", **SP})
            trainer = fit(module, make_batches(ranks // 2), strategy, callbacks=[first])
            torch.testing.assert_close(first.weights, dict(model.named_parameters()), rtol=0, atol=0)
            trainer.save_checkpoint(tmp_path / f"{way}.ckpt")
            export_hf(module, tmp_path / f"{way}-live")
        trained = whole(dict(module.model.named_parameters()))
        assert not any(torch.equal(trained[name], weight) for name, weight in first.weights.items())
        return trained

    trained = KIND.run(run, ranks)[0]
    for way in ("shards", "whole"):
        path = tmp_path / way
        run_ranks(lambda path=path: export_hf(path.with_suffix(".ckpt"), f"{path}-saved"), 1, group=False)
        for name in ("live", "saved"):
            exported = AutoModelForCausalLM.from_pretrained(f"{path}-{name}")
            torch.testing.assert_close(dict(exported.named_parameters()), trained, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The checkpoint holds the random states")
@pytest.mark.parametrize(
    ("there", "make_module"),
    [
        ("megatron", User),
        *(pytest.param(there, NotFused, marks=pytest.mark.slow) for there in ("megatron", "fsdp2")),
    ],
)
def test_fsdp2_goes_on_from_its_checkpoint_and_the_other_way_round(
    there: str, make_module: type[User], tmp_path: Path
) -> None:
    batches = make_batches(1) * 2

    def run() -> None:
        strategies = [make_strategy(), FSDP2Strategy()] if there == "megatron" else [FSDP2Strategy(), make_strategy()]
        first, second = strategies
        loader = DataLoader(batches, batch_size=None)
        trainer = make_trainer(first, max_steps=1)
        trainer.fit(make_module(), loader)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        module = make_module()
        make_trainer(second, max_steps=2).fit(module, loader, ckpt_path=tmp_path / "half.ckpt")
        assert_same(module, train_one(make_module(), batches, 1))

    KIND.run(run, 2)


@four_or_two
def test_moving_averages_are_those_of_one_process_and_are_resumed(ranks: int, tmp_path: Path) -> None:
    window = ranks // 2
    batches = 2 * make_batches(window)

    def average_alone() -> tuple[nn.Module, dict[str, Tensor]]:
        module = User()
        averages = {name: p.detach().clone() for name, p in module.named_parameters()}
        optimizer = module.configure_optimizers()
        for step in range(2):
            optimizer.zero_grad()
            (sum(module.loss(batch) for batch in batches[step * window :][:window]) / window).backward()
            optimizer.step()
            decay = (2 + step) / (11 + step)
            for name, p in module.named_parameters():
                averages[name] = decay * averages[name] + (1 - decay) * p.detach()
        return module, averages

    def run() -> None:
        for steps, path in ((1, None), (2, tmp_path / "half.ckpt")):
            average, module = ExponentialMovingAverage(0.9), User()
            trainer = fit(module, batches, make_strategy(SP), callbacks=[average], max_steps=steps, ckpt_path=path)
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        expected, averages = average_alone()
        assert_same(module, expected)
        assert_equal_tensors(whole(average.averages), averages, atol=5e-5)
        averaged = copy.deepcopy(expected)
        averaged.load_state_dict(averages)
        (measured,) = trainer.validate(module, DataLoader(batches[:1], batch_size=None), verbose=False)
        assert measured["loss"] == pytest.approx(averaged.loss(batches[0]).item(), rel=1e-5)
        assert_same(module, expected)

    KIND.run(run, ranks)


@pytest.mark.parametrize(
    ("family", "by_shards", "ranks"),
    [
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (("gpt2", False, 2), ("llama", False, 4), ("qwen3", True, 4))
        ),
        *(
            pytest.param(*cell, marks=pytest.mark.release)
            for cell in (("llama", True, 4), ("qwen3", False, 4), ("gpt2", False, 4), ("gpt2", True, 4))
        ),
    ],
)
def test_adapters_are_those_of_one_process_and_are_exported(
    family: str, by_shards: bool, ranks: int, tmp_path: Path
) -> None:
    check_adapters(family, FAMILIES[family], by_shards, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_adapters_whose_rank_the_data_parallel_ranks_do_not_divide(family: str, tmp_path: Path) -> None:
    """Adapters of packed projections are packed too, and their parts are sharded over columns."""
    fields = {"target_modules": "all-linear", "fan_in_fan_out": family == "gpt2", "r": 3}
    check_adapters(family, fields, True, 4, tmp_path)


def check_adapters(family: str, fields: dict[str, Any], by_shards: bool, ranks: int, tmp_path: Path) -> None:
    """Compare adapters with those of one process, and with those that are exported."""
    lora, base = {**LORA, **fields}, save_base(tmp_path / "base", family)

    def run() -> None:
        modules: list[CausalLM] = []

        def make() -> CausalLM:
            modules.append(make_adapted(base, family, lora=lora))
            return modules[0]

        flags = {"config": MegatronFSDPConfig(init_fsdp_with_meta_device=by_shards, **SP)}
        case = Case(
            make_module=make,
            make_model=lambda: make_plain(base, family, lora=lora),
            loss=token_sum_loss,
            batches=make_token_batches(12),
            strategy={"tp_size": 2, **flags},
            strategy_class=MegatronFSDPStrategy,
            accumulate=2,
            clip=0.5,
        )
        actual = train_on_mesh(case)
        export_hf(modules[0], tmp_path / "merged", merge=True)
        export_hf(modules[0], tmp_path / "adapter")
        if dist.get_rank() > 0:
            return
        plain = make_plain(base, family, lora=lora).state_dict()
        actual_base = {name: weight for name, weight in actual.initial.items() if "lora_" not in name}
        assert_equal_tensors(actual_base, {name: plain[name] for name in actual_base})
        expected = train_alone(case, actual.initial, ranks // 2)
        assert_equal_runs(actual, expected)
        model: Any = make_plain(base, family, lora=lora)
        model.load_state_dict(actual.weights, strict=False)
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
        torch.testing.assert_close(get_logits(loaded), get_logits(model), rtol=0, atol=0)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert_equal_tensors(merged.state_dict(), model.merge_and_unload().state_dict(), atol=1e-6)

    KIND.run(run, ranks)


@pytest.mark.parametrize(
    ("zero_dp_strategy", "ranks"),
    [
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((3, 2), (1, 4))),
        *(pytest.param(number, 4, marks=pytest.mark.release) for number in (0, 2)),
    ],
)
def test_a_checkpoint_that_is_written_in_the_background_goes_on(
    zero_dp_strategy: int, ranks: int, tmp_path: Path
) -> None:
    batches = 2 * make_batches(ranks // 2)

    def run() -> None:
        flags = {"zero_dp_strategy": zero_dp_strategy, **SP}
        strategy = make_strategy(flags, checkpoint=CheckpointConfig(async_save=True))
        trainer = fit(User(), batches, strategy, max_steps=1)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        trainer.strategy.checkpoints.end_stage(trainer)
        module = User()
        fit(module, batches, make_strategy(flags), ckpt_path=tmp_path / "half.ckpt")
        assert_same(module, train_one(User(), batches, ranks // 2))

    KIND.run(run, ranks)


# ---------------------------------------------------------------------- steps


class ByHand(User):
    """Steps by hand every second batch."""

    def __init__(self, synchronises_each: bool = True) -> None:
        super().__init__(QWEN3)
        self.automatic_optimization = False
        self.synchronises_each = synchronises_each

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        steps = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps or self.synchronises_each):
            self.manual_backward(self.loss(batch) / 2)
        if steps:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()


def clip_by_hand(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_dp_strategy", "synchronises_each", "ranks"),
    [
        (3, True, 2),
        *((*cell, 4) for cell in ((0, True), (1, True), (2, True), (1, False))),
        *(
            pytest.param(*cell, marks=pytest.mark.release)
            for cell in ((3, False, 2), (0, False, 4), (2, False, 4), (1, False, 2))
        ),
    ],
)
def test_steps_by_hand_over_two_backwards(zero_dp_strategy: int, synchronises_each: bool, ranks: int) -> None:
    batches = make_batches(4 * ranks // 2)

    def run() -> None:
        module = ByHand(synchronises_each)
        strategy = make_strategy({"zero_dp_strategy": zero_dp_strategy, **SP})
        if zero_dp_strategy == 1 and synchronises_each:
            with pytest.raises(ValueError, match=r"second backward with .*toggle_model\(sync_grad=False\)"):
                fit(module, batches, strategy)
            return
        fit(module, batches, strategy, max_steps=2)
        assert_same(module, train_one(ByHand(), batches, ranks, clip_by_hand))

    KIND.run(run, ranks)


CHUNKED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2, tied": (2, SP, {"tied": True}),
    "tp2, loss parallel": (2, {"loss_parallel": True}, {"model": "gpt2", "tied": True}),
    "tp2, bf16": (2, {}, {"precision": "bf16-true"}),
    "dp2 x tp2, bf16 mixed, tied": (4, SP, {"precision": "bf16-mixed", "tied": True}),
    "dp2, tied": (2, {}, {"tied": True}),
    "dp2, zero 1": (2, {"zero_dp_strategy": 1}, {}),
    "dp2, meta, tied": (2, {"init_fsdp_with_meta_device": True}, {"meta": True, "tied": True}),
    "dp2, zero 2, bf16": (2, {"zero_dp_strategy": 2}, {"precision": "bf16-true"}),
}
"""Ranks, flags and options. :mod:`test_megatron_tensor_parallel` has more with tensor parallelism."""

MORE_CHUNKED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2 x tp2, bf16": (4, SP, {"precision": "bf16-true"}),
    "dp2 x tp2, zero 0": (4, {"zero_dp_strategy": 0}, {}),
    "dp2 x tp2, meta, tied": (4, {"init_fsdp_with_meta_device": True}, {"meta": True, "tied": True}),
    "dp2, zero 0": (2, {"zero_dp_strategy": 0}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHUNKED, *(pytest.param(name, marks=pytest.mark.release) for name in MORE_CHUNKED)])
def test_a_chunked_loss_has_the_numbers_of_one_process(name: str) -> None:
    ranks, flags, options = (CHUNKED | MORE_CHUNKED)[name]

    def run() -> None:
        torch.manual_seed(0)
        fields = {"model": "llama", "tied": False, "meta": False, "accumulate": 2, "clip": 0.1, **options}
        strategy = {"tp_size": 2 if "tp2" in name else 1, "config": MegatronFSDPConfig(**flags)}
        check_parity(make_case(loss="chunked", strategy=strategy, strategy_class=MegatronFSDPStrategy, **fields))

    KIND.run(run, ranks)


class PartlyFrozen(User):
    """Its embedding, a whole layer, and parts of another are frozen."""

    def __init__(self) -> None:
        super().__init__(QWEN3)
        model = self.model.model
        for part in (
            model.embed_tokens,
            model.layers[0],
            model.layers[1].self_attn.q_norm,
            model.layers[1].mlp.up_proj,
        ):
            part.requires_grad_(False)


@pytest.mark.parametrize(
    ("zero_dp_strategy", "ranks"),
    [
        (3, 2),
        pytest.param(1, 4, marks=pytest.mark.slow),
        *(pytest.param(*cell, marks=pytest.mark.release) for cell in ((3, 4), (1, 2))),
    ],
)
def test_frozen_weights_stay_and_the_others_train(zero_dp_strategy: int, ranks: int) -> None:
    batches = make_batches(2 * ranks // 2)

    def run() -> None:
        module, expected = PartlyFrozen(), train_one(PartlyFrozen(), batches, ranks // 2)
        fit(module, batches, make_strategy({"zero_dp_strategy": zero_dp_strategy, **SP}))
        assert_same(module, expected)

    KIND.run(run, ranks)


class WithHead(User):
    """A classifier of its own on the model's hidden states, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 5))
        self.scale = nn.Parameter(torch.rand(5))

    def loss(self, batch: Batch) -> Tensor:
        output = self.model(batch["input_ids"], use_cache=False, output_hidden_states=True)
        scores = self.head(output.hidden_states[-1].mean(1)) * self.scale
        return F.cross_entropy(scores, batch["input_ids"][:, 0] % 5) + output.logits.square().mean() / 10


@pytest.mark.parametrize(
    ("algorithm", "value", "ranks"),
    [
        ("norm", 0.1, 2),
        pytest.param("value", 1e-3, 4, marks=pytest.mark.slow),
        *(pytest.param(*cell, marks=pytest.mark.release) for cell in (("norm", 0.1, 4), ("value", 1e-3, 2))),
    ],
)
def test_a_head_of_one_s_own_trains_and_gradients_are_clipped(algorithm: str, value: float, ranks: int) -> None:
    batches = make_batches(2 * ranks // 2)
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_

    def run() -> None:
        torch.manual_seed(3)
        module = WithHead()
        expected = copy.deepcopy(module)
        options = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        fit(module, batches, make_strategy(SP), **options)
        assert_same(module, train_one(expected, batches, ranks // 2, lambda parameters: clip(parameters, value)))

    KIND.run(run, ranks)


class Observes(pl.Callback):
    """Generates after each batch, reads every gradient before each step, and validates in between."""

    def __init__(self) -> None:
        self.generated: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.gradients.append({name: gather(p.grad).clone() for name, p in module.named_parameters()})

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        with torch.no_grad():
            self.generated.append(generate(module.model))

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero_dp_strategy", "ranks"),
    [(3, 2), (0, 4), *(pytest.param(*cell, marks=pytest.mark.release) for cell in ((3, 4), (0, 2)))],
)
def test_callbacks_generate_validate_and_read_gradients_between_steps(zero_dp_strategy: int, ranks: int) -> None:
    window = ranks // 2
    batches = make_batches(2 * window)

    def run() -> None:
        observes, logger, module, expected = Observes(), MetricsLogger(), User(QWEN3), User(QWEN3)
        optimizer, norms = expected.configure_optimizers(), []
        options = {"val_check_interval": 1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 1}
        strategy = make_strategy({"zero_dp_strategy": zero_dp_strategy, **SP})
        validated = DataLoader(batches[:1], batch_size=None)
        callbacks = [observes, Norms(norms), NaNGuard()]
        fit(
            module,
            batches,
            strategy,
            callbacks=callbacks,
            val_dataloaders=validated,
            log_every_n_steps=1,
            logger=logger,
            **options,
        )
        for step in range(2):
            optimizer.zero_grad()
            (sum(expected.loss(batch) for batch in batches[step * window :][:window]) / window).backward()
            gradients = {name: p.grad for name, p in expected.named_parameters()}
            assert_equal_gradients(observes.gradients[step], gradients, step)
            assert norms[step] == pytest.approx(nn.utils.get_total_norm(gradients.values()).item(), rel=1e-4)
            optimizer.step()
            assert torch.equal(observes.generated[step], generate(expected.model.eval()))
            assert observes.losses[step + 1] == pytest.approx(expected.loss(batches[0]).item(), rel=1e-4)
            expected.train()
        assert_same(module, expected)

    KIND.run(run, ranks)


class Norms(GradientNorm):
    """Keeps what it measures."""

    def __init__(self, norms: list[float]) -> None:
        super().__init__()
        self.norms = norms

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.norms.append(float(self._norm))
        super().on_train_batch_end(*args, **kwargs)


@four_or_two
def test_a_trained_module_is_tested_and_trained_again_by_another_trainer(ranks: int) -> None:
    window = ranks // 2
    batches = make_batches(4 * window)

    def run() -> None:
        module, expected = User(), User()
        # the first step of AdamW is about as large for a gradient that is only rounding
        module.make_optimizer = expected.make_optimizer = partial(torch.optim.SGD, lr=0.1)
        trainer = fit(module, batches[: 2 * window], make_strategy(SP))
        train_one(expected, batches[: 2 * window], window)
        (measured,) = trainer.test(module, DataLoader(batches[:1], batch_size=None), verbose=False)
        assert measured["loss"] == pytest.approx(expected.loss(batches[0]).item(), rel=1e-5)
        trainer.fit_loop.epoch_loop.max_steps = 3
        trainer.fit(module, deal(batches[2 * window : 3 * window]))
        fit(module, batches[3 * window :], make_strategy(SP))
        train_one(expected, batches[2 * window :], window)
        assert_same(module, expected)

    KIND.run(run, ranks)


# ---------------------------------------------------------------------- what is kept, and what is refused


@pytest.mark.slow
def test_attributes_of_parameters_outlive_wrapping() -> None:
    def run() -> None:
        for by_shards in (False, True):
            for tp_size in (1, 2):
                with torch.device("meta" if by_shards else "cpu"):
                    module: Any = make_rough_model(SMALL)
                model = module.model
                model.norm.weight._no_weight_decay = True
                model.layers[1].mlp.up_proj.weight._group = "late"
                config = MegatronFSDPConfig(init_fsdp_with_meta_device=by_shards)
                MegatronFSDPManager(config, create_device_mesh(config, tp_size=tp_size)).parallelize(module)
                assert model.norm.weight._no_weight_decay
                assert model.layers[1].mlp.up_proj.weight._group == "late"
                assert not hasattr(model.layers[0].mlp.up_proj.weight, "_group")

    KIND.run(run, 2)


def test_a_wrapped_model_is_not_copied() -> None:
    def run() -> None:
        module = User()
        fit(module, make_batches(1), make_strategy())
        with pytest.raises(TypeError, match=r"cannot be copied, because its parameters are in buffers.* Make a new"):
            copy.deepcopy(module)
        with pytest.raises(TypeError, match=r"cannot be pickled, .*Save a checkpoint"):
            pickle.dumps(module)

    KIND.run(run, 2)


@pytest.mark.guarantees("megatron-tensor-parallel")
def test_a_plan_with_wrong_gradients_is_refused() -> None:
    plan = get_plan(find_parts(make_rough_model(QWEN3)))
    plan = {name: style for name, style in plan.items() if "q_norm" not in name and "k_norm" not in name}

    def run() -> None:
        with pytest.raises(ValueError, match=r"tp_plan: .*self_attn\.[qk]_norm\.weight.* Add an entry for"):
            fit(User(QWEN3), make_batches(1), make_strategy({"tp_plan": plan}))

    KIND.run(run, 2)


def test_sizes_that_the_model_cannot_have_are_refused_on_every_rank_before_the_first_step() -> None:
    class NeverSteps(User):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            raise AssertionError("a step was taken")

    def run() -> str:
        config = {**SMALL, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
        with pytest.raises(ValueError, match=r"heads") as error:
            fit(NeverSteps(config), make_batches(1), make_strategy())
        return str(error.value)

    assert len(set(KIND.run(run, 2))) == 1

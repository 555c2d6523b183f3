"""MegatronFSDPStrategy: what it has beside the behaviour of all strategies, on CPU ranks."""

import copy
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from helpers.cases import make_case
from helpers.mesh_runs import check_parity
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import (
    WIDTH,
    WORLD,
    Batch,
    ByHand,
    Regressor,
    Scheduled,
    assert_same_weights,
    make_batches,
    make_language_model,
    make_loader,
    make_optimizer,
    make_trainer,
    train_alone,
    train_scheduled_alone,
)
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, CheckpointConfig, MegatronFSDPConfig, MegatronFSDPStrategy, export_hf
from lightning_fsdp2.parallel.megatron import wrap as megatron_fsdp

KIND = STRATEGIES["megatron_fsdp"]
ALL_STRATEGIES = (0, 1, 2, 3)
EACH = [pytest.param(number, marks=() if number == 3 else pytest.mark.slow) for number in ALL_STRATEGIES]

# ---------------------------------------------------------------------- numbers

META = {"meta": True, "accumulate": 1}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "cp2": (2, {"cp_size": 2}, {}, {}),
    "recomputed": (2, {}, {"activation_checkpointing": True}, {}),
    "selective": (2, {}, {"activation_checkpointing": "selective", "zero_dp_strategy": 1}, {}),
    "meta by shards": (2, {}, {"init_fsdp_with_meta_device": True}, {**META, "tied": True}),
    "meta by shards, 1": (2, {}, {"init_fsdp_with_meta_device": True, "zero_dp_strategy": 1}, META),
    "sums": (2, {}, {"calculate_per_token_loss": True}, {}),
    "no overlap": (2, {}, {"overlap_grad_reduce": False, "overlap_param_gather": False}, {}),
    "no buckets": (2, {}, {"disable_bucketing": True, "report_nan_in_param_grad": True}, {}),
    "bf16": (2, {}, {}, {"precision": "bf16-true"}),
    "bf16 weights": (2, {}, {"preserve_fp32_weights": False}, {"precision": "bf16-true"}),
    "bf16 gradients": (2, {}, {"grad_reduce_in_fp32": False}, {"precision": "bf16-true"}),
    "hsdp2x2": (4, {"dp_replicate_size": 2}, {}, {}),
    "hsdp2x2, 1": (4, {"dp_replicate_size": 2}, {"zero_dp_strategy": 1}, {}),
    "hsdp2x2, 2": (4, {"dp_replicate_size": 2}, {"zero_dp_strategy": 2}, {}),
    "hsdp2x2 meta": (4, {"dp_replicate_size": 2}, {"init_fsdp_with_meta_device": True}, META),
    "dp2xcp2": (4, {"cp_size": 2}, {}, {}),
}


FAST = ("meta by shards",)


@pytest.mark.guarantees("float32-losses", "float32-gradients", "megatron-clipping", "double-buffer")
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        *(pytest.param(2, [name], id=name) for name in FAST),
        # one after the other on the same ranks, which saves half of the time
        *(
            pytest.param(
                size,
                [n for n in LAYOUTS if LAYOUTS[n][0] == size and n not in FAST],
                id=f"others on {size}",
                marks=pytest.mark.slow,
            )
            for size in (2, 4)
        ),
    ],
)
def test_every_flag_and_size_has_the_numbers_of_one_process(world_size: int, names: list[str]) -> None:
    def run() -> None:
        for name in names:
            _, sizes, flags, options = LAYOUTS[name]
            torch.manual_seed(0)
            strategy = {**sizes, "config": MegatronFSDPConfig(**flags)}
            options = {"accumulate": 2, "clip": 0.1, "tied": False, "meta": False, **options}
            case = make_case("llama", strategy=strategy, strategy_class=MegatronFSDPStrategy, **options)
            try:
                check_parity(case)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    KIND.run(run, world_size)


@pytest.mark.guarantees("zero-dp-strategy")
@pytest.mark.parametrize(
    ("zero_dp_strategy", "world_size", "combinations"),
    [
        (1, 2, [(3, 0.5)]),
        *(pytest.param(zero, 2, [(1, 0.5), (3, None)], marks=pytest.mark.slow) for zero in (0, 1, 2)),
        *(pytest.param(zero, 4, [(1, None), (3, 0.5)], marks=pytest.mark.slow) for zero in (0, 1, 2)),
        *(pytest.param(zero, 2, [(1, None), (3, 0.5)], marks=pytest.mark.release) for zero in (0, 1, 2)),
        *(pytest.param(zero, 4, [(1, 0.5), (3, None)], marks=pytest.mark.release) for zero in (0, 1, 2)),
        *(pytest.param(zero, 1, list(product((1, 3), (None, 0.5))), marks=pytest.mark.release) for zero in (0, 1, 2)),
        *(pytest.param(3, size, [(1, None)], marks=pytest.mark.release) for size in (1, 2, 4)),
    ],
)
def test_twenty_steps_with_groups_and_a_schedule(
    zero_dp_strategy: int, world_size: int, combinations: list[tuple[int, float | None]]
) -> None:
    """``combinations`` are of accumulation and clipping; :mod:`test_conformance` has more with 3."""

    def run() -> None:
        for accumulate, clip in combinations:
            batches = make_batches(20 * accumulate * world_size)
            module, expected = Scheduled(), Scheduled()
            options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "max_steps": 20}
            KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy}, **options).fit(module, make_loader(batches))
            train_scheduled_alone(expected, batches, accumulate * world_size, clip)
            actual = whole(dict(module.named_parameters()))
            torch.testing.assert_close(
                actual, dict(expected.named_parameters()), atol=3e-4, rtol=0, msg=f"{accumulate}, {clip}"
            )

    KIND.run(run, world_size)


class PartlyFrozen(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


def test_frozen_weights_stay_and_the_others_train() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        for zero_dp_strategy in ALL_STRATEGIES:
            module, expected = PartlyFrozen(), PartlyFrozen()
            KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy}).fit(module, make_loader(batches))
            train_alone(expected, batches)
            assert_same_weights(module, expected)

    KIND.run(run, WORLD)


@pytest.mark.guarantees("float32-updates")
def test_updates_too_small_for_bfloat16_are_kept() -> None:
    """By the weights that the optimizer steps; without them they are lost."""

    class Steady(Regressor):
        def loss(self, batch: Batch) -> Tensor:
            return self(batch["inputs"]).sum() * 0 + self.scale.sum()  # a gradient of 1 in each step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=2**-12)

    def run() -> None:
        for preserve_fp32_weights, moved in ((True, 8 * 2**-12), (False, 0.0)):
            module = Steady()
            module.scale.data.fill_(1.0)
            flags = {"preserve_fp32_weights": preserve_fp32_weights, "grad_reduce_in_fp32": False}
            trainer = KIND.make_trainer(flags, precision="bf16-true", max_steps=8)
            trainer.fit(module, make_loader(make_batches(8 * WORLD)))
            scale = whole({"scale": module.scale})["scale"]
            torch.testing.assert_close(scale, torch.full((WIDTH,), 1.0 - moved), rtol=0, atol=0)

    KIND.run(run, WORLD)


# ---------------------------------------------------------------------- what ranks hold and do


class CountsForwards(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, module: CausalLM) -> None:
        self.forwards = 0
        for layer in module.model.model.layers:
            layer.mlp.act_fn.register_forward_hook(self.count)

    def count(self, *args: Any) -> None:
        self.forwards += 1


@pytest.mark.parametrize("zero_dp_strategy", EACH)
def test_layers_are_computed_again_in_backward(zero_dp_strategy: int) -> None:
    def run() -> None:
        counts = []
        for activation_checkpointing in (False, True):
            callback = CountsForwards()
            flags = {"activation_checkpointing": activation_checkpointing, "zero_dp_strategy": zero_dp_strategy}
            trainer = KIND.make_trainer(flags, max_steps=1, callbacks=[callback])
            trainer.fit(make_language_model(), make_loader(make_token_batches(WORLD)))
            counts.append(callback.forwards)
        assert counts[0] > 0
        assert counts[1] == 2 * counts[0]

    KIND.run(run, WORLD)


class MeasuresStates(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        moments = [state["momentum_buffer"] for state in optimizer.state.values()]
        self.elements = sum(moment.to_local().numel() for moment in moments)


@pytest.mark.guarantees("zero-dp-strategy")
def test_optimizer_states_are_shared_between_the_ranks() -> None:
    def run() -> list[int]:
        measured = []
        for zero_dp_strategy in ALL_STRATEGIES:
            callback = MeasuresStates()
            trainer = KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy}, max_steps=1, callbacks=[callback])
            trainer.fit(Regressor(), make_loader(make_batches(WORLD)))
            measured.append(callback.elements)
        return measured

    elements = sum(parameter.numel() for parameter in Regressor().parameters())
    whole_states, *shares = zip(*KIND.run(run, WORLD), strict=True)
    assert whole_states == (elements,) * WORLD
    assert [sum(share) for share in shares] == [elements] * 3


# ---------------------------------------------------------------------- weights


class KeepsFirstWeights(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, module: CausalLM) -> None:
        self.weights = whole(dict(module.model.named_parameters()))


def get_first_weights(kind: str, flags: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    callback = KeepsFirstWeights()
    torch.manual_seed(5)
    trainer = STRATEGIES[kind].make_trainer(flags, max_steps=0, callbacks=[callback])
    trainer.fit(CausalLM(**options), make_loader(make_token_batches(WORLD)))
    return callback.weights


@pytest.mark.slow
def test_a_seed_means_the_same_weights_as_under_fsdp2() -> None:
    def run() -> None:
        expected = get_first_weights("fsdp2", {}, config=LLAMA)
        for init_fsdp_with_meta_device in (False, True):
            flags = {"init_fsdp_with_meta_device": init_fsdp_with_meta_device}
            actual = get_first_weights("megatron_fsdp", flags, config=LLAMA)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    KIND.run(run, WORLD)


def test_pretrained_weights_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_causal_lm(LLAMA)
    model.save_pretrained(tmp_path)

    def run() -> None:
        for init_fsdp_with_meta_device in (False, True):
            flags = {"init_fsdp_with_meta_device": init_fsdp_with_meta_device}
            actual = get_first_weights("megatron_fsdp", flags, pretrained=str(tmp_path))
            torch.testing.assert_close(actual, dict(model.named_parameters()), rtol=0, atol=0)

    KIND.run(run, WORLD)


def test_a_trained_model_is_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def run() -> dict[str, Tensor]:
        module = make_language_model()
        trainer = KIND.make_trainer()
        trainer.fit(module, make_loader(make_token_batches(2 * WORLD)))
        trainer.save_checkpoint(tmp_path / "trained.ckpt")
        return whole(dict(module.model.named_parameters()))

    expected, _ = KIND.run(run, WORLD)
    run_ranks(lambda: export_hf(tmp_path / "trained.ckpt", tmp_path / "hf"), 1, group=False)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(dict(exported.named_parameters()), expected, rtol=0, atol=0)


# ---------------------------------------------------------------------- refusals


REFUSED_FLAGS = [
    ({"overlap_grad_reduce": False, "zero_dp_strategy": 1}, r"overlap_grad_reduce=False: .*pull/6357.*0 or 3"),
    ({"overlap_param_gather": False, "zero_dp_strategy": 2}, r"overlap_param_gather=False: .*zero_dp_strategy=2"),
    (
        {"nccl_ub": True},
        r"nccl_ub=True needs megatron.core.nccl_allocator or .*neither is installed; use nccl_ub=False",
    ),
    (
        {"init_fsdp_with_meta_device": True},
        r"True, but Regressor has no parameter on the meta device.*leave out the flag",
    ),
    (
        {"init_fsdp_with_meta_device": True, "zero_dp_strategy": 0},
        "init_fsdp_with_meta_device=True .*zero_dp_strategy=0 shards nothing; leave out one",
    ),
    ({"megatron_fsdp_unit_modules": ["torch.nn.GRU"]}, r"Regressor contains no torch.nn.modules.rnn.GRU; list classes"),
    ({"megatron_fsdp_unit_modules": ["torch.nn.Nothing"]}, "'torch.nn.Nothing' cannot be imported .*give import paths"),
]


@pytest.mark.guarantees("megatron-refusals")
def test_flags_that_cannot_work_are_refused_before_the_first_step() -> None:
    def run() -> None:
        for flags, message in REFUSED_FLAGS:
            with pytest.raises(ValueError, match=message):
                KIND.make_trainer(flags).fit(Regressor(), make_loader(make_batches(4)))
        with (
            patch.object(megatron_fsdp, "keeps_buffers", lambda: False),
            pytest.raises(ValueError, match=r"fsdp_double_buffer=True: megatron-fsdp .* wrong gradients.*0\.6\.0 or"),
        ):
            KIND.make_trainer({"fsdp_double_buffer": True}).fit(Regressor(), make_loader(make_batches(4)))
        trainer = KIND.make_trainer({"megatron_fsdp_unit_modules": ["torch.nn.functional.relu"]})
        with pytest.raises(TypeError, match=r"'torch.nn.functional.relu' is .*; give the path of a subclass"):
            trainer.fit(Regressor(), make_loader(make_batches(4)))

    KIND.run(run, WORLD)


def test_sizes_that_cannot_work_are_refused() -> None:
    def run() -> None:
        replicas = MegatronFSDPStrategy(dp_replicate_size=2)
        with pytest.raises(ValueError, match=r"dp_replicate_size=2 .* and 1 rank\(s\) to shard.*zero_dp_strategy=0"):
            make_trainer(replicas).fit(Regressor(), make_loader(make_batches(4)))

    KIND.run(run, WORLD)


def test_a_model_without_layers_is_refused_where_parameters_are_gathered_by_units() -> None:
    class WithoutLayers(Regressor):
        def build(self) -> None:
            self.head = nn.Linear(WIDTH, 1)
            self.blocks = []

    def run() -> None:
        batches = make_batches(2 * WORLD)
        with pytest.raises(ValueError, match=r"zero_dp_strategy=3 gathers .*WithoutLayers has no list of layers"):
            KIND.make_trainer().fit(WithoutLayers(), make_loader(batches))
        for flags in ({"zero_dp_strategy": 2}, {"megatron_fsdp_unit_modules": ["torch.nn.Linear"]}):
            module, expected = WithoutLayers(), WithoutLayers()
            KIND.make_trainer(flags).fit(module, make_loader(batches))
            train_alone(expected, batches)
            assert_same_weights(module, expected)

    KIND.run(run, WORLD)


class Attends(Regressor):
    """Attention beside the layers: torch's reads the weights of its projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.attention(inputs, inputs, inputs, need_weights=False)[0])


def test_attention_beside_the_layers_is_a_unit() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = Attends(), Attends()
        KIND.make_trainer().fit(module, make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    KIND.run(run, WORLD)


@pytest.mark.guarantees("megatron-limits")
def test_a_cpu_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"Megatron-FSDP runs on cuda devices, not on 'cpu'; use FSDP2Strategy or"):
            make_trainer(MegatronFSDPStrategy()).fit(Regressor(), make_loader(make_batches(4)))

    run_ranks(run, 1)


def test_a_missing_or_old_package_is_one_clear_error() -> None:
    with (
        patch.object(megatron_fsdp, "HAVE_MEGATRON_FSDP", False),
        pytest.raises(ImportError, match=r'not installed: pip install "lightning-fsdp2\[megatron\]"'),
    ):
        MegatronFSDPStrategy()
    package = megatron_fsdp.import_megatron_fsdp()
    with patch.object(package, "MixedPrecisionPolicy"):
        del package.MixedPrecisionPolicy
        with pytest.raises(ImportError, match=r"megatron-fsdp .* is too old: pip install"):
            MegatronFSDPStrategy()


@pytest.mark.slow
def test_a_second_synchronised_backward_is_exact_or_refused() -> None:
    """Where gradients add up over backwards that are all synchronised, as under manual optimisation."""
    batches = make_batches(4 * WORLD)

    def run() -> None:
        for zero_dp_strategy in ALL_STRATEGIES:
            module, expected = ByHand(), ByHand()
            trainer = KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy})
            if zero_dp_strategy == 1:
                with pytest.raises(
                    ValueError, match=r"second backward with gradient synchronisation .*toggle_model\(sync_grad=False\)"
                ):
                    trainer.fit(module, make_loader(batches))
                continue
            trainer.fit(module, make_loader(batches))
            clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05)  # noqa: E731
            train_alone(expected, batches, window=2 * WORLD, clip=clip)
            assert_same_weights(module, expected)

    KIND.run(run, WORLD)


def test_a_second_synchronised_backward_is_refused_if_gradients_are_summed_in_whole() -> None:
    def run() -> None:
        trainer = KIND.make_trainer({"zero_dp_strategy": 0, "calculate_per_token_loss": True})
        with pytest.raises(ValueError, match="zero_dp_strategy=0 and calculate_per_token_loss=True, "):
            trainer.fit(ByHand(), make_loader(make_batches(4 * WORLD)))

    KIND.run(run, WORLD)


class FailsOnce(Regressor):
    """An error in the middle of the first backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = True

    def loss(self, batch: Batch) -> Tensor:
        inputs = self.blocks[0](batch["inputs"])
        if self.fails and inputs.requires_grad:
            inputs.register_hook(self.fail)
        for block in self.blocks[1:]:
            inputs = torch.tanh(block(inputs))
        return nn.functional.mse_loss(self.head(inputs * self.scale), batch["targets"])

    def fail(self, gradient: Tensor) -> None:
        if self.fails:
            raise RuntimeError("in backward")


def test_an_error_in_backward_leaves_nothing_behind() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        for zero_dp_strategy in ALL_STRATEGIES:
            module, expected = FailsOnce(), FailsOnce()
            expected.fails = False
            trainer = KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy})
            with pytest.raises(RuntimeError, match="in backward"):
                trainer.fit(module, make_loader(batches))
            module.fails = False
            KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy}).fit(module, make_loader(batches))
            train_alone(expected, batches)
            assert_same_weights(module, expected)

    KIND.run(run, WORLD)


class WithInputGradients(Regressor):
    def loss(self, batch: Batch) -> Tensor:
        inputs = batch["inputs"].clone().requires_grad_()
        outputs = self(inputs)
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, retain_graph=True)
        return nn.functional.mse_loss(outputs, batch["targets"]) * (1 + gradient.square().mean().detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"dp_replicate_size": 2}, marks=pytest.mark.slow)], ids=["shards", "replicas"]
)
def test_gradients_of_inputs_leave_those_of_parameters_alone(sizes: dict[str, int]) -> None:
    world_size = 4 if sizes else WORLD
    batches = make_batches(4 * world_size)

    def run() -> None:
        for zero_dp_strategy in (1, 2, 3):
            module, expected = WithInputGradients(), WithInputGradients()
            strategy = MegatronFSDPStrategy(**sizes, config=MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy))
            make_trainer(strategy, accumulate_grad_batches=2).fit(module, make_loader(batches))
            train_alone(expected, batches, window=2 * world_size)
            assert_same_weights(module, expected)

    KIND.run(run, world_size)


class WritesWeights(pl.Callback):
    """In every way that reaches their memory."""

    def __init__(self, write: str) -> None:
        self.write = write

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, module: nn.Module, *args: Any) -> None:
        parameters = list(module.parameters())
        if self.write == "foreach":
            torch._foreach_mul_(parameters, 0.9)
        for parameter in parameters:
            if self.write == "in place":
                parameter.mul_(0.9)
            elif self.write == "data":
                parameter.data.mul_(0.9)


@pytest.mark.parametrize(
    "write", ["in place", *(pytest.param(way, marks=pytest.mark.slow) for way in ("data", "foreach"))]
)
def test_weights_that_a_callback_writes_are_computed_with(write: str) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        for zero_dp_strategy in ALL_STRATEGIES:
            module, expected, callback = Regressor(), Regressor(), WritesWeights(write)
            flags = {"zero_dp_strategy": zero_dp_strategy}
            KIND.make_trainer(flags, max_steps=2, callbacks=[callback]).fit(module, make_loader(batches))
            optimizer = make_optimizer(expected.parameters())
            for step in range(2):
                optimizer.zero_grad()
                (sum(map(expected.loss, batches[step * WORLD :][:WORLD])) / WORLD).backward()
                optimizer.step()
                callback.on_train_batch_end(None, expected)
            assert_same_weights(module, expected)

    KIND.run(run, WORLD)


class StepsAlone(ByHand):
    """Without Lightning's ``manual_backward``."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def test_a_backward_and_a_zero_grad_of_torch_do_under_manual_optimisation() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        for zero_dp_strategy in ALL_STRATEGIES:
            module, expected = StepsAlone(), StepsAlone()
            KIND.make_trainer({"zero_dp_strategy": zero_dp_strategy}).fit(module, make_loader(batches))
            train_alone(expected, batches)
            assert_same_weights(module, expected)

    KIND.run(run, WORLD)


@pytest.mark.parametrize("zero_dp_strategy", EACH)
def test_a_checkpoint_that_is_written_in_the_background_goes_on(zero_dp_strategy: int, tmp_path: Path) -> None:
    batches = 4 * make_batches(WORLD)

    def run() -> None:
        flags, checkpoint = {"zero_dp_strategy": zero_dp_strategy}, CheckpointConfig(async_save=True)
        trainer = KIND.make_trainer(flags, checkpoint=checkpoint)
        trainer.fit(Scheduled(), make_loader(batches))
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        trainer.strategy.checkpoints.end_stage(trainer)
        module, expected = Scheduled(), Scheduled()
        trainer = KIND.make_trainer(flags, max_steps=4)
        trainer.fit(module, make_loader(batches), ckpt_path=tmp_path / "half.ckpt")
        train_scheduled_alone(expected, batches, WORLD, None)
        assert_same_weights(module, expected)

    KIND.run(run, WORLD)


def test_a_model_has_its_own_attention_again_after_a_stage_with_context_parallelism() -> None:
    batches, used = make_token_batches(2, length=16), []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            used.append(pl_module.model.config._attn_implementation)

    def run() -> None:
        module = make_language_model()
        trainer = make_trainer(MegatronFSDPStrategy(cp_size=2), callbacks=[Looks()], max_steps=1)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        assert used
        assert "sdpa" not in used
        assert module.model.config._attn_implementation == "sdpa"

    KIND.run(run, WORLD)


def test_parameters_without_a_dimension_are_refused() -> None:
    class WithScalar(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.ones(()))

    def run() -> None:
        with pytest.raises(
            ValueError, match=r"Megatron-FSDP shards along dim 0, which the parameters logit_scale do not have"
        ):
            KIND.make_trainer().fit(WithScalar(), make_loader(make_batches(4)))

    KIND.run(run, WORLD)


def test_parameters_that_no_loss_uses_are_named() -> None:
    class Unused(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    def run() -> None:
        with pytest.warns(UserWarning, match=r"does not use .*: spare.bias, spare.weight\..*Freeze them"):
            KIND.make_trainer().fit(Unused(), make_loader(make_batches(2 * WORLD)))

    KIND.run(run, WORLD)


def test_what_is_frozen_or_unfrozen_too_late_is_named() -> None:
    class Freezes(Regressor):
        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            self.head.requires_grad_(batch_idx == 0)

    def run() -> None:
        with pytest.raises(
            ValueError,
            match=r"were frozen or unfrozen after .*: head.bias, head.weight\. Freeze parameters in `__init__`",
        ):
            KIND.make_trainer().fit(Freezes(), make_loader(make_batches(2 * WORLD)))

    KIND.run(run, WORLD)


def test_a_wrapped_model_is_not_copied() -> None:
    def run() -> None:
        module = Regressor()
        KIND.make_trainer(max_steps=1).fit(module, make_loader(make_batches(WORLD)))
        with pytest.raises(TypeError, match=r"cannot be copied, because its parameters are in buffers.* Make a new"):
            copy.deepcopy(module)

    KIND.run(run, WORLD)


def test_its_name_is_registered() -> None:
    assert isinstance(StrategyRegistry.get("megatron_fsdp"), MegatronFSDPStrategy)

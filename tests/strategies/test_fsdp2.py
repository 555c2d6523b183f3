"""What a user of ``Trainer(strategy=FSDP2Strategy())`` relies on, apart from dtypes, data loaders and launchers."""

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models import LLAMA, make_token_batches
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from helpers.user_modules import (
    PROMPT,
    WIDTH,
    WORLD,
    Batch,
    CountsSamples,
    Gan,
    Regressor,
    assert_same_weights,
    make_batches,
    make_language_model,
    make_loader,
    make_optimizer,
    make_trainer,
    train_alone,
    train_language_model_alone,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, DDPConfig, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.compat.transformers import assumes_unpacked_sequences
from lightning_fsdp2.parallelizer import unshard_fsdp2_model
from lightning_fsdp2.strategies import mesh_strategy
from lightning_fsdp2.strategies.launch import rendezvous as peers

REGRESSOR_UNITS = 5
"""Three blocks, the head, and what the LightningModule holds itself."""


# ---------------------------------------------------------------------- lifetime


@pytest.mark.parametrize("fails_to", [None, "load", pytest.param("train", marks=pytest.mark.slow)])
def test_context_parallel_attention_is_that_of_a_stage(fails_to: str | None, tmp_path: Path) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    def run() -> None:
        before = set(AttentionInterface()), set(AttentionMaskInterface())
        module = CausalLM(config=LLAMA)
        batches = make_token_batches(4, ragged=False, length=14 if fails_to == "train" else 12)
        path = tmp_path / "none.ckpt" if fails_to == "load" else None
        errors = {
            None: nullcontext(),
            "load": pytest.raises(FileNotFoundError),
            "train": pytest.raises(ValueError, match="14"),
        }
        for _ in range(2):
            with errors[fails_to]:
                make_trainer(FSDP2Strategy(cp_size=2)).fit(module, DataLoader(batches, batch_size=None), ckpt_path=path)
            assert module.model.config._attn_implementation == "sdpa"
            assert (set(AttentionInterface()), set(AttentionMaskInterface())) == before
            assert module(batches[0]["input_ids"]).shape[1] == batches[0]["input_ids"].shape[1], "whole sequences"

    run_ranks(run, WORLD)


def test_a_process_group_of_another_backend_is_refused() -> None:
    def run() -> None:
        loader = make_loader(make_batches(4))
        for backend in ("nccl", "cpu:mpi"):
            with pytest.raises(
                ValueError, match=f"config.backend='{backend}', but .* with the backend 'cpu:gloo,cuda:gloo'"
            ):
                make_trainer(FSDP2Strategy(config=FSDP2Config(backend=backend))).fit(Regressor(), loader)
        for backend in ("gloo", "cpu:gloo"):
            make_trainer(FSDP2Strategy(config=FSDP2Config(backend=backend))).fit(Regressor(), loader)

    run_ranks(run, WORLD)


class LooksForSearch(Regressor):
    """A module that notes whether transformers looks for packed sequences."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.is_off = assumes_unpacked_sequences()
        return super().training_step(batch, batch_idx)


def test_packed_sequences_are_not_looked_for_in_a_stage_of_which_the_flag_says_so() -> None:
    def run() -> None:
        for flag in (False, True):
            module = LooksForSearch()
            trainer = make_trainer(FSDP2Strategy(config=FSDP2Config(patch_is_packed_sequence=flag)), max_steps=1)
            trainer.fit(module, make_loader(make_batches(1)))
            assert module.is_off == flag
            assert not assumes_unpacked_sequences()

    run_ranks(run, 1)


@pytest.mark.parametrize(("flag", "value"), [("reshard_after_forward", True), ("patch_is_packed_sequence", True)])
def test_a_second_trainer_with_other_flags_of_the_model_is_refused_and_one_with_others_is_not(
    flag: str, value: Any
) -> None:
    def run() -> None:
        loader, module = make_loader(make_batches(2 * WORLD)), Regressor()
        make_trainer().fit(module, loader)
        make_trainer(FSDP2Strategy(config=FSDP2Config(defer_fsdp_grad_sync=False))).fit(module, loader)
        with pytest.raises(
            ValueError, match=f"parallelised with {flag}=.* by an earlier Trainer, but this Trainer asks for {value}"
        ):
            make_trainer(FSDP2Strategy(config=FSDP2Config(**{flag: value}))).fit(module, loader)

    run_ranks(run, WORLD)


def test_a_second_trainer_with_the_same_flags_in_other_words_goes_on() -> None:
    def make_strategy(mode: Any) -> FSDP2Strategy:
        config = FSDP2Config(tp_plan={"blocks.*": ColwiseParallel()}, activation_checkpointing=mode)
        return FSDP2Strategy(config=config)

    def run() -> None:
        module = Regressor()
        for mode in (True, "full"):
            make_trainer(make_strategy(mode)).fit(module, make_loader(make_batches(2 * WORLD)))

    run_ranks(run, WORLD)


@pytest.mark.slow
def test_second_trainer_on_another_mesh_trains_a_new_module_and_refuses_the_old_one() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        loader, module = make_loader(batches), Regressor()
        make_trainer().fit(module, loader)
        other = Regressor()
        make_trainer(FSDP2Strategy(dp_replicate_size=2)).fit(other, loader)
        expected = Regressor()
        train_alone(expected, batches)
        assert_same_weights(other, expected)

        with pytest.raises(ValueError, match=r"sharded over .* by an earlier Trainer.*same sizes"):
            make_trainer(FSDP2Strategy(dp_replicate_size=2)).fit(module, loader)
        for precision in ("bf16-mixed", "bf16-true"):
            with pytest.raises(ValueError, match=r"by an earlier Trainer.*same precision"):
                make_trainer(precision=precision).fit(module, loader)
        other_policy = FSDP2Strategy(config=FSDP2Config(mp_policy={"param_dtype": "bfloat16"}))
        with pytest.raises(ValueError, match="same precision"):
            make_trainer(other_policy).validate(module, loader)

        # the refused Trainers left the module as it was
        make_trainer().fit(module, loader)
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- communication counts


@contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Count what FSDP2 communicates; the Trainer's own all-reduces are of single numbers."""
    counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    names = ("all_gather_single", "reduce_scatter_single")
    if not hasattr(dist, names[0]):  # torch < 2.13
        names = ("all_gather_into_tensor", "reduce_scatter_tensor")

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += name != "all_reduce" or args[0].numel() > 1
            return function(*args, **kwargs)

        return call

    functions = dict(zip(counts, (*names, "all_reduce"), strict=True))
    with patch.multiple(dist, **{name: counted(key, getattr(dist, name)) for key, name in functions.items()}):
        yield counts


class RecordReductions(pl.Callback):
    """The number of reduce-scatters of every micro-batch."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts
        self.totals = [0]

    def on_train_batch_end(self, *args: Any) -> None:
        self.totals.append(self.counts["reduce_scatter"])

    @property
    def per_batch(self) -> list[int]:
        return [after - before for before, after in itertools.pairwise(self.totals)]


# ---------------------------------------------------------------------- manual optimisation


@pytest.mark.guarantees("clipping-and-optimizers")
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2], ids="accumulate={}".format)
def test_manual_optimization_with_two_optimizers(accumulate: int) -> None:
    batches = make_batches(3 * accumulate * WORLD)

    def run() -> None:
        for order in ("generator, discriminator", "discriminator, generator"):
            module, expected = Gan(accumulate, order), Gan(accumulate, order)
            with count_collectives() as counts:
                recorder = RecordReductions(counts)
                make_trainer(max_steps=6, callbacks=[recorder]).fit(module, make_loader(batches))
            assert [n > 0 for n in recorder.per_batch] == [(i + 1) % accumulate == 0 for i in range(3 * accumulate)]
            expected.train_alone(batches)
            torch.testing.assert_close(module.gradients, expected.gradients)
            assert_same_weights(module, expected)

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- accumulation


@pytest.mark.guarantees("deferred-reduction")
@pytest.mark.parametrize(
    ("world_size", "dp_replicate_size", "all_reduces_per_step"),
    [pytest.param(2, 1, 0, id="dp2"), pytest.param(4, 2, 1, id="hsdp2x2")],
)
@pytest.mark.parametrize("defer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_accumulation_communicates_no_gradient_that_can_wait(
    defer: bool, world_size: int, dp_replicate_size: int, all_reduces_per_step: int
) -> None:
    accumulate, steps = 3, 2
    reduce_scatters_per_step = 1 if defer else accumulate
    batches = make_batches(steps * accumulate * world_size)

    def run() -> None:
        expected = Regressor()
        train_alone(expected, batches, steps=steps, window=accumulate * world_size)
        config = FSDP2Config(defer_fsdp_grad_sync=defer)
        strategy = FSDP2Strategy(dp_replicate_size=dp_replicate_size, config=config)
        module = Regressor()
        with count_collectives() as counts:
            trainer = make_trainer(strategy, max_steps=steps, accumulate_grad_batches=accumulate)
            trainer.fit(module, make_loader(batches))
        assert counts["reduce_scatter"] == steps * reduce_scatters_per_step * REGRESSOR_UNITS
        assert counts["all_reduce"] == steps * all_reduces_per_step * REGRESSOR_UNITS
        assert_same_weights(module, expected)

    run_ranks(run, world_size)


# ---------------------------------------------------------------------- where the module comes from


class ShardedByUser(Regressor):
    """``everything``: the LightningModule too; ``submodules``: all that holds parameters; ``blocks``: a part."""

    def __init__(self, extent: str) -> None:
        super().__init__()
        self.extent = extent
        if extent == "submodules":
            self.scale.requires_grad_(False)

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.blocks[0], FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        if self.extent == "submodules":
            fully_shard(self.head, mesh=mesh)
        if self.extent == "everything":
            fully_shard(self, mesh=mesh)


class ShardedOnMeta(ShardedByUser):
    """A module that has no weights before it is sharded."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            self.to("meta")
        super().configure_model()

    def reset_parameters(self) -> None:
        torch.nn.init.uniform_(self.scale)


@pytest.mark.guarantees("self-sharded-modules")
@pytest.mark.parametrize(
    ("kind", "extent"), [(ShardedByUser, "everything"), (ShardedByUser, "submodules"), (ShardedOnMeta, "everything")]
)
def test_module_that_shards_itself(kind: type[ShardedByUser], extent: str) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = kind(extent), ShardedByUser(extent)
        torch.manual_seed(ShardedByUser.seed)  # of weights that are drawn only now
        trainer = make_trainer()
        trainer.validate(module, make_loader(batches), verbose=False)
        trainer.fit(module, make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    run_ranks(run, WORLD)


def test_module_that_shards_only_a_part_of_itself_is_refused() -> None:
    def run() -> None:
        with pytest.raises(
            ValueError, match=r"sharded only a part of ShardedByUser\. The gradients of scale, head.weight, head.bias"
        ):
            make_trainer().fit(ShardedByUser("blocks"), make_loader(make_batches(4)))

    run_ranks(run, WORLD)


def test_stages_of_a_module_that_shards_itself_are_refused() -> None:
    def run() -> None:
        trainer = make_trainer(FSDP2Strategy(pp_size=2))
        trainer.fit(ShardedByUser("everything"), make_loader(make_batches(4)))

    with raises_on_all_ranks(ValueError, match=r"pp_size=2: `configure_model` of ShardedByUser has sharded scale, but"):
        run_ranks(run, WORLD)


def test_flags_that_a_module_which_shards_itself_would_ignore_are_refused() -> None:
    def fit(config: FSDP2Config) -> None:
        trainer = make_trainer(FSDP2Strategy(config=config))
        trainer.fit(ShardedByUser("everything"), make_loader(make_batches(2 * WORLD)))

    def run() -> None:
        for flags in ({"activation_checkpointing": "full"}, {"enable_compile": True}, {"reshard_after_forward": False}):
            (name,) = flags
            with pytest.raises(ValueError, match=rf"FSDP2Config\.{name}=.* has no effect on ShardedByUser"):
                fit(FSDP2Config(**flags))
        fit(FSDP2Config(defer_fsdp_grad_sync=False))

    run_ranks(run, WORLD)


class EarlyOptimizer(Regressor):
    """Has an optimizer from before sharding, of its own parameters or of another module's."""

    def __init__(self, owner: nn.Module | None = None) -> None:
        super().__init__()
        self.early = make_optimizer((owner or self).parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


def test_optimizer_built_before_sharding_gets_the_sharded_parameters() -> None:
    def run() -> None:
        module, expected, batches = EarlyOptimizer(), Regressor(), make_batches(2 * WORLD)
        make_trainer().fit(module, make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    run_ranks(run, WORLD)


def test_optimizer_of_another_module_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"9 of the 9 parameters of SGD .* in `configure_optimizers`"):
            make_trainer().fit(EarlyOptimizer(Regressor()), make_loader(make_batches(4)))

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- logging and collectives


class Logging(Regressor):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        weights = self.blocks[0].weight
        assert isinstance(weights, DTensor)
        self.log("mean_of_ranks", torch.tensor(float(self.global_rank)), sync_dist=True)
        self.log("sum_of_ranks", torch.tensor(float(self.global_rank + 1)), sync_dist=True, reduce_fx="sum")
        self.log("largest_rank", torch.tensor(float(self.global_rank)), sync_dist=True, reduce_fx="max")
        self.log("sharded", weights.detach().square().sum(), sync_dist=True)
        self.log("epoch", weights.detach().square().sum(), on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class LogsSharded(Regressor):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        square_sum = self.blocks[0].weight.detach().square().sum()
        self.log("log", square_sum)
        self.log_dict({"log_dict": square_sum})
        return super().training_step(batch, batch_idx)


class LogsShardedFromCallback(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Regressor, *args: Any) -> None:
        self.log("callback", module.blocks[0].weight.detach().square().sum())


def test_logged_sharded_values_are_those_of_all_shards() -> None:
    def run() -> None:
        trainer = make_trainer(max_steps=1, callbacks=[LogsShardedFromCallback()])
        trainer.fit(LogsSharded(), make_loader(make_batches(4)))
        expected = Regressor().blocks[0].weight.square().sum().item()
        for name in ("log", "log_dict", "callback"):
            value = trainer.callback_metrics[name]
            assert not isinstance(value, DTensor), name
            assert value.item() == pytest.approx(expected, rel=1e-6), name

    run_ranks(run, WORLD)


def test_a_module_can_be_connected_before_it_has_a_trainer() -> None:
    strategy, module = FSDP2Strategy(), Regressor()
    strategy.connect(module)
    assert strategy.lightning_module is module


def test_a_log_of_the_users_own_stays_in_place() -> None:
    seen: list[str] = []

    def run() -> list[str]:
        module = Logging()

        def log(name: str, value: Any, **options: Any) -> None:
            seen.append(name)

        module.log = log
        make_trainer(max_steps=1).fit(module, make_loader(make_batches(2)))
        assert module.log is log
        return seen

    assert run_ranks(run, WORLD)[0] == ["mean_of_ranks", "sum_of_ranks", "largest_rank", "sharded", "epoch"]


def test_logged_values_with_sync_dist() -> None:
    def run() -> None:
        trainer = make_trainer(max_steps=1)
        trainer.fit(Logging(), make_loader(make_batches(4)))
        squares = Regressor().blocks[0].weight.square().sum().item()
        metrics = trainer.callback_metrics
        assert not any(isinstance(value, DTensor) for value in metrics.values())
        expected = {
            "mean_of_ranks": 0.5,
            "sum_of_ranks": 3.0,
            "largest_rank": 1.0,
            "sharded": squares,
            "epoch": squares,
        }
        assert {name: metrics[name].item() for name in expected} == pytest.approx(expected, rel=1e-6)

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- calls from hooks and callbacks


class CallsSubmodules(pl.Callback):
    def __init__(self, hook: str, names: list[str]) -> None:
        setattr(self, hook, self._call)
        self.names = names
        self.results: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def _call(self, trainer: pl.Trainer, module: CausalLM, *args: Any) -> None:
        self.results.append(call_submodules(module.model, self.names))


def call_submodules(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    hidden = torch.linspace(-1, 1, 4 * 32).view(1, 4, 32)
    inputs = {"model.embed_tokens": PROMPT}
    rotary = model.model.rotary_emb(hidden, torch.arange(4)[None])
    results = {}
    for name in names:
        keywords = {"position_embeddings": rotary} if "layers" in name else {}
        results[name] = model.get_submodule(name)(inputs.get(name, hidden), **keywords)
    return results


SUBMODULES = [
    ["model.embed_tokens"],
    ["model.norm", "lm_head", "model.layers.0"],
    # final norm and head are one unit, of which these call a part
    ["model.norm"],
    ["lm_head", "lm_head"],
]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "hook", ["on_before_optimizer_step", pytest.param("on_train_batch_end", marks=pytest.mark.slow)]
)
def test_submodules_called_from_a_callback(hook: str, part: int) -> None:
    batches = make_token_batches(2 * WORLD)

    def run() -> None:
        models, _ = train_language_model_alone(batches, 2, WORLD)
        called = models[1:] if hook == "on_train_batch_end" else models[:-1]
        for names in SUBMODULES[part::2]:
            module, callback = make_language_model(), CallsSubmodules(hook, names)
            make_trainer(max_steps=2, gradient_clip_val=0.5, callbacks=[callback]).fit(module, make_loader(batches))
            with torch.no_grad():
                expected = [call_submodules(model, names) for model in called]
            try:
                torch.testing.assert_close(callback.results, expected)
                assert_same_weights(module.model, models[-1])
            except AssertionError as error:
                raise AssertionError(f"{names}: {error}") from error

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- calls on one rank, uses outside of a unit


class CallsOnOneRank(pl.Callback):
    """Calls the model from one hook, on rank 0 only."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._call)

    @torch.no_grad()
    def _call(self, trainer: pl.Trainer, module: Regressor, *args: Any) -> None:
        if trainer.is_global_zero:
            module(torch.zeros(1, WIDTH))


@pytest.mark.guarantees("call-on-one-rank")
@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_after_backward", "on_validation_epoch_end"])
def test_call_on_one_rank_is_an_error_and_no_hang(hook: str) -> None:
    def run() -> None:
        loader = make_loader(make_batches(8))
        trainer = make_trainer(FSDP2Strategy(timeout=timedelta(seconds=2)), callbacks=[CallsOnOneRank(hook)])
        # the other rank learns of it when it waits for the failed one
        with pytest.raises(RuntimeError, match="unshard_fsdp2_model" if trainer.is_global_zero else None):
            trainer.fit(Regressor(), loader, loader)

    run_ranks(run, WORLD)


@pytest.mark.guarantees("call-on-one-rank")
def test_call_on_one_rank_in_validation_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after the timeout of collectives, which is half an hour here; a rank that is late waits at a barrier."""
    monkeypatch.setattr(mesh_strategy, "OUTSIDE_CALL_TIMEOUT", timedelta(seconds=1))

    class IsLate(CallsOnOneRank):
        def _call(self, trainer: pl.Trainer, module: Regressor, *args: Any) -> None:
            if trainer.is_global_zero:
                time.sleep(2)
            trainer.strategy.barrier()
            module(torch.zeros(1, WIDTH))

    def run(callback: pl.Callback) -> float:
        trainer, start = make_trainer(callbacks=[callback]), time.monotonic()
        trainer.validate(Regressor(), make_loader(make_batches(4)), verbose=False)
        return time.monotonic() - start

    run_ranks(run, 2, IsLate("on_validation_batch_end"), seconds=60)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 0 wants to call .* outside of a step, .* within 0:00:01: rank 1"):
        run_ranks(run, 2, CallsOnOneRank("on_validation_batch_end"), patience=1)
    assert time.monotonic() - start < 30


def test_a_long_timeout_lets_a_rank_come_late_to_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_strategy, "OUTSIDE_CALL_TIMEOUT", timedelta(seconds=0.1))

    class IsLate(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.is_global_zero:
                time.sleep(0.5)
            module(torch.zeros(1, WIDTH))

    def run() -> None:
        trainer = make_trainer(FSDP2Strategy(timeout=timedelta(minutes=31)), callbacks=[IsLate()])
        trainer.validate(Regressor(), make_loader(make_batches(2)), verbose=False)

    run_ranks(run, 2)


@pytest.mark.guarantees("call-on-one-rank")
def test_call_on_one_rank_after_fit() -> None:
    """Inside ``unshard_fsdp2_model`` any rank may call; outside it is an error."""
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = Regressor(), Regressor()
        trainer = make_trainer(FSDP2Strategy(timeout=timedelta(seconds=2)))
        trainer.fit(module, make_loader(batches))
        train_alone(expected, batches)
        inputs = batches[0]["inputs"]
        with torch.no_grad(), unshard_fsdp2_model(module):
            if trainer.is_global_zero:
                for _ in range(2):
                    torch.testing.assert_close(module(inputs), expected(inputs))
                torch.testing.assert_close(module.blocks[0].weight, expected.blocks[0].weight)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            with pytest.raises(
                RuntimeError, match=r"Rank 0 wants to call .*, which is sharded, outside of a step.*unshard_fsdp2_model"
            ):
                module(inputs)

    run_ranks(run, WORLD)


class UsesWeightsOutsideOfTheirUnit(Regressor):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def use(self, stage: str, batch: Batch) -> None:
        if stage == self.stage:
            F.linear(batch["inputs"], self.blocks[0].weight)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.use("training_step", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.use("validation_step", batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.use("on_train_batch_end", batch)


def test_use_of_a_weight_outside_of_its_unit_names_the_remedy() -> None:
    def run() -> None:
        loader = make_loader(make_batches(4))
        for stage in ("training_step", "validation_step", "on_train_batch_end"):
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor(.|\n)*unshard_fsdp2_model"):
                make_trainer(max_steps=2).fit(UsesWeightsOutsideOfTheirUnit(stage), loader, loader)

    run_ranks(run, WORLD)


class PenalisesGatheredWeights(Regressor):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad(), unshard_fsdp2_model(self):
            self.largest = max(parameter.abs().max().item() for parameter in self.parameters())
        with unshard_fsdp2_model(self.blocks[0]):
            return loss + self.blocks[0].weight.square().sum()


class PenalisesGradients(Regressor):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = batch["inputs"].requires_grad_()
        (gradient,) = torch.autograd.grad(self(inputs).sum(), inputs, create_graph=True)
        return gradient.square().sum()


@pytest.mark.guarantees("second-order-gradients")
def test_training_on_freed_weights_is_an_error_that_says_so() -> None:
    def run() -> None:
        loader = make_loader(make_batches(4))
        module = PenalisesGatheredWeights()
        with pytest.raises(RuntimeError, match=r"block has ended.*have been freed.*`torch.no_grad\(\)`.*weight_decay"):
            make_trainer().fit(module, loader)
        assert module.largest == max(p.abs().max().item() for p in Regressor().parameters())
        with pytest.raises(RuntimeError, match=r"storage of size 0(.|\n)*no second-order gradients"):
            make_trainer().fit(PenalisesGradients(), loader)

    run_ranks(run, WORLD)


def test_a_rank_whose_peer_is_gone_refers_to_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PROBE_TIMEOUT", timedelta(seconds=0.5))  # the other rank is killed, too, in a moment

    class OneRankFails(Regressor):
        def on_train_start(self) -> None:
            if self.global_rank == 0:
                os._exit(1)

    def run() -> None:
        try:
            make_trainer().fit(OneRankFails(), make_loader(make_batches(4)))
        except RuntimeError as error:
            (tmp_path / "error").write_text(str(error))

    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(run, WORLD)
    assert re.search(r"There is no report yet from 0 \(.*\): they may", (tmp_path / "error").read_text())


class LogsGradientNorms(Regressor):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grad_norm(self, norm_type=2)


def test_grad_norm_of_lightning_names_the_remedy() -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match=r"callbacks\.GradientNorm"):
            make_trainer().fit(LogsGradientNorms(), make_loader(make_batches(4)))

    run_ranks(run, WORLD)


class TrainsThroughAnotherMethod(Regressor):
    """`encode` gathers the weights of its module only if it was registered."""

    class Encoder(nn.Linear):
        def encode(self, inputs: Tensor) -> Tensor:
            return F.linear(inputs, self.weight, self.bias)

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.encoder = self.Encoder(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.encoder.encode(inputs))


class Registers(TrainsThroughAnotherMethod):
    def on_fit_start(self) -> None:
        register_fsdp_forward_method(self.encoder, "encode")


def test_training_through_another_method_names_the_remedy_which_works() -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        with pytest.raises(RuntimeError, match=r"in `on_fit_start`.*register_fsdp_forward_method"):
            make_trainer().fit(TrainsThroughAnotherMethod(), make_loader(batches))
        module, expected = Registers(), Registers()
        make_trainer().fit(module, make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    run_ranks(run, WORLD)


# ---------------------------------------------------------------------- names and wrong options


def test_a_metric_counts_each_batch_of_tensor_parallel_ranks_once() -> None:
    def run() -> None:
        module = CountsSamples()
        config = FSDP2Config(tp_plan={"blocks.*": "colwise_gather_output"})
        trainer = make_trainer(FSDP2Strategy(tp_size=2, config=config))
        trainer.validate(module, DataLoader(make_batches(4), batch_size=None), verbose=False)
        assert trainer.callback_metrics["batches"] == 4

    run_ranks(run, WORLD)


def test_registered_names() -> None:
    def run() -> None:
        for name in ("fsdp2", "fsdp2_offload"):
            batches, expected = make_batches(2 * WORLD), Regressor()
            module, trainer = Regressor(), make_trainer(name)
            trainer.fit(module, make_loader(batches))
            assert type(trainer.strategy) is FSDP2Strategy
            offloads = isinstance(trainer.strategy.config.offload_policy, CPUOffloadPolicy)
            assert offloads == (name == "fsdp2_offload")
            train_alone(expected, batches)
            assert_same_weights(module, expected)

    run_ranks(run, WORLD)


SIZES = {
    "dp_size=3": ({"dp_size": 3}, r"dp_size=3 x cp_size=1 x tp_size=1 = 3, but the world size is 2;"),
    "dp_replicate_size=3": (
        {"dp_replicate_size": 3},
        r"dp_replicate_size=3 does not divide .* 2 .* use one of \[1, 2\]",
    ),
    "cp_size=3": ({"cp_size": 3}, r"cp_size=3 x tp_size=1 = 3 does not divide the world size 2; .* start 3 processes"),
    "dp_replicate_size=2": (
        {"dp_replicate_size": 2, "cp_size": 2},
        r"dp_replicate_size=2 does not divide the data parallel size 1 .*cp_size=2 x tp_size=1\)\); use one of \[1\]",
    ),
    "dp_replicate_size=0": ({"dp_replicate_size": 0}, r"dp_replicate_size=0 is not a number of ranks"),
}


def test_sizes_that_do_not_divide_the_world_are_refused_before_a_process_group_exists() -> None:
    def run() -> None:
        for options, message in SIZES.values():
            with pytest.raises(ValueError, match=message):
                make_trainer(FSDP2Strategy(**options)).fit(Regressor(), DataLoader(make_batches(4), batch_size=None))
            assert not dist.is_initialized()

    run_ranks(run, WORLD, group=False)


def test_arguments_of_a_wrong_type_are_refused_by_name() -> None:
    for name, value in (("config", "x"), ("config", DDPConfig()), ("checkpoint", [1]), ("timeout", 60)):
        with pytest.raises(TypeError, match=rf"^FSDP2Strategy\({name}=.* must be a \w+.*; pass"):
            FSDP2Strategy(**{name: value})


@pytest.mark.parametrize(
    ("precision", "remedy"), [("16-mixed", "bf16-mixed"), ("16-true", "bf16-true"), ("64-true", "32-true")]
)
def test_unsupported_precision_names_the_alternative(precision: Any, remedy: str) -> None:
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # Lightning itself replaces the string on a CPU
        options = {"plugins": [MixedPrecision(precision, "cpu")]}
    with pytest.raises(ValueError, match=rf'precision=.{precision}. is not supported.*use precision="{remedy}"'):
        make_trainer(**options)


def test_notebook_with_several_devices_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ValueError, match=r"devices=2 needs.*devices=1.*python script.py.*torchrun --nproc-per-node 2"):
        make_trainer(devices=2)


def test_notebook_with_one_device_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    def run() -> None:
        for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        module, expected, batches = Regressor(), Regressor(), make_batches(2)
        trainer = make_trainer()
        trainer.fit(module, DataLoader(batches, batch_size=None))
        train_alone(expected, batches, window=1)
        assert_same_weights(module, expected)

    run_ranks(run, 1, group=False)


class TensorParallel(Regressor):
    """Does it itself, as users of Lightning's ``ModelParallelStrategy`` do."""

    def configure_model(self) -> None:
        if not isinstance(self.blocks[0].weight, DTensor):
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            parallelize_module(self.blocks, self.device_mesh["tensor_parallel"], plan)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1](torch.tanh(self.blocks[0](inputs)))) * self.scale)


@pytest.mark.guarantees("self-sharded-modules", "self-tensor-parallel")
def test_a_module_that_is_tensor_parallel_by_itself_is_left_as_it_is() -> None:
    batches = make_batches(2)

    def run() -> None:
        module, expected = TensorParallel(), TensorParallel()
        trainer = make_trainer(FSDP2Strategy(tp_size=2), gradient_clip_val=0.05)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.05)
        train_alone(expected, batches, window=1, clip=clip)
        assert_same_weights(module, expected)
        strategy = FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True))
        with pytest.raises(ValueError, match=r"sequence_parallel=True has no effect on TensorParallel, because its"):
            make_trainer(strategy).fit(TensorParallel(), DataLoader(batches, batch_size=None))

    run_ranks(run, 2)

    def run_with_copies() -> None:
        with pytest.raises(ValueError, match=r"made TensorParallel tensor parallel \(blocks.0.weight.* the 2 data"):
            make_trainer(FSDP2Strategy(tp_size=2)).fit(TensorParallel(), DataLoader(batches, batch_size=None))

    run_ranks(run_with_copies, 4)


T = TypeVar("T")


class GenericLast(Regressor, Generic[T]):
    """A class that FSDP2 can put its own before."""


class GenericFirst(Generic[T], Regressor):
    """One that it cannot: Python lays out its instances in another way."""


@pytest.mark.guarantees("order-of-bases")
def test_a_class_that_cannot_be_sharded_is_told_which_order_of_bases_works() -> None:
    def run() -> None:
        make_trainer(max_steps=1).fit(GenericLast(), make_loader(make_batches(2)))
        module = GenericFirst()
        with pytest.raises(TypeError, match=r"class GenericFirst\(Generic, Regressor\).* Regressor before Generic"):
            make_trainer(max_steps=1).fit(module, make_loader(make_batches(2)))
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters()), "nothing was sharded"

    run_ranks(run, 1)


@pytest.mark.guarantees("sizes-of-strategies")
def test_a_strategy_says_its_sizes() -> None:
    asked = FSDP2Strategy(tp_size=2, dp_replicate_size="auto")
    assert (asked.tp_size, asked.cp_size, asked.dp_size, asked.dp_replicate_size) == (2, 1, "auto", "auto")
    assert (FSDP2Strategy(pp_size=4).pp_size, FSDP2Strategy().pp_size) == (4, 1)

    def run() -> None:
        strategy = FSDP2Strategy(dp_replicate_size=WORLD)
        make_trainer(strategy).fit(Regressor(), make_loader(make_batches(2 * WORLD)))
        assert (strategy.dp_size, strategy.dp_replicate_size) == (WORLD, WORLD)
        assert (strategy.cp_size, strategy.tp_size) == (1, 1)

    run_ranks(run, WORLD)

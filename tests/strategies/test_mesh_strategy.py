"""What a strategy keeps from one stage, Trainer or copy to the next, and what users may change on it."""

import copy
import os
import pickle
import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import (
    WIDTH,
    WORLD,
    Batch,
    Normalized,
    Regressor,
    WithModel,
    make_batches,
    make_loader,
    make_trainer,
)
from lightning import pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy, MegatronFSDPConfig, MegatronFSDPStrategy
from lightning_fsdp2.config import CheckpointConfig
from lightning_fsdp2.strategies.parts.step_region import StepRegion
from lightning_fsdp2.strategies.precision import ShardedPrecision

EACH = pytest.mark.parametrize("kind", STRATEGIES.values(), ids=STRATEGIES)


class SeesParameters(pl.Callback):
    """Notes the classes of the parameters after each validation step."""

    def __init__(self) -> None:
        self.classes: set[type] = set()

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.classes |= {type(parameter) for parameter in pl_module.parameters()}


def test_a_copy_of_a_strategy_acts_on_its_own_module() -> None:
    def run() -> set[type]:
        original = FSDP2Strategy()
        make_trainer(original).fit(Regressor(), make_loader(make_batches(4)))
        for strategy in (copy.deepcopy(FSDP2Strategy()), pickle.loads(pickle.dumps(FSDP2Strategy()))):
            sees = SeesParameters()
            loader = make_loader(make_batches(4))
            make_trainer(strategy, callbacks=[sees]).fit(Regressor(), loader, loader)
            assert sees.classes == {DTensor}
        return sees.classes

    run_ranks(run, 2)


@EACH
def test_a_strategy_can_be_sent_to_another_process(kind: Kind) -> None:
    with kind.context():
        assert pickle.loads(pickle.dumps(kind.strategy())).config == kind.config()


class Interrupted(Regressor):
    """Is interrupted inside of its first block, once."""

    is_interrupted = False

    def build(self) -> None:
        super().build()
        self.blocks[0].register_forward_pre_hook(self.interrupt)

    def interrupt(self, *args: Any) -> None:
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt


class CallsAlone(pl.Callback):
    """Calls the module on one rank, in a hook."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            pl_module(torch.ones(1, 8))


def test_calls_on_one_rank_are_noticed_after_an_interrupted_forward() -> None:
    def run() -> None:
        module, loader = Interrupted(), make_loader(make_batches(4))
        trainer = make_trainer(FSDP2Strategy(timeout=timedelta(seconds=2)))
        trainer.validate(module, loader, verbose=False)
        module.is_interrupted = True
        with pytest.raises(BaseException):  # noqa: B017, PT011  Lightning may turn it into an exit
            trainer.validate(module, loader, verbose=False)
        trainer.callbacks.append(CallsAlone())
        if trainer.is_global_zero:
            with pytest.raises(RuntimeError, match="Rank 0 wants to call"):
                trainer.validate(module, loader, verbose=False)
        else:
            trainer.validate(module, loader, verbose=False)

    run_ranks(run, 2)


class Distilled(WithModel):
    """Has a teacher that is no longer needed after the first step."""

    def configure_model(self) -> None:
        if self.model is None:
            self.teacher = make_causal_lm(LLAMA).requires_grad_(False)
        super().configure_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            del self.teacher
        return super().training_step(batch, batch_idx)


def test_a_submodule_may_be_removed_in_training(tmp_path: Any) -> None:
    def run() -> None:
        module = Distilled(lambda: make_causal_lm(LLAMA))
        trainer = make_trainer()
        trainer.fit(module, torch.utils.data.DataLoader(make_token_batches(2), batch_size=None))
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    run_ranks(run, 1)


def test_every_kind_of_evaluation_begins_with_the_buffers_of_the_first_rank() -> None:
    class Evaluates(Normalized):
        def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self(batch["inputs"])

        test_step = predict_step = validation_step

    def run() -> None:
        module, trainer = Evaluates(), make_trainer(FSDP2Strategy())
        for stage in ("validate", "test", "predict"):
            mean = module.net[1].running_mean.fill_(1.0 + trainer.global_rank)
            options = {} if stage == "predict" else {"verbose": False}
            getattr(trainer, stage)(module, make_loader(make_batches(4)), **options)
            assert mean.tolist() == [1.0] * WIDTH, stage

    run_ranks(run, WORLD)


def test_signals_are_those_of_the_program_as_soon_as_training_has_ended() -> None:
    """A teardown may wait for other ranks, and has nothing to save."""

    class Looks(FSDP2Strategy):
        def on_train_start(self) -> None:
            super().on_train_start()
            handlers.append(signal.getsignal(signal.SIGTERM))

        def teardown(self) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))
            super().teardown()

    def handler(*args: Any) -> None: ...

    handlers: list[Any] = []

    def run() -> None:
        signal.signal(signal.SIGTERM, handler)
        make_trainer(Looks()).fit(Regressor(), make_loader(make_batches(2)))
        assert [found is handler for found in handlers] == [False, True]

    run_ranks(run, 1)


def test_what_a_subclass_sets_after_its_base_counts() -> None:
    class Sums(FSDP2Strategy):
        def __init__(self) -> None:
            super().__init__()
            self.averages_gradients = False
            self.patience = timedelta(seconds=7)

        def make_step_region(self, timeout: timedelta) -> StepRegion:
            assert self.manager is not None
            return StepRegion(self.patience)

    def run() -> None:
        strategy = Sums()
        make_trainer(strategy).fit(Regressor(), make_loader(make_batches(4)))
        assert not strategy.averages_gradients

    run_ranks(run, 2)


def test_a_plugin_of_lightning_stands_for_its_precision() -> None:
    strategy = FSDP2Strategy()
    strategy.precision_plugin = HalfPrecision("bf16-true")
    assert isinstance(strategy.precision_plugin, ShardedPrecision)
    assert strategy.precision_plugin.precision == "bf16-true"
    own = ShardedPrecision("bf16-mixed")
    strategy.precision_plugin = own
    assert strategy.precision_plugin is own


def test_configs_may_be_replaced_before_a_run() -> None:
    def run() -> None:
        strategy = FSDP2Strategy()
        strategy.config = replace(strategy.config, bind_device_id=True)
        with pytest.raises(ValueError, match="bind_device_id=True"):
            make_trainer(strategy).fit(Regressor(), make_loader(make_batches(2)))
        strategy.checkpoint_config = CheckpointConfig(format="full")
        assert strategy.checkpoint_config.format == "full"

    run_ranks(run, 1)


def test_sizes_are_known_to_a_trainer_that_has_not_started() -> None:
    trainer = make_trainer(FSDP2Strategy(config=FSDP2Config()))
    assert (trainer.strategy.sizes.dp, trainer.strategy.sizes.tp) == (1, 1)
    with pytest.raises(RuntimeError, match="no device mesh yet"):
        _ = trainer.strategy.full_device_mesh


def test_ranks_are_counted_over_the_nodes_of_a_script() -> None:
    def run() -> None:
        strategy = FSDP2Strategy()
        strategy.set_world_ranks()
        assert rank_zero_only.rank == 0
        os.environ.update(NODE_RANK="2", LOCAL_RANK="1")
        strategy.cluster_environment = LightningEnvironment()
        strategy.parallel_devices, strategy.num_nodes = [torch.device("cpu")] * 4, 3
        strategy._local_rank = strategy.cluster_environment.local_rank()
        strategy.set_world_ranks()
        assert (strategy.global_rank, strategy.world_size, rank_zero_only.rank) == (9, 12, 9)

    run_ranks(run, 1, group=False)


def test_sums_of_gradients_are_those_of_megatron() -> None:
    with STRATEGIES["megatron_fsdp"].context():
        assert MegatronFSDPStrategy().averages_gradients
        assert not MegatronFSDPStrategy(config=MegatronFSDPConfig(calculate_per_token_loss=True)).averages_gradients

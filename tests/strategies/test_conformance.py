"""One behaviour: what every strategy of the package does alike. A new one is added to ``STRATEGIES`` and passes."""

import itertools
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from helpers.cases import make_case
from helpers.cover import Matrix
from helpers.mesh_runs import check_parity
from helpers.models import LLAMA, make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind, fast_under, pairs
from helpers.user_modules import (
    PROMPT,
    WIDTH,
    WORLD,
    Batch,
    ByHand,
    CountsSamples,
    Gan,
    Regressor,
    Scheduled,
    ThrowsAway,
    UserModule,
    assert_same_weights,
    generate,
    make_batches,
    make_language_model,
    make_loader,
    make_optimizer,
    make_trainer,
    train_alone,
    train_language_model_alone,
    train_scheduled_alone,
)
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_fsdp2 import CausalLM, CheckpointConfig
from lightning_fsdp2.cli import FSDP2CLI

# ---------------------------------------------------------------------- lifetime

STAGES = ("fit, save, test, fit", "fit, predict, validate", "validate, fit", "predict, fit, fit")
FAST_STAGES = [*((name, STAGES[0]) for name in STRATEGIES), ("fsdp2", STAGES[1])]


@pytest.mark.guarantees("same-behaviour")
@pairs("stages", STAGES, fast=FAST_STAGES)
def test_stages_in_any_order_on_one_module(kind: Kind, stages: str, tmp_path: Path) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, trainer = Regressor(), kind.make_trainer(max_steps=0)
        loader = make_loader(batches)
        expected = Regressor()
        for stage in stages.split(", "):
            if stage == "fit":
                trainer.fit_loop.epoch_loop.max_steps += 2
                trainer.fit(module, loader)
                train_alone(expected, batches)
                assert_same_weights(module, expected)
            elif stage == "save":
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            elif stage == "predict":
                predictions = trainer.predict(module, loader)
                inputs = [batch["inputs"] for batch in loader]
                torch.testing.assert_close(predictions, [expected(x).detach() for x in inputs])
            else:
                (metrics,) = getattr(trainer, stage)(module, loader, verbose=False)
                loss = sum(expected.loss(batch).item() for batch in batches) / len(batches)
                assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        if "save" in stages:
            other = Regressor()
            (metrics,) = kind.make_trainer().test(other, loader, ckpt_path=tmp_path / "x.ckpt", verbose=False)
            after_first_fit = Regressor()
            train_alone(after_first_fit, batches)
            assert_same_weights(other, after_first_fit)

    kind.run(run, WORLD)


def test_second_trainer_on_the_same_mesh_trains_the_same_module_on(kind: Kind) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = Regressor(), Regressor()
        with patch.object(dist, "monitored_barrier", side_effect=AssertionError("a step waited for all ranks")):
            for _ in range(2):
                trainer = kind.make_trainer()
                trainer.fit(module, make_loader(batches))
                train_alone(expected, batches)
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


def count_process_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@fast_under("fsdp2")
def test_trainers_of_one_process_share_their_process_groups(kind: Kind) -> None:
    """A sweep of a hundred trials must not hold a hundred communicators."""

    def run() -> None:
        loader, counts = make_loader(make_batches(2 * WORLD)), []
        for timeout in (20, 40):
            trainer = kind.make_trainer(timeout=timeout, max_steps=1)
            trainer.fit(Regressor(), loader)
            counts.append(count_process_groups())
            groups = trainer.strategy.full_device_mesh.get_all_groups()
            for group in (*groups, trainer.strategy.world.control_group):
                backend = group._get_backend(torch.device("cpu"))
                assert backend.options._timeout == timedelta(seconds=timeout)
        assert counts[0] == counts[1]

    kind.run(run, WORLD)


@fast_under("fsdp2")
def test_a_process_group_of_another_size_is_refused(kind: Kind) -> None:
    def run() -> None:
        os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
        with pytest.raises(ValueError, match=r"The Trainer asks for 1 rank\(s\).*already belongs to a group of 2;"):
            kind.make_trainer(devices=1).fit(Regressor(), make_loader(make_batches(2)))

    kind.run(run, WORLD)


@pytest.mark.guarantees("same-behaviour")
def test_gradients_of_a_partial_last_window_are_synchronised(kind: Kind) -> None:
    # 5 micro-batches, 3 per step: the second step has two, and Lightning divides them by 3 all the same
    batches = make_batches(5 * WORLD)

    def run() -> None:
        module, expected = Regressor(), Regressor()
        kind.make_trainer(max_epochs=1, max_steps=-1, accumulate_grad_batches=3).fit(module, make_loader(batches))
        optimizer = make_optimizer(expected.parameters())
        for window in (batches[: 3 * WORLD], batches[3 * WORLD :]):
            optimizer.zero_grad()
            (sum(expected.loss(batch) for batch in window) / (3 * WORLD)).backward()
            optimizer.step()
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


CLIPS = [
    ("norm", 0.05, 2, partial(nn.utils.clip_grad_norm_, max_norm=0.05)),
    ("value", 0.01, 1, partial(nn.utils.clip_grad_value_, clip_value=0.01)),
]


@pytest.mark.guarantees("clipping-and-optimizers", "same-behaviour", "megatron-clipping")
def test_clipping_is_that_of_one_process(kind: Kind) -> None:
    batches = make_batches(4 * WORLD)

    def run() -> None:
        for algorithm, limit, accumulate, clip in CLIPS:
            module, expected, unclipped = Regressor(), Regressor(), Regressor()
            options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
            kind.make_trainer(accumulate_grad_batches=accumulate, **options).fit(module, make_loader(batches))
            train_alone(expected, batches, window=accumulate * WORLD, clip=clip)
            assert_same_weights(module, expected)
            train_alone(unclipped, batches, window=accumulate * WORLD)
            assert not torch.allclose(expected.head.weight, unclipped.head.weight), "nothing was clipped"

    kind.run(run, WORLD)


class BuiltOnMeta(Regressor):
    def build(self) -> None:
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            with torch.device("meta"):
                super().build()

    def on_fit_start(self) -> None:
        self.initial = whole(self.state_dict())


def test_module_built_on_the_meta_device(kind: Kind) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = BuiltOnMeta(), Regressor()
        torch.manual_seed(dist.get_rank())  # ranks may disagree about it
        kind.make_trainer().fit(module, make_loader(batches))
        expected.load_state_dict(module.initial)
        assert all(block.weight.std() > 0.1 for block in expected.blocks)
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


class OwnParameters(UserModule):
    """All parameters lie directly on the LightningModule."""

    seed = 0
    make_optimizer = staticmethod(make_optimizer)

    def build(self) -> None:
        self.weight, self.bias = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.zeros(1))

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(F.linear(batch["inputs"], self.weight, self.bias), batch["targets"])


@fast_under("fsdp2", "megatron_fsdp")
def test_parameters_directly_on_the_module_are_trained_in_sync(kind: Kind) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = OwnParameters(), OwnParameters()
        kind.make_trainer(kind.flags_without_layers).fit(module, make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


def test_ranks_that_were_seeded_differently_start_from_the_weights_of_rank_0(kind: Kind) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = Regressor(), Regressor()
        with torch.no_grad():
            module.head.weight += dist.get_rank()
        kind.make_trainer().fit(module, make_loader(batches))
        train_alone(expected, batches)
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


class Unfreezes(BaseFinetuning):
    """Trains the head alone, and all blocks from the second epoch on."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks, optimizer, lr=0.01)


class TrainsWhatIsNotFrozen(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


def test_lightning_callbacks_that_freeze_and_accumulate(kind: Kind) -> None:
    batches = make_batches(4 * WORLD)

    def run() -> None:
        module = TrainsWhatIsNotFrozen()
        callbacks = [Unfreezes(), GradientAccumulationScheduler({1: 2})]
        trainer = kind.make_trainer(max_steps=-1, max_epochs=2, callbacks=callbacks)
        if not kind.unfreezes:
            with pytest.raises(ValueError, match=r"callbacks=\[Unfreezes\(.*freezes and unfreezes .*Freeze in"):
                trainer.fit(module, make_loader(batches))
            return
        trainer.fit(module, make_loader(batches))

        expected = Regressor()
        optimizer = make_optimizer([*expected.head.parameters(), expected.scale])
        expected.blocks.requires_grad_(False)
        for epoch, window in ((0, WORLD), (1, 2 * WORLD)):
            if epoch == 1:
                expected.blocks.requires_grad_(True)
                optimizer.add_param_group({"params": list(expected.blocks.parameters()), "lr": 0.01})
            for start in range(0, len(batches), window):
                optimizer.zero_grad()
                (sum(map(expected.loss, batches[start : start + window])) / window).backward()
                optimizer.step()
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}
"""All of torch's; SparseAdam has no step for dense gradients, sharded or not."""


_REFUSED = {"LBFGS", "Adafactor", "Rprop", "ZeroRedundancyOptimizer"}
REFUSED_OPTIMIZERS = {"ddp": set(), "fsdp2": _REFUSED, "megatron_fsdp": {*_REFUSED, "Muon"}}
"""Names of the optimizers that each strategy refuses."""


class UsesOptimizer(Regressor):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind is torch.optim.Muon:  # for matrices only
            return self.kind([block.weight for block in self.blocks])
        return self.kind(self.parameters())


@pytest.mark.guarantees("whole-weights")
@pytest.mark.parametrize("name", STRATEGIES)
def test_optimizers_that_need_whole_weights_are_refused(name: str) -> None:
    refused = STRATEGIES[name].strategy.refused_optimizers
    assert {optimizer.__name__ for optimizer in refused} == REFUSED_OPTIMIZERS[name]


@pytest.mark.guarantees("whole-weights")
@fast_under("fsdp2")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_every_optimizer_of_torch_steps_as_on_one_process_or_is_refused(kind: Kind, part: int) -> None:
    batches = make_batches(3 * WORLD)

    def run() -> None:
        for name, optimizer_class in list(OPTIMIZERS.items())[part::3]:
            module, trainer = UsesOptimizer(optimizer_class), kind.make_trainer(max_steps=3)
            if name == "LBFGS" and not kind.shards:
                continue  # its steps call the model as often as they like: no loop to compare with
            if optimizer_class in kind.strategy.refused_optimizers:
                with pytest.raises(ValueError, match=f"{name} cannot step on the sharded parameters .* such as AdamW"):
                    trainer.fit(module, make_loader(batches))
                continue
            trainer.fit(module, make_loader(batches))
            expected = UsesOptimizer(optimizer_class)
            train_alone(expected, batches, steps=3, optimizer=lambda _, alone=expected: alone.configure_optimizers())
            # Muon computes in bfloat16: rounding differs with the split of a matrix
            tolerance = {"rtol": 0.0, "atol": 1e-3} if name == "Muon" else {}
            torch.testing.assert_close(
                whole(dict(module.named_parameters())), dict(expected.named_parameters()), **tolerance, msg=name
            )

    kind.run(run, WORLD)


def make_optimizers_of_other_packages() -> dict[str, Any]:
    from torchao.optim import AdamW8bit
    from transformers.optimization import Adafactor

    class Adam8bit(torch.optim.Adam):
        __module__ = "bitsandbytes.optim.adam"  # as the package's own class, which needs a GPU

    adafactor = partial(Adafactor, lr=1e-3, relative_step=False)
    return {"transformers.optimization.Adafactor": adafactor, "bitsandbytes": Adam8bit, "torchao": AdamW8bit}


@pytest.mark.guarantees("whole-weights")
@fast_under("fsdp2")
def test_optimizers_of_other_packages_that_need_whole_weights_are_refused(kind: Kind) -> None:
    def run() -> None:
        for name, optimizer_class in make_optimizers_of_other_packages().items():
            trainer = kind.make_trainer(max_steps=1)
            with pytest.raises(ValueError, match=f"{name}.* cannot step on the sharded .*: it .* such as AdamW"):
                trainer.fit(UsesOptimizer(optimizer_class), make_loader(make_batches(WORLD)))

    if kind.shards:
        kind.run(run, WORLD)


@pytest.mark.guarantees("whole-weights")
@fast_under("fsdp2", "ddp")
def test_callbacks_that_need_whole_weights_are_refused_in_setup_where_there_are_none(kind: Kind) -> None:
    def run() -> None:
        averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        for callback in (averaging, EMAWeightAveraging(), ModelPruning("l1_unstructured", amount=0.5)):
            error = pytest.raises(ValueError, match=rf"{type(callback).__name__}\(...\)\]\) needs whole weights")
            with error if kind.shards else nullcontext():
                trainer = kind.make_trainer(callbacks=[callback], max_epochs=2, max_steps=-1)
                trainer.fit(Regressor(), make_loader(make_batches(4)))

    kind.run(run, WORLD)


class HoldsNoCopy(Regressor):
    """Fails where a callback copies it, as modules do that hold process groups."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("it cannot be copied")


def test_callbacks_are_refused_before_they_copy_the_module(kind: Kind) -> None:
    def run() -> None:
        callback = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        with pytest.raises(ValueError, match="StochasticWeightAveraging") if kind.shards else nullcontext():
            module = HoldsNoCopy() if kind.shards else Regressor()
            kind.make_trainer(callbacks=[callback], max_epochs=2, max_steps=-1).fit(
                module, make_loader(make_batches(4))
            )

    kind.run(run, 1)


@fast_under("fsdp2")
@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_bound_of_clipping_that_would_be_passed_over_is_refused(kind: Kind, bound: float) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"gradient_clip_val=(-1.0|nan)\) must be at least 0"):
            kind.make_trainer(gradient_clip_val=bound).fit(Regressor(), make_loader(make_batches(1)))

    kind.run(run, 1)


class Gathering(OwnParameters):
    """Runs ``check`` in the middle of a training step."""

    def __init__(self, check: Callable[[pl.LightningModule], None]) -> None:
        super().__init__()
        self.check = check

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.check(self)
        return super().training_step(batch, batch_idx)


@fast_under("fsdp2")
def test_all_gather_and_boolean_decisions(kind: Kind) -> None:
    def check(module: pl.LightningModule) -> None:
        rank = module.global_rank
        own = torch.tensor([1.0, 2.0]) + 10 * rank
        everyone = torch.tensor([[1.0, 2.0], [11.0, 12.0]])
        assert torch.equal(module.all_gather(own), everyone)
        assert torch.equal(module.all_gather(torch.tensor(rank)), torch.tensor([0, 1]))
        nested = module.all_gather({"a": own, "b": [own]})
        assert torch.equal(nested["a"], everyone)
        assert torch.equal(nested["b"][0], everyone)

        own.requires_grad_()
        gathered = module.all_gather(own, sync_grads=True)
        assert torch.equal(gathered, everyone)
        # rank r weighs row i by 2 r + i + 1, and every rank's loss counts
        weights = torch.tensor([[2.0 * rank + 1], [2.0 * rank + 2]])
        (gathered * weights).sum().backward()
        assert torch.equal(own.grad, torch.full((2,), [1.0 + 3.0, 2.0 + 4.0][rank]))
        assert not module.all_gather(own).requires_grad

        decide = module.trainer.strategy.reduce_boolean_decision
        assert [decide(x) for x in (True, rank == 0, False)] == [True, False, False]
        assert [decide(x, all=False) for x in (True, rank == 0, False)] == [True, True, False]

    def run() -> None:
        trainer = kind.make_trainer(kind.flags_without_layers, max_steps=1)
        trainer.fit(Gathering(check), make_loader(make_batches(4)))

    kind.run(run, WORLD)


class CallsModel(pl.Callback):
    """Calls the model and generates from one hook, and keeps what came of it with the step it happened at."""

    def __init__(self, hook: str, with_grad: bool) -> None:
        setattr(self, hook, self._call)
        self.with_grad = with_grad
        self.results: list[tuple[int, Tensor, Tensor]] = []

    def _call(self, trainer: pl.Trainer, module: CausalLM, *args: Any) -> None:
        with torch.set_grad_enabled(self.with_grad):
            logits = module.model(input_ids=PROMPT).logits
        self.results.append((trainer.global_step, logits.detach().clone(), generate(module.model)))


@fast_under("fsdp2", "megatron_fsdp")
@pytest.mark.parametrize(
    ("with_grad", "hooks"),
    [
        pytest.param(
            False,
            ["on_before_optimizer_step", "on_validation_epoch_end"],
            id="no_grad",
        ),
        pytest.param(
            False,
            ["on_after_backward", "on_train_batch_end"],
            id="no_grad-more_hooks",
            marks=pytest.mark.slow,
        ),
        pytest.param(True, ["on_before_backward", "on_after_backward"], id="grad", marks=pytest.mark.slow),
        pytest.param(
            False,
            ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_train_epoch_end"],
            id="no_grad-other_hooks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            True,
            ["on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end"],
            id="grad-other_hooks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_model_called_from_a_callback_sees_current_weights_and_changes_nothing(
    kind: Kind, with_grad: bool, hooks: list[str]
) -> None:
    steps, accumulate = 2, 2
    batches = make_token_batches(steps * accumulate * WORLD)

    def check(hook: str, models: list[nn.Module], norm: float) -> None:
        module, callback = make_language_model(), CallsModel(hook, with_grad)
        loader = make_loader(batches)
        trainer = kind.make_trainer(
            accumulate_grad_batches=accumulate,
            gradient_clip_val=0.5,
            val_check_interval=4,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            callbacks=[callback],
        )
        trainer.fit(module, loader, loader)
        assert callback.results, "never called"
        for step, logits, generated in callback.results:
            torch.testing.assert_close(logits, models[step](PROMPT).logits)
            assert torch.equal(generated, generate(models[step]))
        assert trainer.callback_metrics["train/gradient_norm"].item() == pytest.approx(norm, rel=1e-4)
        assert_same_weights(module.model, models[-1])

    def run() -> None:
        models, norm = train_language_model_alone(batches, steps, accumulate * WORLD)
        for hook in hooks:
            try:
                check(hook, models, norm)
            except AssertionError as error:
                raise AssertionError(f"{hook}: {error}") from error

    kind.run(run, WORLD)


@fast_under("fsdp2")
def test_model_called_after_fit(kind: Kind) -> None:
    batches = make_token_batches(2 * WORLD)

    def run() -> None:
        module = make_language_model()
        kind.make_trainer(gradient_clip_val=0.5).fit(module, make_loader(batches))
        expected = train_language_model_alone(batches, 2, WORLD)[0][-1]
        with torch.no_grad():
            torch.testing.assert_close(module.model(PROMPT).logits, expected(PROMPT).logits)
            torch.testing.assert_close(module(PROMPT), expected(PROMPT).logits)
        assert torch.equal(generate(module.model), generate(expected))
        assert_same_weights(module.model, expected)
        kind.make_trainer().validate(module, make_loader(batches), verbose=False)
        kind.make_trainer().fit(module, make_loader(batches))

    kind.run(run, WORLD)


@fast_under("fsdp2", "megatron_fsdp")
def test_reducing_a_parameter_leaves_it_as_it_is(kind: Kind) -> None:
    class Reduces(Regressor):
        def on_fit_start(self) -> None:
            for op in ("sum", "mean"):
                self.reduced = self.trainer.strategy.reduce(self.head.bias, reduce_op=op)

    def run() -> None:
        for flags in ({}, kind.flags_without_sharding):
            module, expected = Reduces(), Regressor()
            kind.make_trainer(flags, max_steps=1).fit(module, make_loader(make_batches(WORLD)))
            torch.testing.assert_close(module.reduced, expected.head.bias.detach())
            train_alone(expected, make_batches(WORLD), steps=1)
            assert_same_weights(module, expected)

    kind.run(run, WORLD)


class Quantised(Tensor):
    """Stands for states that an optimizer keeps in a format of its own."""


class KeepsSubclasses(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["square"] = torch.zeros(4).as_subclass(Quantised)
        return loss


class UsesSubclasses(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KeepsSubclasses(self.parameters(), lr=0.1)


@pytest.mark.guarantees("subclassed-states")
@fast_under("fsdp2")
def test_states_that_are_tensor_subclasses_are_refused_in_the_first_step(kind: Kind) -> None:
    def run() -> None:
        trainer = kind.make_trainer()
        with pytest.raises(ValueError, match=r"KeepsSubclasses keeps 'square' of .* as .*Quantised: opt"):
            trainer.fit(UsesSubclasses(), make_loader(make_batches(2 * WORLD)))
        assert trainer.global_step <= 1

    kind.run(run, WORLD)


class NoOptimizer(Regressor):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.guarantees("modules-without-an-optimizer")
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_module_without_an_optimizer_runs_saves_and_goes_on(kind: Kind, tmp_path: Path) -> None:
    def run() -> None:
        loader = make_loader(make_batches(2 * WORLD))
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
        trainer = kind.make_trainer(max_steps=1, callbacks=[checkpoint], enable_checkpointing=True)
        trainer.fit(NoOptimizer(), loader)
        module = NoOptimizer()
        trainer = kind.make_trainer(max_steps=2)
        trainer.fit(module, loader, ckpt_path=tmp_path / "last.ckpt")
        assert trainer.global_step == 2
        assert_same_weights(module, Regressor())

    kind.run(run, WORLD)


@pytest.mark.guarantees("inference-mode")
@fast_under("fsdp2", "megatron_fsdp")
def test_an_evaluation_in_inference_mode_leaves_a_module_that_can_be_trained(kind: Kind, tmp_path: Path) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, loader = Regressor(), make_loader(batches)
        with torch.inference_mode():
            (metrics,) = kind.make_trainer().test(module, loader, verbose=False)
        loss = sum(Regressor().loss(batch).item() for batch in batches) / len(batches)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        trainer = kind.make_trainer()
        trainer.fit(module, loader)
        expected = Regressor()
        train_alone(expected, batches)
        assert_same_weights(module, expected)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        other = Regressor()
        with torch.inference_mode():
            kind.make_trainer().validate(other, loader, ckpt_path=tmp_path / "x.ckpt", verbose=False)
        assert_same_weights(other, expected)

    kind.run(run, WORLD)


class WithoutSteps(Regressor):
    validation_step = test_step = None


@pytest.mark.guarantees("steps-that-are-none")
@fast_under("fsdp2")
def test_steps_that_are_none_are_no_steps(kind: Kind) -> None:
    def run() -> None:
        module, loader = WithoutSteps(), make_loader(make_batches(WORLD))
        kind.make_trainer(max_steps=1).fit(module, loader)
        (prediction,) = kind.make_trainer().predict(module, loader)
        assert prediction.shape == (len(loader.dataset[0]["inputs"]), 1)
        kind.make_trainer(max_steps=1).fit(module, loader, loader)
        with pytest.raises(MisconfigurationException, match="No `test_step"):
            kind.make_trainer().test(module, loader)

    kind.run(run, WORLD)


class FSDPNet(Regressor):
    """A user's own class that is called like those which FSDP2 makes."""


@pytest.mark.guarantees("classes-called-fsdp")
def test_a_module_whose_class_is_called_like_those_of_fsdp2_is_logged_under_its_name(
    kind: Kind, tmp_path: Path
) -> None:
    def run() -> None:
        trainer = kind.make_trainer(max_steps=1, logger=CSVLogger(tmp_path))
        trainer.fit(FSDPNet(), make_loader(make_batches(WORLD)))
        trainer.fit(FSDPNet(), make_loader(make_batches(WORLD)))

    kind.run(run, WORLD)
    (hyperparameters,) = tmp_path.rglob("hparams.yaml")
    assert f"{FSDPNet.__module__}.FSDPNet" in hyperparameters.read_text()


class Images(UserModule):
    """A small convolutional network with batch norms, of which every step updates the statistics."""

    seed = 0

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


@pytest.mark.guarantees("running-statistics")
@fast_under("fsdp2")
def test_running_statistics_are_those_without_activation_checkpointing(kind: Kind) -> None:
    samples = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def train(mode: Any) -> tuple[dict[str, Tensor], float]:
        module, loader = Images(), DataLoader(samples[dist.get_rank() :: 2], batch_size=2)
        trainer = kind.make_trainer({"activation_checkpointing": mode}, max_steps=4)
        trainer.fit(module, loader, loader)
        return whole(module.state_dict()), trainer.callback_metrics["loss"].item()

    def run() -> None:
        expected, loss = train(False)
        assert expected["blocks.0.1.num_batches_tracked"] == 4
        for mode in ("full", "selective"):
            actual, actual_loss = train(mode)
            assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
            assert actual_loss == loss

    kind.run(run, 2)


class Centres(UserModule):
    """Trains on inputs minus their running mean, which every rank updates from its own batches."""

    seed = 0

    def build(self) -> None:
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("direction", torch.ones(1, dtype=torch.complex64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(batch.mean(0), 0.3)
            self.count += int(self.global_rank == 0)
            self.direction *= 1j + self.global_rank
        return self.layer(batch - self.mean).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


@fast_under("fsdp2")
@pytest.mark.filterwarnings("ignore")
def test_buffers_that_training_reads_are_those_of_rank_0_however_often_it_is_interrupted(
    kind: Kind, tmp_path: Path
) -> None:
    samples = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))

    def run(make_trainer: Callable[..., pl.Trainer], options: dict[str, Any]) -> dict[str, Tensor]:
        module, loader = Centres(), DataLoader(samples[dist.get_rank() :: 2], batch_size=4)
        trainer = make_trainer(max_steps=6, **options)
        trainer.fit(module, loader, loader)
        trainer.save_checkpoint(tmp_path / "x.ckpt")  # rank 0's last updates, for all ranks
        return whole(module.state_dict())

    never, often = {"limit_val_batches": 0}, {"val_check_interval": 2}
    lightnings = partial(make_trainer, LightningDDPStrategy(broadcast_buffers=True))
    expected = run_ranks(run, 2, lightnings, never)[0]
    for options in (never, often):
        for actual in kind.run(run, 2, partial(kind.make_trainer, kind.flags_without_layers), options):
            for name, value in expected.items():
                torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=f"{name}, {options}")


@fast_under("fsdp2")
def test_a_metric_counts_each_batch_once(kind: Kind) -> None:
    def run() -> None:
        trainer = kind.make_trainer()
        trainer.validate(CountsSamples(), make_loader(make_batches(4)), verbose=False)
        assert trainer.callback_metrics["batches"] == 4

    kind.run(run, WORLD)


# ---------------------------------------------------------------------- what hooks and metrics do with weights

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_end",
)


class ReadsParameters(pl.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        for hook in HOOKS:
            setattr(self, hook, self.read)

    def read(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        weights = whole(dict(module.named_parameters()))
        self.norms.append(sum(weight.square().sum().item() for weight in weights.values()))


@fast_under("fsdp2")
def test_parameters_can_be_read_in_every_hook(kind: Kind) -> None:
    batches = make_batches(4 * WORLD)

    def run() -> None:
        module, expected, callback = Regressor(), Regressor(), ReadsParameters()
        loader = make_loader(batches)
        options = {"accumulate_grad_batches": 2, "max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1}
        kind.make_trainer(callbacks=[callback], **options).fit(module, loader, loader)
        train_alone(expected, batches, window=2 * WORLD)
        assert_same_weights(module, expected)
        assert all(norm > 0 for norm in callback.norms)

    kind.run(run, WORLD)


class ValidatesWithHalf(pl.Callback):
    """Exchanges weights for the time of a validation, as averaging callbacks do."""

    @torch.no_grad()
    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.own = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        for parameter in module.parameters():
            parameter.data.copy_(parameter * 0.5)

    @torch.no_grad()
    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, parameter in module.named_parameters():
            parameter.data.copy_(self.own[name])


@fast_under("fsdp2", "megatron_fsdp")
def test_weights_exchanged_for_validation_are_validated_and_come_back(kind: Kind) -> None:
    batches = make_batches(3 * WORLD)

    def run() -> None:
        module, expected = Regressor(), Regressor()
        trainer = kind.make_trainer(callbacks=[ValidatesWithHalf()], max_steps=3, val_check_interval=1)
        trainer.fit(module, make_loader(batches), make_loader(batches))
        train_alone(expected, batches, steps=3)
        assert_same_weights(module, expected)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter.mul_(0.5)
        loss = sum(map(expected.loss, batches)) / len(batches)
        torch.testing.assert_close(trainer.callback_metrics["loss"], loss.detach())

    kind.run(run, WORLD)


class ScoresByNetwork(Metric):
    """As perceptual metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(WIDTH, 1)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, inputs: Tensor) -> None:
        with torch.no_grad():
            self.total += self.network(inputs).sum()

    def compute(self) -> Tensor:
        return self.total


class Scored(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.score = ScoresByNetwork()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.score.update(batch["inputs"])
        self.log("score", self.score)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer([p for name, p in self.named_parameters() if not name.startswith("score.")])


@fast_under("fsdp2", "megatron_fsdp")
def test_a_metric_may_hold_a_network(kind: Kind) -> None:
    batches = make_batches(2 * WORLD)

    def run() -> None:
        module, expected = Scored(), Scored()
        trainer = kind.make_trainer(kind.flags_for_unused)
        trainer.fit(module, make_loader(batches), make_loader(batches))
        for batch in batches:
            expected.score.update(batch["inputs"])
        torch.testing.assert_close(trainer.callback_metrics["score"], expected.score.total)
        train_alone(expected, batches, optimizer=lambda parameters: expected.configure_optimizers())
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


# ---------------------------------------------------------------------- windows that end early


class EndsEarly(Regressor):
    """Stops, or fails, behind the first micro-batch of a window."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def on_train_batch_end(self, *args: Any) -> None:
        if self.fails:
            raise RuntimeError("early")
        self.trainer.should_stop = True


ENDS = [("fsdp2", False), ("fsdp2", True), ("ddp", False), ("ddp", True), ("megatron_fsdp", True)]


@pairs("fails", (False, True), fast=ENDS)
def test_a_window_that_ended_early_leaves_nothing_behind(kind: Kind, fails: bool) -> None:
    batches = make_batches(4 * WORLD)

    def run() -> None:
        module, expected = EndsEarly(fails), Regressor()
        with pytest.raises(RuntimeError, match="early") if fails else nullcontext():
            kind.make_trainer(max_steps=1, accumulate_grad_batches=2).fit(module, make_loader(batches))
        module.on_train_batch_end = lambda *args: None
        kind.make_trainer(accumulate_grad_batches=2).fit(module, make_loader(batches))
        train_alone(expected, batches, window=2 * WORLD)
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


def test_zero_grad_drops_what_was_not_yet_synchronised(kind: Kind) -> None:
    batches = make_batches(6 * WORLD)

    def run() -> None:
        for flags in (kind.flags_without_layers, kind.flags_without_sharding):
            module, expected = ThrowsAway(), ThrowsAway()
            kind.make_trainer(flags).fit(module, make_loader(batches))
            train_alone(expected, [*batches[WORLD : 3 * WORLD], *batches[4 * WORLD :]], window=2 * WORLD)
            assert_same_weights(module, expected)

    kind.run(run, WORLD)


@fast_under("fsdp2", "ddp")
def test_a_graph_of_a_sharded_module_is_refused(kind: Kind, tmp_path: Path) -> None:
    class HasExample(Regressor):
        example_input_array = torch.zeros(2, WIDTH)

    def run() -> None:
        logger = TensorBoardLogger(tmp_path, log_graph=True)
        error = pytest.raises(ValueError, match=r"TensorBoardLogger\(log_graph=True\) traces the module on one rank")
        with error if kind.shards else nullcontext():
            kind.make_trainer(logger=logger, max_steps=1).fit(HasExample(), make_loader(make_batches(WORLD)))

    kind.run(run, WORLD)


class Embeds(Regressor):
    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + self.table(torch.tensor([1])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@fast_under("fsdp2", "ddp")
def test_sparse_gradients_are_refused_where_they_would_be_sharded(kind: Kind) -> None:
    def run() -> None:
        error = pytest.raises(
            ValueError, match="reduces dense gradients, but the gradients of the embeddings table are sparse"
        )
        with error if kind.shards else nullcontext():
            kind.make_trainer(max_steps=1).fit(Embeds(), make_loader(make_batches(WORLD)))

    kind.run(run, WORLD)


@fast_under("fsdp2")
def test_steps_that_are_none_end_an_accumulation_of_one_process(kind: Kind) -> None:
    """What came before is stepped with; several ranks are refused by Lightning."""

    class LeavesOut(Regressor):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    batches = make_batches(6)

    def run() -> None:
        module, expected = LeavesOut(), Regressor()
        kind.make_trainer(accumulate_grad_batches=2, max_steps=3).fit(module, make_loader(batches))
        optimizer = make_optimizer(expected.parameters())
        for window in (batches[:1], batches[3:4], batches[4:]):
            optimizer.zero_grad()
            (sum(expected.loss(batch) for batch in window) / 2).backward()
            optimizer.step()
        assert_same_weights(module, expected)

    kind.run(run, 1)


# ---------------------------------------------------------------------- manual optimisation


@pytest.mark.guarantees("clipping-and-optimizers")
@pairs("accumulate", (1, 2), fast=[("fsdp2", 1), ("fsdp2", 2), ("ddp", 2), ("megatron_fsdp", 1)])
def test_two_optimizers_that_are_stepped_by_hand(kind: Kind, accumulate: int) -> None:
    batches = make_batches(3 * accumulate * WORLD)

    def run() -> None:
        for order in ("generator, discriminator", "discriminator, generator"):
            module, expected = Gan(accumulate, order), Gan(accumulate, order)
            trainer = kind.make_trainer(kind.flags_for_unused | kind.flags_without_layers, max_steps=6)
            if not kind.several_optimizers:
                with pytest.raises(ValueError, match=r"`configure_optimizers` returned SGD, SGD.*Return one"):
                    trainer.fit(module, make_loader(batches))
                return
            trainer.fit(module, make_loader(batches))
            expected.train_alone(batches)
            torch.testing.assert_close(module.gradients, expected.gradients)
            assert_same_weights(module, expected)

    kind.run(run, WORLD)


def test_an_optimizer_that_is_stepped_by_hand(kind: Kind) -> None:
    batches = make_batches(6 * WORLD)

    def run() -> None:
        module, expected = ByHand(), ByHand()
        kind.make_trainer(max_steps=3).fit(module, make_loader(batches))
        clip = partial(nn.utils.clip_grad_norm_, max_norm=0.05)
        train_alone(expected, batches, steps=3, window=2 * WORLD, clip=clip)
        assert_same_weights(module, expected)

    kind.run(run, WORLD)


# ---------------------------------------------------------------------- numbers


PARITIES: dict[str, tuple[int, dict[str, Any]]] = {
    "1-32-true": (1, {"precision": "32-true", "accumulate": 3, "clip": 0.1, "tied": False, "meta": True}),
    "2-32-true": (2, {"precision": "32-true", "accumulate": 1, "clip": 0.1, "tied": True, "meta": False}),
    "3-32-true": (3, {"precision": "32-true", "accumulate": 3, "clip": None, "tied": True, "meta": True}),
    "2-bf16-mixed": (2, {"precision": "bf16-mixed", "accumulate": 1, "clip": 0.1, "tied": True, "meta": False}),
    "2-bf16-true": (2, {"precision": "bf16-true", "accumulate": 3, "clip": None, "tied": False, "meta": False}),
}
PARITY_CELLS = {
    f"{kind}-{name}": (STRATEGIES[kind], name)
    for kind, name in itertools.product(STRATEGIES, PARITIES)
    if kind != "fsdp2" or name == "2-bf16-mixed"  # test_parity.py has the others
}
PARITY_MATRIX = Matrix(
    "parity of strategies",
    {
        cell: {"strategy": kind.strategy.__name__, "ranks": PARITIES[name][0], **PARITIES[name][1]}
        for cell, (kind, name) in PARITY_CELLS.items()
    },
    fast=["fsdp2-2-bf16-mixed", "ddp-2-bf16-mixed"],
)


@pytest.mark.guarantees("float32-losses", "float32-gradients")
@pytest.mark.parametrize(("kind", "name"), PARITY_MATRIX.list_parameters(PARITY_CELLS))
def test_a_language_model_has_the_numbers_of_one_process(kind: Kind, name: str) -> None:
    world_size, options = PARITIES[name]

    def run() -> None:
        check_parity(make_case("llama", **options, strategy_class=kind.strategy))

    kind.run(run, world_size)


WINDOWS = {
    f"{kind}-{ranks}-{accumulate}-{clip}": {"strategy": kind, "ranks": ranks, "accumulate": accumulate, "clip": clip}
    for kind, ranks, (accumulate, clip) in itertools.product(STRATEGIES, (1, 2, 4), ((1, 0.5), (3, None), (3, 0.5)))
}
"""Cells: strategy, number of ranks, micro-batches of a step, and bound of clipping."""
WINDOW_MATRIX = Matrix(
    "twenty steps of strategies",
    WINDOWS,
    fast=["fsdp2-2-1-0.5", "ddp-2-3-None"],
    costs={name: cell["ranks"] * cell["accumulate"] for name, cell in WINDOWS.items()},
)


@pytest.mark.guarantees("float32-gradients")
@pytest.mark.parametrize("cell", WINDOW_MATRIX.list_parameters({name: (cell,) for name, cell in WINDOWS.items()}))
def test_twenty_steps_with_groups_and_a_schedule(cell: dict[str, Any]) -> None:
    kind, world_size = STRATEGIES[cell["strategy"]], cell["ranks"]
    accumulate, clip = cell["accumulate"], cell["clip"]
    batches = make_batches(20 * accumulate * world_size)

    def run() -> None:
        module, expected = Scheduled(), Scheduled()
        options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "max_steps": 20}
        kind.make_trainer(**options).fit(module, make_loader(batches))
        train_scheduled_alone(expected, batches, accumulate * world_size, clip)
        actual = whole(dict(module.named_parameters()))
        torch.testing.assert_close(actual, dict(expected.named_parameters()), atol=3e-4, rtol=0)

    kind.run(run, world_size)


# ---------------------------------------------------------------------- checkpoints


READERS = {
    f"{writer}-{reader}-{form}": {"writer": writer, "reader": reader, "format": form}
    for writer, reader, form in itertools.product(STRATEGIES, STRATEGIES, ("sharded", "full"))
}
READER_MATRIX = Matrix(
    "checkpoints of strategies",
    READERS,
    fast=["fsdp2-ddp-sharded", "ddp-ddp-sharded", "megatron_fsdp-megatron_fsdp-sharded"],
)


@pytest.mark.guarantees("same-behaviour")
@pytest.mark.parametrize("cell", READER_MATRIX.list_parameters({name: (cell,) for name, cell in READERS.items()}))
def test_every_strategy_goes_on_from_a_checkpoint_of_every_strategy(cell: dict[str, Any], tmp_path: Path) -> None:
    kind, reader = STRATEGIES[cell["writer"]], STRATEGIES[cell["reader"]]
    # every step reads the same, so that it does not matter where in an epoch a run goes on
    batches = 4 * make_batches(WORLD)

    def run() -> None:
        checkpoint = CheckpointConfig(format=cell["format"])
        trainer = kind.make_trainer(checkpoint=checkpoint)
        trainer.fit(Scheduled(), make_loader(batches))
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        module, expected = Scheduled(), Scheduled()
        with reader.context():
            trainer = reader.make_trainer(max_steps=4)
            trainer.fit(module, make_loader(batches), ckpt_path=tmp_path / "half.ckpt")
            actual = whole(dict(module.named_parameters()))
        train_scheduled_alone(expected, batches, WORLD, None)
        torch.testing.assert_close(actual, dict(expected.named_parameters()), atol=5e-5, rtol=0)
        assert trainer.global_step == 4

    kind.run(run, WORLD)


# ---------------------------------------------------------------------- from a file


@pytest.mark.guarantees("one-class-path")
@pytest.mark.slow
def test_one_file_trains_to_the_same_losses_with_any_class_path(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("In the beginning was the word, and the word was split over ranks.\n" * 40)
    options = {
        "seed_everything": 1,
        "trainer": {
            **{"accelerator": "cpu", "devices": WORLD, "max_steps": 4, "gradient_clip_val": 1.0, "num_nodes": 1},
            **{"accumulate_grad_batches": 2, "log_every_n_steps": 1},
            **{"val_check_interval": 8, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0},
            **{"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False},
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}},
        },
        "model": {
            "class_path": "lightning_fsdp2.CausalLM",
            "init_args": {"config": {**LLAMA, "vocab_size": 257, "eos_token_id": 256, "bos_token_id": None}},
        },
        "data": {
            "class_path": "lightning_fsdp2.TextDataModule",
            "init_args": {
                "path": str(tmp_path / "text.txt"),
                "sequence_length": 32,
                "batch_size": 1,
                "validation_fraction": 0.1,
            },
        },
    }

    def run(name: str) -> dict[str, float]:
        options["trainer"]["strategy"] = {"class_path": f"lightning_fsdp2.{STRATEGIES[name].strategy.__name__}"}
        file = tmp_path / f"{name}-{os.environ['RANK']}.yaml"
        file.write_text(yaml.safe_dump(options))
        cli = FSDP2CLI(["fit", "--config", str(file)])
        assert type(cli.trainer.strategy) is STRATEGIES[name].strategy
        return {key: value.item() for key, value in cli.trainer.callback_metrics.items()}

    first, *others = (STRATEGIES[name].run(run, WORLD, name, group=False)[0] for name in STRATEGIES)
    assert {"train/loss", "train/gradient_norm", "val/loss"} <= first.keys()
    for metrics in others:
        assert metrics == pytest.approx(first, rel=2e-5)


class Started(Exception):
    """Comes in place of the rest of a run, for which there are no devices."""


@pytest.mark.guarantees("bound-devices")
@fast_under("fsdp2")
@pytest.mark.parametrize("binds", [False, True])
def test_bind_device_id_gives_the_process_group_the_device_of_the_rank(
    kind: Kind, binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> dict[str, Any]:
        rank = int(os.environ["LOCAL_RANK"])
        given: dict[str, Any] = {}
        init_process_group = dist.init_process_group

        def start(backend: str, *, device_id: Any, **options: Any) -> None:
            given.update(options, backend=backend, device_id=device_id)
            init_process_group("gloo", **options)
            raise Started

        monkeypatch.setattr(dist, "init_process_group", start)
        monkeypatch.setattr(dist, "is_backend_available", lambda name: True)  # torch for CPUs has no NCCL
        monkeypatch.setattr(kind.strategy, "root_device", property(lambda self: torch.device("cuda", rank)))
        monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *args: None)
        with pytest.raises(Started):
            kind.make_trainer({"bind_device_id": binds}).fit(Regressor(), DataLoader(make_batches(2), batch_size=None))
        dist.barrier()
        return {name: given[name] for name in ("backend", "rank", "world_size", "device_id")}

    assert run_ranks(run, WORLD, group=False) == [
        {
            "backend": "cpu:gloo,cuda:nccl",
            "rank": rank,
            "world_size": WORLD,
            "device_id": torch.device("cuda", rank) if binds else None,
        }
        for rank in range(WORLD)
    ]


# ---------------------------------------------------------------------- wrong options


@fast_under("fsdp2")
def test_bind_device_id_is_refused_where_there_is_nothing_to_bind_to(kind: Kind) -> None:
    def run() -> None:
        trainer = kind.make_trainer({"bind_device_id": True})
        with pytest.raises(
            ValueError, match=r"config\.bind_device_id=True .* has the device cpu with the backend 'gloo'; leave"
        ):
            trainer.fit(Regressor(), DataLoader(make_batches(2), batch_size=None))
        assert not dist.is_initialized()

    kind.run(run, WORLD, group=False)


def test_arguments_of_a_wrong_type_are_refused_by_name(kind: Kind) -> None:
    name = kind.strategy.__name__
    with pytest.raises(TypeError, match=rf"{name}\(config=.* must be a {kind.config.__name__}"):
        kind.strategy(config="gloo")
    with pytest.raises(TypeError, match=rf"{name}\(checkpoint=.* must be a CheckpointConfig"):
        kind.strategy(checkpoint="full")
    with pytest.raises(TypeError, match=rf"{name}\(timeout=60\) must be a timedelta"):
        kind.strategy(timeout=60)


@pytest.mark.guarantees("configs-in-python")
def test_mappings_stand_for_configs_as_in_yaml(kind: Kind) -> None:
    strategy = kind.strategy(config={"backend": "gloo"}, checkpoint={"format": "full"})
    assert strategy.config == kind.config(backend="gloo")
    assert strategy.checkpoint_config == CheckpointConfig(format="full")
    with pytest.raises(TypeError, match=rf"^{kind.config.__name__} has no option 'backnd'; did you mean 'backend'\?$"):
        kind.strategy(config={"backnd": "gloo"})


def test_an_unknown_argument_gets_a_suggestion(kind: Kind) -> None:
    name = kind.strategy.__name__
    with pytest.raises(TypeError, match=rf"^{name} has no option 'timout'; did you mean 'timeout'\?$"):
        kind.strategy(timout=60)
    with pytest.raises(
        TypeError, match=rf"^{name} has no option 'autocast_dtype'; did you mean 'config\.autocast_dtype'"
    ):
        kind.strategy(autocast_dtype="bf16")


@pytest.mark.parametrize(("precision", "remedy"), [("16-true", "bf16-true"), ("64-true", "32-true")])
def test_other_precisions_are_refused_and_the_alternative_named(kind: Kind, precision: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=f'precision=.{precision}. is not supported.*"{remedy}"'):
        kind.make_trainer(precision=precision)


def test_a_module_of_another_strategy_is_refused(kind: Kind) -> None:
    (other,) = [other for other in STRATEGIES.values() if other is not kind][:1]

    def run() -> None:
        module, loader = Regressor(), make_loader(make_batches(4))
        kind.make_trainer().fit(module, loader)
        with pytest.raises(ValueError, match=f"with a {kind.config.__name__}, .* with a {other.config.__name__}\\."):
            other.make_trainer().validate(module, loader)

    kind.run(run, WORLD)

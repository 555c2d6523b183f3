"""Forms of LightningModules that people write, each trained or refused by name."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.mesh_runs import Case, ScalarLossModule, check_parity
from helpers.models import LLAMA, VOCABULARY, PlainTransformer, make_causal_lm, make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import WIDTH, Normalized, UserModule, make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_fsdp2 import token_mean_loss

Batch = dict[str, Tensor]


class Plain(UserModule):
    seed = 0

    def build(self) -> None:
        self.model = PlainTransformer()


class TokenMean(Plain):
    def __init__(self, *, manual: bool, micro_batches: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.micro_batches = micro_batches

    def loss(self, batch: Batch) -> Tensor:
        return token_mean_loss(self, self.model(batch["input_ids"]), batch["labels"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        is_last = (batch_idx + 1) % self.micro_batches == 0
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(loss)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        return None


class IgnoresClosures(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()


class StepsWithoutClosure(TokenMean):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return IgnoresClosures(self.parameters(), lr=0.1)


@pytest.mark.parametrize("manual_module", [TokenMean, pytest.param(StepsWithoutClosure, marks=pytest.mark.slow)])
def test_token_mean_under_manual_optimisation_is_that_of_automatic_optimisation(
    manual_module: type[TokenMean],
) -> None:
    def run(manual: bool) -> dict[str, Tensor]:
        module = (manual_module if manual else TokenMean)(manual=manual)
        batches = make_token_batches(8)[dist.get_rank() :: 2]
        accumulate = {} if manual else {"accumulate_grad_batches": 2}
        make_trainer(**accumulate).fit(module, DataLoader(batches, batch_size=None))
        return whole(module.model.state_dict())

    automatic, manual = run_ranks(run, 2, False)[0], run_ranks(run, 2, True)[0]
    for name, weight in automatic.items():
        torch.testing.assert_close(manual[name], weight, rtol=1e-6, atol=1e-7, msg=name)


class TokenMeanByClosure(TokenMean):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))

        optimizer.step(closure=closure)


def test_token_mean_in_the_closure_of_a_step_is_that_of_automatic_optimisation() -> None:
    def run(module: TokenMean) -> dict[str, Tensor]:
        batches = make_token_batches(4)[dist.get_rank() :: 2]
        make_trainer().fit(module, DataLoader(batches, batch_size=None))
        return whole(module.model.state_dict())

    automatic, manual = (
        run_ranks(run, 2, module)[0] for module in (TokenMean(manual=False), TokenMeanByClosure(manual=True))
    )
    torch.testing.assert_close(manual, automatic, rtol=1e-6, atol=1e-7)


def test_an_aborted_run_leaves_no_tokens_behind() -> None:
    class Aborts(pl.Callback):
        def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            raise RuntimeError("aborted")

    def run(aborts: bool) -> float:
        module = TokenMean(manual=False)
        loader = DataLoader(make_token_batches(4, ragged=False), batch_size=None)
        if aborts:
            with pytest.raises(RuntimeError, match="aborted"):
                make_trainer(accumulate_grad_batches=2, callbacks=[Aborts()]).fit(module, loader)
            module.zero_grad()
        trainer = make_trainer(max_steps=1)
        trainer.fit(module, loader)
        return float(trainer.strategy.token_mean.tokens)

    assert run_ranks(run, 1, True) == run_ranks(run, 1, False) == [2 * 11]


class OwnParameter(UserModule):
    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(4))
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.manual_backward(self.scale.sum())


def test_own_parameters_under_manual_optimisation_are_refused_by_name() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"scale belong directly to the LightningModule.*child module"):
            make_trainer().fit(OwnParameter(), DataLoader(make_token_batches(2), batch_size=None))

    run_ranks(run, 2)


class Queries(Plain):
    """Holds a ParameterList, and steps that do not ask for the batch's index."""

    def build(self) -> None:
        super().build()
        self.scales = nn.ParameterList([torch.ones(VOCABULARY), torch.full((VOCABULARY,), 2.0)])

    def training_step(self, batch: Batch) -> Tensor:
        logits = self.model(batch["input_ids"])
        for scale in self.scales:
            logits = logits * scale
        return logits.square().mean()

    def predict_step(self, batch: Batch) -> Tensor:
        return batch["input_ids"][:, 0]


def test_parameter_list_and_steps_without_batch_idx() -> None:
    batches = make_token_batches(5)

    def run() -> tuple[dict[str, Tensor], list[Tensor]]:
        module = Queries()
        trainer = make_trainer(max_steps=1)
        trainer.fit(module, DataLoader(batches[dist.get_rank() : dist.get_rank() + 1], batch_size=None))
        weights = whole(module.state_dict())
        return weights, trainer.predict(module, DataLoader(batches[dist.get_rank() :: 2], batch_size=None))

    alone = Queries()
    sum(alone.training_step(batch) / 2 for batch in batches[:2]).backward()
    alone.configure_optimizers().step()
    results = run_ranks(run, 2)
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(results[0][0][name], weight, rtol=1e-5, atol=1e-6, msg=name)
    for rank, (_, predictions) in enumerate(results):
        torch.testing.assert_close(predictions, [batch["input_ids"][:, 0] for batch in batches[rank::2]])


def loss_on_hidden_states(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """What losses that never hold all logits do: the head's weight is used, the head is not called."""
    hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state[:, :-1]
    logits = nn.functional.linear(hidden, model.lm_head.weight)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()), 1


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True], ids=["untied", "tied"])
def test_loss_on_hidden_states_and_the_weight_of_the_head(tied: bool) -> None:
    def make_model() -> nn.Module:
        return make_causal_lm({**LLAMA, "tie_word_embeddings": tied})

    case = Case(
        make_module=lambda: ScalarLossModule(make_model, loss_on_hidden_states),
        make_model=make_model,
        loss=loss_on_hidden_states,
        batches=make_token_batches(3 * 2 * 2),
        accumulate=2,
    )
    run_ranks(check_parity, 2, case)


class UnusedAndInTurn(Plain):
    """A head that never runs and two that take turns, so that no micro-batch runs every unit."""

    def build(self) -> None:
        super().build()
        self.heads = nn.ModuleList(nn.Linear(VOCABULARY, 3) for _ in range(3))

    def loss(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.heads[batch_idx // 2 % 2](self.model(batch["input_ids"])).square().mean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-mixed"])
def test_accumulation_with_units_that_do_not_run(precision: Any) -> None:
    batches = make_token_batches(16)

    def run() -> dict[str, Tensor]:
        module = UnusedAndInTurn()
        trainer = make_trainer(accumulate_grad_batches=4, precision=precision)
        trainer.fit(module, DataLoader(batches[dist.get_rank() :: 2], batch_size=None))
        return whole(module.state_dict())

    alone = UnusedAndInTurn()
    optimizer = alone.configure_optimizers()
    for step in range(2):
        optimizer.zero_grad()
        window = range(4 * step, 4 * step + 4)
        sum(alone.loss(batches[2 * index + rank], index) / 8 for index in window for rank in range(2)).backward()
        optimizer.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 0.02, "atol": 0.02}
    for name, weight in run_ranks(run, 2)[0].items():
        torch.testing.assert_close(weight, alone.state_dict()[name], **tolerance, msg=name)


def test_attributes_of_parameters_outlive_sharding_and_hooks_on_them_are_refused() -> None:
    def run() -> None:
        module = UnusedAndInTurn()
        module.model.norm.weight._no_weight_decay = True
        module.model.blocks[1].mlp[0].bias._group = "late"
        loader = DataLoader(make_token_batches(4), batch_size=None)
        make_trainer().fit(module, loader)
        assert module.model.norm.weight._no_weight_decay
        assert module.model.blocks[1].mlp[0].bias._group == "late"
        hooked = UnusedAndInTurn()
        hooked.model.head.weight.register_hook(lambda gradient: gradient * 0)
        with pytest.raises(ValueError, match=r"model\.head\.weight have hooks"):
            make_trainer().fit(hooked, loader)

    run_ranks(run, 2)


class FeatureDistance(Metric):
    """Like FID: a metric with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(VOCABULARY, 4), nn.Linear(4, 4))
        self.add_state("total", torch.zeros(4), dist_reduce_fx="sum")

    def update(self, logits: Tensor) -> None:
        with torch.no_grad():
            self.total += self.network(logits).sum((0, 1))

    def compute(self) -> Tensor:
        return self.total.sum()


class Measures(TokenMean):
    def __init__(self) -> None:
        super().__init__(manual=False)
        self.distance = FeatureDistance()
        self.more = MetricCollection({"first": FeatureDistance()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        self.distance.update(logits)
        self.more.update(logits)
        self.log("distance", self.distance)
        return token_mean_loss(self, logits, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def test_a_network_inside_a_metric_stays_whole() -> None:
    batches = make_token_batches(4, ragged=False)

    def run() -> float:
        module = Measures()
        trainer = make_trainer(max_steps=2)
        trainer.fit(module, DataLoader(batches[dist.get_rank() :: 2], batch_size=None))
        assert isinstance(module.model.head.weight, DTensor)
        return module.distance.compute().item()

    assert run_ranks(run, 2)[0] == pytest.approx(run_ranks(run, 1)[0])


class LogsStatistics(Normalized):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.net[1].running_mean.sum().clone())


def test_running_statistics_are_those_of_rank_0_in_evaluation_and_checkpoints(tmp_path: Path) -> None:
    samples = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))

    def run() -> tuple[Tensor, float, Tensor]:
        module = LogsStatistics()
        trainer = make_trainer(max_steps=2)
        trainer.fit(module, DataLoader(samples[dist.get_rank() :: 2], batch_size=4))
        own = module.net[1].running_mean.clone()
        trainer.validate(module, DataLoader(samples, batch_size=4), verbose=False)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        return own, trainer.callback_metrics["mean"].item(), module.net[1].running_mean

    (first, *_), (second, *_) = results = run_ranks(run, 2)
    assert not torch.equal(first, second)
    for _, logged, kept in results:
        assert logged == pytest.approx(first.sum().item(), rel=1e-6)
        assert torch.equal(kept, first)


def test_synchronised_batch_norm_is_refused_where_torch_has_none() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"sync_batchnorm=True\): torch's SyncBatchNorm does not run on a CPU"):
            make_trainer(sync_batchnorm=True).fit(Normalized(), DataLoader(torch.randn(8, WIDTH), batch_size=4))

    run_ranks(run, 1)

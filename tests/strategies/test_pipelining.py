"""Seams of pipeline parallelism with the Trainer: own losses, logging, evaluation, batches, refusals and counts."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.collectives import CountsStep
from helpers.mesh_runs import Case, MetricsLogger, check_parity, whole_of_stages
from helpers.models import make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE
from helpers.pipelines import CONFIGS, LoggingModule
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from helpers.user_modules import make_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import T5Config, T5ForConditionalGeneration

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.callbacks import GradientNorm, NaNGuard
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.strategies.pipelining import Pipelining

PP2: dict[str, Any] = {"pp_size": 2}


def z_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """A mean cross entropy with a penalty on the logits, as users write them on ``.logits``."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    return loss + 1e-2 * logits.logsumexp(-1).square().mean(), 1


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss that the model itself computes."""
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss, 1


@pytest.mark.guarantees("no-stage-class", "losses-of-ones-own")
@pytest.mark.parametrize(
    ("loss", "sizes"),
    [
        (z_loss, {"pp_size": 2}),
        pytest.param(own_loss, {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(own_loss, {"pp_size": 2}, marks=pytest.mark.release),
        pytest.param(z_loss, {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.release),
    ],
)
def test_losses_of_ones_own_train_as_in_one_process(loss: Callable[..., Any], sizes: dict[str, int]) -> None:
    def run() -> None:
        torch.manual_seed(1)
        make_model = partial(make_causal_lm, CONFIGS["llama"])
        check_parity(
            Case(
                make_module=partial(LoggingModule, make_model, loss),
                make_model=make_model,
                loss=loss,
                batches=make_token_batches(6, size=4),
                clip=0.1,
                strategy=sizes,
            )
        )

    run_ranks(run, sizes["pp_size"] * sizes.get("tp_size", 1))


def collect_batches(count: int, rows: int) -> list[dict[str, Tensor]]:
    """Batches of all sizes: the last one of an epoch has a single row."""
    batches = make_token_batches(count, size=rows)
    batches[-1] = {name: tensor[:1] for name, tensor in batches[-1].items()}
    return batches


def evaluate_alone(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[float, list[Tensor]]:
    """Mean loss per label token, and the log-probability of each row's labels, computed in one process."""
    total, count, rows = 0.0, 0, []
    with torch.no_grad():
        for batch in batches:
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
            labels = batch["labels"][:, 1:]
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
            rows.append(-losses.sum(1))
            total, count = total + losses.sum().item(), count + (labels != -100).sum().item()
    return total / count, rows


@pytest.mark.guarantees("evaluation-of-stages")
@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        pytest.param({"pp_size": 2}, {}, marks=pytest.mark.slow),
        ({"pp_size": 2}, {"pp_schedule": "interleaved_1f1b", "reshard_after_forward": True}),
        pytest.param({"pp_size": 2, "tp_size": 2}, {"sequence_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_validation_and_predictions_are_those_of_one_process(sizes: dict[str, int], flags: dict[str, Any]) -> None:
    batches = collect_batches(4, rows=6)

    def run() -> None:
        torch.manual_seed(1)
        module = CausalLM(config=CONFIGS["qwen3"])
        module.model = make_causal_lm(CONFIGS["qwen3"])
        expected, rows = evaluate_alone(module.model.eval(), batches)
        trainer = make_trainer(FSDP2Strategy(**sizes, config=FSDP2Config(**flags)))
        loader = DataLoader(batches, batch_size=None)
        (metrics,) = trainer.validate(module, loader, verbose=False)
        assert abs(metrics["val/loss"] - expected) <= 1e-5
        predictions = trainer.predict(module, loader)
        for prediction, row, batch in zip(predictions, rows, batches, strict=True):
            torch.testing.assert_close(prediction["log_probability"], row, rtol=1e-5, atol=1e-5)
            assert prediction["tokens"].tolist() == (batch["labels"][:, 1:] != -100).sum(1).tolist()

    run_ranks(run, sizes["pp_size"] * sizes.get("tp_size", 1))


def test_rows_that_are_added_for_other_ranks_have_no_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_token_batches(1, size=2)
    # as if another data parallel rank read three rows
    monkeypatch.setattr(Pipelining, "_find_rows", lambda self, rows: (3, rows))

    def run() -> None:
        torch.manual_seed(1)
        module = CausalLM(config=CONFIGS["llama"])
        module.model = make_causal_lm(CONFIGS["llama"]).eval()
        _, [expected] = evaluate_alone(module.model, batches)
        [predictions] = make_trainer(FSDP2Strategy(pp_size=2)).predict(module, DataLoader(batches, batch_size=None))
        torch.testing.assert_close(predictions["log_probability"], expected, rtol=1e-5, atol=1e-5)

    run_ranks(run, 2)


@pytest.mark.guarantees("evaluation-of-ones-own")
@pytest.mark.parametrize("sizes", [{"pp_size": 2}, pytest.param({"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow)])
def test_steps_of_ones_own_evaluate_on_all_ranks(sizes: dict[str, int]) -> None:
    batches = collect_batches(3, rows=4)

    def run() -> None:
        torch.manual_seed(1)
        module = LoggingModule(partial(make_causal_lm, CONFIGS["gpt2"]), own_loss)
        with torch.no_grad():
            module.model.eval()
            logits = [module.model(input_ids=batch["input_ids"]).logits for batch in batches]
            losses = [own_loss(module.model, batch)[0] for batch in batches]
        expected = sum(loss * len(batch["input_ids"]) for loss, batch in zip(losses, batches, strict=True)) / 9
        trainer = make_trainer(FSDP2Strategy(**sizes))
        loader = DataLoader(batches, batch_size=None)
        (metrics,) = trainer.validate(module, loader, verbose=False)
        assert abs(metrics["val/loss"] - expected) <= 1e-5
        torch.testing.assert_close(trainer.predict(module, loader), logits, rtol=1e-5, atol=1e-5)

    run_ranks(run, sizes["pp_size"] * sizes.get("tp_size", 1))


# ---------------------------------------------------------------------- refusals


OPT = {
    "model_type": "opt",
    "vocab_size": 101,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


class Module(LoggingModule):
    """A module of one's own around a small Llama."""

    def __init__(self, family: str = "llama") -> None:
        super().__init__(partial(make_causal_lm, CONFIGS[family]), own_loss)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class OwnZeroGrad(Module):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class WithLBFGS(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class WithTwoModels(Module):
    def __init__(self) -> None:
        super().__init__()
        self.reference = make_causal_lm(CONFIGS["llama"])


class EncoderDecoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=101)
        self.model = T5ForConditionalGeneration(config)

    training_step = Module.training_step
    configure_optimizers = Module.configure_optimizers


class ReturnsNone(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)


class CallsTwice(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(self.model, batch)[0] + self.loss(self.model, batch)[0]


class CallsNothing(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.model.lm_head.weight.sum() if isinstance(self.model.lm_head, nn.Linear) else torch.zeros(())


class LogsMetric(Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(self.model, batch)[0]
        self.mean(loss)
        self.log("mean", self.mean)
        return loss


class UpdatesMetric(Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = MeanMetric(), MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        self.early.update(batch["input_ids"].float())
        loss = self.loss(self.model, batch)[0]
        self.late.update(loss)
        return loss


class AsksForHiddenStates(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=batch["input_ids"], output_hidden_states=True).logits.sum()


class AsksForCache(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=batch["input_ids"], use_cache=True).logits.sum()


class SkipsLayers(LoggingModule):
    """A model that skips the layers of one stage, which the trace of its forward could not see."""

    def __init__(self, stage: int) -> None:
        super().__init__(partial(make_causal_lm, OPT), own_loss)
        self.stage = stage

    def on_train_start(self) -> None:
        if self.trainer.strategy.world.pipeline_rank == self.stage:  # type: ignore[attr-defined]
            self.model.model.decoder.layerdrop = 1.0


class LosesTheGraph(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(self.model, batch)[0].detach()


class AsksForRouterLogits(Module):
    def __init__(self) -> None:
        super().__init__("mixtral")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"], output_router_logits=True).loss


class TrimsBatches(Module):
    lengths = iter((12, 8))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(self.model, {"input_ids": batch["input_ids"][:, : next(self.lengths)]})[0]


class LogsWithLambda(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(self.model, batch)[0]
        self.log("largest", loss, reduce_fx=lambda values: values.max())
        return loss


class OptimisesFromWithin(Module):
    """Trains the last layer only, with an optimizer that knows nothing of stages."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        layers = self.model.model.layers
        self.model.requires_grad_(False)
        layers[-1].requires_grad_(True)
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad])


class GroupsByLayer(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [parameter]} for parameter in self.parameters()])


def cut(rows: int) -> list[dict[str, Tensor]]:
    return make_token_batches(2, size=rows)


@pytest.mark.guarantees("pipeline-limits", "refused-pipelines", "errors-on-every-rank")
@pytest.mark.parametrize(
    ("make_module", "flags", "batches", "message"),
    [
        (Manual, {}, cut(4), "pp_size: Manual optimises manually .* Use automatic optimisation"),
        (OwnBackward, {}, cut(4), "pp_size: OwnBackward overrides `backward`"),
        (OwnZeroGrad, {}, cut(4), "pp_size: OwnZeroGrad overrides `optimizer_zero_grad`"),
        (WithLBFGS, {}, cut(4), "LBFGS cannot step on the sharded parameters"),
        (WithTwoModels, {}, cut(4), r"WithTwoModels has 2 \(LlamaForCausalLM, LlamaForCausalLM\); use pp_size=1"),
        (EncoderDecoder, {}, cut(4), "encoder-decoder"),
        (Module, {"pp_layers_per_stage": [1, 2]}, cut(4), r"pp_layers_per_stage=\[1, 2\] adds up to 3"),
        (Module, {"pp_layers_per_stage": [1, 2, 1]}, cut(4), r"pp_layers_per_stage=\[1, 2, 1\] has 3 entries"),
        (
            Module,
            {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 3},
            cut(4),
            "needs 6 stages .*LlamaForCausalLM has 4 layers; use at most 4",
        ),
        (Module, {}, cut(1), "pp_size=2 divides the rows .* only one row"),
        (CausalLM, {}, cut(1), "pp_size=2 divides the rows .* only one row"),
        (Module, {"pp_microbatches": 3}, cut(4), "pp_microbatches=3 does not divide the 4 rows .*drop_last"),
        (GroupsByLayer, {}, cut(4), "`configure_optimizers` of GroupsByLayer makes other numbers of parameter groups"),
        (UpdatesMetric, {}, cut(4), "updates the metric 'late' after the model"),
    ],
)
def test_what_a_pipeline_cannot_train_is_refused(
    make_module: Callable[[], pl.LightningModule], flags: dict[str, Any], batches: Any, message: str
) -> None:
    with raises_on_all_ranks(ValueError, match=message):
        run_ranks(try_to_train, 2, make_module, flags, batches)


def try_to_train(make_module: Callable[[], pl.LightningModule], flags: dict[str, Any], batches: Any) -> None:
    module = CausalLM(config=CONFIGS["llama"]) if make_module is CausalLM else make_module()
    trainer = make_trainer(FSDP2Strategy(pp_size=2, config=FSDP2Config(**flags)), max_steps=1)
    trainer.fit(module, DataLoader(batches, batch_size=None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_module", "flags", "message"),
    [
        (ReturnsNone, {}, "`training_step` returned None as the loss of a micro-batch"),
        (CallsTwice, {}, "calls LlamaForCausalLM more than once"),
        (CallsNothing, {}, "the step did not run LlamaForCausalLM"),
        (LogsMetric, {}, r"`self.log\('mean', ...\)` in `training_step` gets a MeanMetric"),
        (LosesTheGraph, {}, "as the loss of a micro-batch, but the other stages wait for its gradient"),
        (AsksForRouterLogits, {}, "output_router_logits=True, but each rank has only"),
        (TrimsBatches, {"pp_microbatches": 2}, "A step must not change the length or the dtype of its micro-batch"),
        (AsksForCache, {}, "use_cache=True, but each rank has only the results"),
        (partial(SkipsLayers, 1), {}, "OPTForCausalLM skipped a layer, whose output the next one needs"),
        (partial(SkipsLayers, 0), {}, "OPTForCausalLM skipped a layer"),
        (LogsWithLambda, {}, r"`self.log\('largest', ..., reduce_fx=.* cannot be sent to the other stages"),
        (OptimisesFromWithin, {}, "of OptimisesFromWithin finds no trainable parameters"),
        (AsksForHiddenStates, {}, "output_hidden_states=True, but each rank has only"),
    ],
)
def test_what_one_stage_alone_sees_is_refused(
    make_module: Callable[[], pl.LightningModule], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(try_to_train, 2, make_module, flags, cut(4), patience=0)
    assert isinstance(caught.value.cause, ValueError)


# ---------------------------------------------------------------------- random numbers


class DrawsOnOneRank(pl.Callback):
    """Draws a random number on the first rank only, as user code may do by mistake."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            torch.rand(1)


class MasksTokens(Module):
    """Masks random tokens, as a denoising loss does, and writes down which; its model has dropout."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model = make_causal_lm({**CONFIGS["gpt2"], "resid_pdrop": 0.5})
        self.masks: list[Tensor] = []
        self.dropped: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        mask = torch.rand(batch["input_ids"].shape) < 0.3
        self.masks.append(mask)
        logits = self.model(input_ids=batch["input_ids"].masked_fill(mask, 3)).logits
        torch.rand(7)  # what only the last stage draws must not shift what the stages draw together
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())


def record_dropout(module: Any) -> None:
    """Record which elements the first dropout of each layer drops."""
    for layer in module.model.transformer.h:
        if hasattr(layer, "attn") and isinstance(layer.attn.resid_dropout, nn.Dropout):
            layer.attn.resid_dropout.register_forward_hook(lambda _, args, out: module.dropped.append(out[0] == 0))


@pytest.mark.guarantees("random-numbers-of-stages")
@pytest.mark.slow
def test_stages_draw_the_same_masks_and_other_dropout() -> None:
    def train() -> Any:
        pl.seed_everything(5, verbose=False)
        module = MasksTokens()
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=2, callbacks=[DrawsOnOneRank()])
        module.on_train_start = partial(record_dropout, module)  # type: ignore[method-assign]
        trainer.fit(module, DataLoader(make_token_batches(2, size=2), batch_size=None))
        return module, whole_of_stages(dict(module.named_parameters()), trainer)

    def run() -> None:
        (module, weights), (_, same) = train(), train()
        masks: list[Any] = [None, None]
        torch.distributed.all_gather_object(masks, torch.stack(module.masks))
        assert torch.equal(masks[0], masks[1])
        assert len({tuple(mask.flatten().tolist()) for mask in module.masks}) == len(module.masks) == 4
        dropped: list[Any] = [None, None]
        torch.distributed.all_gather_object(dropped, [drop for drop in module.dropped if drop.any()])
        first, second = dropped
        assert len(first) == len(second) == 8  # two layers of a stage, four micro-batches
        patterns = {tuple(drop.flatten().tolist()) for drop in (*first, *second)}
        assert len(patterns) == 16
        assert all(torch.equal(weight, same[name]) for name, weight in weights.items())

    run_ranks(run, 2)


# ---------------------------------------------------------------------- counts


class Counts(CausalLM):
    """Counts its training steps, and what they hand on."""

    steps = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.guarantees("stages-run-the-step", "steps-per-batch", "micro-batches-in-flight", "boundaries")
@pytest.mark.parametrize(
    ("sizes", "flags", "in_flight"),
    [
        ({"pp_size": 2}, {"pp_microbatches": 8}, [2, 1]),
        pytest.param({"pp_size": 4}, {"pp_microbatches": 8}, [4, 3, 2, 1], marks=pytest.mark.slow),
        pytest.param({"pp_size": 2}, {"pp_microbatches": 8, "pp_schedule": "gpipe"}, [8, 8], marks=pytest.mark.slow),
        pytest.param(
            {"pp_size": 2, "tp_size": 2},
            {"pp_microbatches": 4, "sequence_parallel": True},
            [2, 1],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_stage_runs_every_micro_batch_and_sends_only_hidden_states(
    sizes: dict[str, int], flags: dict[str, Any], in_flight: list[int]
) -> None:
    rows, length, width, micro_batches = 8, 12, 32, flags["pp_microbatches"]
    ranks, tp = sizes["pp_size"], sizes.get("tp_size", 1)

    def run() -> None:
        module = Counts(config=CONFIGS["llama"])
        trainer = make_trainer(FSDP2Strategy(**sizes, config=FSDP2Config(**flags)), max_steps=3)
        trainer.fit(module, DataLoader(make_token_batches(3, size=rows, length=length), batch_size=None))
        pipeline = get_pipeline(module)
        stage = pipeline.split.own_stages[0]
        assert module.steps == 3 * micro_batches
        assert pipeline.peak == in_flight[stage]
        # forward to the next stage, backward to the previous one; under sequence parallelism each rank its part
        neighbours = (stage > 0) + (stage < ranks - 1)
        assert pipeline.transfers.elements == 3 * neighbours * rows * length * width // tp

    run_ranks(run, ranks * tp)


@pytest.mark.guarantees("gathers-of-a-stage")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "micro_batches", "reductions"),
    [
        ({}, 8, 1),
        ({"pp_schedule": "interleaved_1f1b"}, 2, 1),
        ({"defer_fsdp_grad_sync": False}, 8, 8),
    ],
    ids=str,
)
def test_units_gather_and_reduce_once_per_step(flags: dict[str, Any], micro_batches: int, reductions: int) -> None:
    """Whatever the number of micro-batches; without deferral, the gradients are reduced in each of them."""

    def run() -> None:
        config = FSDP2Config(**flags, pp_microbatches=micro_batches)
        counts = CountsStep(1)
        trainer = make_trainer(FSDP2Strategy(pp_size=2, config=config), max_steps=2, callbacks=[counts])
        trainer.fit(CausalLM(config=CONFIGS["llama"]), DataLoader(make_token_batches(2, size=8), batch_size=None))
        units = 2 + 1  # two layers, and the embedding or the norm with the head
        assert counts.counter.collectives["all_gather"] == units
        assert counts.counter.collectives["reduce_scatter"] == reductions * units

    run_ranks(run, 4)


# ---------------------------------------------------------------------- callbacks and logs


@pytest.mark.guarantees("logs-of-stages")
@pytest.mark.slow
def test_callbacks_and_loggers_see_on_rank_0_what_the_last_stage_logs(tmp_path: Path) -> None:
    def run() -> None:
        torch.manual_seed(1)
        module = Module()
        module.model = make_causal_lm({**CONFIGS["llama"], "num_hidden_layers": 2})
        stopping = EarlyStopping("val/loss", patience=1, min_delta=100.0)
        checkpoint = ModelCheckpoint(tmp_path, monitor="val/loss", filename="{epoch}-{val/loss:.3f}")
        logger = MetricsLogger()
        trainer = make_trainer(
            FSDP2Strategy(**PP2),
            max_epochs=5,
            max_steps=-1,
            callbacks=[stopping, checkpoint],
            logger=logger,
            log_every_n_steps=1,
            enable_checkpointing=True,
        )
        batches = make_token_batches(1, size=4)
        trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))
        assert trainer.current_epoch == 2  # stopped, because the loss fell by less than the bound
        assert checkpoint.best_model_score is not None
        values: list[Any] = [None, None]
        own = (trainer.callback_metrics["train/loss"].item(), trainer.callback_metrics["val/loss"].item())
        torch.distributed.all_gather_object(values, own)
        assert values[0] == values[1]
        if trainer.is_global_zero:
            assert [row["train/loss"] for row in logger.history][-1] == values[0][0]

    run_ranks(run, 2)


@pytest.mark.guarantees("few-micro-batches")
def test_fewer_micro_batches_than_stages_run_with_a_warning_that_names_the_bubble() -> None:
    def run() -> None:
        config = FSDP2Config(pp_microbatches=1)
        trainer = make_trainer(FSDP2Strategy(pp_size=2, config=config), max_steps=1)
        module = CausalLM(config=CONFIGS["llama"])
        with (
            pytest.warns(UserWarning, match="pp_microbatches=1.*waits for 50% of the time")
            if trainer.is_global_zero
            else nullcontext()
        ):
            trainer.fit(module, DataLoader(make_token_batches(1, size=4), batch_size=None))

    run_ranks(run, 2)


@pytest.mark.guarantees("pipeline-limits")
def test_generate_and_calls_with_gradients_are_refused_by_name() -> None:
    def run() -> None:
        module = CausalLM(config=CONFIGS["llama"])
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=1)
        batches = make_token_batches(1, size=4)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        with pytest.raises(ValueError, match=r"LlamaForCausalLM.generate\(\) is not possible.*export_hf"):
            module.model.generate(batches[0]["input_ids"])
        with pytest.raises(ValueError, match="called with gradients outside of `training_step`"):
            module.model(input_ids=batches[0]["input_ids"])
        with torch.no_grad():
            assert module.model(input_ids=batches[0]["input_ids"]).logits.shape == (4, 12, 101)

    run_ranks(run, 2)


@pytest.mark.guarantees("rows-that-are-refused")
def test_ranks_with_other_numbers_of_rows_all_refuse_a_module_of_ones_own() -> None:
    def run() -> None:
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=1)
        rows = 3 if torch.distributed.get_rank() % 2 else 4
        with pytest.raises(ValueError, match="drop_last=True"):
            trainer.fit(Module(), DataLoader(make_token_batches(1, size=rows), batch_size=None))

    run_ranks(run, 4)


class WithHead(Module):
    """A module with a prompt before the model, and a normalised head of its own after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.prompt = nn.Embedding(101, 32)
        self.norm = nn.BatchNorm1d(101)
        self.head = nn.Linear(101, 3)

    def compute(self, input_ids: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(input_ids) + self.prompt(input_ids)
        logits = self.model(inputs_embeds=embedded).logits
        return self.head(self.norm(logits.mean(1))).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.compute(batch["input_ids"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, eps=EPSILON)


@pytest.mark.guarantees("parameters-of-all-stages")
def test_modules_around_the_model_train_as_in_one_process_and_are_the_same_on_all_stages() -> None:
    batches = make_token_batches(3, size=4)

    def run() -> None:
        module, alone = WithHead(), WithHead()
        alone.model.load_state_dict(module.model.state_dict())
        trainer = make_trainer(FSDP2Strategy(pp_size=2, config=FSDP2Config(pp_microbatches=2)), max_steps=3)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        optimizer = torch.optim.AdamW(alone.parameters(), lr=LEARNING_RATE, eps=EPSILON)
        for batch in batches:
            optimizer.zero_grad()
            for part in batch["input_ids"].chunk(2):  # BatchNorm sees micro-batches
                (alone.compute(part) / 2).backward()
            optimizer.step()
        trainer.strategy.share_buffers()
        # `merge_stages` checks that the stages' copies are the same
        actual = whole_of_stages(module.state_dict(), trainer)
        expected = alone.state_dict()
        assert actual.keys() == expected.keys()
        for name, tensor in actual.items():
            torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=5e-5, msg=name)

    run_ranks(run, 2)


@pytest.mark.slow
def test_stages_that_read_different_batches_are_refused() -> None:
    def run() -> None:
        torch.manual_seed(torch.distributed.get_rank())
        tokens = torch.randint(3, 101, (4, 12))
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=1)
        with pytest.raises(ValueError, match="The ranks of one model replica read different first batches"):
            trainer.fit(CausalLM(config=CONFIGS["llama"]), DataLoader([{"input_ids": tokens}], batch_size=None))

    run_ranks(run, 2)


class Pops(Module):
    """Takes its labels out of the batch and changes tokens in place, as users do."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        labels = batch.pop("labels")
        batch["input_ids"].sub_(1)
        self.log("rows", len(labels), reduce_fx="sum")
        return self.model(input_ids=batch["input_ids"], labels=labels.clamp(min=0)).loss


@pytest.mark.slow
def test_several_stages_of_a_rank_get_batches_of_their_own_and_log_once() -> None:
    def run() -> None:
        config = FSDP2Config(pp_schedule="interleaved_1f1b")
        logger = MetricsLogger()
        trainer = make_trainer(FSDP2Strategy(pp_size=2, config=config), max_steps=1, logger=logger)
        trainer.fit(Pops(), DataLoader(make_token_batches(1, size=4), batch_size=None))
        assert trainer.callback_metrics["rows"] == 4

    run_ranks(run, 2)


class TrainsLater(Module):
    """Trains all layers but those of the first of four stages, whose backward has nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[0].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_a_frozen_first_stage_leaves_the_gradients_of_the_others(schedule: Any) -> None:
    batches = make_token_batches(2, size=4)

    def run() -> None:
        torch.manual_seed(1)
        module = TrainsLater()
        alone = TrainsLater()
        alone.load_state_dict(module.state_dict())
        config = FSDP2Config(pp_schedule=schedule, pp_microbatches=2)
        trainer = make_trainer(FSDP2Strategy(pp_size=2, config=config), max_steps=2, callbacks=[GradientNorm()])
        trainer.fit(module, DataLoader(batches, batch_size=None))
        optimizer = alone.configure_optimizers()
        for batch in batches:
            optimizer.zero_grad()
            own_loss(alone.model, batch)[0].backward()
            optimizer.step()
        weights = whole_of_stages(dict(module.named_parameters()), trainer)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=5e-5, msg=name)

    run_ranks(run, 2)


class LastLayerOnly(CausalLM):
    def configure_optimizers(self) -> Any:
        self.model.requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(".3." in name)
        return torch.optim.AdamW([{"params": [p for p in self.parameters() if p.requires_grad]}])


def test_a_stage_that_trains_nothing_takes_part_in_norms_that_callbacks_compute() -> None:
    def run() -> None:
        logger = MetricsLogger()
        callbacks = [GradientNorm(), NaNGuard()]
        trainer = make_trainer(
            FSDP2Strategy(**PP2), max_steps=2, callbacks=callbacks, logger=logger, log_every_n_steps=1
        )
        trainer.fit(LastLayerOnly(config=CONFIGS["llama"]), DataLoader(make_token_batches(2, size=4), batch_size=None))
        norms: list[Any] = [None, None]
        torch.distributed.all_gather_object(norms, trainer.callback_metrics["gradients/norm"].item())
        assert norms[0] == norms[1] > 0

    run_ranks(run, 2)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_number_of_micro_batches(tmp_path: Path) -> None:
    """The last batch of an epoch has one row; alone, it would be refused."""
    batches = make_token_batches(2, size=4)
    batches[1] = {name: tensor[:1] for name, tensor in batches[1].items()}

    def run() -> None:
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=1)
        trainer.fit(CausalLM(config=CONFIGS["llama"]), DataLoader(batches, batch_size=None))
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=2)
        loader = DataLoader(batches[1:], batch_size=None)
        module = CausalLM(config=CONFIGS["llama"])
        trainer.fit(module, loader, ckpt_path=tmp_path / "one.ckpt")
        assert trainer.global_step == 2
        assert trainer.strategy.resumption.micro_batches[:2] == (4, 4)

    run_ranks(run, 2)


@pytest.mark.slow
def test_sharded_logits_are_refused_in_an_evaluation_of_ones_own_on_all_ranks() -> None:
    def run() -> None:
        config = FSDP2Config(loss_parallel=True)
        trainer = make_trainer(FSDP2Strategy(pp_size=2, tp_size=2, config=config))
        with pytest.raises(ValueError, match=r"pp_size=2 with loss_parallel=True.*Use loss_parallel=False"):
            trainer.predict(Module(), DataLoader(make_token_batches(1, size=4), batch_size=None))

    run_ranks(run, 4)


class Gathers(Module):
    """Compares its rows with those of all data parallel ranks, after the model, as contrastive losses do."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = self.loss(self.model, batch)[0]
        assert self.all_gather(batch["input_ids"]).shape == (2, 1, 12)
        return loss


@pytest.mark.slow
def test_all_gather_in_a_step_is_over_the_ranks_of_the_stage() -> None:
    def run() -> None:
        trainer = make_trainer(FSDP2Strategy(**PP2), max_steps=1)
        trainer.fit(Gathers(), DataLoader(make_token_batches(1, size=4), batch_size=None))
        assert trainer.global_step == 1

    run_ranks(run, 4)

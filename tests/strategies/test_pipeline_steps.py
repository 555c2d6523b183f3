"""What users write in steps, and what a pipeline makes of it: it works as in one process, or the error says why not."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import make_causal_lm, make_token_batches
from helpers.pipelines import CONFIGS
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from helpers.user_modules import make_trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy

BATCHES = make_token_batches(3, size=4)


class Module(pl.LightningModule):
    """A module with the loss of its model, and steps without the index of the batch."""

    def __init__(self, family: str = "llama") -> None:
        super().__init__()
        self.model: Any = make_causal_lm(CONFIGS[family])

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        return loss

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.compute_loss(batch)

    def validation_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        self.log("val_loss", self.compute_loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: pl.LightningModule, *, steps: int = 3, validates: bool = False, **options: Any) -> Any:
    config = options.pop("config", None)
    strategy = FSDP2Strategy(pp_size=options.pop("pp_size", 2), config=config)
    limits = {"limit_val_batches": 1, "num_sanity_val_steps": 0} if validates else {}
    trainer = make_trainer(strategy, max_steps=steps, **limits, **options)
    loader = DataLoader(BATCHES, batch_size=None)
    trainer.fit(module, loader, loader if validates else None)
    return trainer


# ---------------------------------------------------------------------- what works


@pytest.mark.parametrize(
    ("pp_size", "flags"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        (1, {"autocast_dtype": torch.bfloat16}),
        (2, {"autocast_dtype": torch.bfloat16}),
    ],
)
def test_steps_need_not_take_the_index_of_the_batch(pp_size: int, flags: dict[str, Any]) -> None:
    def run() -> float:
        config = FSDP2Config(**flags)
        return fit(Module(), pp_size=pp_size, config=config, validates=True).callback_metrics["val_loss"].item()

    assert all(loss > 0 for loss in run_ranks(run, pp_size))


class AddsPrompt(Module):
    """Embeds tokens by itself, with a prompt that all stages have."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = torch.nn.Parameter(torch.ones(32))

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        embedded = self.model.get_input_embeddings()(batch["input_ids"]) + self.prompt
        loss: Tensor = self.model(inputs_embeds=embedded, labels=batch["input_ids"]).loss
        return loss


def test_steps_may_embed_before_the_model_in_training_and_in_validation() -> None:
    def run() -> float:
        torch.manual_seed(0)
        return (
            fit(AddsPrompt(), pp_size=torch.distributed.get_world_size(), validates=True)
            .callback_metrics["val_loss"]
            .item()
        )

    (alone,) = run_ranks(run, 1)
    assert run_ranks(run, 2) == pytest.approx([alone] * 2, abs=1e-5)


class Stops(Module):
    def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        loss = self.compute_loss(batch)
        self.trainer.should_stop = True  # only the last stage gets here
        return loss


def test_all_stages_stop_when_a_step_says_so() -> None:
    assert run_ranks(lambda: fit(Stops()).global_step, 2) == [1, 1]


class Hooked(Module):
    """Has hooks on its layers, one of which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.register_forward_hook(self._note)
            layer.register_forward_hook(lambda _, args, output: self.seen.append(output))

    def _note(self, layer: Any, args: Any, output: Tensor) -> None:
        self.seen.append(output)


def test_hooks_of_the_user_see_only_real_results_of_own_layers() -> None:
    def run() -> None:
        module = Hooked()
        fit(module, steps=1)
        assert len(module.seen) == 2 * 2 * 4  # two hooks, two layers of the stage, four micro-batches
        assert not any(tensor.is_meta for tensor in module.seen)
        assert all(tensor.abs().sum() > 0 for tensor in module.seen)

    run_ranks(run, 2)


def test_a_resumed_run_obeys_other_numbers_of_micro_batches(tmp_path: Path) -> None:
    def run() -> list[int]:
        numbers = []
        for number in (2, 4):
            strategy = FSDP2Strategy(pp_size=2, config=FSDP2Config(pp_microbatches=number))
            trainer = make_trainer(strategy, max_steps=number // 2)
            path = tmp_path / "one.ckpt"
            loader = DataLoader(BATCHES, batch_size=None)
            trainer.fit(CausalLM(config=CONFIGS["llama"]), loader, ckpt_path=path if number == 4 else None)
            trainer.save_checkpoint(path)
            numbers.append(trainer.strategy.resumption.micro_batches[1])  # type: ignore[attr-defined]
        return numbers

    assert run_ranks(run, 2) == [[2, 4]] * 2


def test_rows_that_are_added_to_every_batch_are_worth_a_warning() -> None:
    def run() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(CausalLM(config=CONFIGS["llama"]), config=FSDP2Config(pp_microbatches=3))
        return [str(warning.message) for warning in caught if "rows without labels" in str(warning.message)]

    (message,), others = run_ranks(run, 2)
    assert message.startswith("pp_microbatches=3 does not divide the 4 rows of a batch, so 2 rows without labels are")
    assert others == []


# ---------------------------------------------------------------------- what is refused


class CallsPart(Module):
    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.model(input_ids=batch["input_ids"])[0]
        return self.model.lm_head(hidden).square().mean()


class ValidatesPart(Module):
    def validation_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        self.model.model(input_ids=batch["input_ids"])


class ReadsEmbedding(Module):
    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().compute_loss(batch)
        self.log("norm", self.model.get_input_embeddings().weight.norm())
        return loss


class EmbedsInValidation(Module):
    def validation_step(self, batch: dict[str, Tensor]) -> None:  # type: ignore[override]
        self.log("norm", self.model.get_input_embeddings()(batch["input_ids"]).norm())


class TakesIterator(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.compute_loss(next(dataloader_iter)[0])


class CountsItems(Module):
    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        loss: Tensor = self.model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(40)).loss
        return loss


class WaitsForAll(Module):
    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.trainer.strategy.barrier()
        return super().compute_loss(batch)


class LogsVector(Module):
    def training_step(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        self.log("vector", torch.zeros(3))
        loss = self.compute_loss(batch)
        self.log("vector", torch.zeros(3))
        return loss


class ReturnsList(Module):
    def training_step(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return [self.compute_loss(batch)]


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None: ...

    def finetune_function(self, *args: Any) -> None: ...


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.guarantees("refused-pipelines", "errors-on-every-rank")
@pytest.mark.parametrize(
    ("make_module", "options", "message"),
    [
        slow(ValidatesPart, {"validates": True}, "LlamaModel, a part of LlamaForCausalLM, is called by itself"),
        (TakesIterator, {}, "`training_step` of TakesIterator takes a `dataloader_iter`"),
        (Module, {"callbacks": [Unfreezes()]}, "Unfreezes unfreezes layers and adds groups to the optimizer"),
    ],
)
def test_what_would_be_wrong_is_refused(
    make_module: Callable[[], pl.LightningModule], options: dict[str, Any], message: str
) -> None:
    with raises_on_all_ranks(ValueError, match=message):
        run_ranks(lambda: fit(make_module(), **options), 2)


@pytest.mark.parametrize(
    ("make_module", "options", "message"),
    [
        slow(CallsPart, {}, "LlamaModel, a part of LlamaForCausalLM, is called by itself"),
        (
            ReadsEmbedding,
            {},
            "this rank cannot read its `weight` outside of the model's forward, because .*embed_tokens",
        ),
        slow(EmbedsInValidation, {"validates": True}, "this rank cannot call it outside of the model's forward"),
        slow(CountsItems, {}, "passes num_items_in_batch to LlamaForCausalLM, but .*token_mean_loss"),
        slow(WaitsForAll, {}, r"a step calls `strategy.barrier`, .* in a hook instead"),
        slow(LogsVector, {}, r"`self.log\('vector', ...\)` .* gets a tensor of the shape \(3,\)"),
        slow(ReturnsList, {}, "as the loss of a micro-batch, but the other stages wait"),
    ],
)
def test_what_one_stage_alone_sees_is_refused(
    make_module: Callable[[], pl.LightningModule], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(lambda: fit(make_module(), **options), 2, patience=0)
    assert isinstance(caught.value.cause, ValueError)

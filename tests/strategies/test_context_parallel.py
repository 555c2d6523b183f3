"""Context parallelism through the Trainer: the numbers of one process, whatever module and batches look like."""

import math
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.cover import Matrix
from helpers.families import make_family_model
from helpers.mesh_runs import Case, ScalarLossModule, check_parity
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, hf_loss, token_sum_loss
from helpers.ranks import run_ranks
from helpers.user_modules import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AttentionInterface

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.parallel.context.apply import gather_sequence

LENGTH = 16
FAMILIES = ("llama", "gemma3_text", "qwen3", "mixtral", "gpt_oss")
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "cp2": (2, {"cp_size": 2}, {}),
    "cp4": (4, {"cp_size": 4}, {}),
    "dp2xcp2": (4, {"cp_size": 2}, {}),
    "cp2xtp2+sp": (4, {"cp_size": 2, "tp_size": 2}, {"sequence_parallel": True}),
    "dp2xcp2xtp2": (8, {"cp_size": 2, "tp_size": 2}, {}),
    "hsdp2x2": (4, {"dp_replicate_size": 2}, {}),
    "hsdp2xcp2": (4, {"dp_replicate_size": 2, "cp_size": 2}, {}),
    "hsdp2xtp2": (4, {"dp_replicate_size": 2, "tp_size": 2}, {}),
}
CELLS = {
    f"{mesh}-{family}-{method}": {
        **{"dp_replicate_size": 1, "cp_size": 1, "tp_size": 1, **sizes},
        "dp_shards": ranks // math.prod(sizes.values()),
        "sequence_parallel": "sequence_parallel" in flags,
        "family": family,
        **({"method": method} if "cp_size" in sizes else {}),
    }
    for mesh, (ranks, sizes, flags) in MESHES.items()
    for family in FAMILIES
    for method in (("allgather", "ulysses") if "cp_size" in sizes else ("auto",))
}
MATRIX = Matrix(
    "context parallel families",
    CELLS,
    fast=("cp2-gemma3_text-allgather",),
    costs={name: MESHES[name.split("-")[0]][0] for name in CELLS},
)


def make_family(family: str) -> nn.Module:
    torch.manual_seed(0)
    return make_family_model(family).train()


def make_module(family: str) -> CausalLM:
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    module = CausalLM(config={"model_type": "llama"}, optimizer=optimizer, decay_norms_and_biases=True)
    module.model = make_family(family)
    module.hf_config = module.model.config
    return module


@pytest.mark.guarantees("float32-losses", "float32-gradients", "context-parallel-attention")
@pytest.mark.parametrize(
    ("mesh", "family", "method"), MATRIX.list_parameters({name: tuple(name.split("-")) for name in CELLS})
)
def test_ragged_labels_accumulation_and_clipping_have_the_numbers_of_one_process(
    mesh: str, family: str, method: str
) -> None:
    """Every batch has another number of labels at the beginning of its sequences, and every fifth has none."""
    ranks, sizes, flags = MESHES[mesh]
    case = Case(
        make_module=partial(make_module, family),
        make_model=partial(make_family, family),
        loss=token_sum_loss,
        batches=make_token_batches(3 * 3 * 4, length=LENGTH),
        accumulate=3,
        clip=0.1,
        strategy={**sizes, "config": FSDP2Config(**flags, context_parallel_method=method)},
    )
    run_ranks(check_parity, ranks, case)


make_llama = partial(make_causal_lm, {**LLAMA, "num_hidden_layers": 2})


def tuple_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    input_ids, labels = batch
    return model(input_ids, labels=labels).loss, 1


def bare_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch, labels=batch).loss, 1


FORMS = {
    "dict": (hf_loss, lambda batch: batch),
    "tuple": (tuple_loss, lambda batch: (batch["input_ids"], batch["labels"])),
    "tensor": (bare_loss, lambda batch: batch["input_ids"]),
}


@pytest.mark.guarantees("whole-batches", "other-losses")
@pytest.mark.parametrize(
    ("form", "mesh"),
    [
        ("tensor", "cp2"),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("tuple", "cp2"), ("dict", "dp2xcp2"))),
        *(
            pytest.param(*cell, marks=pytest.mark.release)
            for cell in (("dict", "cp2"), ("tuple", "dp2xcp2"), ("tensor", "dp2xcp2"))
        ),
    ],
)
def test_a_users_own_step_that_takes_the_loss_of_the_model(form: str, mesh: str) -> None:
    """Its loss is the mean over micro-batches and data parallel ranks, and the logged one is that number."""
    loss, convert = FORMS[form]
    batches = make_token_batches(3 * 2 * 2, length=LENGTH)
    for batch in batches:
        batch["labels"][:, 1] = batch["input_ids"][:, 1]  # the mean of no labels is no number in one process either
    ranks, sizes, flags = MESHES[mesh]
    case = Case(
        make_module=partial(ScalarLossModule, make_llama, loss),
        make_model=make_llama,
        loss=loss,
        batches=[convert(batch) for batch in batches],
        accumulate=2,
        clip=0.1,
        strategy={**sizes, "config": FSDP2Config(**flags)},
    )
    run_ranks(check_parity, ranks, case)


class Batches(pl.LightningDataModule):
    """The same sequences on every rank of a context parallel group."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def _load(self) -> DataLoader[Any]:
        strategy = self.trainer.strategy
        rank, size = getattr(strategy, "data_parallel_rank", 0), getattr(strategy, "data_parallel_size", 1)
        return DataLoader(self.batches[rank::size], batch_size=None)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _load


def test_validation_and_prediction_count_every_token_once() -> None:
    def run() -> None:
        batches = make_token_batches(4, length=LENGTH)
        module = make_module("llama")
        trainer = make_trainer(FSDP2Strategy(cp_size=2))
        metrics = trainer.validate(module, datamodule=Batches(batches), verbose=False)[0]
        scores = trainer.predict(module, datamodule=Batches(batches))
        if dist.get_rank() > 0:
            return
        model = make_family("llama").eval()
        sums = [token_sum_loss(model, batch) for batch in batches]
        expected = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
        assert metrics["val/loss"] == pytest.approx(expected.item(), abs=1e-5)
        # this rank has predicted its own batches
        for score, (loss, tokens) in zip(scores, sums[::2], strict=True):
            assert score["log_probability"].sum().item() == pytest.approx(-loss.item(), abs=1e-4)
            assert score["tokens"].sum() == tokens

    run_ranks(run, 4)


@pytest.mark.guarantees("own-positions")
@pytest.mark.slow
def test_fit_test_and_fit_again_leave_the_model_with_its_own_attention_in_between() -> None:
    def run() -> None:
        registered = set(AttentionInterface())
        module, data = make_module("llama"), Batches(make_token_batches(4, length=LENGTH))
        lengths: list[int] = []

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                with torch.no_grad():
                    lengths.append(module.model(input_ids=data.batches[0]["input_ids"]).logits.size(1))

        strategy = FSDP2Strategy(cp_size=2)
        for stage in ("fit", "test", "fit"):
            trainer = make_trainer(
                strategy if stage == "fit" and not lengths else FSDP2Strategy(cp_size=2), callbacks=[Look()]
            )
            getattr(trainer, stage)(module, datamodule=data)
            assert module.model.config._attn_implementation == "sdpa"
            assert set(AttentionInterface()) == registered
        assert lengths == [LENGTH // 2] * 4

    run_ranks(run, 2)


class DroppingModule(ScalarLossModule):
    """A model with dropout, and random numbers of the user's own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.own = torch.rand(3)
        logits = gather_sequence(self.model, self.model(input_ids=batch["input_ids"]).logits)
        self.logits = logits.detach().clone()
        self.window.append(logits.detach().square().mean())
        return logits.square().mean()


@pytest.mark.guarantees("other-dropout-masks")
def test_ranks_drop_other_elements_of_their_positions_and_draw_the_users_numbers_alike() -> None:
    config = {
        "model_type": "gpt2",
        **{"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "vocab_size": 101, "attn_pdrop": 0.0},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.5, "bos_token_id": 1, "eos_token_id": 2},
    }

    def run() -> tuple[Tensor, Tensor]:
        module = DroppingModule(partial(make_causal_lm, config), hf_loss)
        with torch.no_grad():  # what a position returns is then what was dropped there, whatever its place
            module.model.transformer.wpe.weight.zero_()
            for block in module.model.transformer.h:
                block.attn.c_proj.weight.zero_()
        batches = [{"input_ids": torch.full((1, LENGTH), 7)}] * 2
        make_trainer(FSDP2Strategy(cp_size=2)).fit(module, datamodule=Batches(batches))
        return module.own, module.logits

    (own, logits), (other_own, other_logits) = run_ranks(run, 2)
    assert torch.equal(own, other_own)
    torch.testing.assert_close(logits, other_logits)
    positions = logits[0].unique(dim=0)
    assert len(positions) == LENGTH  # all of them dropped something else


@pytest.mark.guarantees("refused-lengths")
def test_a_length_that_cannot_be_divided_is_said_before_the_first_step() -> None:
    def run() -> None:
        module = make_module("llama")
        data = Batches(make_token_batches(4, length=12))
        with pytest.raises(ValueError, match=r"divisible by 8 .* this batch has 12 positions; use 8 or 16"):
            make_trainer(FSDP2Strategy(cp_size=4)).fit(module, datamodule=data)

    run_ranks(run, 4)

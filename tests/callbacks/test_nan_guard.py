"""A run whose numbers are lost ends on every rank before its weights are."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import make_token_batches
from helpers.oracle import whole
from helpers.recorder import Recorder, catch_messages
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import Batch, Regressor, make_batches, make_language_model, make_loader
from torch import Tensor

from lightning_fsdp2.callbacks import NaNGuard

each_strategy = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if name == "ddp" else pytest.mark.slow) for name, kind in STRATEGIES.items()],
    ids=STRATEGIES,
)


def train_until_it_ends(kind: Kind, module: Any, batches: list[Batch], **options: Any) -> tuple[str, bool]:
    """What it ends with, and whether the weights are still those of before the last step."""
    before: dict[str, Tensor] = {}

    class Remembers(NaNGuard):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            before.update(copy.deepcopy(whole(dict(pl_module.named_parameters()))))
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    trainer = kind.make_trainer(logger=Recorder(), callbacks=[Remembers()], max_steps=3, **options)
    with pytest.raises(RuntimeError) as error:
        trainer.fit(module, make_loader(batches))
    assert trainer.global_step == 1
    after = whole(dict(module.named_parameters()))
    return str(error.value), all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.guarantees("guarding-callbacks", "nan-guard")
@each_strategy
def test_gradients_of_one_rank_stop_all_where_they_are_clipped(kind: Kind) -> None:
    batches = make_batches(6)
    batches[3]["targets"][0] = torch.inf  # of rank 1, in the second step

    def run() -> tuple[str, bool]:
        return train_until_it_ends(kind, Regressor(), batches, gradient_clip_val=1.0, log_every_n_steps=100)

    for message, is_unchanged in kind.run(run, 2):
        assert "NaNGuard: the norm of the gradients of step 2 is not finite. No weight was changed" in message
        assert is_unchanged


@pytest.mark.slow
@each_strategy
def test_without_clipping_gradients_are_checked_on_logging_steps(kind: Kind) -> None:
    batches = make_batches(6)
    batches[3]["targets"][0] = torch.inf

    def run() -> tuple[tuple[str, bool], list[str]]:
        with catch_messages() as messages:
            return train_until_it_ends(kind, Regressor(), batches, log_every_n_steps=2), messages

    results = kind.run(run, 2)
    for (message, is_unchanged), _ in results:
        assert "NaNGuard: the norm of the gradients of step 2" in message
        assert is_unchanged
    assert any("checked on logging steps only (log_every_n_steps=2)" in message for message in results[0][1])


@pytest.mark.guarantees("guarding-callbacks")
@each_strategy
def test_the_mean_loss_of_all_tokens_is_checked_in_every_step(kind: Kind) -> None:
    class Diverges(type(make_language_model())):  # type: ignore[misc]
        def _compute_token_losses(self, batch: Any) -> tuple[Tensor, Tensor]:
            losses, counts = super()._compute_token_losses(batch)
            if self.global_step == 1 and self.global_rank == 1:
                losses = losses * torch.nan
            return losses, counts

    def run() -> tuple[str, bool]:
        module = make_language_model()
        module.__class__ = Diverges
        return train_until_it_ends(kind, module, make_token_batches(6, ragged=False), log_every_n_steps=100)

    for message, is_unchanged in kind.run(run, 2):
        assert "NaNGuard: the mean loss of step 2 is not finite" in message
        assert is_unchanged

"""Options that leave nothing to train are said."""

import warnings

import pytest
from helpers.models import make_token_batches
from helpers.ranks import run_ranks
from helpers.user_modules import make_language_model, make_loader, make_trainer


@pytest.mark.parametrize(("limit", "is_said"), [(0, True), (0.0, True), (1, False), (1.0, False)])
def test_a_fit_without_batches_says_so(limit: float, is_said: bool) -> None:
    def run() -> tuple[list[str], int]:
        trainer = make_trainer(limit_train_batches=limit)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(make_language_model(), make_loader(make_token_batches(2)))
            trainer.validate(make_language_model(), make_loader(make_token_batches(2)))  # which trains none anyway
        return [
            str(each.message) for each in caught if "limit_train_batches=0" in str(each.message)
        ], trainer.global_step

    [(said, steps)] = run_ranks(run, 1)
    assert said == ["limit_train_batches=0: no batch is trained. Leave it out to train on all batches."] * is_said
    assert (steps == 0) == is_said

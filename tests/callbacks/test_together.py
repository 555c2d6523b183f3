"""All callbacks in one Trainer, through stages and options in which some have nothing to do."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import make_token_batches
from helpers.ranks import run_ranks
from helpers.recorder import Recorder
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import Regressor, make_batches, make_language_model, make_loader, make_trainer

from lightning_fsdp2 import callbacks

OPTIONS: dict[str, dict[str, Any]] = {
    "HuggingFaceExport": {"overwrite": True},
    "ProcessGroupTimeout": {"train": timedelta(seconds=50)},
    "Preemption": {"exit_code": 75},
}

each_strategy = pytest.mark.parametrize("kind", STRATEGIES.values(), ids=STRATEGIES)


@pytest.mark.slow
@each_strategy
@pytest.mark.parametrize("log_every_n_steps", [0, 1])
@pytest.mark.parametrize("logs", [False, True], ids=["no_logger", "logger"])
@pytest.mark.filterwarnings("ignore:ExponentialMovingAverage has no averages")
def test_stages_in_turn(kind: Kind, log_every_n_steps: int, logs: bool, tmp_path: Path) -> None:
    def run() -> list[int]:
        recorder = Recorder()
        others = {"MemorySnapshot", "ExpertBias", "ExpertLoad"}  # they need a GPU, or a mixture of experts
        made = [getattr(callbacks, n)(**OPTIONS.get(n, {})) for n in callbacks.__all__ if n not in others]
        trainer = kind.make_trainer(
            callbacks=made,
            logger=recorder if logs else False,
            default_root_dir=tmp_path,
            enable_progress_bar=True,
            log_every_n_steps=log_every_n_steps,
            accumulate_grad_batches=2,
            num_sanity_val_steps=1,
            max_steps=2,
        )
        module, batches = make_language_model(), make_token_batches(16, ragged=False)
        trainer.validate(module, make_loader(batches[:2]), verbose=False)
        trainer.fit(module, make_loader(batches), make_loader(batches[:2]))
        trainer.test(module, make_loader(batches[:2]), verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, make_loader(batches), make_loader(batches[:2]))
        assert trainer.global_step == 4
        return [step for step, row in recorder.rows.items() if "throughput/tokens_per_second" in row]

    assert kind.run(run, 2)[0] == ([0, 1, 2, 3] if logs and log_every_n_steps else [])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.filterwarnings("ignore")
def test_under_strategies_of_lightning(strategy: str, tmp_path: Path) -> None:
    # a Regressor is none of Hugging Face's
    others = {"MemorySnapshot", "ProcessGroupTimeout", "Preemption", "HuggingFaceExport", "ExpertBias", "ExpertLoad"}

    def run() -> set[str]:
        recorder = Recorder()
        made = [getattr(callbacks, name)() for name in callbacks.__all__ if name not in others]
        options = {"log_every_n_steps": 1, "max_steps": 2, "gradient_clip_val": 1.0, "enable_progress_bar": True}
        trainer = make_trainer(strategy, callbacks=made, logger=recorder, default_root_dir=tmp_path, **options)
        batches = [{"input_ids": torch.ones(2, 8, dtype=torch.long), **batch} for batch in make_batches(4)]
        trainer.fit(Regressor(), make_loader(batches), make_loader(batches))
        return set(recorder.rows[1])

    for logged in run_ranks(run, 1 if strategy == "auto" else 2):
        assert logged >= {
            "throughput/tokens_per_second",
            "memory/process_gib",
            "gradients/norm",
            "loss/mean",
            "loss/max",
        }

"""What is replaced on Lightning's live objects is in the ledger, and put back."""

import copy
import functools
import types
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.user_modules import Regressor, make_batches, make_loader, make_trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fsdp2 import FSDP2Strategy
from lightning_fsdp2.compat.ledger import Ledger, get_ledger, has_own

OF_TORCH = {"Regressor.training_step", "Regressor.validation_step", "Regressor.test_step", "Regressor.predict_step"}
"""Put on a module by ``torch.distributed.fsdp.register_fsdp_forward_method``; they stay, as the sharded module does."""

EXPECTED = {
    "CSVLogger.finalize",
    "CSVLogger.log_metrics",
    "LightningSGD.zero_grad",
    "ModelCheckpoint._link_checkpoint",
    "ModelCheckpoint.file_exists",
    "ModelCheckpoint.on_train_batch_end",
    "ModelCheckpoint.on_train_epoch_end",
    "Regressor.log",
    "_DataConnector._resolve_sampler",
    "_EvaluationLoop._evaluation_step",
    "_EvaluationLoop.inference_mode",
    "_PredictionLoop.inference_mode",
    "_SignalConnector._sigterm_notifier_fn",
    "_SignalConnector._slurm_sigusr_handler_fn",
    "_TrainingEpochLoop._broadcast_sigterm_tensor",
    "_TrainingEpochLoop.advance",
    "_TrainingEpochLoop.on_advance_end",
    "_TrainingEpochLoop.on_load_checkpoint",
    "_TrainingEpochLoop.on_save_checkpoint",
}
"""Of a fit without options; another entry needs a reason, and a place here."""


class Owner:
    kind = "class"

    def greet(self) -> str:
        return "hello"


def test_what_is_replaced_is_put_back_in_reverse() -> None:
    ledger, owner, other = Ledger(), Owner(), Owner()
    ledger.replace(owner, "greet", lambda: "first", reason="of a test")
    ledger.replace(owner, "greet", lambda: "second", reason="of a test")
    ledger.replace(owner, "kind", "instance", reason="of a test")
    ledger.replace(other, "kind", "instance", reason="of a test")
    assert (owner.greet(), owner.kind, other.kind) == ("second", "instance", "instance")
    ledger.put_back(owner, "greet")
    assert (owner.greet(), owner.kind, other.kind) == ("hello", "instance", "instance")
    assert vars(owner).keys() - {"_lightning_fsdp2_replaced"} == {"kind"}
    ledger.put_back_all()
    assert vars(owner) == vars(other) == {}
    assert ledger.entries == []
    ledger.put_back(owner)


def test_a_value_of_the_objects_own_comes_back() -> None:
    ledger, owner = Ledger(), Owner()
    owner.kind = "own"
    ledger.replace(owner, "kind", "other", reason="of a test")
    ledger.put_back(owner)
    assert vars(owner) == {"kind": "own"}


def test_what_a_user_has_put_there_in_the_meantime_stays() -> None:
    ledger, owner = Ledger(), Owner()
    ledger.replace(owner, "greet", lambda: "replaced", reason="of a test")
    own = vars(owner)["greet"] = lambda: "the user's"
    assert has_own(owner, "greet")
    ledger.put_back_all()
    assert vars(owner) == {"greet": own}


def test_what_an_aborted_run_has_left_does_not_come_back() -> None:
    owner = Owner()
    Ledger().replace(owner, "greet", lambda: "of a run that never ended", reason="of a test")
    assert not has_own(owner, "greet")
    copied = copy.deepcopy(owner)
    for other in (owner, copied):
        ledger = Ledger()
        ledger.replace(other, "greet", lambda: "of the next", reason="of a test")
        ledger.put_back_all()
        assert vars(other) == {}


def test_what_another_version_lacks_is_named_with_the_reason() -> None:
    with pytest.raises(
        RuntimeError, match=r"has no Owner\._gone, which this package has to replace because it is one; install"
    ):
        Ledger().replace(Owner(), "_gone", None, reason="it is one")


def find_replaced(objects: list[Any]) -> set[str]:
    """Find the methods of live objects that are hidden by functions on the objects themselves."""
    functions = (types.FunctionType, types.MethodType, functools.partial)
    return {
        f"{type(owner).__name__}.{name}"
        for owner in objects
        for name, value in vars(owner).items()
        if isinstance(value, functions) and hasattr(type(owner), name)
    }


def list_live_objects(trainer: Any) -> list[Any]:
    loop = trainer.fit_loop
    loops = [loop, loop.epoch_loop, loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    loops += [trainer.predict_loop, loop.epoch_loop.automatic_optimization, loop.epoch_loop.manual_optimization]
    connectors = [value for name, value in vars(trainer).items() if name.endswith("_connector")]
    optimizers = [*trainer.optimizers, *trainer.strategy._lightning_optimizers]
    return [
        trainer,
        trainer.lightning_module,
        trainer.strategy,
        *[*loops, *connectors, *optimizers, *trainer.callbacks, *trainer.loggers],
    ]


@pytest.mark.guarantees("ledger")
def test_a_fit_replaces_what_the_ledger_says_and_puts_it_back(tmp_path: Path) -> None:
    class Look(Callback):
        found: set[str]
        listed: set[str]

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.found = find_replaced(list_live_objects(trainer))
            self.listed = {f"{type(entry.owner).__name__}.{entry.name}" for entry in get_ledger(trainer).entries}
            assert all(entry.reason for entry in get_ledger(trainer).entries)

    def run() -> None:
        look = Look()
        options = {"logger": CSVLogger(tmp_path), "enable_checkpointing": True}
        trainer = make_trainer(FSDP2Strategy(), callbacks=[look, ModelCheckpoint(tmp_path)], **options)
        trainer.fit(Regressor(), make_loader(make_batches(4)))
        assert look.listed == EXPECTED
        values = {"_EvaluationLoop.inference_mode", "_PredictionLoop.inference_mode"}
        # of the optimizer of torch, which has no hook for it either, and ends with the fit
        assert look.found - OF_TORCH == EXPECTED - values | {"SGD.zero_grad"}
        assert get_ledger(trainer).entries == []
        left = find_replaced(list_live_objects(trainer))
        assert left - OF_TORCH <= {"SGD.zero_grad"}
        assert trainer.validate_loop.inference_mode

    run_ranks(run, 1)

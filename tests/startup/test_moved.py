"""Import paths of earlier versions lead to where things are now."""

import importlib
import subprocess
import sys

import pytest

from lightning_fsdp2.startup.moved import MOVED, UNTIL


@pytest.mark.guarantees("old-paths")
@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_leads_to_the_new_one_with_a_warning(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=rf"{old} is {MOVED[old]} now; the old path works until {UNTIL}") as warned:
        module = importlib.import_module(old)
    assert len(warned) == 1
    new = importlib.import_module(MOVED[old])
    names = [name for name in vars(new) if not name.startswith("_")]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)


@pytest.mark.slow
def test_a_user_sees_the_line_that_is_to_change() -> None:
    line = "from lightning_fsdp2.parallel.tp_plans import LayerTraits, register_tp_plan"
    run = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert run.returncode == 0
    assert "<string>:1: FutureWarning: lightning_fsdp2.parallel.tp_plans is" in run.stderr


def test_a_path_that_never_was_is_the_usual_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lightning_fsdp2\.parallel\.never"):
        importlib.import_module("lightning_fsdp2.parallel.never")


def test_losses_have_the_path_of_before() -> None:
    from lightning_fsdp2.parallel import loss
    from lightning_fsdp2.parallel.loss import cross_entropy, token_mean

    assert loss.token_cross_entropy is cross_entropy.token_cross_entropy
    assert loss.token_mean_loss is token_mean.token_mean_loss

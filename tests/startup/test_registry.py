"""Short names of the strategies in Lightning, and what `import lightning_fsdp2` imports."""

import subprocess
import sys

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_fsdp2
from lightning_fsdp2.startup.registry import STRATEGIES, register_with_lightning


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_trainer_takes_the_short_name(name: str) -> None:
    strategy = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False).strategy
    assert f"lightning_fsdp2.{type(strategy).__name__}" == STRATEGIES[name]["class_path"]
    assert (getattr(strategy.config, "offload_policy", None) is not None) == (name == "fsdp2_offload")


@pytest.mark.guarantees("fabric")
@pytest.mark.parametrize("name", STRATEGIES)
def test_fabric_points_to_the_plain_loop(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Fabric\(strategy='{name}'\).*Manager, as examples/plain_loop.py does"):
        Fabric(strategy=name, accelerator="cpu", devices=1)


def test_registering_again_changes_nothing() -> None:
    before = dict(StrategyRegistry)
    finders = list(sys.meta_path)
    register_with_lightning()
    assert dict(StrategyRegistry) == before
    assert sys.meta_path == finders


def test_all_names_are_there() -> None:
    assert set(dir(lightning_fsdp2)) >= set(lightning_fsdp2.__all__) >= {"FSDP2Strategy", "CausalLM", "export_hf"}
    with pytest.raises(AttributeError, match="Nothing"):
        lightning_fsdp2.Nothing  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import lightning_fsdp2", "from lightning_fsdp2 import FSDP2Strategy"])
def test_names_are_registered_whatever_is_imported_first(first: str) -> None:
    """`tests/conftest.py` imports Lightning first."""
    code = f"""
{first}
import sys
is_light = "torch" not in sys.modules
import lightning_fsdp2
from lightning.pytorch.strategies import StrategyRegistry
print(is_light, type(StrategyRegistry.get("fsdp2")).__name__)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(first == "import lightning_fsdp2"), "FSDP2Strategy"]

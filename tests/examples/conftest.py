"""The folder in which an example runs."""

from pathlib import Path

import datasets
import pytest
from helpers.examples import Run, run_example


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script in an empty folder on ranks as torchrun starts them; returns what each has printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return run_example

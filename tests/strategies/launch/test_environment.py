"""How many processes are started."""

import os

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_fsdp2.strategies.launch.environment import make_launcher


def test_far_more_processes_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert make_launcher(LightningEnvironment(), 16, 1) is not None
    with pytest.raises(
        ValueError, match=r"devices=17 would start 17 processes.* 2 processor.* use at most 16.*torchrun"
    ):
        make_launcher(LightningEnvironment(), 17, 1)

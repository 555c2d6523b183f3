"""The random state of one process goes through a file that is not trusted, and comes back."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fsdp2.ranks.random_state import get_random_state, set_random_state

CPU = torch.device("cpu")


def draw() -> tuple[Any, ...]:
    # a normal number is one of two that are made together: the other one belongs to the state
    return torch.rand(3).tolist(), np.random.standard_normal(), random.gauss(0, 1), random.getrandbits(32)


def get_old_state() -> dict[str, Any]:
    """As earlier versions wrote it."""
    name, keys, *rest = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return {"torch": torch.get_rng_state(), "numpy": (name, words, *rest), "python": random.getstate()}


@pytest.mark.parametrize("get_state", [lambda: get_random_state(CPU), get_old_state], ids=["now", "before"])
def test_a_state_comes_back_from_a_file(get_state: Any) -> None:
    draw()
    file = io.BytesIO()
    torch.save(get_state(), file)
    expected = draw()
    draw()
    file.seek(0)
    set_random_state(torch.load(file, weights_only=True), CPU)
    assert draw() == expected

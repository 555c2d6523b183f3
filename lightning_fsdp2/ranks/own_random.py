"""Random numbers in training: each data parallel rank draws its own, and all ranks still have a state that they share.

Dropout masks, noise and augmentation must differ between ranks that read different data. But whatever all ranks must
agree on, such as the order of the samples, has to come from random numbers that they share.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_fsdp2.ranks.random_state import get_random_state, set_random_state

State = dict[str, Any]

_active: "OwnRandomNumbers | None" = None
"""The random numbers of the fit that is running. A process has one random state, and so it has one of these."""


class OwnRandomNumbers:
    """The random states of a rank while it trains: its own, and the one that all ranks share.

    One of them is the state of the process, and this object keeps the other.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._kept: State | None = None
        self._is_shared = False
        self._last: tuple[State, State | None] | None = None

    def begin(self, rank: int, device: torch.device) -> None:
        """Give this rank its own random state, derived from the process's state, which must be the same on all ranks.

        Args:
            rank: Index of the part of the data that this rank reads. Ranks with the same index get the same state.
            device: Device whose random state is included, besides that of the CPU.
        """
        global _active
        self.end()
        # keep the state of before the draw, so that the numbers that ranks share are those of a single process
        self._device, self._kept = device, get_random_state(device)
        seed = _draw_seed() + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        _active = self

    def end(self) -> None:
        """Return to the random state that all ranks share. Do nothing if :meth:`begin` was not called."""
        global _active
        if self._kept is None:
            return
        self._last = self.get_states(self._device)
        if not self._is_shared:
            set_random_state(self._kept, self._device)
        _draw_seed()  # so that the next fit begins with another one
        self._kept, self._is_shared = None, False
        _active = None

    def get_states(self, device: torch.device) -> tuple[State, State | None]:
        """Return this rank's own random state, and the one that all ranks share.

        After :meth:`end`, they are those of the end, since a checkpoint may be saved later. If :meth:`begin` was never
        called, the first is the state of the process, and the second is None.
        """
        if self._kept is None:
            return self._last or (get_random_state(device), None)
        current = get_random_state(self._device)
        return (self._kept, current) if self._is_shared else (current, self._kept)

    def set_states(self, own: State, shared: State | None, device: torch.device) -> None:
        """Restore the states that :meth:`get_states` returned."""
        set_random_state(own, device)
        if shared is not None:
            self._kept = shared

    @contextmanager
    def share(self) -> Iterator[None]:
        """Run the block with the random state that all ranks share; see :func:`shared_random_numbers`."""
        if self._kept is None or self._is_shared:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            if self._is_shared:  # unless `end` was called in the block
                self._swap()

    def _swap(self) -> None:
        kept = self._kept
        self._kept = get_random_state(self._device)
        set_random_state(kept or {}, self._device)
        self._is_shared = not self._is_shared


def _draw_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


@contextmanager
def shared_random_numbers() -> Iterator[None]:
    """Run the block with the random state that all ranks share, and return to the rank's own state after it.

    All ranks must run the block, and draw as many numbers in it. Outside of training, and if ranks do not have their
    own random numbers, the block runs with the state of the process.
    """
    if _active is None:
        yield
        return
    with _active.share():
        yield

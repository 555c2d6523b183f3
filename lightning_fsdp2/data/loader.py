"""A data loader that goes on at the next sample when a run is resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

# Why not torchdata's StatefulDataLoader? Its position is part of an iterator, and Lightning 2.6 makes that iterator
# before it tells the sampler the epoch. Measured with torchdata 0.11 and a DistributedSampler: a run resumed in its
# second epoch goes on in the order of the first one, a run resumed behind the last batch of an epoch leaves out the
# next epoch, and a run resumed with another `num_workers` ends in an AssertionError.


class ResumableSampler(DistributedSampler[int]):
    """torch's ``DistributedSampler`` that can leave out samples at the start of an epoch.

    Of n ranks, rank r takes the samples r, r + n, r + 2n, … of the epoch's order. So a training step takes the same
    samples from any number of ranks, as long as all their batches together have the same size. As a
    ``DistributedSampler`` it is left in place by ``Trainer(use_distributed_sampler=True)``.
    """

    start = 0
    """How many of this rank's samples the next iteration leaves out."""

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


class ResumableDataLoader(DataLoader[dict[str, Tensor]]):
    """A ``DataLoader`` over a :class:`ResumableSampler` that saves and restores its position.

    The position is an epoch and the number of its samples that all ranks together have been handed. It is the same on
    every rank, does not count what worker processes have fetched ahead, and can be restored with another
    ``num_workers``, ``batch_size`` or number of ranks.
    """

    has_global_position = True
    """Its position is one in the whole data set; without this the strategies take it for that of one rank."""

    # Lightning makes loaders again from the arguments of DataLoader, so there is no __init__ to set these in.
    _epoch = 0
    _samples = 0
    _is_restored = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        # A generator: nothing below runs before the first batch is asked for, and by then the epoch is set.
        sampler = self.sampler
        if not isinstance(sampler, ResumableSampler):  # Trainer(overfit_batches=...) puts its own in place
            yield from super().__iter__()
            return
        # A position counts in its own epoch only: one behind an epoch's last batch is where the next epoch starts.
        if not (self._is_restored and self._epoch == sampler.epoch):
            self._epoch, self._samples = sampler.epoch, 0
        self._is_restored = False
        sampler.start = self._samples // sampler.num_replicas
        for batch in super().__iter__():
            self._samples += len(batch["input_ids"]) * sampler.num_replicas
            yield batch

    def get_optional_restored_batches(self) -> int | None:
        """How many batches of this loader's size a restored position stands for, whatever size they had; else None."""
        if not (self._is_restored and isinstance(self.sampler, ResumableSampler)):
            return None
        return self._samples // ((self.batch_size or 1) * self.sampler.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the position behind the last batch handed out."""
        return {"epoch": self._epoch, "samples": self._samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on behind the last batch before :meth:`state_dict`, if the sampler is then at that epoch."""
        self._epoch, self._samples = state_dict["epoch"], state_dict["samples"]
        self._is_restored = True
        if isinstance(self.sampler, ResumableSampler):
            self.sampler.set_epoch(self._epoch)


def collate_sequences(sequences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack sequences to a batch for a Hugging Face causal model, which shifts the labels itself.

    Returns:
        ``input_ids`` and ``labels``, equal int64 tensors of shape [batch, sequence_length].
    """
    input_ids = torch.stack([sequence["input_ids"] for sequence in sequences])
    return {"input_ids": input_ids, "labels": input_ids.clone()}

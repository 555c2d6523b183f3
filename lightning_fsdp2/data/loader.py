"""A data loader that goes on at the next sample when a run is resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler

_IGNORE_INDEX = -100  # the label that Hugging Face's losses and ours leave out

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


def fill_up(dataset: Dataset[dict[str, Tensor]], num_replicas: int) -> Dataset[dict[str, Tensor]]:
    """Add sequences without labels until ``num_replicas`` divides their number, so that nothing is evaluated twice.

    They come first, each on another rank, where they share a batch with a sequence of the data set unless the batch has
    only one: many a loss is NaN for a batch without a label.
    """
    missing = -len(dataset) % num_replicas  # type: ignore[arg-type]
    if not missing:
        return dataset
    sequence = dataset[0]
    filler = {**sequence, "labels": torch.full_like(sequence["input_ids"], _IGNORE_INDEX)}
    return ConcatDataset([[filler] * missing, dataset])  # type: ignore[list-item]


def collate_sequences(
    sequences: list[dict[str, Tensor]], *, pad_to_multiple_of: int | None = None, pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Stack sequences to a batch for a Hugging Face causal model, which shifts the labels itself.

    Args:
        sequences: Each with ``input_ids`` and perhaps ``labels``, which are equal otherwise, and ``position_ids`` that
            restart at each document. Tensors of shape [sequence_length].
        pad_to_multiple_of: Pad at the end to a multiple of this length, without labels. Causal attention needs no mask
            there.
        pad_token_id: The token to pad with.

    Returns:
        ``input_ids``, ``labels`` and, if the sequences have them, ``position_ids``: int64 tensors of shape
        [batch, sequence_length]. The first token of a document has no label: another document would predict it.
    """
    batch = {name: torch.stack([sequence[name] for sequence in sequences]) for name in sequences[0] if name != "labels"}
    batch["labels"] = torch.stack([sequence.get("labels", sequence["input_ids"]) for sequence in sequences])
    if "position_ids" in batch:
        batch["labels"].masked_fill_(batch["position_ids"] == 0, _IGNORE_INDEX)
    if pad_to_multiple_of is None:
        return batch
    padding = (0, -batch["input_ids"].size(1) % pad_to_multiple_of)
    # position 0 throughout: each token of padding is a document by itself
    values = {"input_ids": pad_token_id, "labels": _IGNORE_INDEX, "position_ids": 0}
    return {name: F.pad(tensor, padding, value=values[name]) for name, tensor in batch.items()}

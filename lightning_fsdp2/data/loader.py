"""Data loaders that continue at the next sample when a run is resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler
from torch.utils.data import IterableDataset as TorchIterableDataset

from lightning_fsdp2.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import IterableDataset

    from lightning_fsdp2.data.packing import PackedStream

_ROWS_AT_ONCE = 16

# torchdata's StatefulDataLoader does not work here, because its position is part of an iterator.
# Lightning 2.6 creates that iterator before it tells the sampler the epoch.
# With torchdata 0.11 and a DistributedSampler, three cases of resuming were measured to fail.
# A run that is resumed in its second epoch continues in the order of the first epoch.
# A run that is resumed after the last batch of an epoch skips the next epoch.
# A run that is resumed with another `num_workers` ends in an AssertionError.


class ResumableSampler(DistributedSampler[int]):
    """Sampler like torch's ``DistributedSampler`` that can skip samples at the start of an epoch.

    With n ranks, rank r takes the samples r, r + n, r + 2n, … in the epoch's order. So a training step takes the same
    samples on any number of ranks, as long as the batches of all ranks together have the same size. Because this is a
    ``DistributedSampler``, ``Trainer(use_distributed_sampler=True)`` leaves it in place.

    Args:
        dataset: Data set with a length.
        num_replicas: Number of ranks.
        rank: Number of this rank.
        shuffle: Whether each epoch has a different order.
        seed: Seed of the orders.
        drop_last: Whether to leave out the last samples, rather than repeat some, to give all ranks the same number.
        multiple_of: Number of samples in a group, over all ranks; a multiple of ``num_replicas``. An epoch consists of
            whole groups. Samples at its end that do not fill a group are left out.
    """

    start = 0
    """Number of this rank's samples that the next iteration skips."""

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        multiple_of: int = 1,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        if multiple_of > 1:
            self.total_size -= self.total_size % multiple_of
            self.num_samples = self.total_size // num_replicas

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


class SequenceStream(TorchIterableDataset[dict[str, Tensor]]):
    """Share of one rank in a stream of sequences that are read, tokenised and packed during training.

    Every rank computes the whole stream. With n ranks, rank r takes the sequences r, r + n, r + 2n, … of the stream. So
    a step takes the same sequences on any number of ranks, as with a :class:`ResumableSampler`. Sequences at the end
    that do not fill a round (``multiple_of``) are left out.

    Args:
        sequences: Stream of rows of integers. If it is shuffled, its ``set_epoch`` changes its order.
        num_replicas: Number of ranks.
        rank: Number of this rank.
        multiple_of: Number of sequences in a round, a multiple of ``num_replicas``. None for one sequence per rank.
    """

    epoch = 0
    start = 0
    """Number of this rank's sequences that the next iteration computes but skips."""

    def __init__(
        self,
        sequences: IterableDataset | PackedStream,
        num_replicas: int = 1,
        rank: int = 0,
        multiple_of: int | None = None,
    ) -> None:
        super().__init__()
        self._sequences = sequences
        self.num_replicas = num_replicas
        self._rank = rank
        self._round = multiple_of or num_replicas

    def share(self, num_replicas: int, rank: int, multiple_of: int | None = None) -> SequenceStream:
        """Return the share that rank ``rank`` has in the same stream."""
        return SequenceStream(self._sequences, num_replicas, rank, multiple_of)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._sequences.set_epoch(self.epoch)
        # the builtin `iter` would shuffle differently in a worker process
        batches = self._sequences.iter(batch_size=_ROWS_AT_ONCE)
        rows = (zip(batch, values, strict=True) for batch in batches for values in zip(*batch.values(), strict=True))
        rounds = zip(*[rows] * self._round, strict=False)  # complete ones only
        own = (row for round in rounds for row in round[self._rank :: self.num_replicas])
        for row in itertools.islice(own, self.start, None):
            yield {name: torch.tensor(values, dtype=torch.int64) for name, values in row}


class ResumableDataLoader(DataLoader[dict[str, Tensor]]):
    """Data loader that uses a :class:`ResumableSampler`, and that saves and restores its position.

    The position is an epoch and the number of samples that all ranks together have received in that epoch. The position
    is the same on every rank and does not count samples that worker processes have prefetched. It can be restored with
    another ``num_workers``, ``batch_size`` or number of ranks.
    """

    has_global_position = True
    """Flag that tells the strategies that the position is for all ranks together, and not for one rank."""

    # Lightning recreates loaders from the arguments of DataLoader, so an __init__ would not set these attributes.
    _epoch = 0
    _samples = 0
    _is_restored = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        # This is a generator, so nothing below runs before the first batch is requested. The epoch is set by then.
        sampler = self.sampler
        if not isinstance(sampler, ResumableSampler):  # Trainer(overfit_batches=...) has replaced the sampler
            yield from super().__iter__()
            return
        # A position is valid in its own epoch only. After an epoch's last batch, the next epoch starts at sample 0.
        if not (self._is_restored and self._epoch == sampler.epoch):
            self._epoch, self._samples = sampler.epoch, 0
        self._is_restored = False
        sampler.start = self._samples // sampler.num_replicas
        for batch in super().__iter__():
            self._samples += len(batch["input_ids"]) * sampler.num_replicas
            yield batch

    def get_optional_restored_batches(self) -> int | None:
        """Return the restored position as a number of batches of the current size, or None if none was restored."""
        if not (self._is_restored and isinstance(self.sampler, ResumableSampler)):
            return None
        return self._samples // ((self.batch_size or 1) * self.sampler.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was handed out."""
        return {"epoch": self._epoch, "samples": self._samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore a position from :meth:`state_dict`. The next iteration continues there if its epoch is the same."""
        self._epoch, self._samples = state_dict["epoch"], state_dict["samples"]
        self._is_restored = True
        if isinstance(self.sampler, ResumableSampler):
            self.sampler.set_epoch(self._epoch)


class ResumableStreamLoader(DataLoader[dict[str, Tensor]]):
    """Data loader over a :class:`SequenceStream` that saves and restores its position.

    The position is like that of a :class:`ResumableDataLoader`, but does not count the last batch that was handed out.
    Lightning reads one batch ahead from a loader without a length, so it has not trained on that batch yet.
    """

    has_global_position = True

    allows_for_read_ahead = True
    """Flag that tells the strategies that the position does not count the batch that Lightning reads ahead."""

    # A position is an epoch and a number of samples.
    # Epochs are counted here, starting at the stream's epoch, because Lightning sets the epoch only on samplers.
    _start: tuple[int, int] | None = None
    _position: tuple[int, int] | None = None
    _restored_samples: int | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        stream = self._get_stream()
        epoch, samples = self._position = self._start or (stream.epoch, 0)
        stream.set_epoch(epoch)
        stream.start = samples // stream.num_replicas
        for number, batch in enumerate(super().__iter__()):
            if number == 1:  # before the second batch, Lightning may start over
                self._start, self._restored_samples = (epoch + 1, 0), None
            self._position = epoch, samples
            samples += len(batch["input_ids"]) * stream.num_replicas
            yield batch
        if samples == 0:
            # without this error, Lightning would start one empty epoch after another
            raise ValueError(
                "The stream has no batch for every rank: it is empty, or has fewer sequences than one step needs."
            )
        self._start = self._position = epoch + 1, 0

    def get_optional_restored_batches(self) -> int | None:
        """Return the restored position as a number of batches of the current size, or None if none was restored."""
        if self._restored_samples is None:
            return None
        return self._restored_samples // ((self.batch_size or 1) * self._get_stream().num_replicas)

    def _get_stream(self) -> SequenceStream:
        return cast(SequenceStream, self.dataset)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was trained on."""
        epoch, samples = self._position or (self._get_stream().epoch, 0)
        return {"epoch": epoch, "samples": samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore a position from :meth:`state_dict`. The next iteration computes and skips the stream up to there."""
        self._start = self._position = state_dict["epoch"], state_dict["samples"]
        self._restored_samples = state_dict["samples"]


def fill_up(dataset: Dataset[dict[str, Tensor]], num_replicas: int) -> Dataset[dict[str, Tensor]]:
    """Add sequences without labels to reach a multiple of ``num_replicas``, so that nothing is evaluated twice.

    The added sequences come first, and each goes to a different rank. So each shares a batch with a sequence of the
    data set, unless batches have only one sequence. Otherwise many losses would be NaN, as they are for a batch without
    any label.
    """
    missing = -len(dataset) % num_replicas  # type: ignore[arg-type]
    if not missing:
        return dataset
    sequence = dataset[0]
    filler = {**sequence, "labels": torch.full_like(sequence["input_ids"], IGNORE_INDEX)}
    return ConcatDataset([[filler] * missing, dataset])  # type: ignore[list-item]


def collate_sequences(
    sequences: list[dict[str, Tensor]], *, pad_to_multiple_of: int | None = None, pad_token_id: int = 0
) -> dict[str, Tensor]:
    """Stack sequences into a batch for a Hugging Face causal model, which shifts the labels itself.

    Args:
        sequences: Sequences with ``input_ids``, optional ``labels`` (default: the ``input_ids``), and optional
            ``position_ids`` that restart at each document. They are tensors of shape [sequence_length]. Shorter
            sequences are padded at their end, without labels. Causal attention needs no mask for the padding.
        pad_to_multiple_of: All sequences are padded to a multiple of this length.
        pad_token_id: Token to pad with.

    Returns:
        ``input_ids``, ``labels`` and, if the sequences have them, ``position_ids``: int64 tensors of shape
        [batch, sequence_length]. The first token of a document has no label, since it would be predicted from
        another document.
    """
    longest = max(len(sequence["input_ids"]) for sequence in sequences)
    length = longest + -longest % (pad_to_multiple_of or 1)
    # all padding has position 0, so that each of its tokens is a document of its own
    padding = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "position_ids": 0}
    complete = [{**sequence, "labels": sequence.get("labels", sequence["input_ids"])} for sequence in sequences]
    batch = {
        name: torch.stack([F.pad(one[name], (0, length - len(one[name])), value=padding[name]) for one in complete])
        for name in complete[0]
    }
    if "position_ids" in batch:
        batch["labels"].masked_fill_(batch["position_ids"] == 0, IGNORE_INDEX)
    return batch

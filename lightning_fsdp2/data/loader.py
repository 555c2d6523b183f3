"""Data loaders that continue at the next sample when a run resumes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
import xxhash
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler
from torch.utils.data import IterableDataset as TorchIterableDataset

from lightning_fsdp2.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import IterableDataset

    from lightning_fsdp2.data.packing import PackedStream

_ROWS_AT_ONCE = 16

# torchdata's StatefulDataLoader does not work here, because it keeps its position in its iterator.
# Lightning 2.6 creates the iterator before it sets the sampler's epoch.
# In our tests with torchdata 0.11 and a DistributedSampler, resuming fails in three cases.
# A run that resumes in its second epoch continues in the order of the first epoch.
# A run that resumes after the last batch of an epoch skips the next epoch.
# A run that resumes with a different `num_workers` ends in an AssertionError.


class ResumableSampler(DistributedSampler[int]):
    """Sampler like torch's ``DistributedSampler`` that can skip samples at the start of an epoch.

    With n ranks, rank r takes the samples r, r + n, r + 2n, … in the epoch's order. So a training step takes the same
    samples on any number of ranks, as long as the batches of all ranks together have the same size. Because this class
    is a subclass of ``DistributedSampler``, ``Trainer(use_distributed_sampler=True)`` does not replace the sampler.

    Args:
        dataset: Dataset with a length.
        num_replicas: Number of ranks.
        rank: Number of this rank.
        shuffle: Whether to shuffle the samples in a different order in each epoch.
        seed: Seed with which the samples are shuffled.
        drop_last: Whether to leave out the last samples if they do not fill all ranks. Otherwise some samples are
            repeated.
        multiple_of: Size of a group of samples over all ranks, a multiple of ``num_replicas``. An epoch consists of
            whole groups. Samples at the end of the epoch that do not fill a group are left out.
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
    """One rank's share of a stream of sequences that are read, tokenised and packed during training.

    Every rank computes the whole stream. With n ranks, rank r takes the sequences r, r + n, r + 2n, … of the stream. So
    a step takes the same sequences on any number of ranks, as with a :class:`ResumableSampler`. Sequences at the end of
    the stream that do not fill a round of ``multiple_of`` sequences are left out.

    Args:
        sequences: Stream of rows whose columns are lists of integers. If the stream is shuffled, its ``set_epoch``
            changes the order.
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
        """Return the share of the same stream that belongs to rank ``rank`` of ``num_replicas`` ranks."""
        return SequenceStream(self._sequences, num_replicas, rank, multiple_of)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next iteration if the stream is shuffled."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._sequences.set_epoch(self.epoch)
        # use the method `iter`, because the builtin `iter` would shuffle differently in a worker process
        batches = self._sequences.iter(batch_size=_ROWS_AT_ONCE)
        rows = (zip(batch, values, strict=True) for batch in batches for values in zip(*batch.values(), strict=True))
        rounds = zip(*[rows] * self._round, strict=False)  # complete rounds only
        own = (row for round in rounds for row in round[self._rank :: self.num_replicas])
        for row in itertools.islice(own, self.start, None):
            yield {name: torch.tensor(values, dtype=torch.int64) for name, values in row}


class ResumableDataLoader(DataLoader[dict[str, Tensor]]):
    """Data loader that uses a :class:`ResumableSampler`, and that saves and restores its position.

    The position is an epoch and the number of samples that all ranks together have received in that epoch. The position
    is the same on every rank and does not count samples that worker processes have prefetched. It can be restored with
    a different ``num_workers``, ``batch_size`` or number of ranks.
    """

    has_global_position = True
    """Flag that tells the strategies that the position counts the samples of all ranks, not of one rank."""

    # Lightning recreates loaders by calling `__init__` with the arguments of DataLoader.
    # So this class has no `__init__` of its own, and these defaults are set on the class.
    _epoch = 0
    _samples = 0
    _is_restored = False
    _fingerprint = ""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        # This is a generator: the code below runs when the first batch is requested, after Lightning has set the epoch.
        sampler = self.sampler
        if not isinstance(sampler, ResumableSampler):  # Trainer(overfit_batches=...) has replaced the sampler
            yield from super().__iter__()
            return
        # A restored position is valid only in its own epoch. All other epochs start at sample 0.
        if not (self._is_restored and self._epoch == sampler.epoch):
            self._epoch, self._samples = sampler.epoch, 0
        self._is_restored = False
        sampler.start = self._samples // sampler.num_replicas
        for batch in super().__iter__():
            self._samples += len(batch["input_ids"]) * sampler.num_replicas
            yield batch

    def _get_fingerprint(self) -> str:
        """Return a text that other data probably has not: a hash of the number of samples, the first and the last."""
        if not self._fingerprint:
            dataset: Any = self.dataset
            rows = [dataset[place] for place in (0, len(dataset) - 1)] if len(dataset) else []
            content = repr([len(dataset), *({name: row[name].tolist() for name in sorted(row)} for row in rows)])
            self._fingerprint = xxhash.xxh3_64_hexdigest(content.encode())
        return self._fingerprint

    def get_optional_restored_batches(self) -> int | None:
        """Return the number of batches, at the current batch size, that precede the restored position.

        Return None if no position was restored.
        """
        if not (self._is_restored and isinstance(self.sampler, ResumableSampler)):
            return None
        return self._samples // ((self.batch_size or 1) * self.sampler.num_replicas)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loader has yielded."""
        return {"epoch": self._epoch, "samples": self._samples, "data": self._get_fingerprint()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position from :meth:`state_dict`.

        The next iteration starts at this position if it iterates over the position's epoch, and at sample 0 otherwise.
        Warn if the position is one in other data.
        """
        if state_dict.get("data", self._get_fingerprint()) != self._get_fingerprint():
            rank_zero_warn(
                f"The checkpoint was saved after {state_dict['samples']} samples of other data (the files, their"
                " content, the tokenizer or sequence_length have changed). The run goes on after as many samples of"
                " this data; to train on them as well, start a new run from an export of the checkpoint."
            )
        self._epoch, self._samples = state_dict["epoch"], state_dict["samples"]
        self._is_restored = True
        if isinstance(self.sampler, ResumableSampler):
            self.sampler.set_epoch(self._epoch)


class ResumableStreamLoader(DataLoader[dict[str, Tensor]]):
    """Data loader over a :class:`SequenceStream` that saves and restores its position.

    The position is like that of a :class:`ResumableDataLoader`, but does not count the last batch that the loader has
    yielded. Lightning reads one batch ahead from a loader without a length, so the model has not been trained on this
    batch yet.
    """

    has_global_position = True

    allows_for_read_ahead = True
    """Flag that tells the strategies that the position does not count the batch that Lightning reads ahead."""

    # A position is an epoch and a number of samples.
    # Lightning sets the epoch only on samplers, so the loader itself counts epochs, starting at the stream's epoch.
    _start: tuple[int, int] | None = None
    _position: tuple[int, int] | None = None
    _restored_samples: int | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]
        stream = self._get_stream()
        epoch, samples = self._position = self._start or (stream.epoch, 0)
        stream.set_epoch(epoch)
        stream.start = samples // stream.num_replicas
        for number, batch in enumerate(super().__iter__()):
            # When a run resumes, Lightning may fetch one batch and then iterate again from the same position.
            # The next iteration therefore starts a new epoch only if this iteration has reached its second batch.
            if number == 1:
                self._start, self._restored_samples = (epoch + 1, 0), None
            self._position = epoch, samples
            samples += len(batch["input_ids"]) * stream.num_replicas
            yield batch
        if samples == 0:
            # without this error, Lightning would run empty epochs forever
            raise ValueError(
                "The stream does not have a batch for every rank: it is empty or has fewer sequences than one step "
                "needs; use more data or smaller batches."
            )
        self._start = self._position = epoch + 1, 0

    def get_optional_restored_batches(self) -> int | None:
        """Return the number of batches, at the current batch size, that precede the restored position.

        Return None if no position was restored.
        """
        if self._restored_samples is None:
            return None
        return self._restored_samples // ((self.batch_size or 1) * self._get_stream().num_replicas)

    def _get_stream(self) -> SequenceStream:
        return cast(SequenceStream, self.dataset)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that the model was trained on."""
        epoch, samples = self._position or (self._get_stream().epoch, 0)
        return {"epoch": epoch, "samples": samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore a position from :meth:`state_dict`.

        The next iteration computes the sequences before this position, but does not yield them.
        """
        self._start = self._position = state_dict["epoch"], state_dict["samples"]
        self._restored_samples = state_dict["samples"]


def fill_up(dataset: Dataset[dict[str, Tensor]], num_replicas: int) -> Dataset[dict[str, Tensor]]:
    """Add sequences without labels to reach a multiple of ``num_replicas``, so that no sequence is evaluated twice.

    The added sequences come first, and each goes to a different rank. Each added sequence therefore shares a batch with
    sequences of the dataset, unless ``batch_size`` is 1. A batch of added sequences alone would have no labels, and its
    loss would be NaN.
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
            ``position_ids`` that restart at each document. All are tensors of shape [sequence_length]. Shorter
            sequences are padded at their end, without labels. Causal attention needs no mask for the padding.
        pad_to_multiple_of: All sequences are padded to a multiple of this length.
        pad_token_id: Token to pad with.

    Returns:
        ``input_ids``, ``labels`` and, if the sequences have them, ``position_ids``: int64 tensors of shape
        [batch, sequence_length]. With ``position_ids``, the first token of a document has no label, since it would be
        predicted from another document.
    """
    longest = max(len(sequence["input_ids"]) for sequence in sequences)
    length = longest + -longest % (pad_to_multiple_of or 1)
    # each token of the padding has position 0, so that it counts as a document of its own
    padding = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "position_ids": 0}
    complete = [{**sequence, "labels": sequence.get("labels", sequence["input_ids"])} for sequence in sequences]
    batch = {
        name: torch.stack([F.pad(one[name], (0, length - len(one[name])), value=padding[name]) for one in complete])
        for name in complete[0]
    }
    if "position_ids" in batch:
        batch["labels"].masked_fill_(batch["position_ids"] == 0, IGNORE_INDEX)
    return batch

"""Base class of the package's data modules, which give each rank resumable batches of token sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.data.checks import check_minimum, check_workers, name_cache
from lightning_fsdp2.data.loader import (
    ResumableDataLoader,
    ResumableSampler,
    ResumableStreamLoader,
    SequenceStream,
    collate_sequences,
    fill_up,
)
from lightning_fsdp2.data.packing import split_documents
from lightning_fsdp2.data.sources import DatasetSplit, find_optional_source, find_source
from lightning_fsdp2.data.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


_DEFAULT_VALIDATION_FRACTION = 0.05
_PLAIN_TYPES = (str, int, float, list, DatasetSplit)


class SequenceDataModule(LightningDataModule, ABC):
    """Base class of data modules that give each data parallel rank resumable batches of token sequences.

    One process per node reads and tokenises the data, in ``prepare_data``. All other processes, and later runs, find
    the result in the cache of the ``datasets`` library. If one rank fails, every rank raises an error, so no rank waits
    forever. A subclass's ``__init__`` must call the four ``_set_...`` methods in the order in which they are defined.

    Args:
        tokenizer: Directory or Hub name of a Hugging Face tokenizer. None for one token per byte.
        cache_dir: Directory in which to keep tokenised text. Default: the cache of the ``datasets`` library.

    Raises:
        ValueError: In ``setup``, when ``global_batch_size`` does not give a whole number of micro-batches.
    """

    train_dataset: Dataset | SequenceStream
    """Training sequences, set by ``setup``: rows of ``{"input_ids": int64 tensor of shape [sequence_length]}``.

    Rows also have ``"position_ids"`` if documents are kept apart, and ``"labels"`` if the model does not learn every
    token. Both columns have the same dtype and shape as ``"input_ids"``.
    """

    validation_dataset: Dataset | None
    """Validation sequences, set by ``setup``, like ``train_dataset``; None without validation."""

    test_dataset: Dataset | None
    """Test sequences, set by ``setup`` for test and predict, like ``train_dataset``; None without test data."""

    def __init__(self, *, tokenizer: str | None, cache_dir: str | None) -> None:
        super().__init__()
        self.cache_dir = cache_dir
        self._tokenizer_name = tokenizer
        self._failure: Exception | None = None

    def _set_batches(
        self, sequence_length: int, pad_to_multiple_of: int | None, batch_size: int, global_batch_size: int | None
    ) -> None:
        """Set the length of sequences and the size of batches.

        Args:
            sequence_length: Tokens per sequence.
            pad_to_multiple_of: Each sequence is padded at its end to a multiple of this length.
            batch_size: Sequences per micro-batch of one data parallel rank.
            global_batch_size: Sequences per optimizer step. Sets the Trainer's ``accumulate_grad_batches``.

        Raises:
            ValueError: When a number is out of range.
        """
        check_minimum("sequence_length", sequence_length, 2, "each token is predicted from those before it")
        check_minimum("batch_size", batch_size, 1, "a rank needs a sequence per micro-batch")
        if pad_to_multiple_of is not None:
            check_minimum("pad_to_multiple_of", pad_to_multiple_of, 1, "leave it out for no padding")
        if global_batch_size is not None:
            check_minimum("global_batch_size", global_batch_size, 1, "leave it out to set the accumulation yourself")
        self.sequence_length = sequence_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size

    def _set_order(self, *, streaming: bool, shuffle: bool, shuffle_buffer: int, seed: int, num_workers: int) -> None:
        """Set how batches of training data are read, and in which order.

        Args:
            streaming: Whether to read, tokenise and pack the training data while training.
            shuffle: Whether to train on the sequences in a different order in each epoch.
            shuffle_buffer: Size of the buffer with which a stream is shuffled, in rows.
            seed: Seed with which the training data is shuffled.
            num_workers: Number of processes per rank that load batches.

        Raises:
            ValueError: When options contradict each other, or a number is out of range.
        """
        check_minimum("num_workers", num_workers, 0, "0 loads batches in the training process")
        check_minimum("shuffle_buffer", shuffle_buffer, 1, "use shuffle=False for the order of the data")
        if streaming and num_workers > 1:
            raise ValueError(
                f"num_workers={num_workers} with streaming=True would read the stream in each worker; use 0 or 1."
            )
        self.streaming = streaming
        self.shuffle = shuffle
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.num_workers = num_workers

    def _set_sources(
        self,
        path: str | list[str] | None,
        dataset: str | None,
        subset: str | None,
        split: str,
        test_path: str | list[str] | None,
        test_split: str | None,
        *,
        suffixes: Iterable[str],
    ) -> None:
        """Set the training and test data, and look for their files, so that every rank reports a misspelt path early.

        Args:
            path: Files, directories or globs to train on.
            dataset: Data to use in place of ``path``: a name for ``datasets.load_dataset``, or a directory that
                ``save_to_disk`` wrote.
            subset: Configuration of ``dataset`` to use.
            split: Part of ``dataset`` to train on.
            test_path: Files to test on, like ``path``.
            test_split: Part of ``dataset`` to test on.
            suffixes: Endings of the files to take from a directory.

        Raises:
            FileNotFoundError: When a path matches no file.
            ValueError: When options contradict each other.
        """
        self.path, self.dataset, self.subset, self.split = path, dataset, subset, split
        self.test_path, self.test_split = test_path, test_split
        self._train = find_source(path, dataset, subset, split, suffixes)
        self._test = find_optional_source("test", test_path, test_split, suffixes, self._train)

    def _set_validation(
        self, fraction: float | None, path: str | list[str] | None, split: str | None, *, suffixes: Iterable[str]
    ) -> None:
        """Set the data to validate on, and look for its files.

        Args:
            fraction: Fraction of the rows to validate on. None for the default.
            path: Files to validate on.
            split: Part of the dataset to validate on.
            suffixes: Endings of the files to take from a directory.

        Raises:
            FileNotFoundError: When ``path`` matches no file.
            ValueError: When options contradict each other, or ``fraction`` is out of range.
        """
        elsewhere = {"validation_path": path, "validation_split": split}
        self.validation_fraction = _get_validation_fraction(fraction, elsewhere, self.streaming)
        self.validation_path, self.validation_split = path, split
        self._validation = find_optional_source("validation", path, split, suffixes, self._train)

    @abstractmethod
    def _load_splits(self) -> tuple[Dataset | SequenceStream, Dataset | None]:
        """Read, tokenise and pack the training and validation data, or load it from the cache if it is there."""

    @abstractmethod
    def _load_test(self) -> Dataset | None:
        """Read, tokenise and pack the test data, or load it from the cache if it is there."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Hugging Face tokenizer, loaded on first use."""
        if self._tokenizer_name is None:
            return build_byte_tokenizer()
        tokenizer = load_tokenizer(self._tokenizer_name)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer={self._tokenizer_name!r} has no end-of-text token to put between documents; "
                "set its eos_token and save it, or use the tokenizer of a causal language model."
            )
        # The first call to a tokenizer switches off the truncation that was saved with it, and so changes its state.
        # This state is part of the cache key and must be the same in all processes, so the first call is made here.
        tokenizer("", verbose=False)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of different tokens of the tokenizer. The ``vocab_size`` of a model must not be smaller."""
        return len(self.tokenizer)

    def prepare_data(self) -> None:
        """Tokenise and pack the data into the cache, in one process per node."""
        self._failure = None
        try:
            with _progress_bars_on_rank_zero(), self._one_node_at_a_time():
                self._load_splits()
                self._load_test()
        except Exception as error:
            self._failure = name_cache(error, str(self._get_cache()))
            if not self._has_other_ranks():
                raise self._failure from (None if self._failure is error else error)
            # raise the error in `setup`, which lets all ranks know and fail together

    @contextmanager
    def _one_node_at_a_time(self) -> Iterator[None]:
        """Let nodes that share a cache fill it one after another, so that later nodes use the first node's files.

        If all nodes wrote at once, every file would be complete, but the last node to finish would replace files that
        the other nodes have memory-mapped. On NFS, the other nodes would lose these files.
        """
        from filelock import FileLock

        options = {name: value for name, value in sorted(vars(self).items()) if isinstance(value, _PLAIN_TYPES)}
        cache = self._get_cache()
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{type(self).__name__}-{xxhash.xxh3_128_hexdigest(repr(options).encode())}.lock"):
            yield

    def _get_cache(self) -> Path:
        from datasets import config

        return Path(self.cache_dir or config.HF_DATASETS_CACHE).expanduser()

    def setup(self, stage: str) -> None:
        """Load the packed sequences from the cache. Every process calls this method."""
        self._raise_together(self._failure)
        if stage == "fit" and self.global_batch_size is not None:
            self._set_accumulation(self.global_batch_size)
        failure = None
        try:
            with _progress_bars_on_rank_zero():
                self._set_datasets(stage)
        except Exception as error:
            failure = error
        self._raise_together(failure)

    def _set_datasets(self, stage: str) -> None:
        if stage in ("fit", "validate"):
            self.train_dataset, self.validation_dataset = self._load_splits()
        else:
            self.test_dataset = self._load_test()

    def _shuffle_stream(self, rows: IterableDataset) -> IterableDataset:
        return rows.shuffle(seed=self.seed, buffer_size=self.shuffle_buffer) if self.shuffle else rows

    def _has_other_ranks(self) -> bool:
        return self.trainer is not None and dist.is_initialized() and dist.get_world_size() > 1

    def _raise_together(self, failure: Exception | None) -> None:
        """Raise an error on every rank if ``failure`` is set on any rank. A rank that failed raises its own error."""
        if self.trainer is None or not self._has_other_ranks():
            if failure is not None:
                raise failure
            return
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        if strategy.reduce_boolean_decision(failure is None, all=True):
            return
        messages = [strategy.broadcast(failure and str(failure), src) for src in range(self.trainer.world_size)]
        if failure is not None:
            raise failure
        source, message = next((src, message) for src, message in enumerate(messages) if message is not None)
        raise ValueError(f"Rank {source} could not read the data (this is rank {rank}): {message}")

    def get_accumulation(self, num_replicas: int) -> int:
        """Return the number of micro-batches per step that ``global_batch_size`` needs on ``num_replicas`` ranks.

        Raises:
            ValueError: When this is not a whole number. The message lists batch sizes that work.
        """
        if self.global_batch_size is None:
            return 1
        accumulation, rest = divmod(self.global_batch_size, self.batch_size * num_replicas)
        if rest:
            raise ValueError(_describe_sizes_that_work(self.global_batch_size, self.batch_size, num_replicas))
        return accumulation

    def build_example_batch(self) -> dict[str, Tensor]:
        """Return a batch with the largest shapes that occur in training, without reading data.

        All tokens of this batch are the same.
        """
        length = self.sequence_length
        sequence = {"input_ids": torch.zeros(length, dtype=torch.int64)}
        if getattr(self, "separate_documents", False):
            sequence["position_ids"] = torch.arange(length) % (length // 2 or 1)
        return collate_sequences([sequence] * self.batch_size, pad_to_multiple_of=self.pad_to_multiple_of)

    def _set_accumulation(self, global_batch_size: int) -> None:
        """Set the Trainer's gradient accumulation so that an optimizer step has ``global_batch_size`` sequences.

        ``setup`` is the only hook that can call this method. Before it, the strategy does not know its data parallel
        ranks. After it, optimizers and schedulers are created, which may use ``trainer.estimated_stepping_batches``.
        """
        num_replicas, _ = self._get_replicas_and_rank()
        accumulation = self.get_accumulation(num_replicas)
        if self.trainer is None:
            return
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            raise ValueError(
                f"global_batch_size={global_batch_size} and GradientAccumulationScheduler both set the accumulation; "
                "leave one of them out."
            )
        if self.trainer.accumulate_grad_batches not in (1, accumulation):
            raise ValueError(
                f"The Trainer's accumulate_grad_batches={self.trainer.accumulate_grad_batches} contradicts "
                f"global_batch_size={global_batch_size}, which needs {accumulation} micro-batches of "
                f"batch_size={self.batch_size} on {num_replicas} data parallel rank(s); leave one of them out."
            )
        if accumulation > 1 and not self.trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch_size={global_batch_size} needs {accumulation} micro-batches per step, but a module with "
                "manual optimization accumulates them itself; leave global_batch_size out."
            )
        self.trainer.accumulate_grad_batches = accumulation

    def train_dataloader(self) -> ResumableDataLoader | ResumableStreamLoader:
        """Return this rank's training batches, in a new order each epoch unless ``shuffle`` is False.

        Sequences at the end that do not fill a batch on every rank are left out. With ``global_batch_size``, sequences
        that do not fill a step are left out, so that the number of steps does not depend on the number of ranks.
        """
        num_replicas, rank = self._get_replicas_and_rank()
        if isinstance(self.train_dataset, SequenceStream):
            stream = self.train_dataset.share(num_replicas, rank, self.global_batch_size)
            stream.set_epoch(self.trainer.current_epoch if self.trainer else 0)  # can be above 0 if resumed
            return ResumableStreamLoader(stream, drop_last=True, **self._get_loader_options())
        needed = self.global_batch_size or self.batch_size * num_replicas
        if len(self.train_dataset) < needed:
            option = "batch_size" if self.global_batch_size is None else "global_batch_size"
            raise ValueError(
                f"{option}={getattr(self, option)} on {num_replicas} data parallel rank(s) needs {needed} sequences "
                f"for one step, but the training data has only {len(self.train_dataset)} of sequence_length="
                f"{self.sequence_length}; lower {option} or sequence_length, or use more text."
            )
        sampler = ResumableSampler(
            self.train_dataset,
            num_replicas,
            rank,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=True,
            multiple_of=self.global_batch_size or 1,
        )
        return self._build_dataloader(self.train_dataset, sampler)

    def val_dataloader(self) -> ResumableDataLoader | list[ResumableDataLoader]:
        """Return this rank's validation batches (the same number on each rank), or an empty list without validation."""
        if self.validation_dataset is None:
            if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
                none = "streaming=True keeps no rows" if self.streaming else "validation_fraction=0 leaves nothing"
                raise ValueError(f"{none} to validate on; give a validation_path or validation_split.")
            return []
        return self._build_evaluation_dataloader(self.validation_dataset)

    def test_dataloader(self) -> ResumableDataLoader:
        """Return this rank's batches of the test sequences. Every rank has the same number of batches."""
        return self._build_evaluation_dataloader(self._get_test_dataset())

    def predict_dataloader(self) -> ResumableDataLoader:
        """Return this rank's batches of the test sequences. Each sequence is on one rank only."""
        dataset, (num_replicas, rank) = self._get_test_dataset(), self._get_replicas_and_rank()
        own = dataset.select(range(rank, len(dataset), num_replicas))
        return self._build_dataloader(own, ResumableSampler(own, 1, 0, shuffle=False))

    def _get_test_dataset(self) -> Dataset:
        if self.test_dataset is None:
            raise ValueError("test_path=None gives no documents to test on; set it, or use `validate`.")
        return self.test_dataset

    def _build_evaluation_dataloader(self, dataset: Dataset) -> ResumableDataLoader:
        num_replicas, rank = self._get_replicas_and_rank()
        filled = fill_up(dataset, num_replicas)
        return self._build_dataloader(filled, ResumableSampler(filled, num_replicas, rank, shuffle=False))

    def _get_replicas_and_rank(self) -> tuple[int, int]:
        """Return the number of data parallel ranks (ranks that share a batch count as one), and this rank's index."""
        # All multi-process strategies set `distributed_sampler_kwargs`. `num_replicas` counts only data parallel ranks.
        sampler_settings = self.trainer.distributed_sampler_kwargs if self.trainer else None
        if sampler_settings is None:
            return 1, 0
        return sampler_settings["num_replicas"], sampler_settings["rank"]

    def _build_dataloader(self, dataset: Dataset, sampler: ResumableSampler) -> ResumableDataLoader:
        return ResumableDataLoader(dataset, sampler=sampler, drop_last=sampler.drop_last, **self._get_loader_options())

    def _get_loader_options(self) -> dict[str, Any]:
        check_workers(self.num_workers)
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "collate_fn": partial(
                collate_sequences,
                pad_to_multiple_of=self.pad_to_multiple_of,
                pad_token_id=self.tokenizer.eos_token_id,
            ),
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            # Each iterator draws a seed, and a resumed run creates a different number of iterators. With draws from the
            # global generator, dropout in the resumed run would differ from dropout in an uninterrupted run.
            "generator": torch.Generator(),
        }


def _get_validation_fraction(fraction: float | None, elsewhere: Mapping[str, Any], streaming: bool) -> float:
    """Return the fraction of the training data to validate on.

    The default is 0.05, or 0 if the user has set separate validation data or the training data is a stream.

    Args:
        fraction: Value from the user; None for the default.
        elsewhere: Values of the options for separate validation data, by option name.
        streaming: Whether the training data is a stream.

    Raises:
        ValueError: When ``fraction`` is not in [0, 1), or is more than 0 with separate validation data or a stream.
    """
    given = {option: value for option, value in elsewhere.items() if value}
    if fraction is None:
        return 0.0 if given or streaming else _DEFAULT_VALIDATION_FRACTION
    if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
        raise ValueError(
            f"validation_fraction={fraction!r} must be at least 0 and less than 1; use 0.05 for one document in"
            " twenty, or 0 for no validation."
        )
    for option, value in given.items():
        if fraction:
            raise ValueError(
                f"validation_fraction={fraction} and {option}={value!r} both choose the validation data; leave one "
                "of them out."
            )
    if streaming and fraction:
        raise ValueError(
            f"validation_fraction={fraction} with streaming=True would have to read the whole stream to find "
            "the validation data; give a validation_path or validation_split."
        )
    return fraction


def split_in_two(documents: Dataset, *, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split documents into a training and a validation set. Raise a ValueError if one of them is empty."""
    train, validation = split_documents(documents, fraction=fraction, seed=seed)
    if not len(train) or not len(validation):
        raise ValueError(
            f"validation_fraction={fraction} splits {len(documents)} document(s) into {len(train)} for training and "
            f"{len(validation)} for validation; use a different fraction or seed, more documents, a validation_path, "
            "or validation_fraction=0 for no validation."
        )
    return train, validation


def _describe_sizes_that_work(global_batch_size: int, batch_size: int, num_replicas: int) -> str:
    """Return an error message that lists the nearest batch sizes that give a whole number of micro-batches."""
    micro = batch_size * num_replicas
    below = global_batch_size // micro * micro
    sizes = [f"global_batch_size={size}" for size in (below, below + micro) if size]
    per_rank, rest = divmod(global_batch_size, num_replicas)
    if not rest:
        divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        nearest = sorted(sorted(divisors, key=lambda size: abs(size - batch_size))[:2])
        sizes += [f"batch_size={size}" for size in nearest]
    return (
        f"global_batch_size={global_batch_size} is not a multiple of batch_size={batch_size} x {num_replicas} data "
        f"parallel rank(s) = {micro}; use {' or '.join(sizes)}."
    )


@contextmanager
def _progress_bars_on_rank_zero() -> Iterator[None]:
    """Hide progress bars inside the ``with`` block, except on global rank 0. Otherwise, every node would show them."""
    import datasets

    is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    hide = not is_first and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()

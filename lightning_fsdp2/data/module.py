"""What the data modules share: sequences of tokens as batches of the ranks, resumable."""

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
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
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

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


_DEFAULT_VALIDATION_FRACTION = 0.05
_PLAIN_TYPES = (str, int, float, list, DatasetSplit)


class SequenceDataModule(LightningDataModule, ABC):
    """Sequences of tokens for a causal language model: each data parallel rank's batches of them, resumable.

    Subclasses read and tokenise. That happens in ``prepare_data`` of one process per node; all others, and later runs,
    find the result in the cache of the ``datasets`` library. Where it fails, it fails on every rank, and none waits.

    Args:
        path: Files, directories or globs to train on.
        dataset: In place of ``path``, what ``datasets.load_dataset`` takes, or a directory that ``save_to_disk`` wrote.
        subset: Which configuration of ``dataset``.
        split: The part of ``dataset`` to train on.
        suffixes: Endings of the files of a directory to take.
        tokenizer: A directory or Hub name of a Hugging Face tokenizer; None for one token per byte.
        sequence_length: Tokens per sequence.
        pad_to_multiple_of: Pad each sequence at its end to a multiple of this length.
        batch_size: Sequences per micro-batch of one data parallel rank.
        global_batch_size: Sequences per optimizer step; sets the Trainer's ``accumulate_grad_batches``.
        validation_fraction: The part of the rows to validate on; None for a default.
        validation_path: What to validate on, like ``path``.
        validation_split: The part of ``dataset`` to validate on.
        test_path: What to test on, like ``path``.
        test_split: The part of ``dataset`` to test on.
        streaming: Read, tokenise and pack what to train on while training.
        shuffle: Train on another order of the sequences in each epoch.
        shuffle_buffer: How many rows of a stream are held to draw the next one from.
        seed: Decides the order.
        num_workers: Processes per rank that load batches.
        cache_dir: Where to keep tokenised text. Default: the cache of the ``datasets`` library.

    Raises:
        FileNotFoundError: A path that gives no file.
        ValueError: Options that contradict each other, or a number out of its range; in ``setup``, a
            ``global_batch_size`` that no accumulation gives.
    """

    train_dataset: Dataset | SequenceStream
    """Set by ``setup``: rows of ``{"input_ids": int64 tensor of shape [sequence_length]}``.

    Where documents are kept apart they have ``"position_ids"``, and where not every token is learned, ``"labels"``, of
    that dtype and shape as well.
    """

    validation_dataset: Dataset | None
    """Set by ``setup``, like ``train_dataset``; None without validation."""

    test_dataset: Dataset | None
    """Set by ``setup`` for test and predict, like ``train_dataset``; None without test data."""

    def __init__(
        self,
        *,
        path: str | list[str] | None,
        dataset: str | None,
        subset: str | None,
        split: str,
        suffixes: Iterable[str],
        tokenizer: str | None,
        sequence_length: int,
        pad_to_multiple_of: int | None,
        batch_size: int,
        global_batch_size: int | None,
        validation_fraction: float | None,
        validation_path: str | list[str] | None,
        validation_split: str | None,
        test_path: str | list[str] | None,
        test_split: str | None,
        streaming: bool,
        shuffle: bool,
        shuffle_buffer: int,
        seed: int,
        num_workers: int,
        cache_dir: str | None,
    ) -> None:
        super().__init__()
        check_minimum("sequence_length", sequence_length, 2, "each token is predicted from those before it")
        check_minimum("batch_size", batch_size, 1, "a rank needs a sequence per micro-batch")
        check_minimum("num_workers", num_workers, 0, "0 loads batches in the training process")
        check_minimum("shuffle_buffer", shuffle_buffer, 1, "use shuffle=False for the order of the data")
        if streaming and num_workers > 1:
            raise ValueError(
                f"num_workers={num_workers} with streaming=True would read the stream that often; use 0 or 1."
            )
        if pad_to_multiple_of is not None:
            check_minimum("pad_to_multiple_of", pad_to_multiple_of, 1, "leave it out for no padding")
        if global_batch_size is not None:
            check_minimum("global_batch_size", global_batch_size, 1, "leave it out to set the accumulation yourself")
        self.validation_fraction = _get_validation_fraction(
            validation_fraction, {"validation_path": validation_path, "validation_split": validation_split}, streaming
        )
        self.path, self.validation_path, self.test_path = path, validation_path, test_path
        self.dataset, self.subset, self.split = dataset, subset, split
        self.validation_split, self.test_split = validation_split, test_split
        self.sequence_length = sequence_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.streaming = streaming
        self.shuffle = shuffle
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = cache_dir
        self._tokenizer_name = tokenizer
        # here, and not in `prepare_data`, so that a misspelt path fails on every rank at once
        self._train = find_source(path, dataset, subset, split, suffixes)
        self._validation = find_optional_source("validation", validation_path, validation_split, suffixes, self._train)
        self._test = find_optional_source("test", test_path, test_split, suffixes, self._train)
        self._failure: Exception | None = None

    @abstractmethod
    def _load_splits(self) -> tuple[Dataset | SequenceStream, Dataset | None]:
        """Read, tokenise and pack what to train and validate on, as far as the cache does not have it yet."""

    @abstractmethod
    def _load_test(self) -> Dataset | None:
        """The same for what to test on."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer, loaded when it is first asked for."""
        if self._tokenizer_name is None:
            return build_byte_tokenizer()
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._tokenizer_name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer={self._tokenizer_name!r} is no directory with a tokenizer, and the Hub has not given it: "
                f"{str(error).splitlines()[0]} Check its spelling, the network and `hf auth login`."
            ) from error
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer={self._tokenizer_name!r} has no end-of-text token to put between documents; "
                "set its eos_token and save it, or use the tokenizer of a causal language model."
            )
        # Its first call undoes what truncation it was saved with. The cache goes by the state it is in, which must not
        # depend on whether this process has used it.
        tokenizer("", verbose=False)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the tokenizer can give: the least ``vocab_size`` of a model."""
        return len(self.tokenizer)

    def prepare_data(self) -> None:
        """Tokenise and pack into the cache, on one process per node."""
        self._failure = None
        try:
            with _progress_bars_on_rank_zero(), self._one_node_at_a_time():
                self._load_splits()
                self._load_test()
        except Exception as error:
            if not self._has_other_ranks():
                raise
            self._failure = error  # the others wait for this rank to come to `setup`, where all hear of it

    @contextmanager
    def _one_node_at_a_time(self) -> Iterator[None]:
        """Let the other nodes that share the cache wait for the first one, and find what it has written.

        Each could write by itself, since files are complete or absent, but the last to be done would replace what the
        others have mapped into memory, which is lost to them on NFS.
        """
        from datasets import config
        from filelock import FileLock

        options = {name: value for name, value in sorted(vars(self).items()) if isinstance(value, _PLAIN_TYPES)}
        cache = Path(self.cache_dir or config.HF_DATASETS_CACHE).expanduser()
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{type(self).__name__}-{xxhash.xxh3_128_hexdigest(repr(options).encode())}.lock"):
            yield

    def setup(self, stage: str) -> None:
        """Take the packed sequences from the cache, on each process."""
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
        """Raise this rank's failure, or that of another one, on every rank."""
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
        raise ValueError(f"Rank {source}, not this rank {rank}, could not read the data: {message}")

    def get_accumulation(self, num_replicas: int) -> int:
        """Return the micro-batches of a step of ``global_batch_size`` sequences on so many data parallel ranks.

        Raises:
            ValueError: When they do not make whole ones; the message says what does.
        """
        if self.global_batch_size is None:
            return 1
        accumulation, rest = divmod(self.global_batch_size, self.batch_size * num_replicas)
        if rest:
            raise ValueError(_describe_sizes_that_work(self.global_batch_size, self.batch_size, num_replicas))
        return accumulation

    def build_example_batch(self) -> dict[str, Tensor]:
        """Return a batch of the largest shapes that training gets, of one token over and over, without reading any."""
        length = self.sequence_length
        sequence = {"input_ids": torch.zeros(length, dtype=torch.int64)}
        if getattr(self, "separate_documents", False):
            sequence["position_ids"] = torch.arange(length) % (length // 2 or 1)
        return collate_sequences([sequence] * self.batch_size, pad_to_multiple_of=self.pad_to_multiple_of)

    def _set_accumulation(self, global_batch_size: int) -> None:
        """Let the Trainer accumulate so many micro-batches that a step has ``global_batch_size`` sequences.

        ``setup`` is the first hook in which the strategy knows its data parallel ranks, and the last one before
        optimizers and schedulers, which may ask for ``trainer.estimated_stepping_batches``, are made.
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
                f"accumulate_grad_batches={self.trainer.accumulate_grad_batches} of the Trainer and "
                f"global_batch_size={global_batch_size}, which is {accumulation} micro-batches of "
                f"batch_size={self.batch_size} on {num_replicas} data parallel rank(s), differ; leave one of them out."
            )
        if accumulation > 1 and not self.trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch_size={global_batch_size} accumulates {accumulation} micro-batches, which a module with "
                "manual optimization does itself; leave global_batch_size out."
            )
        self.trainer.accumulate_grad_batches = accumulation

    def train_dataloader(self) -> ResumableDataLoader | ResumableStreamLoader:
        """Return this rank's batches, in a new order each epoch; the last sequences that fill none are left out.

        With ``global_batch_size``, those that fill no step are, so that epochs have as many steps on any ranks.
        """
        num_replicas, rank = self._get_replicas_and_rank()
        if isinstance(self.train_dataset, SequenceStream):
            stream = self.train_dataset.share(num_replicas, rank, self.global_batch_size)
            stream.set_epoch(self.trainer.current_epoch if self.trainer else 0)  # of a resumed run
            return ResumableStreamLoader(stream, drop_last=True, **self._get_loader_options())
        needed = self.global_batch_size or self.batch_size * num_replicas
        if len(self.train_dataset) < needed:
            option = "batch_size" if self.global_batch_size is None else "global_batch_size"
            raise ValueError(
                f"{option}={getattr(self, option)} on {num_replicas} data parallel rank(s) needs {needed} sequences "
                f"for one step, but there are {len(self.train_dataset)} of sequence_length={self.sequence_length} to "
                "train on; lower one of these numbers or use more text."
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
        """Return this rank's batches of the validation sequences, as many on every rank; none without validation."""
        if self.validation_dataset is None:
            return []
        return self._build_evaluation_dataloader(self.validation_dataset)

    def test_dataloader(self) -> ResumableDataLoader:
        """Return this rank's batches of the test sequences, as many on every rank."""
        return self._build_evaluation_dataloader(self._get_test_dataset())

    def predict_dataloader(self) -> ResumableDataLoader:
        """Return this rank's batches of the test sequences, each sequence on one rank only."""
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
        """Return the number of ranks that get different batches, and which of them this one is."""
        # Every strategy of several processes tells it here, those with model parallel ranks as well.
        sampler_settings = self.trainer.distributed_sampler_kwargs if self.trainer else None
        if sampler_settings is None:
            return 1, 0
        return sampler_settings["num_replicas"], sampler_settings["rank"]

    def _build_dataloader(self, dataset: Dataset, sampler: ResumableSampler) -> ResumableDataLoader:
        return ResumableDataLoader(dataset, sampler=sampler, drop_last=sampler.drop_last, **self._get_loader_options())

    def _get_loader_options(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "collate_fn": partial(
                collate_sequences,
                pad_to_multiple_of=self.pad_to_multiple_of,
                pad_token_id=self.tokenizer.eos_token_id,
            ),
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            # Each iterator draws a seed. From the global generator, a resumed run, which makes another number of them
            # than an uninterrupted one, would go on with other random numbers, in dropout for example.
            "generator": torch.Generator(),
        }


def check_minimum(option: str, value: int, minimum: int, reason: str) -> None:
    """Raise a ValueError that names the option and the reason, where ``value`` is less than ``minimum``."""
    if value < minimum:
        raise ValueError(f"{option}={value} is less than {minimum}, the least that works: {reason}.")


def _get_validation_fraction(fraction: float | None, elsewhere: Mapping[str, Any], streaming: bool) -> float:
    """Return the part of what to train on that is validated on: by default 0.05 where nothing else is, and it can be.

    Args:
        fraction: What the user says.
        elsewhere: The options that give another place to take it from.
        streaming: Whether the data is a stream.

    Raises:
        ValueError: It is not in [0, 1), there is another place as well, or it is one of a stream.
    """
    given = {option: value for option, value in elsewhere.items() if value}
    if fraction is None:
        return 0.0 if given or streaming else _DEFAULT_VALIDATION_FRACTION
    if not 0 <= fraction < 1:
        raise ValueError(
            f"validation_fraction={fraction} must be at least 0 and less than 1; use 0.05 for one document in twenty, "
            "or 0 for no validation."
        )
    for option, value in given.items():
        if fraction:
            raise ValueError(
                f"validation_fraction={fraction} and {option}={value!r} both say what to validate on; leave one of "
                "them out."
            )
    if streaming and fraction:
        raise ValueError(
            f"validation_fraction={fraction} with streaming=True would hold back a part of every pass over "
            "the stream; give a validation_path or validation_split."
        )
    return fraction


def split_in_two(documents: Dataset, *, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split documents into training and validation ones; a ValueError where one side runs empty."""
    train, validation = split_documents(documents, fraction=fraction, seed=seed)
    if not len(train) or not len(validation):
        raise ValueError(
            f"validation_fraction={fraction} splits {len(documents)} document(s) into {len(train)} for training and "
            f"{len(validation)} for validation; use another fraction or seed, more documents, a validation_path, or "
            "validation_fraction=0 for no validation."
        )
    return train, validation


def _describe_sizes_that_work(global_batch_size: int, batch_size: int, num_replicas: int) -> str:
    """Say which numbers near the ones given make whole micro-batches."""
    micro = batch_size * num_replicas
    below = global_batch_size // micro * micro
    sizes = [f"global_batch_size={size}" for size in (below, below + micro) if size]
    per_rank, rest = divmod(global_batch_size, num_replicas)
    if not rest:
        divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        nearest = sorted(sorted(divisors, key=lambda size: abs(size - batch_size))[:2])
        sizes += [f"batch_size={size}" for size in nearest]
    return (
        f"global_batch_size={global_batch_size} is no multiple of batch_size={batch_size} x {num_replicas} data "
        f"parallel rank(s) = {micro}; use {' or '.join(sizes)}."
    )


@contextmanager
def _progress_bars_on_rank_zero() -> Iterator[None]:
    """Keep the first process of every other node, which tokenises as well, from showing bars of its own."""
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

"""Text files as a LightningDataModule for causal language models."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningDataModule

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.data.loader import ResumableDataLoader, ResumableSampler, collate_sequences, fill_up
from lightning_fsdp2.data.packing import pack_documents, split_documents
from lightning_fsdp2.data.sources import DEFAULT_SUFFIXES, find_files, load_documents

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_DEFAULT_VALIDATION_FRACTION = 0.05


class TextDataModule(LightningDataModule):
    """Text files to train a causal language model on: tokenised, packed, shuffled and resumable.

    Every batch is ``{"input_ids", "labels"}``, two int64 tensors of shape [batch_size, sequence_length], equal where
    there is a label: Hugging Face models shift the labels themselves. Documents are joined to one stream, an
    end-of-text token behind each, and the stream is cut into sequences; its last piece, shorter than a sequence, is
    dropped.

    Tokenising happens once, in ``prepare_data`` of one process per node; all others, and later runs, find the result in
    the cache of the ``datasets`` library. A resumed run goes on at the next sample. Where the ranks do not divide the
    number of sequences to validate or test on, some begin with a sequence without labels (-100), so that each token
    counts once. ``CausalLM`` takes whole batches of these, while ``model(**batch).loss`` of one is NaN.

    Args:
        path: A file, a directory, a glob, ``python-stdlib`` (the source of Python's own standard library), or a list of
            them. ``.json``, ``.jsonl`` and ``.parquet`` files hold a document per row, any other file is one document
            in UTF-8.
        text_column: The column of JSON and Parquet files that holds the documents.
        suffixes: Which files of a directory to take, by the ending of their name. Default: .txt .md .py .json .jsonl
            .parquet
        tokenizer: A directory or Hub name of a Hugging Face tokenizer. Default: one token per byte, which needs no
            download.
        sequence_length: Tokens per sequence.
        pad_to_multiple_of: Pad each sequence at its end, with end-of-text tokens and without labels, to a multiple of
            this length: context and sequence parallelism need one of ``2 * cp_size * tp_size``.
        separate_documents: Let no token see, or be predicted from, another document of its sequence: batches have
            ``position_ids`` that restart at each one, and documents' first tokens have no label. It is for the model's
            attention to go by them, and ``CausalLM`` refuses those that do not: outside of context parallelism, flash
            attention does so at ``batch_size=1`` only.
        batch_size: Sequences per micro-batch of one data parallel rank.
        validation_fraction: The part of the documents of ``path`` to validate on, chosen by their content; of a lone
            document, its end. Default: 0.05, or 0 if there is a ``validation_path``.
        validation_path: Documents to validate on, like ``path``.
        test_path: Documents for ``trainer.test`` and ``trainer.predict``, like ``path``.
        shuffle: Train on another order of the sequences in each epoch.
        seed: Decides the order and which documents are for validation.
        num_workers: Processes per rank that load batches.
        max_documents: Use only the first documents of ``path``, this many.
        cache_dir: Where to keep tokenised text. Default: the cache of the ``datasets`` library.

    Raises:
        FileNotFoundError: A path that gives no file.
        ValueError: A number out of its range; later, in ``prepare_data`` and ``setup``, text that fills no batch.
    """

    train_dataset: Dataset
    """Set by ``setup``: rows of ``{"input_ids": int64 tensor of shape [sequence_length]}``.

    With ``separate_documents`` they have ``"position_ids"`` of that dtype and shape as well.
    """

    validation_dataset: Dataset | None
    """Set by ``setup``, like ``train_dataset``; None without validation."""

    test_dataset: Dataset | None
    """Set by ``setup`` for test and predict, like ``train_dataset``; None without ``test_path``."""

    def __init__(
        self,
        *,
        path: str | list[str],
        text_column: str = "text",
        suffixes: list[str] | None = None,
        tokenizer: str | None = None,
        sequence_length: int = 512,
        pad_to_multiple_of: int | None = None,
        separate_documents: bool = False,
        batch_size: int = 8,
        validation_fraction: float | None = None,
        validation_path: str | list[str] | None = None,
        test_path: str | list[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        max_documents: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        if validation_fraction is None:
            validation_fraction = 0.0 if validation_path else _DEFAULT_VALIDATION_FRACTION
        _check_minimum("sequence_length", sequence_length, 2, "each token is predicted from those before it")
        _check_minimum("batch_size", batch_size, 1, "a rank needs a sequence per micro-batch")
        _check_minimum("num_workers", num_workers, 0, "0 loads batches in the training process")
        if pad_to_multiple_of is not None:
            _check_minimum("pad_to_multiple_of", pad_to_multiple_of, 1, "leave it out for no padding")
        if max_documents is not None:
            _check_minimum("max_documents", max_documents, 1, "leave it out to use all documents")
        if not 0 <= validation_fraction < 1:
            raise ValueError(
                f"validation_fraction={validation_fraction} is not in [0, 1), so nothing is left to train on; "
                "use 0.05 for one document in twenty, or 0 for no validation."
            )
        if validation_path and validation_fraction:
            raise ValueError(
                f"validation_fraction={validation_fraction} and validation_path={validation_path!r} both say what to "
                "validate on; leave one of them out."
            )
        self.text_column = text_column
        self.sequence_length = sequence_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.separate_documents = separate_documents
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.max_documents = max_documents
        self.cache_dir = cache_dir
        self._tokenizer_name = tokenizer
        # Here, and not in prepare_data, so that a misspelt path fails on every rank at once.
        suffixes = suffixes or list(DEFAULT_SUFFIXES)
        self._files = find_files(path, suffixes)
        self._validation_files = (
            find_files(validation_path, suffixes, option="validation_path") if validation_path else []
        )
        self._test_files = find_files(test_path, suffixes, option="test_path") if test_path else []

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer, loaded when it is first asked for."""
        if self._tokenizer_name is None:
            return build_byte_tokenizer()
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._tokenizer_name)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer={self._tokenizer_name!r} has no end-of-text token to put between documents; "
                "set its eos_token and save it, or use the tokenizer of a causal language model."
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the tokenizer can give: the least ``vocab_size`` of a model."""
        return len(self.tokenizer)

    def prepare_data(self) -> None:
        """Tokenise and pack into the cache, on one process per node."""
        self._load_splits()
        self._load_test()

    def setup(self, stage: str) -> None:
        """Take the packed sequences from the cache, on each process."""
        if stage in ("fit", "validate"):
            self.train_dataset, self.validation_dataset = self._load_splits()
        else:
            self.test_dataset = self._load_test()

    def train_dataloader(self) -> ResumableDataLoader:
        """Return this rank's batches, in a new order each epoch; the last sequences that fill no batch are left out."""
        num_replicas, rank = self._get_replicas_and_rank()
        needed = self.batch_size * num_replicas
        if len(self.train_dataset) < needed:
            raise ValueError(
                f"batch_size={self.batch_size} on {num_replicas} data parallel rank(s) needs {needed} sequences for "
                f"one step, but there are {len(self.train_dataset)} of sequence_length={self.sequence_length} to train "
                "on; lower one of these numbers or use more text."
            )
        sampler = ResumableSampler(
            self.train_dataset, num_replicas, rank, shuffle=self.shuffle, seed=self.seed, drop_last=True
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
        return ResumableDataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            drop_last=sampler.drop_last,
            num_workers=self.num_workers,
            collate_fn=partial(
                collate_sequences,
                pad_to_multiple_of=self.pad_to_multiple_of,
                pad_token_id=self.tokenizer.eos_token_id,
            ),
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            # Each iterator draws a seed. From the global generator, a resumed run, which makes another number of them
            # than an uninterrupted one, would go on with other random numbers, in dropout for example.
            generator=torch.Generator(),
        )

    def _load_splits(self) -> tuple[Dataset, Dataset | None]:
        """Read, split, tokenise and pack, as far as the cache does not have it yet."""
        documents = self._load(self._files)
        if self.max_documents is not None:
            documents = documents.select(range(min(self.max_documents, len(documents))))
        if self._validation_files:
            return self._pack(documents, "training"), self._pack(self._load(self._validation_files), "validation")
        if self.validation_fraction == 0:
            return self._pack(documents, "training"), None
        train, validation = split_documents(documents, fraction=self.validation_fraction, seed=self.seed)
        if not len(train) or not len(validation):
            raise ValueError(
                f"validation_fraction={self.validation_fraction} splits {len(documents)} document(s) into {len(train)} "
                f"for training and {len(validation)} for validation; use another fraction or seed, more documents, a "
                "validation_path, or validation_fraction=0 for no validation."
            )
        remedy = "use shorter sequences, a larger validation_fraction or a validation_path"
        return self._pack(train, "training"), self._pack(validation, "validation", remedy=remedy)

    def _load_test(self) -> Dataset | None:
        return self._pack(self._load(self._test_files), "test") if self._test_files else None

    def _load(self, files: list[str]) -> Dataset:
        return load_documents(files, text_column=self.text_column, cache_dir=self.cache_dir)

    def _pack(self, documents: Dataset, split: str, **options: str) -> Dataset:
        return pack_documents(
            documents,
            tokenizer=self.tokenizer,
            sequence_length=self.sequence_length,
            with_position_ids=self.separate_documents,
            split=split,
            **options,
        )


def _check_minimum(option: str, value: int, minimum: int, reason: str) -> None:
    if value < minimum:
        raise ValueError(f"{option}={value} is less than {minimum}, the least that works: {reason}.")

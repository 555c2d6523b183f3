"""Text files as a LightningDataModule for causal language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fsdp2.data.module import SequenceDataModule, check_minimum, get_validation_fraction, split_in_two
from lightning_fsdp2.data.packing import pack_documents
from lightning_fsdp2.data.sources import DEFAULT_SUFFIXES, find_files, load_documents

if TYPE_CHECKING:
    from datasets import Dataset


class TextDataModule(SequenceDataModule):
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
        global_batch_size: Sequences per optimizer step of all ranks, a multiple of ``batch_size`` times the data
            parallel ranks: sets the Trainer's ``accumulate_grad_batches``, so that a run can go on with another number
            of ranks. The last step of an epoch may have fewer.
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
        global_batch_size: int | None = None,
        validation_fraction: float | None = None,
        validation_path: str | list[str] | None = None,
        test_path: str | list[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        max_documents: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            pad_to_multiple_of=pad_to_multiple_of,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
        )
        if max_documents is not None:
            check_minimum("max_documents", max_documents, 1, "leave it out to use all documents")
        self.path, self.validation_path, self.test_path = path, validation_path, test_path
        self.text_column = text_column
        self.separate_documents = separate_documents
        self.validation_fraction = get_validation_fraction(validation_fraction, validation_path)
        self.max_documents = max_documents
        # Here, and not in prepare_data, so that a misspelt path fails on every rank at once.
        suffixes = suffixes or list(DEFAULT_SUFFIXES)
        self._files = find_files(path, suffixes)
        self._validation_files = (
            find_files(validation_path, suffixes, option="validation_path") if validation_path else []
        )
        self._test_files = find_files(test_path, suffixes, option="test_path") if test_path else []

    def _load_splits(self) -> tuple[Dataset, Dataset | None]:
        documents = self._load(self._files)
        if self.max_documents is not None:
            documents = documents.select(range(min(self.max_documents, len(documents))))
        if self._validation_files:
            return self._pack(documents, "training"), self._pack(self._load(self._validation_files), "validation")
        if self.validation_fraction == 0:
            return self._pack(documents, "training"), None
        train, validation = split_in_two(documents, fraction=self.validation_fraction, seed=self.seed)
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

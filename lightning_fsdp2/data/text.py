"""Data module of text files for causal language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fsdp2.data.checks import check_minimum
from lightning_fsdp2.data.files import DEFAULT_SUFFIXES
from lightning_fsdp2.data.loader import SequenceStream
from lightning_fsdp2.data.module import SequenceDataModule, split_in_two
from lightning_fsdp2.data.packing import PackedStream, pack_documents
from lightning_fsdp2.data.sources import Source, load_documents

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


class TextDataModule(SequenceDataModule):
    """Data module that tokenises, packs and shuffles text for training a causal language model, and that can resume.

    Every batch is ``{"input_ids", "labels"}``, two int64 tensors of shape [batch_size, sequence_length]. A label equals
    the input token at the same position, because Hugging Face models shift the labels themselves; -100 means no label.
    Documents are joined into one stream, with an end-of-text token after each, and the stream is cut into sequences.
    Tokens at the end of the stream that do not fill a sequence are dropped.

    One process per node tokenises the data, in ``prepare_data``. All other processes, and later runs, find the result
    in the cache of the ``datasets`` library. A resumed run continues at the next sample.

    If the number of validation or test sequences is not a multiple of the number of ranks, some ranks get one
    additional sequence without labels, so that each token counts once. ``CausalLM`` accepts batches without any label,
    but ``model(**batch).loss`` is NaN for such batches.

    Args:
        path: A file, a directory, a glob, ``python-stdlib`` (the source of Python's own standard library), or a list of
            them. ``.csv``, ``.json``, ``.jsonl`` and ``.parquet`` files contain one document per row. Any other file is
            one document in UTF-8. Files may be compressed (``.gz``, ``.bz2``, ``.xz``, ``.zst``). A path that is given
            twice is used twice.
        dataset: Data to use in place of ``path``, with one document per row: a name for ``datasets.load_dataset``, such
            as a dataset on the Hugging Face Hub, or a directory that ``save_to_disk`` wrote.
        subset: Configuration of ``dataset`` to use, if it has several.
        split: Part of ``dataset`` to train on.
        text_column: Column of datasets, CSV, JSON and Parquet files that contains the documents.
        suffixes: Endings of the names of files to take from a directory. Default: .txt .md .py .json .jsonl
            .csv .parquet.
        tokenizer: Directory or Hub name of a Hugging Face tokenizer. Default: one token per byte, which needs no
            download.
        sequence_length: Tokens per sequence.
        pad_to_multiple_of: Each sequence is padded at its end to a multiple of this length, with end-of-text tokens and
            without labels. Context and sequence parallelism need a multiple of ``2 * cp_size * tp_size``.
        separate_documents: Whether to keep the documents in a sequence apart, so that no token attends to, or is
            predicted from, another document. Batches then have ``position_ids`` that restart at each document, and the
            first tokens of documents have no label. The model's attention must respect ``position_ids``; ``CausalLM``
            rejects models whose attention does not. Flash attention respects ``position_ids`` only at
            ``batch_size=1`` or under context parallelism.
        batch_size: Sequences per micro-batch of one data parallel rank.
        global_batch_size: Sequences per optimizer step of all ranks, a multiple of ``batch_size`` times the number of
            data parallel ranks. The data module sets the Trainer's ``accumulate_grad_batches`` accordingly, so that a
            run can continue with a different number of ranks. Sequences at the end of an epoch that do not fill a step
            are left out.
        validation_fraction: Fraction of the documents to validate on, chosen by their content. If there is only one
            document, its end is used. The default is 0.05, or 0 with a ``validation_path``, a ``validation_split`` or
            ``streaming``.
        validation_path: Documents to validate on, like ``path``.
        validation_split: Part of ``dataset`` to validate on.
        test_path: Documents for ``trainer.test`` and ``trainer.predict``, like ``path``.
        test_split: Part of ``dataset`` for ``trainer.test`` and ``trainer.predict``.
        streaming: Whether to read, tokenise and pack the training data while training, for data that is too large to
            store. Every rank reads all the data and keeps its share. A resumed run reads the data from the beginning,
            and skips the part on which it has already been trained.
        shuffle: Whether to train on the sequences in a different order in each epoch.
        shuffle_buffer: Size of the buffer with which a stream is shuffled, in documents.
        seed: Seed for shuffling and for the choice of documents for validation.
        num_workers: Number of processes per rank that load batches; at most 1 with ``streaming``.
        max_documents: Number of documents to train on, taken from the beginning. Default: all of them.
        cache_dir: Directory in which to keep tokenised text. Default: the cache of the ``datasets`` library.

    Raises:
        FileNotFoundError: When a path matches no file.
        ValueError: When options contradict each other or are out of range. Later, in ``prepare_data`` and ``setup``,
            when the text does not fill a batch, or when the dataset, split or column does not exist.
    """

    def __init__(
        self,
        *,
        path: str | list[str] | None = None,
        dataset: str | None = None,
        subset: str | None = None,
        split: str = "train",
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
        validation_split: str | None = None,
        test_path: str | list[str] | None = None,
        test_split: str | None = None,
        streaming: bool = False,
        shuffle: bool = True,
        shuffle_buffer: int = 10_000,
        seed: int = 0,
        num_workers: int = 0,
        max_documents: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(tokenizer=tokenizer, cache_dir=cache_dir)
        self._set_batches(sequence_length, pad_to_multiple_of, batch_size, global_batch_size)
        self._set_order(
            streaming=streaming, shuffle=shuffle, shuffle_buffer=shuffle_buffer, seed=seed, num_workers=num_workers
        )
        endings = suffixes or DEFAULT_SUFFIXES
        self._set_sources(path, dataset, subset, split, test_path, test_split, suffixes=endings)
        self._set_validation(validation_fraction, validation_path, validation_split, suffixes=endings)
        if max_documents is not None:
            check_minimum("max_documents", max_documents, 1, "leave it out to use all documents")
        self.text_column = text_column
        self.separate_documents = separate_documents
        self.max_documents = max_documents

    def _load_splits(self) -> tuple[Dataset | SequenceStream, Dataset | None]:
        validation = self._validation and self._load(self._validation)
        documents = self._load(self._train, streaming=self.streaming)
        if self.max_documents is not None:
            documents = documents.take(self.max_documents)
        if self.streaming:
            return self._stream(documents), self._pack(validation, "validation") if validation else None
        options = {}
        if self.validation_fraction:
            documents, validation = split_in_two(documents, fraction=self.validation_fraction, seed=self.seed)
            options["remedy"] = "use shorter sequences, a larger validation_fraction or a validation_path"
        train = self._pack(documents, "training")
        return train, self._pack(validation, "validation", **options) if validation else None

    def _load_test(self) -> Dataset | None:
        return self._pack(self._load(self._test), "test") if self._test else None

    def _load(self, source: Source, *, streaming: bool = False) -> Dataset | IterableDataset:
        return load_documents(source, text_column=self.text_column, streaming=streaming, cache_dir=self.cache_dir)

    def _stream(self, documents: IterableDataset) -> SequenceStream:
        return SequenceStream(PackedStream(self._shuffle_stream(documents), **self._get_packing_options()))

    def _pack(self, documents: Dataset, split: str, **options: str) -> Dataset:
        return pack_documents(documents, **{"split": split, **options, **self._get_packing_options()})

    def _get_packing_options(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "sequence_length": self.sequence_length,
            "with_position_ids": self.separate_documents,
        }

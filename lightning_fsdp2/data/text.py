"""Text files as a LightningDataModule for causal language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fsdp2.data.loader import SequenceStream
from lightning_fsdp2.data.module import SequenceDataModule, check_minimum, split_in_two
from lightning_fsdp2.data.packing import PackedStream, pack_documents
from lightning_fsdp2.data.sources import DEFAULT_SUFFIXES, Source, load_documents

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


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
        dataset: In place of ``path``, a dataset of the Hugging Face Hub or of a local directory, a document per row:
            what ``datasets.load_dataset`` takes, or a directory that ``save_to_disk`` wrote.
        subset: Which configuration of ``dataset``, if it has several.
        split: The part of ``dataset`` to train on.
        text_column: The column of datasets, JSON and Parquet files that holds the documents.
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
            of ranks. The last sequences of an epoch, which are fewer, are left out.
        validation_fraction: The part of the documents to validate on, chosen by their content; of a lone document, its
            end. Default: 0.05, or 0 if there is a ``validation_path`` or ``validation_split``, or with ``streaming``.
        validation_path: Documents to validate on, like ``path``.
        validation_split: The part of ``dataset`` to validate on.
        test_path: Documents for ``trainer.test`` and ``trainer.predict``, like ``path``.
        test_split: The part of ``dataset`` for them.
        streaming: Read, tokenise and pack what to train on while training, for data that is too much to store. Every
            rank reads all of it and keeps its share, and a resumed run reads again what it has been trained on.
        shuffle: Train on another order of the sequences in each epoch.
        shuffle_buffer: How many documents of a stream are held to draw the next one from.
        seed: Decides the order and which documents are for validation.
        num_workers: Processes per rank that load batches; at most 1 with ``streaming``.
        max_documents: Use only the first documents to train on, this many.
        cache_dir: Where to keep tokenised text. Default: the cache of the ``datasets`` library.

    Raises:
        FileNotFoundError: A path that gives no file.
        ValueError: Options that contradict each other or are out of their range; later, in ``prepare_data`` and
            ``setup``, text that fills no batch, or a dataset, split or column that there is not.
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
        super().__init__(
            path=path,
            dataset=dataset,
            subset=subset,
            split=split,
            suffixes=suffixes or DEFAULT_SUFFIXES,
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            pad_to_multiple_of=pad_to_multiple_of,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            validation_fraction=validation_fraction,
            validation_path=validation_path,
            validation_split=validation_split,
            test_path=test_path,
            test_split=test_split,
            streaming=streaming,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            num_workers=num_workers,
            cache_dir=cache_dir,
        )
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

"""Data module of conversations for supervised fine-tuning."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fsdp2.data.checks import check_minimum
from lightning_fsdp2.data.conversations import tokenize_conversations
from lightning_fsdp2.data.lengths import LengthStatistics, measure_lengths
from lightning_fsdp2.data.loader import SequenceStream
from lightning_fsdp2.data.messages import Columns
from lightning_fsdp2.data.module import SequenceDataModule, split_in_two
from lightning_fsdp2.data.packing import pack_conversations, select_with_answers
from lightning_fsdp2.data.sources import load_rows

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class ChatDataModule(SequenceDataModule):
    """Data module of conversations for fine-tuning, with the loss on the assistant's answers only.

    A row has ``messages``, each with a ``role`` (system, developer, user, assistant or tool) and a ``content``. A row
    may also have ``tools``. Instead of ``messages``, a row may have a ``prompt`` and a ``completion``: either the texts
    of the user and the assistant, or lists of messages.

    The tokenizer's chat template turns a row into text. A template can mark the answers with ``{% generation %}``. With
    any other template, an answer is the text between the template's generation prompt and the end of the turn. This
    rule fails for templates that write a turn differently when more turns follow, so such templates are rejected.

    Every batch is ``{"input_ids", "labels", "position_ids"}``, int64 tensors of shape [batch_size, sequence_length].
    By default, several whole conversations are packed into one sequence. ``position_ids`` restart at each conversation,
    so no conversation attends to another. The model's attention must respect ``position_ids``; ``CausalLM`` rejects
    models whose attention does not. Flash attention respects ``position_ids`` only at ``batch_size=1`` or under context
    parallelism. Conversations longer than a sequence are truncated, and a warning says how many were truncated.

    One process per node tokenises the data, in ``prepare_data``. All other processes, and later runs with the same
    data, tokenizer, template and options, find the result in the cache of the ``datasets`` library. A resumed run
    continues at the next sequence, on any number of ranks.

    Args:
        path: A file, a directory, a glob, or a list of them. ``.jsonl`` files contain one object per line. ``.json``
            files contain either one object per line or one list of objects. ``.parquet`` files contain rows of a table,
            and ``.csv`` files pairs of prompt and completion. Files may be compressed (``.gz``, ``.bz2``, ``.xz``,
            ``.zst``). A path that is given twice is used twice.
        dataset: Data to use in place of ``path``: a name for ``datasets.load_dataset``, such as a dataset on the
            Hugging Face Hub, or a directory that ``save_to_disk`` wrote.
        subset: Configuration of ``dataset`` to use, if it has several.
        split: Part of ``dataset`` to train on.
        messages_column: Column of a row's messages.
        prompt_column: Column of the prompt (a text or messages), in rows without ``messages_column``.
        completion_column: Column of the answer, in rows without ``messages_column``.
        tokenizer: Directory or Hub name of a Hugging Face tokenizer. Default: one token per byte, which needs no
            download, but needs a ``chat_template``.
        chat_template: File with a Jinja template, or the template itself, to use in place of the tokenizer's own.
        sequence_length: Tokens per sequence.
        pack: Whether to put several conversations into one sequence. Otherwise each conversation is a sequence, padded
            to the longest of its batch, and batches have no ``position_ids``.
        pad_to_multiple_of: Each sequence is padded at its end to a multiple of this length, with end-of-text tokens and
            without labels. Context and sequence parallelism need a multiple of ``2 * cp_size * tp_size``.
        batch_size: Sequences per micro-batch of one data parallel rank.
        global_batch_size: Sequences per optimizer step of all ranks, a multiple of ``batch_size`` times the number of
            data parallel ranks. The data module sets the Trainer's ``accumulate_grad_batches`` accordingly, so that a
            run can continue with a different number of ranks. Sequences at the end of an epoch that do not fill a step
            are left out.
        validation_fraction: Fraction of the conversations to validate on, chosen by their content. The default is 0.05,
            or 0 with a ``validation_path``, a ``validation_split`` or ``streaming``.
        validation_path: Conversations to validate on, like ``path``.
        validation_split: Part of ``dataset`` to validate on.
        test_path: Conversations for ``trainer.test`` and ``trainer.predict``, like ``path``.
        test_split: Part of ``dataset`` for ``trainer.test`` and ``trainer.predict``.
        streaming: Whether to read, tokenise and pack the training data while training, for data that is too large to
            store. Every rank reads all the data and keeps its share. A resumed run reads the data from the beginning,
            and skips the part on which it has already been trained.
        shuffle: Whether to train on the sequences in a different order in each epoch.
        shuffle_buffer: Size of the buffer with which a stream is shuffled, in conversations.
        seed: Seed for shuffling and for the choice of conversations for validation.
        num_workers: Number of processes per rank that load batches; at most 1 with ``streaming``.
        max_conversations: Number of conversations to train on, taken from the beginning. Default: all of them.
        cache_dir: Directory in which to keep tokenised text. Default: the cache of the ``datasets`` library.

    Raises:
        FileNotFoundError: When a path matches no file.
        ValueError: When options contradict each other or are out of range. Later, in ``prepare_data`` and ``setup``,
            when the tokenizer has no chat template, or when a row is not a conversation with an answer; the message
            then names the file and the line. The rows of a stream are checked only when training reads them.
    """

    statistics: dict[str, LengthStatistics]
    """Length statistics by split (``training``, ``validation``, ``test``), set by ``setup``. Streams have none."""

    def __init__(
        self,
        *,
        path: str | list[str] | None = None,
        dataset: str | None = None,
        subset: str | None = None,
        split: str = "train",
        messages_column: str = "messages",
        prompt_column: str = "prompt",
        completion_column: str = "completion",
        tokenizer: str | None = None,
        chat_template: str | None = None,
        sequence_length: int = 2048,
        pack: bool = True,
        pad_to_multiple_of: int | None = None,
        batch_size: int = 1,
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
        max_conversations: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(tokenizer=tokenizer, cache_dir=cache_dir)
        self._set_batches(sequence_length, pad_to_multiple_of, batch_size, global_batch_size)
        self._set_order(
            streaming=streaming, shuffle=shuffle, shuffle_buffer=shuffle_buffer, seed=seed, num_workers=num_workers
        )
        self._set_sources(path, dataset, subset, split, test_path, test_split, suffixes=_SUFFIXES)
        self._set_validation(validation_fraction, validation_path, validation_split, suffixes=_SUFFIXES)
        if max_conversations is not None:
            check_minimum("max_conversations", max_conversations, 1, "leave it out to use all conversations")
        self.columns = Columns(messages_column, prompt_column, completion_column)
        self.separate_documents = pack
        self.max_conversations = max_conversations
        self.statistics = {}
        self._chat_template = None if chat_template is None else _read_template(chat_template)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Hugging Face tokenizer with the chat template, loaded on first use."""
        tokenizer = super().tokenizer
        if self._chat_template is not None:
            tokenizer.chat_template = self._chat_template
        if tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer={self._tokenizer_name!r} has no chat template; set chat_template to a template file, or "
                "use the tokenizer of a chat model."
            )
        return tokenizer

    def _load_splits(self) -> tuple[Dataset | SequenceStream, Dataset | None]:
        validation = self._validation and load_rows(self._validation, cache_dir=self.cache_dir)
        train = load_rows(self._train, streaming=self.streaming, cache_dir=self.cache_dir)
        if self.max_conversations is not None:
            train = train.take(self.max_conversations)
        if self.streaming:
            return self._stream(train), self._prepare(validation, "validation") if validation else None
        if self.validation_fraction:
            train, validation = self._split(train)
        return self._prepare(train, "training"), self._prepare(validation, "validation") if validation else None

    def _split(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        try:
            if len(rows) == 1:
                raise ValueError(
                    f"validation_fraction={self.validation_fraction} leaves nothing to train on, since there is only"
                    " one conversation; use 0, or more conversations."
                )
            return split_in_two(rows, fraction=self.validation_fraction, seed=self.seed)
        except ValueError:
            # this raises a clearer error if the rows are not conversations or have only empty answers
            _refuse_empty(self._tokenize(rows), "training")
            raise

    def _load_test(self) -> Dataset | None:
        return self._prepare(load_rows(self._test, cache_dir=self.cache_dir), "test") if self._test else None

    def _prepare(self, rows: Dataset, split: str) -> Dataset:
        conversations = self._tokenize(rows)
        sequences = self._arrange(conversations)
        if len(sequences) == 0:
            raise ValueError(
                f"{len(rows)} {split} conversation(s) have no answer within the first "
                f"sequence_length={self.sequence_length} tokens; use longer sequences."
            )
        _refuse_empty(conversations, split)
        self._report(conversations, len(sequences) if self.separate_documents else None, split)
        return sequences.with_format("torch")

    def _stream(self, rows: IterableDataset) -> SequenceStream:
        return SequenceStream(self._arrange(self._tokenize(self._shuffle_stream(rows))))

    def _tokenize(self, rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
        return tokenize_conversations(
            rows,
            tokenizer=self.tokenizer,
            chat_template=self.tokenizer.get_chat_template(),
            columns=self.columns,
            sequence_length=self.sequence_length,
        )

    def _arrange(self, conversations: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """Turn the conversations that have an answer into sequences, either packed or one conversation per sequence."""
        if self.separate_documents:
            return pack_conversations(
                conversations, sequence_length=self.sequence_length, pad_token_id=self.tokenizer.eos_token_id
            )
        return select_with_answers(conversations)

    def _report(self, conversations: Dataset, sequences: int | None, split: str) -> None:
        """Log the lengths of a split's conversations, unless they were logged before."""
        if split in self.statistics:
            return
        statistics = measure_lengths(conversations, sequences=sequences, sequence_length=self.sequence_length)
        self.statistics[split] = statistics
        rank_zero_info(statistics.describe(split, self.sequence_length))
        if warning := statistics.get_optional_warning(split, self.sequence_length):
            rank_zero_warn(warning)


def _refuse_empty(conversations: Dataset, split: str) -> None:
    if all(conversations["is_empty"]):
        raise ValueError(
            f"All {len(conversations)} {split} conversation(s) have only empty answers: a model would only learn to end"
            " its turn. Check the rows and the options messages_column, prompt_column and completion_column."
        )


def _read_template(chat_template: str) -> str:
    """Return the text of a chat template, given either the text itself or the path of a file."""
    if "{" in chat_template:
        return chat_template
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"chat_template={chat_template!r} is neither a file on this machine nor a Jinja template, which would "
            "contain braces; check its spelling."
        )
    return file.read_text(encoding="utf-8")

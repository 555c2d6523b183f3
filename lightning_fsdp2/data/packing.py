"""Splitting of documents into training and validation sets, and packing of documents into sequences."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning_fsdp2.data.sources import get_bar_options
from lightning_fsdp2.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

# `datasets` caches results by the names and arguments of the functions in this file, not by their code.
# Rename a function in this file if you change its result, so that `datasets` does not use an old result.

# Tokenise few documents at once. During tokenisation, tokens are Python and Rust objects, which take more memory than
# arrays.
_DOCUMENTS_AT_ONCE = 64

# If fewer conversations were packed at once, sequences would have more padding.
_CONVERSATIONS_AT_ONCE = 1024


def split_documents(documents: Dataset, *, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split documents into a training and a validation set, by a hash of their content.

    Equal documents go to the same set. A document stays in its set when other documents are added or removed. There are
    two exceptions. If a set would be empty, one document is moved into it. If there is only one document, it is cut in
    two, and its end becomes the validation set.

    Args:
        documents: Any dataset with a column ``text``.
        fraction: Expected fraction of documents in the validation set, in [0, 1].
        seed: Seed of the split. A different seed gives a different split.
    """
    if len(documents) == 1:
        return _cut(documents, fraction)
    train, validation = _split_at(documents, fraction, seed)
    if not len(train) or not len(validation):  # an empty set is likely only if there are few documents to hash
        _, *others = sorted({_hash_to_unit(text, seed) for text in documents["text"]})
        if others:
            return _split_at(documents, others[-1] if len(validation) else others[0], seed)
    return train, validation


def _cut(documents: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    text = documents[0]["text"]
    end = round(len(text) * (1 - fraction))
    return tuple(documents.map(_take, fn_kwargs={"start": a, "end": b}) for a, b in ((0, end), (end, len(text))))


def _take(row: dict[str, str], start: int, end: int) -> dict[str, str]:
    return {"text": row["text"][start:end]}


def _split_at(documents: Dataset, threshold: float, seed: int) -> tuple[Dataset, Dataset]:
    settings = {"threshold": threshold, "seed": seed}
    train = documents.filter(_is_training, input_columns="text", fn_kwargs=settings, desc="Splitting off training")
    validation = documents.filter(
        _is_validation, input_columns="text", fn_kwargs=settings, desc="Splitting off validation"
    )
    return train, validation


def _is_validation(text: str, threshold: float, seed: int) -> bool:
    return _hash_to_unit(text, seed) < threshold


def _is_training(text: str, threshold: float, seed: int) -> bool:
    return not _is_validation(text, threshold, seed)


def _hash_to_unit(text: str, seed: int) -> float:
    """Return a number in [0, 1] that depends only on the text and the seed."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def pack_documents(
    documents: Dataset,
    *,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    with_position_ids: bool = False,
    split: str = "training",
    remedy: str = "use shorter sequences or more text",
) -> Dataset:
    """Tokenise documents, end each with the end-of-text token, join them into a stream and cut it into sequences.

    Tokens at the end of the stream that do not fill a sequence are dropped. They are not padded, because padding would
    need a pad token, and a padded sequence would have less weight in its batch than a full sequence.

    Args:
        documents: Any dataset with a column ``text``.
        tokenizer: Tokenizer with an ``eos_token``. Special tokens that it adds, such as ``bos_token``, are kept.
        sequence_length: Tokens per sequence.
        with_position_ids: Whether to add ``position_ids``, which show where documents begin.
        split: Name of the split in the error message, such as ``training``.
        remedy: Advice in the error message.

    Returns:
        A dataset with rows of ``{"input_ids": int64 tensor of shape [sequence_length]}``. With ``with_position_ids``,
        the rows also have ``"position_ids"`` of the same dtype and shape, which restart at 0 at each document.

    Raises:
        ValueError: When all documents together have fewer tokens than one sequence.
    """
    from datasets import Features, List, Value

    tokens = _tokenize_documents(documents, tokenizer)
    columns = _get_columns(with_position_ids)
    sequences = tokens.map(
        _Packer(sequence_length, columns),
        batched=True,
        batch_size=_DOCUMENTS_AT_ONCE,
        features=Features({column: List(Value("int32"), length=sequence_length) for column in columns}),
        desc="Packing",
    )
    if len(sequences) == 0:
        raise ValueError(
            f"sequence_length={sequence_length} is longer than all {len(tokens)} {split} document(s) together, "
            f"which have {sum(map(len, tokens['input_ids']))} tokens; {remedy}."
        )
    return sequences.with_format("torch")


class PackedStream:
    """Stream that packs documents into sequences while it is read, in the same way as :func:`pack_documents`.

    Args:
        documents: Stream with the column ``text``.
        tokenizer: See :func:`pack_documents`.
        sequence_length: Tokens per sequence.
        with_position_ids: Whether to add ``position_ids``, which show where documents begin.
    """

    def __init__(
        self,
        documents: IterableDataset,
        *,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        with_position_ids: bool = False,
    ) -> None:
        self._tokens = _tokenize_documents(documents, tokenizer)
        self._sequence_length = sequence_length
        self._columns = _get_columns(with_position_ids)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next iteration if the stream is shuffled."""
        self._tokens.set_epoch(epoch)

    def iter(self, batch_size: int) -> Iterator[dict[str, npt.NDArray[np.int32]]]:
        """Read ``batch_size`` documents at a time, and yield their sequences as arrays [sequences, sequence_length]."""
        packer = _Packer(self._sequence_length, self._columns)
        yield from map(packer, self._tokens.iter(batch_size))


def _get_columns(with_position_ids: bool) -> tuple[str, ...]:
    return ("input_ids", "position_ids") if with_position_ids else ("input_ids",)


def _tokenize_documents(
    documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase
) -> Dataset | IterableDataset:
    from datasets import Features, List, Value

    return documents.map(
        _tokenize,
        batched=True,
        batch_size=_DOCUMENTS_AT_ONCE,
        remove_columns="text",
        fn_kwargs={"tokenizer": tokenizer},
        features=Features({"input_ids": List(Value("int32"))}),
        **get_bar_options(documents, "Tokenising"),
    ).with_format("numpy")


def _tokenize(
    batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[npt.NDArray[np.int32]]]:
    # `verbose=False` suppresses the warning about documents longer than the model's context, which are cut afterwards.
    documents = tokenizer(batch["text"], return_attention_mask=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return {"input_ids": [np.array(ids if ids[-1:] == [end] else [*ids, end], np.int32) for ids in documents]}


class _Packer:
    """Stateful function that joins batches of documents into a stream and cuts the stream into sequences.

    Tokens of a batch that do not fill a sequence are kept for the next batch.
    """

    def __init__(self, sequence_length: int, columns: tuple[str, ...]) -> None:
        self.sequence_length = sequence_length
        self.columns = columns
        self.rests = dict.fromkeys(columns, np.empty(0, np.int32))

    def __call__(self, batch: dict[str, npt.NDArray[np.int32]]) -> dict[str, npt.NDArray[np.int32]]:
        documents = batch["input_ids"]
        sequences = {"input_ids": self._cut("input_ids", documents)}
        if "position_ids" in self.columns:
            positions = self._cut("position_ids", [np.arange(len(document), dtype=np.int32) for document in documents])
            # positions start at 0 in every sequence, even if it begins in the middle of a document
            sequences["position_ids"] = np.minimum(positions, np.arange(self.sequence_length, dtype=np.int32))
        return sequences

    def _cut(self, column: str, documents: Iterable[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
        stream = np.concatenate([self.rests[column], *documents])
        end = len(stream) // self.sequence_length * self.sequence_length
        self.rests[column] = stream[end:]
        return stream[:end].reshape(-1, self.sequence_length)


def pack_conversations(
    conversations: Dataset | IterableDataset, *, sequence_length: int, pad_token_id: int
) -> Dataset | IterableDataset:
    """Pack whole conversations into sequences, and pad each sequence to ``sequence_length``.

    Conversations are packed in batches of about a thousand. In each batch, the longest conversations are placed first.
    Each conversation goes into the fullest sequence that still has room for it (best fit decreasing; Johnson 1973). No
    conversation is cut, since the text after the cut would lack the question.

    Args:
        conversations: Rows of ``input_ids``, ``labels`` and ``answer_tokens``. Rows without answer tokens are left out.
        sequence_length: Tokens per sequence. No conversation may be longer.
        pad_token_id: Token to pad with. Padding has no labels.

    Returns:
        Rows of ``input_ids``, ``labels`` and ``position_ids``, each of ``sequence_length`` integers. Positions restart
        at 0 at each conversation. Each token of padding is at position 0.
    """
    from datasets import Features, List, Value

    columns = ("input_ids", "labels", "position_ids")
    return conversations.with_format("numpy").map(
        _pack_whole,
        batched=True,
        batch_size=_CONVERSATIONS_AT_ONCE,
        remove_columns=conversations.column_names,
        fn_kwargs={"sequence_length": sequence_length, "pad_token_id": pad_token_id},
        features=Features({column: List(Value("int32"), length=sequence_length) for column in columns}),
        **get_bar_options(conversations, "Packing"),
    )


def select_with_answers(conversations: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Return the ``input_ids`` and ``labels`` of all conversations that have an answer. Each becomes one sequence."""
    bar = get_bar_options(conversations, "Leaving out conversations without an answer")
    return conversations.filter(bool, input_columns="answer_tokens", **bar).select_columns(["input_ids", "labels"])


def _pack_whole(
    batch: dict[str, Sequence[npt.NDArray[np.int32]]], sequence_length: int, pad_token_id: int
) -> dict[str, npt.NDArray[np.int32]]:
    ids, labels = batch["input_ids"], batch["labels"]
    kept = [index for index, answer_tokens in enumerate(batch["answer_tokens"]) if answer_tokens]
    groups = [[kept[place] for place in group] for group in _fit([len(ids[index]) for index in kept], sequence_length)]
    sequences = {
        "input_ids": np.full((len(groups), sequence_length), pad_token_id, np.int32),
        "labels": np.full((len(groups), sequence_length), IGNORE_INDEX, np.int32),
        "position_ids": np.zeros((len(groups), sequence_length), np.int32),
    }
    for row, group in enumerate(groups):
        start = 0
        for index in group:
            end = start + len(ids[index])
            sequences["input_ids"][row, start:end] = ids[index]
            sequences["labels"][row, start:end] = labels[index]
            sequences["position_ids"][row, start:end] = np.arange(end - start)
            start = end
    return sequences


def _fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Group the indices of ``lengths`` by best fit decreasing, into groups of at most ``capacity`` tokens.

    Each group is sorted, and the groups are sorted by their first index.
    """
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # number of free tokens and index of each group, sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        tightest = bisect_left(rooms, (lengths[index], -1))
        if tightest < len(rooms):
            room, group = rooms.pop(tightest)
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        insort(rooms, (room - lengths[index], group))
    return sorted(sorted(group) for group in groups)

import logging
import random

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from lightning_fsdp2.data import packing
from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.data.packing import pack_conversations, pack_documents, split_documents

END = 256


def dataset(texts):
    return Dataset.from_dict({"text": texts})


def pack(texts, sequence_length, tokenizer=None):
    sequences = pack_documents(
        dataset(texts), tokenizer=tokenizer or build_byte_tokenizer(), sequence_length=sequence_length
    )
    return [row["input_ids"].tolist() for row in sequences]


def cut(stream, sequence_length):
    whole = len(stream) - len(stream) % sequence_length
    return [stream[start : start + sequence_length] for start in range(0, whole, sequence_length)]


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("sequence_length", [2, 7, 60])
def test_sequences_are_the_pieces_of_all_documents_joined(monkeypatch, at_once, sequence_length):
    # whatever the size of the batches that the work is done in
    monkeypatch.setattr(packing, "_DOCUMENTS_AT_ONCE", at_once)
    texts = ["a", "longer than a sequence of seven", "é漢", "x" * 25, "\n", "the end", "more", "z" * 31]
    stream = [token for text in texts for token in [*text.encode(), END]]
    assert len(stream) % sequence_length or sequence_length == 2  # there is a tail to drop
    assert pack(texts, sequence_length) == cut(stream, sequence_length)


def test_rows_are_int64_tensors():
    sequences = pack_documents(dataset(["abcdef"]), tokenizer=build_byte_tokenizer(), sequence_length=3)
    assert sequences.column_names == ["input_ids"]
    assert sequences[0]["input_ids"].dtype == torch.int64
    assert torch.equal(sequences[:]["input_ids"], torch.tensor([[97, 98, 99], [100, 101, 102]]))


@pytest.mark.parametrize(("at_once", "sequence_length"), [(1, 7), (3, 60), (1000, 2)])
def test_position_ids_restart_at_documents_and_sequences(monkeypatch, at_once, sequence_length):
    monkeypatch.setattr(packing, "_DOCUMENTS_AT_ONCE", at_once)
    texts = ["a", "longer than a sequence of seven", "é漢", "x" * 25, "\n", "the end", "more", "z" * 31]
    options = {"tokenizer": build_byte_tokenizer(), "sequence_length": sequence_length}
    plain = pack_documents(dataset(texts), **options)
    sequences = pack_documents(dataset(texts), with_position_ids=True, **options)
    assert torch.equal(sequences[:]["input_ids"], plain[:]["input_ids"])
    assert sequences[0]["position_ids"].dtype == torch.int64
    for sequence in sequences:
        expected = []
        for index in range(sequence_length):
            is_first = index == 0 or sequence["input_ids"][index - 1] == END
            expected.append(0 if is_first else expected[-1] + 1)
        assert sequence["position_ids"].tolist() == expected


def test_a_document_may_begin_and_end_with_the_same_token():
    tokenizer = build_byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", END)]
    )
    (sequence,) = pack_documents(dataset(["ab", "c"]), tokenizer=tokenizer, sequence_length=7, with_position_ids=True)
    assert sequence["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_tokens_that_the_tokenizer_adds_stay_and_the_end_is_not_doubled():
    tokenizer = build_byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", END)]
    )
    assert pack(["ab", "c"], 7, tokenizer) == [[END, 97, 98, END, END, 99, END]]


def test_documents_longer_than_the_model_give_no_warning(caplog):
    tokenizer = build_byte_tokenizer()
    tokenizer.model_max_length = 4
    with caplog.at_level(logging.WARNING):
        assert len(pack(["a document of many tokens"], 8, tokenizer)) == 3
    assert not caplog.records


def test_too_few_tokens_are_counted():
    with pytest.raises(
        ValueError, match=r"sequence_length=10 is longer than all 2 training document\(s\).*which have 9 tokens"
    ):
        pack(["abc", "defg"], 10)


def test_split_is_disjoint_complete_and_near_the_fraction():
    texts = [f"document {number}" for number in range(1000)]
    train, validation = split_documents(dataset(texts), fraction=0.1, seed=0)
    assert 70 < len(validation) < 130
    assert sorted([*train["text"], *validation["text"]]) == sorted(texts)


def test_documents_stay_on_their_side_when_others_come_and_go():
    texts = [f"document {number}" for number in range(60)]
    _, validation = split_documents(dataset(texts), fraction=0.3, seed=1)
    _, of_fewer = split_documents(dataset(texts[40:][::-1]), fraction=0.3, seed=1)
    assert set(of_fewer["text"]) == set(validation["text"]) & set(texts[40:])
    assert set(of_fewer["text"])


def test_equal_documents_are_on_the_same_side_and_the_seed_chooses():
    texts = [f"document {number % 20}" for number in range(60)]
    splits = [split_documents(dataset(texts), fraction=0.5, seed=seed) for seed in (0, 0, 1)]
    for train, validation in splits:
        assert not set(train["text"]) & set(validation["text"])
    chosen = [validation["text"][:] for _, validation in splits]
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.999])
@pytest.mark.parametrize("number", [2, 3, 5])
def test_few_documents_are_on_both_sides(number, fraction):
    texts = [f"document {index}" for index in range(number)]
    train, validation = (split["text"][:] for split in split_documents(dataset(texts), fraction=fraction, seed=0))
    assert min(len(train), len(validation)) == 1
    assert (len(train) > len(validation)) == (fraction < 0.5) or number == 2
    assert sorted([*train, *validation]) == texts


def test_of_a_lone_document_the_end_is_validated_on():
    train, validation = split_documents(dataset(["0123456789" * 10]), fraction=0.25, seed=0)
    assert train["text"][:] == [("0123456789" * 10)[:75]]
    assert validation["text"][:] == [("0123456789" * 10)[75:]]


def test_equal_documents_alone_are_not_split():
    train, validation = split_documents(dataset(["the same"] * 3), fraction=0.05, seed=0)
    assert {len(train), len(validation)} == {0, 3}


def talks(lengths, answers=None):
    """Conversations whose tokens count up, the last of each being an answer unless told otherwise."""
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    ids = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    labels = [[-100] * (len(row) - 1) + row[-1:] for row in ids]
    answers = [1] * len(lengths) if answers is None else answers
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "answer_tokens": answers, "length": lengths})


def pack_talks(rows, sequence_length):
    return pack_conversations(rows, sequence_length=sequence_length, pad_token_id=-1).with_format(None)[:]


def test_conversations_are_packed_whole_where_they_fit_best():
    packed = pack_talks(talks([3, 6, 8, 2, 4, 5, 1], answers=[1, 1, 1, 1, 1, 1, 0]), 10)
    # 8 + 2, 6 + 4, 5 + 3; the last one has no answer
    assert packed["input_ids"] == [
        [0, 1, 2, *range(23, 28), -1, -1],
        [*range(3, 9), *range(19, 23)],
        [*range(9, 17), 17, 18],
    ]
    assert packed["labels"] == [
        [-100, -100, 2, -100, -100, -100, -100, 27, -100, -100],
        [-100] * 5 + [8] + [-100] * 3 + [22],
        [-100] * 7 + [16, -100, 18],
    ]
    assert packed["position_ids"] == [
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 0],
        [*range(6), *range(4)],
        [*range(8), 0, 1],
    ]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_every_conversation_is_packed_once(monkeypatch, at_once):
    monkeypatch.setattr(packing, "_CONVERSATIONS_AT_ONCE", at_once)
    draw = random.Random(0)
    lengths = [draw.randint(2, 50) for _ in range(300)]
    packed = pack_talks(talks(lengths), 50)
    tokens = sorted(token for row in packed["input_ids"] for token in row if token != -1)
    assert tokens == list(range(sum(lengths)))
    least = -(-sum(lengths) // 50)
    assert len(packed["input_ids"]) <= {1: 300, 7: 1.4 * least, 1000: 1.05 * least}[at_once]

import logging
import sys

import pytest
from transformers import AutoTokenizer

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_byte_tokenizer()


# all of 1, 2 and 3 bytes, and a sample of those of 4 bytes
CODES = [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, sys.maxunicode + 1, 97)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "def f(x):\n\treturn x  \n\n",
        "a . b , isn 't \r\n\x00\x7f",
        "e\u0301é 👩‍👩‍👧 漢字",
        "".join(map(chr, CODES)),
    ],
    ids=["empty", "space", "code", "spacing", "composed", "characters"],
)
def test_ids_are_the_bytes_and_decode_to_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_one_token_behind_the_bytes(tokenizer):
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 256
    assert tokenizer("a<|endoftext|>")["input_ids"] == [97, 256]
    assert tokenizer.decode([97, 256]) == "a<|endoftext|>"
    assert tokenizer.decode([97, 256], skip_special_tokens=True) == "a"


def test_incomplete_character_decodes_to_the_replacement_character(tokenizer):
    assert tokenizer.decode([97, 0xE2, 0x82]) == "a\ufffd"


def test_long_text_gives_no_warning(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(tokenizer("x" * 200_000)["input_ids"]) == 200_000
    assert not caplog.records


def test_saved_tokenizer_loads_as_any_other(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "a . b <|endoftext|>\n漢字 👩‍👩‍👧"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (len(loaded), loaded.eos_token_id) == (257, 256)

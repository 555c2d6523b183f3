"""Tokenizer that needs no download: one token per byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte of UTF-8 text (ids 0 to 255) and an end-of-text token (id 256).

    The tokenizer is GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) without merges, so decoding restores
    every text exactly. As in GPT-2, ``<|endoftext|>`` is both the beginning-of-text and the end-of-text token.

    Returns:
        A Hugging Face tokenizer with 257 tokens. It does not add special tokens to texts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Do not split the text into words first. Since there are no BPE merges, this would not change the tokens, but would
    # take time.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)

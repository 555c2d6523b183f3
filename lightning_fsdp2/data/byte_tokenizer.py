"""A tokenizer that needs no download: one token per byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose ids 0-255 are the bytes of the UTF-8 text and whose id 256 ends a document.

    It is GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) before its first merge, so any text decodes to
    itself. ``<|endoftext|>`` is both the first and the last token of a document, as in GPT-2.

    Returns:
        A Hugging Face tokenizer with 257 tokens. It adds no special token by itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Splitting into words matters for merges only, and tokenising is faster without it.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)

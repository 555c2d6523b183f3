"""Data modules that turn text files and conversations into batches of packed token sequences for language models."""

from lightning_fsdp2.data.byte_tokenizer import build_byte_tokenizer
from lightning_fsdp2.data.chat import ChatDataModule
from lightning_fsdp2.data.images import add_dummy_image
from lightning_fsdp2.data.text import TextDataModule

__all__ = ["ChatDataModule", "TextDataModule", "add_dummy_image", "build_byte_tokenizer"]

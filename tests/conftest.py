"""Imports what the forked ranks would otherwise import one by one, and keeps the parent free of threads."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import lightning_fsdp2  # noqa: F401

torch.set_num_threads(1)

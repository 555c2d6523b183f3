"""Imports what the forked ranks would otherwise import one by one, and keeps the parent free of threads."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import lightning.pytorch  # noqa: E402, F401
import torch  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401

import lightning_fsdp2  # noqa: E402, F401

torch.set_num_threads(1)

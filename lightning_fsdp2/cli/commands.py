"""Summaries of the commands of ``lightning-fsdp2``, and its commands for checkpoints.

The help of a command for checkpoints is its function's signature and docstring. The functions import torch, which takes
seconds, only when they are called.
"""

import sys
from collections.abc import Callable
from typing import Literal

SUMMARIES = {
    "fit": "Train a model, validating it on the way.",
    "validate": "Evaluate a model on the validation data.",
    "test": "Evaluate a model on the test data.",
    "predict": "Write what a model predicts for data.",
    "describe": "Print mesh, units and each parameter's shard for a config, on any number of ranks, without training.",
    "plan": "Compute memory, traffic and time of a config's step on any number of devices, without using them.",
}
"""One line about each command that reads a config."""

QUICKSTART = "Train a small model on this machine. Takes the options of `fit`."


def consolidate(
    path: str, output: str, with_optimizers: bool = True, verify: bool = True, trust_checkpoint: bool = False
) -> None:
    """Write a checkpoint directory as a single file that any strategy can resume from.

    Args:
        path: The checkpoint directory.
        output: The file to write. An existing file is replaced once the new file is complete.
        with_optimizers: Whether optimizer states are kept.
        verify: Whether to check the data that is read against its checksums.
        trust_checkpoint: Whether the checkpoint may contain arbitrary objects, which can run code when loaded.
    """
    from lightning_fsdp2.checkpoint import consolidate_checkpoint

    consolidate_checkpoint(
        path, output, with_optimizers=with_optimizers, verify=verify, trust_checkpoint=trust_checkpoint
    )
    sys.stdout.write(f"{output} is complete.\n")


def verify(path: str, trust_checkpoint: bool = False) -> None:
    """Read a checkpoint from start to end and compare it with its checksums.

    Args:
        path: A directory or a single file.
        trust_checkpoint: Whether ``.metadata`` may contain arbitrary objects, which can run code when loaded.
    """
    from lightning_fsdp2.checkpoint import verify_checkpoint

    for line in verify_checkpoint(path, trust_checkpoint=trust_checkpoint):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{path} is complete.\n")


def export(
    path: str,
    output: str,
    model: str | None = None,
    tokenizer: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: int | str = "5GB",
    merge: bool = False,
    pretrained: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    trust_checkpoint: bool = False,
) -> None:
    """Write the Hugging Face model of a checkpoint, or its LoRA adapter, as a directory for ``from_pretrained``.

    Args:
        path: A checkpoint directory or a single file.
        output: The directory to write.
        model: Path of the model in the LightningModule, if it holds several.
        tokenizer: Directory or hub id of a tokenizer to save with the model; null for the tokenizer of the run.
        dtype: Dtype of the weights; null keeps the dtype in the checkpoint.
        max_shard_size: Largest size of a file, in bytes or as text such as 5GB.
        merge: Whether to merge a LoRA adapter into the weights of its base model and write a model without adapters.
        pretrained: Directory of the model that training began with. Needed only if this directory has moved since, and
            the checkpoint does not hold the frozen weights.
        overwrite: Whether to replace a directory that is not empty, once the new one is complete.
        verify: Whether to check the data that is read against its checksums.
        trust_checkpoint: Whether the checkpoint may contain arbitrary objects, which can run code when loaded.
    """
    from lightning_fsdp2.export.hugging_face import export_hf

    export_hf(
        path,
        output,
        model=model,
        tokenizer=tokenizer,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge=merge,
        pretrained=pretrained,
        overwrite=overwrite,
        verify=verify,
        trust_checkpoint=trust_checkpoint,
    )
    sys.stdout.write(f"{output} is complete.\n")


COMMANDS: dict[str, Callable[..., None]] = {"consolidate": consolidate, "verify": verify, "export": export}

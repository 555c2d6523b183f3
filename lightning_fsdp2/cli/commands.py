"""Summaries of the commands of ``lightning-fsdp2``, and its commands for checkpoints.

The parameters of a function are the options of its command. A function imports torch, which takes seconds, only when it
is called.
"""

import sys
from collections.abc import Callable
from typing import Literal

SUMMARIES = {
    "fit": "Train a model, validating it on the way.",
    "validate": "Evaluate a model on the validation data.",
    "test": "Evaluate a model on the test data.",
    "predict": "Write what a model predicts for data.",
    "describe": "Print how a model is sharded over any number of ranks.",
    "plan": "Compute memory, traffic and time of a step on any devices.",
    "quickstart": "Train a small model on this machine. Takes the options of fit.",
    "consolidate": "Write a checkpoint directory as a single file.",
    "verify": "Read a whole checkpoint and compare it with its checksums.",
    "export": "Write the Hugging Face model or LoRA adapter of a checkpoint.",
}
"""One line about each command."""

READ_CONFIG = ("fit", "validate", "test", "predict", "describe", "plan")
"""Commands that read a config."""


def consolidate(
    path: str, output: str, with_optimizers: bool = True, verify: bool = True, trust_checkpoint: bool = False
) -> None:
    """Write a checkpoint directory as a single file."""
    from lightning_fsdp2.checkpoint import consolidate_checkpoint

    consolidate_checkpoint(
        path, output, with_optimizers=with_optimizers, verify=verify, trust_checkpoint=trust_checkpoint
    )
    sys.stdout.write(f"{output} is complete.\n")


def verify(path: str, trust_checkpoint: bool = False) -> None:
    """Read a checkpoint from start to end and compare it with its checksums."""
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
    """Write the Hugging Face model of a checkpoint, or its LoRA adapter, as a directory for ``from_pretrained``."""
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

"""Summaries of the commands of ``lightning-fsdp2``, and its commands for checkpoints.

The parameters of a function are the options of its command. A function imports torch, which takes seconds, only when it
is called. argparse parses the options, because importing jsonargparse takes longer than the answer to a mistake.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from lightning_fsdp2._suggestions import DTYPES, suggest
from lightning_fsdp2.cli.errors import exit_with_error, wants_traceback
from lightning_fsdp2.cli.quiet import leave_out_noise
from lightning_fsdp2.compat.argparse import list_names

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

ExportDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


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
    dtype: ExportDtype | None = None,
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

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


def run_command(command: str, arguments: Sequence[str]) -> NoReturn:
    """Run a command for checkpoints and exit. Print one line for an error that the user can fix."""
    leave_out_noise()
    options = parse_options(command, arguments)
    from lightning_fsdp2.checkpoint.files.paths import check_is_checkpoint  # imported only now, because it takes long

    try:
        check_is_checkpoint(options["path"])  # before torch is imported
        COMMANDS[command](**options)
    except (ValueError, OSError, RuntimeError) as error:
        if wants_traceback():
            raise
        exit_with_error(str(error))
    sys.exit(0)


def parse_options(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command for checkpoints by name."""
    spelled = _spell_out(command, arguments)
    _refuse_named(command, spelled)
    return vars(make_parser(command).parse_args(spelled))


def make_parser(command: str) -> argparse.ArgumentParser:
    """Make the parser of a command for checkpoints from the parameters of its function."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, parameter in inspect.signature(COMMANDS[command]).parameters.items():
        reader = _Reader(name, parameter.annotation)
        if parameter.default is parameter.empty:
            parser.add_argument(name, type=reader)
        else:
            parser.add_argument(f"--{name}", type=reader, default=parameter.default)
    return parser


def _spell_out(command: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with underscores in the names of options, and ``=true`` after a flag without a value."""
    parameters = inspect.signature(COMMANDS[command]).parameters.values()
    flags = {f"--{parameter.name}" for parameter in parameters if parameter.annotation is bool}
    spelled: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, sign, value = argument.partition("=")
        name = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        is_bare = name in flags and not sign and following.lower() not in ("true", "false")
        spelled.append(f"{name}=true" if is_bare else f"{name}{sign}{value}")
    return spelled


def _refuse_named(command: str, arguments: Sequence[str]) -> None:
    """Refuse an argument that has no name, such as the output, if it is given as an option."""
    flags = {argument.partition("=")[0] for argument in arguments}
    parameters = inspect.signature(COMMANDS[command]).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    for place, name in zip(("first", "second"), needed, strict=False):
        if f"--{name}" in flags:
            exit_with_error(
                f"--{name} is not an option: {name} is the {place} argument; write its value without a name"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: -+([^\s=]+)", message)
        hint = suggest(unknown[1], list_names([self])) if unknown else ""
        exit_with_error(re.sub(r"^argument \S+: (?=\w+=)", "", message) + hint)


class _Reader:
    """Function that returns the value of an option for its text on the command line."""

    def __init__(self, name: str, annotation: Any) -> None:
        self.name = name
        self.kinds = get_args(annotation) or (annotation,)
        self.choices = [choice for kind in self.kinds for choice in get_args(kind)]

    def __call__(self, text: str) -> Any:
        number = int(text) if text.isdecimal() else text
        values = [number, _WORDS.get(text.lower(), text), text, DTYPES.get(text, text)]
        for value in values:
            if type(value) in self.kinds or value in self.choices:
                return value
        words = self.choices or ["true", "false"]
        raise argparse.ArgumentTypeError(
            f"{self.name}={text} must be {', '.join(words[:-1])} or {words[-1]}{suggest(text, words, cutoff=0.5)}"
        )

"""The program ``lightning-fsdp2``. It imports torch, which takes seconds, only for commands that need it."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

import lightning_fsdp2
from lightning_fsdp2._suggestions import suggest
from lightning_fsdp2.cli.commands import COMMANDS, SUMMARIES, run_command
from lightning_fsdp2.cli.errors import exit_with_error
from lightning_fsdp2.cli.help import find_page
from lightning_fsdp2.cli.progress import show_progress

_NUMBERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PL_GLOBAL_SEED"),
)
"""Environment variables that Lightning reads as numbers."""


def main(args: Sequence[str] | None = None) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict``, ``describe``, ``plan``, ``quickstart`` or a checkpoint command.

    Args:
        args: Command line arguments without the program's name. None for the arguments of this process.

    Raises:
        SystemExit: With code 2 and one line on stderr if the configuration or the checkpoint is wrong. With code 0 at
            the end of a command for checkpoints.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    page = (
        f"lightning-fsdp2 {lightning_fsdp2.__version__}\n" if arguments[:1] == ["--version"] else find_page(arguments)
    )
    if page is not None:
        sys.stdout.write(page)
        sys.exit(0)
    command = arguments[0]
    if command in COMMANDS:
        run_command(command, arguments[1:])
    if command not in SUMMARIES and not command.startswith("-"):  # options may stand before a command
        _refuse(command)
    _check_variables()
    if not getattr(sys.flags, "safe_path", False) and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # for modules that the config names; installed ones of the same name win
    shows_progress = command in ("describe", "plan")
    try:
        with show_progress("importing torch, Lightning and transformers") if shows_progress else nullcontext():
            from lightning_fsdp2.cli.app import run
        run(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as a shell reports it


def _refuse(command: str) -> NoReturn:
    names = ", ".join(repr(name) for name in SUMMARIES)
    exit_with_error(f"there is no command {command!r}; use one of {names}{suggest(command, SUMMARIES, cutoff=0.65)}")


def _check_variables() -> None:
    """Refuse ranks and seeds that are no numbers, with which Lightning would fail before there is a parser."""
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value and not value.isdecimal():
            exit_with_error(f"{name}={value!r} is not a number; set it to one, or unset it.")

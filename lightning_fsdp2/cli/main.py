"""The program ``lightning-fsdp2``. It imports torch, which takes seconds, only for commands that need it."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

import lightning_fsdp2
from lightning_fsdp2.cli.commands import SUMMARIES
from lightning_fsdp2.cli.completion import SHELLS
from lightning_fsdp2.cli.parser import PROGRAM, CommandParser, add_commands, run_command
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
    if not _reads_config(arguments):
        _run_without_config(arguments)
    _check_variables()
    is_long = arguments[:1] == ["plan"]
    with show_progress("importing torch, Lightning and transformers") if is_long else nullcontext():
        from lightning_fsdp2.cli.app import run
    run(args)


def _check_variables() -> None:
    """Refuse ranks and seeds that are no numbers, with which Lightning would fail before there is a parser."""
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value and not value.isdecimal():
            CommandParser(**PROGRAM).error(f"{name}={value!r} is not a number; set it to one, or unset it.")


def _reads_config(arguments: list[str]) -> bool:
    """Return whether the arguments are for a command that reads a config. Options may stand before such a command."""
    commands = {*SUMMARIES, "quickstart"}
    first = arguments[0] if arguments else "--help"
    return first in commands or (first.startswith("-") and first not in ("-h", "--help", "--version"))


def _run_without_config(arguments: list[str]) -> NoReturn:
    parser = CommandParser(**PROGRAM, version=f"lightning-fsdp2 {lightning_fsdp2.__version__}")
    parser.add_argument("--print_completion", choices=SHELLS, help="Print a script for completion in a shell and exit.")
    subcommands = parser.add_subcommands()
    for name, summary in SUMMARIES.items():
        subcommands.add_subcommand(name, CommandParser(), help=summary)
    add_commands(subcommands, CommandParser)
    config = parser.parse_args(arguments or ["--help"])
    run_command(parser, config.subcommand, config[config.subcommand])

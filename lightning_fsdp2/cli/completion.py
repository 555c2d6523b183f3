"""Script with which a shell completes commands and options.

jsonargparse's own script has the options of every class that an option can take, in megabytes. This one has the options
of the commands, and those of this package's strategies, models and data modules.
"""

import argparse
from collections.abc import Iterable
from importlib import import_module

from lightning_fsdp2._suggestions import list_options
from lightning_fsdp2.cli.commands import COMMANDS, SUMMARIES, make_parser
from lightning_fsdp2.compat.argparse import get_subcommands, list_flags

SHELLS = ("bash", "zsh", "tcsh")

CLASSES = {
    "--trainer.strategy": ("FSDP2Strategy", "MegatronFSDPStrategy", "DDPStrategy"),
    "--model": ("CausalLM",),
    "--data": ("TextDataModule", "ChatDataModule"),
}
"""Options that take a class, with the classes of this package whose options are completed."""


def build_completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of the program for a shell.

    Args:
        parser: Parser of the commands that read a config.
        shell: One of :data:`SHELLS`.

    Raises:
        ValueError: When the shell is unknown, or shtab is not installed.
    """
    if shell not in SHELLS:
        raise ValueError(f"print_completion={shell!r} is not a shell that is supported; use {', '.join(SHELLS)}.")
    try:
        from shtab import complete
    except ImportError as error:
        raise ValueError("print_completion needs shtab; run `pip install shtab`.") from error
    program = argparse.ArgumentParser(prog="lightning-fsdp2")
    subparsers = program.add_subparsers()
    runs = dict(get_subcommands(parser).choices)
    commands = {**runs, "quickstart": runs["fit"], **{name: make_parser(name) for name in COMMANDS}}
    own = list(dict.fromkeys(_list_own_flags()))
    for name, command in commands.items():
        flags = list_flags(command)
        bare = subparsers.add_parser(name, help=SUMMARIES[name])
        for flag in dict.fromkeys([*flags, *(own if "--trainer.strategy" in flags else ())]):
            if flag not in ("-h", "--help"):
                bare.add_argument(flag)
    return str(complete(program, shell))


def _list_own_flags() -> Iterable[str]:
    package = import_module("lightning_fsdp2")
    for flag, classes in CLASSES.items():
        for name in classes:
            yield from (f"{flag}.{option}" for option in list_options(getattr(package, name)).values())

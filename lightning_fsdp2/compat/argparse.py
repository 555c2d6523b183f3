"""Access to private names of argparse and jsonargparse, which have no public way to inspect a parser's options.

Tested with Python 3.10 to 3.13 and jsonargparse 4.53.
"""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any


def get_subcommands(parser: argparse.ArgumentParser) -> Any:
    """Return the argparse action that manages the subcommands of ``parser``."""
    return parser._subcommands_action  # type: ignore[attr-defined]


def set_summaries(subcommands: Any, summaries: Mapping[str, str]) -> None:
    """Set the one-line summaries that ``--help`` shows for the subcommands."""
    for action in subcommands._choices_actions:
        action.help = summaries[action.dest]


def move_last_group_up(parser: argparse.ArgumentParser, title: str) -> None:
    """Give the last group of options a title, and let ``--help`` show it before all other groups that were added."""
    *others, last = parser._action_groups
    last.title = title
    parser._action_groups = [*others[:2], last, *others[2:]]  # after argparse's own groups of arguments and options


def get_option(parser: argparse.ArgumentParser, name: str) -> argparse.Action:
    """Return the option of ``parser`` that is spelled ``name`` on the command line, such as ``--trainer.strategy``."""
    return parser._option_string_actions[name]


def list_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of ``parser`` as they are spelled on the command line."""
    return list(parser._option_string_actions)


def list_names(parsers: Iterable[argparse.ArgumentParser]) -> set[str]:
    """Return the names under which ``parsers`` store the parsed values of their options."""
    return {action.dest for parser in parsers for action in parser._actions}

"""Parser of the commands for checkpoints, with its help and its error messages. It does not need torch."""

import re
import sys
from argparse import Action
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lightning_fsdp2.cli.commands import COMMANDS
from lightning_fsdp2.cli.errors import exit_with_error, wants_traceback
from lightning_fsdp2.cli.help import USAGE
from lightning_fsdp2.cli.messages import summarize
from lightning_fsdp2.cli.names import get_hint
from lightning_fsdp2.compat.argparse import list_flags, list_names

_LIGHTNINGS_STRATEGY_ERROR = re.compile(r"You selected an invalid strategy name: `strategy=('.*?')`.*", re.DOTALL)
_LAZY_ERROR = re.compile(r"No (lightning_fsdp2[\w.]*) attribute (\w+)")
_EMPTY_ERROR = re.compile(r"Unexpected config:\s*(None|null)?\s*$")
_MISSING_ERROR = re.compile(r"the following arguments are required: \w+\.(model|config)$")
_NO_COMMAND_ERROR = re.compile(r'expected "subcommand" to be one of \{(.*?)(, \.\.\.)?\}, but it was not provided\.')
_TARGET_HINT = " (_target_ is an earlier spelling: use class_path, or a plain mapping for a config or policy)"


_ROLE = re.compile(r":[\w:]+:`(?:~[\w.]*\.)?")
_LINK = re.compile(r"`([^`<]+) <[^>]*>`_+")


class HelpFormatter(DefaultHelpFormatter):
    """Help formatter that leaves out markup and the lists of known subclasses, which ``--OPTION.help`` prints."""

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and _remove_markup(heading))

    def add_text(self, text: str | None) -> None:
        super().add_text(text and _remove_markup(text))

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        return re.sub(r",? ?known subclasses: [^)]*", "", _remove_markup(text)).replace(" ()", "")


def _remove_markup(text: str) -> str:
    """Replace the markup of reStructuredText with what a reader of the rendered text sees."""
    return _LINK.sub(r"\1", _ROLE.sub("`", text)).replace("`", "")


class CommandParser(ArgumentParser):
    """Argument parser that reports each mistake in a single line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"usage": USAGE, "formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        for argument in sys.argv[1:] if args is None else args:
            name = str(argument).partition("=")[0]
            if re.match(r"-\w{2}", name) and any(f"-{name}" in list_flags(each) for each in self._list_parsers()):
                self.error(f"{name} has one hyphen, but names of options have two: -{argument}")
        return super().parse_args(args, *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error and not wants_traceback():
            message = _LIGHTNINGS_STRATEGY_ERROR.sub(r"trainer.strategy: there is no strategy \1", message)
            message = _LAZY_ERROR.sub(r"module '\1' has no attribute '\2'", message)
            message = _EMPTY_ERROR.sub("the config is empty; write its options, or leave --config out", message)
            message = _MISSING_ERROR.sub(r"there is no \1; give it in a config (--config FILE), or as --\1", message)
            message = _NO_COMMAND_ERROR.sub("there is no command; give one first, such as fit --config FILE", message)
            hint = _TARGET_HINT if "'_target_'" in message else get_hint(message, self._list_options())
            exit_with_error(f"{summarize(message)}{hint}")
        super().error(message, ex)

    def _list_options(self) -> set[str]:
        return list_names(self._list_parsers())

    def _list_parsers(self) -> list[ArgumentParser]:
        """Return this parser and those of its commands."""
        return [self, *(self._subcommands_action.choices.values() if self._subcommands_action else ())]


def make_parser(command: str) -> CommandParser:
    """Make the parser of a command for checkpoints."""
    parser = CommandParser()
    parser.add_function_arguments(COMMANDS[command], as_group=False, as_positional=True)
    return parser


def run_command(command: str, arguments: Sequence[str]) -> NoReturn:
    """Run a command for checkpoints and exit. Print one line for an error that the user can fix."""
    parser = make_parser(command)
    options = parser.parse_args(arguments)
    from lightning_fsdp2.checkpoint.files.paths import check_is_checkpoint  # imported only now, because it takes long

    try:
        check_is_checkpoint(options.path)  # before torch is imported
        COMMANDS[command](**options)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error), error)
    parser.exit(0)

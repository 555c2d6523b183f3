"""Parser of the commands for checkpoints, with its help and its error messages. It does not need torch."""

import re
import sys
from argparse import Action
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from lightning_fsdp2.cli.commands import COMMANDS, QUICKSTART
from lightning_fsdp2.cli.errors import is_first_of_node, summarize, wants_traceback
from lightning_fsdp2.cli.names import get_hint
from lightning_fsdp2.compat.argparse import list_flags, list_names

PROGRAM = {
    "prog": "lightning-fsdp2",
    "usage": "lightning-fsdp2 COMMAND [--OPTION VALUE ...]",
    "description": "Train any LightningModule with sharded weights, configured in YAML, and manage its checkpoints.",
}

_LIGHTNINGS_STRATEGY_ERROR = re.compile(r"You selected an invalid strategy name: `strategy=('.*?')`.*", re.DOTALL)
_LAZY_ERROR = re.compile(r"No (lightning_fsdp2[\w.]*) attribute (\w+)")
_EMPTY_ERROR = re.compile(r"Unexpected config:\s*(None|null)?\s*$")
_COMMAND_ERROR = re.compile(r"argument subcommand: invalid choice: ('.*?') \(choose from (.*)\)")
_MISSING_ERROR = re.compile(r"the following arguments are required: \w+\.(model|config)$")
_NO_COMMAND_ERROR = re.compile(r'expected "subcommand" to be one of \{(.*?)(, \.\.\.)?\}, but it was not provided\.')
_TARGET_HINT = " (_target_ is an earlier spelling: use class_path, or a plain mapping for a config or policy)"


class HelpFormatter(DefaultHelpFormatter):
    """Help formatter that leaves out markup and the lists of known subclasses, which ``--OPTION.help`` prints."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        return re.sub(r",? ?known subclasses: [^)]*", "", text).replace("``", "").replace(" ()", "")


class CommandParser(ArgumentParser):
    """Argument parser that reports each mistake in a single line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        for argument in sys.argv[1:] if args is None else args:
            name = str(argument).partition("=")[0]
            if re.match(r"-\w{2}", name) and any(f"-{name}" in list_flags(each) for each in self._list_parsers()):
                self.error(f"{name} has one hyphen, but names of options have two: -{argument}")
        return super().parse_args(args, *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error and not wants_traceback():
            if not is_first_of_node():
                self.exit(2)  # all ranks have the same error, so one rank per node prints it
            message = _LIGHTNINGS_STRATEGY_ERROR.sub(r"trainer.strategy: there is no strategy \1", message)
            message = _LAZY_ERROR.sub(r"module '\1' has no attribute '\2'", message)
            message = _EMPTY_ERROR.sub("the config is empty; write its options, or leave --config out", message)
            message = _MISSING_ERROR.sub(r"there is no \1; give it in a config (--config FILE), or as --\1", message)
            message = _NO_COMMAND_ERROR.sub("there is no command; give one first, such as fit --config FILE", message)
            hint = _TARGET_HINT if "'_target_'" in message else get_hint(message, self._list_options())
            message = _COMMAND_ERROR.sub(r"there is no command \1; use one of \2", message)
            self.exit(2, f"error: {summarize(message)}{hint}\n")
        super().error(message, ex)

    def _list_options(self) -> set[str]:
        return list_names(self._list_parsers())

    def _list_parsers(self) -> list[ArgumentParser]:
        """Return this parser and those of its commands."""
        return [self, *(self._subcommands_action.choices.values() if self._subcommands_action else ())]


def add_commands(subcommands: Any, make_parser: Callable[..., ArgumentParser]) -> None:
    """Add the package's own commands to the subcommands of a parser."""
    subcommands.add_subcommand("quickstart", make_parser(description=QUICKSTART), help=QUICKSTART)
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").partition("\n")[0].replace("``", "")
        parser = make_parser(description=summary)
        parser.add_function_arguments(command, as_group=False, as_positional=True)
        subcommands.add_subcommand(name, parser, help=summary)


def run_command(parser: ArgumentParser, name: str, options: Any) -> NoReturn:
    """Run a command for checkpoints and exit. Print one line for an error that the user can fix."""
    try:
        COMMANDS[name](**options)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error), error)
    parser.exit(0)

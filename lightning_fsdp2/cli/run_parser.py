"""Parser of the commands that read a config, with its help and its error messages."""

import os
import re
import sys
from argparse import Action, ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fsdp2.cli.commands import READ_CONFIG
from lightning_fsdp2.cli.errors import exit_with_error, wants_traceback
from lightning_fsdp2.cli.help import USAGE
from lightning_fsdp2.cli.messages import summarize
from lightning_fsdp2.cli.names import expand_arguments, expand_yaml, get_hint
from lightning_fsdp2.cli.unique_keys import refuse_repeated_keys
from lightning_fsdp2.compat.argparse import list_flags, list_names

_QUICKSTART_CONFIG = Path(__file__).parent / "quickstart.yaml"

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


class RunParser(LightningArgumentParser):
    """Argument parser that accepts short names of strategies, and reports each mistake in a single line.

    Attributes:
        has_started: Whether the run has started, so that one rank may find a mistake that another does not.
    """

    has_started = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_repeated_keys()
        super().__init__(*args, **{"usage": USAGE, "formatter_class": HelpFormatter, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        for argument in given:
            name = str(argument).partition("=")[0]
            if re.match(r"-\w{2}", name) and any(f"-{name}" in list_flags(each) for each in self._list_parsers()):
                self.error(f"{name} has one hyphen, but names of options have two: -{argument}")
        args = expand_arguments(given)
        if self._subcommands_action is not None and args[:1] == ["quickstart"]:
            args = ["fit", f"--config={_QUICKSTART_CONFIG}", *_get_gpu_arguments(), *_validate_at_end(args[1:])]
        return super().parse_args(args, *others, **kwargs)

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Namespace:
        try:
            return super().parse_path(cfg_path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"{cfg_path}: this is not text in UTF-8 ({error.reason} at position {error.start}).", error)

    def parse_string(self, content: str, path: str | os.PathLike[str] = "", *args: Any, **kwargs: Any) -> Namespace:
        try:
            content = expand_yaml(content, READ_CONFIG)
        except ValueError as error:
            self.error(f"{path or 'the config'}, {error}", error)
        return super().parse_string(content, path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error and not wants_traceback():
            message = _LIGHTNINGS_STRATEGY_ERROR.sub(r"trainer.strategy: there is no strategy \1", message)
            message = _LAZY_ERROR.sub(r"module '\1' has no attribute '\2'", message)
            message = _EMPTY_ERROR.sub("the config is empty; write its options, or leave --config out", message)
            message = _MISSING_ERROR.sub(r"there is no \1; give it in a config (--config FILE), or as --\1", message)
            message = _NO_COMMAND_ERROR.sub("there is no command; give one first, such as fit --config FILE", message)
            hint = _TARGET_HINT if "'_target_'" in message else get_hint(message, self._list_options())
            exit_with_error(f"{summarize(message)}{hint}", waits=self.has_started)
        super().error(message, ex)

    def _list_options(self) -> set[str]:
        return list_names(self._list_parsers())

    def _list_parsers(self) -> list[ArgumentParser]:
        """Return this parser and those of its commands."""
        return [self, *(self._subcommands_action.choices.values() if self._subcommands_action else ())]


def _validate_at_end(args: Sequence[str]) -> list[str]:
    """Validate after the last step, if the arguments change only the number of steps, so that the report has a loss."""
    found = re.search(r"--trainer\.max_steps[= ](\d+)", " ".join(args))
    is_given = any(argument.startswith("--trainer.val_check_interval") for argument in args)
    return [*([f"--trainer.val_check_interval={found[1]}"] if found and not is_given else []), *args]


def _get_gpu_arguments() -> list[str]:
    """Return the arguments that make the quickstart use all GPUs, if there are any, instead of two CPU processes."""
    return ["--trainer.accelerator=gpu", "--trainer.devices=auto"] if torch.cuda.is_available() else []

"""Parser of the command line, with its help and its error messages."""

import os
import re
import sys
from argparse import Action
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fsdp2.cli.errors import is_first_of_node, summarize, wants_traceback
from lightning_fsdp2.cli.names import expand_arguments, expand_yaml, get_hint
from lightning_fsdp2.cli.unique_keys import refuse_repeated_keys
from lightning_fsdp2.compat.argparse import list_names

SUMMARIES = {
    "fit": "Train a model, validating it on the way.",
    "validate": "Evaluate a model on the validation data.",
    "test": "Evaluate a model on the test data.",
    "predict": "Write what a model predicts for data.",
    "describe": "Print mesh, units and each parameter's shard for a config, on any number of ranks, without training.",
    "plan": "Compute memory, traffic and time of a config's step on any number of devices, without using them.",
}
_QUICKSTART_CONFIG = Path(__file__).parent / "quickstart.yaml"
_LIGHTNINGS_STRATEGY_ERROR = re.compile(r"You selected an invalid strategy name: `strategy=('.*?')`.*", re.DOTALL)
_TARGET_HINT = " (_target_ is an earlier spelling: use class_path, or a plain mapping for a config or policy)"


class _HelpFormatter(DefaultHelpFormatter):
    """Help formatter that leaves out markup and the lists of known subclasses, which ``--OPTION.help`` prints."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        return re.sub(r",? ?known subclasses: [^)]*", "", text).replace("``", "").replace(" ()", "")


class ArgumentParser(LightningArgumentParser):
    """Argument parser that accepts short names of strategies, and reports each mistake in a single line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_repeated_keys()
        super().__init__(*args, **{"formatter_class": _HelpFormatter, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        args = expand_arguments(sys.argv[1:] if args is None else args)
        if self._subcommands_action is not None and args[:1] == ["quickstart"]:
            args = ["fit", f"--config={_QUICKSTART_CONFIG}", *_get_gpu_arguments(), *args[1:]]
        return super().parse_args(args, *others, **kwargs)

    def parse_string(self, content: str, path: str | os.PathLike[str] = "", *args: Any, **kwargs: Any) -> Namespace:
        try:
            content = expand_yaml(content, SUMMARIES)
        except ValueError as error:
            self.error(f"{path or 'the config'}, {error}", error)
        return super().parse_string(content, path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error and not wants_traceback():
            if not is_first_of_node():
                self.exit(2)  # all ranks have the same error, so one rank per node prints it
            message = _LIGHTNINGS_STRATEGY_ERROR.sub(r"trainer.strategy: there is no strategy \1", message)
            hint = _TARGET_HINT if "'_target_'" in message else get_hint(message, self._list_options())
            self.exit(2, f"error: {summarize(message)}{hint}\n")
        super().error(message, ex)

    def _list_options(self) -> set[str]:
        commands = self._subcommands_action.choices.values() if self._subcommands_action else []
        return list_names((self, *commands))


def _get_gpu_arguments() -> list[str]:
    """Return the arguments that make the quickstart use all GPUs, if there are any, instead of two CPU processes."""
    return ["--trainer.accelerator=gpu", "--trainer.devices=auto"] if torch.cuda.is_available() else []

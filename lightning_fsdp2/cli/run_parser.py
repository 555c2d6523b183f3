"""Parser of the commands that read a config."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lightning_fsdp2.cli.commands import READ_CONFIG
from lightning_fsdp2.cli.names import expand_arguments, expand_yaml
from lightning_fsdp2.cli.parser import CommandParser
from lightning_fsdp2.cli.unique_keys import refuse_repeated_keys

_QUICKSTART_CONFIG = Path(__file__).parent / "quickstart.yaml"


class RunParser(CommandParser, LightningArgumentParser):
    """Argument parser that accepts short names of strategies, and reports each mistake in a single line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_repeated_keys()
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        args = expand_arguments(sys.argv[1:] if args is None else args)
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


def _validate_at_end(args: Sequence[str]) -> list[str]:
    """Validate after the last step, if the arguments change only the number of steps, so that the report has a loss."""
    found = re.search(r"--trainer\.max_steps[= ](\d+)", " ".join(args))
    is_given = any(argument.startswith("--trainer.val_check_interval") for argument in args)
    return [*([f"--trainer.val_check_interval={found[1]}"] if found and not is_given else []), *args]


def _get_gpu_arguments() -> list[str]:
    """Return the arguments that make the quickstart use all GPUs, if there are any, instead of two CPU processes."""
    return ["--trainer.accelerator=gpu", "--trainer.devices=auto"] if torch.cuda.is_available() else []

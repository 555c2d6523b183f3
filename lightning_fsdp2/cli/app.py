"""Commands that read a config: :class:`FSDP2CLI`, which is LightningCLI with two more commands."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jsonargparse import set_parsing_settings
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.callbacks import ModelSummary as LightningModelSummary
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

import lightning_fsdp2.schedulers  # noqa: F401 - a config can name the imported ones without their path
from lightning_fsdp2._refusals import (
    get_message,
    get_message_of_cause,
    has_mistake,
    is_mistake,
    is_of_package,
)
from lightning_fsdp2.callbacks.model_summary import ModelSummary
from lightning_fsdp2.callbacks.progress_bar import TrainingProgressBar
from lightning_fsdp2.cli.commands import READ_CONFIG, SUMMARIES
from lightning_fsdp2.cli.completion import build_completion
from lightning_fsdp2.cli.errors import wants_traceback
from lightning_fsdp2.cli.help import USAGES
from lightning_fsdp2.cli.messages import name_options
from lightning_fsdp2.cli.quiet import leave_out_noise
from lightning_fsdp2.cli.run_parser import RunParser
from lightning_fsdp2.cli.without_run import WITHOUT_RUN, CLITrainer, leave_run_out, set_world, without_infos
from lightning_fsdp2.compat.argparse import get_option, get_subcommands, list_flags, move_last_group_up, set_summaries
from lightning_fsdp2.startup.registry import STRATEGIES
from lightning_fsdp2.strategies.precision import ShardedPrecision

__all__ = ["FSDP2CLI"]

_DESCRIPTION = "Train any LightningModule with sharded weights, configured in YAML."
_COMPLETION = "--print_completion"

_HELP = {
    "--trainer.strategy": (
        f"How the model is spread over the ranks: {', '.join(STRATEGIES)}, a strategy of Lightning, or a class path."
        " Give options of the strategy as --trainer.strategy.OPTION, or under init_args in YAML."
    ),
    "--seed_everything": "Seed of the random numbers. True stands for PL_GLOBAL_SEED or 0, and False sets none.",
    "--ckpt_path": 'Path of a checkpoint to load, or "last" for the newest last.ckpt.',
    "--weights_only": (
        "Whether only tensors and plain values may be loaded, as in torch.load. Null leaves it to the strategy."
    ),
}
"""Texts in place of those of Lightning, by option."""


def _print_completion(parser: Any, arguments: list[str]) -> None:
    shell = " ".join(arguments).removeprefix(_COMPLETION).lstrip("= ").removeprefix("shtab-")
    try:
        sys.stdout.write(f"{build_completion(parser, shell)}\n")
    except ValueError as error:
        parser.error(str(error), error)
    parser.exit(0)


def _has(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def run(args: Sequence[str] | None) -> None:
    """Parse the arguments, by default those of this process, and run their command."""
    leave_out_noise()
    # reading the docstrings of config fields takes long, and only help and commented configs show them
    shows_texts = any(re.search(r"^-h$|help\b|comments", argument) for argument in args or sys.argv)
    set_parsing_settings(docstring_parse_attribute_docstrings=shows_texts)
    FSDP2CLI(None if args is None else list(args))


class SaveConfig(SaveConfigCallback):
    """Callback of LightningCLI that writes config.yaml beside the logs, with errors that name the folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        try:
            super().setup(trainer, pl_module, stage)
        except OSError as error:
            folder = trainer.default_root_dir if trainer.logger is None else trainer.logger.save_dir
            raise ValueError(
                f"config.yaml cannot be written to {folder!r}: {error.strerror or error}. Free some space there, let"
                " this user write there, or set another folder: the save_dir of the logger, or, without a logger,"
                " trainer.default_root_dir."
            ) from error


class FSDP2CLI(LightningCLI):
    """LightningCLI for any model and data module, both given by ``class_path``.

    The model creates its optimizer and scheduler itself, and they are configured by the model's options. If
    LightningCLI created the optimizer, this would happen before the strategy shards the model, and the optimizer would
    update parameters that are no longer in the model.

    Args:
        args: Command line arguments; see :func:`~lightning_fsdp2.cli.main`.
        run: Whether to run a subcommand; False only creates ``model``, ``datamodule`` and ``trainer``.
    """

    def __init__(self, args: ArgsType = None, *, run: bool = True) -> None:
        commands = {name: {"description": SUMMARIES[name], "usage": USAGES[name]} for name in READ_CONFIG}
        super().__init__(
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_class=CLITrainer,
            parser_kwargs={"description": _DESCRIPTION, **(commands if run else {})},
            parser_class=RunParser,
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands together with ``describe`` and ``plan``."""
        return {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in WITHOUT_RUN}}

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Set the texts that the help shows for Lightning's commands and their options."""
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if not add_subcommands:
            return
        subcommands = get_subcommands(self.parser)
        set_summaries(subcommands, SUMMARIES)
        for name, parser in subcommands.choices.items():
            move_last_group_up(parser, f"Options of {name}")
            for option in _HELP.keys() & set(list_flags(parser)):
                get_option(parser, option).help = _HELP[option]

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Shorten the heading of each group of options to one line."""
        super().add_core_arguments_to_parser(parser)
        for name in ("trainer", "model", "data"):
            cast(Any, parser).groups[name].title = f"Options of the {name}"

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments. If they ask for shell completion, print the script and exit."""
        given = list(sys.argv[1:] if args is None else cast(Any, args))
        if given and str(given[0]).startswith(_COMPLETION):
            _print_completion(parser, [str(argument) for argument in given])
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        seed = (self.config if name is None else self.config[name]).get("seed_everything")
        if type(seed) is int and not 0 <= seed < 1 << 32:
            parser.error(f"seed_everything={seed} must be from 0 to {(1 << 32) - 1}.")
        if name in WITHOUT_RUN:
            self.config[name].seed_everything = False  # no random number is drawn

    def _parse_ckpt_path(self) -> None:
        """Do nothing, so that the model keeps its configured arguments, whatever arguments the checkpoint holds.

        Lightning would replace the configured arguments with those in a single-file checkpoint, but not with those in a
        checkpoint directory. Lightning would also fail if a model saves only some arguments
        (``save_hyperparameters("config")``).
        """

    def before_instantiate_classes(self) -> None:
        """Refuse an empty ``ckpt_path``, and ``16-mixed`` for the strategies of this package.

        On a CPU, Lightning would replace this precision before a strategy could refuse it.
        """
        if self._get(self.config, "ckpt_path") == "":
            self._parser(self.subcommand).error(
                "ckpt_path is empty, as if from a shell variable that is not set; give a checkpoint, or leave it out."
            )
        strategy = self._get(self.config, "trainer.strategy")
        name = str(getattr(strategy, "class_path", strategy))
        is_ours = name.startswith("lightning_fsdp2.") or name in STRATEGIES
        if is_ours and str(self._get(self.config, "trainer.precision")) in ("16", "16-mixed"):
            try:
                ShardedPrecision("16-mixed")
            except ValueError as error:
                self._parser(self.subcommand).error(f"trainer.{error}", error)

    def instantiate_classes(self) -> None:
        """Create model, data and trainer. If one of them refuses an option, report this like a parser error."""
        try:
            if self.subcommand in WITHOUT_RUN:
                self._instantiate_without_run()
            else:
                super().instantiate_classes()
        except Exception as error:
            if not has_mistake(error):  # a bug keeps its traceback
                raise
            self._report(error, get_message_of_cause(error))

    def _instantiate_without_run(self) -> None:
        """Create model, data and trainer for ``describe`` or ``plan``, which need no weights, files or devices."""
        subcommand = cast(str, self.subcommand)
        config = self.config[subcommand]
        set_world(config, subcommand)
        about_run = leave_run_out(config, subcommand)
        with torch.device("meta"), without_infos():
            super().instantiate_classes()
        cast(CLITrainer, self.trainer).about_run = about_run

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Create the Trainer, with this package's model summary and progress bar if the config says nothing of them.

        For ``describe`` and ``plan``, ignore the environment that a launcher has set.
        """
        if self.subcommand in WITHOUT_RUN:
            kwargs["plugins"] = [LightningEnvironment()]
        options = self._get(self.config_init, "trainer")
        callbacks = options.callbacks if isinstance(options.callbacks, list) else [options.callbacks]
        callbacks = [callback for callback in callbacks if callback is not None]
        if not options.barebones:
            if options.enable_model_summary is not False and not _has(callbacks, LightningModelSummary):
                callbacks.append(ModelSummary())
                kwargs["enable_model_summary"] = False
            if options.enable_progress_bar is not False and not _has(callbacks, ProgressBar):
                callbacks.append(TrainingProgressBar())
            kwargs["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a subcommand. Print one line for a mistake of the user, and a traceback for a bug."""
        if self._get(self.config, "ckpt_path") == "last":
            self._check_last(subcommand)
        cast(RunParser, self._parser(subcommand)).has_started = True
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            if wants_traceback() or not is_mistake(error):
                raise
            if self.trainer.strategy.launcher is not None:  # the ranks that this process started have the same mistake
                self.trainer.strategy.launcher.kill(signal.SIGKILL)
            self._report(error, get_message(error))

    def _check_last(self, subcommand: str) -> None:
        """Refuse ``ckpt_path=last`` if it is gone or has another name. Lightning would load none."""
        callbacks = [each for each in self.trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        if len(callbacks) != len(self.trainer.checkpoint_callbacks) or any(each.dirpath is None for each in callbacks):
            return  # what these callbacks save is not known yet
        names = tuple(each.CHECKPOINT_NAME_LAST for each in callbacks)
        lasts = (Path(str(each.dirpath), f"{each.CHECKPOINT_NAME_LAST}{each.FILE_EXTENSION}") for each in callbacks)
        for last in lasts:
            if last.is_symlink() and not last.exists():
                self._parser(subcommand).error(
                    f"ckpt_path=last: {last} points to {os.readlink(last)}, which is gone. Give another checkpoint, or"
                    " remove the link to begin from the start."
                )
        files = [path for each in callbacks for path in Path(str(each.dirpath)).glob(f"*{each.FILE_EXTENSION}")]
        if files and not any(path.name.startswith(names) for path in files):
            newest = max(files, key=lambda path: path.stat().st_mtime)
            self._parser(subcommand).error(
                f"ckpt_path=last: {newest.parent} has no {names[0]}.ckpt, since ModelCheckpoint(save_last=...) is not"
                f" set, but it has other checkpoints. Give the newest, {newest}, or another, and set save_last: link."
            )

    def _report(self, error: Exception, message: str) -> None:
        """End with one line about a mistake. If a library found it, name the options that it is about."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        options = "" if is_of_package(error) else name_options(message, config)
        self._parser(self.subcommand).error(f"{message}{options}", error)

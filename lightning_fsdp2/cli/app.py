"""The program ``lightning-fsdp2`` with its commands."""

import sys
from typing import Any, cast

import torch
from jsonargparse import set_parsing_settings
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_fsdp2._refusals import REFUSALS, get_message, is_refusal
from lightning_fsdp2.cli.commands import COMMANDS
from lightning_fsdp2.cli.errors import has_refusal, wants_traceback
from lightning_fsdp2.cli.parser import SUMMARIES, ArgumentParser
from lightning_fsdp2.cli.quiet import leave_out_noise
from lightning_fsdp2.cli.without_run import WITHOUT_RUN, CLITrainer, leave_run_out, set_world, without_infos
from lightning_fsdp2.compat.argparse import get_option, get_subcommands, set_summaries
from lightning_fsdp2.strategies.precision import ShardedPrecision
from lightning_fsdp2.strategies.registry import STRATEGIES

__all__ = ["FSDP2CLI", "main"]

_DESCRIPTION = "Train any LightningModule with sharded weights, configured in YAML, and manage its checkpoints."

_QUICKSTART = "Train a small model on this machine. Takes the options of `fit`."

_STRATEGY_HELP = (
    f"How the model is spread over the ranks: {', '.join(STRATEGIES)}, a strategy of Lightning, or a class path. Give"
    " options of the strategy as --trainer.strategy.OPTION, or under init_args in YAML."
)


def main(args: ArgsType = None) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict``, ``describe``, ``quickstart`` or a command for checkpoints.

    Args:
        args: Command line arguments without the program's name. None for the arguments of this process.

    Raises:
        SystemExit: With code 2 and one line on stderr if the configuration or the checkpoint is wrong. With code 0 at
            the end of a command for checkpoints.
    """
    leave_out_noise()
    # for shell completion, skip the docstrings of config fields: reading them takes minutes, and no help is shown
    arguments = args if isinstance(args, list) else sys.argv[1:]
    completes = any(argument.startswith("--print_completion") for argument in arguments)
    set_parsing_settings(docstring_parse_attribute_docstrings=not completes, add_print_completion_argument=True)
    FSDP2CLI(args)


class FSDP2CLI(LightningCLI):
    """LightningCLI for any model and data module, both given by ``class_path``.

    The model creates its optimizer and scheduler itself, and they are configured by the model's options. If
    LightningCLI created the optimizer, this would happen before the strategy shards the model, and the optimizer would
    update parameters that are no longer in the model.

    Args:
        args: Command line arguments; see :func:`main`.
        run: Whether to run a subcommand; False only creates ``model``, ``datamodule`` and ``trainer``.
    """

    def __init__(self, args: ArgsType = None, *, run: bool = True) -> None:
        usages = {name: f"lightning-fsdp2 {name} --config FILE [--OPTION VALUE ...]" for name in SUMMARIES}
        commands = {name: {"description": SUMMARIES[name], "usage": usages[name]} for name in SUMMARIES}
        super().__init__(
            save_config_kwargs={"overwrite": True},
            trainer_class=CLITrainer,
            parser_kwargs={
                "prog": "lightning-fsdp2",
                "usage": "lightning-fsdp2 COMMAND [--OPTION VALUE ...]",
                "description": _DESCRIPTION,
                **(commands if run else {}),
            },
            parser_class=ArgumentParser,
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
        """Add the package's own commands after those of Lightning."""
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if not add_subcommands:
            return
        subcommands = get_subcommands(self.parser)
        set_summaries(subcommands, SUMMARIES)
        subcommands.add_subcommand("quickstart", ArgumentParser(description=_QUICKSTART), help=_QUICKSTART)
        for name, command in COMMANDS.items():
            summary = (command.__doc__ or "").partition("\n")[0].replace("``", "")
            parser = ArgumentParser(description=summary)
            parser.add_function_arguments(command, as_group=False, as_positional=True)
            subcommands.add_subcommand(name, parser, help=summary)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """List the strategies in the help, and shorten the heading of each group of options to one line."""
        super().add_core_arguments_to_parser(parser)
        for name in ("trainer", "model", "data"):
            cast(Any, parser).groups[name].title = f"Options of the {name}"
        get_option(parser, "--trainer.strategy").help = _STRATEGY_HELP

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments. If they name a command for checkpoints, run the command and exit."""
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        if name in WITHOUT_RUN:
            self.config[name].seed_everything = False  # no random number is drawn
        if name not in COMMANDS:
            return
        try:
            COMMANDS[name](**self.config[name])
        except (ValueError, OSError, RuntimeError) as error:
            parser.error(str(error), error)
        parser.exit(0)

    def _parse_ckpt_path(self) -> None:
        """Do nothing, so that the model keeps its configured arguments, whatever arguments the checkpoint holds.

        Lightning would replace the configured arguments with those in a single-file checkpoint, but not with those in a
        checkpoint directory. Lightning would also fail if a model saves only some arguments
        (``save_hyperparameters("config")``).
        """

    def before_instantiate_classes(self) -> None:
        """Refuse ``16-mixed`` for the strategies of this package.

        On a CPU, Lightning would replace this precision before a strategy could refuse it.
        """
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
        except (*REFUSALS, RuntimeError) as error:  # Lightning raises RuntimeError for bad SLURM variables
            if not has_refusal(error):  # a bug keeps its traceback
                raise
            self._parser(self.subcommand).error(str(error), error)

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
        """Create the Trainer. For ``describe`` and ``plan``, ignore the environment that a launcher has set."""
        if self.subcommand in WITHOUT_RUN:
            kwargs["plugins"] = [LightningEnvironment()]
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a subcommand. Print one line for an error that the user can fix, and a traceback for a bug."""
        try:
            super()._run_subcommand(subcommand)
        except REFUSALS as error:
            if wants_traceback() or not is_refusal(error):
                raise
            self._parser(subcommand).error(get_message(error), error)

"""The command line: LightningCLI for every model and data module, and what is done with checkpoints.

::

    lightning-fsdp2 fit --config run.yaml --trainer.max_steps 100
    lightning-fsdp2 fit --trainer.strategy.help lightning_fsdp2.FSDP2Strategy --trainer.strategy.config.help
    torchrun --nproc-per-node 8 -m lightning_fsdp2 fit --config run.yaml
    lightning-fsdp2 verify checkpoints/last.ckpt
"""

import os
import re
from typing import Any, NoReturn, cast

from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_fsdp2.commands import COMMANDS
from lightning_fsdp2.strategies.precision import ShardedPrecision

__all__ = ["FSDP2CLI", "main"]

_DESCRIPTION = "Train any LightningModule on shards, from YAML, and look after its checkpoints."

_STRATEGY_NAMES = ("fsdp2", "fsdp2_offload")

_USER_ERRORS = (ValueError, MisconfigurationException, FileNotFoundError)
_HEADINGS = (
    "Does not validate against",
    "Subtypes: ",
    "Errors:",
    "Problem with given class_path",
    "Given value type: ",
)
_TARGET_HINT = " (_target_ is an earlier spelling: use class_path, or a plain mapping for a config or policy)"


def main(args: ArgsType = None) -> None:
    """Run ``fit``, ``validate``, ``test`` or ``predict``, or a command of :mod:`lightning_fsdp2.commands`.

    Args:
        args: Command line arguments without the program's name; None takes those of the process.

    Raises:
        SystemExit: With code 2 and one line on stderr if the configuration is wrong, or the checkpoint; with code 0 at
            the end of a command.
    """
    # the help of our configs stands under their fields
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    FSDP2CLI(args)


class _ArgumentParser(LightningArgumentParser):
    """Ends with one line, where jsonargparse writes a screenful of usage and every type it tried."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # jsonargparse's own variable for whoever needs the whole story: it then raises, from the cause
        wants_traceback = os.environ.get("JSONARGPARSE_DEBUG", "").lower() == "true"
        if self.exit_on_error and not wants_traceback:
            hint = _TARGET_HINT if "'_target_'" in message else ""
            self.exit(2, f"error: {_summarize(message)}{hint}\n")
        super().error(message, ex)


class FSDP2CLI(LightningCLI):
    """LightningCLI for any model and data module, both given by ``class_path``.

    The optimizer and the scheduler are options of the model: LightningCLI's own would be made before the strategy
    shards the model, and would then update parameters that are no longer in it.

    Args:
        args: As for :func:`main`.
        run: Whether to run a subcommand; False only makes ``model``, ``datamodule`` and ``trainer``.
    """

    def __init__(self, args: ArgsType = None, *, run: bool = True) -> None:
        super().__init__(
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "lightning-fsdp2", "description": _DESCRIPTION},
            parser_class=_ArgumentParser,
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Add our commands behind Lightning's."""
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if not add_subcommands:
            return
        for name, command in COMMANDS.items():
            summary = (command.__doc__ or "").partition("\n")[0]
            parser = _ArgumentParser(description=summary)
            parser.add_function_arguments(command, as_group=False, as_positional=True)
            cast(Any, self.parser)._subcommands_action.add_subcommand(name, parser, help=summary)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; those of a command are carried out, and the process ends."""
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        if name not in COMMANDS:
            return
        try:
            COMMANDS[name](**self.config[name])
        except (ValueError, OSError, RuntimeError) as error:
            parser.error(str(error), error)
        parser.exit(0)

    def _parse_ckpt_path(self) -> None:
        """Leave the model's arguments to the configuration, as with directories.

        Lightning takes those in a single file, and fails where models name what
        they save (``save_hyperparameters("config")``).
        """

    def before_instantiate_classes(self) -> None:
        """Refuse 16-mixed for our strategies here: on a CPU, Lightning replaces it before they could."""
        strategy = self._get(self.config, "trainer.strategy")
        name = str(getattr(strategy, "class_path", strategy))
        is_ours = name.startswith("lightning_fsdp2.") or name in _STRATEGY_NAMES
        if is_ours and str(self._get(self.config, "trainer.precision")) in ("16", "16-mixed"):
            try:
                ShardedPrecision("16-mixed")
            except ValueError as error:
                self._parser(self.subcommand).error(f"trainer.{error}", error)

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; a wrong option they find ends like one that the parser finds."""
        try:
            super().instantiate_classes()
        except _USER_ERRORS as error:
            # jsonargparse turns whatever a model's __init__ raises into a ValueError; a bug keeps its traceback
            if not isinstance(_get_root_cause(error), _USER_ERRORS):
                raise
            self._parser(self.subcommand).error(str(error), error)


def _get_root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _summarize(message: str) -> str:
    """Return, of a jsonargparse message, the innermost option and what is wrong with it.

    jsonargparse tries every member of a union type and indents what each of them said, so the deepest lines are about
    the member that came closest to the given value.
    """
    if "Does not validate against" not in message:
        return message
    keys: dict[int, str] = {}
    reasons: list[str] = []
    deepest, option, value = -1, "", ""
    for line in message.splitlines():
        text = line.lstrip(" ").removeprefix("- ")
        depth = len(line) - len(text)
        if key := re.fullmatch(r'Parser key "(.+)":', text):
            keys = {outer: name for outer, name in keys.items() if outer < depth} | {depth: key[1]}
        elif text.startswith("Given value: "):
            value = value or text.removeprefix("Given value: ")
        elif not text.startswith(_HEADINGS) and depth >= deepest:
            if depth > deepest:
                option = ".".join(name for outer, name in keys.items() if outer < depth)
                deepest, reasons, value = depth, [], ""
            reasons.append(text)
    reasons = [reason for reason in reasons if reason != "Expected a <class 'NoneType'>"]
    # where one kind of value was right and its content wrong, what other kinds there are does not help
    reasons = [reason for reason in reasons if not reason.startswith("Expected ")] or reasons
    summary = ", or: ".join(dict.fromkeys(reasons))
    if all(reason.startswith("Expected ") for reason in reasons):
        summary += f". Got value: {value}"
    return f"{option}: {summary}" if option else summary

"""``lightning-fsdp2``: what it offers, how it parses it, and how it runs."""

import json
import logging
import os
import re
import sys
from argparse import Action
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO, cast

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, set_parsing_settings
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_fsdp2._refusals import REFUSALS, get_message, is_refusal
from lightning_fsdp2.cli.commands import COMMANDS
from lightning_fsdp2.cli.errors import has_refusal, is_first_of_node, summarize, wants_traceback
from lightning_fsdp2.cli.names import expand_arguments, expand_yaml, get_hint
from lightning_fsdp2.data.module import SequenceDataModule
from lightning_fsdp2.describe import describe
from lightning_fsdp2.describe_table import write_tables
from lightning_fsdp2.parallelizer import import_class_from_path
from lightning_fsdp2.plan.devices import get_device
from lightning_fsdp2.plan.plot import check_plot, draw_plan
from lightning_fsdp2.plan.result import Plan
from lightning_fsdp2.plan.run import get_notes_on_extras, plan_run, search_run
from lightning_fsdp2.plan.table import show_progress, write_json, write_plan, write_search
from lightning_fsdp2.strategies.names import STRATEGIES
from lightning_fsdp2.strategies.precision import ShardedPrecision

__all__ = ["FSDP2CLI", "main"]

_DESCRIPTION = "Train any LightningModule on shards, from YAML, and look after its checkpoints."

_SUMMARIES = {
    "fit": "Train a model, validating it on the way.",
    "validate": "Evaluate a model on the validation data.",
    "test": "Evaluate a model on the test data.",
    "predict": "Write what a model predicts for data.",
    "describe": "Print mesh, units and each parameter's shard for a config, on any number of ranks, without training.",
    "plan": "Compute memory, traffic and time of a config's step on any number of devices, without any.",
}
_WITHOUT_RUN = ("describe", "plan")
_QUICKSTART = "Train a small model on this machine, with options as of `fit`."
_QUICKSTART_CONFIG = Path(__file__).parent / "quickstart.yaml"

_STRATEGY_HELP = (
    f"How the model is spread over the ranks: {', '.join(STRATEGIES)}, a strategy of Lightning, or a class path. Its"
    " options follow as --trainer.strategy.OPTION, or under init_args in YAML."
)

_LIGHTNINGS_STRATEGY_ERROR = re.compile(r"You selected an invalid strategy name: `strategy=('.*?')`.*", re.DOTALL)
_SOURCES = ("path", "validation_path", "validation_split", "test_path", "test_split")
"""Options of data modules that say what to read, apart from the dataset."""

_CACHE = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lightning_fsdp2" / "plans")

_TARGET_HINT = " (_target_ is an earlier spelling: use class_path, or a plain mapping for a config or policy)"


def main(args: ArgsType = None) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict``, ``describe``, ``quickstart`` or a command on checkpoints.

    Args:
        args: Command line arguments without the program's name; None takes those of the process.

    Raises:
        SystemExit: With code 2 and one line on stderr if the configuration is wrong, or the checkpoint; with code 0 at
            the end of a command.
    """
    # the help of our configs stands under their fields; completion shows no help, and would read minutes of it
    arguments = args if isinstance(args, list) else sys.argv[1:]
    completes = any(argument.startswith("--print_completion") for argument in arguments)
    set_parsing_settings(docstring_parse_attribute_docstrings=not completes, add_print_completion_argument=True)
    FSDP2CLI(args)


class _Trainer(Trainer):
    """Lightning's, which can also say what it would train."""

    run_config = ""
    """Text of the config that it was made of, with its model and data."""

    left_out: Sequence[str] = ()
    """Class paths of the config's callbacks and plugins, which it has none of."""

    def describe(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        world_size: int | None = None,
        format: Literal["table", "json"] = "table",
    ) -> None:
        """Print how the model is sharded.

        Args:
            model: On the meta device.
            datamodule: Not used.
            world_size: Number of ranks, also more than this machine has. None for trainer.devices x num_nodes.
            format: Of the output: tables to read, or JSON with every parameter.
        """
        # by now the command line has put a number in place of None
        description = describe(self, model, world_size=cast(int, world_size))
        if format == "json":
            sys.stdout.write(f"{json.dumps(description.to_dict(), indent=2)}\n")
        else:
            write_tables(description, sys.stdout)

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        world_size: int | None = None,
        device: str = "h100",
        memory: float | None = None,
        network_bandwidth: float | None = None,
        devices_per_node: int | None = None,
        ranks: list[int] | None = None,
        suggest: bool = True,
        search: str | None = None,
        search_seconds: float = 600,
        cache_dir: str | None = _CACHE,
        json: str | None = None,
        plot: str | None = None,
        processes: int | None = None,
    ) -> None:
        """Print what a step of the run takes on devices that need not be there.

        Args:
            model: On the meta device.
            datamodule: One of lightning_fsdp2 is asked for the shapes of its batches; of others the first is read.
            world_size: Number of devices. None for trainer.devices x num_nodes.
            device: a100, h100, h200, b200 or mi300x.
            memory: GiB of a device, if it has another size than the one of that name.
            network_bandwidth: GB per second and device to other nodes, in one direction.
            devices_per_node: How many devices the fast links join. None for trainer.devices, if the config is for so
                many devices as world_size says, or else for 8.
            ranks: Which ranks to plan. None for the first and the last, or the first if all hold as much.
            suggest: Whether to plan what would help if it does not fit.
            search: YAML file to write the layout of the shortest steps to, for fit to take as a second --config.
            search_seconds: After which no other layout is begun.
            cache_dir: Folder that keeps what a search has simulated, for the next one; null keeps nothing.
            json: File to write all numbers to; - for the output, in place of the tables.
            plot: File to draw memory and traffic in, .png or .svg.
            processes: How many plans are computed at once; None for as many as there are CPUs.
        """
        target = get_device(device, memory=memory, network_bandwidth=network_bandwidth, per_node=devices_per_node)
        if search is not None and ranks is not None:
            raise ValueError(f"ranks={ranks} with search={search!r}: a search plans rank 0; leave ranks out.")
        for name, path in {"search": search, "json": json, "plot": plot}.items():
            _check_folder(name, path)
        if plot is not None:
            check_plot(plot)
        options: dict[str, Any] = {"datamodule": datamodule, "world_size": world_size, "device": target}
        with show_progress() as on_progress, _without_infos():
            options |= {"processes": processes, "on_progress": on_progress}
            plan: Plan | None
            if search is None:
                plan = plan_run(self, model, ranks=ranks, suggest=suggest, **options)
            else:
                options |= {"seconds": search_seconds, "cache_dir": cache_dir, "cache_key": self.run_config}
                plan = _search(self, model, search, sys.stderr if json == "-" else sys.stdout, **options)
        if plan is None:
            return
        plan = replace(plan, notes=[*plan.notes, *get_notes_on_extras(self.left_out)])
        if json != "-":
            write_plan(plan, sys.stdout)
        if json is not None:
            write_json(plan, json)
        if plot is not None:
            draw_plan(plan, plot)


def _search(trainer: Trainer, model: LightningModule, path: str, output: TextIO, **options: Any) -> Plan | None:
    """Print the best layouts, and write the first; return its plan, if any fits."""
    result = search_run(trainer, model, **options)
    write_search(result, output)
    if result.plan is not None:
        Path(path).write_text(yaml.safe_dump(result.configs[0], sort_keys=False))
        output.write(f"\n{path} has the first of them: fit --config RUN.yaml --config {path}\n\n")
    else:
        output.write(f"{path} was not written.\n")
    return result.plan


def _list(extras: Any) -> list[Any]:
    return [] if extras is None else extras if isinstance(extras, list) else [extras]


def _get_class_name(extra: Any) -> str:
    return str(getattr(extra, "class_path", extra))


def _check_folder(option: str, path: str | None) -> None:
    if path not in (None, "-") and not os.access(Path(path).parent, os.W_OK):
        raise ValueError(
            f"{option}={path!r}: there is no folder {str(Path(path).parent)!r} to write to; make it first."
        )


class _HelpFormatter(DefaultHelpFormatter):
    """Leaves out the lists of all subclasses, which ``--OPTION.help`` gives, and markup."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        return re.sub(r",? ?known subclasses: [^)]*", "", text).replace("``", "").replace(" ()", "")


class _ArgumentParser(LightningArgumentParser):
    """Knows short names, and ends with one line where jsonargparse writes a screenful of what it tried."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _HelpFormatter, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        args = expand_arguments(sys.argv[1:] if args is None else args)
        if self._subcommands_action is not None and args[:1] == ["quickstart"]:
            args = ["fit", f"--config={_QUICKSTART_CONFIG}", *_get_gpu_arguments(), *args[1:]]
        return super().parse_args(args, *others, **kwargs)

    def parse_string(self, content: str, path: str | os.PathLike[str] = "", *args: Any, **kwargs: Any) -> Namespace:
        try:
            content = expand_yaml(content, _SUMMARIES)
        except ValueError as error:
            self.error(f"{path or 'the config'}, {error}", error)
        return super().parse_string(content, path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error and not wants_traceback():
            if not is_first_of_node():
                self.exit(2)  # the same error on every rank is said once
            message = _LIGHTNINGS_STRATEGY_ERROR.sub(r"trainer.strategy: there is no strategy \1", message)
            hint = _TARGET_HINT if "'_target_'" in message else get_hint(message, self._list_options())
            self.exit(2, f"error: {summarize(message)}{hint}\n")
        super().error(message, ex)

    def _list_options(self) -> set[str]:
        commands = self._subcommands_action.choices.values() if self._subcommands_action else []
        return {action.dest for parser in (self, *commands) for action in parser._actions}


class FSDP2CLI(LightningCLI):
    """LightningCLI for any model and data module, both given by ``class_path``.

    The optimizer and the scheduler are options of the model: LightningCLI's own would be made before the strategy
    shards the model, and would then update parameters that are no longer in it.

    Args:
        args: As for :func:`main`.
        run: Whether to run a subcommand; False only makes ``model``, ``datamodule`` and ``trainer``.
    """

    def __init__(self, args: ArgsType = None, *, run: bool = True) -> None:
        usages = {name: f"lightning-fsdp2 {name} --config FILE [--OPTION VALUE ...]" for name in _SUMMARIES}
        commands = {name: {"description": _SUMMARIES[name], "usage": usages[name]} for name in _SUMMARIES}
        super().__init__(
            save_config_kwargs={"overwrite": True},
            trainer_class=_Trainer,
            parser_kwargs={
                "prog": "lightning-fsdp2",
                "usage": "lightning-fsdp2 COMMAND [--OPTION VALUE ...]",
                "description": _DESCRIPTION,
                **(commands if run else {}),
            },
            parser_class=_ArgumentParser,
            auto_configure_optimizers=False,
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and those of a Trainer that trains nothing."""
        return {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in _WITHOUT_RUN}}

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Add our commands behind Lightning's."""
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        if not add_subcommands:
            return
        subcommands = cast(Any, self.parser)._subcommands_action
        for action in subcommands._choices_actions:
            action.help = _SUMMARIES[action.dest]
        subcommands.add_subcommand("quickstart", _ArgumentParser(description=_QUICKSTART), help=_QUICKSTART)
        for name, command in COMMANDS.items():
            summary = (command.__doc__ or "").partition("\n")[0].replace("``", "")
            parser = _ArgumentParser(description=summary)
            parser.add_function_arguments(command, as_group=False, as_positional=True)
            subcommands.add_subcommand(name, parser, help=summary)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Say which strategies there are, and head the groups of options with words of one line."""
        super().add_core_arguments_to_parser(parser)
        for name in ("trainer", "model", "data"):
            cast(Any, parser).groups[name].title = f"Options of the {name}"
        parser._option_string_actions["--trainer.strategy"].help = _STRATEGY_HELP

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; those of a command are carried out, and the process ends."""
        super().parse_arguments(parser, args)
        name = self.config.get("subcommand")
        if name in _WITHOUT_RUN:
            self.config[name].seed_everything = False  # nothing is drawn
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
        is_ours = name.startswith("lightning_fsdp2.") or name in STRATEGIES
        if is_ours and str(self._get(self.config, "trainer.precision")) in ("16", "16-mixed"):
            try:
                ShardedPrecision("16-mixed")
            except ValueError as error:
                self._parser(self.subcommand).error(f"trainer.{error}", error)

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; a wrong option they find ends like one that the parser finds."""
        try:
            if self.subcommand in _WITHOUT_RUN:
                self._instantiate_without_run()
            else:
                super().instantiate_classes()
        except (*REFUSALS, RuntimeError) as error:  # Lightning's, of variables of SLURM that it does not support
            if not has_refusal(error):  # a bug keeps its traceback
                raise
            self._parser(self.subcommand).error(str(error), error)

    def _instantiate_without_run(self) -> None:
        """Make no weights, and nothing that reads, writes or wants the machines of the run."""
        config = self.config[self.subcommand]
        if config.world_size is None:
            config.world_size = _get_world_size(config.trainer)
        devices = _count_devices(config.trainer)
        if self.subcommand == "plan" and config.world_size == devices * int(config.trainer.num_nodes):
            config.devices_per_node = config.devices_per_node or devices
        if self.subcommand == "describe":
            config.data = None
        elif config.data is not None:
            _leave_unread(config.data)
        arguments = config.model.get("init_args")
        if config.model.get("class_path") == "lightning_fsdp2.CausalLM" and arguments.pretrained is not None:
            arguments.config, arguments.pretrained = arguments.pretrained, None  # its config.json says all
        run_config = str((config.trainer, config.model, config.data))
        extras = [*_list(config.trainer.callbacks), *_list(config.trainer.plugins)]
        config.trainer.update(
            Namespace(accelerator="cpu", devices=1, callbacks=None, logger=False, profiler=None, plugins=None)
        )
        with torch.device("meta"), _without_infos():
            super().instantiate_classes()
        trainer = cast(_Trainer, self.trainer)
        trainer.run_config, trainer.left_out = run_config, [_get_class_name(extra) for extra in extras]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer; without a run it needs no launcher's environment."""
        if self.subcommand in _WITHOUT_RUN:
            kwargs["plugins"] = [LightningEnvironment()]
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Train or evaluate; what is refused on the way ends in one line, too, and a bug with its traceback."""
        try:
            super()._run_subcommand(subcommand)
        except REFUSALS as error:
            if wants_traceback() or not is_refusal(error):
                raise
            self._parser(subcommand).error(get_message(error), error)


def _get_world_size(trainer: Namespace) -> int:
    """The ranks that a config asks for.

    Raises:
        ValueError: When it asks for all devices, and this machine has none of the kind.
    """
    count = _count_devices(trainer)
    if count < 1:
        raise ValueError(
            f"trainer.devices={trainer.devices!r} is what a machine has, and this one has no accelerator; give the"
            " number of ranks, such as --world_size=8."
        )
    return count * int(trainer.num_nodes)


def _count_devices(trainer: Namespace) -> int:
    """Of a node; 0 where the config asks for all, and there is none."""
    devices: Any = trainer.devices
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, list):
        return len(devices)
    if str(devices) not in ("auto", "-1"):
        return int(devices)
    return 1 if trainer.accelerator == "cpu" else torch.accelerator.device_count()


def _leave_unread(data: Namespace) -> None:
    """Let a data module of this package be made where its files are not; its batches have the same shapes."""
    if issubclass(import_class_from_path(data.class_path), SequenceDataModule):
        elsewhere = {name: None for name in _SOURCES if name in data.init_args}
        data.init_args.update(Namespace(**elsewhere, dataset="unread"))


def _get_gpu_arguments() -> list[str]:
    """The quickstart asks for two CPU processes; where there are GPUs, it uses them."""
    return ["--trainer.accelerator=gpu", "--trainer.devices=auto"] if torch.cuda.is_available() else []


@contextmanager
def _without_infos() -> Iterator[None]:
    """Keep what Lightning says of the machine out of what is read or piped on."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

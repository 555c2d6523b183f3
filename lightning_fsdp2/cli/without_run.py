"""Commands ``describe`` and ``plan``, which do not need the machines, the data or the weights of a run."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_fsdp2.cli.progress import show_progress
from lightning_fsdp2.data.module import SequenceDataModule
from lightning_fsdp2.plan.notes import get_notes_on_extras
from lightning_fsdp2.plan.plot import check_plot, draw_plan
from lightning_fsdp2.plan.result import Plan
from lightning_fsdp2.plan.run import Planner, make_planner
from lightning_fsdp2.plan.sharding_table import write_tables
from lightning_fsdp2.plan.simulation.sharding import describe
from lightning_fsdp2.plan.table import write_changes, write_json, write_plan, write_search
from lightning_fsdp2.plan.timing.devices import get_device
from lightning_fsdp2.recipes.imports import import_class_from_path

WITHOUT_RUN = ("describe", "plan")

_SOURCES = ("path", "validation_path", "validation_split", "test_path", "test_split")
"""Options of data modules, other than ``dataset``, that name the data to read."""

_MOST_RANKS = 1 << 20
"""Largest number of ranks that can be described; no cluster has as many devices."""

_CACHE = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lightning_fsdp2" / "plans")


@dataclass(frozen=True)
class AboutRun:
    """Description of a run, taken from its config."""

    config: str
    """Text of the sections for trainer, model and data in the config."""

    extras: list[str]
    """Class paths of the config's callbacks and plugins."""


class CLITrainer(Trainer):
    """Lightning's Trainer with the commands ``describe`` and ``plan``, which do not train."""

    about_run: AboutRun
    """Description of the run, taken from the config. Set only for ``describe`` and ``plan``."""

    def describe(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        world_size: int | None = None,
        format: Literal["table", "json"] = "table",
    ) -> None:
        """Print how the model is sharded.

        Args:
            model: Model on the meta device.
            datamodule: Not used.
            world_size: Number of ranks, which may be more than this machine has. None for trainer.devices x num_nodes.
            format: Format of the output: tables to read, or JSON with every parameter.
        """
        # `set_world` has already replaced a missing world size with a number
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
        memory_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
        devices_per_node: int | None = None,
        product_tflops: float | None = None,
        attention_tflops: float | None = None,
        ranks: list[int] | int | None = None,
        suggest: bool = True,
        search: str | None = None,
        search_seconds: float = 600,
        cache_dir: str | None = _CACHE,
        json: str | None = None,
        plot: str | None = None,
        processes: int | None = None,
    ) -> None:
        """Print the memory, traffic and time of a training step, on devices that this machine need not have.

        Args:
            model: Model on the meta device.
            datamodule: Data of the run. A data module of lightning_fsdp2 knows the shapes of its batches. From any
                other data module, the first batch is read.
            world_size: Number of devices. None for trainer.devices x num_nodes.
            device: Kind of the devices: a100, h100, h200, b200 or mi300x.
            memory: Memory of a device in GiB, if it differs from the usual memory of this kind.
            memory_bandwidth: Memory bandwidth of a device in GB per second, if it differs from the usual one.
            network_bandwidth: Bandwidth to other nodes in GB per second per device, in one direction.
            devices_per_node: Number of devices that the fast links connect. By default, this is trainer.devices if
                world_size equals trainer.devices x num_nodes, and 8 otherwise.
            product_tflops: TFLOP/s that matrix products reach in bfloat16, for the estimate; None for the published
                number.
            attention_tflops: TFLOP/s that the forward of attention reaches in bfloat16 with 16,384 keys, heads of size
                128 and no mask, for the estimate; None for the published number.
            ranks: Ranks to plan: a number, or a list of numbers. None for the first and the last, or only the first if
                all shards have the same size. Of a pipeline, None is for the first rank of the first stage, of the last
                stage, and of one between.
            suggest: Whether to also plan changes that would help, if the run does not fit in memory.
            search: YAML file to write with the layout that has the shortest steps. To train with this layout, pass
                the file to the fit command as a second --config.
            search_seconds: Time limit of the search in seconds. Planning the best layout then takes further time.
            cache_dir: Folder in which a search stores its simulations for later searches; null stores nothing.
            json: File for all numbers; - prints them instead of the tables.
            plot: File for a plot of memory and traffic, .png or .svg.
            processes: Number of plans that are computed at once; None for as many as there are CPUs.
        """
        target = get_device(
            device,
            memory=memory,
            memory_bandwidth=memory_bandwidth,
            network_bandwidth=network_bandwidth,
            per_node=devices_per_node,
            product_tflops=product_tflops,
            attention_tflops=attention_tflops,
        )
        if search is not None and ranks is not None:
            raise ValueError(
                f"ranks={ranks} with search={search!r}: a search chooses the ranks itself; leave ranks out."
            )
        _check_files(search=search, json=json, plot=plot)
        notes = get_notes_on_extras(self.about_run.extras)
        with without_infos():
            planner = make_planner(
                self, model, datamodule=datamodule, world_size=cast(int, world_size), device=target, processes=processes
            )
            if search is None:
                _plan([ranks] if isinstance(ranks, int) else ranks, planner, notes, suggest, json=json, plot=plot)
            else:
                options = {"seconds": search_seconds, "cache_dir": cache_dir, "cache_key": self.about_run.config}
                _search(Path(search), planner, notes, json=json, plot=plot, **options)


def _plan(
    ranks: list[int] | None, planner: Planner, notes: list[str], suggest: bool, *, json: str | None, plot: str | None
) -> None:
    """Print the plan of a run, and then the changes that would help it to fit."""
    with show_progress("planning the run"):
        plan = planner.plan(ranks)
    plan = replace(plan, notes=[*plan.notes, *notes])
    is_complete = plan.verdict == "fits" or not suggest
    if is_complete or json != "-":  # what is printed is one JSON document, with the changes
        _write_plan(plan, json=json, plot=plot)
    if is_complete:
        return
    with show_progress("planning changes that would help") as on_progress:
        plan = replace(plan, changes=planner.find_changes(plan, on_progress))
    if json == "-":
        _write_plan(plan, json=json, plot=plot)
        return
    write_changes(plan.changes, sys.stdout)
    if json is not None:
        write_json(plan, json)


def _search(
    path: Path, planner: Planner, notes: list[str], *, json: str | None, plot: str | None, **options: Any
) -> None:
    """Print the best layouts, write the best one to ``path``, and print its plan."""
    output = sys.stderr if json == "-" else sys.stdout
    with show_progress("trying layouts") as report:
        # how many layouts will be tried depends on which fit
        found = planner.search(**options, on_progress=lambda done, _: report(done, None))
    write_search(found, output)
    if not found.best:
        output.write(f"{path} was not written.\n")
        return
    _write_layout("the first of them", planner.describe_config(found.best[0].knobs), path, output)
    with show_progress("planning the best layout with all of its layers"):
        result = planner.plan_best(found)
    if result.plan is None:
        path.unlink()
        output.write(f"With all of its layers, none of these layouts fits; {path} was removed.\n")
        return
    if passed_over := len(found.best) - len(result.search.best):
        output.write(f"With all of its layers, layout {passed_over + 1} is the first of them that fits.\n")
        _write_layout("this layout", result.configs[0], path, output)
    _write_plan(replace(result.plan, notes=[*result.plan.notes, *notes]), json=json, plot=plot)


def _write_layout(name: str, config: dict[str, Any], path: Path, output: TextIO) -> None:
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    use = f"fit --config RUN.yaml --config {path}" if config else "it is the run's own layout, so this changes nothing"
    output.write(f"\n{path} has {name}: {use}\n\n")
    output.flush()


def _write_plan(plan: Plan, *, json: str | None, plot: str | None) -> None:
    if json != "-":
        write_plan(plan, sys.stdout)
    if json is not None:
        write_json(plan, json)
    if plot is not None:
        draw_plan(plan, plot)


def _check_files(**paths: str | None) -> None:
    for option, path in paths.items():
        if path not in (None, "-") and (os.path.isdir(path) or not os.access(Path(path).parent, os.W_OK)):
            raise ValueError(f"{option}={path!r} cannot be written; name a file in a writable folder.")
    if paths["plot"] is not None:
        check_plot(paths["plot"])


def set_world(config: Namespace, subcommand: str) -> None:
    """Fill in the world size and the devices per node from the trainer's options, if the command line omits them.

    Raises:
        ValueError: When the trainer asks for all devices, and this machine has no device of that kind. Or when there is
            no strategy, which would spread the model over these devices.
    """
    if config.trainer.strategy == "auto":  # Lightning's default
        raise ValueError("the config has no trainer.strategy; give one, such as --trainer.strategy=fsdp2.")
    devices, nodes = _count_devices(config.trainer), int(config.trainer.num_nodes)
    if config.world_size is None and devices < 1:
        raise ValueError(
            f"trainer.devices={config.trainer.devices!r} asks for all accelerators of this machine, but it has none;"
            " give the number of ranks, such as --world_size=8."
        )
    if config.world_size is None:
        config.world_size = devices * nodes
    if not 1 <= config.world_size <= _MOST_RANKS:
        raise ValueError(f"world_size={config.world_size} must be from 1 to {_MOST_RANKS}, the number of ranks.")
    if subcommand == "plan" and config.world_size == devices * nodes:
        config.devices_per_node = config.devices_per_node or devices


def leave_run_out(config: Namespace, subcommand: str) -> AboutRun:
    """Remove from ``config`` the settings for weights and machines, and all settings that read or write files.

    Returns:
        A description of the run as it was configured.
    """
    if subcommand == "describe":
        config.data = None
    elif config.data is not None:
        _leave_unread(config.data)
    arguments = config.model.get("init_args")
    if config.model.get("class_path") == "lightning_fsdp2.CausalLM" and arguments.pretrained is not None:
        arguments.config, arguments.pretrained = arguments.pretrained, None  # its config.json is enough
    trainer = config.trainer
    extras = [*_list(trainer.callbacks), *_list(trainer.plugins)]
    about = AboutRun(str((trainer, config.model, config.data)), [_get_class_name(extra) for extra in extras])
    trainer.update(Namespace(accelerator="cpu", devices=1, callbacks=None, logger=False, profiler=None, plugins=None))
    return about


def _list(extras: Any) -> list[Any]:
    return [] if extras is None else extras if isinstance(extras, list) else [extras]


def _get_class_name(extra: Any) -> str:
    return str(getattr(extra, "class_path", extra))


def _count_devices(trainer: Namespace) -> int:
    """Return the number of devices in a node. This is 0 if the config asks for all devices and there are none."""
    devices: Any = trainer.devices
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, list):
        return len(devices)
    if str(devices) not in ("auto", "-1"):
        return int(devices)
    return 1 if trainer.accelerator == "cpu" else torch.accelerator.device_count()


def _leave_unread(data: Namespace) -> None:
    """Change the config of one of this package's data modules so that it can be created without its files.

    The shapes of the data module's batches stay the same.
    """
    if issubclass(import_class_from_path(data.class_path), SequenceDataModule):
        elsewhere = {name: None for name in _SOURCES if name in data.init_args}
        data.init_args.update(Namespace(**elsewhere, dataset="unread"))


@contextmanager
def without_infos() -> Iterator[None]:
    """Hide Lightning's info messages inside the ``with`` block, because they would mix with a command's output."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

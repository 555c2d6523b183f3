"""Functions that plan a run, suggest changes to a run that does not fit, and search for the fastest layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_fsdp2.compat.torch import tree_map_with_path
from lightning_fsdp2.data.module import SequenceDataModule
from lightning_fsdp2.parallel.layers.float8 import make_device_error
from lightning_fsdp2.parallel.pipeline.schedule import check_rows
from lightning_fsdp2.plan.cache import Cache, get_run_fingerprint
from lightning_fsdp2.plan.knobs import Knobs, build_config, get_sequence_length, read_knobs
from lightning_fsdp2.plan.layouts import plan_pipeline, plan_ranks
from lightning_fsdp2.plan.notes import LOAD, get_notes
from lightning_fsdp2.plan.rank import Run
from lightning_fsdp2.plan.remedies import find_changes
from lightning_fsdp2.plan.result import Batch, Change, Plan
from lightning_fsdp2.plan.search import Search, search
from lightning_fsdp2.plan.simulation.step import check_strategy
from lightning_fsdp2.plan.simulation.workers import run_in_processes
from lightning_fsdp2.plan.timing.devices import Device, get_device
from lightning_fsdp2.strategies import FSDP2Strategy

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for the fastest layout."""

    search: Search
    plan: Plan | None
    """Plan of the best layout; None if nothing fits."""

    configs: list[dict[str, Any]]
    """Additions to the YAML of the run, one for each of ``search.best``."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A run that is ready to be planned. :func:`make_planner` makes it from a Trainer and a module."""

    run: Run
    knobs: Knobs
    """Current settings of the run."""

    describe_config: Callable[[Knobs], dict[str, Any]]
    """Function that returns the additions to the YAML of the run that change its settings to other ones."""

    processes: int | None = None
    """Number of simulations that run at once. None for one per CPU."""

    def plan(self, ranks: Sequence[int] | None = None) -> Plan:
        """Plan the run without changes. The argument and the errors are those of :func:`plan_run`."""
        return _plan(self.run, self.knobs, _check_ranks(ranks, self.run.world_size), processes=self.processes)

    def find_changes(self, plan: Plan, on_progress: Callable[[int, int], None] | None = None) -> list[Change]:
        """Return changes that would help the run with this plan to fit. Return none if it fits."""
        if plan.verdict == "fits":
            return []
        options: dict[str, Any] = {"processes": self.processes, "on_progress": on_progress}
        return find_changes(self.run, self.knobs, plan, self.describe_config, **options)

    def search(
        self,
        *,
        seconds: float = 600,
        cache_dir: str | Path | None = None,
        cache_key: str = "",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Search:
        """Search for the layout with the shortest step time. The arguments and errors are those of :func:`search_run`.

        The search simulates only a few layers. :meth:`plan_best` then plans the best layout with all of them.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds} (--search_seconds) is negative; use a number >= 0.")
        strategy = self.run.trainer.strategy
        if not isinstance(strategy, FSDP2Strategy):
            raise TypeError(
                f"A search varies the mesh of FSDP2Strategy, but the run uses {type(strategy).__name__}; use"
                " trainer.strategy=fsdp2."
            )
        cache = None
        if cache_dir is not None:
            [(_, fingerprint)] = run_in_processes([partial(get_run_fingerprint, self.run)])
            cache = Cache(cache_dir, f"{cache_key} {fingerprint}")
        return search(
            self.run,
            self.knobs,
            sequence_length=get_sequence_length(self.run.batch),
            seconds=seconds,
            cache=cache,
            processes=self.processes,
            on_progress=on_progress,
        )

    def plan_best(self, found: Search) -> SearchResult:
        """Plan the best layouts of a search with the whole model, until one is as good as the search has found.

        The search has only extrapolated their memory from a few layers, and the whole model may need more.
        """
        planned: list[tuple[int, Plan]] = []
        for number, candidate in enumerate(found.best):
            plan = _plan(self.run, candidate.knobs, None, processes=self.processes)
            planned += [(number, plan)] if plan.verdict != "does not fit" else []
            if plan.verdict in ("fits", candidate.verdict):
                break
        if not planned:
            return SearchResult(replace(found, best=[]), None, [])
        number, plan = next((one for one in planned if one[1].verdict == "fits"), planned[0])
        best = found.best[number:]
        return SearchResult(replace(found, best=best), plan, [self.describe_config(other.knobs) for other in best])


def plan_run(
    trainer: "Trainer",
    module: "LightningModule",
    batch: Any = None,
    *,
    datamodule: "LightningDataModule | None" = None,
    world_size: int,
    device: str | Device = "h100",
    ranks: Sequence[int] | None = None,
    suggest: bool = True,
    processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Compute the memory, the traffic and the step time of a run without its devices.

    Each planned rank is simulated in a separate process, with fake tensors and a fake process group. In that process,
    the strategy shards the module, and the Trainer's loop trains it for two steps. With expert parallelism, a second
    process simulates the rank with more tokens for its experts. The ``trainer`` and ``module`` of this process are not
    changed.

    Args:
        trainer: Trainer with :class:`~lightning_fsdp2.FSDP2Strategy` or :class:`~lightning_fsdp2.DDPStrategy`. Its
            precision, clipping and accumulation are used; its devices, callbacks and loggers are ignored.
        module: Module that was built on the meta device, or that builds its model there in ``configure_model``.
        batch: Micro-batch of one data parallel rank, with tensors on any device. None takes it from ``datamodule``, or
            from the module's own ``train_dataloader``.
        datamodule: Data module of the run. A data module of this package gives the shapes of its batches without
            reading data. From any other data module, the first batch is read.
        world_size: Number of ranks.
        device: Device of each rank: a name in :data:`~lightning_fsdp2.plan.timing.devices.DEVICES`, or a
            :class:`~lightning_fsdp2.plan.timing.devices.Device`.
        ranks: Ranks to plan. None for the first and the last rank, or only the first if all shards are equally large.
            Of a pipeline, None is for the first rank of the first stage, of the last stage, and of one between them.
        suggest: Whether to look for changes that would help if the run does not fit. Each change is planned, too.
        processes: Number of plans that are computed at once. None for one per CPU.
        on_progress: Callback that gets the number of finished plans, and the number of plans known so far.

    Returns:
        The plan.

    Raises:
        RuntimeError: When this process belongs to a process group.
        TypeError: When the trainer has a different strategy.
        ValueError: When the device is not known, a rank does not exist, the strategy would refuse these sizes or this
            model, there is no batch, or the step depends on the values of tensors.
    """
    planner = make_planner(
        trainer, module, batch, datamodule=datamodule, world_size=world_size, device=device, processes=processes
    )
    plan = planner.plan(ranks)
    return replace(plan, changes=planner.find_changes(plan, on_progress)) if suggest else plan


def search_run(
    trainer: "Trainer",
    module: "LightningModule",
    batch: Any = None,
    *,
    datamodule: "LightningDataModule | None" = None,
    world_size: int,
    device: str | Device = "h100",
    seconds: float = 600,
    cache_dir: str | Path | None = None,
    cache_key: str = "",
    processes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Find the layout with the shortest step time, for the same number of samples per step and the same numerics.

    The search varies tensor parallel sizes within a node, context parallel sizes, pipelines across nodes, expert
    parallel sizes of mixtures (assuming even routing), replicas (one, or one per node), recomputation in backward, and
    micro-batch sizes.

    Args:
        trainer: See :func:`plan_run`.
        module: See :func:`plan_run`.
        batch: See :func:`plan_run`. Its size and the accumulation determine the number of samples per step.
        datamodule: See :func:`plan_run`.
        world_size: See :func:`plan_run`.
        device: See :func:`plan_run`.
        seconds: Time limit in seconds. Simulations that run at the end of this time are stopped. Planning the best
            layout takes further time.
        cache_dir: Folder that keeps the results of simulations for later searches of this run. None for no cache.
        cache_key: Text that distinguishes runs that the cache cannot tell apart. The cache already distinguishes runs
            by the built module, its optimizers, its batch, the Trainer's options and the loaded Python files. The
            cache does not know other inputs, such as files that the step reads.
        processes: Number of simulations that run at once. None for one per CPU.
        on_progress: Callback that gets the number of finished simulations, and the number of simulations known so far.

    Returns:
        The result of the search. The best layout is planned with the whole model.

    Raises:
        TypeError: When the strategy is not ``FSDP2Strategy``.
        ValueError: When :func:`plan_run` would raise it, ``seconds`` is negative, or ``cache_dir`` cannot be written
            to.
    """
    planner = make_planner(
        trainer, module, batch, datamodule=datamodule, world_size=world_size, device=device, processes=processes
    )
    found = planner.search(seconds=seconds, cache_dir=cache_dir, cache_key=cache_key, on_progress=on_progress)
    return planner.plan_best(found)


def make_planner(
    trainer: Any,
    module: Any,
    batch: Any = None,
    *,
    datamodule: Any = None,
    world_size: int,
    device: str | Device = "h100",
    processes: int | None = None,
) -> Planner:
    """Read the options of a run. The arguments and errors are those of :func:`plan_run`."""
    target = get_device(device) if isinstance(device, str) else device
    nodes = _get_nodes(world_size, target)
    _check_float8(check_strategy(trainer.strategy).config, target)
    batch = get_batch(datamodule or module) if batch is None else batch
    knobs = read_knobs(
        trainer,
        module,
        batch,
        world_size=world_size,
        num_nodes=nodes,
        accumulation=_get_accumulation(trainer, datamodule, world_size, nodes),
    )
    check_rows(knobs.batch_size, knobs.micro_batches)
    run = Run(trainer, module, batch, world_size, nodes, target)
    describe_config = _get_config_builder(trainer.strategy, datamodule, knobs)
    return Planner(run=run, knobs=knobs, describe_config=describe_config, processes=processes)


def _check_float8(config: Any, device: Device) -> None:
    """Check that the device that is planned for can multiply in float8, if the run does."""
    float8 = getattr(config, "float8", None)
    if float8 is not None and not float8.emulate:
        try:
            device.get_peak_flops(torch.float8_e4m3fn)
        except ValueError:
            raise ValueError(make_device_error(device.name.upper())) from None


def _plan(run: Run, knobs: Knobs, ranks: list[int] | None, *, processes: int | None) -> Plan:
    """Plan ``ranks``, or those that show the most: the first, and the last unless all shards are equally large.

    Of a pipeline, the first ranks of some stages show the most.
    """
    options: dict[str, Any] = {"load": LOAD, "processes": processes}
    planned = plan_ranks(run, knobs, ranks if ranks and knobs.pp == 1 else [0], **options)
    first, plans = planned[0], [rank.plan for rank in planned]
    if first.pipeline is not None:
        plans = plan_pipeline(run, knobs, first, first.pipeline, ranks, **options)
    elif ranks is None and not first.is_even:
        plans += [rank.plan for rank in plan_ranks(run, knobs, [run.world_size - 1], **options)]
    plan = Plan(
        **first.facts,
        device=run.device,
        nodes=run.nodes,
        batch=_describe_batch(run.batch, knobs),
        ranks=plans,
        changes=[],
        pipeline=first.pipeline,
        notes=[],
    )
    judgement = _judge_float8(run, knobs, plan, ranks, processes=processes)
    return replace(plan, notes=[*judgement, *get_notes(run, knobs, plan, is_even=ranks is None and first.is_even)])


def _judge_float8(run: Run, knobs: Knobs, plan: Plan, ranks: list[int] | None, *, processes: int | None) -> list[str]:
    """Return a note on whether float8 pays, from a second plan of the same ranks without float8."""
    conversion, config = plan.float8, cast(Any, knobs.config)
    if conversion is None:
        return []
    plain = _plan(run, replace(knobs, config=replace(config, float8=None)), ranks, processes=processes)
    note = (
        f"{conversion.describe()} A step is estimated at {plan.estimate:.3g} s with float8 and at"
        f" {plain.estimate:.3g} s without (at least {plan.at_least:.3g} s and {plain.at_least:.3g} s): "
    )
    ratio = round(plain.estimate / plan.estimate, 2)
    remedies = [f"float8 makes it {ratio:.2f} times as fast." if ratio > 1 else "float8 does not pay."]
    if conversion.is_emulated:
        remedies.append("emulate=False multiplies in float8.")
    elif not config.enable_compile:
        remedies.append("enable_compile=True fuses the casts to float8.")
    if conversion.small:
        remedies.append(
            f"{len(conversion.small)} of these layers are too small to gain from float8 by torchao's rule, which"
            " filter_small=True leaves out."
        )
    return [note + " ".join(remedies)]


def get_batch(source: "LightningDataModule | LightningModule") -> Any:
    """Return an example micro-batch of one data parallel rank.

    Raises:
        ValueError: When ``source`` has no batch.
    """
    if isinstance(source, SequenceDataModule):
        return source.build_example_batch()
    if not is_overridden("train_dataloader", source):
        raise ValueError(
            "A plan needs the shapes of a batch: give the data of the run (--data TextDataModule --data.batch_size 2"
            " --data.sequence_length 4096, for example; the files need not exist), or in Python, datamodule or"
            " batch={'input_ids': torch.zeros(batch_size, sequence_length, dtype=torch.long)}."
        )
    [(_, batch)] = run_in_processes([partial(_read_batch, source)])
    if batch is None:
        raise ValueError(
            f"{type(source).__name__}.train_dataloader() yields no batch, but a plan needs the shapes of one; pass a"
            " `batch` instead."
        )
    return batch


def _read_batch(source: Any) -> Any:
    source.prepare_data()
    source.setup("fit")
    return next(iter(source.train_dataloader()), None)


def _get_config_builder(strategy: Any, datamodule: Any, knobs: Knobs) -> Callable[[Knobs], dict[str, Any]]:
    is_ours = isinstance(datamodule, SequenceDataModule)
    kind = type(strategy)
    package = "lightning_fsdp2" if kind.__module__.startswith("lightning_fsdp2.") else kind.__module__
    return partial(
        build_config,
        knobs,
        strategy=f"{package}.{kind.__name__}",
        names_batch_size=is_ours,
        has_global_batch=is_ours and datamodule.global_batch_size is not None,
    )


def _get_nodes(world_size: int, device: Device) -> int:
    if world_size < 1:
        raise ValueError(f"world_size={world_size} is not a number of ranks; use an integer >= 1.")
    nodes, rest = divmod(world_size, device.per_node)
    if nodes and rest:
        raise ValueError(
            f"world_size={world_size} is not a multiple of the {device.per_node} devices of a node; use"
            f" {nodes * device.per_node} or {(nodes + 1) * device.per_node}, or set the number of devices per node"
            " (devices_per_node)."
        )
    return max(1, nodes)


def _get_accumulation(trainer: Any, datamodule: Any, world_size: int, nodes: int) -> int:
    if not isinstance(datamodule, SequenceDataModule) or datamodule.global_batch_size is None:
        return int(trainer.accumulate_grad_batches)
    dp = trainer.strategy.asked_sizes.resolve(world_size=world_size, num_nodes=nodes).dp
    return datamodule.get_accumulation(dp)


def _check_ranks(ranks: Sequence[int] | None, world_size: int) -> list[int] | None:
    if ranks is None:
        return None
    missing = [rank for rank in ranks if not 0 <= rank < world_size]
    if missing or not ranks:
        raise ValueError(f"ranks={list(ranks)}: choose from 0 to {world_size - 1}.")
    return sorted(set(ranks))


def _describe_batch(batch: Any, knobs: Knobs) -> Batch:
    shapes: dict[str, tuple[int, ...]] = {}

    def add(path: Any, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            name = ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path)
            shapes[name] = (knobs.batch_size, *leaf.shape[1:])

    tree_map_with_path(add, batch)
    length = get_sequence_length(batch)
    return Batch(
        shapes=shapes,
        accumulation=knobs.accumulation,
        samples=knobs.samples,
        tokens=None if length is None else length * knobs.samples,
    )

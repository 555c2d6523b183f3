"""Callback that prints a table of the model's modules when a fit starts."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_fsdp2.callbacks.standard_output import StandardOutput
from lightning_fsdp2.modules.stages import get_optional_stages
from lightning_fsdp2.modules.structure import get_class
from lightning_fsdp2.modules.stubs import Stub

_COUNTS = ("Params", "Trainable", "On this rank")


class ModelSummary(callbacks.ModelSummary):
    """Callback that prints a table like that of Lightning's ``ModelSummary``, for a sharded model.

    The command line uses it unless the config has another summary, or ``enable_model_summary=False``.

    A module has the name of its own class, without the prefix that ``fully_shard`` adds. The table counts a module's
    parameters and the trainable ones among them, and then those that rank 0 holds after sharding. With pipeline
    parallelism, it has only the stages of rank 0, and its title says which. The table has no FLOPs, because Lightning's
    are 0 for a module without ``example_input_array``; the callback ``Throughput`` counts them.

    Args:
        max_depth: How many levels of modules the table has; 0 prints no table, and -1 prints all levels.
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__(max_depth)
        self.max_depth = max_depth

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.max_depth and trainer.is_global_zero:
            output: Any = StandardOutput()
            Console(file=output).print(_build_table(pl_module, self.max_depth))


def _build_table(root: LightningModule, max_depth: int) -> Table:
    title = _describe_stages(root)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("Name", footer="total", overflow="fold")
    table.add_column("Type", overflow="fold")
    for name, count in zip(_COUNTS, _count(root), strict=True):
        table.add_column(name, footer=count, justify="right", no_wrap=True)
    for name, module in _get_modules(root, max_depth):
        table.add_row(name, get_class(module).__name__, *_count(module))
    return table


def _describe_stages(root: LightningModule) -> str | None:
    """Return which stages of a pipeline the table is about, or None without pipeline parallelism."""
    stages = get_optional_stages(root)
    if stages is None:
        return None
    own, last = " and ".join(map(str, stages.own)), stages.num_ranks * len(stages.own) - 1
    return f"stage{'s' if stages.own[1:] else ''} {own} of the stages 0 to {last}"


def _get_modules(root: nn.Module, max_depth: int) -> Iterator[tuple[str, nn.Module]]:
    for name, module in root.named_modules():
        is_deeper = max_depth > 0 and name.count(".") >= max_depth
        if name and not is_deeper and not isinstance(module, Stub):
            yield name, module


def _count(module: nn.Module) -> list[str]:
    parameters: list[Any] = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    return [get_human_readable_count(sum(part.numel() for part in parts)) for parts in (parameters, trainable, local)]

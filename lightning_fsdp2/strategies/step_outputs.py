"""Sharing of what only the last stage of a pipeline learns in a training step: its loss, logs and token counts."""

import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_fsdp2.parallel.loss.token_mean import TokenWindow, find_token_windows, set_token_window
from lightning_fsdp2.ranks.whole_tensors import gather

_LOG_SIGNATURE = inspect.signature(LightningModule.log)

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    torch.mean: torch.mean,
    torch.sum: torch.sum,
    torch.max: torch.amax,
    torch.min: torch.amin,
}
"""How to combine the values that the micro-batches of a batch log, by the ``reduce_fx`` of ``self.log``."""


@dataclass
class _Logged:
    """Calls of ``self.log`` under one name, one per micro-batch."""

    options: dict[str, Any]
    """Arguments of the last call, except the value."""

    values: list[Tensor] = field(default_factory=list)
    batch_size: int = 0

    def combine(self) -> Tensor:
        """Return the value for the whole batch. [] float64."""
        reduce = self.options.get("reduce_fx", "mean")
        return _REDUCTIONS.get(reduce, reduce)(torch.stack(self.values))


@dataclass(frozen=True)
class Layout:
    """Meaning of the numbers that the last stage sends."""

    is_mapping: bool
    """Whether ``training_step`` returns a mapping."""

    windows: tuple[tuple[str, bool], ...]
    """For each module that has counted tokens: its name, and whether it has an auxiliary loss."""

    logged: tuple[tuple[str, dict[str, Any]], ...]
    """For each logged value: its name, and the other arguments of ``self.log``."""

    updates: dict[str, int] = field(default_factory=dict)
    """Number of updates of each torchmetrics ``Metric`` in the batch."""


class StepOutputs:
    """Messenger between the last stage of a pipeline and the other stages.

    In every step, the numbers travel as one tensor on the device, and the host waits for one number on the CPU. What
    the numbers mean travels only when it changes. Values on the device stay there.

    Args:
        group: Process group of the ranks along the pipeline.
        control: Group of the same ranks for tensors on the CPU.
        last_rank: Rank within the groups that runs the last stage.
        device: Device of this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, control: dist.ProcessGroup, last_rank: int, device: torch.device
    ) -> None:
        self._group, self._control, self._last_rank, self._device = group, control, last_rank, device
        self._layout: Layout | None = None
        self._logged: dict[str, _Logged] = {}
        self._losses: list[Tensor] = []
        self._is_mapping = False
        self._counts: dict[str, int] = {}

    @contextmanager
    def record(self, module: LightningModule, is_on_last_stage: Callable[[], bool]) -> Iterator[None]:
        """Record what ``module`` logs inside the block, instead of logging the values of every micro-batch.

        Args:
            module: Module that is trained.
            is_on_last_stage: Function that returns whether the last stage is running. Values that another stage logs,
                before the model, are left out, because the last stage logs them too.
        """
        self._logged, self._losses, self._counts = {}, [], _count_updates(module)
        own = module.__dict__.get("log")

        def log(*args: Any, **kwargs: Any) -> None:
            if is_on_last_stage():
                self._record(*args, **kwargs)

        module.__dict__["log"] = log
        try:
            yield
        finally:
            if own is None:
                del module.__dict__["log"]
            else:
                module.__dict__["log"] = own

    def take_loss(self, output: Any) -> Tensor:
        """Return the loss from the output of ``training_step``.

        Raises:
            ValueError: If there is no loss.
        """
        self._is_mapping = not isinstance(output, Tensor)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                f"pp_size={self._group.size()}: `training_step` returned {loss!r} as the loss of a micro-batch, but the"
                " other stages wait for its gradient. Return a loss for every micro-batch, 0 times a logit if nothing"
                " else, or use pp_size=1."
            )
        return loss

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch to the loss of the batch."""
        self._losses.append(loss.detach())

    def share(self, module: LightningModule) -> Any:
        """Give all stages what the last stage has learned in a batch, and log the recorded values on all ranks.

        Returns:
            What ``training_step`` would return for the whole batch: the loss, or a mapping with the loss.

        Raises:
            ValueError: On all stages, if the last stage has updated a metric that another has not.
        """
        layout, numbers = None, None
        updates = {name: count - self._counts[name] for name, count in _count_updates(module).items()}
        if self._group.rank() == self._last_rank:
            layout, numbers = self._collect(module, updates)
        layout = self.share_layout(layout, module)
        self._check_updates(updates, layout.updates)
        size = 1 + 3 * len(layout.windows) + len(layout.logged)
        if numbers is None:
            numbers = torch.empty(size, dtype=torch.float64, device=self._device)
        dist.broadcast(numbers, group=self._group, group_src=self._last_rank)
        loss, *others = numbers.unbind()
        for (name, has_balance), *window in zip(layout.windows, *_take(others, 3, len(layout.windows)), strict=True):
            loss_sum, tokens, balance = (value.clone() for value in window)
            set_token_window(module, name, TokenWindow(loss_sum, tokens, balance if has_balance else None))
        for (name, options), value in zip(layout.logged, others[3 * len(layout.windows) :], strict=True):
            module.log(name, value.float(), **options)
        loss = loss.float().requires_grad_()
        return {"loss": loss} if layout.is_mapping else loss

    def _check_updates(self, own: dict[str, int], of_last_stage: dict[str, int]) -> None:
        """Refuse metrics that only the last stage updates, after the model. Every rank raises the error."""
        if not any(of_last_stage.values()):
            return
        missed = torch.tensor([own[name] < count for name, count in of_last_stage.items()], dtype=torch.int32)
        dist.all_reduce(missed, op=dist.ReduceOp.MAX, group=self._control)
        for name, is_missed in zip(of_last_stage, missed.tolist(), strict=True):
            if is_missed:
                raise ValueError(
                    f"pp_size={self._group.size()}: `training_step` updates the metric {name!r} after the model, which"
                    " only the last stage runs, so the other ranks would compute another value. Log a number with"
                    " `self.log` instead, update the metric before the model or in validation, or use pp_size=1."
                )

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        options = _LOG_SIGNATURE.bind(None, name, value, *args, **kwargs).arguments
        if isinstance(value, Metric):
            raise ValueError(
                f"pp_size={self._group.size()}: `self.log({name!r}, ...)` in `training_step` gets a"
                f" {type(value).__name__}, whose state is only on the ranks of the last stage; log"
                " `metric(...)` of the micro-batch as a number, or use pp_size=1."
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"`self.log({name!r}, ...)` in `training_step` gets a tensor of the shape {tuple(value.shape)}, but a"
                " metric is one number; log its mean, for example."
            )
        logged = self._logged.setdefault(name, _Logged({}))
        logged.options = {key: option for key, option in options.items() if key not in ("self", "name", "value")}
        value = gather(value) if isinstance(value, DTensor) else value
        logged.values.append(
            torch.as_tensor(value).detach().reshape(()).to(self._device, torch.float64, non_blocking=True)
        )
        if logged.options.get("batch_size") is not None:
            logged.batch_size += logged.options["batch_size"]
            logged.options["batch_size"] = logged.batch_size

    def _collect(self, module: LightningModule, updates: dict[str, int]) -> tuple[Layout, Tensor]:
        windows = find_token_windows(module)
        layout = Layout(
            is_mapping=self._is_mapping,
            windows=tuple((name, window.load_balance is not None) for name, window in windows.items()),
            logged=tuple((name, logged.options) for name, logged in self._logged.items()),
            updates=updates,
        )
        numbers = [torch.stack(self._losses).sum().double()]
        for window in windows.values():
            balance = torch.zeros_like(window.tokens) if window.load_balance is None else window.load_balance
            numbers += [window.loss_sum, window.tokens, balance]
        numbers += [logged.combine() for logged in self._logged.values()]
        return layout, torch.stack([number.to(self._device) for number in numbers])

    def share_layout(self, layout: Layout | None, module: LightningModule) -> Layout:
        """Return the layout of the last stage on all stages. It is sent only if it has changed.

        A step may also have told the Trainer to stop, which all stages must learn.
        """
        flags = torch.tensor([layout != self._layout, module.trainer.should_stop], dtype=torch.int32)
        dist.broadcast(flags, group=self._control, group_src=self._last_rank)
        is_changed, should_stop = map(bool, flags.tolist())
        module.trainer.should_stop |= should_stop
        if is_changed:
            _check_portable(layout)
            message = [layout]
            dist.broadcast_object_list(message, group=self._control, group_src=self._last_rank)
            self._layout = message[0]
        if self._layout is None:
            raise RuntimeError("The last stage of the pipeline sent no layout.")
        return self._layout


def _check_portable(layout: Layout | None) -> None:
    """Refuse arguments of ``self.log`` that cannot be sent to the other stages."""
    for name, options in () if layout is None else layout.logged:
        for key, value in options.items():
            try:
                pickle.dumps(value)
            except Exception as error:  # pickle raises errors of several classes
                raise ValueError(
                    f"pp_size: `self.log({name!r}, ..., {key}={value!r})` in `training_step` cannot be sent to the"
                    f" other stages ({error}); pass a function that is defined in a module, or a name such as 'sum'."
                ) from error


def _count_updates(module: LightningModule) -> dict[str, int]:
    return {name: metric.update_count for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _take(numbers: list[Tensor], size: int, count: int) -> list[list[Tensor]]:
    """Return the first ``size * count`` numbers as ``size`` lists: the first of each group, the second, and so on."""
    return [numbers[first : size * count : size] for first in range(size)]

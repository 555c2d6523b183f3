"""Training and evaluation steps whose batches run through the stages of a pipeline in micro-batches."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.models.causal_lm import CausalLM
from lightning_fsdp2.parallel.loss.token_mean import find_token_windows
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.batches import (
    add_rows_without_labels,
    count_rows,
    describe_shapes,
    divide_batch,
)
from lightning_fsdp2.parallel.pipeline.evaluate import share_from_last_stage
from lightning_fsdp2.parallel.pipeline.schedule import (
    build_forward_orders,
    build_orders,
    check_rows,
    get_micro_batches,
    get_optional_warning,
)
from lightning_fsdp2.strategies.parts.resumption import Resumption
from lightning_fsdp2.strategies.parts.steps import Steps
from lightning_fsdp2.strategies.parts.world import World
from lightning_fsdp2.strategies.step_outputs import StepOutputs


class Pipelining:
    """Runner of the Trainer's steps on the stages of a pipeline.

    Lightning calls ``training_step``, then clears the gradients, and then calls ``backward``. A pipeline runs the
    backward of the first micro-batch before the forward of the last one, so the gradients are there when the training
    step returns. The runner therefore clears the gradients before the step, and keeps Lightning from clearing them
    after it.

    Args:
        world: The ranks of the run.
        steps: State of the training steps.
        resumption: States that a checkpoint carries, such as the number of micro-batches.
        config: Flags of FSDP2.
        device: Device of this rank.
    """

    outputs_class: type[StepOutputs] = StepOutputs

    def __init__(
        self, world: World, steps: Steps, resumption: Resumption, config: FSDP2Config, device: torch.device
    ) -> None:
        self._world, self._steps, self._resumption = world, steps, resumption
        self._config, self._device = config, device
        self._outputs: StepOutputs | None = None
        self._holds_gradients = False
        self._told: set[int] = set()

    # ------------------------------------------------------------------ training

    def train(self, step: Callable[..., Any], module: LightningModule, batch: Any, *args: Any) -> Any:
        """Run ``training_step`` and its backward on the micro-batches of a batch.

        Args:
            step: Function that calls the module's ``training_step`` on a micro-batch and ``args``.
            module: Module that is trained.
            batch: Batch, the same on all stages.
            args: Further arguments of ``training_step``.

        Returns:
            The loss of the batch, or a mapping with the loss, on all ranks.
        """
        run, outputs = get_pipeline(module), self._get_outputs(module)
        self._clear_gradients(module.trainer, args)
        batch, number = self._fill(module, batch, "training_step")
        micro_batches = divide_batch(batch, number)

        def run_step(micro_batch: Any) -> Tensor | None:
            output = step(micro_batch, *args)
            if not run.is_on_last_stage:
                return None
            loss = outputs.take_loss(output)
            # the strategy divides a sum over tokens by all tokens of the step; any other loss is a mean over its rows
            loss = loss if find_token_windows(module) else loss / number
            outputs.add_loss(loss)
            return loss / module.trainer.accumulate_grad_batches

        with outputs.record(module, lambda: run.is_on_last_stage):
            run.execute(
                self._build_orders(number),
                run_step,
                micro_batches,
                key=describe_shapes(micro_batches[0]),
                synchronises=not self._steps.is_deferring,
                reduces_each=not self._config.defer_fsdp_grad_sync,
            )
        self._holds_gradients = True
        return outputs.share(module)

    def finish_backward(self, module: LightningModule) -> None:
        """Complete the gradients of a batch, when Lightning asks for the backward."""
        self._holds_gradients = False
        if not self._steps.is_deferring:
            get_pipeline(module).shared.sum_gradients()

    def extend_zero_grad(self, optimizer: Optimizer) -> None:
        """Make ``optimizer.zero_grad`` keep the gradients of a batch whose step has returned."""
        zero_grad = optimizer.zero_grad

        def zero_if_used(set_to_none: bool = True) -> None:
            if not self._holds_gradients:
                zero_grad(set_to_none)

        optimizer.zero_grad = zero_if_used  # type: ignore[method-assign]

    def _clear_gradients(self, trainer: Trainer, args: tuple[Any, ...]) -> None:
        """Clear the gradients of the last optimizer step, under the condition under which Lightning does so."""
        self._holds_gradients = False
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    # ------------------------------------------------------------------ optimizers

    def set_up_optimizers(self, module: LightningModule, set_up: Callable[[], None]) -> None:
        """Set up the optimizers, and check that their parameter groups are those of the other stages.

        Raises:
            ValueError: When the optimizer of this stage would have no parameters, or another number of groups than that
                of another stage, so that no checkpoint could be saved.
        """
        pp_size, name = self._world.pipeline_size, type(module).__name__
        try:
            set_up()
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            raise ValueError(
                f"pp_size={pp_size}: `configure_optimizers` of {name} finds no trainable parameters on this stage. Pass"
                " the optimizer a list of groups, of which some may be empty ([{'params': [...]}]), or divide the"
                " layers with pp_layers_per_stage so that every stage trains some."
            ) from error
        groups = [len(optimizer.param_groups) for optimizer in module.trainer.optimizers]
        of_stages: list[Any] = [groups] * pp_size
        if self._world.pipeline_control is not None:
            dist.all_gather_object(of_stages, groups, group=self._world.pipeline_control)
        if any(other != groups for other in of_stages):
            raise ValueError(
                f"pp_size={pp_size}: `configure_optimizers` of {name} makes other numbers of parameter groups on"
                f" each stage ({of_stages}), but checkpoints identify groups by their number. Make the same groups on"
                " all stages, and leave those empty whose parameters other stages hold."
            )

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, step: Callable[..., Any], module: LightningModule, name: str, batch: Any, *args: Any) -> Any:
        """Run an evaluation step.

        The steps of :class:`~lightning_fsdp2.CausalLM` run on micro-batches, and no logits travel. Any other step runs
        on the whole batch on all ranks: the stages run one after the other when the step calls the model, and all of
        them get its output.

        Args:
            step: Function that calls the step on a batch and ``args``.
            module: Module that is evaluated.
            name: Name of the step, such as ``"validation_step"``.
            batch: Batch, the same on all stages.
            args: Further arguments of the step.
        """
        if not _is_own_step(module, name):
            return step(batch, *args)
        run, results = get_pipeline(module), list[Any]()
        rows = count_rows(batch)
        batch, number = self._fill(module, batch, name)

        def run_step(micro_batch: Any) -> None:
            output = step(micro_batch, *args)
            if run.is_on_last_stage:
                results.append(output)

        orders = build_forward_orders(
            ranks=self._world.pipeline_size, micro_batches=number, stages_per_rank=self._config.stages_per_rank
        )
        micro_batches = divide_batch(batch, number)
        run.execute(orders, run_step, micro_batches, key=describe_shapes(micro_batches[0]))
        if name != "predict_step":
            return None
        # leave out the rows that were added to the batch
        return {key: value[:rows] for key, value in _join(share_from_last_stage(run, results)).items()}

    # ------------------------------------------------------------------ numbers

    def _fill(self, module: LightningModule, batch: Any, step: str) -> tuple[Any, int]:
        """Choose the number of micro-batches, the same on all ranks, and add rows to the batch where that is possible.

        Returns:
            The batch, whose rows the number divides, and the number.

        Raises:
            ValueError: On all ranks, if the number does not divide the rows of a batch to which no rows can be added.
        """
        rows = count_rows(batch)
        most, fewest = self._find_rows(rows)
        trains, can_fill = step == "training_step", _can_fill(module, step)
        number = self._choose_number(most, can_fill=can_fill) if trains else self._choose_evaluation_number(most)
        missing = -rows % number
        if can_fill:
            return add_rows_without_labels(batch, missing) if missing else batch, number
        if most != fewest and self._world.decide(missing > 0, all=False) and not missing:
            raise ValueError(
                f"pp_size={self._world.pipeline_size}: the {number} micro-batches do not divide the rows of the batch"
                f" on other data parallel ranks, of which some read {fewest} and some {most} rows. Give the DataLoader"
                " drop_last=True, or let all ranks read equally many rows."
            )
        check_rows(rows, number)
        return batch, number

    def _find_rows(self, rows: int) -> tuple[int, int]:
        """Return the largest and the smallest number of rows that a data parallel rank reads."""
        if self._world.data_parallel_size == 1:
            return rows, rows
        # all stages read the same rows
        most, fewest = self._world.find_maximum_of_stage([rows, -rows]).tolist()
        return int(most), -int(fewest)

    def _choose_number(self, rows: int, *, can_fill: bool) -> int:
        """Return the number of micro-batches of a training batch.

        A batch that is smaller than earlier ones, such as the last of an epoch, keeps their number if rows can be added
        to it.
        """
        ranks, schedule, stages = self._world.pipeline_size, self._config.pp_schedule, self._config.stages_per_rank
        asked = self._config.pp_microbatches
        settings = asked, schedule, ranks, stages
        most_rows, number, settings_before = self._resumption.micro_batches
        if can_fill and rows <= most_rows and settings == settings_before:
            return number
        number = get_micro_batches(asked, rows=rows, schedule=schedule, ranks=ranks, stages_per_rank=stages)
        self._resumption.micro_batches = rows, number, settings
        if number not in self._told:
            self._told.add(number)
            if asked is None:
                rank_zero_info(f"Each batch of {rows} rows is divided into {number} micro-batches (pp_microbatches).")
            if warning := get_optional_warning(schedule, ranks=ranks, micro_batches=number, stages_per_rank=stages):
                rank_zero_warn(warning)
            if can_fill and rows % number:
                rank_zero_warn(
                    f"pp_microbatches={number} does not divide the {rows} rows of a batch, so {-rows % number} rows"
                    f" without labels are added to every such batch, which cost time; use a divisor of {rows}."
                )
        return number

    def _choose_evaluation_number(self, rows: int) -> int:
        limit = min(rows, self._config.pp_microbatches or 2 * self._world.pipeline_size)
        return max(number for number in range(1, limit + 1) if rows % number == 0)

    def _build_orders(self, number: int) -> Any:
        return build_orders(
            self._config.pp_schedule,
            ranks=self._world.pipeline_size,
            micro_batches=number,
            stages_per_rank=self._config.stages_per_rank,
        )

    def _get_outputs(self, module: LightningModule) -> StepOutputs:
        if self._outputs is None:
            run = get_pipeline(module)
            self._outputs = self.outputs_class(run.group, run.control, run.last_rank, self._device)
        return self._outputs


def _join(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the predictions of all micro-batches as those of one batch."""
    return {key: torch.cat([result[key] for result in results]) for key in results[0]}


def check_pipelining(trainer: Trainer) -> None:
    """Refuse a module whose training a pipeline cannot run.

    Raises:
        ValueError: When the module optimises manually, overrides a hook that would run between the forward and the
            backward of a batch, or takes no batch, or when a callback unfreezes layers.
    """
    module = trainer.lightning_module
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"pp_size: {name} optimises manually (`automatic_optimization = False`), but a pipeline runs forward and"
            " backward of several micro-batches in turn. Use automatic optimisation, or pp_size=1."
        )
    for hook, remedy in {
        "optimizer_zero_grad": "a pipeline has computed the gradients of a batch when Lightning calls this hook; remove"
        " it",
        "backward": "a pipeline runs the backward of each micro-batch itself; change the loss in `training_step`"
        " instead",
    }.items():
        if getattr(type(module), hook) is not getattr(LightningModule, hook):
            raise ValueError(f"pp_size: {name} overrides `{hook}`, but {remedy}, or use pp_size=1.")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"pp_size: `training_step` of {name} takes a `dataloader_iter`, but a pipeline divides each batch into"
            " micro-batches. Take a `batch`, or use pp_size=1."
        )
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"pp_size: {type(callback).__name__} unfreezes layers and adds groups to the optimizer. Stages have"
                " other layers, so their optimizers would no longer have the same groups. Freeze in `__init__` or"
                " `configure_model`, or use pp_size=1."
            )


def _can_fill(module: LightningModule, name: str) -> bool:
    """Return whether rows without labels can be added to a batch without changing the results of a step."""
    return _is_own_step(module, name) and not (name == "training_step" and cast(CausalLM, module).has_router_loss)


def _is_own_step(module: LightningModule, name: str) -> bool:
    """Return whether the module's step is that of ``CausalLM``, which may run on any micro-batches of any rows."""
    # unwrap, because sharding has wrapped the method of the module's class
    return isinstance(module, CausalLM) and inspect.unwrap(getattr(type(module), name)) is getattr(CausalLM, name)

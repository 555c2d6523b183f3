"""Execution of a model's stages: micro-batches run forward and backward in the order of a schedule.

Each stage runs the caller's step, such as ``training_step``, once per micro-batch. Inside the step, the Hugging Face
model runs only the layers of the stage. On the last stage, the step goes on with the model's output. On the other
stages, it ends right after the model, with :class:`EndOfStage`.
"""

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp2.compat.fsdp import (
    begin_backward,
    end_forward,
    initialize_root,
    keep_unsharded_after_forward,
)
from lightning_fsdp2.compat.gradients import separate_unreduced_gradients
from lightning_fsdp2.compat.torch_simulation import with_values
from lightning_fsdp2.config import FSDP2Config
from lightning_fsdp2.mesh import get_device
from lightning_fsdp2.modules.structure import get_class_name
from lightning_fsdp2.modules.stubs import Passage
from lightning_fsdp2.parallel.pipeline.backward_flags import BackwardFlags
from lightning_fsdp2.parallel.pipeline.batches import copy_batch
from lightning_fsdp2.parallel.pipeline.schedule import Action, Kind, get_rank
from lightning_fsdp2.parallel.pipeline.shared import SharedParameters
from lightning_fsdp2.parallel.pipeline.split import Split
from lightning_fsdp2.parallel.pipeline.transfers import Arrival, Transfers
from lightning_fsdp2.ranks.random_state import get_random_state, set_random_state

T = TypeVar("T")

Step = Callable[[Any], Tensor | None]
"""Function that runs a step on a micro-batch. In training, its result on the last stage is the loss to start the
backward from. Its other results are not used."""


class EndOfStage(BaseException):
    """Signal that ends a step after the model, on a stage that is not the last.

    It is no ``Exception``, so that a step which handles errors of its own does not catch it.
    """


class PipelineRun:
    """Runner of the stages of this rank.

    Args:
        split: Division of the model into stages.
        root: Module that holds the model, sharded.
        shared: Copies of parameters that also exist on other stages.
        device_mesh: Mesh with several pipeline ranks.
        config: Flags of FSDP2. With ``reshard_after_forward`` None or False, units stay gathered from their first
            forward of a batch to their last backward. With any other value, each micro-batch gathers them.

    Attributes:
        device: Device of this rank.
        group: Process group of the ranks along the pipeline.
        control: Group of the same ranks for tensors on the CPU.
        transfers: Transfers between the ranks of the pipeline.
        surround: Function that returns a context for each action. It does nothing, unless a plan records the actions.
        is_running: Whether a schedule is running.
        has_compared: Whether the stages have compared the first batch of a plain loop.
        peak: Largest number of micro-batches in flight in the last training batch.
    """

    def __init__(
        self,
        split: Split,
        root: nn.Module,
        shared: SharedParameters,
        device_mesh: DeviceMesh,
        config: FSDP2Config,
    ) -> None:
        self.split, self.root, self.shared, self.config = split, root, shared, config
        self.device_mesh, self.device = device_mesh, get_device(device_mesh)
        self.group, self.control = shared.ranks.group, shared.control
        self.gathers_once = config.reshard_after_forward in (None, False)
        self.transfers = Transfers(self.group, self.control, self.device)
        self.surround: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext()
        self.is_running = self.has_compared = False
        self.peak = 0
        self._stage = 0
        self._passage: Passage | None = None
        self._sums: Tensor | None = None
        self._first_seed = 0
        self._depth = 0
        self._is_in_model = False
        self._averages = False

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank runs the last stage, which computes the loss."""
        return self.last_stage in self.split.own_stages

    @property
    def is_on_last_stage(self) -> bool:
        """Whether the current step runs the last stage."""
        return self._stage == self.last_stage

    @property
    def last_stage(self) -> int:
        """Index of the last stage."""
        return self.split.num_stages - 1

    @property
    def last_rank(self) -> int:
        """Rank of the pipeline that runs the last stage."""
        return get_rank(self.last_stage, self.group.size())

    def describe(self) -> str:
        """Say how the model is divided, since a model summary counts only this rank's parameters."""
        stages = self.split.stages
        numbers = {name: parameter.shape.numel() for name, parameter in stages.parameters.items()}
        own = sum(number for name, number in numbers.items() if stages.is_own(name))
        layers = ", ".join(str(len(layers)) for layers in self.split.ranges)
        return (
            f"The {self.split.num_stages} pipeline stages have {layers} layers. Pipeline rank {stages.rank} of"
            f" {stages.num_ranks} holds {own:,} of the module's {sum(numbers.values()):,} parameters; the model"
            " summary counts only those."
        )

    def execute(
        self,
        orders: Sequence[Sequence[Action]],
        step: Step,
        micro_batches: Sequence[Any],
        *,
        key: Hashable,
        synchronises: bool = True,
        reduces_each: bool = False,
    ) -> None:
        """Run a schedule over the micro-batches of a batch.

        Args:
            orders: Actions of every pipeline rank, from
                :func:`~lightning_fsdp2.parallel.pipeline.schedule.build_orders`.
            step: Step to run on each micro-batch.
            micro_batches: The micro-batches, the same on all ranks of the pipeline.
            key: Key that is equal for batches whose tensors have equal shapes and dtypes.
            synchronises: Whether the last backward reduces the gradients over the data parallel ranks. False if the
                caller has already deferred the reduction, because more batches belong to the optimizer step.
            reduces_each: Whether every backward reduce-scatters its gradients, instead of only the last one.
        """
        units = [module for module in self.root.modules() if isinstance(module, FSDPModule)]
        own = orders[self.group.rank()]
        backwards = [index for index, action in enumerate(own) if action.kind is Kind.BACKWARD]
        gathers_once = self.gathers_once or not backwards
        last = {own[index].stage: index for index in backwards}
        flags = BackwardFlags(units, defers=synchronises, reduces_each=reduces_each, frees_once=gathers_once)
        execution = _Execution(self, units, step, micro_batches, key, trains=bool(backwards))
        self._averages = bool(backwards) and len(micro_batches) > 1
        if backwards:
            self.shared.divide_sums()
        self.is_running = True
        try:
            with ExitStack() as stack:
                self._first_seed = self._get_from_first_rank(stack.enter_context(_keep_random_state(self.device)))
                if gathers_once:
                    stack.enter_context(keep_unsharded_after_forward(units))
                stack.enter_context(flags)
                for index, action in enumerate(own):
                    if action.kind is Kind.BACKWARD:
                        ends_batch = index == execution.find_last(own, backwards)
                        flags.begin_backward(ends_stage=index == last[action.stage], ends_batch=ends_batch)
                    with self.surround(action):
                        execution.perform(action)
            self.transfers.finish()
        finally:
            self.is_running = False
            for unit in units:  # also units that no backward has reached, such as those of frozen layers
                end_forward(unit)
                unit.reshard()
        self.peak = execution.peak

    def _get_from_first_rank(self, number: int) -> int:
        """Return the number of the first pipeline rank, because random states of the stages may have drifted apart.

        This happens if code of the user's draws random numbers on some ranks only.
        """
        with with_values():
            message = torch.tensor(number)
            dist.broadcast(message, group=self.control, group_src=0)
            return int(message)

    @contextmanager
    def run_stage(self, stage: int, received: Sequence[Tensor]) -> Iterator[Passage]:
        """Let the model run only the modules of ``stage`` inside the block.

        Args:
            stage: Index of the stage.
            received: What the stage before has passed on: hidden states, and sums of :meth:`add_over_stages` if there
                are any.
        """
        if isinstance(self.root, FSDPModule):
            initialize_root(self.root)  # a forward would initialise only the units of its stage
        hidden, self._sums = (*received, None, None)[:2]
        with self.split.run_stage(stage, hidden) as passage:
            self._stage, self._passage = stage, passage
            try:
                yield passage
            finally:
                self._passage = None

    def add_over_stages(self, value: Tensor) -> Tensor:
        """Add ``value`` to the values of earlier stages, inside the model's forward.

        Returns:
            The sum. On the last stage, it is the sum over all stages.
        """
        self._sums = value if self._sums is None else self._sums + value
        return self._sums

    def collect_outputs(self, passage: Passage) -> list[Tensor]:
        """Return what a stage passes on: the hidden states after its layers, and sums if there are any.

        Raises:
            ValueError: If the step did not run the model.
        """
        if passage.output is None:
            raise ValueError(
                f"pp_size={self.group.size()}: the step did not run {get_class_name(self.split.model)} in a"
                " micro-batch, but the next stage waits for its output. Call the model once in each step, or use"
                " pp_size=1."
            )
        return [passage.output, *([] if self._sums is None else [self._sums])]

    # ------------------------------------------------------------------ wrappers of methods

    def end_entrance(self, method: Callable[..., T], /, *args: Any, **kwargs: Any) -> T | Tensor | None:
        """Run an entrance of the root, such as ``training_step``, and end :class:`EndOfStage` in the outermost one.

        It ends inside the entrance, so that the hooks of FSDP2 around it see a result.
        """
        self._depth += 1
        try:
            with self.split.run_step():
                return method(*args, **kwargs)
        except EndOfStage:
            if self._depth > 1:
                raise
            return None if self._passage is None else self._passage.output
        finally:
            self._depth -= 1

    def end_wrapper(self) -> None:
        """End the step of a plain loop after a module around the model, whose forward :meth:`end_entrance` has ended.

        Raises:
            EndOfStage: On a stage that is not the last.
        """
        if self.is_running and not self.is_on_last_stage and self._depth == 0:
            raise EndOfStage

    def run_model(self, forward: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run the forward of the model on the current stage of a step.

        Raises:
            ValueError: If the step calls the model a second time, or asks it for a loss that is no mean.
        """
        if self._passage is None:
            raise ValueError(
                f"pp_size={self.group.size()}: the step calls {get_class_name(self.split.model)} more than once, or"
                " after it has ended, but a pipeline runs through the model once per micro-batch. Call the model once"
                " in each step, or use pp_size=1."
            )
        if kwargs.get("num_items_in_batch") is not None and self._averages:
            raise ValueError(
                f"pp_size={self.group.size()}: the step passes num_items_in_batch to"
                f" {get_class_name(self.split.model)}, but the loss of each micro-batch must be its mean, because the"
                " pipeline averages these losses. Leave it out, or compute the loss with"
                " `lightning_fsdp2.token_mean_loss`."
            )
        if self._stage != self.last_stage:
            # the loss of a stage without logits would be computed from nothing
            kwargs = {name: value for name, value in kwargs.items() if name not in ("labels", "shift_labels")}
        return self.run_forward(forward, *args, **kwargs)

    def run_forward(self, forward: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run the forward of the model on the current stage, with random numbers of this stage."""
        self._is_in_model = True
        try:
            with _keep_random_state(self.device) as seed:
                _seed(seed + self._stage)
                return forward(*args, **kwargs)
        finally:
            self._is_in_model = False

    def run_part(self, name: str, forward: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run the forward of a part of the model that holds all layers.

        Raises:
            ValueError: If it is not the model that calls the part.
        """
        if not self._is_in_model:
            model = get_class_name(self.split.model)
            raise ValueError(
                f"pp_size={self.group.size()}: {name}, a part of {model}, is called by itself, but only the forward of"
                f" {model} runs through the stages of the pipeline. Call {model} instead, or use pp_size=1."
            )
        return forward(*args, **kwargs)

    def end_model(self) -> None:
        """Leave the step after the model, on a stage that is not the last.

        Raises:
            ValueError: If the model has skipped the first or the last layer of this stage.
        """
        passage, is_last = self._passage, self._stage == self.last_stage
        is_entered = passage is not None and (passage.is_entered or self._stage == 0)
        if passage is None or not is_entered or (passage.output is None and not is_last):
            raise ValueError(
                f"pp_size={self.group.size()}: {get_class_name(self.split.model)} skipped a layer, whose output the"
                " next one needs. Turn off what skips layers, or use pp_size=1."
            )
        if not is_last:
            raise EndOfStage
        passage.is_over = True
        self._passage = None

    def seed_micro_batch(self, number: int) -> None:
        """Set the random state in which every stage begins the step of a micro-batch."""
        _seed(self._first_seed + number)


class _Execution:
    """State of one run through a schedule."""

    def __init__(
        self,
        run: PipelineRun,
        units: Sequence[FSDPModule],
        step: Step,
        micro_batches: Sequence[Any],
        key: Hashable,
        *,
        trains: bool,
    ) -> None:
        self.run, self.step, self.micro_batches = run, step, micro_batches
        self.peak = 0
        self._key, self._trains = (key, trains), trains
        self._first_stage_trains = True
        self._units = units
        inside: set[Any] = {module for layer in run.split.layers for module in layer.modules()}
        self._outer_units = [unit for unit in units if unit not in inside]
        self._arrivals: dict[tuple[int, int, bool], Arrival] = {}
        self._inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}

    def find_last(self, order: Sequence[Action], backwards: Sequence[int]) -> int | None:
        """Return the index of the last backward that runs autograd, once a backward of ``order`` is about to run.

        If all weights of the first stage are frozen, its backwards have nothing to compute.
        """
        return max((index for index in backwards if order[index].stage > 0 or self._first_stage_trains), default=None)

    def perform(self, action: Action) -> None:
        """Perform one action."""
        methods = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
        }
        methods[action.kind](action.stage, action.micro_batch)

    def _forward(self, stage: int, number: int) -> None:
        received = self._take_input(stage, number)
        self.run.seed_micro_batch(number)
        result: Tensor | None = None
        with self.run.run_stage(stage, received) as passage, suppress(EndOfStage):
            result = self.step(self._get_micro_batch(number))
        if self._trains:
            self._inputs[stage, number] = received
            self.peak = max(self.peak, len(self._inputs))
        if stage < self.run.last_stage:
            outputs = self._outputs[stage, number] = self.run.collect_outputs(passage)
            if stage == 0:
                self._first_stage_trains = any(output.requires_grad for output in outputs)
        elif self._trains:
            self._outputs[stage, number] = [cast(Tensor, result)]

    def _get_micro_batch(self, number: int) -> Any:
        """Return a micro-batch for one stage. Several stages of this rank get copies, which a step may change."""
        micro_batch = self.micro_batches[number]
        return copy_batch(micro_batch) if len(self.run.split.own_stages) > 1 else micro_batch

    def _take_input(self, stage: int, number: int) -> list[Tensor]:
        """Return the input of a stage, cut from the graph of the stage before."""
        if stage == 0:
            return []
        before = (stage - 1, number)
        arrival = self._arrivals.pop((stage, number, True), None)
        if arrival is not None:
            tensors = arrival.wait()
        else:
            tensors = self._outputs[before] if self._trains else self._outputs.pop(before)
        return [tensor.detach().requires_grad_(self._trains) for tensor in tensors]

    def _backward(self, stage: int, number: int) -> None:
        outputs = self._outputs.pop((stage, number))
        gradients: Sequence[Tensor | None] = [None]
        if stage < self.run.last_stage:
            arrival = self._arrivals.pop((stage, number, False), None)
            gradients = self._gradients.pop((stage + 1, number)) if arrival is None else arrival.wait()
        received = self._inputs.pop((stage, number))
        starts = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if starts:
            if not self.run.gathers_once:
                starts[0][0].register_hook(self._begin_outer_units)
            torch.autograd.backward([output for output, _ in starts], [gradient for _, gradient in starts])
            separate_unreduced_gradients(self._units)
        if stage > 0:
            self._gradients[stage, number] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received
            ]

    def _begin_outer_units(self, gradient: Tensor) -> None:
        """Gather the units around the layers at the start of a backward.

        FSDP2 gathers a unit when the gradient of its output arrives, but on this stage their outputs may have none.
        """
        for unit in self._outer_units:
            begin_backward(unit)

    def _send_forward(self, stage: int, number: int) -> None:
        place, tag = (stage, number), self._get_tag(stage, number)
        outputs = self._outputs[place] if self._trains else self._outputs.pop(place)
        self.run.transfers.send(outputs, self._get_rank(stage + 1), tag=tag, key=(stage, self._key))

    def _receive_forward(self, stage: int, number: int) -> None:
        rank, tag = self._get_rank(stage - 1), self._get_tag(stage - 1, number)
        arrival = self.run.transfers.receive(rank, tag=tag, key=(stage - 1, self._key))
        self._arrivals[stage, number, True] = arrival

    def _send_backward(self, stage: int, number: int) -> None:
        gradients = self._gradients.pop((stage, number))
        rank, tag = self._get_rank(stage - 1), self._get_tag(stage - 1, number)
        self.run.transfers.send_known(gradients, rank, tag=tag)

    def _receive_backward(self, stage: int, number: int) -> None:
        gradients = [torch.empty_like(output).contiguous() for output in self._outputs[stage, number]]
        rank, tag = self._get_rank(stage + 1), self._get_tag(stage, number)
        self._arrivals[stage, number, False] = self.run.transfers.receive_known(gradients, rank, tag=tag)

    def _get_rank(self, stage: int) -> int:
        return get_rank(stage, self.run.group.size())

    def _get_tag(self, stage: int, number: int) -> int:
        """Return the tag of what crosses the boundary after ``stage``, in either direction."""
        return stage * len(self.micro_batches) + number


@contextmanager
def _keep_random_state(device: torch.device) -> Iterator[int]:
    """Restore the random state after the block, so that it does not matter how many numbers the block draws.

    Yields:
        A random number, the same on all ranks that had the same random state.
    """
    with with_values():  # a plan runs this code with fake tensors, from which no number could be read
        seed = int(torch.randint(2**31, ()))
        state = get_random_state(device)
    try:
        yield seed
    finally:
        with with_values():
            set_random_state(state, device)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)

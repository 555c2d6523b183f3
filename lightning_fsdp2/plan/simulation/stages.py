"""Simulation of one rank of a pipeline, without the ranks that it would exchange tensors with."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_fsdp2.compat.torch_simulation import with_values
from lightning_fsdp2.parallel.pipeline.apply import get_optional_pipeline
from lightning_fsdp2.parallel.pipeline.run import PipelineRun
from lightning_fsdp2.parallel.pipeline.schedule import Action, Kind
from lightning_fsdp2.parallel.pipeline.transfers import Arrival, Transfers
from lightning_fsdp2.plan.simulation.recorder import ACTIVATIONS, StepRecorder
from lightning_fsdp2.strategies.step_outputs import Layout, StepOutputs

Boundary = Sequence[tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes of the tensors that one stage sends to the next for a micro-batch, the same for all stages."""


class SimulatedTransfers(Transfers):
    """Transfers of a simulated rank, which receives tensors of known shapes without being told.

    Args:
        run: Runner of the rank's stages.
        boundary: Shapes and dtypes of the tensors that arrive. None for the first rank, which sends before it receives.

    Attributes:
        boundary: The same. On the first rank, it is known once the rank has sent something.
    """

    def __init__(self, run: PipelineRun, boundary: Boundary | None) -> None:
        super().__init__(run.group, run.control, run.device)
        self.boundary = boundary

    def send(self, tensors: Sequence[Tensor], rank: int, *, tag: int, key: Hashable | None = None) -> None:
        if self.boundary is None:
            self.boundary = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.send_known(tensors, rank, tag=tag)

    def send_known(self, tensors: Sequence[Tensor], rank: int, *, tag: int) -> None:
        self.finish()  # let go of the tensors before these, which the fake process group would never report as sent
        super().send_known(tensors, rank, tag=tag)

    def receive(self, rank: int, *, tag: int, key: Hashable | None = None) -> Arrival:
        forms = self.boundary or ()
        return self.receive_known([torch.empty(shape, dtype=dtype) for shape, dtype in forms], rank, tag=tag)


class SimulatedOutputs(StepOutputs):
    """Outputs of a step on a simulated rank, which hears nothing of tokens and logs unless it runs the last stage."""

    def share_layout(self, layout: Layout | None, module: LightningModule) -> Layout:
        return layout or Layout(is_mapping=False, windows=(), logged=())


def simulate_neighbours(strategy: Any, module: nn.Module, boundary: Boundary | None) -> PipelineRun | None:
    """Make a rank run its stages without the other ranks of its pipeline.

    Args:
        strategy: Strategy of the run.
        module: Module that is already sharded.
        boundary: See :class:`SimulatedTransfers`.

    Returns:
        The runner of the rank's stages; None without pipeline parallelism.
    """
    run = get_optional_pipeline(module)
    if run is not None:
        run.transfers = SimulatedTransfers(run, boundary)
        strategy.pipelining.outputs_class = SimulatedOutputs
        # the step reads what these methods return, and other ranks would say the same as this one
        strategy.world.decide = lambda value, **options: value
        strategy.world.find_maximum_of_stage = _keep_values
    return run


def _keep_values(numbers: Sequence[float]) -> Tensor:
    with with_values():
        return torch.tensor(numbers)


def get_layers(run: PipelineRun) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    return tuple(map(len, run.split.ranges))


def get_boundary(run: PipelineRun) -> Boundary | None:
    """Return the boundary that a simulated rank has seen."""
    return cast(SimulatedTransfers, run.transfers).boundary


def record_actions(run: PipelineRun, recorder: StepRecorder) -> None:
    """Record which operations belong to which action of the pipeline."""

    @contextmanager
    def record(action: Action) -> Iterator[None]:
        phase = "backward" if action.kind in (Kind.BACKWARD, Kind.RECEIVE_BACKWARD) else "forward"
        if action.kind not in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            recorder.begin(phase, part=f"{action.kind.value.replace('_', ' of ')} of micro-batch {action.micro_batch}")
        with recorder.record_action(action):
            yield
        if phase == "forward":
            recorder.label_rest(ACTIVATIONS, phase="forward")

    run.surround = record

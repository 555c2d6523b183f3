"""Division of a model into pipeline stages: which stage runs which module, and stand-ins for all others.

The list of layers of the text model is cut into ranges, one per stage. What runs before the layers belongs to the first
stage, and what runs after them to the last. Modules that never run on text alone, such as a vision model, belong to the
first stage. A module that several stages run, such as one that is tied to a module of another stage, is held by each of
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_fsdp2.modules.stages import Stages, describe_tensors, mark_stages
from lightning_fsdp2.modules.structure import (
    ModelParts,
    ModelStructure,
    find_layer_drop,
    get_class_name,
    get_parameter_owners,
    has_forward,
    is_hf_model,
)
from lightning_fsdp2.modules.stubs import LayerStub, Passage, Relay, SequenceStack, Stub, build_skeleton, get_tensors
from lightning_fsdp2.parallel.pipeline.balance import build_ranges
from lightning_fsdp2.parallel.pipeline.trace import Phase, Trace, find_text_layers, make_refusal, trace_model


@dataclass(frozen=True, eq=False, kw_only=True)
class Place:
    """A module that not all stages run, and the slots in which it is registered."""

    path: str
    """Name of the module in the model."""

    module: nn.Module

    slots: list[tuple[nn.Module, str]]
    """Parents and names of the module in the root."""

    stages: frozenset[int]
    """Stages that run the module. Their ranks hold it."""

    stub: Stub
    """Stand-in on all other stages."""

    @property
    def entry(self) -> nn.Module:
        """Stand-in, on the layer's own stage, that hands the layer the hidden states from the previous stage."""
        return self.stub.build_entry(self.module) if isinstance(self.stub, LayerStub) else self.module


class Split:
    """Division of a model into pipeline stages.

    Nothing is changed until :meth:`drop` is called.

    Args:
        root: Root module, which contains the model.
        model: The Hugging Face model.
        ranges: Indices of the layers of each stage.
        places: Modules that not all stages run.
        relay: State that the stand-ins share.
        rank: This pipeline rank.
    """

    def __init__(
        self, root: nn.Module, model: nn.Module, *, ranges: list[range], places: list[Place], relay: Relay, rank: int
    ) -> None:
        self.root, self.model, self.ranges, self.places = root, model, ranges, places
        self.num_stages = len(ranges)
        self.own_stages = tuple(range(rank, self.num_stages, relay.num_ranks))
        self._relay = relay
        self.layers = [place.module for place in places if isinstance(place.stub, LayerStub)]
        """All layers that are divided among the stages, including those of other ranks."""
        inside = {module for place in places for module in place.module.modules()}
        whole = {
            tensor for module in root.modules() if module not in inside for tensor in get_tensors(module, recurse=False)
        }
        holders = {
            tensor: {stage % relay.num_ranks for place in found for stage in place.stages}
            for tensor, found in _find_holders(places).items()
            if tensor not in whole
        }
        parameters, state = describe_tensors(root, holders, relay.num_ranks)
        self.stages = Stages(
            rank=rank, num_ranks=relay.num_ranks, own=self.own_stages, parameters=parameters, state=state
        )

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several ranks hold: their names, and the ranks. The first rank counts in norms."""
        return self.stages.tied

    def drop(self, stack: SequenceStack | None = None) -> None:
        """Replace all modules that no stage of this rank runs, and record the stages on the root and on the model.

        Call this method after tensor and context parallelism, which match their plans with the whole model.

        Args:
            stack: Code that shards the hidden states between the layers along the sequence. None if they are whole.
        """
        self._relay.stack = stack
        for place in self.places:
            if place.stages.isdisjoint(self.own_stages):
                _fill(place, place.stub)
        mark_stages(self.root, self.stages)
        path = next(name for name, module in self.root.named_modules() if module is self.model)
        mark_stages(self.model, self.stages.within(path))

    @contextmanager
    def run_step(self) -> Iterator[None]:
        """Let a step use modules of other stages inside the block, if it calls the model after that.

        What it computes from them is then wrong, but only the stages that have the modules use it.

        Raises:
            ValueError: If the step does not call the model after it has used a module of another stage.
        """
        relay = self._relay
        if relay.is_in_step:
            yield
            return
        relay.is_in_step, relay.missed = True, None
        try:
            yield
        finally:
            relay.is_in_step = False
        if relay.missed is not None:
            raise relay.missed

    @contextmanager
    def run_stage(self, stage: int, received: Tensor | None) -> Iterator[Passage]:
        """Let the model's forward run only the modules of ``stage`` inside the block.

        Args:
            stage: One of this rank's stages.
            received: Hidden states from the previous stage. None on the first stage.

        Yields:
            The passage. Its ``output`` are the hidden states for the next stage, once the forward has run.
        """
        passage = Passage(self.ranges[stage], received)
        self._relay.missed = None
        own = [place for place in self.places if not place.stages.isdisjoint(self.own_stages)]
        replaced: list[tuple[Place, nn.Module]] = [(place, place.stub) for place in own if stage not in place.stages]
        if stage > 0:
            first = next(place for place in own if place.module is self.layers[passage.layers.start])
            replaced.append((first, first.entry))
        outer, self._relay.passage = self._relay.passage, passage
        for place, module in replaced:
            _fill(place, module)
        try:
            yield passage
        finally:
            for place, _ in replaced:
                _fill(place, place.module)
            self._relay.passage = outer


def build_split(
    structure: ModelStructure,
    *,
    ranks: int,
    rank: int,
    stages_per_rank: int = 1,
    layers_per_stage: list[int] | None = None,
) -> Split:
    """Decide which stage runs which module, without changing anything.

    Args:
        structure: Structure of the root. No pass has changed the root yet.
        ranks: Number of pipeline ranks.
        rank: This pipeline rank.
        stages_per_rank: Number of stages of each rank. Stage s runs on rank s modulo ``ranks``.
        layers_per_stage: Number of layers of each stage. None minimises the cost of the most expensive stage, with the
            numbers of floating-point operations as costs.

    Raises:
        ValueError: If the root does not have exactly one Hugging Face model, if the model has fewer layers than there
            are stages, if ``layers_per_stage`` does not fit, or if the model cannot be divided into stages.
    """
    parts = _get_parts(structure, ranks)
    layers = find_text_layers(parts)
    _check_sizes(parts.module, len(layers), ranks, stages_per_rank, layers_per_stage)
    trace = trace_model(parts.module, layers)
    num_stages = ranks * stages_per_rank
    ranges = build_ranges(parts.module, layers, trace.phases, num_stages, layers_per_stage)
    relay = Relay(ranks)
    places = _build_places(structure.root, parts.module, layers, trace, ranges, relay)
    _check_ties(parts.module, places)
    return Split(structure.root, parts.module, ranges=ranges, places=places, relay=relay, rank=rank)


def _get_parts(structure: ModelStructure, ranks: int) -> ModelParts:
    name = get_class_name(structure.root)
    if len(structure.models) != 1:
        found = ", ".join(get_class_name(parts.module) for parts in structure.models) or "none"
        raise ValueError(
            f"pp_size={ranks} divides the one Hugging Face model of a module into stages, but {name} has"
            f" {len(structure.models)} ({found}); use pp_size=1."
        )
    [parts] = structure.models
    if getattr(parts.module.config, "is_encoder_decoder", False):
        raise make_refusal(parts.module, "it is an encoder-decoder model, whose decoder needs the encoder's output")
    if layer_drop := find_layer_drop(parts.module):  # the trace does not see it, because it happens in training only
        raise make_refusal(
            parts.module,
            f"it skips layers at random in training (layerdrop={layer_drop[1]}), but a stage needs its first and its"
            " last layer; set layerdrop=0.0 in its config",
        )
    return parts


def _check_sizes(
    model: nn.Module, num_layers: int, ranks: int, stages_per_rank: int, layers_per_stage: list[int] | None
) -> None:
    num_stages = ranks * stages_per_rank
    product = f"pp_size={ranks}" if stages_per_rank == 1 else f"pp_size={ranks} * pp_stages_per_rank={stages_per_rank}"
    needs = f"{product} needs {num_stages} stages"
    if num_layers < num_stages:
        raise ValueError(
            f"{needs} of at least one layer each, but {get_class_name(model)} has {num_layers} layers; use at most"
            f" {num_layers} stages."
        )
    if layers_per_stage is None:
        return
    if len(layers_per_stage) != num_stages:
        raise ValueError(
            f"pp_layers_per_stage={layers_per_stage} has {len(layers_per_stage)} entries, but {needs}; give one number"
            " per stage, or None to balance the stages."
        )
    if sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"pp_layers_per_stage={layers_per_stage} adds up to {sum(layers_per_stage)}, but {get_class_name(model)}"
            f" has {num_layers} layers; give positive numbers that add up to {num_layers}, or None to balance the"
            " stages."
        )


def _build_places(
    root: nn.Module, model: nn.Module, layers: list[nn.Module], trace: Trace, ranges: list[range], relay: Relay
) -> list[Place]:
    names = {module: name for name, module in model.named_modules()}
    stages = _assign_stages(root, model, layers, trace, ranges)
    skeleton = build_skeleton(model)
    slots: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                slots.setdefault(child, []).append((parent, name))
    calls = dict(zip(layers, enumerate(trace.calls), strict=True))

    def build_stub(module: nn.Module) -> Stub:
        path, own = names[module], stages[module]
        copy = skeleton.get_submodule(path)
        if module in calls:
            index, call = calls[module]
            stub: Stub = LayerStub(copy, path, own, relay, index=index, call=call)
        else:
            stub = Stub(copy, path, own, relay)
        pairs = zip(get_tensors(module), get_tensors(copy), strict=True)
        stub.without_values = {copied for original, copied in pairs if original.is_meta}
        return stub

    return [
        Place(path=names[module], module=module, slots=slots[module], stages=own, stub=build_stub(module))
        for module, own in stages.items()
        if len(own) < len(ranges)
    ]


def _assign_stages(
    root: nn.Module, model: nn.Module, layers: list[nn.Module], trace: Trace, ranges: list[range]
) -> dict[nn.Module, frozenset[int]]:
    """Return the stages that run each layer, and the stages that run each of the outermost modules beside the layers.

    A module beside the layers has a forward or other methods to call, and the same stages run all modules inside it.
    """
    own = _assign_owners(root, model, trace, len(ranges))
    result = {layers[index]: frozenset([stage]) for stage, indices in enumerate(ranges) for index in indices}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen or module in result:
            return
        seen.add(module)
        inside = set(module.modules())
        stages = {own[inner] for inner in inside if inner in own}
        is_called = is_hf_model(module) or (has_forward(module) and not isinstance(module, nn.Sequential))
        if is_called and len(stages) == 1 and inside.isdisjoint(layers):
            [result[module]] = stages
        else:
            for child in module.children():
                visit(child)

    for child in model.children():
        visit(child)
    return result


def _assign_owners(root: nn.Module, model: nn.Module, trace: Trace, num_stages: int) -> dict[nn.Module, frozenset[int]]:
    """Return the stages that run each module outside the layers that directly owns parameters."""
    everywhere = frozenset(range(num_stages))
    when = {Phase.BEFORE: {0}, Phase.BETWEEN: everywhere, Phase.AFTER: {num_stages - 1}}
    own: dict[nn.Module, frozenset[int]] = {
        model.get_submodule(name): frozenset().union(*(when[phase] for phase in phases)) or frozenset([0])
        for name, phases in trace.phases.items()
    }
    inside = set(model.modules())
    owners = get_parameter_owners(root)
    for holders in owners.values():
        tied = [module for module, _ in holders]
        if len(tied) > 1 and tied[0] in own:
            # The first module has the name under which optimizers know the parameter. It is called wherever the
            # others run, although its result is not used there, because FSDP2 waits until all modules of a unit ran.
            stages = [own.get(module, everywhere if module not in inside else frozenset()) for module in tied]
            own[tied[0]] = frozenset().union(*stages)
    return own


def _check_ties(model: nn.Module, places: list[Place]) -> None:
    """Refuse a weight that a layer shares with modules of other stages."""
    for found in _find_holders(places).values():
        is_in_layer = any(isinstance(place.stub, LayerStub) for place in found)
        if is_in_layer and len({place.stages for place in found}) > 1:
            shared = " and ".join(place.path for place in found)
            raise make_refusal(model, f"{shared} share a weight, but belong to different stages")


def _find_holders(places: list[Place]) -> dict[Tensor, list[Place]]:
    """Map the parameters and buffers in ``places`` to the places that hold them."""
    holders: dict[Tensor, list[Place]] = {}
    for place in places:
        for tensor in get_tensors(place.module):
            holders.setdefault(tensor, []).append(place)
    return holders


def _fill(place: Place, module: nn.Module) -> None:
    """Register ``module`` in the slots of ``place``."""
    for parent, name in place.slots:
        parent._modules[name] = module

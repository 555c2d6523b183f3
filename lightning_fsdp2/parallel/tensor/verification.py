"""Verification of gradients under a tensor parallel plan, based on the autograd graph of each layer's first forward.

Correct logits do not prove that gradients are correct. For example, each rank applies the query and key norms of Qwen3
to its own heads. If a plan replicates these norms but does not sum their gradients over the ranks, the logits are
correct, but the gradient on each rank lacks the summands of the other ranks.

The verification sorts the values in the graph into two kinds. *Equal* values are the same on all ranks, and have
complete gradients. *Own* values differ between ranks: they are shards or summands, or were computed from shards or
summands. Only the functions of :mod:`~lightning_fsdp2.ranks.collectives` may convert one kind to the other, and each of
these functions needs an input of the right kind. No other operation may combine the two kinds if both values have
gradients. This rule is valid for any plan and any code between the modules.

For some values, the kind cannot be determined, and either kind is accepted. These are values without a gradient,
results of other autograd functions (kernels, compiled code, reentrant checkpointing), and DTensors, which have their
own placements.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Replicate

from lightning_fsdp2.compat.torch import get_dtensor_crossing, get_optional_function, is_fsdp_pass_through
from lightning_fsdp2.parallel.tensor.parameters import get_layout, get_slots
from lightning_fsdp2.ranks.collectives import KINDS, Kind

Edge = tuple[Any, int]
"""Value in the autograd graph: a node, and the index of one of its outputs."""

_SIZES_DIFFER = re.compile("must match the size|shapes cannot be multiplied|is invalid for input of size|size mismatch")


class LayerVerification:
    """Verification of a layer's gradients in its first forward with gradients.

    The verification is repeated when different parameters of the layer are trained.

    Args:
        layer: The layer. While its forward runs, it must hold its parameters as plain tensors with this rank's parts.
        name: Name of the layer, for messages.
        returns: Kind that the layer's result must have: EQUAL if it must be the same on all ranks, and OWN if it must
            be different on each rank. EITHER if this is not known.
        is_given: Whether a user gave the plan. If so, errors about mismatched sizes are explained as errors in the
            plan.
    """

    def __init__(self, layer: nn.Module, name: str, *, returns: Kind, is_given: bool) -> None:
        self.layer = layer
        self.name = name
        self.returns = returns
        self.is_given = is_given
        self._slots = get_slots(layer.modules())
        self._verified: set[tuple[bool, ...]] = set()

    def run(self, forward: Callable[..., Any], hidden: Any, kind: Kind, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, and verify the autograd graph between the layer's input and its results.

        Args:
            forward: The layer's own forward.
            hidden: Hidden states that the layer gets.
            kind: Kind of these hidden states: the same on all ranks, or different between ranks.
            *args: Arguments of the forward.
            **kwargs: Arguments of the forward.

        Raises:
            ValueError: If a gradient would be wrong, or if the forward fails with a user's plan because sizes do not
                match.
        """
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        trained = tuple(module._parameters[name].requires_grad for module, name in self._slots)  # type: ignore[union-attr]
        if trained in self._verified:
            return forward(*args, **kwargs)
        has_gradient = torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.requires_grad
        known = {_get_edge(hidden): kind} if has_gradient else {}
        try:
            output = forward(*args, **kwargs)
        except RuntimeError as error:
            if not self.is_given or not _SIZES_DIFFER.search(str(error)):
                raise
            raise self._make_size_error(error) from error
        results = [tensor for tensor in _iterate_tensors(output) if tensor.requires_grad]
        if results:
            self._verify(results, _Graph(self.layer, self.name, known))
            self._verified.add(trained)
        return output

    def _verify(self, results: list[Tensor], graph: "_Graph") -> None:
        for tensor in results:
            kind = graph.get_kind(_get_edge(tensor))
            is_result = tensor is results[0]
            # A scalar must be equal on all ranks, because it is a loss that is later added to the model's loss.
            # Other results may differ between ranks: attention weights and cached keys belong to a rank's own heads.
            wanted = self.returns if is_result else Kind.EQUAL if tensor.ndim == 0 else Kind.EITHER
            if {kind, wanted} == {Kind.EQUAL, Kind.OWN}:
                raise graph.make_result_error(_get_edge(tensor), kind)

    def _make_size_error(self, error: RuntimeError) -> ValueError:
        return ValueError(
            f"tp_plan: {self.name} failed with sharded parameters: {error}. If the layer does not fail with tp_size=1,"
            " either a module without an entry reads the sharded features of a 'colwise' projection, or the layer's own"
            " code expects all heads or features. Add an entry for this module ('rowwise', or ShardedNorm(),"
            " LocalHeads(...) etc. from lightning_fsdp2.parallel.tensor.styles), or gather the outputs of the"
            " projection with 'colwise_gather_output'."
        )


class _Graph:
    """Autograd graph of a layer, with the kind of each value: the same on all ranks, or different between ranks.

    Each kind is determined only once.
    """

    def __init__(self, layer: nn.Module, name: str, known: dict[Edge, Kind]) -> None:
        self.name = name
        self.known = known | _get_kinds_of_raw(layer)
        self.kinds: dict[Any, Kind] = {}
        self.parameters: dict[Edge, str] = {
            _get_edge(parameter): parameter_name
            for parameter_name, parameter in _iterate_parameters(layer)
            if parameter.requires_grad
        }

    def get_kind(self, edge: Edge) -> Kind:
        if edge in self.known:
            return self.known[edge]
        pending = [edge[0]]
        while pending:  # use a loop, because an autograd graph may be too deep for recursion
            node = pending[-1]
            missing = [n for n, i in self._get_inputs(node) if (n, i) not in self.known and n not in self.kinds]
            pending += missing
            if not missing:
                pending.pop()
                if node not in self.kinds:
                    self.kinds[node] = self._judge(node)
        return self.kinds[edge[0]]

    def _judge(self, node: Any) -> Kind:
        """Return the kind of a node's results: the same on all ranks, different between ranks, or unknown.

        The kinds of the node's inputs must already be known.

        Raises:
            ValueError: If the node's inputs do not have the kinds that the node needs.
        """
        inputs = {edge: self.known.get(edge) or self.kinds[edge[0]] for edge in self._get_inputs(node)}
        placements = get_dtensor_crossing(node)
        if placements is not None:
            return Kind.EQUAL if all(isinstance(placement, Replicate) for placement in placements) else Kind.OWN
        function = get_optional_function(node)
        if function in KINDS:
            taken, given = KINDS[function]
            wrong = {Kind.EQUAL: Kind.OWN, Kind.OWN: Kind.EQUAL}.get(taken)
            for edge, kind in inputs.items():
                if kind is wrong:
                    raise self._make_misuse_error(taken, edge)
            return given
        if function is not None and not getattr(function, "is_local", False):
            return Kind.EITHER  # it may communicate in a way that is not known here
        if {Kind.EQUAL, Kind.OWN} <= set(inputs.values()):
            raise self._make_mixture_error(inputs)
        return next((kind for kind in inputs.values() if kind is not Kind.EITHER), Kind.EITHER)

    def _make_mixture_error(self, inputs: dict[Edge, Kind]) -> ValueError:
        equal = self._describe(next(edge for edge, kind in inputs.items() if kind is Kind.EQUAL))
        own = self._describe(next(edge for edge, kind in inputs.items() if kind is Kind.OWN))
        return ValueError(
            f"tp_plan: in {self.name}, a value that is equal on all ranks (computed with {equal}) is combined with a"
            f" value that differs between ranks (computed with {own}). The gradient of the equal value would lack the"
            " summands of the other ranks. Add an entry for the module that computes the equal value: 'colwise' for a"
            " projection, or 'replicated_with_grad_allreduce' for a module that processes each head independently. Or,"
            " if the layer's code computes the differing value by reading a module's weight without calling the module,"
            " remove this module's entry."
        )

    def _make_misuse_error(self, taken: Kind, edge: Edge) -> ValueError:
        found = self._describe(edge)
        if taken is Kind.EQUAL:
            return ValueError(
                f"tp_plan: in {self.name}, a value that differs between ranks (computed with {found}) is used as if it"
                " were equal on all ranks. Add a 'rowwise' entry for the projection that reads this value, or use"
                " 'colwise_gather_output' for the projection that computes it."
            )
        return ValueError(
            f"tp_plan: in {self.name}, a value that is equal on all ranks (computed with {found}) is summed over the"
            " ranks. Remove the entry that sums this value ('rowwise', 'all_reduce', 'moe_tp_experts'), or add entries"
            " that shard the inputs of the value."
        )

    def make_result_error(self, edge: Edge, kind: Kind) -> ValueError:
        found = self._describe(edge)
        if kind is Kind.EQUAL:
            return ValueError(
                f"tp_plan: {self.name} returns a value that is equal on all ranks (computed with {found}), but each"
                " rank should return its part of the sequence. Use sequence_parallel=False for this model."
            )
        return ValueError(
            f"tp_plan: {self.name} returns a value that differs between ranks (computed with {found}). Add a 'rowwise'"
            " entry for the projection that computes the result, or use 'colwise_gather_output'."
        )

    def _describe(self, edge: Edge) -> str:
        """Return the name of the last parameter that was used to compute a value.

        Parameters that were used before the last collective are ignored. If no parameter was used after it, return
        ``"its input"``.
        """
        seen, front = {edge[0]}, [edge]
        while front:
            for place in front:
                if place in self.parameters:
                    return self.parameters[place]
            within = [node for node, _ in front if get_optional_function(node) not in KINDS]
            front = [place for node in within for place in self._get_inputs(node) if place[0] not in seen]
            seen.update(node for node, _ in front)
        return "its input"

    def _get_inputs(self, node: Any) -> list[Edge]:
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        for i, edge in enumerate(edges):
            # skip the autograd function that FSDP2 applies to all arguments of a wrapped module: it changes no values
            while edge not in self.known and is_fsdp_pass_through(edge[0]):
                edge = edge[0].next_functions[edge[1]]
            edges[i] = edge
        return edges


def _get_edge(tensor: Tensor) -> Edge:
    """Return the edge of the autograd graph that stands for a tensor."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _get_kinds_of_raw(layer: nn.Module) -> dict[Edge, Kind]:
    """Return, for each raw parameter of a layer, whether its values are the same on all ranks or differ by rank.

    Raw parameters are the parameters with which a layer computes under Megatron-FSDP; they are not DTensors. If a layer
    computes with DTensors, the autograd graph shows this. For a raw parameter, the graph does not show it, so this
    function uses the layout that tensor parallelism has given to the parameter.
    """
    kinds = {}
    for module, name in get_slots(layer.modules()):
        parameter = module._parameters[name]
        if isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) and parameter.requires_grad:
            layout = get_layout(module, name)
            is_equal = isinstance(layout.placement, Replicate) and not layout.is_partial
            kinds[_get_edge(parameter)] = Kind.EQUAL if is_equal else Kind.OWN
    return kinds


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_tensors(item)


def _iterate_parameters(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and current parameters of a layer.

    This includes plain tensors that replace the parameters while the forward runs.
    """
    for prefix, module in layer.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter

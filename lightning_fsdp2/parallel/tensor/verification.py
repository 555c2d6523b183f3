"""Verification of the gradients under a tensor parallel plan, from the autograd graph of a layer's first forward.

Logits do not show whether gradients are right. The q and k norms of Qwen3 are an example: if they are replicated but
applied to each rank's own heads, the logits are perfect and the gradients lack the other ranks' parts. The error shows
in the kinds of values. A value is *equal* (the same on all ranks, with a complete gradient) or a rank's *own* (a shard
or a summand, or computed with one). Only the functions of :mod:`~lightning_fsdp2.ranks.collectives` turn one kind into
the other. So no other operation may combine an equal value that has a gradient with an own value that has one, and each
of these functions must be given the kind that it is made for. This holds for any plan, whatever the code between the
modules does with their results.

The verification does not follow values without a gradient, autograd functions that are not ours (kernels, compiled
code, code under reentrant checkpointing) and DTensors, which know their own placements. Their results may be of either
kind.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import Replicate

from lightning_fsdp2.compat.torch import get_dtensor_crossing, get_optional_function, is_fsdp_pass_through
from lightning_fsdp2.parallel.tensor.parameters import get_slots
from lightning_fsdp2.ranks.collectives import KINDS, Kind

Edge = tuple[Any, int]
"""A value in the autograd graph: a node and the number of one of its outputs."""

_SIZES_DIFFER = re.compile("must match the size|shapes cannot be multiplied|is invalid for input of size|size mismatch")


class LayerVerification:
    """Verification of a layer in its first forward with gradients, and again if other parameters are trained.

    Args:
        layer: The layer. While its forward runs, its parameters are the tensors that it computes with.
        name: Name of the layer, for messages.
        returns: Kind that the layer's result must have. EITHER if this package does not know what the layer is given.
        is_given: Whether a user gave the plan. It is then the first suspect if sizes do not match.
    """

    def __init__(self, layer: nn.Module, name: str, *, returns: Kind, is_given: bool) -> None:
        self.layer = layer
        self.name = name
        self.returns = returns
        self.is_given = is_given
        self._slots = get_slots(layer.modules())
        self._verified: set[tuple[bool, ...]] = set()

    def run(self, forward: Callable[..., Any], hidden: Any, kind: Kind, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, and follow its results back to its input ``hidden``, which is of ``kind``.

        Raises:
            ValueError: If a gradient would be wrong, or sizes do not match under a user's plan.
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
            # attention weights and cached keys belong to each rank's heads; a loss must be equal: it is added to others
            wanted = self.returns if is_result else Kind.EQUAL if tensor.ndim == 0 else Kind.EITHER
            if {kind, wanted} == {Kind.EQUAL, Kind.OWN}:
                raise graph.make_result_error(_get_edge(tensor), kind)

    def _make_size_error(self, error: RuntimeError) -> ValueError:
        return ValueError(
            f"tp_plan: {self.name}, with its parameters sharded, stopped at: {error}. If it does not with tp_size=1, a"
            " module there reads the sharded features of a 'colwise' projection and has no entry, or the layer's own"
            " code counts on all heads or features: add the entry ('rowwise', ShardedNorm(), LocalHeads(...), ... of"
            " lightning_fsdp2.parallel.tensor.styles), or gather the outputs with 'colwise_gather_output'."
        )


class _Graph:
    """Kinds of the values that a layer's results were computed from, each judged once."""

    def __init__(self, layer: nn.Module, name: str, known: dict[Edge, Kind]) -> None:
        self.name = name
        self.known = known
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
        while pending:  # graphs are deep, so no recursion
            node = pending[-1]
            missing = [n for n, i in self._get_inputs(node) if (n, i) not in self.known and n not in self.kinds]
            pending += missing
            if not missing:
                pending.pop()
                if node not in self.kinds:
                    self.kinds[node] = self._judge(node)
        return self.kinds[edge[0]]

    def _judge(self, node: Any) -> Kind:
        """Return the kind of the results of ``node``, whose inputs have been judged."""
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
        if function is not None:
            return Kind.EITHER
        if {Kind.EQUAL, Kind.OWN} <= set(inputs.values()):
            raise self._make_mixture_error(inputs)
        return next((kind for kind in inputs.values() if kind is not Kind.EITHER), Kind.EITHER)

    def _make_mixture_error(self, inputs: dict[Edge, Kind]) -> ValueError:
        equal = self._describe(next(edge for edge, kind in inputs.items() if kind is Kind.EQUAL))
        own = self._describe(next(edge for edge, kind in inputs.items() if kind is Kind.OWN))
        return ValueError(
            f"tp_plan: in {self.name} what all ranks compute alike (with {equal}) meets what each rank computes for"
            f" itself (with {own}), so that the gradient of the former would lack the other ranks' part. Add an entry"
            " for the module that computes the former, 'colwise' for a projection, 'replicated_with_grad_allreduce' for"
            " what treats each head alone; or leave out the latter's, if the layer's code reads its weight instead of"
            " calling it."
        )

    def _make_misuse_error(self, taken: Kind, edge: Edge) -> ValueError:
        found = self._describe(edge)
        if taken is Kind.EQUAL:
            return ValueError(
                f"tp_plan: in {self.name} what each rank computes for itself with {found} is read as if all ranks had"
                " computed it alike. Add a 'rowwise' entry for the projection that must come between, or"
                " 'colwise_gather_output'."
            )
        return ValueError(
            f"tp_plan: in {self.name} what all ranks compute alike with {found} is added up over the ranks. An entry"
            " around it ('rowwise', 'all_reduce', 'moe_tp_experts') is one too many, or its inputs are not sharded."
        )

    def make_result_error(self, edge: Edge, kind: Kind) -> ValueError:
        found = self._describe(edge)
        if kind is Kind.EQUAL:
            return ValueError(
                f"tp_plan: {self.name} returns what all ranks computed alike with {found}, where each should return its"
                " part of the sequence. Use sequence_parallel=False for this model."
            )
        return ValueError(
            f"tp_plan: {self.name} returns what each rank computed for itself with {found}. Add a 'rowwise' entry for"
            " the projection that makes the result, or 'colwise_gather_output'."
        )

    def _describe(self, edge: Edge) -> str:
        """Return the name of the last parameter that a value was computed with since the last collective."""
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
            while edge not in self.known and is_fsdp_pass_through(edge[0]):  # FSDP2's node for all arguments of a unit
                edge = edge[0].next_functions[edge[1]]
            edges[i] = edge
        return edges


def _get_edge(tensor: Tensor) -> Edge:
    """Return the place of ``tensor``, which requires a gradient, in the autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_tensors(item)


def _iterate_parameters(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and current parameters of a layer, including a rank's parts, which are not ``nn.Parameter``."""
    for prefix, module in layer.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter

"""A proof, from the autograd graph of a layer's first forward, that a plan gives the gradients of one process.

Logits do not show whether gradients are right: the q and k norms of Qwen3, replicated but applied to each rank's own
heads, have perfect logits and gradients that lack the other ranks' part. What does show it is what each value is on the
ranks. It is *equal* (the same everywhere, its gradient complete) or a rank's *own* (a shard or a summand, or computed
with one), and only the functions of :mod:`~lightning_fsdp2.parallel.tp_collectives` lead from one to the other. So no
other operation may combine an equal value that has a gradient with an own one, and each function must be given what it
is made for. This holds for any model, plan and style, whatever the code between the modules does.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import Replicate

from lightning_fsdp2._torch_compat import get_dtensor_crossing, get_optional_function, is_fsdp_pass_through
from lightning_fsdp2.parallel.tp_collectives import KINDS, Kind

_SIZES_DIFFER = re.compile("must match|cannot be multiplied|for input of size|size mismatch|expanded size|shape")
"""In what torch says of operations; running out of memory is something else, though sizes are spoken of."""

Edge = tuple[Any, int]
"""A node of the autograd graph and the number of one of its outputs: a value."""


class LayerVerification:
    """Verifies a layer in its first forward with gradients; without them nothing can be wrong.

    Args:
        layer: Whose parameters are, while its forward runs, those that it computes with.
        name: For messages.
        returns: What its output must be. EITHER for layers of which this package does not know what they are given.
    """

    def __init__(self, layer: nn.Module, name: str, returns: Kind) -> None:
        self.layer = layer
        self.name = name
        self.returns = returns
        self._is_done = False

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, and explain an operation that finds sizes which do not fit.

        Raises:
            ValueError: In place of that operation's error.
        """
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if self._is_done or not _SIZES_DIFFER.search(str(error)):
                raise
            raise ValueError(
                f"tp_plan: {self.name}, with its parameters sharded, stopped at: {error}. A module there reads the"
                " sharded features of a 'colwise' projection and has no entry, or the layer's own code counts on all"
                " heads or features. Add the entry ('rowwise', ShardedNorm(), LocalHeads(attributes=...), ... of"
                " lightning_fsdp2.parallel.tp_styles), or gather the outputs with 'colwise_gather_output'."
            ) from error

    def verify(self, hidden: Any, kind: Kind, output: Any) -> None:
        """Follow ``output``, a tensor or a tuple that begins with one, back to ``hidden``, which is of ``kind``.

        Raises:
            ValueError: When a gradient would be wrong.
        """
        if self._is_done or torch.compiler.is_compiling():
            return
        result = output if isinstance(output, Tensor) or not output else output[0]
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        known = {get_edge(hidden): kind} if isinstance(hidden, Tensor) and hidden.requires_grad else {}
        graph = _Graph(self.layer, self.name, known)
        if {graph.get_kind(get_edge(result)), self.returns} == {Kind.EQUAL, Kind.OWN}:
            raise graph.make_result_error(get_edge(result))
        self._is_done = True


def get_edge(tensor: Tensor) -> Edge:
    """The place of ``tensor``, which requires a gradient, in the autograd graph."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class _Graph:
    """What the values behind a layer's output are, each looked at once."""

    def __init__(self, layer: nn.Module, name: str, known: dict[Edge, Kind]) -> None:
        self.name = name
        self.known = known
        self.kinds: dict[Any, Kind] = {}
        self.parameters: dict[Edge, str] = {
            get_edge(parameter): parameter_name
            for parameter_name, parameter in _iterate_parameters(layer)
            if parameter.requires_grad
        }

    def get_kind(self, edge: Edge) -> Kind:
        if edge in self.known:
            return self.known[edge]
        pending = [edge[0]]
        while pending:  # deep graphs, so no recursion
            node = pending[-1]
            missing = [n for n, i in self._get_inputs(node) if (n, i) not in self.known and n not in self.kinds]
            if node in self.kinds or not missing:
                pending.pop()
                self.kinds.setdefault(node, self._judge(node))
            pending += missing
        return self.kinds[edge[0]]

    def _judge(self, node: Any) -> Kind:
        """The kind of what ``node`` returns, whose inputs have been judged."""
        inputs = {edge: self.known.get(edge) or self.kinds[edge[0]] for edge in self._get_inputs(node)}
        crossing = get_dtensor_crossing(node)
        if crossing is not None:
            way, placements = crossing
            is_equal = all(isinstance(placement, Replicate) for placement in placements)
            return Kind.EITHER if way == "into" else Kind.EQUAL if is_equal else Kind.OWN
        if hasattr(node, "variable"):
            return Kind.EITHER if hasattr(node.variable, "placements") else Kind.EQUAL
        taken, given = KINDS.get(get_optional_function(node), (None, None))
        if taken is not None and given is not None:
            wrong = Kind.OWN if taken is Kind.EQUAL else Kind.EQUAL
            if taken is not Kind.EITHER and wrong in inputs.values():
                raise self._make_misuse_error(taken, next(edge for edge, kind in inputs.items() if kind is wrong))
            return given
        if {Kind.EQUAL, Kind.OWN} <= set(inputs.values()):
            raise self._make_mixture_error(inputs)
        return next((kind for kind in inputs.values() if kind is not Kind.EITHER), Kind.EITHER)

    def _make_mixture_error(self, inputs: dict[Edge, Kind]) -> ValueError:
        equal = self._describe(next(edge for edge, kind in inputs.items() if kind is Kind.EQUAL))
        own = self._describe(next(edge for edge, kind in inputs.items() if kind is Kind.OWN))
        return ValueError(
            f"tp_plan: in {self.name} what all ranks compute alike with {equal} meets what each rank computes for"
            f" itself with {own}, so that the gradient of the former would lack the other ranks' part. Add an entry for"
            f" {equal}: 'colwise' for a projection, 'replicated_with_grad_allreduce' for what treats each head alone;"
            " leave modules out of the plan whose weights the layer's own code reads instead of calling them."
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

    def make_result_error(self, edge: Edge) -> ValueError:
        return ValueError(
            f"tp_plan: {self.name} returns what each rank computed for itself with {self._describe(edge)}. Add a"
            " 'rowwise' entry for the projection that makes the result, or 'colwise_gather_output'."
        )

    def _describe(self, edge: Edge) -> str:
        """The parameter that was used last on the way to a value."""
        seen, front = {edge[0]}, [edge]
        while front:
            for place in front:
                if place in self.parameters:
                    return self.parameters[place]
            front = [place for node, _ in front for place in self._get_inputs(node) if place[0] not in seen]
            seen.update(node for node, _ in front)
        return "its input"

    def _get_inputs(self, node: Any) -> list[Edge]:
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        for i, edge in enumerate(edges):
            while edge not in self.known and is_fsdp_pass_through(edge[0]):  # of all arguments of a unit
                edge = edge[0].next_functions[edge[1]]
            edges[i] = edge
        return edges


def _iterate_parameters(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of the moment: a rank's part, which is no ``nn.Parameter``."""
    for prefix, module in layer.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter

"""A stand-in has the shapes of the original module, but no weights; whoever needs the weights gets an error."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import LLAMA, make_causal_lm
from torch import Tensor, nn

from lightning_fsdp2.modules.stubs import (
    LayerCall,
    LayerStub,
    Passage,
    Relay,
    Stub,
    build_skeleton,
    copy_structure,
    with_skeletons,
)

HIDDEN = torch.ones(2, 5, 32)


def make_relay() -> Relay:
    """The state while the model runs on its first stage."""
    return Relay(num_ranks=2, passage=Passage(range(1), None))


def make_stub(module: nn.Module, relay: Relay | None = None) -> Stub:
    return Stub(build_skeleton(module), "model.part", [1], relay or make_relay())


def takes_no_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.element_size() and not tensor.any()


@pytest.mark.parametrize(
    ("module", "given", "shape"),
    [
        (nn.Embedding(101, 32), torch.ones(2, 5, dtype=torch.long), (2, 5, 32)),
        (nn.LayerNorm(32), HIDDEN, (2, 5, 32)),
        (nn.Linear(32, 101), HIDDEN.requires_grad_(), (2, 5, 101)),
    ],
)
def test_a_stand_in_returns_zeros_of_the_right_shape(module: nn.Module, given: Tensor, shape: tuple[int, ...]) -> None:
    stub = make_stub(module)
    result = stub(given)
    assert (result.shape, result.dtype, result.device) == (shape, torch.float32, given.device)
    assert takes_no_memory(result)
    assert not result.requires_grad
    assert [*stub.parameters(), *stub.buffers(), *stub.children(), *stub.state_dict()] == []


def test_results_have_the_dtype_of_the_stage() -> None:
    norm, head, embedding = nn.LayerNorm(32), nn.Linear(32, 101), nn.Embedding(101, 32)
    assert make_stub(norm)(HIDDEN.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert make_stub(head)(HIDDEN.bfloat16()).dtype == torch.bfloat16
    relay = Relay(num_ranks=2, passage=Passage(range(1, 2), HIDDEN.bfloat16()))
    assert make_stub(embedding, relay)(torch.ones(2, 5, dtype=torch.long)).dtype == torch.bfloat16


def test_structured_results_keep_their_structure() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, hidden: Tensor, *, index: Tensor) -> Any:
            return {"scaled": (hidden * self.weight, None), "index": index + 1}

    result = make_stub(Part())(torch.ones(2, 3), index=torch.ones(2, dtype=torch.long))
    assert result["scaled"][0].shape == (2, 3)
    assert result["scaled"][1] is None
    assert (result["index"].dtype, result["index"].shape) == (torch.long, (2,))


def test_code_that_reads_values_of_its_inputs_gets_them() -> None:
    class Repeat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(32, 8)
            self.register_buffer("offset", torch.zeros(8))

        def forward(self, hidden: Tensor, counts: Tensor) -> Tensor:
            return torch.cat([self.projection(hidden).bfloat16() + self.offset] * sum(counts.tolist()))

    result = make_stub(Repeat())(HIDDEN.bfloat16(), torch.tensor([1, 2]))
    assert result.shape == (6, 5, 8)
    assert takes_no_memory(result)


def test_an_error_of_the_original_module_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        make_stub(nn.Linear(8, 8))(HIDDEN)


# ---------------------------------------------------------------------- attributes


class Holder(nn.Module):
    kind = "sliding"

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(32, 8)
        self.parts = nn.ModuleList([nn.Linear(32, 4)])
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.size = 7

    def project(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden)

    def get_part(self) -> nn.Module:
        return self.parts[0]

    def reset(self) -> None:
        nn.init.normal_(self.projection.weight)


def test_attributes_are_those_of_the_original_module() -> None:
    stub = make_stub(Holder())
    assert (stub.kind, stub.size) == ("sliding", 7)
    assert takes_no_memory(stub.scale)
    assert stub.scale.shape == (3,)
    assert stub.projection.weight.shape == (8, 32)
    assert takes_no_memory(stub.projection(HIDDEN))
    assert [part(HIDDEN).shape for part in stub.parts] == [(2, 5, 4)]
    assert takes_no_memory(stub.project(HIDDEN))
    assert stub.get_part()(HIDDEN).shape == (2, 5, 4)
    assert not hasattr(stub, "other")


def test_tensors_are_on_the_device_of_the_last_input() -> None:
    relay = make_relay()
    stub = make_stub(nn.Linear(32, 8), relay)
    assert stub.weight.device.type == "cpu"
    stub(HIDDEN.to("meta"))
    assert stub.weight.device.type == "meta"


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda stub: setattr(stub, "scale", torch.zeros(3)), "cannot set its `scale`"),
        (lambda stub: setattr(stub, "new", nn.Parameter(torch.zeros(3))), "cannot set its `new`"),
        (lambda stub: setattr(stub.projection, "weight", None), "cannot set its `weight`"),
        (lambda stub: stub.reset(), "cannot run its `reset`"),
        (lambda stub: stub.projection.reset_parameters(), "cannot run its `reset_parameters`"),
    ],
)
def test_writing_to_weights_names_the_stage_that_has_them(write: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"pp_size=2: this rank {problem}.* model.part.* is part of pipeline stage 1"):
        write(make_stub(Holder()))


def test_a_stand_in_can_be_copied_and_moved() -> None:
    stub = copy.deepcopy(nn.Sequential(make_stub(nn.Linear(32, 8)))).to(torch.bfloat16).train()
    assert stub(HIDDEN).shape == (2, 5, 8)
    assert "Linear of stage 1" in repr(stub)


# ---------------------------------------------------------------------- layers


def make_layer(relay: Relay, *, index: int = 1, argument: int | str = 0, results: int | None = None) -> LayerStub:
    call = LayerCall(argument=argument, results=results)
    return LayerStub(build_skeleton(nn.Linear(32, 32)), f"layers.{index}", [0], relay, index=index, call=call)


def test_a_layer_returns_its_hidden_states_in_the_form_of_the_original() -> None:
    relay = make_relay()
    assert make_layer(relay)(HIDDEN, 1) is HIDDEN
    assert make_layer(relay, argument=1)(1, HIDDEN) is HIDDEN
    assert make_layer(relay, argument="hidden", results=1)(other=1, hidden=HIDDEN) == (HIDDEN,)
    first, *rest = make_layer(relay, results=3)(HIDDEN)
    assert (first is HIDDEN, rest) == (True, [None, None])


def test_a_layer_after_a_stage_notes_what_leaves_it() -> None:
    relay = Relay(num_ranks=2, passage=Passage(range(2, 4), torch.zeros(2, 5, 32)))
    assert make_layer(relay, index=1)(HIDDEN) is HIDDEN
    assert relay.passage.output is None
    output = torch.zeros(2, 5, 32)
    assert make_layer(relay, index=4)(output) is output
    assert relay.passage.output is output
    assert make_layer(relay, index=5)(output) is output


@pytest.mark.parametrize("argument", [0, "input"])
def test_the_first_layer_of_a_stage_gets_what_is_received(argument: int | str) -> None:
    layer, received = nn.Linear(32, 32), torch.randn(2, 5, 32)
    layer.kind = "sliding"
    relay = Relay(num_ranks=2, passage=Passage(range(2, 4), received))
    entry = make_layer(relay, index=2, argument=argument).build_entry(layer)
    result = entry(HIDDEN) if argument == 0 else entry(input=HIDDEN)
    torch.testing.assert_close(result, layer(received))
    assert dict(entry.named_parameters()) == dict(layer.named_parameters())
    assert entry.kind == "sliding"
    relay.passage = None
    torch.testing.assert_close(make_layer(relay).build_entry(layer)(HIDDEN), layer(HIDDEN))


def test_a_change_between_layers_of_later_stages_is_an_error() -> None:
    relay = Relay(num_ranks=2, passage=Passage(range(0, 1), None))
    hidden = make_layer(relay, index=2)(make_layer(relay, index=1)(HIDDEN))
    with pytest.raises(ValueError, match=r"between its layers 2 and 3.* at least 3 layers in pp_layers_per_stage"):
        make_layer(relay, index=3)(hidden + 1)


def test_the_sequence_stack_is_told_of_both_ends_of_a_stage() -> None:
    class Stack:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def resume(self, hidden: Tensor) -> None:
            self.calls.append(("resume", hidden))

        def pause(self, hidden: Tensor) -> Tensor:
            self.calls.append(("pause", hidden))
            return whole

    stack, whole = Stack(), torch.zeros(2, 10, 32)
    relay = Relay(num_ranks=2, passage=Passage(range(2, 4), torch.zeros(2, 5, 32)), stack=stack)
    make_layer(relay, index=1)(HIDDEN)
    make_layer(relay, index=2).build_entry(nn.Linear(32, 32))(HIDDEN)
    assert make_layer(relay, index=5)(make_layer(relay, index=4)(HIDDEN)) is whole
    assert stack.calls == [("resume", HIDDEN), ("pause", HIDDEN)]


# ---------------------------------------------------------------------- skeletons


def test_a_copy_of_the_structure_has_no_weights_and_keeps_ties() -> None:
    model = make_causal_lm({**LLAMA, "tie_word_embeddings": True})
    model.constant = torch.ones(3)
    skeleton = build_skeleton(model, torch.bfloat16)
    assert [*skeleton.state_dict()] == [*model.state_dict()]
    assert all(tensor.is_meta and tensor.dtype == torch.bfloat16 for tensor in skeleton.parameters())
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    assert skeleton.constant.is_meta
    assert not any(tensor.is_meta for tensor in (*model.parameters(), model.constant))
    same = copy_structure(model, lambda tensor: tensor.detach())
    assert same.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_skeletons_are_shown_for_a_while() -> None:
    stub = make_stub(nn.Linear(32, 8))
    root = nn.ModuleDict({"part": stub})
    with with_skeletons(root):
        assert [*root.state_dict()] == ["part.weight", "part.bias"]
        root["part"].weight = nn.Parameter(torch.ones(8, 32))
    assert root["part"] is stub
    assert stub.skeleton.weight.is_meta


def test_outside_of_the_model_zeros_would_be_taken_for_results() -> None:
    relay = Relay(num_ranks=2)
    stub = make_stub(nn.Linear(4, 4), relay)
    relay.passage = Passage(range(1), None, is_over=True)
    for use in (lambda: stub(torch.zeros(1, 4)), lambda: stub.weight, lambda: stub.reset_parameters()):
        with pytest.raises(ValueError, match=r"pp_size=2: this rank cannot .* outside of the model's forward"):
            use()

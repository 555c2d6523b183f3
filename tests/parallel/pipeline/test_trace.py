"""A trace finds what runs before and after the layers, and every reason why stages could not compute a model."""

from typing import Any

import pytest
import torch
from helpers.families import make_family_config, make_family_model
from helpers.stages import Step, ToyLayer, ToyModel, run_layers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fsdp2.modules.structure import find_parts
from lightning_fsdp2.modules.stubs import LayerCall
from lightning_fsdp2.parallel.pipeline.trace import Phase, Trace, find_text_layers, trace_model

BEFORE, BETWEEN, AFTER = {Phase.BEFORE}, {Phase.BETWEEN}, {Phase.AFTER}


def trace(model: nn.Module) -> Trace:
    return trace_model(model, find_text_layers(find_parts(model)))


def build_on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_family_config(family))


@pytest.mark.guarantees("found-by-a-trace")
@pytest.mark.parametrize("build", [build_on_meta, make_family_model])
def test_modules_run_before_or_after_the_layers(build: Any) -> None:
    found = trace(build("gpt2"))
    assert found.phases == {
        "transformer.wte": BEFORE,
        "transformer.wpe": BEFORE,
        "transformer.ln_f": AFTER,
        "lm_head": AFTER,
    }
    assert found.calls == [LayerCall(argument=0, results=None)] * 2


def test_what_a_layer_returns_beside_its_hidden_states_does_not_matter_if_nobody_uses_it() -> None:
    assert trace(build_on_meta("bloom")).calls == [LayerCall(argument=0, results=2)] * 2


def test_a_mixture_of_experts_is_traced_on_the_meta_device() -> None:
    assert trace(build_on_meta("mixtral")).phases == {
        "model.embed_tokens": BEFORE,
        "model.norm": AFTER,
        "lm_head": AFTER,
    }


def test_the_layers_of_the_text_model_are_found_beside_a_longer_tower() -> None:
    model = build_on_meta("got_ocr2")
    assert find_text_layers(find_parts(model)) == [*model.model.language_model.layers]


def test_a_model_that_reads_values_is_traced_on_zeros() -> None:
    def run(model: ToyModel, hidden: Tensor) -> Tensor:
        assert (model.table.tolist(), model.offset.item()) == ([1, 1], 3)  # a buffer without values is of ones
        return run_layers(model, hidden) if hidden.sum().item() == 0 else hidden

    with torch.device("meta"):
        model = ToyModel(run)
        model.register_buffer("table", torch.zeros(2))
    model.register_buffer("offset", torch.tensor(3))
    assert trace(model).phases == {"": set(), "embedding": BEFORE, "norm": AFTER, "head": AFTER}
    assert model.embedding.weight.is_meta


@pytest.mark.guarantees("found-by-a-trace")
def test_a_trace_changes_nothing() -> None:
    model = make_family_model("gemma3_text")
    model.model.layers[0].eval()
    model.model.norm.weight.requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    trains = [parameter.requires_grad for parameter in model.parameters()]
    state, attention = torch.get_rng_state(), model.config._attn_implementation
    trace(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    assert [parameter.requires_grad for parameter in model.parameters()] == trains
    assert model.config._attn_implementation == attention
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_trace_leaves_the_random_numbers_of_others_alone() -> None:
    def run(model: ToyModel, hidden: Tensor) -> Tensor:
        return run_layers(model, hidden + torch.rand(()))

    model, state = ToyModel(run), torch.get_rng_state()
    trace(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_weight_that_is_used_without_a_call_of_its_module_is_found() -> None:
    class Tied(ToyModel):
        def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
            hidden = self.norm(run_layers(self, self.embedding(input_ids) * self.scale))
            return nn.functional.linear(hidden, self.embedding.weight)

    assert trace(Tied()).phases == {"": BEFORE, "embedding": BEFORE | AFTER, "norm": AFTER, "head": set()}


def test_a_weight_that_is_used_between_layers_is_found() -> None:
    def run(model: ToyModel, hidden: Tensor) -> Tensor:
        for layer in model.layers:
            assert model.scale.sum() is not None
            hidden = layer(hidden)
        return hidden

    assert trace(ToyModel(run)).phases[""] == BEFORE | BETWEEN


# ---------------------------------------------------------------------- refusals


class TopKLayer(ToyLayer):
    def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
        return super().forward(hidden), hidden.argmax(-1)


class WritingLayer(ToyLayer):
    def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
        other["seen"] = hidden.argmax(-1)
        return super().forward(hidden)


class CountingLayer(ToyLayer):
    def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
        other += 1
        return super().forward(hidden)


class ClosureLayer(ToyLayer):
    kept: Any = None

    def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
        result = super().forward(hidden if self.kept is None else hidden + self.kept)
        ClosureLayer.kept = result
        return result


class MappingLayer(ToyLayer):
    def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
        return {"hidden": super().forward(hidden)}


def pass_embeddings(model: ToyModel, hidden: Tensor) -> Tensor:
    embedded = hidden
    for layer in model.layers:
        hidden = layer(hidden, other=embedded * 2)
    return hidden


def run_twice(model: ToyModel, hidden: Tensor) -> Tensor:
    return run_layers(model, run_layers(model, hidden))


def run_backwards(model: ToyModel, hidden: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        hidden = layer(hidden)
    return hidden


def skip_last(model: ToyModel, hidden: Tensor) -> Tensor:
    for layer in model.layers[:3]:
        hidden = layer(hidden)
    return hidden


def pass_indices(model: ToyModel, hidden: Tensor) -> Tensor:
    indices = None
    for layer in model.layers:
        hidden, indices = layer(hidden, indices)
    return hidden


def share_dict(model: ToyModel, hidden: Tensor) -> Tensor:
    shared: dict[str, Tensor] = {}
    for layer in model.layers:
        hidden = layer(hidden, shared)
    return hidden


def share_tensor(model: ToyModel, hidden: Tensor) -> Tensor:
    shared = torch.zeros(1, device=hidden.device)
    for layer in model.layers:
        hidden = layer(hidden, shared)
    return hidden


def scale_between(model: ToyModel, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = layer(hidden * 2)
    return hidden


def unpack(model: ToyModel, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = layer(hidden)["hidden"]
    return hidden


def fail(model: ToyModel, hidden: Tensor) -> Tensor:
    raise KeyError("missing")


@pytest.mark.guarantees("refused-pipeline-families", "refused-pipelines")
@pytest.mark.parametrize(
    ("run", "layer", "reason"),
    [
        (pass_embeddings, ToyLayer, "layers.0 gets, besides its hidden states, the argument `other`"),
        (run_twice, ToyLayer, "layers.0 runs 2 times"),
        (skip_last, ToyLayer, "layers.3 runs 0 times"),
        (run_backwards, ToyLayer, "layers.3 runs as number 0"),
        (pass_indices, TopKLayer, "layers.0 returns, besides its hidden states, a value that the next layer gets"),
        (share_dict, WritingLayer, "layers.0 writes to the argument `other`, which other layers get too"),
        (share_tensor, CountingLayer, "layers.0 writes to the argument `other`, which other layers get too"),
        (scale_between, ToyLayer, "layers.1 gets are not what the previous layer returned"),
        (run_layers, ClosureLayer, "layers.1 depends on layers.0.projection.weight in a way other than"),
        (unpack, MappingLayer, "layers.0 returns a dict"),
        (fail, ToyLayer, "could not be traced .*missing"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_a_model_that_stages_would_compute_wrongly_is_refused(
    run: Step, layer: type[ToyLayer], reason: str, trains: bool
) -> None:
    ClosureLayer.kept = None
    with torch.device("meta"):
        model = ToyModel(run, layer).requires_grad_(trains)
    with pytest.raises(ValueError, match=rf"(?s)ToyModel cannot be divided .*{reason}.*pp_size=1"):
        trace(model)


def test_a_weight_of_another_module_in_a_layer_is_refused() -> None:
    class Borrowing(ToyLayer):
        def forward(self, hidden: Tensor, other: Any = None, **options: Any) -> Any:
            return super().forward(hidden * borrowed[0])

    borrowed: list[Tensor] = []

    def run(model: ToyModel, hidden: Tensor) -> Tensor:
        borrowed[:] = [model.scale]
        return run_layers(model, hidden)

    with pytest.raises(ValueError, match=r"layers\.0 depends on scale in a way other than its hidden states"):
        trace(ToyModel(run, Borrowing))


def test_a_model_without_layers_in_its_text_model_is_refused() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=0, vocab_size=11)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="its text model has no list of layers"):
        find_text_layers(find_parts(model))

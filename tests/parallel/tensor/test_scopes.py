"""Sequence parallelism derived from plans: its collectives, what it computes, and what it refuses."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.collectives import StepCounter
from helpers.models import GPT2, LLAMA, VOCABULARY, PlainTransformer, plain_loss
from helpers.oracle import assert_equal_gradients
from helpers.ranks import run_ranks
from helpers.tensor_parallel import COUNTED_GPT2, get_gradients, make_mesh, make_rough_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from lightning_fsdp2.modules.structure import find_parts, find_structure
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel
from lightning_fsdp2.parallel.tensor.plans import LayerTraits, get_plan, register_tp_plan

BOTH_MODELS = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])


def make_sharded(plain: nn.Module, **options: Any) -> Any:
    sharded = copy.deepcopy(plain)
    apply_tensor_parallel(find_structure(sharded), make_mesh(), **{"sequence_parallel": True, **options})
    return sharded


def make_batch(length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    input_ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": input_ids, "labels": input_ids}


def assert_trains_like(plain: nn.Module, sharded: nn.Module, *batches: dict[str, Any]) -> None:
    """Compare logits, losses and the gradients of all batches together, which one backward computes."""
    losses: list[list[Tensor]] = [[], []]
    for batch in batches or (make_batch(),):
        expected, actual = (model(**batch, use_cache=False) for model in (plain, sharded))
        torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert abs(actual.loss.item() - expected.loss.item()) <= 1e-5
        losses[0].append(expected.loss)
        losses[1].append(actual.loss)
    for model, own in zip((plain, sharded), losses, strict=True):
        model.zero_grad()
        torch.stack(own).sum().backward()
    assert_equal_gradients(get_gradients(sharded), get_gradients(plain))


# ---------------------------------------------------------------------- collectives


@pytest.mark.guarantees("derived-sequence-parallelism")
@pytest.mark.parametrize("config", [LLAMA, COUNTED_GPT2], ids=["llama", "gpt2"])
def test_a_layer_costs_two_all_gathers_and_two_reduce_scatters_each_way(config: dict[str, Any]) -> None:
    def run() -> None:
        sharded = make_sharded(make_rough_model(config))
        layers = sharded.config.num_hidden_layers
        batch = make_batch()
        sharded(**batch, use_cache=False)  # in the first one the ranks ask each other for hooks
        with StepCounter() as counter:
            loss = sharded(**batch, use_cache=False).loss
        # and the embedding, the sequence after the last layer, the logits. GPT-2 adds positions to whole sequences
        forward = Counter({"all_gather": 2 * layers + 2, "reduce_scatter": 2 * layers})
        forward["reduce_scatter" if config is LLAMA else "all_reduce"] += 1
        assert counter.collectives == forward
        hidden = batch["input_ids"].numel() * 32
        assert set(counter.elements["reduce_scatter"]) == {hidden}
        with StepCounter() as counter:
            loss.backward()
        # and the sequence before the first layer, the head's input; a layer's norms are summed together. GPT-2 has
        # biases behind its two row-wise projections and a packed one in front
        sums = 1 if config is LLAMA else 1 + 2
        all_reduces = sums * layers + 1
        expected = {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers, "all_reduce": all_reduces}
        assert counter.collectives == expected

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what it computes


@pytest.mark.guarantees("derived-sequence-parallelism")
@BOTH_MODELS
def test_a_model_trains_like_in_one_process(config: dict[str, Any]) -> None:
    def run() -> None:
        plain = make_rough_model(config)
        sharded = make_sharded(plain)
        assert_trains_like(plain, sharded)
        padded = make_batch()
        mask = torch.ones_like(padded["input_ids"])
        mask[0, :5] = 0
        labels = padded["labels"].masked_fill(mask == 0, -100)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        assert_trains_like(
            plain, sharded, {**padded, "attention_mask": mask, "labels": labels, "position_ids": positions}
        )

    run_ranks(run, 2)


def test_three_ranks_and_embeddings_that_are_given() -> None:
    def run() -> None:
        plain = make_rough_model({**GPT2, "n_embd": 36, "n_head": 3})
        sharded = make_sharded(plain)
        embeddings = torch.randn(2, 6, 36)
        gradients = []
        for model in (plain, sharded):
            given = embeddings.clone().requires_grad_()
            model(inputs_embeds=given, labels=make_batch(6)["labels"], use_cache=False).loss.backward()
            gradients.append({"given": given.grad})
        assert_equal_gradients(gradients[1], gradients[0])

    run_ranks(run, 3)


class OuterAttention(nn.Module):
    """Has norms of its own before and behind the projections of an attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.last = LlamaRMSNorm(32), nn.LayerNorm(32)
        self.attention = attention

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        output, weights = self.attention(self.first(hidden_states), **kwargs)
        return self.last(output), weights


class NormedAttention(OuterAttention):
    """The same under the name of a norm."""


@pytest.mark.parametrize("attention", [OuterAttention, NormedAttention])
def test_norms_inside_of_an_attention_work_on_whole_sequences_before_it_and_on_parts_behind_it(
    attention: type[nn.Module],
) -> None:
    def run() -> None:
        plain = make_rough_model({**LLAMA, "attention_bias": True})
        for layer in plain.model.layers:
            layer.self_attn = attention(layer.self_attn)
        names = ("q_proj", "k_proj", "v_proj")
        plan = {f"model.layers.*.self_attn.attention.{name}": "colwise" for name in names}
        sharded = make_sharded(plain, plan={**plan, "model.layers.*.self_attn.attention.o_proj": "rowwise"})
        for _ in range(2):
            assert_trains_like(plain, sharded)

    run_ranks(run, 2)


class GatedLayer(LlamaDecoderLayer):
    """Weighs its result by a child that treats positions one by one, and by the positions themselves."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gate = nn.Sequential(nn.Linear(32, 4), nn.GELU(), nn.Linear(4, 32))

    def forward(self, hidden_states: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, position_ids=position_ids, **kwargs)
        return output * self.gate(output) + 0.1 * position_ids.unsqueeze(-1)


def test_layers_with_traits_of_their_own() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        plain.model.layers = nn.ModuleList(GatedLayer(plain.config, index) for index in range(3))
        own = get_plan(find_parts(plain), "hf")
        gathers = []
        for pointwise in (("gate",), ()):
            register_tp_plan("llama", own, LayerTraits(pointwise=pointwise, per_position=("position_ids",)))
            sharded = make_sharded(plain)
            assert_trains_like(plain, sharded)
            with StepCounter() as counter:
                sharded(make_batch()["input_ids"], use_cache=False)
            gathers.append(counter.collectives["all_gather"])
        assert gathers == [2 * 3 + 2, 3 * 3 + 2], "what is not known to treat positions one by one sees all of them"
        register_tp_plan("llama", own, LayerTraits(refused="the positions are shuffled"))
        with pytest.raises(ValueError, match=r"sequence_parallel=True.* the positions are shuffled"):
            make_sharded(plain)

    run_ranks(run, 2)


def test_whatever_is_outside_of_the_layers_sees_whole_sequences() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = make_sharded(plain)
        seen: list[tuple[Tensor, ...]] = []
        for model in (plain, sharded):
            for module in (model.model.embed_tokens, model.model.rotary_emb, model.model.norm, model.model, model):
                module.register_forward_hook(lambda module, args, output: seen.append(flatten(args, output)))
            model(make_batch()["input_ids"], use_cache=False)
        assert len(seen) == 10
        torch.testing.assert_close(seen[5:], seen[:5], rtol=1e-4, atol=1e-5)
        parts: list[torch.Size] = []
        sharded.model.layers[1].register_forward_hook(lambda module, args, output: parts.append(output.shape))
        sharded(make_batch()["input_ids"], use_cache=False)
        assert parts == [(2, 6, 32)]

    run_ranks(run, 2)


def flatten(*values: Any) -> tuple[Tensor, ...]:
    """All tensors in arguments and outputs."""
    result: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            result.append(value)
        elif isinstance(value, tuple | list):
            result += flatten(*value)
        elif isinstance(value, dict):
            result += flatten(*value.values())
    return tuple(result)


@pytest.mark.parametrize(
    ("config", "sequence_parallel"),
    [
        pytest.param(LLAMA, True, id="llama-sp"),
        pytest.param(GPT2, False, id="gpt2-tp"),
        pytest.param(LLAMA, False, id="llama-tp", marks=pytest.mark.slow),
        pytest.param(GPT2, True, id="gpt2-sp", marks=pytest.mark.slow),
    ],
)
def test_generate_continues_as_in_one_process(config: dict[str, Any], sequence_parallel: bool) -> None:
    def run() -> None:
        plain = make_rough_model(config).eval()
        sharded = make_sharded(plain, sequence_parallel=sequence_parallel)
        for length in (6, 5):
            ids = make_batch(length)["input_ids"]
            mask = torch.ones_like(ids)
            mask[1, :2] = 0
            options = {"attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
            expected, actual = (model.generate(ids, **options, pad_token_id=0) for model in (plain, sharded))
            assert actual.shape == (2, length + 5)
            assert torch.equal(actual, expected)

    run_ranks(run, 2)


def test_a_length_that_is_not_divisible_is_refused_in_training_and_whole_in_evaluation() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = make_sharded(plain)
        message = (
            r"sequence_parallel=True .* by tp_size=2, .* this batch has 7 positions; pad them to 8 .*labels with -100"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                sharded(**make_batch(7))
            with torch.no_grad():
                for length in (7, 1):
                    batch = make_batch(length)
                    torch.testing.assert_close(sharded(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)
            assert_trains_like(plain, sharded, make_batch(8))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- several forwards


def checkpoint_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "computed-again"])
def test_forwards_of_several_lengths_before_one_backward(is_checkpointed: bool) -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = make_sharded(plain)
        if is_checkpointed:
            checkpoint_layers(sharded)
        assert_trains_like(plain, sharded, make_batch(12), make_batch(12, seed=2))
        assert_trains_like(plain, sharded, make_batch(12), make_batch(8, seed=2), make_batch(4, seed=3))

    run_ranks(run, 2)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "computed-again"])
def test_an_evaluation_between_forward_and_backward(is_checkpointed: bool) -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = make_sharded(plain)
        if is_checkpointed:
            checkpoint_layers(sharded)
        for model in (plain, sharded):
            loss = model(**make_batch(), use_cache=False).loss
            with torch.no_grad():
                model(**make_batch(7), use_cache=False)
            loss.backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)


@pytest.mark.parametrize("place", ["self_attn.o_proj", "mlp.act_fn", "post_attention_layernorm"])
def test_after_an_exception_inside_of_a_layer_the_next_forward_works(place: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("inside")

    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = make_sharded(plain)
        handle = sharded.model.layers[1].get_submodule(place).register_forward_hook(fail)
        with pytest.raises(KeyError, match="inside"):
            sharded(**make_batch())
        handle.remove()
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        assert_trains_like(plain, sharded, make_batch(8))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- models that do not treat positions one by one


class ReshapingLayer(LlamaDecoderLayer):
    """Restores a batch dim from a sequence length that it was told."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        length = kwargs["position_embeddings"][0].size(1)
        return super().forward(hidden_states.view(-1, length, hidden_states.size(-1)), **kwargs)


class GrowingModel(LlamaModel):
    """Runs its layers itself and repeats two positions between the first and the second."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden, length = self.embed_tokens(input_ids), input_ids.size(1)
        for index, layer in enumerate(self.layers):
            if index == 1:
                hidden, length = torch.cat([hidden, hidden[:, :2]], 1), length + 2
            positions = torch.arange(length).unsqueeze(0)
            hidden = layer(hidden, position_embeddings=self.rotary_emb(hidden, positions))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def make_reshaping() -> Any:
    model = make_rough_model(LLAMA)
    for layer in model.model.layers:
        layer.__class__ = ReshapingLayer
    return model


def make_growing() -> Any:
    model = make_rough_model(LLAMA)
    model.model.__class__ = GrowingModel
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            make_reshaping,
            r"sequence_parallel=True: model\.layers\.0\.self_attn was given hidden states of shape \(1, 12, 32\), but"
            r" each rank holds 6 of 12 positions\. .* Use sequence_parallel=False for this model",
        ),
        (
            make_growing,
            r"sequence_parallel=True: model\.layers\.1 was given hidden states of shape \(2, 8, 32\), but each rank"
            r" holds 6 of 12 positions between the layers\. .* Use sequence_parallel=False for this model",
        ),
    ],
    ids=["reshapes", "grows"],
)
def test_a_model_that_needs_to_know_the_length_of_its_hidden_states_is_refused_by_name(
    make: Callable[[], Any], message: str
) -> None:
    def run() -> None:
        plain = make()
        ids = make_batch()["input_ids"]
        expected = plain(ids, use_cache=False).logits
        whole = make_sharded(plain, sequence_parallel=False)
        torch.testing.assert_close(whole(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
        sharded = make_sharded(plain)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                sharded(ids, use_cache=False)
            with torch.no_grad():  # a length that stays whole works
                odd = make_batch(7)["input_ids"]
                actual, expected = (model(odd, use_cache=False).logits for model in (sharded, plain))
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    run_ranks(run, 2)


def assert_right_or_refused(compute: Callable[[nn.Module], Tensor], plain: nn.Module, sharded: nn.Module) -> None:
    try:
        actual = compute(sharded)
    except ValueError as error:
        refusal: str | None = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert refusal.startswith("sequence_parallel=True: ")
    else:
        torch.testing.assert_close(actual, compute(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [slice(0, 2), slice(1, 3), slice(0, 3, 2)], ids=["last", "first", "middle"])
def test_a_forward_that_leaves_out_a_layer_is_right_or_refused(layers: slice) -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = make_sharded(plain)
        sharded(make_batch()["input_ids"], use_cache=False)  # all of them
        for model in (plain, sharded):
            model.model.layers = model.model.layers[layers]
        for length in (12, 6):  # the latter is what a rank has of the former
            ids = make_batch(length)["input_ids"]
            assert_right_or_refused(lambda model, ids=ids: model(ids, use_cache=False).logits, plain, sharded)

    run_ranks(run, 2)


def test_a_region_that_is_given_several_hidden_states_is_right_or_refused() -> None:
    plan = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}

    def run() -> None:
        torch.manual_seed(0)
        plain = PlainTransformer()
        sharded = make_sharded(plain, plan=plan)
        # query, key and value of nn.MultiheadAttention
        assert_right_or_refused(lambda model: plain_loss(model, make_batch())[0], plain, sharded)

    run_ranks(run, 2)


class FlatBlock(nn.Module):
    """Its attention is code of its own, without a child for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + F.scaled_dot_product_attention(self.query(normed), self.key(normed), self.value(normed))
        return hidden + self.mlp(hidden)


class ResidualMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden)))


class ResidualBlock(nn.Module):
    """Its MLP adds the residual itself, to the hidden states that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), ResidualMLP()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(self.norm(hidden))


def make_plain(block: type[nn.Module]) -> PlainTransformer:
    model = PlainTransformer()
    model.blocks = nn.ModuleList(block() for _ in range(2))
    return model


def test_a_layer_with_an_attention_of_its_own_is_refused_by_name() -> None:
    def run() -> None:
        plan = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
        with pytest.raises(
            ValueError, match=r"blocks\.0\.query is a linear layer that the code of FlatBlock calls directly"
        ):
            make_sharded(make_plain(FlatBlock), plan=plan)

    run_ranks(run, 2)


def test_a_region_that_adds_whole_hidden_states_to_its_result_is_refused_and_right_for_parts_of_one_position() -> None:
    def run() -> None:
        plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
        plain = make_plain(ResidualBlock)
        sharded = make_sharded(plain, plan=plan)
        with pytest.raises(ValueError, match=r"blocks\.0\.mlp combines its scattered result with whole hidden states"):
            sharded(torch.ones(2, 8, dtype=torch.int64))
        ids = torch.tensor([[5, 7]])  # one position on each rank, which would broadcast
        for model in (plain, sharded):
            model(ids).square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)

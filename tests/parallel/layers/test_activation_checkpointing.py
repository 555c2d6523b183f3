"""Activation checkpointing: what is computed twice and what is kept, counted; gradients, against none of it."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.collectives import StepCounter
from helpers.dispatch import LiveBytes
from helpers.families import make_family_model
from helpers.models import GPT2, LLAMA, PlainTransformer, add_adapters, make_causal_lm
from helpers.oracle import assert_equal_gradients
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients, make_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, MambaConfig, MambaForCausalLM

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers import activation_checkpointing
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp2.parallel.layers.caches import CacheArguments
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel

MODES: tuple[Any, ...] = (True, "full", "selective")
LAYERS, HIDDEN, INTERMEDIATE, KEYS = 3, 32, 64, 16
BATCH, LENGTH = 2, 12
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def make_batch() -> dict[str, Tensor]:
    input_ids = torch.randint(3, 101, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_ids, "labels": input_ids}


def train(model: Any, **options: Any) -> dict[str, Tensor | None]:
    """Whole gradients of one step."""
    model.zero_grad()
    torch.manual_seed(2)
    model(**make_batch(), **options).loss.backward()
    return get_gradients(model)


def make_mesh_model(model: nn.Module, mode: Any, *, tp_size: int = 1, **options: Any) -> nn.Module:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), activation_checkpointing=mode, **options)
    return FSDP2Manager(config, create_device_mesh(config, tp_size=tp_size)).parallelize(model)


# ---------------------------------------------------------------------- what is computed twice


def count(mode: Any) -> tuple[Counter[str], int]:
    """Operations of a step in one process, and the FLOPs of its matrix products."""
    torch.manual_seed(0)
    model = make_causal_lm(LLAMA)
    if mode:
        apply_activation_checkpointing(find_structure(model), mode)
    with FlopCounterMode(display=False) as flops, StepCounter() as counter:
        train(model, use_cache=False)
    # torch 2.15 counts the attention of a CPU too
    return counter.operations, flops.get_flop_counts()["Global"][torch.ops.aten.mm]


@pytest.mark.guarantees("full-checkpointing")
def test_each_layer_is_computed_twice_as_far_as_backward_needs_it() -> None:
    plain, plain_flops = count(False)
    full, full_flops = count("full")
    assert count(True) == (full, full_flops)
    assert plain[ATTENTION] == LAYERS
    assert full[ATTENTION] == 2 * LAYERS
    # the layer's last product makes its output, which backward does not need
    assert full["aten::mm"] == plain["aten::mm"] + 6 * LAYERS
    weights = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 2 * HIDDEN * INTERMEDIATE
    assert full_flops == plain_flops + LAYERS * 2 * BATCH * LENGTH * weights


@pytest.mark.guarantees("selective-checkpointing")
def test_selective_keeps_attention_and_every_second_product() -> None:
    plain, plain_flops = count(False)
    selective, flops = count("selective")
    assert selective[ATTENTION] == LAYERS
    assert selective["aten::mm"] == plain["aten::mm"] + 3 * LAYERS
    weights = HIDDEN * KEYS + HIDDEN * HIDDEN + HIDDEN * INTERMEDIATE  # keys, output, up
    assert flops == plain_flops + LAYERS * 2 * BATCH * LENGTH * weights


class Attending(nn.Module):
    """A layer around an attention function."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.project = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attend(self.project(hidden)).relu()


@pytest.mark.parametrize("namespace", ["flash_attn", "flash_attn_3", "_flash_attn_9e27194_dirty"])
def test_selective_keeps_attention_of_the_flash_attention_packages(namespace: str) -> None:
    def run() -> int:
        calls = []

        @torch.library.custom_op(f"{namespace}::_flash_attn_forward", mutates_args=())
        def attend(hidden: Tensor) -> Tensor:
            calls.append(hidden)
            return hidden.clone()

        attend.register_autograd(lambda context, gradient: gradient)
        model = nn.Sequential(nn.ModuleList(Attending(attend) for _ in range(2)))
        apply_activation_checkpointing(find_structure(model), "selective")
        first, second = model[0]
        second(first(torch.ones(2, 4))).sum().backward()
        return len(calls)

    assert run_ranks(run, 1)[0] == 2  # layers


def test_selective_keeps_attention_of_documents_under_context_parallel() -> None:
    def run() -> int:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), activation_checkpointing="selective")
        mesh = create_device_mesh(config, cp_size=2)
        model: Any = FSDP2Manager(config, mesh).parallelize(make_causal_lm(LLAMA))
        documents = torch.arange(LENGTH // 2).repeat(BATCH, 2)
        with StepCounter() as counter:
            model(**make_batch(), position_ids=documents, use_cache=False).loss.backward()
        return counter.operations["lightning_fsdp2::segment_attention"]

    assert run_ranks(run, 2)[0] == 2 * LAYERS  # a rank has two chunks of the sequence


@pytest.mark.guarantees("selective-checkpointing")
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tp", "sp"])
def test_selective_repeats_no_collective_but_all_gathers(sequence_parallel: bool, mode: str) -> None:
    layers = 2

    def count_step(mode: Any) -> Counter[str]:
        plain = make_causal_lm({**LLAMA, "num_hidden_layers": layers})
        model = make_mesh_model(plain, mode, tp_size=2, sequence_parallel=sequence_parallel)
        with StepCounter() as counter:
            train(model, use_cache=False)
        return counter.collectives

    plain, repeated = run_ranks(lambda: (count_step(False), count_step(mode)), 2)[0]
    # attention gathers, or sums, what the MLP's part of backward starts from; the MLP's own result is not needed
    gathers = {"all_gather": 2 * layers} if sequence_parallel else {}
    sums = {"reduce_scatter": layers} if sequence_parallel else {"all_reduce": layers}
    assert repeated - plain == Counter(gathers if mode == "selective" else {**gathers, **sums})


def test_weights_are_gathered_as_often_as_without() -> None:
    def run() -> list[Counter[str]]:
        counts = []
        for mode in (False, "full", "selective"):
            model = make_mesh_model(make_causal_lm(LLAMA), mode)
            with StepCounter() as counter:
                train(model, use_cache=False)
            counts.append(counter.collectives)
        return counts

    plain, full, selective = run_ranks(run, 2)[0]
    assert plain == full == selective


@pytest.mark.guarantees("full-checkpointing")
def test_a_layer_keeps_its_input_alone_or_half_of_its_products() -> None:
    def measure(mode: Any, layers: int) -> int:
        model = make_causal_lm({**LLAMA, "num_hidden_layers": layers})
        if mode:
            apply_activation_checkpointing(find_structure(model), mode)
        with LiveBytes(model) as live:
            loss = model(**make_batch(), use_cache=False).loss
        assert loss.requires_grad
        return live.count()

    plain, full, selective = (measure(mode, 3) - measure(mode, 2) for mode in (False, "full", "selective"))
    tokens = 4 * BATCH * LENGTH
    assert full == tokens * HIDDEN
    kept = HIDDEN + KEYS + INTERMEDIATE  # products: queries, values, gate; backward does not read down's result
    attention = HIDDEN + 4  # its result, and a statistic of each of the four heads
    assert selective == full + tokens * (kept + attention)
    assert plain > 2 * selective


@pytest.mark.guarantees("selective-checkpointing")
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tp", "sp"])
def test_tensor_parallel_layers_keep_nothing_that_backward_does_not_read(sequence_parallel: bool) -> None:
    def run() -> int:
        def measure(layers: int) -> int:
            model = make_causal_lm({**LLAMA, "num_hidden_layers": layers})
            apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
            apply_activation_checkpointing(find_structure(model), "selective")
            train(model, use_cache=False)  # the plan is verified
            with LiveBytes(model) as live:
                loss = model(**make_batch(), use_cache=False).loss
            assert loss.requires_grad
            return live.count()

        return measure(4) - measure(3)

    tokens = 4 * BATCH * LENGTH
    part = 2 if sequence_parallel else 1
    hidden = HIDDEN // part  # the layer's input, and what the ranks' results of attention add up to
    products = (HIDDEN + KEYS + INTERMEDIATE) // 2
    attention = (HIDDEN + 4) // 2
    for kept in run_ranks(run, 2):
        assert kept == tokens * (2 * hidden + products + attention)


# ---------------------------------------------------------------------- gradients


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
}
CELLS = list(itertools.product(("llama", "gpt2", "gemma3n_text", "gpt_oss", "qwen3_moe", "qwen3_next"), LAYOUTS))
FAST = [("llama", "tp2+sp"), ("gpt2", "tp2"), ("qwen3_moe", "dp2")]


@pytest.mark.parametrize(
    ("family", "layout"), [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS]
)
def test_gradients_are_those_without(family: str, layout: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = make_family_model(family).train()
        for mode in ("full", "selective"):
            model = make_mesh_model(copy.deepcopy(plain), mode, **LAYOUTS[layout])
            # with the default use_cache=True, under which the layers would fill a cache twice
            assert_equal_gradients(train(model), train(plain, use_cache=False))

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_drops_the_same_elements_again(mode: Any) -> None:
    torch.manual_seed(0)
    plain = make_causal_lm({**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3})
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(find_structure(model), mode)
    actual, expected = train(model, use_cache=False), train(plain, use_cache=False)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_frozen_and_tied_weights_adapters_and_packed_sequences(mode: Any) -> None:
    torch.manual_seed(0)
    tied = make_causal_lm({**LLAMA, "tie_word_embeddings": True})
    tied.model.layers[0].requires_grad_(False)
    for plain in (tied, add_adapters(make_causal_lm(LLAMA), target_modules="all-linear")):
        model = copy.deepcopy(plain)
        apply_activation_checkpointing(find_structure(model), mode)
        position_ids = torch.arange(LENGTH).remainder(5).expand(BATCH, -1)
        actual, expected = (train(m, use_cache=False, position_ids=position_ids) for m in (model, plain))
        assert_equal_gradients(actual, expected)


def test_any_model_with_a_list_of_layers() -> None:
    torch.manual_seed(0)
    plain = PlainTransformer()
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(find_structure(model), "full")
    with StepCounter() as counter:
        model(make_batch()["input_ids"]).square().mean().backward()
    plain(make_batch()["input_ids"]).square().mean().backward()
    assert_equal_gradients(get_gradients(model), get_gradients(plain))
    assert counter.operations["aten::gelu"] == 2 * 3


# ---------------------------------------------------------------------- what stays as it is


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_names_modules_and_generation_stay_as_they_are(mode: Any) -> None:
    torch.manual_seed(0)
    plain = make_causal_lm(LLAMA)
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(find_structure(model), mode)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert all(isinstance(module, type(old)) for module, old in zip(model.modules(), plain.modules(), strict=True))
    ids = make_batch()["input_ids"][:, :4]
    generated = [m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (model, plain)]
    assert torch.equal(*generated)


def test_nothing_is_computed_twice_without_gradients() -> None:
    model = make_causal_lm(LLAMA)
    apply_activation_checkpointing(find_structure(model), "full")
    with StepCounter() as counter, torch.no_grad():
        model(**make_batch())
    assert counter.operations[ATTENTION] == LAYERS


def test_a_layer_is_computed_twice_if_any_of_its_weights_is_trained() -> None:
    model: Any = make_causal_lm(LLAMA)
    model.model.embed_tokens.requires_grad_(False)
    apply_activation_checkpointing(find_structure(model), "full")
    for frozen, expected in ((model.model.layers[0].mlp, 2 * LAYERS), (model.model.layers[0], 2 * LAYERS - 1)):
        frozen.requires_grad_(False)
        with StepCounter() as counter:
            train(model, use_cache=False)
        assert counter.operations[ATTENTION] == expected


def test_hooks_of_a_layer_run_once_unless_its_whole_call_has_to_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole call is repeated where torch could not compile the layer's collectives otherwise."""
    monkeypatch.setattr(activation_checkpointing, "can_compile_checkpointed_collectives", lambda: False)
    for options, expected in (({}, 1), ({"compiles_collectives": False}, 1), ({"compiles_collectives": True}, 2)):
        model: Any = make_causal_lm({**LLAMA, "num_hidden_layers": 1})
        calls: list[Any] = []
        model.model.layers[0].register_forward_pre_hook(lambda layer, inputs, calls=calls: calls.append(inputs))
        apply_activation_checkpointing(find_structure(model), "full", **options)
        train(model, use_cache=False)
        assert len(calls) == expected


# ---------------------------------------------------------------------- scope


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = PlainTransformer()
        self.audio_encoder = PlainTransformer()
        self.multi_modal_projector = nn.ModuleList([nn.Sequential(nn.Linear(101, 101), nn.Tanh())])
        self.text_model = PlainTransformer()

    def forward(self, ids: Tensor) -> Tensor:
        total = self.text_model(ids) + self.vision_tower(ids) + self.audio_encoder(ids)
        return self.multi_modal_projector[0](total)


@pytest.mark.parametrize(
    ("scope", "layers", "projectors"),
    [
        ("all", 9, 1),
        ("language", 3, 0),
        ("vision", 3, 0),
        (["vision", "audio"], 6, 0),
        ("multimodal", 0, 1),
    ],
    ids=str,
)
def test_the_scope_says_which_layers_are_computed_twice(scope: Any, layers: int, projectors: int) -> None:
    model = TwoTowers()
    apply_activation_checkpointing(find_structure(model), "full", scope=scope)
    with StepCounter() as counter:
        model(make_batch()["input_ids"]).square().mean().backward()
    assert counter.operations["aten::gelu"] == 9 + layers
    assert counter.operations["aten::tanh"] == 1 + projectors


# ---------------------------------------------------------------------- what is refused


def test_a_scope_without_layers_is_refused_with_those_there_are() -> None:
    message = (
        r"='full' with activation_checkpointing_scope=\['audio'\] applies to no layer: .* only has layers of language"
    )
    with pytest.raises(ValueError, match=message):
        apply_activation_checkpointing(find_structure(make_causal_lm(LLAMA)), "full", scope=["audio"])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing=True .* Linear has no list of layers"):
        apply_activation_checkpointing(find_structure(nn.Linear(2, 2)), True)


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    model: Any = make_causal_lm(LLAMA)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM already checkpoints its layers itself"):
        apply_activation_checkpointing(find_structure(model), "selective")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_states_of_a_recurrent_model_are_not_filled_twice_in_evaluation_mode(mode: str) -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=101, state_size=4)
    plain = MambaForCausalLM(config).eval()
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(find_structure(model), mode)
    assert_equal_gradients(train(model), train(plain))


def test_an_argument_named_as_a_cache_that_is_none_reaches_the_layer() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor, cache: Tensor, cache_params: Any = None) -> Tensor:
            assert isinstance(cache_params, dict)
            return super().forward(x) * cache

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, torch.full((8,), 3.0), cache_params={"decay": 0.5})
            return x

    plain = Model()
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(find_structure(model), "full")
    for each in (plain, model):
        each(torch.ones(2, 8)).sum().backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


class EarlierLayer(nn.Module):
    def forward(self, x: Tensor, past_key_values: Any = None, table: Any = None) -> Tensor:
        return x


class LaterLayer(nn.Module):
    def forward(self, x: Tensor, cache: Any = None, table: Any = None) -> Tensor:
        return x


@pytest.mark.parametrize(("layer", "name"), [(EarlierLayer(), "past_key_values"), (LaterLayer(), "cache")])
def test_caches_are_found_under_their_earlier_and_their_later_name(layer: nn.Module, name: str) -> None:
    """Layers of models from elsewhere keep the names of the transformers that they were written for."""
    caches, cache, table = CacheArguments(layer), DynamicCache(), torch.ones(2)
    assert caches.find((1, cache), {"table": table}) == caches.find((1,), {name: cache, "table": table}) == [cache]
    assert caches.drop((1, cache), {"table": table}) == ((1, None), {"table": table})
    assert caches.drop((1,), {name: cache}) == ((1,), {name: None})


def test_keys_and_values_from_before_are_refused() -> None:
    model = make_causal_lm(LLAMA)
    with torch.no_grad():
        cache = model(**make_batch()).past_key_values
    apply_activation_checkpointing(find_structure(model), "full")
    with pytest.raises(ValueError, match="activation_checkpointing with a filled cache"):
        model(**make_batch(), past_key_values=cache)


def test_the_scope_goes_by_the_model_s_own_names() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision_language_vit = make_causal_lm(LLAMA)

    apply_activation_checkpointing(find_structure(Holder()), "full", scope="language")
    with pytest.raises(ValueError, match="only has layers of language"):
        apply_activation_checkpointing(find_structure(Holder()), "full", scope="vision")

"""Compiled layers: graphs counted, names unchanged, gradients those of the same steps without compilation."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.compiler import needs_compiler
from helpers.cover import Matrix
from helpers.families import VARIED, get_families, make_family_model
from helpers.models import GPT2, LLAMA, PlainTransformer
from helpers.oracle import assert_equal_gradients
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients, make_rough_model
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Manager, create_device_mesh, token_mean_loss
from lightning_fsdp2.labels import shift_left
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.compile import apply_compile, is_compiled
from lightning_fsdp2.parallel.loss import cross_entropy
from lightning_fsdp2.parallel.loss.chunked import compute_chunked_token_losses
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
}
MODES = (False, "full", "selective")
LAYERS = 4
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_hidden_layers": LAYERS},
    "gpt2": {**GPT2, "n_layer": LAYERS},
}


pytestmark = pytest.mark.usefixtures("compile_without_code")


def make_batch(seed: int = 1, length: int = 12) -> dict[str, Tensor]:
    input_ids = torch.randint(3, 101, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": input_ids, "labels": input_ids, "use_cache": False}


def parallelize(model: nn.Module, *, tp_size: int = 1, cp_size: int = 1, **flags: Any) -> Any:
    config = FSDP2Config(**{"mp_policy": MixedPrecisionPolicy(), "enable_compile": True, **flags})
    return FSDP2Manager(config, create_device_mesh(config, tp_size=tp_size, cp_size=cp_size)).parallelize(model)


def compute_gradients(model: Any, seed: int, length: int = 12) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.manual_seed(seed)
    model(**make_batch(seed, length)).loss.backward()
    return get_gradients(model)


def count_graphs() -> int:
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


# ---------------------------------------------------------------------- graphs and gradients


def check_compiled_steps(kind: str, layout: dict[str, Any], mode: Any) -> list[int]:
    """Compare the gradients of four steps with those of a copy that is not compiled; graphs after each."""
    plain = make_rough_model(MODELS[kind])
    compiled = parallelize(copy.deepcopy(plain), activation_checkpointing=mode, **layout)
    plain = parallelize(plain, enable_compile=False, **layout)
    graphs = []
    for step in range(4):
        assert_equal_gradients(compute_gradients(compiled, step), compute_gradients(plain, step))
        graphs.append(count_graphs())
    return graphs


CELLS = {
    f"{kind}-{layout}-{mode}": {"model": kind, "layout": layout, "activation_checkpointing": mode}
    for kind, layout, mode in product(MODELS, LAYOUTS, MODES)
}
MATRIX = Matrix("compiled layers", CELLS)


@pytest.mark.guarantees("compiled-layers")
@pytest.mark.parametrize(
    ("kind", "layout", "mode"), MATRIX.list_parameters({name: tuple(cell.values()) for name, cell in CELLS.items()})
)
def test_all_layers_of_a_kind_share_a_graph_and_none_is_compiled_after_the_second_step(
    kind: str, layout: str, mode: Any
) -> None:
    first, *later = run_ranks(check_compiled_steps, 2, kind, LAYOUTS[layout], mode)[0]
    # the first step of a tensor parallel model is verified, and not compiled
    assert first == (1 if layout == "dp2" else 0)
    assert later == [later[0]] * 3
    if mode != "full":
        # under sequence parallelism the first layer splits the sequence and the last one gathers it
        assert later[0] == (3 if layout == "tp2+sp" else 1)


@pytest.mark.slow
def test_sequences_of_other_lengths_cost_one_more_graph() -> None:
    def run() -> list[int]:
        model = parallelize(make_rough_model(LLAMA))
        graphs = []
        for length in (12, 9, 7, 11):
            compute_gradients(model, 1, length)
            graphs.append(count_graphs())
        return graphs

    assert run_ranks(run, 1)[0] == [1, 2, 2, 2]


class Widened(nn.Module):
    """A block of its own class, which shares no graph with another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)


def test_layers_get_no_cache_of_their_own_place_with_gradients_and_generate_without_graphs() -> None:
    def run() -> list[int]:
        model = parallelize(make_rough_model({**LLAMA, "num_hidden_layers": 6}))
        batch = {**make_batch(), "use_cache": True}
        graphs = []
        for _ in range(2):
            model.eval().generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
            graphs.append(count_graphs())
            model.train()(**batch).loss.backward()
            graphs.append(count_graphs())
        return graphs

    assert run_ranks(run, 1)[0] == [0, 1, 1, 1]


def test_generate_goes_on_from_a_cache_as_without_compilation() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA).eval()
        compiled = parallelize(copy.deepcopy(plain))
        ids = make_batch()["input_ids"]
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(compiled.generate(ids, **options), plain.generate(ids, **options))
        # with gradients, as for the rewards of tokens generated so far
        with torch.no_grad():
            cache = plain(ids[:, :4]).past_key_values
        expected = plain(ids[:, 4:], past_key_values=copy.deepcopy(cache)).logits
        with patch("lightning_fsdp2.parallel.layers.compile.logger.warning") as warn:
            torch.testing.assert_close(compiled(ids[:, 4:], past_key_values=cache).logits, expected)
        (call,) = warn.call_args_list
        assert call.args[1:] == ("LlamaDecoderLayer", "a filled cache, `past_key_values` or `cache`")

    run_ranks(run, 1)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if mode else pytest.mark.release) for mode in MODES]
)
def test_many_lengths_under_sequence_parallelism(mode: Any) -> None:
    def run() -> None:
        plain = make_rough_model({**LLAMA, "num_hidden_layers": 2})  # one splits the sequence, one gathers it
        flags = {"tp_size": 2, "sequence_parallel": True, "activation_checkpointing": mode}
        compiled = parallelize(copy.deepcopy(plain), **flags)
        plain = parallelize(plain, **{**flags, "enable_compile": False})
        for length in (8, 12, 16, 8, 20):
            actual = compute_gradients(compiled, 1, length)
            assert_equal_gradients(actual, compute_gradients(plain, 1, length))

    run_ranks(run, 2, seconds=270)  # which takes 52


@pytest.mark.slow
def test_more_kinds_of_layers_than_dynamo_would_compile_by_itself() -> None:
    def run() -> int:
        model = PlainTransformer()
        model.blocks = nn.ModuleList(type(f"Block{i}", (Widened,), {})() for i in range(12))
        model = parallelize(model)
        for evaluates in (False, True):
            with torch.set_grad_enabled(not evaluates):
                model(torch.arange(6).view(1, 6))
        return count_graphs()

    assert run_ranks(run, 1)[0] == 24


@pytest.mark.parametrize("options", [None, {"post_grad_custom_post_pass": print}])
def test_options_of_a_fusion_reach_the_compiler(
    options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **others: given.append(others["options"]))
    fusion: Any = None if options is None else SimpleNamespace(options=options)
    apply_compile(find_structure(PlainTransformer()), fusion=fusion)
    assert given == [options] * 3


def test_modules_of_torch_itself_are_compiled_too() -> None:
    def run() -> int:
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
        plain = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        compiled = parallelize(copy.deepcopy(plain))
        plain = parallelize(plain, enable_compile=False)
        inputs = torch.randn(2, 5, 32, requires_grad=True)
        for _ in range(2):
            for model in (plain, compiled):
                model.zero_grad()
                model(inputs).square().sum().backward()
            assert_equal_gradients(get_gradients(compiled), get_gradients(plain))
        return count_graphs()

    assert run_ranks(run, 1)[0] == 1


BORDERS = [[], [20], [2, 10], [3, 11, 13], [1, 3, 7, 9, 17], [4, 21]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_documents_of_every_batch_share_a_graph_under_context_parallelism(method: str) -> None:
    length = 24

    def compute(model: Any, step: int) -> dict[str, Tensor | None]:
        starts, ends = [0, *BORDERS[step]], [*BORDERS[step], length]
        positions = torch.cat([torch.arange(end - start) for start, end in zip(starts, ends, strict=True)])
        model.zero_grad()
        model(**make_batch(step, length), position_ids=positions.expand(2, -1)).loss.backward()
        return get_gradients(model)

    def run() -> list[int]:
        plain = make_rough_model(LLAMA)
        flags = {"cp_size": 2, "context_parallel_method": method}
        compiled = parallelize(copy.deepcopy(plain), **flags)
        plain = parallelize(plain, enable_compile=False, **flags)
        graphs = []
        for step in range(len(BORDERS)):
            actual = compute(compiled, step)
            graphs.append(count_graphs())
            assert_equal_gradients(actual, compute(plain, step))
        return graphs

    graphs = run_ranks(run, 2)[0]
    # of no border, of one, and of any number from then on
    assert graphs[:3] == [1, 2, 3]
    assert graphs[-1] == 3


SOFTPLUS = {
    *("doge", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("qwen4_exp", "qwen4_exp_text"),
}
"""Families for which ``aot_eager`` fails: it takes the backward of softplus for one that keeps strides, which that of a
CPU does not. Inductor does not fail; the backend of their test has its formulas, which round otherwise."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name in VARIED else pytest.mark.release) for name in get_families()],
)
def test_every_family_compiles_with_the_gradients_of_one_that_does_not(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in SOFTPLUS:
        decomposing = partial(apply_compile, backend="aot_eager_decomp_partition")
        monkeypatch.setattr("lightning_fsdp2.recipes.fsdp2.apply_compile", decomposing)

    def run() -> int:
        plain = make_family_model(family)
        compiled = parallelize(copy.deepcopy(plain))
        plain = parallelize(plain, enable_compile=False)
        for step in range(2):
            assert_equal_gradients(compute_gradients(compiled, step), compute_gradients(plain, step))
        return counters["stats"]["unique_graphs"]

    assert run_ranks(run, 1)[0] > 0


@needs_compiler
@pytest.mark.slow
def test_generated_code_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fsdp2.recipes.fsdp2.apply_compile", apply_compile)

    def run() -> None:
        plain = make_rough_model(LLAMA)
        flags = {"tp_size": 2, "activation_checkpointing": "selective"}
        compiled = parallelize(copy.deepcopy(plain), **flags)
        plain = parallelize(plain, **{**flags, "enable_compile": False})
        for step in range(3):
            assert_equal_gradients(compute_gradients(compiled, step), compute_gradients(plain, step))
        assert count_graphs() == 1

    run_ranks(run, 2)


# ---------------------------------------------------------------------- the loss


def compute_losses(model: Any, length: int, *, is_chunked: bool) -> Tensor:
    batch = make_batch(1, length)
    labels = shift_left(batch["labels"])

    def compute_logits() -> Tensor:
        return model(input_ids=batch["input_ids"], use_cache=False).logits

    if is_chunked:
        return compute_chunked_token_losses(model, compute_logits, labels, tail=(), chunk_size=8)
    return token_cross_entropy(compute_logits(), labels, model=model)


ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}


def run_layers_without_graphs(model: nn.Module) -> None:
    """Leave the loss as the only part that is compiled: graphs of layers take longer, and have tests of their own."""
    for layer in find_structure(model).layers:
        layer._compiled_call_impl = None


def check_losses(lengths: tuple[int, ...], *, is_chunked: bool, **flags: Any) -> list[int]:
    """Compare losses and gradients with those of a model that is not compiled; graphs of the loss after each."""
    plain = make_rough_model(ONE_LAYER)
    compiled = parallelize(copy.deepcopy(plain), **flags)
    run_layers_without_graphs(compiled)
    plain = parallelize(plain, **{**flags, "enable_compile": False})
    graphs = []
    with watch_losses() as compiles:
        for length in lengths:
            results = []
            for model in (compiled, plain):
                model.zero_grad()
                losses = compute_losses(model, length, is_chunked=is_chunked)
                losses.sum().backward()
                results.append((losses.detach(), get_gradients(model)))
            torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
            assert_equal_gradients(results[0][1], results[1][1])
            graphs.append(len(compiles))
    return graphs


@contextmanager
def watch_losses() -> Iterator[list[Any]]:
    """Note each graph that is made of the loss."""
    graphs: list[Any] = []

    def compile_and_note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(cross_entropy._cross_entropy, backend=compile_and_note)
    with patch.object(cross_entropy, "_compile_cross_entropy", lambda backend: compiled):
        yield graphs


@pytest.mark.guarantees("compiled-losses")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loss_is_compiled_with_the_layers(ranks: int) -> None:
    def run() -> list[int]:
        flags = {"tp_size": ranks, "sequence_parallel": ranks > 1}
        return check_losses((12, 12), is_chunked=False, **flags)

    assert run_ranks(run, ranks)[0] == [1, 1]


def test_losses_of_other_lengths_cost_one_more_graph() -> None:
    assert run_ranks(lambda: check_losses((12, 9, 7, 11), is_chunked=False), 1)[0] == [1, 2, 2, 2]


def test_the_loss_of_chunks_is_compiled_with_gradients_and_without() -> None:
    # 24 positions are three chunks; of 18 the last one is smaller
    assert run_ranks(lambda: check_losses((12, 12, 9, 11), is_chunked=True), 1)[0] == [2, 2, 4, 4]


def test_losses_of_a_sharded_vocabulary_are_not_compiled() -> None:
    run = partial(check_losses, (12,), is_chunked=False, tp_size=2, loss_parallel=True)
    assert run_ranks(run, 2)[0] == [0]


def test_the_loss_of_a_model_that_is_not_compiled_is_not() -> None:
    def run() -> None:
        model = parallelize(make_rough_model(LLAMA), enable_compile=False)
        compute_losses(model, 12, is_chunked=False)
        assert count_graphs() == 0

    run_ranks(run, 1)


def test_a_causal_lm_and_the_token_mean_compile_their_loss() -> None:
    def run() -> list[int]:
        module = CausalLM(config=LLAMA)
        module.configure_model()
        parallelize(module)
        run_layers_without_graphs(module)
        graphs = []
        with watch_losses() as compiles:
            batch = {name: value for name, value in make_batch().items() if name != "use_cache"}
            module.training_step(batch, 0).backward()
            graphs.append(len(compiles))
            token_mean_loss(module, torch.zeros(2, 5, 7, requires_grad=True), torch.ones(2, 5, dtype=torch.int64))
            graphs.append(len(compiles))
        return graphs

    assert run_ranks(run, 1)[0] == [1, 2]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("is_chunked", [False, True])
def test_generated_code_computes_the_loss(is_chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fsdp2.recipes.fsdp2.apply_compile", apply_compile)
    monkeypatch.setattr(f"{__name__}.aot_eager", compile_fx)
    run_ranks(lambda: check_losses((12, 9), is_chunked=is_chunked), 1)


# ---------------------------------------------------------------------- names, doors, refusals


@pytest.mark.guarantees("compiled-layers")
def test_names_stay_and_state_dicts_load_either_way() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        compiled = parallelize(copy.deepcopy(plain))
        compute_gradients(compiled, 1)
        plain = parallelize(plain, enable_compile=False)
        assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert list(compiled.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(compiled.state_dict())
        compiled.load_state_dict(plain.state_dict())

    run_ranks(run, 1)


def test_a_model_that_was_sharded_without_is_compiled_later_and_only_once() -> None:
    def run() -> None:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), enable_compile=True)
        manager = FSDP2Manager(config, create_device_mesh(config))
        model = parallelize(make_rough_model(LLAMA), enable_compile=False)
        assert not is_compiled(find_structure(model))
        FSDP2Manager(FSDP2Config(), create_device_mesh(config)).maybe_compile(model)
        assert not is_compiled(find_structure(model))
        manager.maybe_compile(model)
        assert is_compiled(find_structure(model))
        calls = [layer._compiled_call_impl for layer in model.model.layers]
        manager.maybe_compile(model)
        assert [layer._compiled_call_impl for layer in model.model.layers] == calls
        compute_gradients(model, 1)
        assert count_graphs() == 1

    run_ranks(run, 1)


def test_layers_compiled_by_the_user_are_left_and_the_others_compiled() -> None:
    def run() -> None:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), enable_compile=True)
        model = parallelize(make_rough_model(LLAMA), enable_compile=False)
        first, *others = model.model.layers
        first.compile(backend="aot_eager")
        compiled = first._compiled_call_impl
        FSDP2Manager(config, create_device_mesh(config)).maybe_compile(model)
        assert first._compiled_call_impl is compiled
        assert all(layer._compiled_call_impl is not None for layer in others)

    run_ranks(run, 1)


def test_a_checkpoint_that_could_not_be_compiled_any_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fsdp2.parallel.layers.compile.can_compile_checkpointed_collectives", lambda: False)

    def run(mode: str) -> None:
        flags = {"activation_checkpointing": mode, "mp_policy": MixedPrecisionPolicy()}
        model = parallelize(make_rough_model(LLAMA), tp_size=2, **{**flags, "enable_compile": False})
        config = FSDP2Config(enable_compile=True, **flags)
        manager = FSDP2Manager(config, create_device_mesh(config, tp_size=2))
        if mode == "full":
            with pytest.raises(ValueError, match="Set both flags when you shard the model, or use activation_"):
                manager.maybe_compile(model)
        else:
            manager.maybe_compile(model)
            compute_gradients(model, 1)

    run_ranks(run, 2, "full")
    run_ranks(run, 2, "selective")


class Broken(Widened):
    """A block that dynamo cannot trace in one piece."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        torch._dynamo.graph_break()
        return hidden.tanh()


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode == "full" else pytest.mark.slow) for mode in MODES]
)
def test_what_dynamo_cannot_trace_is_said_once(mode: Any) -> None:
    def run(block: type[nn.Module]) -> list[str]:
        model = PlainTransformer()
        model.blocks = nn.ModuleList(block() for _ in range(3))
        model = parallelize(model, activation_checkpointing=mode)
        with patch("lightning_fsdp2.parallel.layers.compile.logger.warning") as warn:
            for _ in range(2):
                model(torch.arange(6).view(1, 6)).sum().backward()
        return [call.args[0] % call.args[1:] for call in warn.call_args_list]

    (message,) = run_ranks(run, 1, Broken)[0]
    assert message.startswith("enable_compile=True: torch.compile cannot trace all of Broken (")
    assert message.endswith("without compilation. Set TORCH_LOGS=graph_breaks to see which parts.")
    assert run_ranks(run, 1, Widened)[0] == []


def test_a_plan_with_wrong_gradients_is_refused_nevertheless_and_every_time() -> None:
    def run() -> None:
        attention = "model.layers.*.self_attn."
        plan = {f"{attention}q_proj": "colwise", f"{attention}o_proj": "rowwise"}
        model = parallelize(make_rough_model(LLAMA), tp_size=2, tp_plan=plan)
        ids = make_batch()["input_ids"]
        for call in (model, model, model.model):  # not by its entrance alone
            with pytest.raises(ValueError, match=r"tp_plan: in model\.layers\.0, a value that is equal on all ranks"):
                call(input_ids=ids, use_cache=False)

    run_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_frozen_layers_are_not_checkpointed(mode: str) -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        for part in (plain.model.embed_tokens, plain.model.layers[0]):
            part.requires_grad_(False)
        compiled = parallelize(copy.deepcopy(plain), activation_checkpointing=mode)
        plain = parallelize(plain, enable_compile=False)
        for step in range(2):
            assert_equal_gradients(compute_gradients(compiled, step), compute_gradients(plain, step))

    run_ranks(run, 1)


@pytest.mark.slow
def test_what_is_trained_later_is_verified_then() -> None:
    def run() -> list[int]:
        model = make_rough_model(LLAMA)
        model.model.layers[0].mlp.requires_grad_(False)
        model = parallelize(model, tp_size=2)
        graphs = []
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            compute_gradients(model, 1)
            graphs.append(count_graphs())
        return graphs

    first, second, third, _ = run_ranks(run, 2)[0]
    assert first == 0
    assert third == second > 0


def test_a_model_without_layers_and_dropout_on_shards_are_refused() -> None:
    def run() -> None:
        config = FSDP2Config(enable_compile=True)
        with pytest.raises(ValueError, match="enable_compile=True: Linear has no list of layers"):
            FSDP2Manager(config, create_device_mesh(config)).maybe_compile(nn.Linear(4, 4))
        with pytest.raises(ValueError, match="enable_compile=True: Linear has no list of layers"):
            parallelize(nn.Linear(4, 4))
        with pytest.raises(
            ValueError, match=r"tp_size > 1: GPT2Block has dropout or jitter.* Set dropout and jitter to 0, or"
        ):
            parallelize(make_rough_model({**GPT2, "resid_pdrop": 0.1}), tp_size=2)
        parallelize(make_rough_model({**GPT2, "resid_pdrop": 0.1}))

    run_ranks(run, 2)

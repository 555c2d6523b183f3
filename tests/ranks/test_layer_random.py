"""Dropout under tensor and sequence parallelism: against one process that drops the very same elements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.models import GPT2, VOCABULARY, add_adapters
from helpers.oracle import assert_equal_gradients, make_config
from helpers.ranks import run_ranks
from helpers.tensor_parallel import make_mesh, to_whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel
from lightning_fsdp2.ranks.layer_random import LayerRandom, draws_random_numbers
from lightning_fsdp2.ranks.random_state import share_random_state

PROBABILITY = 0.3
DROPOUT: dict[str, Any] = {**GPT2, "resid_pdrop": PROBABILITY, "embd_pdrop": PROBABILITY, "attn_pdrop": PROBABILITY}
LAYERS = GPT2["n_layer"]
CALLS = 1 + 3 * LAYERS
"""Of dropout in a forward: of the embeddings; then of attention, of its output and of the MLP's output, by layer."""

BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])


def make_model(config: dict[str, Any] = DROPOUT) -> Any:
    """Its eager attention drops with a function that can be watched."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(config), attn_implementation="eager").train()


def make_batch() -> dict[str, Tensor]:
    input_ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_ids, "labels": input_ids}


def train(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of one step, whole."""
    model.zero_grad()
    model(**make_batch(), use_cache=False).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: to_whole(gradient).clone() for name, gradient in gradients.items() if gradient is not None}


@contextmanager
def replace_dropout(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Let models call ``replacement(original, tensor, p)`` in training."""
    original = F.dropout

    def call(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return replacement(original, tensor, p) if training and p > 0 else tensor

    F.dropout = call
    try:
        yield
    finally:
        F.dropout = original


@contextmanager
def record_masks() -> Iterator[list[Tensor]]:
    """The elements that are kept, of each call."""
    masks: list[Tensor] = []

    def record(original: Callable[..., Tensor], tensor: Tensor, p: float) -> Tensor:
        mask = original(torch.ones_like(tensor), p) != 0
        masks.append(mask)
        return tensor * mask / (1 - p)

    with replace_dropout(record):
        yield masks


@contextmanager
def replay_masks(by_rank: list[list[Tensor]]) -> Iterator[None]:
    """Drop in one process what the ranks dropped: each its part of a tensor, or all of them the same."""
    calls = iter(zip(*by_rank, strict=True))

    def replay(original: Callable[..., Tensor], tensor: Tensor, p: float) -> Tensor:
        masks = next(calls)
        dims = [dim for dim in range(tensor.ndim) if masks[0].size(dim) != tensor.size(dim)]
        if dims:
            mask = torch.cat(masks, dims[0])
        else:
            assert torch.equal(*masks), "ranks drop different elements of the same tensor"
            mask = masks[0]
        assert mask.shape == tensor.shape
        return tensor * mask / (1 - p)

    with replace_dropout(replay):
        yield
    assert next(calls, None) is None


def gather_objects(value: Any) -> list[Any]:
    """Of all ranks, by torch alone."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_trains_alike(plain: nn.Module, model: nn.Module) -> list[Tensor]:
    """Let ``plain`` drop what the ranks dropped in ``model``; return this rank's masks."""
    with record_masks() as masks:
        actual = train(model)
    with replay_masks(gather_objects(masks)):
        expected = train(plain)
    assert_equal_gradients(actual, expected)
    return masks


@pytest.mark.guarantees("dropout-masks")
@BOTH
def test_gradients_are_those_of_one_process_that_drops_the_same_elements(sequence_parallel: bool) -> None:
    def run() -> list[Tensor]:
        plain, model = make_model(), make_model()
        apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
        masks = assert_trains_alike(plain, model)
        with record_masks() as next_masks:
            train(model)
        return masks + next_masks

    first, second = run_ranks(run, 2)
    assert len(first) == 2 * CALLS
    for call, (own, other) in enumerate(zip(first, second, strict=True)):
        kept = own.float().mean().item()
        assert abs(kept - (1 - PROBABILITY)) < 0.08, f"call {call} keeps {kept}"
        is_embedding, is_attention = call % CALLS == 0, call % CALLS % 3 == 1
        is_sharded = is_attention or (sequence_parallel and not is_embedding)
        assert torch.equal(own, other) != is_sharded, f"call {call} on two ranks"
        if is_attention:
            assert own.shape == (2, 2, 16, 16), "each rank has two of the four heads"
        elif not is_embedding:
            assert own.shape == (2, 8 if sequence_parallel else 16, 32)
    for masks in (first, second):
        for shape in {mask.shape for mask in masks}:
            equal = [mask for mask in masks if mask.shape == shape]
            assert all(not torch.equal(a, b) for i, a in enumerate(equal) for b in equal[:i]), "a mask is drawn twice"


@BOTH
def test_checkpointed_layers_drop_the_same_elements_again(sequence_parallel: bool) -> None:
    def run() -> None:
        model = make_model()
        apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
        torch.manual_seed(5)
        expected = train(model)
        other = train(model)  # other masks: the comparison below can fail
        with pytest.raises(AssertionError, match="off by"):
            assert_equal_gradients(other, expected)
        forwards: list[int] = []
        for layer in model.transformer.h:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            layer.ln_1.register_forward_hook(lambda *_: forwards.append(1))
        torch.manual_seed(5)
        actual = train(model)
        assert len(forwards) == 2 * LAYERS, "nothing was computed again"
        assert_equal_gradients(actual, expected)
        assert len({state.numpy().tobytes() for state in gather_objects(torch.get_rng_state())}) == 1

    run_ranks(run, 2)


@BOTH
def test_random_states_of_the_ranks_agree_after_each_forward_and_each_failure(sequence_parallel: bool) -> None:
    def run() -> list[bytes]:
        states = []

        def look() -> None:
            states.append(torch.get_rng_state().numpy().tobytes())

        torch.manual_seed(dist.get_rank())  # as processes start
        model = AutoModelForCausalLM.from_config(make_config(DROPOUT), attn_implementation="eager").train()
        apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
        look()
        train(model)
        look()
        handle = model.transformer.h[1].mlp.act.register_forward_hook(fail)  # where ranks draw different numbers
        with pytest.raises(KeyError, match="inside"):
            train(model)
        handle.remove()
        look()
        train(model)
        look()
        return states

    first, second = run_ranks(run, 2)
    assert first == second
    assert len(set(first)) == 4, "numbers are drawn"


def fail(*_: Any) -> None:
    raise KeyError("inside")


@BOTH
def test_nothing_is_drawn_in_evaluation_or_without_dropout(sequence_parallel: bool) -> None:
    def run() -> None:
        for config in (DROPOUT, GPT2):
            model = make_model(config)
            apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
            before = torch.get_rng_state()
            (model.eval() if config is DROPOUT else model)(**make_batch())
            assert torch.equal(torch.get_rng_state(), before)

    run_ranks(run, 2)


def make_adapted_model() -> Any:
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    model = make_model({**config, **heads})
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return add_adapters(model, target_modules=targets, lora_dropout=PROBABILITY)


@BOTH
def test_dropout_in_front_of_adapters(sequence_parallel: bool) -> None:
    def run() -> None:
        plain, model = make_adapted_model(), make_adapted_model()
        apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
        assert len(assert_trains_alike(plain, model)) == 8

    run_ranks(run, 2)


class DroppingLayer(MixtralDecoderLayer):
    """Drops what it is given, and what comes out of its mixture of experts."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.before, self.after = nn.Dropout(PROBABILITY), nn.Dropout(PROBABILITY)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return self.after(super().forward(self.before(hidden_states), **kwargs))


def make_mixture() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = make_model({"model_type": "mixtral", **sizes, **heads})
    model.model.layers = nn.ModuleList(DroppingLayer(model.config, index) for index in range(2))
    for parameter in model.model.layers.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@BOTH
def test_dropout_of_what_layers_hand_on(sequence_parallel: bool) -> None:
    def run() -> list[Tensor]:
        plain, model = make_mixture(), make_mixture()
        apply_tensor_parallel(find_structure(model), make_mesh(), sequence_parallel=sequence_parallel)
        masks = assert_trains_alike(plain, model)
        return masks

    first, second = run_ranks(run, 2)
    assert [torch.equal(own, other) for own, other in zip(first, second, strict=True)] == [not sequence_parallel] * 4


# ---------------------------------------------------------------------- the parts


def test_ranks_draw_different_numbers_between_begin_and_end_and_the_same_outside() -> None:
    def run() -> list[list[float]]:
        torch.manual_seed(3)
        layer = nn.Dropout(0.5).train()
        random = LayerRandom(layer, dist.group.WORLD, torch.device("cpu"))
        drawn = []
        for _ in range(2):
            random.begin_shards()
            drawn.append(torch.rand(()).item())
            random.begin_shards()  # again: nothing
            drawn.append(torch.rand(()).item())
            random.end_shards()
            random.end_shards()
            drawn.append(torch.rand(()).item())
        layer.eval()
        before = torch.get_rng_state()
        random.begin_shards()
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(torch.rand(()).item())
        random.end_shards()
        drawn.append(torch.rand(()).item())
        dist.barrier()
        return drawn

    first, second = run_ranks(run, 2)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, False, True] * 2 + [True, True]
    assert len({*first, *second}) == 4 * 2 + 2 + 2


def test_ranks_take_the_random_state_of_their_first_one() -> None:
    def run() -> float:
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        torch.manual_seed(rank)
        share_random_state(pairs[rank // 2], torch.device("cpu"))
        dist.barrier()
        return torch.rand(()).item()

    expected = [torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 0, 2, 2)]
    assert run_ranks(run, 4) == expected


def test_layers_that_draw_random_numbers_are_known_by_their_settings() -> None:
    def make_layer(**config: Any) -> nn.Module:
        return make_model({**GPT2, **config}).transformer.h[0]

    assert not draws_random_numbers(make_layer())
    for name in ("attn_pdrop", "resid_pdrop"):
        assert draws_random_numbers(make_layer(**{name: 0.1}))
    moe = {"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    for jitter in (0.0, 0.1):
        layer = make_model({**moe, **heads, "router_jitter_noise": jitter}).model.layers[0]
        assert draws_random_numbers(layer) == (jitter > 0)

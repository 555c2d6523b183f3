"""Chunked cross entropy: gradients against the full loss of one process, what exists at a time, what is gathered."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.collectives import StepCounter
from helpers.cover import Matrix
from helpers.families import get_families, make_family_config, make_family_model
from helpers.models import GPT2, LLAMA, VOCABULARY, add_adapters, make_causal_lm
from helpers.oracle import assert_equal_gradients, token_sum_loss
from helpers.ranks import raises_on_all_ranks, run_ranks
from helpers.tensor_parallel import describe, get_gradients, make_rough_model
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Model, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync
from lightning_fsdp2.labels import shift_left
from lightning_fsdp2.parallel.loss.chunked import compute_chunked_token_losses, trace_logits_tail
from lightning_fsdp2.parallel.loss.cross_entropy import token_cross_entropy

IS_BEFORE_5_24 = Version(transformers.__version__) < Version("5.24")

CHUNK = 7
"""Divides neither the positions of a batch nor those of a sequence."""

LLAMA_CONFIG = LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})


def make_capped(model_type: str, **fields: Any) -> nn.Module:
    """A family's model with a tail that matters."""
    config = make_family_config(model_type)
    config.update(fields)
    return AutoModelForCausalLM.from_config(config).float().train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(make_rough_model, LLAMA),
    "llama-tied": partial(make_rough_model, {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": partial(make_rough_model, GPT2),
    "gemma2": partial(make_capped, "gemma2", final_logit_softcapping=2.0),
    "granite": partial(make_capped, "granite", logits_scaling=0.3),
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp2+reshard+full": (2, {"reshard_after_forward": True, "activation_checkpointing": "full"}),
    "tp2": (2, {"tp_size": 2}),
    "tp2+sp+selective": (2, {"tp_size": 2, "sequence_parallel": True, "activation_checkpointing": "selective"}),
    "tp2+loss": (2, {"tp_size": 2, "loss_parallel": True}),
    "dp2xtp2+sp+loss": (4, {"tp_size": 2, "sequence_parallel": True, "loss_parallel": True}),
}


def make_batch(seed: int = 0, length: int = 12) -> dict[str, Tensor]:
    """Two sequences, in which some positions have no label."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    is_ignored = torch.rand(input_ids.shape, generator=generator) < 0.3
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(is_ignored, -100)}


def parallelize(
    model: nn.Module, *, tp_size: int = 1, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> nn.Module:
    config = FSDP2Config(mp_policy=mp_policy or MixedPrecisionPolicy(), **options)
    return FSDP2Manager(config, create_device_mesh(config, tp_size=tp_size)).parallelize(model, checks_batches=False)


def compute_logits(model: Any, batch: dict[str, Tensor], **inputs: Any) -> Tensor:
    return model(input_ids=batch["input_ids"], use_cache=False, **inputs).logits


def compute_chunked(model: nn.Module, batch: dict[str, Tensor], tail: Any, chunk_size: int = CHUNK) -> Tensor:
    forward = partial(compute_logits, model, batch)
    return compute_chunked_token_losses(model, forward, shift_left(batch["labels"]), tail=tail, chunk_size=chunk_size)


def compute_full(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_cross_entropy(compute_logits(model, batch), shift_left(batch["labels"]))


# ---------------------------------------------------------------------- numbers


CELLS = {
    f"{mesh}-{model}": {"data_parallel": ranks // options.get("tp_size", 1), **options, "model": model}
    for mesh, (ranks, options) in MESHES.items()
    for model in MODELS
}
MATRIX = Matrix(
    "chunked loss",
    CELLS,
    fast=("dp1-llama-tied", "dp2-granite", "dp2+reshard+full-llama", "tp2-gpt2", "tp2+loss-gemma2"),
    costs={name: MESHES[name.split("-")[0]][0] for name in CELLS},
)


@pytest.mark.guarantees("chunked-loss")
@pytest.mark.parametrize(
    ("mesh", "name"), MATRIX.list_parameters({cell: tuple(cell.split("-", maxsplit=1)) for cell in CELLS})
)
def test_losses_and_gradients_are_those_of_the_full_loss_in_one_process(mesh: str, name: str) -> None:
    ranks, options = MESHES[mesh]
    dp_size = ranks // options.get("tp_size", 1)

    def run() -> None:
        plain = MODELS[name]()
        model = copy.deepcopy(plain)
        tail = trace_logits_tail(model)
        model = parallelize(model, **options)
        dp_rank = dist.get_rank() // (ranks // dp_size)
        for micro_batch in range(2):
            batch = make_batch(2 * micro_batch + dp_rank)
            with defer_grad_sync(model) if micro_batch == 0 else nullcontext():
                losses = compute_chunked(model, batch, tail)
                losses.sum().backward()
            expected, _ = token_sum_loss(plain, batch)
            assert losses.shape == batch["labels"].shape
            assert losses.dtype == torch.float32
            assert abs(losses.sum().item() - expected.item()) <= 1e-5 * expected.item()
        sum(token_sum_loss(plain, make_batch(2 * m + r))[0] for m in range(2) for r in range(dp_size)).backward()
        reference = {key: gradient / dp_size for key, gradient in get_gradients(plain).items()}
        assert_equal_gradients(get_gradients(model), reference)

    run_ranks(run, ranks)


@pytest.mark.slow
def test_every_family_is_exact_or_refused() -> None:
    refused = []
    for family in get_families():
        torch.manual_seed(0)
        model = make_family_model(family).train()
        try:
            tail = trace_logits_tail(model)
        except ValueError:
            refused.append(family)
            continue
        batch = make_batch()
        compute_chunked(model, batch, tail).sum().backward()
        actual = {name: g if g is None else g.clone() for name, g in get_gradients(model).items()}
        model.zero_grad()
        token_sum_loss(model, batch)[0].backward()
        assert_equal_gradients(actual, get_gradients(model))
    # up to transformers 5.23, its forward drops a part of the logits
    assert refused == [name for name in get_families() if name == "inkling2_text" and IS_BEFORE_5_24]


def test_sums_over_many_chunks_are_no_worse_in_bfloat16_than_one_product() -> None:
    """bfloat16 sums of 128 chunks would more than double the error of the head's gradient."""
    batch = make_batch(length=256)
    chunk = 4

    def run() -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        plain = make_causal_lm({**LLAMA, "initializer_range": 0.1, "max_position_embeddings": 256})
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            model = copy.deepcopy(plain).to(dtype)
            token_sum_loss(model, batch)[0].backward()
            results.append(get_gradients(model))
        tail = trace_logits_tail(plain)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        model = parallelize(plain, mp_policy=policy)
        compute_chunked(model, batch, tail, chunk).sum().backward()
        return [*results, get_gradients(model)]

    exact, one_process, chunked = run_ranks(run, 1)[0]

    def measure_error(gradients: dict[str, Tensor], names: Any) -> float:
        return sum((gradients[name] - exact[name]).square().sum().item() for name in names) ** 0.5

    for names in (["lm_head.weight"], ["model.embed_tokens.weight"], list(exact)):
        assert measure_error(chunked, names) <= 1.25 * measure_error(one_process, names), names


def test_frozen_weights_adapters_on_the_head_dropout_and_layers_compiled_one_by_one() -> None:
    def train(model: nn.Module, losses: Callable[[], Tensor]) -> dict[str, Tensor | None]:
        model.zero_grad()
        torch.manual_seed(3)
        losses().sum().backward()
        return get_gradients(model)

    batch = make_batch()
    frozen = make_rough_model(LLAMA)
    frozen.lm_head.requires_grad_(False)
    linear_probe = make_rough_model(LLAMA)
    linear_probe.model.requires_grad_(False)
    compiled = make_rough_model(LLAMA)
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager")
    adapted = add_adapters(make_rough_model(LLAMA), target_modules=["lm_head", "q_proj"])
    for model in (frozen, linear_probe, compiled, adapted):
        tail = trace_logits_tail(model)
        expected = train(model, partial(compute_full, model, batch))
        expected = {name: g if g is None else g.clone() for name, g in expected.items()}
        assert_equal_gradients(train(model, partial(compute_chunked, model, batch, tail)), expected)
    # with one chunk the dropout of the adapters draws the same numbers in both, and must do so again in backward
    model = add_adapters(make_rough_model(LLAMA), target_modules=["lm_head"], lora_dropout=0.5)
    expected = train(model, partial(compute_full, model, batch))
    expected = {name: g if g is None else g.clone() for name, g in expected.items()}
    actual = train(model, partial(compute_chunked, model, batch, (), 24))
    assert_equal_gradients(actual, expected)


ADAPTED = {"target_modules": ["q_proj", "lm_head"]}
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("adapters", "mesh"),
    [
        (ADAPTED, "tp2"),
        (SAVED, "dp2+reshard+full"),
        pytest.param(ADAPTED, "dp2+reshard+full", marks=pytest.mark.slow),
        pytest.param(SAVED, "tp2", marks=pytest.mark.slow),
    ],
)
def test_adapters_on_a_sharded_head(adapters: dict[str, Any], mesh: str) -> None:
    ranks, options = MESHES[mesh]

    def run() -> None:
        plain = add_adapters(make_rough_model(LLAMA), **adapters)
        model = copy.deepcopy(plain)
        tail = trace_logits_tail(model)
        model = parallelize(model, **options)
        compute_chunked(model, make_batch(), tail).sum().backward()
        compute_full(plain, make_batch()).sum().backward()
        expected = get_gradients(plain)
        assert any(gradient is not None and "head" in name for name, gradient in expected.items())
        assert_equal_gradients(get_gradients(model), expected)

    run_ranks(run, ranks)


def test_parts_of_a_head_that_are_gathered_by_themselves_are_refused() -> None:
    def run() -> None:
        model = add_adapters(make_rough_model(LLAMA), target_modules=["lm_head"])
        tail = trace_logits_tail(model)
        head = model.get_output_embeddings()
        fully_shard(head.lora_A["default"])
        fully_shard(head)
        with pytest.raises(
            ValueError, match="FSDP2 gathers parts of its head separately, because they have another dtype"
        ):
            compute_chunked(model, make_batch(), tail)

    run_ranks(run, 1)


def test_a_model_that_is_sharded_by_hand() -> None:
    """Its own weights are freed after its forward, so that its output must call for them; so must the head's."""

    def run() -> None:
        plain = make_rough_model(LLAMA)
        model = copy.deepcopy(plain)
        tail = trace_logits_tail(model)
        root = nn.Sequential(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
        fully_shard(model, reshard_after_forward=True)
        fully_shard(root)
        losses = compute_chunked(model, make_batch(), tail)
        losses.sum().backward()
        compute_full(plain, make_batch()).sum().backward()
        assert losses.dtype == torch.float32
        assert_equal_gradients(get_gradients(model), get_gradients(plain))

    run_ranks(run, 2)


@pytest.mark.parametrize("is_cached", [False, True])
def test_autocast_is_repeated_in_backward(is_cached: bool) -> None:
    def train(model: nn.Module, *arguments: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            losses = (
                compute_chunked(model, make_batch(), *arguments) if arguments else compute_full(model, make_batch())
            )
        losses.sum().backward()
        return {name: gradient.clone() for name, gradient in get_gradients(model).items()}

    model = make_rough_model({**LLAMA, "num_hidden_layers": 1})
    chunked, one_chunk, full = train(model, (), 7), train(model, (), 24), train(model)
    for name, gradient in full.items():
        torch.testing.assert_close(one_chunk[name], gradient, rtol=0, atol=0)
        torch.testing.assert_close(chunked[name], gradient, rtol=0.05, atol=0.01 * gradient.abs().max().item())


def test_a_graph_that_is_kept_can_be_used_again() -> None:
    model = make_rough_model(LLAMA)
    loss = compute_chunked(model, make_batch(), trace_logits_tail(model)).sum()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_a_model_does_to_its_logits_in_place_is_not_done_to_the_losses() -> None:
    class Capped(LlamaForCausalLM):
        """As xLSTM, which caps its logits in place, part by part, where it is not trained."""

        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.logits = torch.tanh(output.logits) if self.training else output.logits.tanh_()
            return output

    torch.manual_seed(0)
    model = Capped(LLAMA_CONFIG)
    tail = trace_logits_tail(model.train())
    with torch.no_grad():
        actual = compute_chunked(model.eval(), make_batch(), tail)
        torch.testing.assert_close(actual, compute_full(model, make_batch()))


# ---------------------------------------------------------------------- what exists, what is sent


HIDDEN = 48


class LogitsElements(TorchDispatchMode):
    """Counts the elements of tensors that end in a dim of the vocabulary's size, but for the head's own gradients."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.largest = 0
        """Of one of them."""
        self.most = 0
        """Of all that were alive at one time."""
        self.alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.size,) and tensor.shape[:-1] != (HIDDEN,):
                self.largest = max(self.largest, tensor.numel())
                self.alive[StorageWeakRef(tensor.untyped_storage())] = tensor.numel()
        self.alive = {storage: count for storage, count in self.alive.items() if not storage.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.guarantees("chunked-loss")
@pytest.mark.parametrize("mesh", ["dp1", pytest.param("tp2", marks=pytest.mark.slow), "tp2+loss"])
def test_logits_exist_for_a_chunk_at_a_time(mesh: str) -> None:
    ranks, options = MESHES[mesh]
    size = VOCABULARY // 2 + 1 if mesh == "tp2+loss" else VOCABULARY
    chunk, positions = 8, 2 * 40

    def run() -> None:
        model = make_causal_lm({**LLAMA, "hidden_size": HIDDEN, "num_hidden_layers": 1})
        tail = trace_logits_tail(model)
        model = parallelize(model, **options)
        batch = make_batch(length=40)

        def measure(compute_losses: Callable[[], Tensor]) -> tuple[int, int]:
            with LogitsElements(size) as elements:
                losses = compute_losses().sum()
                if losses.requires_grad:
                    losses.backward()
            return elements.largest, elements.most

        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                largest, most = measure(partial(compute_chunked, model, batch, tail, chunk))
                full, _ = measure(partial(compute_full, model, batch))
            if dist.get_rank() == 0:
                assert full == positions * size
                assert largest == chunk * size
                assert most <= 5 * chunk * size, "chunks before the last are still there"

    run_ranks(run, ranks)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"reshard_after_forward": True},
        {"tp_size": 2},
        {"tp_size": 2, "loss_parallel": True},
    ],
    ids=str,
)
def test_nothing_is_gathered_more_often(options: dict[str, Any]) -> None:
    def run() -> list[Counter[str]]:
        counts = []
        for losses_of in (compute_full, compute_chunked):
            model = make_causal_lm(LLAMA)
            arguments = (trace_logits_tail(model),) if losses_of is compute_chunked else ()
            model = parallelize(model, **options)
            with StepCounter() as counter:
                losses_of(model, make_batch(), *arguments).sum().backward()
            counts.append(counter.collectives)
        return counts

    full, chunked = run_ranks(run, 2)[0]
    if "loss_parallel" in options:
        # each of the four chunks reduces its own hidden gradients, and its losses a second time
        assert chunked - full == Counter(all_reduce=(3 + 2 * 4 + 3 * 2))
        assert full["all_gather"] == chunked["all_gather"]
    elif "tp_size" in options:
        # of the logits, which the chunks' losses do not need whole
        assert (full["all_gather"], chunked["all_gather"]) == (1, 0)
    else:
        assert full["all_gather"] > 0
        assert chunked == full


# ---------------------------------------------------------------------- what stays as it is


def test_what_backward_has_used_is_freed_though_the_loss_lives_on() -> None:
    def compute_losses(model: nn.Module, batch: dict[str, Tensor], freed: list[Any]) -> Tensor:
        def compute() -> Tensor:
            return compute_logits(model, batch)

        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda module, args: freed.append(StorageWeakRef(args[0].untyped_storage()))
        )
        losses = compute_chunked_token_losses(
            model, compute, shift_left(batch["labels"]), tail=trace_logits_tail(model), chunk_size=CHUNK
        )
        hook.remove()
        return losses

    seen: list[Any] = []
    losses = compute_losses(make_rough_model(LLAMA), make_batch(), seen)
    assert not seen[-1].expired()
    losses.sum().backward()
    assert seen[-1].expired()
    assert losses.shape == (2, 12)


def test_nothing_stays_on_the_model() -> None:
    model = make_rough_model(LLAMA)
    before = describe(model)
    tail = trace_logits_tail(model)
    compute_chunked(model, make_batch(), tail)
    with pytest.raises(ValueError, match="its head got positions"):
        compute_chunked(model, {**make_batch(), "labels": make_batch(length=3)["labels"]}, tail)
    assert describe(model) == before
    assert "forward" not in vars(model.lm_head)
    assert compute_logits(model, make_batch()).shape == (2, 12, VOCABULARY)
    ids = make_batch()["input_ids"][:, :4]
    assert model.eval().generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 6)


def test_a_tail_can_be_copied_and_pickled() -> None:
    tail = trace_logits_tail(MODELS["gemma2"]())
    logits = torch.randn(3, 5)
    for other in (copy.deepcopy(tail), pickle.loads(pickle.dumps(tail))):
        assert len(other) == 3
        for ours, theirs in zip(tail, other, strict=True):
            assert torch.equal(ours(logits), theirs(logits))


def test_an_infinite_loss_stays_where_it_is() -> None:
    model, batch = make_rough_model(LLAMA), make_batch()
    model.lm_head.bias = nn.Parameter(torch.zeros(VOCABULARY))
    label = next(label for label in batch["labels"].flatten()[1:] if label >= 0)
    with torch.no_grad():
        model.lm_head.bias[label] = -torch.inf
        actual, expected = compute_chunked(model, batch, ()), compute_full(model, batch)
    assert 0 < expected.isinf().sum() < expected.numel()
    torch.testing.assert_close(actual, expected)


# ---------------------------------------------------------------------- what is refused


def make_tailed(change: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    class Tailed(LlamaForCausalLM):
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.logits = change(self, output.logits)
            return output

    return Tailed(LLAMA_CONFIG)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, logits: logits.softmax(-1), "applies 'softmax' to its logits"),
        (lambda model, logits: logits[..., :-1], "applies '__getitem__' to its logits"),
        (lambda model, logits: logits * torch.ones(VOCABULARY), "applies 'mul' to its logits"),
        (lambda model, logits: logits.mul_(2), "applies 'mul_' to its logits"),
        (lambda model, logits: model.lm_head(torch.zeros(1, 2, 32)), "not compute its logits with one call"),
        (lambda model, logits: torch.zeros(1, 2, VOCABULARY), "not compute its logits with one call"),
    ],
)
def test_what_chunks_cannot_repeat_is_refused(change: Any, reason: str) -> None:
    message = rf"loss='chunked' is not possible for Tailed: .*{reason}.*; use loss='full'"
    with pytest.raises(ValueError, match=message):
        trace_logits_tail(make_tailed(change))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not possible for GPT2Model: it declares no output head"):
        trace_logits_tail(GPT2Model(make_causal_lm(GPT2).config))


class DropsLogits(LlamaForCausalLM):
    """A model that drops a part of its logits, as Inkling 2 does up to transformers 5.23."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids, **kwargs)[0])[..., :90]
        return CausalLMOutputWithPast(logits=logits)


def test_a_model_that_drops_a_part_of_its_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not possible for DropsLogits: .*'__getitem__'"):
        trace_logits_tail(DropsLogits(make_causal_lm(LLAMA).config))


def test_a_hook_on_the_head_is_refused() -> None:
    model = make_rough_model(LLAMA)
    tail = trace_logits_tail(model)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits / 4)
    batch = make_batch()
    with pytest.raises(
        ValueError, match="a forward hook on its head would get losses instead of logits; use loss='full'"
    ):
        compute_chunked_token_losses(model, partial(compute_logits, model, batch), batch["labels"], tail=tail)


def test_positions_that_the_head_does_not_get_are_refused() -> None:
    model, batch = make_causal_lm(LLAMA), make_batch()
    for inputs in ({"logits_to_keep": 3}, {"logits_to_keep": torch.tensor([0, 1])}):
        forward = partial(compute_logits, model, batch, **inputs)
        with pytest.raises(ValueError, match=r"its head got positions of shape \(2, \d\), but labels of \(2, 12\)"):
            compute_chunked_token_losses(model, forward, batch["labels"], tail=())


def test_a_forward_without_the_head_is_refused() -> None:
    model, batch = make_causal_lm(LLAMA), make_batch()
    with pytest.raises(ValueError, match="it called its head 0 times"):
        compute_chunked_token_losses(model, lambda: torch.zeros(2, 12), batch["labels"], tail=())


def test_a_head_sharded_by_a_style_of_torch_is_refused() -> None:
    def run() -> None:
        model = make_causal_lm(LLAMA)
        mesh = create_device_mesh(tp_size=2)["tensor_parallel"]
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        compute_chunked(model, make_batch(), ())

    with raises_on_all_ranks(ValueError, match="its head is sharded by one of torch's styles"):
        run_ranks(run, 2)

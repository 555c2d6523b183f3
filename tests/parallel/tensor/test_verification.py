"""Plans with perfect logits and wrong gradients, which the first forward with gradients refuses."""

import copy
import gc
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.families import make_family_model
from helpers.oracle import assert_equal_gradients
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients, make_mesh
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_fsdp2 import Float8Config
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.float8 import apply_float8, choose_float8
from lightning_fsdp2.parallel.layers.float8_conversion import get_optional_conversion
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel, get_shard_shapes

BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])

ATTENTION: dict[str, Any] = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
}
MLP: dict[str, Any] = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
NORMS = {"model.layers.*.self_attn.*_norm": "replicated_with_grad_allreduce"}


class FunctionalMLP(nn.Module):
    """Reads the weights of its projections and does not call them."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        gate = F.silu(F.linear(hidden, self.gate_proj.weight))
        return F.linear(gate * F.linear(hidden, self.up_proj.weight), self.down_proj.weight)


def make_functional() -> Any:
    model: Any = make_family_model("llama")
    for layer in model.model.layers:
        layer.mlp = FunctionalMLP(layer.mlp)
    return model


def make(family: str) -> Callable[[], Any]:
    return lambda: make_family_model(family)


def without(plan: dict[str, Any], *names: str) -> dict[str, Any]:
    return {pattern: style for pattern, style in plan.items() if not pattern.endswith(names)}


WRONG: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "norms-of-heads": (
        make("qwen3"),
        ATTENTION,
        r"in model\.layers\.0, .* equal .* \(computed with self_attn\.[qk]_norm\.weight\) .* self_attn\.[qk]_proj"
        ".* Add an entry for .* 'replicated_with_grad_allreduce'",
    ),
    "norms-behind-the-rotation": (
        make("hunyuan_v1_moe"),
        ATTENTION,
        r"equal .* \(computed with self_attn\.(query|key)_layernorm\.weight\) .* self_attn\.[qk]_proj\.weight",
    ),
    "norms-of-all-heads": (
        make("olmo2"),
        ATTENTION,
        r"model\.layers\.0 failed with sharded parameters: .* Add an entry for this module \('rowwise', or ShardedNorm",
    ),
    "keys-and-values-of-all-heads": (
        make("llama"),
        without(ATTENTION, "k_proj", "v_proj"),
        r"equal .* \(computed with self_attn\.[kv]_proj\.weight\) is combined .* self_attn\.q_proj\.weight",
    ),
    "weights-that-are-read": (
        make_functional,
        MLP,
        r"equal .* \(computed with .*\) is combined .* \(computed with mlp\.(gate|up)_proj\.weight\)"
        ".* by reading a module's weight without calling the module",
    ),
    "a-sum-around-a-sum": (
        make("llama"),
        {**MLP, "model.layers.*.mlp": "all_reduce"},
        r"a value that differs between ranks \(computed with .*\) is used as if it were equal on all ranks",
    ),
    "a-gradient-summed-for-nothing": (
        make("llama"),
        {**MLP, "model.layers.*.self_attn.q_proj": "replicated_with_grad_allreduce"},
        r"differs between ranks \(computed with self_attn\.q_proj\.weight",
    ),
}


@pytest.mark.guarantees("plan-is-verified", "wrong-plan-is-refused")
@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        *((name, False) for name in WRONG),
        ("norms-of-all-heads", True),
        # under sequence parallelism the outer style of two takes the place of the inner one
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in WRONG
            if name not in ("norms-of-all-heads", "a-sum-around-a-sum")
        ),
    ],
)
def test_a_plan_with_wrong_gradients_is_refused_in_the_first_forward(name: str, sequence_parallel: bool) -> None:
    build, plan, message = WRONG[name]

    def run() -> None:
        torch.manual_seed(0)
        model = build()
        apply_tensor_parallel(find_structure(model), make_mesh(), plan=plan, sequence_parallel=sequence_parallel)
        with pytest.raises(ValueError, match="tp_plan: .*" + message):
            model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)

    run_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_products_in_float8_hide_no_mistake(name: str) -> None:
    build, plan, message = WRONG[name]

    def run() -> None:
        torch.manual_seed(0)
        structure = find_structure(build())
        config = Float8Config(recipe="tensorwise", emulate=True)
        apply_float8(structure, choose_float8(structure, config, None, get_shard_shapes(structure, 2, plan)))
        assert get_optional_conversion(structure.root).converted
        apply_tensor_parallel(structure, make_mesh(), plan=plan)
        with pytest.raises(ValueError, match="tp_plan: .*" + message):
            structure.root(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)

    run_ranks(run, 2)


def assert_same_gradients(plain: Any, sharded: Any) -> None:
    ids = torch.randint(3, 101, (2, 8), generator=torch.Generator().manual_seed(1))
    for model in (plain, sharded):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert_equal_gradients(get_gradients(sharded), get_gradients(plain))


@pytest.mark.guarantees("wrong-plan-is-refused", "head-norms")
@BOTH
def test_what_is_missing_can_be_added(sequence_parallel: bool) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = make_family_model("qwen3")
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(
            find_structure(sharded), make_mesh(), plan={**ATTENTION, **NORMS}, sequence_parallel=sequence_parallel
        )
        assert_same_gradients(plain, sharded)

    run_ranks(run, 2)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_layers_are_verified_too(use_reentrant: bool) -> None:
    def run() -> None:
        model: Any = make_family_model("qwen3").train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        apply_tensor_parallel(find_structure(model), make_mesh(), plan=ATTENTION)
        ids = torch.ones(1, 4, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"tp_plan: .* equal .* \(computed with self_attn\.[qk]_norm\.weight"):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    run_ranks(run, 2)


def test_a_forward_without_gradients_verifies_nothing_and_the_next_one_does() -> None:
    def run() -> None:
        model = make_family_model("qwen3")
        apply_tensor_parallel(find_structure(model), make_mesh(), plan=ATTENTION)
        ids = torch.ones(1, 4, dtype=torch.int64)
        with torch.no_grad():
            model(input_ids=ids)
            model(inputs_embeds=torch.ones(1, 4, 32, requires_grad=True))  # of a leaf there is no graph to follow
        with pytest.raises(ValueError, match="tp_plan: "):
            model(input_ids=ids)
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)  # no gradient goes through the layers
        model(input_ids=ids, labels=ids).loss.backward()

    run_ranks(run, 2)


@pytest.mark.guarantees("plan-is-verified")
def test_each_layer_is_followed_once_and_a_layer_that_comes_later_too() -> None:
    def run() -> None:
        model: Any = make_family_model("qwen3")
        wrong = {**ATTENTION, **NORMS, "model.layers.1.self_attn.k_norm": "replicate"}
        apply_tensor_parallel(find_structure(model), make_mesh(), plan=wrong)
        model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
        for _ in range(2):
            with pytest.raises(ValueError, match=r"in model\.layers\.1, .* self_attn\.k_norm\.weight"):
                model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)

    run_ranks(run, 2)


def test_a_layer_is_verified_again_when_other_parameters_are_trained() -> None:
    def run() -> None:
        model: Any = make_family_model("qwen3")
        apply_tensor_parallel(find_structure(model), make_mesh(), plan=ATTENTION)
        norms = [module for name, module in model.named_modules() if name.endswith(("q_norm", "k_norm"))]
        for norm in norms:
            norm.requires_grad_(False)
        ids = torch.ones(1, 4, dtype=torch.int64)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for norm in norms:
            norm.requires_grad_(True)
        with pytest.raises(ValueError, match=r"equal .* \(computed with self_attn\.[qk]_norm\.weight"):
            model(input_ids=ids, labels=ids, use_cache=False)

    run_ranks(run, 2)


class Token:
    """Something to have a weak reference to."""


class Tagged(torch.autograd.Function):
    """Keeps a token in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def test_no_graph_is_kept_alive() -> None:
    def run() -> None:
        model: Any = make_family_model("llama")
        apply_tensor_parallel(find_structure(model), make_mesh())
        tokens = [Token()]
        alive = weakref.ref(tokens[0])
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *args: Tagged.apply(args[-1], tokens[0]))
        ids = torch.ones(1, 4, dtype=torch.int64)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        handle.remove()
        tokens.clear()
        assert alive() is not None
        gc.disable()
        del loss
        deadline = time.monotonic() + 10
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread of gloo lets go of what it has sent a moment after the collective's end
        assert alive() is None

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what is right, and is let through


def compile_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager")


def watch_backward(model: Any) -> None:
    for module in model.modules():
        module.register_full_backward_hook(lambda module, *_: None)


def checkpoint_reentrantly(model: Any) -> None:
    model.train().gradient_checkpointing_enable({"use_reentrant": True})


RIGHT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "compiled-modules": ("llama", compile_mlp),
    "backward-hooks-everywhere": ("gpt_oss", watch_backward),
    "reentrant-checkpointing": ("gemma3_text", checkpoint_reentrantly),
}


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        pytest.param("compiled-modules", True, marks=pytest.mark.slow),
        ("backward-hooks-everywhere", True),
        ("reentrant-checkpointing", True),
        pytest.param("compiled-modules", False, marks=pytest.mark.slow),
        pytest.param("backward-hooks-everywhere", False, marks=pytest.mark.slow),
        pytest.param("reentrant-checkpointing", False, marks=pytest.mark.slow),
    ],
)
def test_a_right_plan_is_let_through_whatever_surrounds_it(name: str, sequence_parallel: bool) -> None:
    family, change = RIGHT[name]

    def run() -> None:
        torch.manual_seed(0)
        plain = make_family_model(family)
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=sequence_parallel)
        change(sharded)
        assert_same_gradients(plain, sharded)

    run_ranks(run, 2)


class Layer(nn.Module):
    """Takes the stream by ``take`` and returns it by ``give``."""

    def __init__(self, take: Callable[..., Tensor], give: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.take, self.give = take, give

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.take(*args, **kwargs)
        return self.give(hidden + self.down(F.gelu(self.up(hidden))))


class Model(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], layer: Callable[[], Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.call = call

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.call(layer, hidden)
        return hidden


def identity(value: Any) -> Any:
    return value


STATE: list[Tensor] = []


def call_without_arguments(layer: nn.Module, hidden: Tensor) -> Tensor:
    STATE[:] = [hidden]
    return layer()


SHAPES: dict[str, Callable[[], Model]] = {
    "dicts": lambda: Model(
        lambda layer, hidden: layer({"hidden": hidden})["hidden"],
        lambda: Layer(lambda state: state["hidden"], lambda hidden: {"hidden": hidden}),
    ),
    "lists": lambda: Model(
        lambda layer, hidden: layer([hidden])[0], lambda: Layer(lambda state: state[0], lambda hidden: [hidden])
    ),
    "objects": lambda: Model(
        lambda layer, hidden: layer(SimpleNamespace(hidden=hidden)).hidden,
        lambda: Layer(lambda state: state.hidden, lambda hidden: SimpleNamespace(hidden=hidden)),
    ),
    "no-arguments": lambda: Model(call_without_arguments, lambda: Layer(lambda: STATE[0], identity)),
    "keywords": lambda: Model(
        lambda layer, hidden: layer(hidden=hidden), lambda: Layer(lambda hidden: hidden, identity)
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_may_take_and_return_anything(shape: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = SHAPES[shape]()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(
            find_structure(sharded), make_mesh(), plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        )
        hidden = torch.randn(2, 4, 6)
        for model in (plain, sharded):
            model(hidden).square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)


def test_a_loss_that_a_layer_returns_beside_its_result_must_be_whole() -> None:
    class WithLoss(Layer):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            inner = F.gelu(self.up(hidden))
            return hidden + self.down(inner), inner.square().mean()

    def run() -> None:
        model = Model(lambda layer, hidden: layer(hidden)[0], lambda: WithLoss(identity, identity))
        apply_tensor_parallel(
            find_structure(model), make_mesh(), plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        )
        with pytest.raises(ValueError, match=r"tp_plan: layers\.0 returns a value that differs .* \(computed with up"):
            model(torch.randn(2, 4, 6))

    run_ranks(run, 2)


def test_a_user_s_mistake_is_not_put_down_to_the_plan_of_a_family() -> None:
    def run() -> None:
        model = make_family_model("llama")
        apply_tensor_parallel(find_structure(model), make_mesh())
        mask = torch.ones(1, 1, 4, 5, dtype=torch.bool)
        with pytest.raises(RuntimeError):
            model(input_ids=torch.ones(1, 4, dtype=torch.int64), attention_mask=mask)

    run_ranks(run, 2)


class SumForward(torch.autograd.Function):
    """Megatron's g, by a user."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SumBackward(torch.autograd.Function):
    """Megatron's f, by a user."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Megatron(ParallelStyle):
    """Shards a linear layer along ``dim`` and computes with local tensors."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        placements = [Shard(self.dim)]
        module.weight = nn.Parameter(distribute_tensor(module.weight.data, device_mesh, placements))
        is_up = self.dim == 0
        bias = distribute_tensor(module.bias.data, device_mesh, [Shard(0) if is_up else Replicate()])
        module.bias = nn.Parameter(bias)

        def forward(hidden: Tensor) -> Tensor:
            if is_up:
                return F.linear(SumBackward.apply(hidden), module.weight.to_local(), module.bias.to_local())
            return SumForward.apply(F.linear(hidden, module.weight.to_local())) + module.bias.to_local()

        module.forward = forward
        return module


def test_a_style_of_one_s_own_with_collectives_of_its_own() -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = Model(lambda layer, hidden: layer(hidden), lambda: Layer(identity, identity))
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(
            find_structure(sharded), make_mesh(), plan={"layers.*.up": Megatron(0), "layers.*.down": Megatron(1)}
        )
        hidden = torch.randn(2, 4, 6)
        for model in (plain, sharded):
            model(hidden).square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- styles of torch


TORCH: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
FOREIGN: dict[str, Any] = {
    **without(TORCH, "lm_head"),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(use_local_output=False),
    "model.layers.*.mlp.up_proj": ColwiseParallel(use_local_output=False),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


@pytest.mark.parametrize("plan", [TORCH, FOREIGN], ids=["plain-layouts", "other-layouts"])
def test_styles_of_torch_are_verified_and_can_be_completed(plan: dict[str, Any]) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = make_family_model("qwen3")
        wrong, right = copy.deepcopy(plain), copy.deepcopy(plain)
        mesh = make_mesh()
        apply_tensor_parallel(find_structure(wrong), mesh, plan=plan)
        with pytest.raises(ValueError, match=r"tp_plan: .* equal .* \(computed with self_attn\.[qk]_norm\.weight"):
            wrong(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False)
        apply_tensor_parallel(find_structure(right), mesh, plan={**plan, **NORMS})
        assert_same_gradients(plain, right)

    run_ranks(run, 2)


def test_sharded_logits_in_the_words_of_torch_keep_weights_tied() -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain: Any = make_family_model("llama")
        plain.config.tie_word_embeddings = True
        plain.lm_head.weight = plain.model.embed_tokens.weight
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), plan=TORCH)
        assert sharded.lm_head.weight is sharded.model.embed_tokens.weight
        logits = sharded(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits
        assert logits.placements == (Shard(2),)
        assert_same_gradients(plain, sharded)

    run_ranks(run, 2)

"""Mixtures whose experts are distributed over ranks train as in one process, whatever computes the experts."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import ranks, vision_parity
from helpers.collectives import StepCounter
from helpers.families import make_family_model
from helpers.family_parity import measure_parity
from helpers.oracle import assert_equal_gradients, whole
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.compat.torch import is_in_backward
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.data import fully_shard
from lightning_fsdp2.parallel.expert import apply as expert_parallel
from lightning_fsdp2.parallel.expert.checks import check_experts
from lightning_fsdp2.parallel.expert.dispatch import AllToAll

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")

SAMPLE = {
    "ep2": "deepseek_v3",  # a bias of the router, a shared expert
    "ep4": "nemotron_h",  # experts without gate
}
"""A family for each of some layouts. `make parity` compares all families on all layouts."""


@pytest.mark.slow
@pytest.mark.guarantees("expert-parallel-families")
@pytest.mark.parametrize("layout", SAMPLE)
def test_a_family_trains_as_in_one_process(layout: str) -> None:
    assert measure_parity(SAMPLE[layout], layout) < 1e-5


def make_mixture(family: str = "mixtral", implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    model: Any = make_family_model(family)
    model.set_experts_implementation(implementation)
    return model.train()


def parallelize(model: nn.Module, **sizes: Any) -> Any:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), sequence_parallel=sizes.get("tp_size", 1) > 1)
    return FSDP2Manager(config, create_device_mesh(config, **sizes)).parallelize(model)


def make_tokens(model: Any, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (4, 8), generator=generator)


def compute_gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def compare_with_one_process(model: Any, **sizes: Any) -> None:
    reference = copy.deepcopy(model)
    tokens = make_tokens(model)
    sharded = parallelize(model, **sizes)
    readers = dist.get_world_size() // sizes.get("tp_size", 1)
    own = tokens.chunk(readers)[dist.get_rank() // sizes.get("tp_size", 1)]
    assert_equal_gradients(compute_gradients(sharded, own), compute_gradients(reference, tokens))


def route_to_first_experts(model: Any) -> None:
    """Send every token to the first two experts, so that a rank with other experts gets none."""

    def route(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, indices, weights = args
        return hidden, torch.arange(indices.size(-1)).expand_as(indices).clone(), weights

    for experts in find_experts(model.modules()):
        # first of all, so that the ranks that send tokens see it too
        experts.register_forward_pre_hook(route, prepend=True)


@pytest.mark.guarantees("own-expert-forward")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_every_implementation_of_experts_works(family: str) -> None:
    def run() -> None:
        for implementation in IMPLEMENTATIONS:
            compare_with_one_process(make_mixture(family, implementation), ep_size=2)

    run_ranks(run, 2)


@pytest.mark.guarantees("no-tokens")
@pytest.mark.parametrize(
    ("sizes", "implementations"),
    [
        ({"ep_size": 2}, ["eager"]),
        *(
            pytest.param(sizes, IMPLEMENTATIONS, marks=pytest.mark.slow)
            for sizes in ({"ep_size": 2}, {"ep_size": 4}, {"ep_size": 2, "tp_size": 2})
        ),
    ],
    ids=str,
)
def test_ranks_without_tokens_take_part(sizes: dict[str, int], implementations: Sequence[str]) -> None:
    def run() -> None:
        for implementation in implementations:
            model = make_mixture(implementation=implementation)
            route_to_first_experts(model)
            compare_with_one_process(model, **sizes)

    run_ranks(run, 4)


# ---------------------------------------------------------------------- what each safeguard is for


def leave_out_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fully_shard, "_set_gradient_divisor", lambda *_: None)


def leave_out_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_: None)


def sum_always(monkeypatch: pytest.MonkeyPatch) -> None:
    set_divisor: Callable[..., None] = fully_shard._set_gradient_divisor
    monkeypatch.setattr(fully_shard, "_set_gradient_divisor", lambda module, n, ranks: set_divisor(module, n, 2))


def leave_out_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_rows(forward: Any, rows: Tensor, experts: Tensor) -> Tensor:
        return forward(rows, experts.unsqueeze(-1), torch.ones(len(rows), 1))

    monkeypatch.setattr(expert_parallel, "compute_rows", compute_rows)


@pytest.mark.guarantees("safeguards-of-experts")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave_out", "sizes", "message"),
    [
        (leave_out_divisor, {"ep_size": 4}, "gradient of"),
        (leave_out_divisor, {"ep_size": 2}, "gradient of"),
        (leave_out_sum, {"ep_size": 2}, "PREMUL_SUM"),
        (sum_always, {"ep_size": 4}, "gradient of"),
        (leave_out_dummy, {"ep_size": 2}, "(?i)time"),
    ],
    ids=["divisor", "divisor of shards", "sum of shards", "sum of one shard", "row of an empty rank"],
)
def test_gradients_are_wrong_without(
    leave_out: Callable[[Any], None], sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch)
    monkeypatch.setattr(ranks, "GROUP_TIMEOUT", timedelta(seconds=5))  # without the row, the ranks wait for each other

    def run() -> None:
        model = make_mixture()
        if leave_out is leave_out_dummy:
            route_to_first_experts(model)
        compare_with_one_process(model, **sizes)

    with pytest.raises(RankError, match=message):
        run_ranks(run, 4)


def test_routing_weights_keep_the_dtype_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()
    combine = AllToAll.combine

    def record(self: AllToAll, results: Tensor, weights: Tensor, handle: Any) -> Tensor:
        dtypes.add(weights.dtype)
        return combine(self, results, weights, handle)

    monkeypatch.setattr(AllToAll, "combine", record)

    def run() -> set[torch.dtype]:
        model = make_mixture("deepseek_v3")
        tokens = make_tokens(model)
        config = FSDP2Config()  # computes in bfloat16
        FSDP2Manager(config, create_device_mesh(config, ep_size=2)).parallelize(model)(input_ids=tokens)
        return dtypes

    assert run_ranks(run, 2) == [{torch.float32}] * 2


@pytest.mark.slow
def test_a_mesh_of_experts_from_elsewhere_has_the_gradients_of_one_process() -> None:
    def run() -> None:
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
        for shape in ((1, 2, 2), (2, 1, 2), (1, 1, 4)):
            model = make_mixture()
            reference, tokens = copy.deepcopy(model), make_tokens(model)
            moe_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "ep_shard", "ep"))
            mesh = create_device_mesh(config, dp_replicate_size=shape[0])
            sharded = FSDP2Manager(config, mesh, moe_mesh=moe_mesh).parallelize(model)
            own = compute_gradients(sharded, tokens.chunk(4)[dist.get_rank()])
            assert_equal_gradients(own, compute_gradients(reference, tokens))

    run_ranks(run, 4)


class CountingDispatcher(AllToAll):
    """An exchange of a user's own."""

    calls = 0

    def dispatch(self, hidden: Tensor, indices: Tensor) -> Any:
        CountingDispatcher.calls += 1
        return super().dispatch(hidden, indices)


def test_another_dispatcher_takes_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = partial(expert_parallel.apply_expert_parallel, build_dispatcher=CountingDispatcher)
    monkeypatch.setattr("lightning_fsdp2.recipes.fsdp2.apply_expert_parallel", apply)

    def run() -> None:
        model = make_mixture()
        layers = len(find_experts(model.modules()))
        compare_with_one_process(model, ep_size=2)
        assert CountingDispatcher.calls == layers

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what a step sends and a rank holds


@contextmanager
def count_lists() -> Iterator[list[int]]:
    """Count the tensors that the host reads as a list. ``StepCounter`` counts the ones that it reads otherwise."""
    count = [0]

    def tolist(tensor: Tensor) -> Any:
        count[0] += 1
        return torch._C.TensorBase.tolist(tensor)

    with patch.object(Tensor, "tolist", tolist):
        yield count


def count_step(
    checkpointing: bool | str = False, *, compiles: bool = False, **sizes: int
) -> tuple[dict[str, int], int, int]:
    """Return the collectives of a step by kind, the number of mixture layers, and the waits of the host."""
    model = make_mixture(implementation="grouped_mm")  # the others read routing on the host
    layers = len(find_experts(model.modules()))
    config = FSDP2Config(
        mp_policy=MixedPrecisionPolicy(), activation_checkpointing=checkpointing, enable_compile=compiles
    )
    sharded: Any = FSDP2Manager(config, create_device_mesh(config, **sizes)).parallelize(model)
    tokens = make_tokens(model)[:1]
    compute_gradients(sharded, tokens)  # the first forward also sets FSDP2 up
    with StepCounter() as counter, count_lists() as lists:
        sharded(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return dict(counter.collectives), layers, counter.host_syncs + lists[0]


@pytest.mark.guarantees("exchanges", "recomputed-exchanges")
@pytest.mark.parametrize(
    ("checkpointing", "compiles", "exchanges"),
    [
        (False, False, 1 + 4),
        pytest.param("full", False, 1 + 6, marks=pytest.mark.slow),
        pytest.param("selective", False, 1 + 4, marks=pytest.mark.slow),
        pytest.param("full", True, 1 + 6, marks=pytest.mark.slow),
        pytest.param("selective", True, 1 + 4, marks=pytest.mark.release),
        pytest.param(False, True, 1 + 4, marks=pytest.mark.release),
    ],
)
def test_a_layer_exchanges_rows_twice_each_way_and_waits_once(
    checkpointing: bool | str, compiles: bool, exchanges: int, compile_without_code: None
) -> None:
    count = partial(count_step, checkpointing, compiles=compiles)
    _, _, other_waits = run_ranks(lambda: count(ep_size=1), 2)[0]
    for collectives, layers, waits in run_ranks(lambda: count(ep_size=2), 2):
        assert collectives["all_to_all"] == exchanges * layers
        assert waits - other_waits == layers


@pytest.mark.guarantees("recomputed-exchanges")
@pytest.mark.parametrize("checkpointing", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_a_router_that_chooses_otherwise_in_the_recomputation_is_noticed(checkpointing: str) -> None:
    def run() -> None:
        model = make_mixture()
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), activation_checkpointing=checkpointing)
        sharded: Any = FSDP2Manager(config, create_device_mesh(config, ep_size=2)).parallelize(model)

        experts = model.config.num_local_experts

        def choose_others(router: nn.Module, args: Any, output: Any) -> Any:
            *others, indices = output
            # computed in both passes, since selective checkpointing wants the same operations
            changed = (indices + 1) % experts
            return (*others, changed if is_in_backward() else indices)

        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(choose_others)
        with pytest.raises(RuntimeError, match="its router sent a different number of tokens to some expert"):
            compute_gradients(sharded, make_tokens(model)[:1])
        dist.barrier()  # the other rank raises, too

    run_ranks(run, 2)


@pytest.mark.slow
def test_experts_that_one_rank_holds_are_not_gathered() -> None:
    dense, _, _ = run_ranks(lambda: count_step(ep_size=1), 2)[0]
    held, _, _ = run_ranks(lambda: count_step(ep_size=2), 2)[0]
    sharded, layers, _ = run_ranks(lambda: count_step(ep_size=2), 4)[0]
    assert held["all_gather"] == dense["all_gather"]
    assert sharded["all_gather"] == dense["all_gather"] + 2 * layers - 1  # in forward and backward, but for the last


@pytest.mark.guarantees("bytes-at-rest")
@pytest.mark.slow
def test_a_rank_holds_as_much_as_without_expert_parallelism() -> None:
    def count(**sizes: int) -> int:
        model = parallelize(make_mixture(), **sizes)
        return sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))

    for sizes in ({"ep_size": 2}, {"ep_size": 4}):
        assert run_ranks(lambda sizes=sizes: count(**sizes), 4) == run_ranks(count, 4)


@pytest.mark.guarantees("compiled-experts")
@pytest.mark.parametrize(
    ("implementation", "checkpointing"),
    [
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("grouped_mm", False), ("grouped_mm", "full"))),
        *(pytest.param(name, False, marks=pytest.mark.release) for name in ("eager", "batched_mm")),
    ],
)
def test_compiled_layers_exchange_tokens_outside_of_their_graphs(
    implementation: str, checkpointing: bool | str, compile_without_code: None
) -> None:
    def run() -> list[int]:
        model = make_mixture("qwen3_moe", implementation)
        reference = copy.deepcopy(model)
        config = FSDP2Config(
            mp_policy=MixedPrecisionPolicy(), enable_compile=True, activation_checkpointing=checkpointing
        )
        sharded = FSDP2Manager(config, create_device_mesh(config, ep_size=2)).parallelize(model)
        graphs = []
        for step in range(3):  # other tokens, and so other numbers of rows, in each step
            tokens = make_tokens(model, seed=step)
            own = compute_gradients(sharded, tokens.chunk(2)[dist.get_rank()])
            assert_equal_gradients(own, compute_gradients(reference, tokens))
            graphs.append(counters["stats"]["unique_graphs"])
        assert not any("_local_scalar_dense" in reason for reason in counters["graph_break"])
        return graphs

    for graphs in run_ranks(run, 2):
        assert graphs[1] == graphs[-1], "numbers of rows are dynamic after the second step"
        # of one kind of layers: attention and router, experts, the rest, what is between hooks; and the loss
        assert 7 <= graphs[-1] <= (9 if implementation == "grouped_mm" else 15)


@pytest.mark.parametrize("checkpointing", ["full", pytest.param(False, marks=pytest.mark.slow)])
def test_two_backwards_run_through_the_same_graph(checkpointing: bool | str) -> None:
    def run() -> None:
        model = make_mixture()
        reference = copy.deepcopy(model)
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), activation_checkpointing=checkpointing)
        sharded: Any = FSDP2Manager(config, create_device_mesh(config, ep_size=2)).parallelize(model)
        tokens = make_tokens(model)
        own = tokens.chunk(2)[dist.get_rank()]
        for part, rows in ((sharded, own), (reference, tokens)):
            logits = part(input_ids=rows, use_cache=False).logits
            logits.square().mean().backward(retain_graph=True)
            logits.mean().backward()
        gradients = whole({name: parameter.grad for name, parameter in sharded.named_parameters()})
        assert_equal_gradients(gradients, {name: parameter.grad for name, parameter in reference.named_parameters()})

    run_ranks(run, 2)


def test_a_warning_says_which_layers_run_uncompiled() -> None:
    def run() -> str:
        config = FSDP2Config(enable_compile=True, activation_checkpointing="selective")
        with patch("lightning_fsdp2.recipes.fsdp2.logger.warning") as warn:
            FSDP2Manager(config, create_device_mesh(config, ep_size=2)).parallelize(make_mixture())
        return str(warn.call_args)

    first, second = run_ranks(run, 2)
    assert "layers with experts run uncompiled" in first
    assert second == "None"


# ---------------------------------------------------------------------- what is refused


def shard_experts(model: Any) -> None:
    for experts in find_experts(model.modules()):
        mesh = get_mesh(create_device_mesh(FSDP2Config()), "dp_shard")
        parameter = experts.gate_up_proj
        experts.gate_up_proj = nn.Parameter(DTensor.from_local(parameter.detach(), mesh))


def quantise(model: Any) -> None:
    for experts in find_experts(model.modules()):
        experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.int8), requires_grad=False)


def mix_dtypes(model: Any) -> None:
    for experts in find_experts(model.modules()):
        experts.down_proj = nn.Parameter(experts.down_proj.detach().bfloat16())


def adapt(model: Any) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"]), model)


def test_adapters_of_attention_have_the_gradients_of_one_process() -> None:
    peft = pytest.importorskip("peft")

    def run() -> None:
        model = peft.get_peft_model(
            make_mixture("qwen3_moe"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        compare_with_one_process(model, ep_size=2)

    run_ranks(run, 2)


@pytest.mark.guarantees("refused-mixtures")
@pytest.mark.parametrize(
    ("family", "change", "sizes", "message"),
    [
        ("llama", None, {"ep_size": 2}, "ep_size=2 needs a mixture of experts, but LlamaForCausalLM has no packed"),
        ("llama4_text", None, {"ep_size": 2}, "ep_size=2 is not possible for Llama4.*every token"),
        ("longcat_flash", None, {"ep_size": 2}, "ep_size=2 is not possible for Longcat.*return their input"),
        ("mixtral", None, {"ep_size": 3}, r"ep_size=3 does not divide the 4 experts of .*; use one of \[1\]"),
        ("qwen3_moe", adapt, {"ep_size": 2}, "ep_size=2 does not support adapters on the weights of experts"),
        ("mixtral", quantise, {"ep_size": 2}, "down_proj is quantised .*int8"),
        ("mixtral", shard_experts, {"ep_size": 2}, "gate_up_proj is a DTensor already"),
        ("mixtral", mix_dtypes, {"ep_size": 2}, r"one dtype .*gate_up_proj \(.*float32\).*down_proj \(.*bfloat16\)"),
    ],
)
def test_what_cannot_be_distributed_is_refused(
    family: str, change: Callable[[Any], None] | None, sizes: dict[str, int], message: str
) -> None:
    def run() -> None:
        model = make_family_model(family)
        if change is not None:
            change(model)
        with pytest.raises(ValueError, match=message):
            parallelize(model, **sizes)

    run_ranks(run, sizes["ep_size"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2, "shards": 7}, r"gate_up_proj cannot be sharded.* shape \(2, .* divisible by 7, the number"),
        ({"ranks": 8, "shards": 2}, r"ep_size=8 does not divide the 4 experts .*; use one of \[1, 2, 4\]"),
        ({"reduce_dtype": torch.float16}, "reduce_dtype=torch.float16: .* of this dtype twice. Use float32 or"),
    ],
)
def test_a_model_is_checked_before_it_is_changed(options: dict[str, Any], message: str) -> None:
    structure = find_structure(make_family_model("mixtral"))
    with pytest.raises(ValueError, match=message):
        check_experts(structure, **{"ranks": 2, "shards": 1, "reduce_dtype": torch.float32, **options})


def test_compiled_layers_that_torch_would_recompute_differently_are_refused() -> None:
    def run() -> None:
        config = FSDP2Config(enable_compile=True, activation_checkpointing="full")
        with pytest.raises(ValueError, match=r"ep_size=2: in backward, .*'selective', or sequence_parallel=True"):
            FSDP2Manager(config, create_device_mesh(config, ep_size=2, tp_size=2)).parallelize(make_mixture())

    run_ranks(run, 2)


def test_a_frozen_model_with_other_experts_stands_beside_a_mixture() -> None:
    models = nn.ModuleList([make_family_model("mixtral"), make_family_model("llama4_text").requires_grad_(False)])
    check_experts(find_structure(models), ranks=2, shards=1, reduce_dtype=torch.float32)


def test_experts_cannot_be_resharded_to_more_ranks_than_hold_them() -> None:
    def run() -> None:
        config = FSDP2Config(reshard_after_forward=4)
        with pytest.raises(ValueError, match="reshard_after_forward=4 does not divide the 2 ranks that experts are"):
            FSDP2Manager(config, create_device_mesh(config, ep_size=2)).parallelize(make_mixture())
        FSDP2Manager(config, create_device_mesh(config, ep_size=4)).parallelize(make_mixture())

    run_ranks(run, 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(vision_parity.EXPERT_LAYOUTS))
def test_a_norm_that_experts_share_has_the_gradient_of_all_their_tokens(layout: str) -> None:
    assert vision_parity.measure_vision_parity("muse_spark", layout) < 1e-5


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return hidden


def test_experts_outside_of_the_models_are_refused_with_tensor_parallelism() -> None:
    def run() -> None:
        model = nn.ModuleDict({"lm": make_family_model("llama"), "experts": Experts()})
        model.forward = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match="ep_size: the experts experts are outside of the models"):
            parallelize(model, tp_size=2, ep_size=2)

    run_ranks(run, 2)

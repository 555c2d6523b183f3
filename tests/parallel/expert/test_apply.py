"""Mixtures whose experts are distributed over ranks train as in one process, whatever computes the experts."""

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.modules.experts import find_experts
from lightning_fsdp2.parallel.data import fully_shard
from lightning_fsdp2.parallel.expert import apply as expert_parallel

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")

SAMPLE = {
    "ep2": "deepseek_v3",  # a bias of the router, a shared expert
    "ep2 x efsdp2": "gpt_oss",  # biases of experts, transposed weights
    "HSDP2 x ep2": "mixtral",
    "ep4": "nemotron_h",  # experts without gate
    "dp2 x tp2 with ep4+sp, accumulate 2": "qwen3_moe",
    "cp2 with ep2": "qwen3_moe",
}


FAST = ("ep2 x efsdp2", "dp2 x tp2 with ep4+sp, accumulate 2")


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if layout in FAST else pytest.mark.slow) for layout in SAMPLE]
)
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


def make_tokens(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
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


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe"])
def test_every_implementation_of_experts_works(family: str, implementation: str) -> None:
    run_ranks(lambda: compare_with_one_process(make_mixture(family, implementation), ep_size=2), 4)


@pytest.mark.parametrize(
    ("sizes", "implementation"),
    [
        pytest.param(sizes, name, marks=() if (sizes, name) == ({"ep_size": 2}, "eager") else pytest.mark.slow)
        for sizes in ({"ep_size": 2}, {"ep_size": 4}, {"ep_size": 2, "tp_size": 2})
        for name in IMPLEMENTATIONS
    ],
    ids=str,
)
def test_ranks_without_tokens_take_part(sizes: dict[str, int], implementation: str) -> None:
    def run() -> None:
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


# ---------------------------------------------------------------------- what a step sends and a rank holds


def count_step(checkpointing: bool | str = False, **sizes: int) -> tuple[dict[str, int], int, int]:
    """Return the collectives of a step by kind, the number of mixture layers, and the waits for the device."""
    model = make_mixture()
    layers = len(find_experts(model.modules()))
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), activation_checkpointing=checkpointing)
    sharded: Any = FSDP2Manager(config, create_device_mesh(config, **sizes)).parallelize(model)
    tokens = make_tokens(model)[:1]
    compute_gradients(sharded, tokens)  # the first forward also sets FSDP2 up
    with StepCounter() as counter:
        sharded(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return dict(counter.collectives), layers, counter.host_syncs


@pytest.mark.parametrize(
    ("checkpointing", "exchanges"),
    [
        (False, 1 + 4),
        pytest.param("full", 2 + 6, marks=pytest.mark.slow),
        pytest.param("selective", 1 + 4, marks=pytest.mark.slow),
    ],
)
def test_a_layer_exchanges_rows_twice_each_way(checkpointing: bool | str, exchanges: int) -> None:
    for collectives, layers, _ in run_ranks(lambda: count_step(checkpointing, ep_size=2), 2):
        assert collectives["all_to_all"] == exchanges * layers


@pytest.mark.slow
def test_experts_that_one_rank_holds_are_not_gathered() -> None:
    dense, _, _ = run_ranks(lambda: count_step(ep_size=1), 2)[0]
    held, _, _ = run_ranks(lambda: count_step(ep_size=2), 2)[0]
    sharded, layers, _ = run_ranks(lambda: count_step(ep_size=2), 4)[0]
    assert held["all_gather"] == dense["all_gather"]
    assert sharded["all_gather"] == dense["all_gather"] + 2 * layers - 1  # in forward and backward, but for the last


@pytest.mark.slow
def test_a_rank_holds_as_much_as_without_expert_parallelism() -> None:
    def count(**sizes: int) -> int:
        model = parallelize(make_mixture(), **sizes)
        return sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))

    for sizes in ({"ep_size": 2}, {"ep_size": 4}):
        assert run_ranks(lambda sizes=sizes: count(**sizes), 4) == run_ranks(count, 4)


# ---------------------------------------------------------------------- what is refused


def shard_experts(model: Any) -> None:
    for experts in find_experts(model.modules()):
        mesh = get_mesh(create_device_mesh(FSDP2Config()), "dp_shard")
        parameter = experts.gate_up_proj
        experts.gate_up_proj = nn.Parameter(DTensor.from_local(parameter.detach(), mesh))


def quantise(model: Any) -> None:
    for experts in find_experts(model.modules()):
        experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.int8), requires_grad=False)


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


@pytest.mark.parametrize(
    ("family", "change", "sizes", "message"),
    [
        ("llama", None, {"ep_size": 2}, "ep_size=2 needs a mixture of experts, but LlamaForCausalLM has no packed"),
        ("llama4_text", None, {"ep_size": 2}, "ep_size=2 is not possible for Llama4.*every token"),
        ("longcat_flash", None, {"ep_size": 2}, "ep_size=2 is not possible for Longcat.*return their input"),
        ("mixtral", None, {"ep_size": 3}, r"ep_size=3 does not divide the 4 experts of .*; use one of \[1, 2, 4\]"),
        ("qwen3_moe", adapt, {"ep_size": 2}, "ep_size=2 does not support adapters on the weights of experts"),
        ("mixtral", quantise, {"ep_size": 2}, "down_proj is quantised .*int8"),
        ("mixtral", shard_experts, {"ep_size": 2}, "gate_up_proj is a DTensor already"),
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
    "layout", [pytest.param(name, marks=pytest.mark.slow) for name in vision_parity.EXPERT_LAYOUTS]
)
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

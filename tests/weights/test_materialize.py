"""Weights of a model built on the meta device: those of one process, whatever the mesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.models import GPT2, LLAMA, PlainTransformer, make_causal_lm
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES, Kind
from helpers.user_modules import WIDTH, UserModule
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from lightning_fsdp2 import DDPConfig, DDPManager, FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.weights.materialize import materialize

MODELS = {
    "llama": lambda: make_causal_lm(LLAMA),
    "llama-tied": lambda: make_causal_lm({**LLAMA, "tie_word_embeddings": True}),
    "gpt2": lambda: make_causal_lm(GPT2),
    "plain": lambda: PlainTransformer(tied=True),
}
MESHES = {"dp1": (1, 1), "dp3": (3, 1), "hsdp2x2": (4, 2)}


def shard_meta(name: str, dp_replicate_size: int, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    torch.manual_seed(seed + torch.distributed.get_rank())  # only rank 0's seed counts
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = MODELS[name]()
    mesh = create_device_mesh(dp_replicate_size=dp_replicate_size)
    FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(model)
    assert torch.equal(state, torch.get_rng_state()), "initialising drew from the user's random numbers"
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert len(names) == len(list(model.parameters()))
    return whole(model.state_dict()), dict(model.named_buffers()), next(model.parameters()).detach().to_local()


@pytest.mark.guarantees("same-seed")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama-tied" else pytest.mark.slow) for name in MODELS]
)
def test_a_seed_gives_one_model_on_any_mesh(name: str) -> None:
    results = {mesh: run_ranks(shard_meta, size, name, replicas, 7) for mesh, (size, replicas) in MESHES.items()}
    expected, expected_buffers, _ = results["dp1"][0]
    assert all(tensor.isfinite().all() for tensor in expected.values())
    for ranks in results.values():
        for weights, buffers, _ in ranks:
            assert all(torch.equal(weights[key], value) for key, value in expected.items())
            assert all(torch.equal(buffers[key], value) for key, value in expected_buffers.items())
    assert not torch.equal(run_ranks(shard_meta, 1, name, 1, 8)[0][2], results["dp1"][0][2]), (
        "another seed gave the same model"
    )


@pytest.mark.guarantees("shard-by-shard")
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_distributed_as_the_authors_initialise_them(name: str) -> None:
    """Same mean and spread per parameter as a model built on the CPU, and the same buffers."""
    torch.manual_seed(0)
    eager = MODELS[name]()
    weights, buffers, _ = run_ranks(shard_meta, 2, name, 1, 0)[0]
    for key, value in eager.state_dict().items():
        assert torch.isclose(weights[key].std(), value.std(), rtol=0.35, atol=1e-6) or value.numel() < 100, key
        if value.std() == 0:
            torch.testing.assert_close(weights[key], value)
    for key, value in eager.named_buffers():
        torch.testing.assert_close(buffers[key], value)


def test_padding_row_stays_zero_and_what_has_values_keeps_them() -> None:
    def run() -> tuple[Tensor, Tensor]:
        with torch.device("meta"):
            model = make_causal_lm({**LLAMA, "pad_token_id": 5})
        model.lm_head.weight = nn.Parameter(torch.full((101, 32), 3.0))
        mesh = create_device_mesh()
        FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(model)
        state = whole(model.state_dict())
        return state["model.embed_tokens.weight"], state["lm_head.weight"]

    embedding, head = run_ranks(run, 2)[0]
    assert torch.equal(embedding[5], torch.zeros(32))
    assert embedding[4].abs().min() > 0
    assert torch.equal(head, torch.full((101, 32), 3.0))


def test_adapters_are_initialised_as_peft_does() -> None:
    with torch.device("meta"):
        model: Any = get_peft_model(make_causal_lm(LLAMA), LoraConfig(r=8, target_modules=["q_proj"]))
    materialize(model, torch.device("cpu"))
    layers = [layer for layer in model.modules() if hasattr(layer, "reset_lora_parameters")]
    assert len(layers) == 3
    for layer in layers:
        first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert 0.9 * 32**-0.5 < first.abs().max() <= 32**-0.5  # kaiming_uniform_ with a=sqrt(5)
        assert torch.equal(second, torch.zeros(32, 8))


class Unresettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_module_that_cannot_be_initialised_is_named() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"fine": nn.Linear(2, 2), "stuck": Unresettable()})
    with pytest.raises(ValueError, match=r"stuck \(Unresettable\).*reset_parameters"):
        materialize(model, torch.device("cpu"))


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=STRATEGIES)
def test_a_module_without_shapes_is_refused_by_name(kind: Kind) -> None:
    module = UserModule()
    module.lazy = nn.LazyLinear(2)

    def run() -> None:
        with pytest.raises(ValueError, match=r"lazy\.bias, lazy\.weight belong to lazy modules"):
            kind.make_trainer(devices=1).fit(module, DataLoader(torch.rand(8, WIDTH)))

    run_ranks(run, 1)


@pytest.mark.parametrize("sizes", [{"dp_replicate_size": 2}, {"tp_size": 2}], ids=["hsdp2x2", "dp2xtp2"])
def test_a_model_with_weights_takes_those_of_the_first_rank(sizes: dict[str, int]) -> None:
    """Each rank would otherwise begin with other weights, on every axis of the mesh."""

    def run() -> Tensor:
        torch.manual_seed(torch.distributed.get_rank())
        model = make_causal_lm(LLAMA)
        FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), create_device_mesh(**sizes)).parallelize(model)
        return whole(model.state_dict())["lm_head.weight"]

    torch.manual_seed(0)
    expected = make_causal_lm(LLAMA).lm_head.weight
    for actual in run_ranks(run, 4):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Own(nn.Module):
    """Another module on the last rank."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        is_other = dist.get_rank() == dist.get_world_size() - 1
        self.first = nn.Linear(2, 3 if is_other and difference == "shape" else 2)
        self.first.weight.requires_grad_(not (is_other and difference == "frozen"))
        if is_other and difference == "one more":
            self.second = nn.Linear(2, 2)


@pytest.mark.parametrize("manager", [FSDP2Manager, DDPManager])
@pytest.mark.parametrize(
    ("difference", "says"),
    [
        (
            "shape",
            r"\('first.weight', \[3, 2\], torch.float32, True\) on rank 3 and \('first.weight', \[2, 2\], .* rank 0",
        ),
        ("frozen", r"\('first.weight', .* torch.float32, False\) on rank 3 and .* on rank 0\."),
        ("one more", r"\('second.weight', .*\) on rank 3 and nothing on rank 0\."),
    ],
)
def test_a_module_that_depends_on_the_rank_is_refused_on_every_rank(difference: str, says: str, manager: Any) -> None:
    def run() -> None:
        config = FSDP2Config() if manager is FSDP2Manager else DDPConfig()
        mesh = create_device_mesh(config, dp_replicate_size=2 if manager is FSDP2Manager else 1, device_type="cpu")
        with pytest.raises(ValueError, match=rf"not the same .* ranks 3 differ from those on rank 0\. .* is {says}"):
            manager(config, mesh).parallelize(Own(difference))

    run_ranks(run, 4)

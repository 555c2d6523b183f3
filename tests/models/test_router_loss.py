"""The auxiliary loss that keeps experts equally busy: of all tokens of a micro-batch, wherever they are computed."""

import itertools
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import transformers
from helpers.cover import Matrix
from helpers.families import get_families, make_family_config, make_family_model
from helpers.mesh_runs import Case, MetricsLogger, RankBatches, check_parity, join_batches
from helpers.models import LLAMA, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE
from helpers.ranks import run_ranks
from helpers.router_loss import COEFFICIENT, mask_padding, token_sum_loss
from helpers.user_modules import make_trainer
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from lightning_fsdp2 import CausalLM, DDPStrategy, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.models.router_loss import OTHER_LOSSES, find_router_loss, record_routing
from lightning_fsdp2.parallel.loss.load_balance import compute_load_balance, sum_routing

IS_BEFORE_5_23 = Version(transformers.__version__) < Version("5.23")

MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp2, reduced": (2, {}, {"defer_fsdp_grad_sync": False}),
    "dp2, full": (2, {}, {"activation_checkpointing": "full"}),
    "dp2, selective": (2, {}, {"activation_checkpointing": "selective"}),
    "hsdp2x2": (4, {"dp_replicate_size": 2}, {}),
    "ep2": (2, {"ep_size": 2}, {}),
    "ep2, full": (2, {"ep_size": 2}, {"activation_checkpointing": "full"}),
    "tp2": (2, {"tp_size": 2}, {"loss_parallel": True}),
    "dp2 x tp2 with ep4+sp": (4, {"ep_size": 4, "tp_size": 2}, {"sequence_parallel": True}),
    "cp2": (2, {"cp_size": 2}, {}),
    "dp2 x cp2 with ep2": (4, {"ep_size": 2, "cp_size": 2}, {}),
}


def make_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return make_family_model(family).train()


def make_module(family: str, **options: Any) -> CausalLM:
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
    module = CausalLM(
        config=make_family_config(family).to_dict(),
        optimizer=optimizer,
        decay_norms_and_biases=True,
        router_aux_loss_coef=COEFFICIENT,
        **options,
    )
    module.model = make_model(family)
    return module


def make_case(mesh: str, family: str, *, is_padded: bool = False, **options: Any) -> Case:
    _, sizes, flags = MESHES[mesh]
    batches = make_token_batches(3 * 2 * 4, length=12)
    return Case(
        make_module=partial(make_module, family, **options),
        make_model=partial(make_model, family),
        loss=token_sum_loss,
        batches=mask_padding(batches) if is_padded else batches,
        joins_ranks=True,
        accumulate=2,
        clip=0.1,
        strategy={**sizes, "config": FSDP2Config(**flags)},
    )


OPTIONS: dict[str, dict[str, Any]] = {"whole": {}, "padded": {"is_padded": True}, "chunked": {"loss": "chunked"}}
CELLS = {
    f"{mesh}-{family}-{option}": (mesh, family, option)
    for mesh, family, option in itertools.product(MESHES, ("qwen3_moe", "gpt_oss"), OPTIONS)
}


def describe(mesh: str, family: str, option: str) -> dict[str, Any]:
    """Return the features of a cell."""
    _, sizes, flags = MESHES[mesh]
    return {"family": family, "option": option, **sizes, **flags}


MATRIX = Matrix(
    "auxiliary loss of routers",
    {name: describe(*cell) for name, cell in CELLS.items()},
    fast=("ep2-qwen3_moe-whole",),
    costs={name: MESHES[mesh][0] for name, (mesh, _, _) in CELLS.items()},
)


@pytest.mark.guarantees("routers", "auxiliary-loss")
@pytest.mark.parametrize(("mesh", "family", "option"), MATRIX.list_parameters(CELLS))
def test_gradients_are_those_of_one_process(mesh: str, family: str, option: str) -> None:
    run_ranks(check_parity, MESHES[mesh][0], make_case(mesh, family, **OPTIONS[option]))


@pytest.mark.slow
def test_a_mask_without_padding_and_a_model_in_evaluation_mode_change_nothing() -> None:
    case = make_case("cp2", "qwen3_moe")
    for batch in case.batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    make = case.make_module
    case.make_module = lambda: make().eval()
    run_ranks(check_parity, 2, case)


@pytest.mark.slow
def test_other_strategies_have_it_too() -> None:
    case = make_case("dp2", "qwen3_moe")
    case.strategy_class, case.strategy = DDPStrategy, {}
    run_ranks(check_parity, 2, case)


WITH_LOSS = [
    family
    for family in get_families()
    if family not in OTHER_LOSSES and getattr(make_family_config(family), "router_aux_loss_coef", None)
]


@pytest.mark.parametrize("family", WITH_LOSS)
def test_the_loss_is_that_of_transformers(family: str) -> None:
    model: Any = make_family_model(family).eval()
    (batch,) = mask_padding(make_token_batches(1))
    with torch.no_grad():
        output = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            output_router_logits=True,
            use_cache=False,
        )
    if output.router_logits is None and IS_BEFORE_5_23:
        pytest.skip("this transformers returns no router logits of Granite; a training step refuses the loss")
    loss = find_router_loss(model, None if model.config.output_router_logits else 0.1)
    assert loss is not None
    routing = sum_routing(output.router_logits, loss.top_k, attention_mask=batch["attention_mask"])
    actual = compute_load_balance(routing, torch.tensor(1))
    torch.testing.assert_close(actual.loss, output.aux_loss.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual.loss, actual.summand)
    with torch.no_grad(), record_routing(loss.base_model, torch.cat) as recorded:
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    torch.testing.assert_close(recorded, [torch.cat(output.router_logits)])


@pytest.mark.parametrize(
    ("coefficient", "is_asked", "expected"),
    [(None, False, None), (None, True, 0.001), (0, True, None), (0.3, False, 0.3), (0.3, True, 0.3)],
)
def test_the_coefficient_is_that_of_the_config_if_it_asks_for_the_loss(
    coefficient: float | None, is_asked: bool, expected: float | None
) -> None:
    config = make_family_config("qwen3_moe")
    config.update({"output_router_logits": is_asked, "router_aux_loss_coef": 0.001})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loss = find_router_loss(model, coefficient)
    assert (None if loss is None else loss.coefficient) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA,
            r"router_aux_loss_coef=0.1: LlamaForCausalLM \(model_type 'llama'\) has no auxiliary load",
        ),
        (make_family_config("deepseek_v3").to_dict(), "DeepseekV3ForCausalLM .* has no auxiliary"),
        (make_family_config("llama4_text").to_dict(), "Llama4ForCausalLM .* has no auxiliary"),
    ],
    ids=["llama", "deepseek_v3", "llama4_text"],
)
def test_a_family_without_the_loss_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(config=config, router_aux_loss_coef=0.1).configure_model()


def test_a_negative_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=-0.1\) is negative; use 0 or more"):
        CausalLM(config=LLAMA, router_aux_loss_coef=-0.1)


def test_the_loss_is_logged_without_its_coefficient() -> None:
    batches = make_token_batches(2, ragged=False)

    def run() -> None:
        logger = MetricsLogger()
        trainer = make_trainer(FSDP2Strategy(), max_steps=1, log_every_n_steps=1, logger=logger)
        trainer.fit(make_module("qwen3_moe"), datamodule=RankBatches(batches))
        joined = join_batches(batches)
        output = make_model("qwen3_moe")(**joined, output_router_logits=True)
        (metrics,) = logger.history
        assert metrics["train/load_balance_loss"] == pytest.approx(output.aux_loss.item(), rel=1e-5)
        own = make_model("qwen3_moe")(**joined)
        assert metrics["train/loss"] == pytest.approx(own.loss.item(), rel=1e-5)

    run_ranks(run, 2)


def test_transformers_does_not_compute_its_own_loss_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the host would wait in each layer until the tokens of each expert are counted."""

    def refuse(*args: Any) -> NoReturn:
        raise AssertionError("The model computed its own auxiliary loss.")

    def run() -> None:
        monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", refuse)
        loader = DataLoader(make_token_batches(1), batch_size=None)
        make_trainer(FSDP2Strategy(), max_steps=1).fit(make_module("qwen3_moe"), loader)

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize("coefficient", [0, 0.1])
def test_router_logits_are_collected_only_for_the_loss(coefficient: float) -> None:
    """Evaluation needs none, and transformers' own loss would make a GPU wait, whatever the config asks for."""
    config = make_family_config("qwen3_moe")
    config.update({"output_router_logits": True})

    def run() -> list[Any]:
        module = CausalLM(config=config.to_dict(), router_aux_loss_coef=coefficient)
        seen: list[Any] = []
        of_head: list[Any] = []
        module.configure_model()
        module.model.base_model.register_forward_hook(
            lambda model, args, kwargs, output: seen.append(kwargs["output_router_logits"]), with_kwargs=True
        )
        module.model.register_forward_pre_hook(
            lambda model, args, kwargs: of_head.append(kwargs["output_router_logits"]), with_kwargs=True
        )
        loader = DataLoader(make_token_batches(2, ragged=False), batch_size=None)
        make_trainer(FSDP2Strategy(), max_steps=1, num_sanity_val_steps=1).fit(module, loader, loader)
        assert not any(of_head)
        return seen

    for seen in run_ranks(run, 2):
        sanity_check, *training = seen
        assert not sanity_check
        assert training == [coefficient > 0]

"""Mixtures through the Trainer, with experts distributed over ranks: the numbers of one process."""

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cover import Matrix, join_flags
from helpers.families import make_family_config, make_family_model
from helpers.mesh_runs import Case, check_parity
from helpers.models import make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, token_sum_loss
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import CausalLM, FSDP2Config

MESHES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "ep2": (2, {"ep_size": 2}, {}),
    "ep2 x efsdp2": (4, {"ep_size": 2}, {}),
    "HSDP2 x ep2": (4, {"ep_size": 2, "dp_replicate_size": 2}, {}),
    "dp2 x tp2 with ep4+sp": (4, {"ep_size": 4, "tp_size": 2}, {"sequence_parallel": True, "loss_parallel": True}),
    "cp2 with ep2": (2, {"ep_size": 2, "cp_size": 2}, {"context_parallel_method": "allgather"}),
    "cp2+ulysses with ep2": (2, {"ep_size": 2, "cp_size": 2}, {"context_parallel_method": "ulysses"}),
    "HSDP2 x tp2 with ep2": (4, {"ep_size": 2, "tp_size": 2, "dp_replicate_size": 2}, {}),
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "reduced": {"defer_fsdp_grad_sync": False, "reshard_after_forward": True},
    "kept": {"reshard_after_forward": False, "enable_fsdp2_prefetch": False},
    "autocast": {
        "autocast_dtype": torch.bfloat16,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    },
    "compiled": {"enable_compile": True, "activation_checkpointing": "full"},
    "offloaded": {"offload_policy": True, "patch_is_packed_sequence": True},
}
WITH_ALL = ("full", "selective", "reduced", "kept", "offloaded")
"""Flags to try with each mesh."""

FAMILIES: dict[str, dict[str, Hashable]] = {
    "qwen3_moe": {"norms": "of heads"},
    "gpt_oss": {"experts": "transposed, with biases", "attention": "sinks and windows"},
    "deepseek_v3": {"experts": "beside shared ones", "attention": "latent", "router": "with biases"},
    "mixtral": {},
}
"""What matters to expert parallelism, by family."""

TOGETHER = [
    "ep2-deepseek_v3-32-true-full+reduced",
    "ep2-qwen3_moe-32-true-selective+offloaded",
    "ep2 x efsdp2-deepseek_v3-32-true-selective+kept",
    "ep2 x efsdp2-qwen3_moe-32-true-full+reduced",
    "ep2 x efsdp2-gpt_oss-32-true-offloaded",
    "HSDP2 x ep2-deepseek_v3-32-true-full+offloaded",
    "HSDP2 x ep2-qwen3_moe-32-true-selective+reduced",
    "HSDP2 x ep2-gpt_oss-32-true-kept",
    "dp2 x tp2 with ep4+sp-deepseek_v3-32-true-selective+reduced",
    "dp2 x tp2 with ep4+sp-qwen3_moe-32-true-full+kept",
    "dp2 x tp2 with ep4+sp-gpt_oss-32-true-offloaded",
    "cp2 with ep2-deepseek_v3-32-true-full+kept",
    "cp2 with ep2-qwen3_moe-32-true-selective+offloaded",
    "cp2 with ep2-gpt_oss-32-true-reduced",
    "cp2+ulysses with ep2-deepseek_v3-32-true-selective+offloaded",
    "cp2+ulysses with ep2-qwen3_moe-32-true-full+reduced",
    "cp2+ulysses with ep2-gpt_oss-32-true-kept",
    "HSDP2 x tp2 with ep2-deepseek_v3-32-true-full+reduced",
]
"""Runs of many flags, so that few of them have every two of these values."""

Cell = tuple[str, str, str, str]
"""Mesh, family, precision and flags."""


def list_cells() -> Iterator[Cell]:
    for mesh, family, *precision, flags in (name.split("-") for name in TOGETHER):
        yield mesh, family, "-".join(precision), flags
    for mesh in MESHES:
        yield from ((mesh, family, "32-true", "plain") for family in FAMILIES)
        yield from ((mesh, "qwen3_moe", "32-true", flags) for flags in WITH_ALL)
        yield mesh, "deepseek_v3", "bf16-mixed", "plain"
        yield mesh, "qwen3_moe", "bf16-true", "plain"
        # shared experts, whose backward recomputes a layer before the gradient reaches the other experts
        yield from ((mesh, "deepseek_v3", "32-true", flags) for flags in ("full", "selective"))
    yield "ep2", "gpt_oss", "bf16-mixed", "plain"
    yield "ep2", "qwen3_moe", "32-true", "compiled"
    yield from ((mesh, "deepseek_v3", "32-true", "autocast") for mesh in ("ep2", "dp2 x tp2 with ep4+sp"))


def describe(cell: Cell) -> dict[str, Hashable]:
    mesh, family, precision, flags = cell
    ranks, sizes, mesh_flags = MESHES[mesh]
    replicas = sizes.get("dp_replicate_size", 1)
    shards = ranks // (sizes["ep_size"] * replicas)
    return {
        **sizes,
        **({"shards of experts": shards} if shards > 1 else {}),
        **mesh_flags,
        **FAMILIES[family],
        "precision": precision,
        **join_flags(FLAGS, flags),
    }


CELLS = {"-".join(cell): cell for cell in list_cells()}
MATRIX = Matrix(
    "expert parallelism",
    {name: describe(cell) for name, cell in CELLS.items()},
    fast=["ep2-qwen3_moe-32-true-selective"],
    always=[
        *(f"ep2-qwen3_moe-32-true-{flags}" for flags in WITH_ALL),
        *(f"ep2-{family}-32-true-plain" for family in FAMILIES),
        *(f"{mesh}-qwen3_moe-32-true-plain" for mesh in MESHES),
    ],
    costs={name: MESHES[mesh][0] for name, (mesh, *_) in CELLS.items()},
)


SEED = 3
"""In bfloat16, a router may send a token to another expert than in float32. With tensor parallelism, with or without
expert parallelism, this changed the error by a factor between a quarter and two with four of five other seeds."""


def make_model(family: str) -> nn.Module:
    torch.manual_seed(SEED)
    return make_family_model(family).train()


def make_module(family: str, loss: str = "full", *, meta: bool = False, **options: Any) -> CausalLM:
    optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, **options)
    config = make_family_config(family)
    module = CausalLM(config=config.to_dict(), optimizer=optimizer, decay_norms_and_biases=True, loss=loss)
    if not meta:
        module.model = make_model(family)
        module.hf_config = module.model.config
    return module


def make_case(mesh: str, family: str, precision: str, flags: dict[str, Any], **options: Any) -> Case:
    _, sizes, config = MESHES[mesh]
    accumulate = 2 if precision == "32-true" else 3  # for these batches, the seed was chosen
    return Case(
        make_module=partial(make_module, family, **options),
        make_model=partial(make_model, family),
        loss=token_sum_loss,
        batches=make_token_batches(3 * accumulate * 4, length=16),
        accumulate=accumulate,
        clip=0.1,
        precision=precision,
        strategy={**sizes, "config": FSDP2Config(**config, **flags)},
    )


@pytest.mark.guarantees("float32-losses", "float32-gradients", "bfloat16-gradients")
@pytest.mark.parametrize(("mesh", "family", "precision", "flags"), MATRIX.list_parameters(CELLS))
def test_ragged_labels_accumulation_and_clipping_have_the_numbers_of_one_process(
    mesh: str, family: str, precision: str, flags: str, compile_without_code: None
) -> None:
    case = make_case(mesh, family, precision, join_flags(FLAGS, flags))
    run_ranks(check_parity, MESHES[mesh][0], case)


@pytest.mark.release  # a minute; tests/parallel/layers/test_compile.py has tensor parallelism without experts
@pytest.mark.parametrize("mesh", ["ep2 x efsdp2", "dp2 x tp2 with ep4+sp"])
def test_layers_are_compiled_on_larger_meshes(mesh: str, compile_without_code: None) -> None:
    case = make_case(mesh, "qwen3_moe", "32-true", FLAGS["compiled"])
    run_ranks(check_parity, MESHES[mesh][0], case)


@pytest.mark.parametrize(
    "mesh",
    [
        "ep2",
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("HSDP2 x ep2", "dp2 x tp2 with ep4+sp", "cp2+ulysses with ep2")
        ),
        *(
            pytest.param(mesh, marks=pytest.mark.release)
            for mesh in ("ep2 x efsdp2", "cp2 with ep2", "HSDP2 x tp2 with ep2")
        ),
    ],
)
def test_a_model_on_the_meta_device_and_a_chunked_loss(mesh: str) -> None:
    flags: dict[str, Any] = {}
    case = make_case(mesh, "qwen3_moe", "32-true", flags, loss="chunked", meta=True)
    case.make_model = lambda: AutoModelForCausalLM.from_config(make_family_config("qwen3_moe")).float().train()
    run_ranks(check_parity, MESHES[mesh][0], case)


@pytest.mark.parametrize(
    ("mesh", "option"),
    [
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (("ep2 x efsdp2", "fused"), ("dp2 x tp2 with ep4+sp", "foreach"))
        ),
        *(
            pytest.param(*cell, marks=pytest.mark.release)
            for cell in (("ep2 x efsdp2", "foreach"), ("dp2 x tp2 with ep4+sp", "fused"))
        ),
    ],
)
def test_optimizers_update_experts_and_other_weights_together(mesh: str, option: str) -> None:
    run_ranks(check_parity, MESHES[mesh][0], make_case(mesh, "qwen3_moe", "32-true", {}, **{option: True}))


def packed_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum over the label tokens, and their number; positions that restart separate documents."""
    output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, reduction="sum"), int((labels != -100).sum())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep2", "cp2 with ep2"])
def test_packed_documents_do_not_see_each_other(mesh: str) -> None:
    case = make_case(mesh, "qwen3_moe", "32-true", {})
    positions = torch.arange(8).repeat(2).expand(2, 16)
    case.batches = [{**batch, "position_ids": positions} for batch in case.batches]
    case.loss = packed_loss
    run_ranks(check_parity, MESHES[mesh][0], case)

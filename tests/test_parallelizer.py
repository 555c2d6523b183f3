"""The recipe in a plain torch loop, and the functions beside it, without Lightning."""

import copy
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.models import LLAMA, VOCABULARY, Block, PlainTransformer, make_causal_lm, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE, Batch, LossFunction, token_sum_loss
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, MegatronFSDPConfig, create_device_mesh
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.parallelizer import (
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    import_class_from_path,
    import_classes_from_paths,
    megatron_fsdp_strategy_parallelize,
    unshard_fsdp2_model,
)

THREE_AXES = ("data_parallel", "context_parallel", "tensor_parallel")


def get_sharded_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def has_shards(module: nn.Module) -> bool:
    (is_sharded,) = {isinstance(parameter, DTensor) for parameter in module.parameters()}
    return is_sharded


# ---------------------------------------------------------------------- gradients of one process


def train_alone(model: nn.Module, loss: LossFunction, batches: list[Batch]) -> list[list[Tensor]]:
    """The gradients of every step on the whole batch of two micro-batches; trains ``model`` in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    history = []
    for step in range(len(batches) // 2):
        parts = [loss(model, batch) for batch in batches[2 * step : 2 * step + 2]]
        optimizer.zero_grad()
        (sum(part for part, _ in parts) / sum(weight for _, weight in parts)).backward()
        history.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return history


def train_on_two_ranks(model: nn.Module, loss: LossFunction, batches: list[Batch]) -> list[list[Tensor]]:
    """The loop a user writes, with the mean loss of each rank's own batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    history = []
    for batch in batches[dist.get_rank() :: 2]:
        part, weight = loss(model, batch)
        optimizer.zero_grad()
        (part / weight).backward()
        history.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        optimizer.step()
    return history


def assert_equal_gradients(actual: list[Tensor], expected: list[Tensor], factor: int) -> None:
    """Within the tolerances of DESIGN, "What correct means"."""
    largest = max(gradient.abs().max().item() for gradient in expected)
    for gradient, reference in zip(actual, expected, strict=True):
        allowed = factor * (1e-5 * reference.abs().max().item() + 1e-7 * largest)
        torch.testing.assert_close(gradient, reference, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("make_model", "loss"),
    [
        pytest.param(PlainTransformer, plain_loss, id="plain", marks=pytest.mark.slow),
        pytest.param(partial(make_causal_lm, LLAMA), token_sum_loss, id="llama"),
    ],
)
def test_a_plain_loop_trains_like_one_process_on_our_mesh_and_on_one_made_elsewhere(
    make_model: Callable[[], nn.Module], loss: LossFunction
) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = make_model()
        batches = make_token_batches(4, length=8, ragged=False)
        expected_model = copy.deepcopy(model)
        expected = train_alone(expected_model, loss, batches)
        for mesh in (
            create_device_mesh(device_type="cpu"),
            init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=THREE_AXES),
        ):
            sharded = copy.deepcopy(model)
            assert fsdp2_strategy_parallelize(sharded, mesh, mp_policy=MixedPrecisionPolicy()) is sharded
            actual = train_on_two_ranks(sharded, loss, batches)
            for step, gradients in enumerate(actual):
                assert_equal_gradients(gradients, expected[step], 10 if step else 1)
            for (name, weight), reference in zip(sharded.named_parameters(), expected_model.parameters(), strict=True):
                torch.testing.assert_close(weight.full_tensor(), reference.data, rtol=0, atol=5e-5, msg=name)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- dtypes and offload

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def make_points(rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))


def compute_mean_gradients(dtype: torch.dtype) -> list[Tensor]:
    """What plain torch computes in ``dtype`` on each rank's points, averaged over the two in float32."""
    by_rank = []
    for rank in range(2):
        model = make_mlp().to(dtype)
        model(make_points(rank).to(dtype)).float().square().sum().backward()
        by_rank.append([parameter.grad.float() for parameter in model.parameters()])
    return [torch.stack(gradients).mean(0) for gradients in zip(*by_rank, strict=True)]


def is_representable(gradients: list[Tensor], dtype: torch.dtype) -> bool:
    return all(torch.equal(gradient, gradient.to(dtype).float()) for gradient in gradients)


DTYPES: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype, torch.dtype]] = {
    "default": ({}, BFLOAT16, FLOAT32, FLOAT32),
    "param-dtype": ({"param_dtype": FLOAT32}, FLOAT32, FLOAT32, FLOAT32),
    "no-reduce-dtype": ({"mp_policy": MixedPrecisionPolicy(BFLOAT16)}, BFLOAT16, BFLOAT16, FLOAT32),
    "all-dtypes": ({"mp_policy": MixedPrecisionPolicy(BFLOAT16, BFLOAT16, FLOAT32)}, BFLOAT16, FLOAT32, BFLOAT16),
    "policy-wins": ({"mp_policy": MixedPrecisionPolicy(), "param_dtype": BFLOAT16}, FLOAT32, FLOAT32, FLOAT32),
    "cpu-offload": ({"cpu_offload": True}, BFLOAT16, FLOAT32, FLOAT32),
    "offload-policy": ({"offload_policy": CPUOffloadPolicy(), "param_dtype": FLOAT32}, FLOAT32, FLOAT32, FLOAT32),
}
"""Options; then the dtypes of compute, of the model's output and of the reduction of gradients."""


def test_dtypes_of_compute_output_and_reduction() -> None:
    def run() -> None:
        for name, (options, compute, output, reduce) in DTYPES.items():
            model = fsdp2_strategy_parallelize(make_mlp(), create_device_mesh(device_type="cpu"), **options)
            result = model(make_points(dist.get_rank()))
            assert result.dtype is output, name
            result.float().square().sum().backward()
            assert {tensor.dtype for p in model.parameters() for tensor in (p, p.grad)} == {FLOAT32}, name
            gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
            assert is_representable(gradients, BFLOAT16) == (reduce is BFLOAT16), name
            tolerance = 1e-6 if reduce is FLOAT32 else 1e-2
            expected = compute_mean_gradients(compute)
            torch.testing.assert_close(gradients, expected, rtol=tolerance, atol=tolerance, msg=name)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- refusals


def test_what_is_not_supported_is_refused_by_name_and_leaves_the_model_whole() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"activation_checkpointing": True},
            "activation_checkpointing=True .* applies to no layer: .* no list of",
        ),
        ({"enable_compile": True}, "enable_compile=True: .* has no list of layers"),
        ({"reshard_after_forward": 3}, "reshard_after_forward=3 does not divide the 1 ranks .*; use True or False"),
        ({"mp_policy": MixedPrecisionPolicy(torch.float16)}, r"mp_policy\.param_dtype=torch\.float16 .* use bfloat16"),
        ({"mp_policy": MixedPrecisionPolicy(torch.float64)}, r"mp_policy\.param_dtype=torch\.float64 .* use bfloat16"),
        ({"param_dtype": torch.float16}, r"^param_dtype=torch\.float16 .* use bfloat16"),
        ({"dp_mesh_name": "dp"}, "no axis 'dp'"),
    ]

    def run() -> None:
        mesh = create_device_mesh(device_type="cpu")
        for options, message in cases:
            model = make_mlp()
            with pytest.raises(ValueError, match=message):
                fsdp2_strategy_parallelize(model, mesh, **options)
            assert not get_sharded_modules(model), options

    run_ranks(run, 1)


def test_a_tensor_parallel_mesh_made_elsewhere_goes_by_the_names_given() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match=r"'dp' and 'tensor_parallel' cover 1 of the 2 ranks"):
            fsdp2_strategy_parallelize(make_mlp(), mesh, dp_mesh_name="dp")
        with pytest.raises(ValueError, match=r"has no tensor parallel plan\. Give a plan .*in the config, as tp_plan="):
            fsdp2_strategy_parallelize(make_mlp(), mesh, dp_mesh_name="dp", tp_mesh_name="tp")

        plain = make_causal_lm(LLAMA)
        model = copy.deepcopy(plain)
        policy = MixedPrecisionPolicy()
        fsdp2_strategy_parallelize(model, mesh, mp_policy=policy, dp_mesh_name="dp", tp_mesh_name="tp")
        weight = model.model.layers[0].mlp.down_proj.weight
        assert weight.placements == (Shard(0), Shard(1))
        assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
        (batch,) = make_token_batches(1, ragged=False)
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel": True}, "have no effect with one tensor parallel rank"),
        ({"context_parallel_method": "ulysses"}, "have no effect with one context parallel rank"),
        ({"context_parallel_inputs": {"spans": 1}}, "have no effect with one context parallel rank"),
    ],
)
def test_flags_of_one_rank_are_said_to_do_nothing(
    options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> str:
        fsdp2_strategy_parallelize(make_mlp(), create_device_mesh(device_type="cpu"), **options)
        return caplog.text

    (text,) = run_ranks(run, 1)
    assert message in text


def test_a_plan_that_one_rank_does_not_use_is_checked_too() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu")
        with pytest.raises(ValueError, match=r"tp_plan\['lm_head'\]='colwize' is not a known style"):
            fsdp2_strategy_parallelize(make_mlp(), mesh, tp_shard_plan={"lm_head": "colwize"})

    run_ranks(run, 1)


def test_context_parallel_ranks_share_the_shards_and_the_sequence_of_a_hugging_face_model() -> None:
    def run() -> None:
        ours = create_device_mesh(cp_size=2, device_type="cpu")
        with pytest.raises(
            ValueError, match=r"cp_size=2 splits the input sequences .* Sequential contains no such model"
        ):
            fsdp2_strategy_parallelize(make_mlp(), ours)
        plain = make_causal_lm(LLAMA)
        model = fsdp2_strategy_parallelize(copy.deepcopy(plain), ours, mp_policy=MixedPrecisionPolicy())
        assert model.lm_head.weight.to_local().size(0) == pytest.approx(VOCABULARY / 2, abs=0.5)
        (batch,) = make_token_batches(1, ragged=False)
        output, expected = model(**batch), plain(**batch)
        torch.testing.assert_close(output.loss, expected.loss)
        assert output.logits.size(1) == expected.logits.size(1) // 2

    run_ranks(run, 2)


def test_a_model_that_was_sharded_before_is_refused_with_its_sharded_modules() -> None:
    def run() -> None:
        mesh = create_device_mesh(device_type="cpu")
        by_hand = make_mlp()
        fully_shard(by_hand[2], mesh=get_mesh(mesh, "dp_shard"))
        with pytest.raises(ValueError, match=r"Sequential has modules that `fully_shard` was already applied to: 2\."):
            fsdp2_strategy_parallelize(by_hand, mesh)
        ours = fsdp2_strategy_parallelize(make_mlp(), mesh)
        with pytest.raises(ValueError, match=r"the root, 0, 2\. A model can be parallelised only once"):
            fsdp2_strategy_parallelize(ours, mesh)

    run_ranks(run, 1)


# ---------------------------------------------------------------------- the functions beside it


class TwoTowers(nn.Module):
    """Lists of blocks in a list, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.towers = nn.ModuleList(nn.ModuleList(Block(32) for _ in range(depth)) for depth in (3, 2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self.embedding(input_ids)
        total = torch.zeros_like(embedded)
        for tower in self.towers:
            hidden = embedded
            for block in tower:
                hidden = block(hidden)
            total = total + hidden
        return self.head(total)


def test_sharding_recursively_shards_the_blocks_of_nested_lists_and_keeps_the_last_of_each_gathered() -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = TwoTowers()
        reference = copy.deepcopy(model)
        blocks = [block for tower in model.towers for block in tower]
        apply_fsdp_sharding_recursively(model, init_device_mesh("cpu", (2,)), None)
        assert get_sharded_modules(model) == blocks
        assert not any(isinstance(p, DTensor) for part in (model.embedding, model.head) for p in part.parameters())
        batches = make_token_batches(2, ragged=False)
        with StepCounter() as forward:
            loss, _ = plain_loss(model, batches[dist.get_rank()])
        assert [has_shards(block) for block in blocks] == [True, True, False, True, False]
        with StepCounter() as backward:
            loss.backward()
        assert forward.collectives == {"all_gather": 5}
        assert backward.collectives == {"all_gather": 3, "reduce_scatter": 5}
        torch.stack([plain_loss(reference, batch)[0] for batch in batches]).mean().backward()
        for actual, expected in zip(model.towers.parameters(), reference.towers.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)

    run_ranks(run, 2)


def test_unsharding_gives_every_rank_whole_weights_and_shards_them_again_also_after_an_exception() -> None:
    def check_inside(model: nn.Module, reference: nn.Module, error: Exception | None) -> None:
        with unshard_fsdp2_model(model), torch.no_grad():
            assert not has_shards(model)
            for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(actual.data, expected.data, rtol=0, atol=0)
            model.head.weight.zero_()  # is lost
            if error is not None:
                raise error

    def run() -> None:
        torch.manual_seed(0)
        model = PlainTransformer()
        reference = copy.deepcopy(model)
        fsdp2_strategy_parallelize(model, create_device_mesh(device_type="cpu"), mp_policy=MixedPrecisionPolicy())
        check_inside(model, reference, None)
        assert has_shards(model)
        with pytest.raises(KeyError, match="inside"):
            check_inside(model, reference, KeyError("inside"))
        assert has_shards(model)
        check_inside(model, reference, None)

    run_ranks(run, 2)


class ThreeLayers(nn.Module):
    """Layers that are no list, so that FSDP2 prefetches in backward in the order of the forward."""

    def __init__(self, is_sequential: bool) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
        self.first, self.second, self.third = [nn.Sequential(*layers), None, None] if is_sequential else layers

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if self.second is None else self.third(self.second(self.first(x)))


@pytest.mark.parametrize("is_sequential", [False, True])
@pytest.mark.parametrize("flags", [{}, {"reshard_after_forward": False}, {"enable_fsdp2_prefetch": False}], ids=str)
def test_unsharding_between_forward_and_backward_changes_no_gradient(
    flags: dict[str, Any], is_sequential: bool
) -> None:
    def compute(model: nn.Module, reads: bool) -> None:
        for number in range(2):
            losses = [model(torch.full((2, 8), float(number + part))).square().mean() for part in range(2)]
            if reads:
                with torch.no_grad(), unshard_fsdp2_model(model):
                    assert sum(p.numel() for p in model.parameters()) == 153
            sum(losses).backward()

    def run() -> None:
        torch.manual_seed(0)
        reference = ThreeLayers(is_sequential)
        model = fsdp2_strategy_parallelize(
            copy.deepcopy(reference),
            create_device_mesh(device_type="cpu"),
            mp_policy=MixedPrecisionPolicy(),
            **flags,
        )
        compute(reference, reads=False)
        compute(model, reads=True)
        for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.full_tensor(), expected.grad)

    run_ranks(run, 2)


def test_a_nested_unsharding_leaves_what_the_outer_one_gathered() -> None:
    def run() -> None:
        model = fsdp2_strategy_parallelize(PlainTransformer(), create_device_mesh(device_type="cpu"))
        with unshard_fsdp2_model(model):
            with unshard_fsdp2_model(model.blocks[0]):
                assert not has_shards(model)
            assert not has_shards(model)
        assert has_shards(model)
        with unshard_fsdp2_model(model.blocks[0]), unshard_fsdp2_model(model):
            assert not has_shards(model)
        assert has_shards(model)

    run_ranks(run, 2)


def test_a_state_dict_inside_is_refused_before_it_shards_the_model_again() -> None:
    def run() -> None:
        model = fsdp2_strategy_parallelize(PlainTransformer(), create_device_mesh(device_type="cpu"))
        with unshard_fsdp2_model(model):
            for module in (model, model.blocks[0]):
                with pytest.raises(
                    RuntimeError, match=r"state_dict\(\) was called inside an `unshard_fsdp2_model` block.*full_tensor"
                ):
                    module.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in model.state_dict().values())

    run_ranks(run, 2)


def test_importing_from_a_dotted_path() -> None:
    assert import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert import_class_from_path("torch.bfloat16") is torch.bfloat16
    for name in ("AdamW", "", "torch.", ".AdamW", ".optim.AdamW"):
        with pytest.raises(ValueError, match=f"^'{name}' is not a dotted import path; write it like"):
            import_class_from_path(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_class_from_path("no_such_package.Thing")
    with pytest.raises(AttributeError, match="NoSuchOptimizer"):
        import_class_from_path("torch.optim.NoSuchOptimizer")


def test_importing_several_skips_what_is_missing_with_a_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    paths = ["torch.nn.GELU", "torch.nn.NoSuchLayer", "no_such_package.Thing", "nothing", "torch.nn.Linear"]
    with caplog.at_level(logging.WARNING):
        assert import_classes_from_paths(paths) == [nn.GELU, nn.Linear]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    for message, path in zip(caplog.messages, paths[1:4], strict=True):
        assert message.startswith(f"Could not import '{path}': ")


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"sequence_parallel": True}, {"loss_parallel": True}],
    ids=["tp", "sp", "loss-parallel"],
)
def test_a_step_under_tensor_parallelism_warns_of_nothing(options: dict[str, Any]) -> None:
    """FSDP2 warns of units that return views, as a gathered head of an odd vocabulary would."""

    def run() -> None:
        config = FSDP2Config(**options)
        model = FSDP2Manager(config, create_device_mesh(config, tp_size=2)).parallelize(make_causal_lm(LLAMA))
        input_ids = torch.randint(3, VOCABULARY, (2, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()

    run_ranks(run, 2)


# ---------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("function", "config_class", "others"),
    [
        (
            fsdp2_strategy_parallelize,
            FSDP2Config,
            # flags of a run, and `tp_shard_plan`
            {"backend", "bind_device_id", "defer_fsdp_grad_sync", "tp_plan"},
        ),
        (
            megatron_fsdp_strategy_parallelize,
            MegatronFSDPConfig,
            {"backend", "bind_device_id", "check_for_nan_in_grad", "tp_plan"},
        ),
    ],
)
def test_every_flag_of_a_module_is_a_parameter(function: Any, config_class: Any, others: set[str]) -> None:
    flags = {field.name for field in fields(config_class)}
    assert flags - inspect.signature(function).parameters.keys() == others

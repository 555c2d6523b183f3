"""MegatronFSDPManager in a plain torch loop, and the functions it stands on."""

import copy
import inspect
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.models import LLAMA, PlainTransformer, make_causal_lm, make_token_batches, plain_loss
from helpers.oracle import EPSILON, LEARNING_RATE, assert_equal_gradients, whole
from helpers.ranks import run_ranks
from torch import Tensor, nn

from lightning_fsdp2 import (
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    clip_grad_norm_,
    create_device_mesh,
    defer_grad_sync,
    load_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.parallel.megatron import wrap as megatron_fsdp
from lightning_fsdp2.parallelizer import (
    HAVE_MEGATRON_FSDP,
    HAVE_NVFSDP,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)

ALL_STRATEGIES = (0, 1, 2, 3)


def run_on_ranks(function: Any, world_size: int) -> list[Any]:
    def run() -> Any:
        with cuda_on_cpu():
            return function()

    return run_ranks(run, world_size)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as recipes have them."""
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON, fused=True)


def parallelize(model: nn.Module, optimizer: Any = None, sizes: dict[str, int] | None = None, **flags: Any) -> Any:
    config = MegatronFSDPConfig(**flags)
    mesh = create_device_mesh(config, device_type="cpu", **(sizes or {}))
    return MegatronFSDPManager(config, mesh).parallelize(model, optimizer)


def make_llama() -> Any:
    return make_causal_lm(LLAMA).train()


@pytest.mark.guarantees("plain-loops")
@pytest.mark.parametrize(
    ("make", "strategies"),
    [
        pytest.param(PlainTransformer, (3,), id="tensors"),
        pytest.param(PlainTransformer, (0, 1, 2), id="tensors, other strategies", marks=pytest.mark.slow),
        pytest.param(make_llama, ALL_STRATEGIES, id="a dict", marks=pytest.mark.slow),
    ],
)
def test_ranks_train_like_one_process_with_accumulation_and_clipping(make: Any, strategies: tuple[int, ...]) -> None:
    """Whatever the model returns: hooks of the package look for tensors in it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        return plain_loss(model, {"input_ids": ids})[0] if make is PlainTransformer else model(ids, labels=ids).loss

    def run() -> None:
        rank = dist.get_rank()
        for zero_dp_strategy in strategies:
            torch.manual_seed(0)
            reference = make()
            torch.manual_seed(rank)
            plain = copy.deepcopy(reference) if rank == 0 else make()
            model, optimizer = parallelize(plain, make_optimizer(plain), zero_dp_strategy=zero_dp_strategy)
            expected_optimizer = make_optimizer(reference)
            for batch in make_token_batches(2, size=4, length=6, ragged=False):
                loss(reference, batch).backward()
                expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                first, second = ({"input_ids": batch["input_ids"][rank + start, None]} for start in (0, 2))
                with defer_grad_sync(model):
                    (loss(model, first) / 2).backward()
                with torch.no_grad():
                    loss(model, first)  # changes nothing
                (loss(model, second) / 2).backward()
                actual = clip_grad_norm_(model.parameters(), 0.1)
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
                gradients = whole({name: p.grad for name, p in plain.named_parameters()})
                assert_equal_gradients(gradients, {name: p.grad for name, p in reference.named_parameters()})
                for each in (optimizer, expected_optimizer):
                    each.step()
                    each.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(loss(model, batch), loss(reference, batch))
            torch.testing.assert_close(
                whole(dict(plain.named_parameters())), dict(reference.named_parameters()), rtol=0, atol=5e-5
            )

    run_on_ranks(run, 2)


FLAGS = {
    "zero_dp_strategy": 2,
    "disable_bucketing": True,
    "calculate_per_token_loss": True,
    "keep_fp8_transpose_cache": True,
    "fsdp_double_buffer": True,
    "report_nan_in_param_grad": True,
}


class Called(Exception):
    """In place of the package's work."""


def record_options(function: Any) -> dict[str, Any]:
    """What ``function`` has the package called with."""
    package = megatron_fsdp.import_megatron_fsdp()
    recorded: dict[str, Any] = {}

    def fully_shard_model(
        module: nn.Module, *, fsdp_unit_modules: Any, mixed_precision_policy: Any, **options: Any
    ) -> None:
        recorded.update(options, units=fsdp_unit_modules, precision=mixed_precision_policy)
        raise Called

    signature = inspect.signature(package.fully_shard_model)
    fully_shard_model.__signature__ = signature
    with patch.object(package, "fully_shard_model", fully_shard_model), pytest.raises(Called):
        function()
    return recorded


def test_every_flag_reaches_the_package() -> None:
    def run() -> None:
        recorded = record_options(lambda: parallelize(PlainTransformer(), **FLAGS))
        assert {name: recorded[name] for name in FLAGS} == FLAGS
        assert recorded["overlap_grad_reduce"] is recorded["overlap_param_gather"] is True
        flags = {"zero_dp_strategy": 0, "overlap_grad_reduce": False, "overlap_param_gather": False}
        recorded = record_options(lambda: parallelize(PlainTransformer(), **flags))
        assert {name: recorded[name] for name in flags} == flags
        path = "torch.nn.Linear"
        recorded = record_options(lambda: parallelize(PlainTransformer(), megatron_fsdp_unit_modules=[path]))
        assert recorded["units"] == [nn.Linear]
        for flags, (params, grads, comm) in (
            ({}, (torch.float32, torch.float32, torch.float32)),
            ({"grad_reduce_in_fp32": False}, (torch.float32, None, None)),
            ({"preserve_fp32_weights": False}, (None, None, torch.float32)),
        ):
            policy = record_options(lambda flags=flags: parallelize(PlainTransformer(), **flags))["precision"]
            assert (policy.main_params_dtype, policy.main_grads_dtype, policy.grad_comm_dtype) == (params, grads, comm)

    run_on_ranks(run, 1)


def test_the_earlier_names_mean_the_same() -> None:
    assert HAVE_NVFSDP is HAVE_MEGATRON_FSDP is True

    def run() -> None:
        mesh = create_device_mesh(device_type="cpu")
        earlier = {
            "nvfsdp_unit_modules": ["torch.nn.Linear"],
            "data_parallel_sharding_strategy": "optim_grads",
            "check_for_nan_in_grad": True,
            "keep_fp8_transpose_cache_when_using_custom_fsdp": True,
        }
        today = {
            "megatron_fsdp_unit_modules": ["torch.nn.Linear"],
            "zero_dp_strategy": 2,
            "report_nan_in_param_grad": True,
            "keep_fp8_transpose_cache": True,
        }
        models = PlainTransformer(), PlainTransformer()
        first = record_options(lambda: nvfsdp_strategy_parallelize(models[0], mesh, **earlier))
        second = record_options(lambda: megatron_fsdp_strategy_parallelize(models[1], mesh, **today))
        for recorded in (first, second):
            del recorded["device_mesh"], recorded["expt_device_mesh"]
        assert first == second

        for options, message in (
            (
                {"data_parallel_sharding_strategy": "params"},
                r"'params' is unknown; use 'no_shard', .* or 'optim_",
            ),
            ({"dp_mesh_name": "dp"}, r"dp_mesh_name='dp' must be 'data_parallel', .* leave dp_mesh_name out"),
        ):
            with pytest.raises(ValueError, match=message):
                nvfsdp_strategy_parallelize(PlainTransformer(), mesh, **options)

    run_on_ranks(run, 1)


def test_an_option_that_the_installed_version_lacks_is_named() -> None:
    def run() -> None:
        package = megatron_fsdp.import_megatron_fsdp()
        signature = inspect.signature(package.fully_shard_model)
        older = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "nccl_ub"])
        with (
            patch("inspect.signature", lambda function: older),
            patch.object(megatron_fsdp, "_is_installed", bool),
            patch.object(megatron_fsdp, "keeps_buffers", lambda: True),
        ):
            assert parallelize(PlainTransformer(), zero_dp_strategy=2)
            with pytest.raises(
                ValueError, match=r"nccl_ub=True: megatron-fsdp .* has no such option; leave the option out"
            ):
                parallelize(PlainTransformer(), nccl_ub=True)

    run_on_ranks(run, 1)


def test_optimizers_that_cannot_be_taken_over_are_refused() -> None:
    def run() -> None:
        model = PlainTransformer()
        stepped = make_optimizer(model)
        plain_loss(model, make_token_batches(1, ragged=False)[0])[0].backward()
        stepped.step()
        with pytest.raises(ValueError, match=r"AdamW took a step before .*create a new"):
            parallelize(model, stepped)
        other = make_optimizer(PlainTransformer())
        with pytest.raises(ValueError, match=r"AdamW holds parameters that do not belong to the model"):
            parallelize(PlainTransformer(), other)

    run_on_ranks(run, 1)


def test_what_is_sharded_is_refused() -> None:
    def run() -> None:
        config = FSDP2Config()
        mesh = create_device_mesh(config, device_type="cpu")
        model = FSDP2Manager(config, mesh).parallelize(PlainTransformer())
        with pytest.raises(ValueError, match="modules that `fully_shard` was already applied to"):
            MegatronFSDPManager(MegatronFSDPConfig(), mesh).parallelize(model)

    run_on_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("zero_dp_strategy", ALL_STRATEGIES)
def test_a_checkpoint_goes_on(zero_dp_strategy: int, tmp_path: Path) -> None:
    batches = make_token_batches(2, ragged=False)

    def train(model: Any, optimizer: Any, batches: list[dict[str, Tensor]]) -> None:
        for batch in batches:
            plain_loss(model, {"input_ids": batch["input_ids"][dist.get_rank(), None]})[0].backward()
            optimizer.step()
            optimizer.zero_grad()

    def run() -> None:
        results = []
        for resumes in (False, True):
            torch.manual_seed(int(resumes))
            plain = PlainTransformer()
            model, optimizer = parallelize(plain, make_optimizer(plain), zero_dp_strategy=zero_dp_strategy)
            if resumes:
                load_checkpoint(tmp_path / "half", model=plain, optimizers=optimizer)
            else:
                train(model, optimizer, batches[:1])
                with torch.no_grad():
                    model(batches[0]["input_ids"])
                save_checkpoint(tmp_path / "half", model=plain, optimizers=optimizer)
            train(model, optimizer, batches[1:])
            results.append(whole(dict(plain.named_parameters())))
        torch.testing.assert_close(*results, rtol=0, atol=0)

    run_on_ranks(run, 2)

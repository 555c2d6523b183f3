"""Tensor parallel models under Megatron-FSDP in plain torch loops: what ranks compute with, send and save."""

import itertools
from collections.abc import Callable
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.cover import Matrix
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, assert_equal_gradients, whole
from helpers.strategies import STRATEGIES
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_fsdp2 import (
    MegatronFSDPConfig,
    MegatronFSDPManager,
    create_device_mesh,
    defer_grad_sync,
    load_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.checkpoint.formats import directory
from lightning_fsdp2.checkpoint.loading import load_model_state, read_checkpoint
from lightning_fsdp2.mesh import get_mesh
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.parallel.megatron import tensor_parallel
from lightning_fsdp2.parallel.megatron.driver import get_driver
from lightning_fsdp2.parallel.megatron.wrap import import_megatron_fsdp
from lightning_fsdp2.parallelizer import (
    get_hf_tp_shard_plan,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)
from lightning_fsdp2.ranks import whole_tensors
from lightning_fsdp2.sizes import DP_SHARD_CP
from lightning_fsdp2.weights.materialize import materialize
from lightning_fsdp2.weights.pretrained import load_pretrained

KIND = STRATEGIES["megatron_fsdp"]
OPTIMIZER = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON, fused=True)
ROUGH_LLAMA = {**LLAMA, "num_hidden_layers": 2, "initializer_range": 0.2}
QWEN3 = {**ROUGH_LLAMA, "model_type": "qwen3", "head_dim": 8}


class OwnColumns(ColwiseParallel):
    """A style that this package does not know: torch applies it, and the module computes with DTensors."""


class OwnRows(RowwiseParallel):
    """The other half."""


def make_plan(columns: type[ParallelStyle], rows: type[ParallelStyle]) -> dict[str, ParallelStyle]:
    names = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"))
    styles = {**dict.fromkeys(names, columns), "self_attn.o_proj": rows, "mlp.down_proj": rows}
    return {f"model.layers.*.{name}": style() for name, style in styles.items()}


TORCH_PLAN = make_plan(ColwiseParallel, RowwiseParallel)
FOREIGN_PLAN = make_plan(OwnColumns, OwnRows)


def parallelize(model: nn.Module, optimizer: Any = None, tp_size: int = 2, **flags: Any) -> Any:
    config = MegatronFSDPConfig(**flags)
    return MegatronFSDPManager(config, create_device_mesh(config, tp_size=tp_size)).parallelize(model, optimizer)


def make_model(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return make_causal_lm(config)


# ---------------------------------------------------------------------- the functions of the contract


@pytest.mark.guarantees("plain-loops")
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param(FOREIGN_PLAN, 2, id="foreign-2"),
        pytest.param(FOREIGN_PLAN, 4, id="foreign-4", marks=pytest.mark.slow),
        pytest.param(TORCH_PLAN, 4, id="torch-4", marks=pytest.mark.slow),
        pytest.param(None, 2, id="ours-2", marks=pytest.mark.slow),
        pytest.param("hf", 2, id="hf-2", marks=pytest.mark.slow),
        pytest.param("torch's plan", 2, id="translated-2", marks=pytest.mark.slow),
    ],
)
def test_the_earlier_name_trains_with_a_plan_as_one_process(plan: Any, ranks: int) -> None:
    def run() -> None:
        model = make_model(ROUGH_LLAMA)
        reference = deepcopy(model)
        own_plan = get_hf_tp_shard_plan(model) if plan == "torch's plan" else plan
        mesh = create_device_mesh(MegatronFSDPConfig(), tp_size=2)
        optimizers: list[Any] = [OPTIMIZER(each.parameters()) for each in (model, reference)]
        called, optimizers[0] = nvfsdp_strategy_parallelize(
            model, mesh, optimizers[0], tp_shard_plan=own_plan, tp_mesh_name="tensor_parallel"
        )
        rank = mesh["dp_shard"].get_local_rank()
        for batch in make_token_batches(ranks // 2, size=ranks // 2, ragged=False):
            ids = batch["input_ids"]
            loss = reference(input_ids=ids, labels=ids).loss
            loss.backward()
            called(input_ids=ids[rank, None], labels=ids[rank, None]).loss.backward()
            gradients = whole({name: parameter.grad for name, parameter in model.named_parameters()})
            assert_equal_gradients(gradients, {name: p.grad for name, p in reference.named_parameters()})
            for optimizer in optimizers:
                optimizer.step()
            reference.zero_grad()
            called.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        weights = whole(dict(model.named_parameters()))
        torch.testing.assert_close(weights, dict(reference.named_parameters()), rtol=0, atol=5e-5)

    KIND.run(run, ranks)


@pytest.mark.guarantees("double-buffer")
def test_torchs_styles_are_refused_with_buffers_that_units_share() -> None:
    def run() -> None:
        mesh = create_device_mesh(MegatronFSDPConfig(), tp_size=2)
        message = r"fsdp_double_buffer=True moves .* tp_plan shards model.layers.0.mlp.down_proj, .* torch's own styles"
        with pytest.raises(ValueError, match=message):
            megatron_fsdp_strategy_parallelize(
                make_model(ROUGH_LLAMA), mesh, tp_shard_plan=FOREIGN_PLAN, fsdp_double_buffer=True
            )

    KIND.run(run, 2)


# ---------------------------------------------------------------------- what ranks compute with


@pytest.mark.guarantees("double-buffer")
def test_modules_compute_with_raw_parameters_or_with_copies_but_not_with_views() -> None:
    """A saved view would not follow a parameter to another buffer."""

    def run() -> None:
        model = make_model(QWEN3)
        wrapper, _ = parallelize(model, sequence_parallel=True)
        raw = {id(parameter): parameter for parameter in wrapper.raw_param.values()}
        seen = []

        def look(module: nn.Module, args: Any) -> None:
            for parameter in (p for p in module._parameters.values() if p is not None):
                seen.append(id(parameter) in raw)
                storages = {each.untyped_storage().data_ptr() for each in raw.values()}
                assert seen[-1] or parameter.untyped_storage().data_ptr() not in storages

        for module in model.modules():
            if next(iter(module._parameters.values()), None) is not None:
                module.register_forward_pre_hook(look)
        ids = make_token_batches(1, ragged=False)[0]["input_ids"]
        wrapper(input_ids=ids, labels=ids).loss.backward()
        assert len(seen) == len(raw)
        assert sum(seen) == len(raw)

    KIND.run(run, 2)


# ---------------------------------------------------------------------- what ranks send


@pytest.mark.guarantees("partial-gradients-are-summed-once")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_partial_gradients_are_summed_by_one_all_reduce_per_step(accumulate: int) -> None:
    def run() -> None:
        model = make_model(QWEN3)
        wrapper, optimizer = parallelize(model, OPTIMIZER(model.parameters()), sequence_parallel=True)
        group = get_driver(model)._lift._tp_group
        batches = make_token_batches(2 * accumulate, ragged=False)
        for step in (batches[:accumulate], batches[accumulate:]):
            with patch.object(tensor_parallel.dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                for index, batch in enumerate(step):
                    loss = wrapper(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
                    if index < accumulate - 1:
                        with defer_grad_sync(wrapper):
                            loss.backward()
                    else:
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            groups = [call.kwargs.get("group") for call in all_reduce.call_args_list]
            assert groups.count(group) == 1

    KIND.run(run, 2)


@pytest.mark.guarantees("megatron-prefetching")
@pytest.mark.slow
@pytest.mark.parametrize("zero_dp_strategy", [2, 3])
def test_all_gathers_have_a_group_of_their_own_and_go_one_unit_ahead(zero_dp_strategy: int) -> None:
    def run() -> tuple[int, int, int]:
        config = MegatronFSDPConfig(zero_dp_strategy=zero_dp_strategy)
        mesh = create_device_mesh(config, tp_size=2)
        model = make_model(ROUGH_LLAMA)
        layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
        wrapper, _ = MegatronFSDPManager(config, mesh).parallelize(model)
        shards = get_mesh(mesh, DP_SHARD_CP).get_group()
        assert wrapper.dist_index.get_fsdp_group() is shards
        gathers = wrapper.dist_index.get_fsdp_group(independent_all_gather=True)
        assert gathers is not shards
        assert dist.get_process_group_ranks(gathers) == dist.get_process_group_ranks(shards)
        second, _ = MegatronFSDPManager(config, mesh).parallelize(make_model(ROUGH_LLAMA))
        assert second.dist_index.get_fsdp_group(independent_all_gather=True) is gathers
        return layer, wrapper.suggested_AG_prefetch_size, wrapper.suggested_RS_queue_capacity

    for layer, ahead, waiting in KIND.run(run, 4):
        norms = 2 * LLAMA["hidden_size"]  # every rank holds them whole
        assert ahead == (layer - norms) // 2 + norms
        assert waiting == 2 * ahead


# ---------------------------------------------------------------------- what ranks get by shards

PHI3 = {
    **LLAMA,
    "model_type": "phi3",
    "pad_token_id": 0,
    "hidden_size": 34,
    "head_dim": 8,
    "num_hidden_layers": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("r", [1, 4])
def test_packed_weights_whose_columns_the_ranks_do_not_divide_are_those_of_one_process(r: int, tmp_path: Path) -> None:
    """Weights with packed rows are sharded by columns. Of the 1 or 4 columns of an adapter, the last rank gets none."""
    base = make_model(PHI3)
    base.save_pretrained(tmp_path)

    def make() -> Any:
        config = LoraConfig(r=r, init_lora_weights=False, target_modules="all-linear")
        return get_peft_model(from_pretrained(str(tmp_path)), config)

    def run() -> None:
        model, alone = make(), make()
        torch.manual_seed(0)
        parallelize(model, init_fsdp_with_meta_device=True)
        torch.manual_seed(0)
        load_pretrained(alone, torch.device("cpu"))
        materialize(alone, torch.device("cpu"))
        torch.testing.assert_close(whole(model.state_dict()), alone.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(alone.unload().state_dict(), base.state_dict(), rtol=0, atol=0)

    KIND.run(run, 6)


# ---------------------------------------------------------------------- what ranks save


@pytest.mark.guarantees("nothing-is-converted")
@pytest.mark.slow
def test_a_save_and_a_load_gather_no_tensor(tmp_path: Path) -> None:
    def run() -> None:
        model = make_model(QWEN3)
        wrapper, optimizer = parallelize(model, OPTIMIZER(model.parameters()))
        ids = make_token_batches(1, ragged=False)[0]["input_ids"]
        wrapper(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        expected = whole(dict(model.named_parameters()))
        with patch.object(whole_tensors, "_gather", side_effect=AssertionError("gathered")):
            save_checkpoint(tmp_path / "a.ckpt", wrapper, optimizer)
            other = make_causal_lm(QWEN3)
            read, read_optimizer = parallelize(other, OPTIMIZER(other.parameters()))
            load_checkpoint(tmp_path / "a.ckpt", read, read_optimizer)
        torch.testing.assert_close(whole(dict(other.named_parameters())), expected, rtol=0, atol=0)

    KIND.run(run, 4)


class Holds(nn.Module):
    """A model in an attribute of a given name."""

    rename: Callable[[str], str]

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.add_module(attribute, make_causal_lm(QWEN3))


def rename_attribute(name: str) -> str:
    return name.replace("hf.", "net.")


def exchange_projections(name: str) -> str:
    old, new = "gate_proj", "up_proj"
    return name.replace(old, new) if old in name else name.replace(new, old)


class RenamesInMethod(Holds):
    """A model whose own ``load_state_dict`` changes its argument."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        rename_all(self, state_dict)
        return super().load_state_dict(state_dict, *args, **options)


def rename_all(module: Any, state: dict[str, Any], *args: Any) -> None:
    renamed = {module.rename(name): state.pop(name) for name in list(state)}
    state |= renamed


RENAMED = {"net": rename_attribute, "hf": exchange_projections}


CELLS = {
    "-".join(map(str, cell)): dict(zip(("attribute", "where", "tp_size"), cell, strict=True))
    for cell in itertools.product(RENAMED, ("hook", "method", "before"), (1, 2))
}
MATRIX = Matrix(
    "renamed weights under Megatron-FSDP",
    CELLS,
    fast=["net-hook-1", "hf-before-1"],
    costs={name: cell["tp_size"] for name, cell in CELLS.items()},
)


@pytest.mark.parametrize(
    ("attribute", "where", "tp_size"),
    MATRIX.list_parameters({name: tuple(cell.values()) for name, cell in CELLS.items()}),
)
def test_weights_may_be_renamed(attribute: str, where: str, tp_size: int, tmp_path: Path) -> None:
    """Weights of unknown names have even shards, and those of equally large weights may have other rows."""
    rename = RENAMED[attribute]

    def run() -> None:
        config = MegatronFSDPConfig()
        manager = MegatronFSDPManager(config, create_device_mesh(config, tp_size=tp_size))
        saved, loaded = Holds("hf"), (RenamesInMethod if where == "method" else Holds)(attribute)
        loaded.rename = rename
        wrappers = [manager.parallelize(module)[0] for module in (saved, loaded)]
        save_checkpoint(tmp_path / "a.ckpt", wrappers[0])
        if where == "before":  # as in the Trainer's `on_load_checkpoint`
            state = read_checkpoint(tmp_path / "a.ckpt", loaded)["state_dict"]
            load_model_state(tmp_path, loaded, {rename(name): value for name, value in state.items()})
        else:
            if where == "hook":
                loaded.register_load_state_dict_pre_hook(rename_all)
            load_checkpoint(tmp_path / "a.ckpt", wrappers[1])
        actual = whole(dict(loaded.named_parameters()))
        for name, weight in whole(dict(saved.named_parameters())).items():
            assert torch.equal(actual[rename(name)], weight), name

    KIND.run(run, 2 * tp_size)


@pytest.mark.parametrize(
    ("message", "error", "expected"),
    [
        ("out of memory", RuntimeError, "out of memory"),
        (
            "shape '[-1, 3, 4, 4]' is invalid for input of size 320",
            ValueError,
            "over 2 data parallel ranks: .*in the middle of a row",
        ),
    ],
    ids=["any", "rows"],
)
def test_an_error_of_the_package_on_one_rank_ends_all(message: str, error: Any, expected: str) -> None:
    package = import_megatron_fsdp()

    @wraps(package.fully_shard_model)
    def fail_on_one(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError(message)

    def run() -> None:
        with patch.object(package, "fully_shard_model", fail_on_one), pytest.raises(error, match=expected):
            parallelize(make_model(ROUGH_LLAMA))

    KIND.run(run, 4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_save_asks_for_the_space_of_one_copy(ranks: int, tmp_path: Path) -> None:
    """However many ranks hold copies of a weight, or of a part of it."""
    layouts = [(tp_size, zero_dp_strategy) for tp_size in (1, 2) for zero_dp_strategy in (0, 3)]
    expected = sum(tensor.nbytes for tensor in make_model(QWEN3).state_dict().values())

    def run() -> list[int]:
        asked = []
        for index, (tp_size, zero_dp_strategy) in enumerate(layouts):
            wrapper, _ = parallelize(make_model(QWEN3), tp_size=tp_size, zero_dp_strategy=zero_dp_strategy)
            with patch.object(directory, "check_free_space") as check:
                save_checkpoint(tmp_path / f"{index}.ckpt", wrapper)
            asked += [call.args[1] for call in check.call_args_list]
        return asked

    asked = KIND.run(run, ranks)[0]
    assert asked == pytest.approx([expected] * len(layouts), rel=0.05)


@pytest.mark.filterwarnings("ignore:The loss does not use")
@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_without_elements_come_back(tp_size: int, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = make_causal_lm({**QWEN3, "num_hidden_layers": 1})
        for module in (model, model.model.layers[0]):
            module.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
        return model

    def run() -> None:
        model, other, plain = make(0), make(1), make(2)
        wrapper, optimizer = parallelize(model, OPTIMIZER(model.parameters()), tp_size)
        ids = make_token_batches(1, ragged=False)[0]["input_ids"]
        wrapper(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        save_checkpoint(tmp_path / "a.ckpt", wrapper, optimizer)
        expected = whole(model.state_dict())
        read, read_optimizer = parallelize(other, OPTIMIZER(other.parameters()), tp_size)
        load_checkpoint(tmp_path / "a.ckpt", read, read_optimizer)
        load_checkpoint(tmp_path / "a.ckpt", plain)
        for loaded in (other, plain):
            torch.testing.assert_close(whole(loaded.state_dict()), expected, rtol=0, atol=0)
        for parameter in (other.nothing, other.model.layers[0].nothing):
            assert parameter.shape == read_optimizer.state[parameter]["exp_avg"].shape == (0, 4)

    KIND.run(run, 2)

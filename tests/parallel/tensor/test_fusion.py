"""Asynchronous tensor parallelism on CPU: which collectives inductor fuses, that the gradients stay, what is said.

The fused operations need GPUs that read each other's memory. Here they run as what they replace, torch's fallbacks.
"""

import copy
import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.async_on_cpu import FUSED, fuse_on_cpu
from helpers.compiler import needs_compiler
from helpers.flags import FUSED as FUSED_COLLECTIVES
from helpers.models import LLAMA, PlainTransformer
from helpers.oracle import assert_equal_gradients
from helpers.ranks import run_ranks
from helpers.tensor_parallel import get_gradients, make_mesh, make_rough_model, refuse
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.parallel.tensor import fusion
from lightning_fsdp2.parallel.tensor.fusion import CollectiveFusion
from lightning_fsdp2.parallelizer import fsdp2_strategy_parallelize

FLAGS: dict[str, Any] = {"sequence_parallel": True, "enable_compile": True, "enable_async_tensor_parallel": True}
PLAIN: dict[str, Any] = {"sequence_parallel": True}


def parallelize(model: torch.nn.Module, tp_size: int, **flags: Any) -> Any:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **flags)
    return FSDP2Manager(config, create_device_mesh(config, tp_size=tp_size, device_type="cpu")).parallelize(model)


def run_step(model: Any, batch_size: int, seed: int = 1) -> dict[str, Tensor | None]:
    model.zero_grad()
    input_ids = torch.randint(3, 101, (batch_size, 16), generator=torch.Generator().manual_seed(seed))
    model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
    return get_gradients(model)


# ---------------------------------------------------------------------- fusion


def make_model_of_four_ranks() -> Any:
    """Build one layer of rank 0 of four. The other ranks do not exist, because a fake group does not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    return parallelize(make_rough_model({**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 4}), 4, **FLAGS)


def check_graphs(forward: Counter[str], backward: Counter[str]) -> None:
    assert forward == {
        "fused_all_gather_matmul": FUSED_COLLECTIVES["forward: all-gathers fused"],
        "fused_matmul_reduce_scatter": FUSED_COLLECTIVES["forward: reduce-scatters fused"],
        "all_gather_into_tensor": 1,  # the last layer gathers the sequence, and this is the last one
    }
    # the gradient of what is gathered is a sum of products, which no version of torch fuses; that of the part that the
    # first layer is given is gathered outside of it
    assert backward == {
        "fused_all_gather_matmul": FUSED_COLLECTIVES["backward: all-gathers fused"],
        "reduce_scatter_tensor": FUSED_COLLECTIVES["backward: reduce-scatters left"],
    }


@pytest.mark.guarantees("list-of-flags")
@needs_compiler
@pytest.mark.slow
def test_all_gathers_and_the_reduce_scatters_of_forward_are_fused() -> None:
    def run() -> None:
        torch.set_default_dtype(torch.bfloat16)
        with fuse_on_cpu() as graphs:
            model = make_model_of_four_ranks()
            for _ in range(2):
                run_step(model, 2)
        check_graphs(*graphs)

    run_ranks(run, 1, group=False)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "batch_size"), [(False, 1), ("full", 2)])
def test_gradients_stay_and_the_number_of_fused_collectives_is_logged_once(mode: Any, batch_size: int) -> None:
    def run() -> list[str]:
        messages = collect_messages()
        plain = make_rough_model({**LLAMA, "num_hidden_layers": 1})
        options = {"activation_checkpointing": mode, **FLAGS}
        with fuse_on_cpu() as graphs:
            fused = parallelize(copy.deepcopy(plain), 2, **options)
            plain = parallelize(plain, 2, **PLAIN)
            for step in range(4):
                assert_equal_gradients(run_step(fused, batch_size, step), run_step(plain, batch_size, step))
        if not mode:
            check_graphs(*graphs)
        assert sum(graph[name] for graph in graphs for name in FUSED) >= 6
        assert not torch._inductor.config._micro_pipeline_tp
        return messages

    messages, others = run_ranks(run, 2)
    assert len(messages) == 1
    assert messages[0].startswith("INFO Asynchronous tensor parallel: fused ")
    assert mode or "fused 6 of 9 collectives" in messages[0]
    assert others == []


@needs_compiler
@pytest.mark.slow
def test_a_group_whose_memory_is_not_shared_is_warned_of() -> None:
    def run() -> list[str]:
        messages = collect_messages()
        with fuse_on_cpu(), _symmetric_memory._test_mode(group_names=set()):
            model = make_model_of_four_ranks()
            for step in range(4):
                run_step(model, 1, step)
        return messages

    (message,) = run_ranks(run, 1, group=False)[0]
    assert message.startswith("WARNING enable_async_tensor_parallel=True: fused 0 of 9 collectives")


def collect_messages() -> list[str]:
    """What this process logs about it from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    fusion.logger.addHandler(handler)
    fusion.logger.setLevel(logging.INFO)
    return messages


def make_graph(placeholder: str) -> torch.fx.Graph:
    """One all-gather that is not fused."""
    graph = torch.fx.Graph()
    gathered = graph.call_function(
        torch.ops._c10d_functional.all_gather_into_tensor.default, (graph.placeholder(placeholder), 2, "0")
    )
    graph.output(gathered)
    return graph


def test_the_report_waits_for_backward_and_is_made_once() -> None:
    def run() -> list[str]:
        messages = collect_messages()
        fusion = CollectiveFusion(make_mesh().get_group())
        fusion.report()
        fusion.count(make_graph("primals_1"))
        fusion.report()
        assert messages == []
        for _ in range(2):
            fusion.count(make_graph("tangents_1"))
            fusion.report()
        return messages

    (message,), others = run_ranks(run, 2)
    assert message.startswith("WARNING enable_async_tensor_parallel=True: fused 0 of 2 collectives")
    assert others == []


# ---------------------------------------------------------------------- refusals


def test_what_has_nothing_to_overlap_is_refused_before_anything_is_touched() -> None:
    def run() -> None:
        model = make_rough_model(LLAMA)
        with refuse(
            model, ValueError, r"enable_async_tensor_parallel=True with tp_size=1: .* Use tp_size > 1, or leave"
        ):
            parallelize(model, 1, **FLAGS)
        with refuse(
            model,
            ValueError,
            r"enable_async_tensor_parallel=True on 'cpu' devices: the flag needs CUDA .* Leave the flag",
        ):
            parallelize(model, 2, **FLAGS)
        # the function turns on what it needs, as the config does
        mesh = create_device_mesh(tp_size=2, device_type="cpu")
        with (
            pytest.warns(
                UserWarning, match="needs sequence_parallel=True and enable_compile=True, which is now turned on"
            ),
            refuse(model, ValueError, "enable_async_tensor_parallel=True on 'cpu' devices"),
        ):
            fsdp2_strategy_parallelize(model, mesh, enable_async_tensor_parallel=True)

    run_ranks(run, 2)


def test_compiling_later_is_refused_alike() -> None:
    def run() -> None:
        config = FSDP2Config(**FLAGS)
        manager = FSDP2Manager(config, create_device_mesh(config, device_type="cpu"))
        with pytest.raises(ValueError, match="enable_async_tensor_parallel=True with tp_size=1"):
            manager.maybe_compile(PlainTransformer())

    run_ranks(run, 1)

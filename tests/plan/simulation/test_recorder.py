from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_fsdp2.compat.torch_simulation import simulate_world
from lightning_fsdp2.plan.simulation.recorder import (
    ACTIVATIONS,
    COMMUNICATION_BUFFERS,
    LOGITS,
    TEMPORARIES,
    StepRecorder,
)


def test_what_is_resized_and_what_is_freed_is_seen() -> None:
    with StepRecorder({}) as recorder:
        recorder.begin("forward")
        first = torch.empty(256)
        first.untyped_storage().resize_(0)
        second = torch.empty(128)
        view = second[:64]
        del second
        third = torch.empty(64)
        del view, third
    assert [change.bytes for change in recorder.get_recording().changes] == [1024, -1024, 512, 256, -512, -256]


def test_what_forward_leaves_is_activations_and_what_is_as_wide_as_the_vocabulary_is_logits() -> None:
    weight = torch.ones(7, 4, requires_grad=True)
    with StepRecorder({}, vocabulary=[7]) as recorder:
        recorder.begin("forward")
        hidden = torch.ones(5, 4).exp()
        logits = F.linear(hidden, weight)
        recorder.label_rest(ACTIVATIONS, phase="forward")
        recorder.begin("backward")
        temporary = torch.ones(3)
        del temporary
    sizes = [(change.category, change.bytes) for change in recorder.get_recording().changes if change.bytes > 0]
    assert (ACTIVATIONS, hidden.nbytes) in sizes
    assert (LOGITS, logits.nbytes) in sizes
    assert sizes[-1] == (TEMPORARIES, 12)
    assert [name for _, name in recorder.get_recording().phases] == ["forward", "backward"]


def test_tensors_of_which_dtensor_needs_only_the_shape_are_not_seen() -> None:
    def run() -> list[int]:
        with simulate_world(8):
            mesh = init_device_mesh("cpu", (8,))
            with FakeTensorMode():
                shards = [DTensor.from_local(torch.zeros(4, 16), mesh, [Shard(0)]) for _ in range(2)]
                with StepRecorder({}) as recorder:
                    recorder.begin("optimizer")
                    torch._foreach_mul_(shards, 2.0)
                    roots = torch._foreach_sqrt(shards)
                    del roots
        return [change.bytes for change in recorder.get_recording().changes]

    # the shards existed before, and each root is as large as a shard
    assert run_ranks(run, 1, group=False) == [[256, 256, -256, -256]]


def test_what_is_known_is_no_logits_whatever_its_size() -> None:
    with StepRecorder({}, vocabulary=[7]) as recorder:
        recorder.begin("forward")
        buffers = torch.ones(2, 7)
        recorder.label([buffers], COMMUNICATION_BUFFERS)
    assert [change.category for change in recorder.get_recording().changes] == [COMMUNICATION_BUFFERS]


def test_operations_by_their_products_and_their_bytes() -> None:
    first, second = torch.ones(8, 16), torch.ones(16, 4, dtype=torch.float32)
    table, ids = torch.ones(1000, 4), torch.zeros(6, dtype=torch.int64)
    with StepRecorder({}) as recorder:
        recorder.begin("forward")
        product = first @ second
        product.view(-1)
        product + product
        F.embedding(ids, table)
    matmul, add, lookup = recorder.get_recording().operations
    assert (matmul.flops, matmul.bytes) == (2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))
    assert (add.flops, add.bytes) == (0, 2 * product.nbytes)  # it reads one tensor
    assert lookup.bytes == 2 * 4 * 6 * 4 + ids.nbytes  # the rows it looks up, not the table
    assert recorder.get_recording().flops == matmul.flops


SOURCE = torch.ones(64, 32)


def add_in_place(target: Tensor) -> None:
    target.add_(SOURCE)


@pytest.mark.parametrize(
    ("function", "expected"),
    [  # in tensors of the size of SOURCE, read and written
        (lambda target: target.device, 0),
        (lambda target: torch.ops.prim.device(target), 0),
        (lambda target: torch.ops.aten._unsafe_view(target, [32, 64]), 0),
        (lambda target: target.reshape(32, 64), 0),
        (lambda target: target.detach(), 0),
        (lambda target: target.expand(5, 64, 32), 0),
        (lambda target: target.transpose_(0, 1), 0),
        (lambda target: torch.empty_like(target), 0),
        (lambda target: target.new_empty(64, 32), 0),
        (lambda target: torch.zeros_like(target), 1),
        (lambda target: target.zero_(), 1),
        (lambda target: target.copy_(SOURCE), 2),
        (lambda target: target.clone(), 2),
        (lambda target: target.expand(5, 64, 32).clone(), 6),
        (lambda target: torch.add(SOURCE, SOURCE, out=target), 2),
        (add_in_place, 3),
        (lambda target: torch._foreach_mul_([target, SOURCE], 1.0), 4),
        (lambda target: torch._foreach_add_([target], [SOURCE]), 3),
        (lambda target: target.index_add_(0, torch.tensor([1, 1]), SOURCE[:2]), 3 / 32 + 16 / SOURCE.nbytes),
        (lambda target: torch.ops._c10d_functional.wait_tensor(target), 0),
    ],
)
def test_only_what_moves_bytes_is_counted(function: Any, expected: float) -> None:
    with StepRecorder({}) as recorder:
        recorder.begin("forward")
        function(torch.ones(64, 32))
    made = SOURCE.nbytes  # by torch.ones
    assert sum(operation.bytes for operation in recorder.get_recording().operations) - made == expected * SOURCE.nbytes


def test_an_optimizer_reads_gradients_and_changes_the_rest() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 32))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for _ in range(2):
        parameter.grad = torch.ones(64, 32)
        with StepRecorder({}) as recorder:
            recorder.begin("optimizer")
            optimizer.step()
    (step,) = (call for call in recorder.get_recording().operations if call.bytes >= SOURCE.nbytes)
    assert step.bytes == pytest.approx(7 * SOURCE.nbytes, abs=8)  # and a counter


def test_fake_tensors_are_asked_for_their_device_for_nothing() -> None:
    with FakeTensorMode(), StepRecorder({}) as recorder:
        recorder.begin("forward")
        hidden = torch.ones(64, 32)
        F.linear(hidden, torch.ones(16, 32)).view(-1)
    expected = 4 * (64 * 32 + 16 * 32)  # what is made
    expected += expected + 4 * 64 * 16
    assert sum(operation.bytes for operation in recorder.get_recording().operations) == expected


def test_causal_attention_has_half_of_the_products() -> None:
    query = torch.ones(1, 2, 64, 16)

    def count(is_causal: bool) -> int:
        with StepRecorder({}) as recorder:
            recorder.begin("forward")
            F.scaled_dot_product_attention(query, query, query, is_causal=is_causal)
        return recorder.get_recording().flops

    assert count(False) == 2 * count(True) == 2 * 2 * 2 * 64 * 64 * 16

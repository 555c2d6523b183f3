"""The embedding's sum over the ranks: one reduce-scatter for a layer, and the whole for whatever else reads it."""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.cover import Matrix
from helpers.models import LLAMA
from helpers.ranks import run_ranks
from helpers.tensor_parallel import make_rough_model
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.ranks.pending_sum import PendingSum

SHAPE = (2, 4, 3)


def make_summand() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(SHAPE, generator=generator, requires_grad=True)


def make() -> tuple[Tensor, PendingSum, Tensor]:
    """Return a rank's summand, the pending sum, and the sum as torch computes it."""
    summand = make_summand()
    whole = summand.detach().clone()
    dist.all_reduce(whole)
    return summand, PendingSum.make(summand * 1, dist.group.WORLD), whole


class Twice(torch.autograd.Function):
    """A user's function: torch asks no subclass before it runs one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def scale_in_place(tensor: Tensor) -> Tensor:
    tensor *= 3
    return tensor


class Doubled(torch.autograd.Function):
    """Reads its input without gradients, and gives it back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor + tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


def read_first(read: Callable[[Tensor], Any], context: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def read_twice(tensor: Tensor) -> Tensor:
        with context():
            read(tensor)
        return tensor * torch.tensor(2.0, requires_grad=True)  # saves what was read, for the gradient of the factor

    return read_twice


@torch.compile(backend="aot_eager")
def scale_compiled(tensor: Tensor) -> Tensor:
    return tensor * 2


READERS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "operator": (lambda tensor: tensor * 2 + torch.ones(SHAPE), 2),
    "function": (lambda tensor: torch.cat([tensor, torch.zeros(SHAPE)], 1), 1),
    "checkpoint": (lambda tensor: checkpoint(lambda value: value * 2, tensor, use_reentrant=False), 2),
    "in place": (scale_in_place, 3),
    "autograd function": (Twice.apply, 2),
    "autograd function and operator": (lambda tensor: Doubled.apply(tensor) + tensor, 3),
    "first without gradients": (read_first(Tensor.norm, torch.no_grad), 2),
    "first in inference mode": (read_first(Tensor.norm, torch.inference_mode), 2),
    "first by value": (read_first(Tensor.tolist, nullcontext), 2),
    "reentrant checkpoint": (lambda tensor: checkpoint(lambda value: value * 2, tensor, use_reentrant=True), 2),
    "vmap": (torch.vmap(lambda row: row * 2), 2),
    "compiled": (scale_compiled, 2),
}


def test_what_it_is_is_known_without_communication() -> None:
    def run() -> None:
        with StepCounter() as counter:
            summand = make_summand()
            pending = PendingSum.make(summand, dist.group.WORLD)
            assert (pending.shape, pending.size(1), pending.size(dim=1), pending.ndim) == (SHAPE, 4, 4, 3)
            assert (pending.dtype, pending.device, pending.requires_grad) == (torch.float32, summand.device, True)
            assert pending.is_floating_point()
            assert isinstance(pending, Tensor)
        assert not counter.collectives

    run_ranks(run, 2)


@pytest.mark.parametrize("name", READERS)
def test_whatever_reads_it_gets_the_whole_sum(name: str) -> None:
    def run() -> None:
        read, factor = READERS[name]
        summand, pending, whole = make()
        result = read(pending)
        torch.testing.assert_close(result, read(whole))
        assert type(result) is Tensor
        result.sum().backward()
        torch.testing.assert_close(summand.grad, torch.full(SHAPE, float(factor)))

    run_ranks(run, 2)


@pytest.mark.guarantees("scattered-embeddings")
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_costs_one_reduce_scatter_and_its_gradient_one_all_gather(dim: int) -> None:
    def run() -> None:
        summand, pending, whole = make()
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
        with StepCounter() as counter:
            part = pending.get_part(dim)
        assert counter.collectives == {"reduce_scatter": 1}
        torch.testing.assert_close(part, whole.chunk(2, dim)[dist.get_rank()])
        with StepCounter() as counter:
            (part * weight.chunk(2, dim)[dist.get_rank()]).sum().backward()
        assert counter.collectives == {"all_gather": 1}
        torch.testing.assert_close(summand.grad, weight)

    run_ranks(run, 2)


def test_the_part_of_one_that_was_changed_is_changed() -> None:
    def run() -> None:
        _, pending, whole = make()
        mask = torch.zeros(SHAPE[:2], dtype=torch.bool)
        mask[:, ::2] = True
        for tensor in (pending, whole):  # the embeddings of an image
            tensor[mask] = 0.5
        with StepCounter() as counter:
            part = pending.get_part(1)
        assert not counter.collectives
        torch.testing.assert_close(part, whole.chunk(2, 1)[dist.get_rank()])

    run_ranks(run, 2)


def test_a_checkpoint_that_takes_the_part_itself_computes_it_again() -> None:
    def run() -> None:
        gradients = []
        for repeats in (False, True):
            summand, pending, _ = make()
            take = lambda value: torch.tanh(value.get_part(1))  # noqa: E731
            with StepCounter() as counter:
                part = checkpoint(take, pending, use_reentrant=False) if repeats else take(pending)
            assert counter.collectives == {"reduce_scatter": 1}
            part.sum().backward()
            gradients.append(summand.grad)
        torch.testing.assert_close(*gradients, rtol=0, atol=0)

    run_ranks(run, 2)


def test_torch_detaches_it_without_adding_up() -> None:
    """As activation checkpointing does with what it saves."""

    def run() -> None:
        _, pending, whole = make()
        with StepCounter() as counter, torch._C.DisableTorchFunctionSubclass():
            detached = pending.detach()
        assert not counter.collectives
        torch.testing.assert_close(detached.get_part(1), whole.chunk(2, 1)[dist.get_rank()])

    run_ranks(run, 2)


def test_it_is_saved_and_copied_whole() -> None:
    def run() -> None:
        _, pending, whole = make()
        file = io.BytesIO()
        torch.save(pending.detach(), file)
        file.seek(0)
        for copied in (torch.load(file), copy.deepcopy(pending.detach())):
            assert type(copied) is Tensor
            torch.testing.assert_close(copied, whole)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- the recipe


RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "autocast": {"autocast_dtype": "bfloat16"},
    "compiled": {"enable_compile": True},
    "compiled, full": {"enable_compile": True, "activation_checkpointing": "full"},
    "compiled, selective": {"enable_compile": True, "activation_checkpointing": "selective"},
}
CELLS = {
    f"{ranks}-{name}": {
        "ranks": ranks,
        "compiled": "enable_compile" in flags,
        "activation_checkpointing": flags.get("activation_checkpointing"),
        "dtype": name if name in ("mixed", "autocast") else "float32",
    }
    for ranks in (2, 4)
    for name, flags in RECIPES.items()
}
MATRIX = Matrix(
    "embeddings that wait for their sum",
    CELLS,
    fast=[f"2-{name}" for name in RECIPES if not name.startswith("compiled")],
    costs={name: cell["ranks"] * (4 if cell["compiled"] else 1) for name, cell in CELLS.items()},
)


def refuse(pending: PendingSum) -> NoReturn:
    raise AssertionError("The embeddings were read before the first layer.")


def test_after_the_forward_it_is_an_error_to_read_it_for_the_first_time() -> None:
    def run() -> None:
        summand, read, _ = make()
        _, unread, whole = make()
        del summand
        result = read * 1
        for pending in (read, unread):
            pending.summands.end()
        torch.testing.assert_close(read + 0, result)
        assert unread.shape == whole.shape
        with pytest.raises(RuntimeError, match=r"sequence_parallel=True: .* read after the model's forward"):
            unread.sum()

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("world_size", "name"),
    MATRIX.list_parameters({f"{ranks}-{name}": (ranks, name) for ranks in (2, 4) for name in RECIPES}),
)
@pytest.mark.usefixtures("compile_without_code")
def test_nothing_reads_the_embeddings_of_a_sharded_model_before_its_first_layer(world_size: int, name: str) -> None:
    def run() -> None:
        config = FSDP2Config(sequence_parallel=True, **{"mp_policy": MixedPrecisionPolicy(), **RECIPES[name]})
        plain = make_rough_model({**LLAMA, "num_hidden_layers": 2})
        model = FSDP2Manager(config, create_device_mesh(config, tp_size=2)).parallelize(plain)
        ids = torch.arange(12).reshape(1, 12)
        with patch.object(PendingSum, "get_whole", refuse):
            for _ in range(2):  # the first step is verified
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    run_ranks(run, world_size)


IDS = torch.arange(24).reshape(2, 12)


def make_model(**flags: Any) -> Any:
    config = FSDP2Config(sequence_parallel=True, mp_policy=MixedPrecisionPolicy(), **flags)
    return FSDP2Manager(config, create_device_mesh(config, tp_size=2)).parallelize(make_rough_model(LLAMA))


def test_a_hook_on_one_rank_gets_the_embeddings_themselves_and_so_do_all_ranks() -> None:
    def run() -> list[float]:
        model = make_model()
        norms: list[float] = []
        if dist.get_rank() == 0:
            model.model.embed_tokens.register_forward_hook(lambda _, args, output: norms.append(output.norm().item()))
        for _ in range(2):
            with StepCounter() as counter:
                model(input_ids=IDS, use_cache=False)
        assert counter.collectives["all_reduce"] == 1
        return norms

    first, second = run_ranks(run, 2)[0]
    assert first == second > 0


def test_a_hook_that_came_later_may_look_but_not_read() -> None:
    def run() -> None:
        model = make_model()
        expected = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        shapes: list[Any] = []
        if dist.get_rank() == 0:
            hook = model.model.embed_tokens.register_forward_hook(lambda _, args, output: shapes.append(output.shape))
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS, use_cache=False).loss, expected, rtol=0, atol=0)
        assert len(shapes) == (dist.get_rank() == 0)
        if dist.get_rank() == 0:
            hook.remove()
        model.model.embed_tokens.register_forward_hook(lambda _, args, output: shapes.append(output.norm()))
        with pytest.raises(
            RuntimeError, match=r"sequence_parallel=True: .* Register the hook before the first forward"
        ):
            model(input_ids=IDS, use_cache=False)
        with torch.no_grad():  # the first of its kind
            model(input_ids=IDS, use_cache=False)

    run_ranks(run, 2)


def test_direct_calls_get_the_embeddings_themselves() -> None:
    def run() -> None:
        model = make_model()
        model(input_ids=IDS, use_cache=False)
        assert type(model.model.embed_tokens(IDS)) is Tensor

    run_ranks(run, 2)


def test_a_model_that_runs_in_a_hook_of_itself_leaves_the_outer_forward_alone() -> None:
    def run() -> None:
        model = make_model()
        expected = model(input_ids=IDS, labels=IDS, use_cache=False).loss

        def look_back(module: Any, args: Any) -> None:
            hook.remove()
            with torch.no_grad():
                model.model(input_ids=IDS, use_cache=False)

        hook = model.model.rotary_emb.register_forward_pre_hook(look_back)
        actual = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    run_ranks(run, 2)


def test_recorded_embeddings_are_whole() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        config = FSDP2Config(sequence_parallel=True, mp_policy=MixedPrecisionPolicy())
        model: Any = FSDP2Manager(config, create_device_mesh(config, tp_size=2)).parallelize(copy.deepcopy(plain))
        ids = torch.arange(12).reshape(1, 12)
        expected, actual = (m(input_ids=ids, use_cache=False, output_hidden_states=True) for m in (plain, model))
        assert {type(states) for states in actual.hidden_states} == {Tensor}
        torch.testing.assert_close(actual.hidden_states, expected.hidden_states)

    run_ranks(run, 2)

"""Layouts of parameters, their DTensors, and the plain tensors that modules compute with."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.ranks import run_ranks
from helpers.tensor_parallel import make_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_fsdp2.compat.torch import StridedShard, has_packed_shards
from lightning_fsdp2.modules.wrapping import wrap_method
from lightning_fsdp2.parallel.tensor.parameters import (
    Layout,
    Slot,
    compute_with_local_parameters,
    get_packed_layout,
    get_slots,
    shard_parameters,
)


def count_up(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def take_rows(whole: Tensor, *rows: int) -> Tensor:
    return whole[list(rows)]


# ---------------------------------------------------------------------- layouts


def test_the_shard_of_each_rank_is_a_copy_of_its_chunk() -> None:
    whole = count_up(7, 4)
    for placement, dim, ranks in ((Shard(0), 0, 2), (Shard(0), 0, 3), (Shard(1), 1, 2), (Shard(1), 1, 3)):
        for rank in range(ranks):
            shard = Layout(placement=placement).get_shard(whole, rank, ranks)
            chunks = whole.chunk(ranks, dim)
            torch.testing.assert_close(shard, chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0))
            assert shard.is_contiguous()
            assert shard.untyped_storage().nbytes() == shard.numel() * 4, "the whole is kept alive"
    assert [Layout(placement=Shard(0)).get_shard(count_up(4, 2), rank, 3).size(0) for rank in range(3)] == [2, 2, 0]


def test_the_shard_of_a_packed_parameter_has_a_part_of_each_section() -> None:
    whole = count_up(8, 4)
    layout = Layout(placement=StridedShard(0, split_factor=2))
    assert torch.equal(layout.get_shard(whole, 0, 2), take_rows(whole, 0, 1, 4, 5))
    assert torch.equal(layout.get_shard(whole, 1, 2), take_rows(whole, 2, 3, 6, 7))
    assert layout.get_shard(whole, 1, 2).untyped_storage().nbytes() == 16 * 4
    columns = Layout(placement=StridedShard(1, split_factor=2))
    assert torch.equal(columns.get_shard(whole.mT, 1, 2), take_rows(whole, 2, 3, 6, 7).mT)
    uneven = [Layout(placement=StridedShard(0, split_factor=2)).get_shard(count_up(6, 2), rank, 2) for rank in (0, 1)]
    assert torch.equal(uneven[0], take_rows(count_up(6, 2), 0, 1, 3, 4))
    assert torch.equal(uneven[1], take_rows(count_up(6, 2), 2, 5))


def test_a_replicated_parameter_is_whole_on_every_rank() -> None:
    whole = count_up(3, 2)
    assert [torch.equal(Layout().get_shard(whole, rank, 2), whole) for rank in range(2)] == [True, True]


def test_packed_layouts_know_the_sizes_of_which_each_rank_takes_its_share() -> None:
    matrix, vector, cube = count_up(12, 4), count_up(12), count_up(2, 8, 4)
    assert get_packed_layout(matrix, 0, 2).get_parts(matrix) == (6, 6)
    assert get_packed_layout(matrix, 0, (4, 4, 4)).get_parts(matrix) == (4, 4, 4)
    assert get_packed_layout(matrix, 0, (6, 3, 3)).get_parts(matrix) == (6, 3, 3)
    assert get_packed_layout(vector, 0, 3).get_parts(vector) == (4, 4, 4)
    assert get_packed_layout(cube, -2, 2).get_parts(cube) == (4, 4)
    assert Layout(placement=Shard(1)).get_parts(matrix) == (4,)


def test_a_packed_layout_is_kept_as_a_shard_wherever_that_is_possible() -> None:
    matrix, vector = count_up(12, 4), count_up(12)
    packed = StridedShard(0, split_factor=2) if has_packed_shards() else Shard(0)
    assert get_packed_layout(matrix, 0, 2).placement == packed
    assert get_packed_layout(matrix, -2, (6, 6)).placement == packed
    assert get_packed_layout(matrix, 0, (6, 3, 3)).placement == Shard(0)
    assert get_packed_layout(matrix.mT, 1, (6, 3, 3)).placement == Shard(1)
    assert get_packed_layout(vector, 0, 2).placement == Replicate()


class Recorder(nn.Module):
    """Returns its parameters, multiplied by what it is given, and remembers their types."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))
        self.seen: dict[str, Any] = {}

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        self.seen = dict(self._parameters)
        return torch.stack([(value * factors[name]).sum() for name, value in self._parameters.items()]).sum()


def test_a_rank_computes_with_its_part_of_each_section_and_the_whole_has_its_gradient() -> None:
    wholes = {
        "equal": (count_up(8, 3), (4, 4)),
        "unequal": (count_up(8, 3), (4, 2, 2)),
        "bias": (count_up(8), (4, 2, 2)),
        "columns": (count_up(3, 8), (4, 2, 2)),
        "experts": (count_up(2, 8, 3), (4, 4)),
    }
    dims = {"columns": 1, "experts": 1}

    def take(value: Tensor, sections: tuple[int, ...], dim: int, rank: int) -> Tensor:
        return torch.cat([part.chunk(2, dim)[rank] for part in value.split(sections, dim)], dim)

    def run() -> None:
        mesh, rank = make_mesh(), dist.get_rank()
        module = Recorder(**{name: whole for name, (whole, _) in wholes.items()})
        layouts = {
            (module, name): get_packed_layout(whole, dims.get(name, 0), sections)
            for name, (whole, sections) in wholes.items()
        }
        shard_parameters(layouts, mesh)
        compute_with_local_parameters(module, layouts, mesh)
        weights = {name: torch.rand(whole.shape) for name, (whole, _) in wholes.items()}  # the same on both ranks
        factors = {
            name: take(weights[name], sections, dims.get(name, 0), rank) for name, (_, sections) in wholes.items()
        }
        module(factors).backward()
        for name, (whole, sections) in wholes.items():
            assert torch.equal(module.seen[name], take(whole, sections, dims.get(name, 0), rank)), name
            parameter = module.get_parameter(name)
            assert torch.equal(parameter.full_tensor(), whole), name
            assert parameter.grad.placements == parameter.placements, name
            torch.testing.assert_close(parameter.grad.full_tensor(), weights[name], msg=name)
            local = parameter.to_local().numel()
            assert local == whole.numel() // (1 if name == "bias" else 2), f"{name} keeps {local} elements"

    run_ranks(run, 2)


def test_modules_compute_with_their_part_of_plain_parameters_too() -> None:
    """Megatron-FSDP keeps plain parameters."""

    def run() -> None:
        mesh, rank = make_mesh(), dist.get_rank()
        module, rows = Recorder(bias=count_up(8)), ([0, 1, 4, 6], [2, 3, 5, 7])[rank]
        layouts = {(module, "bias"): get_packed_layout(module.bias, 0, (4, 2, 2))}
        compute_with_local_parameters(module, layouts, mesh)
        module({"bias": torch.ones(4)}).backward()
        assert torch.equal(module.seen["bias"], count_up(8)[rows])
        assert torch.equal(module.bias.grad, torch.zeros(8).index_fill_(0, torch.tensor(rows), 1))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- DTensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(4)
        self.register_parameter("nothing", None)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


def get_tied_layouts(module: Tied) -> dict[Slot, Layout]:
    layouts = dict.fromkeys(get_slots(module.modules()), Layout())
    rows = Layout(placement=Shard(0))
    return {**layouts, (module.embedding, "weight"): rows, (module.head, "weight"): rows, (module.head, "bias"): rows}


def test_sharded_parameters_keep_ties_frozenness_attributes_and_values() -> None:
    def run() -> None:
        mesh, rank = make_mesh(), dist.get_rank()
        module = Tied()
        module.norm.bias.requires_grad = False
        module.head.bias.requires_grad = False
        module.norm.weight.no_weight_decay = True
        wholes = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        assert (module, "nothing") not in get_slots(module.modules())
        shard_parameters(get_tied_layouts(module), mesh)

        assert module.head.weight is module.embedding.weight
        assert module.nothing is None
        assert {name for name, p in module.named_parameters() if not p.requires_grad} == {"norm.bias", "head.bias"}
        assert module.norm.weight.no_weight_decay is True
        assert not hasattr(module.norm.bias, "no_weight_decay")
        sharded = ("embedding.weight", "head.bias")
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(parameter, DTensor)
            assert parameter.device_mesh == mesh
            assert parameter.placements == ((Shard(0) if name in sharded else Replicate()),)
            assert (parameter.shape, parameter.stride()) == (wholes[name].shape, wholes[name].stride())
            assert torch.equal(parameter.full_tensor(), wholes[name]), name
            rows = parameter.to_local().size(0)
            assert rows == ([4, 3][rank] if name in sharded else wholes[name].size(0)), name
            expected = distribute_tensor(wholes[name], mesh, parameter.placements)
            assert torch.equal(parameter.to_local(), expected.to_local()), name

    run_ranks(run, 2)


def test_parameters_on_the_meta_device_become_shards_there() -> None:
    def run() -> None:
        with torch.device("meta"):
            module = Tied()
            packed = Recorder(weight=count_up(8, 3))
        layouts = {**get_tied_layouts(module), (packed, "weight"): get_packed_layout(packed.weight, 0, (4, 2, 2))}
        shard_parameters(layouts, make_mesh())
        local = [parameter.to_local() for parameter in [*module.parameters(), *packed.parameters()]]
        assert {tensor.device.type for tensor in local} == {"meta"}
        rows = [4, 3][dist.get_rank()]
        assert [tuple(tensor.shape) for tensor in local] == [(rows, 4), (rows,), (4,), (4,), (4, 3)]
        assert module.head.weight is module.embedding.weight
        assert module.head.weight.shape == (7, 4)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- computing with plain tensors


def test_modules_find_plain_tensors_and_dtensors_get_the_gradients() -> None:
    names = ("row", "whole", "summand", "other", "once")
    shapes = [(4, 2), (3,), (2,), (5,), (2,)]

    def run() -> None:
        mesh, rank = make_mesh(), dist.get_rank()
        module = Recorder(**{name: count_up(*shape) for name, shape in zip(names, shapes, strict=True)})
        styles = [
            Layout(placement=Shard(0)),
            Layout(),
            Layout(is_partial=True),
            Layout(is_partial=True),
            Layout(is_partial=True, is_summed=True),
        ]
        layouts = {(module, name): layout for name, layout in zip(names, styles, strict=True)}
        shard_parameters(layouts, mesh)
        compute_with_local_parameters(module, layouts, mesh)
        saved = dict(module._parameters)

        by_rank = [{name: torch.rand(shape) for name, shape in zip(names, shapes, strict=True)} for _ in range(2)]
        own = by_rank[rank]
        factors = {**own, "row": by_rank[0]["row"].chunk(2)[rank], "whole": by_rank[0]["whole"]}
        expected = {
            "row": by_rank[0]["row"],
            "whole": by_rank[0]["whole"],  # all ranks compute alike
            "summand": by_rank[0]["summand"] + by_rank[1]["summand"],
            "other": by_rank[0]["other"] + by_rank[1]["other"],
            "once": by_rank[0]["once"],  # enters on the first rank only
        }
        for repetition in (1, 2):  # gradients accumulate
            with StepCounter() as counter:
                module(factors).backward()
            assert counter.collectives == {"all_reduce": 1}, "the summands are summed together"
            assert all(type(value) is Tensor for value in module.seen.values())
            assert torch.equal(module.seen["row"], count_up(4, 2).chunk(2)[rank])
            assert torch.equal(module.seen["whole"], count_up(3))
            assert torch.equal(module.seen["once"], count_up(2) * (rank == 0))
            assert all(module._parameters[name] is parameter for name, parameter in saved.items())
            for name, parameter in saved.items():
                assert parameter.grad.placements == parameter.placements, name
                local = take_local(repetition * expected[name], parameter)
                torch.testing.assert_close(parameter.grad.to_local(), local, msg=name)

    run_ranks(run, 2)


def take_local(whole: Tensor, parameter: DTensor) -> Tensor:
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def test_frozen_summands_take_no_part_in_the_sum() -> None:
    def run() -> None:
        mesh = make_mesh()
        module = Recorder(frozen=count_up(3), trained=count_up(2))
        layouts = dict.fromkeys(get_slots([module]), Layout(is_partial=True))
        module.frozen.requires_grad = False
        shard_parameters(layouts, mesh)
        compute_with_local_parameters(module, layouts, mesh)
        with StepCounter() as counter:
            module({"frozen": torch.ones(3), "trained": torch.ones(2)}).backward()
        assert counter.elements == {"all_reduce": [2]}
        assert not module.seen["frozen"].requires_grad
        assert module.frozen.grad is None
        assert torch.equal(module.trained.grad.full_tensor(), torch.full((2,), 2.0))

    run_ranks(run, 2)


class Outer(nn.Module):
    """Computes with a parameter of its own and calls a child; fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(count_up(4))
        self.inner = Recorder(weight=count_up(4) + 10)
        self.seen: list[Any] = []

    def forward(self, fail: bool = False) -> Tensor:
        result = self.weight.sum() + self.inner({"weight": torch.ones(2)})
        self.seen += [self.weight, self.inner.weight]
        if fail:
            raise KeyError("inside")
        return result

    def training_step(self, fail: bool = False) -> Tensor:
        return 2 * self.forward(fail)

    def look(self) -> Any:
        return self.weight


def test_parameters_are_put_back_after_an_exception_and_after_nested_calls() -> None:
    def run() -> None:
        mesh, rank = make_mesh(), dist.get_rank()
        module = Outer()
        layouts = dict.fromkeys(get_slots(module.modules()), Layout(placement=Shard(0)))
        shard_parameters(layouts, mesh)
        saved = [module.weight, module.inner.weight]
        signature = str(inspect.signature(module.forward))
        compute_with_local_parameters(module.inner, layouts, mesh)
        compute_with_local_parameters(module, layouts, mesh, methods=("training_step", "forward"))
        assert str(inspect.signature(module.forward)) == signature, "transformers reads it"

        def assert_put_back() -> None:
            assert all(p is q for p, q in zip([module.weight, module.inner.weight], saved, strict=True))

        for method in (module, module.training_step):
            module.seen.clear()
            with pytest.raises(KeyError, match="inside"):
                method(fail=True)
            assert [type(value) for value in module.seen] == [Tensor, Tensor]
            assert_put_back()
            # on the way out of the inner call its parameter stays plain for the outer one
            assert module.seen[1] is module.inner.seen["weight"]
            method().backward()
            assert_put_back()
        assert isinstance(module.look(), DTensor)
        for parameter in saved:
            assert torch.equal(parameter.grad.to_local(), torch.full((2,), 3.0))
        own = (count_up(4).chunk(2)[rank] + count_up(4).chunk(2)[rank] + 10).sum()
        assert module().item() == own.item()

    run_ranks(run, 2)


def test_without_recursion_only_the_parameters_of_the_module_itself_become_plain() -> None:
    def run() -> None:
        mesh = make_mesh()
        module = Outer()
        layouts = dict.fromkeys(get_slots(module.modules()), Layout())
        shard_parameters(layouts, mesh)
        compute_with_local_parameters(module, layouts, mesh, modules=[module])
        seen: list[Any] = []
        module.inner.forward = lambda factors: seen.extend([module.weight, module.inner.weight]) or torch.zeros(())
        module()
        assert [type(value) for value in seen] == [Tensor, DTensor]

    run_ranks(run, 2)


def test_a_tied_parameter_gets_the_gradients_of_all_its_uses() -> None:
    def run() -> None:
        mesh = make_mesh()
        module = Tied()
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -1, 1)
        reference = copy.deepcopy(module)
        ids = torch.tensor([[0, 6, 3]])
        reference(ids).square().sum().backward()
        layouts = dict.fromkeys(get_slots(module.modules()), Layout())  # whole on every rank: no collective is needed
        shard_parameters(layouts, mesh)
        compute_with_local_parameters(module, layouts, mesh)
        module(ids).square().sum().backward()
        for (name, parameter), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, msg=name)

    run_ranks(run, 2)


def test_a_wrapped_method_is_that_of_one_module_alone_and_of_its_class_or_itself() -> None:
    def double(forward: Any, *args: Any) -> Tensor:
        return 2 * forward(*args)

    first, second, replaced = nn.Identity(), nn.Identity(), nn.Identity()
    replaced.forward = lambda value: value + 5  # as tools that patch models do
    for module in (first, first, replaced):
        wrap_method(module, double)
    one = torch.ones(())
    assert [module(one).item() for module in (first, second, replaced)] == [4, 1, 12]
    assert isinstance(first, nn.Identity)
    assert type(first).__name__ == "Identity"

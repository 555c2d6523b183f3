"""Sharded checkpoints in a plain torch loop: complete or absent, for any number of ranks, of this model or refused."""

import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.cover import Matrix
from helpers.models import LLAMA, VOCABULARY, PlainTransformer, make_causal_lm
from helpers.oracle import whole
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, load_checkpoint, save_checkpoint
from lightning_fsdp2.checkpoint.files import storage
from lightning_fsdp2.checkpoint.formats import directory
from lightning_fsdp2.checkpoint.formats.directory import read_directory

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd-without-state": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def make_model(dp_replicate_size: int = 1, *, seed: int = 0, frozen: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = make_causal_lm(LLAMA)
    if frozen:
        model.model.embed_tokens.weight.requires_grad_(False)
    mesh = create_device_mesh(dp_replicate_size=dp_replicate_size)
    return FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), mesh).parallelize(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The same step on any number of ranks: all read the same batch."""
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


MESHES = {"one": (1, 1), "replicas": (2, 2), "uneven": (3, 1)}
"""Ranks, and how many have copies."""

CELLS = {
    f"{optimizer}-{'frozen' if frozen else 'whole'}-{mesh}": (optimizer, frozen, mesh)
    for optimizer, frozen, mesh in itertools.product(OPTIMIZERS, (False, True), MESHES)
}
MATRIX = Matrix(
    "checkpoints of optimizers",
    {name: dict(zip(("optimizer", "frozen", "mesh"), cell, strict=True)) for name, cell in CELLS.items()},
    fast=("adamw-frozen-one", "sgd-momentum-whole-replicas"),
    costs={name: MESHES[mesh][0] for name, (_, _, mesh) in CELLS.items()},
)


Save = Callable[[str, bool], tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Save on two ranks after a step, and return the path and the weights after another; only once each."""

    @cache
    def save(optimizer: str, frozen: bool) -> tuple[Path, dict[str, torch.Tensor]]:
        path = tmp_path_factory.mktemp(optimizer) / "one.ckpt"

        def run() -> dict[str, torch.Tensor]:
            model = make_model(frozen=frozen)
            own = OPTIMIZERS[optimizer](trainable(model))
            step(model, own, 1)
            save_checkpoint(path, model, own, extra={"step": 1})
            step(model, own, 2)
            return whole(model.state_dict())

        return path, run_ranks(run, 2)[0]

    return save


@pytest.mark.guarantees("any-layout-resumes")
@pytest.mark.parametrize(("optimizer", "frozen", "mesh"), MATRIX.list_parameters(CELLS))
def test_training_goes_on_alike_on_any_number_of_ranks(optimizer: str, frozen: bool, mesh: str, save: Save) -> None:
    path, expected = save(optimizer, frozen)
    world_size, dp_replicate_size = MESHES[mesh]

    def resume() -> dict[str, torch.Tensor]:
        model = make_model(dp_replicate_size, seed=5, frozen=frozen)
        # another order of the parameters: names count, not numbers
        own = OPTIMIZERS[optimizer](trainable(model)[::-1])
        assert load_checkpoint(path, model, own) == {"step": 1}
        step(model, own, 2)
        return whole(model.state_dict())

    actual = run_ranks(resume, world_size)[-1]
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=0, atol=2e-6, msg=name)


def test_numbers_of_numpy_in_an_optimizer_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """Schedules leave them, and `weights_only=True` would refuse them."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.25))
    save_checkpoint(tmp_path / "x.ckpt", model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    load_checkpoint(tmp_path / "x.ckpt", model, other)
    assert other.param_groups[0]["lr"] == 0.25


def test_tensors_are_read_as_the_model_holds_them(tmp_path: Path) -> None:
    path, name = tmp_path / "a.ckpt", "model.layers.1.mlp.up_proj.weight"

    def run() -> None:
        model = make_model(2)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, 0)
        for state in optimizer.state.values():
            state["rows"] = torch.arange(4.0)  # of another shape than the parameter
        save_checkpoint(path, model, optimizer)
        own = model.state_dict()
        assert own[name].placements == (Replicate(), Shard(0))
        read = read_directory(path, model, in_place=True)
        assert read["state_dict"].keys() == own.keys()
        for key, value in read["state_dict"].items():
            assert value.to_local().data_ptr() == own[key].to_local().data_ptr()
        for key, states in read["optimizer_states"][0]["state"].items():
            assert type(states["rows"]) is Tensor
            assert states["rows"].tolist() == [0, 1, 2, 3]
            for state in (states["exp_avg"], states["exp_avg_sq"]):
                assert (state.device_mesh, state.placements) == (own[key].device_mesh, own[key].placements)
            assert states["exp_avg"].to_local().equal(optimizer.state[model.get_parameter(key)]["exp_avg"].to_local())

        read = read_directory(path, model, with_optimizers=False)
        assert "optimizer_states" not in read
        copied = read["state_dict"][name]
        assert copied.to_local().data_ptr() != own[name].to_local().data_ptr()
        assert (copied.placements, copied.full_tensor().equal(own[name].full_tensor())) == (own[name].placements, True)

    run_ranks(run, 2)


def test_the_free_space_is_compared_with_what_all_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[int]:
        sizes: list[int] = []
        monkeypatch.setattr(directory, "check_free_space", lambda path, size: sizes.append(size))
        model = nn.ModuleDict(
            {"sharded": nn.Linear(100, 50), "replicas": nn.Linear(100, 50), "plain": nn.Linear(50, 6)}
        )
        fully_shard(model["sharded"], mesh=init_device_mesh("cpu", (2,)))
        replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model["replicas"], mesh=replicas)
        save_checkpoint(tmp_path / "a.ckpt", model)
        return sizes

    [size], other = run_ranks(run, 2)
    tensors = 4 * (2 * (100 * 50 + 50) + 50 * 6 + 6)
    assert size == tensors + (tmp_path / "a.ckpt" / "meta.pt").stat().st_size
    assert other == []


def test_objects_are_warned_of_in_a_plain_loop_too(tmp_path: Path) -> None:
    storage._warn_of_types.cache_clear()
    with pytest.warns(UserWarning, match=r"hold objects .*pathlib\.PosixPath.* in a plain loop, load with"):
        save_checkpoint(tmp_path / "a.ckpt", nn.Linear(2, 2), extra=tmp_path)


class Remembers(nn.Linear):
    def __init__(self, memory: Any) -> None:
        super().__init__(2, 2)
        self.memory = memory

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


def test_extra_states_of_modules_come_back_as_they_were(tmp_path: Path) -> None:
    memory = {0: "a", "empty": {}, "tensor": torch.ones(2), "list": [1, (2, 3)]}

    def run() -> Any:
        mesh = create_device_mesh(device_type="cpu")
        manager = FSDP2Manager(FSDP2Config(), mesh)
        save_checkpoint(tmp_path / "x.ckpt", manager.parallelize(nn.Sequential(Remembers(memory))))
        other = manager.parallelize(nn.Sequential(Remembers(None)))
        load_checkpoint(tmp_path / "x.ckpt", other)
        return other[0].memory

    for back in run_ranks(run, 2):
        assert torch.equal(back.pop("tensor"), torch.ones(2))
        assert back == {0: "a", "empty": {}, "list": [1, (2, 3)]}


def test_a_directory_without_names_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "x.ckpt", nn.Linear(2, 2))
    metadata = FileSystemReader(tmp_path / "x.ckpt").read_metadata()
    metadata.planner_data = None
    (tmp_path / "x.ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "x.ckpt" / "meta.json").unlink()  # as in what others write
    with pytest.raises(ValueError, match="has no `planner_data`"):
        load_checkpoint(tmp_path / "x.ckpt", nn.Linear(2, 2))


def test_a_failing_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def save() -> str:
        model = nn.Linear(2, 2)
        blocked = tmp_path / "file"
        blocked.touch()
        with pytest.raises((RuntimeError, OSError)) as caught:
            save_checkpoint(blocked / "x.ckpt", model)
        return type(caught.value).__name__

    assert len(run_ranks(save, 2)) == 2


@pytest.mark.parametrize("missing", [".metadata", "meta.pt", "__1_0.distcp", "truncated"])
def test_a_half_written_checkpoint_is_refused_on_every_rank(missing: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    def save_and_load() -> None:
        model = make_model()
        save_checkpoint(path, model)
        if dist.get_rank() == 0:
            if missing == "truncated":
                data = path / "__1_0.distcp"
                data.write_bytes(data.read_bytes()[:1000])
            else:
                (path / missing).unlink()
        dist.barrier()
        with pytest.raises(ValueError, match=r"half\.ckpt' is incomplete.*(missing|truncated)"):
            load_checkpoint(path, model)

    run_ranks(save_and_load, 2)


@pytest.mark.guarantees("other-model")
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama.ckpt"

    def save_and_load() -> None:
        model = make_model()
        save_checkpoint(path, model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(ValueError, match=r"(?s)does not fit this PlainTransformer.*Missing key.*blocks\.0\.norm"):
            load_checkpoint(path, PlainTransformer())
        wider = make_causal_lm({**LLAMA, "vocab_size": VOCABULARY + 1})
        with pytest.raises(ValueError, match=r"(?s)size mismatch for .*embed_tokens\.weight"):
            load_checkpoint(path, wider)
        parameters = list(model.parameters())
        two_groups = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
        with pytest.raises(ValueError, match=r"parameter groups of .* parameters"):
            load_checkpoint(path, model, two_groups)
        with pytest.raises(ValueError, match=r"1 optimizer.*this run has 2"):
            load_checkpoint(path, model, [torch.optim.AdamW(parameters), torch.optim.SGD(parameters)])
        stale = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        with pytest.raises(ValueError, match="2 of the 2 parameters of AdamW are not parameters"):
            save_checkpoint(tmp_path / "stale.ckpt", model, stale)

    run_ranks(save_and_load, 2)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "absent.ckpt", PlainTransformer())
    (tmp_path / "single.ckpt").touch()
    with pytest.raises(ValueError, match=r"truncated, or was not written by `torch\.save`"):
        load_checkpoint(tmp_path / "single.ckpt", PlainTransformer())


def test_non_strict_loading_takes_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "linear.ckpt"
    source, target = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    save_checkpoint(path, source)
    load_checkpoint(path, target, strict=False)
    torch.testing.assert_close(target["a"].weight, source["a"].weight)


class AveragesItself(nn.Module):
    """Sharded tensors where `Module.get_extra_state` returns them, and a parameter with a name that looks like it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.my_extra_state = nn.Parameter(torch.arange(8.0))
        self.average: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * self.my_extra_state

    def get_extra_state(self) -> Any:
        return {"average": [self.linear.weight.detach() * 3]}

    def set_extra_state(self, state: Any) -> None:
        self.average = state["average"][0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_tensors_that_hooks_save_are_saved_by_all_ranks(world_size: int, tmp_path: Path) -> None:
    """Copies of the weights, such as running averages, in any container, on any number of ranks."""
    path, name = tmp_path / "a.ckpt", "model.embed_tokens.weight"

    def save() -> dict[str, Any]:
        model = make_model()
        average = {name: value.detach() * 2 for name, value in model.state_dict().items()}
        extra = {
            "dict": {"decay": 0.9, "weights": average},
            "ordered": OrderedDict(average),
            "list": list(average.values()),
            "stranger": {"x": (average[name],)},
        }
        save_checkpoint(path, model, extra=extra)
        return whole(average)

    def load() -> dict[str, Any]:
        extra = load_checkpoint(path, make_model(seed=1))
        assert extra["dict"]["decay"] == 0.9
        weights = extra["dict"]["weights"]
        assert type(extra["ordered"]) is OrderedDict
        for others in (extra["ordered"], dict(zip(weights, extra["list"], strict=True))):
            assert all(isinstance(value, DTensor) for value in others.values())
            assert all(value.full_tensor().equal(weights[key].full_tensor()) for key, value in others.items())
        assert extra["stranger"]["x"][0].full_tensor().equal(weights[name].full_tensor())
        return whole(weights)

    expected = run_ranks(save, 2)[0]
    actual = run_ranks(load, world_size)[0]
    assert actual.keys() == expected.keys()
    assert all(value.equal(expected[key]) for key, value in actual.items())


def test_extra_states_and_names_like_theirs(tmp_path: Path) -> None:
    def make() -> Any:
        manager = FSDP2Manager(FSDP2Config(mp_policy=MixedPrecisionPolicy()), create_device_mesh())
        return manager.parallelize(AveragesItself())

    def run() -> None:
        torch.manual_seed(0)
        model = make()
        save_checkpoint(tmp_path / "a.ckpt", model)
        torch.manual_seed(1)
        other = make()
        load_checkpoint(tmp_path / "a.ckpt", other)
        assert other.my_extra_state.full_tensor().tolist() == list(range(8))
        assert other.average.full_tensor().equal(model.linear.weight.full_tensor() * 3)
        with pytest.raises(TypeError, match=r"saves an object that contains a sharded tensor \(8, 8\)"):
            save_checkpoint(tmp_path / "b.ckpt", model, extra={"object": Holder(model.linear.weight.detach())})
        assert not (tmp_path / "b.ckpt").exists()

    run_ranks(run, 2)


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class KeepsEverything(torch.optim.SGD):
    """States of all kinds, and one of no parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["global"] = {"steps": 3}
        self.state["count"] = 4
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(
                numbered={0: torch.ones(2), 5: 6}, empty={}, listed=[1, None], average=parameter.detach() * 2
            )
            self.state[parameter]["nested"] = {"average": parameter.detach() * 4}
        return loss


def test_optimizer_states_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def run() -> None:
        model, other = make_model(), make_model(seed=1)
        optimizer, another = KeepsEverything(model.parameters(), lr=0.1), KeepsEverything(other.parameters(), lr=0.2)
        step(model, optimizer, 0)
        save_checkpoint(path, model, optimizer)
        load_checkpoint(path, other, another)
        assert (another.state["global"], another.state["count"]) == ({"steps": 3}, 4)
        for own, restored in zip(model.parameters(), other.parameters(), strict=True):
            expected, actual = optimizer.state[own], another.state[restored]
            assert actual["numbered"][0].equal(torch.ones(2))
            assert (actual["numbered"][5], actual["empty"], actual["listed"]) == (6, {}, [1, None])
            assert actual["average"].full_tensor().equal(expected["average"].full_tensor())
            assert actual["nested"]["average"].full_tensor().equal(expected["nested"]["average"].full_tensor())
        for parameter in model.parameters():
            optimizer.state[parameter]["local"] = torch.full((2,), float(dist.get_rank()))
        with pytest.raises(ValueError, match=r"optimizer_0 holds plain tensors that differ by rank \(.*\.local"):
            save_checkpoint(path, model, optimizer)

    run_ranks(run, 2)

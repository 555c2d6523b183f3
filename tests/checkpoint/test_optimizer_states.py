"""Everything that an optimizer saves comes back, from a directory and from a single file, or is refused by name."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.collectives import StepCounter
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp2 import (
    FSDP2Config,
    FSDP2Manager,
    consolidate_checkpoint,
    create_device_mesh,
    load_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.schedulers import WarmupCosine


class Wrapped(nn.Module):
    """A submodule has other parameter names than the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.net = nn.Linear(4, 4)

    def forward(self) -> torch.Tensor:
        return self.net(self.frozen(torch.ones(2, 4))).square().mean()


def train(make_optimizer: Callable[[Any], Optimizer], steps: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = FSDP2Manager(FSDP2Config(), create_device_mesh()).parallelize(Wrapped())
    optimizer = make_optimizer(model)
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Averages(torch.optim.AdamW):
    """Keeps more than states of parameters, and states that have numbers for keys."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.ema: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][0] = parameter.detach() * 2
        self.ema = {"decay": 0.9, 3: [parameter.detach() * 3 for parameter in self.param_groups[0]["params"]]}
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ema": self.ema}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ema = state_dict["ema"]
        super().load_state_dict(state_dict)


def make_averages(model: Any) -> Averages:
    return Averages(model.net.parameters())


@pytest.mark.guarantees("everything-is-restored")
@pytest.mark.parametrize("form", ["directory", "file"])
def test_what_an_optimizer_adds_comes_back(form: str, tmp_path: Path) -> None:
    def save() -> list[torch.Tensor]:
        model, optimizer = train(make_averages, 1)
        save_checkpoint(tmp_path / "a.ckpt", model, optimizer)
        return whole(optimizer.ema[3])

    def load() -> None:
        model, optimizer = train(make_averages, 0)
        load_checkpoint(tmp_path / "b.ckpt", model, optimizer)
        assert optimizer.ema["decay"] == 0.9
        assert all(map(torch.equal, whole(optimizer.ema[3]), expected))
        for parameter in model.net.parameters():
            assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq", 0}
            assert torch.equal(optimizer.state[parameter][0].full_tensor(), parameter.full_tensor() * 2)

    expected = run_ranks(save, 2)[0]
    copy_as(form, tmp_path)
    run_ranks(load, 2)


def whole(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in tensors]


def copy_as(form: str, folder: Path) -> None:
    """Put ``a.ckpt`` into ``b.ckpt`` as a directory or a single file."""
    if form == "directory":
        (folder / "b.ckpt").symlink_to("a.ckpt")
    else:
        consolidate_checkpoint(folder / "a.ckpt", folder / "b.ckpt")


@pytest.mark.parametrize("form", [pytest.param("directory", marks=pytest.mark.slow), "file"])
def test_an_optimizer_may_name_its_parameters_as_a_part_of_the_model_does(form: str, tmp_path: Path) -> None:
    def make(model: Any) -> Optimizer:
        return torch.optim.AdamW(model.net.named_parameters(), lr=0.1)

    def save() -> list[torch.Tensor]:
        model, optimizer = train(make, 1)
        save_checkpoint(tmp_path / "a.ckpt", model, optimizer)
        return whole([optimizer.state[parameter]["exp_avg"] for parameter in model.net.parameters()])

    def load() -> None:
        model, optimizer = train(make, 0)
        load_checkpoint(tmp_path / "b.ckpt", model, optimizer)
        actual = whole([optimizer.state[parameter]["exp_avg"] for parameter in model.net.parameters()])
        assert all(map(torch.equal, actual, expected))
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]

    expected = run_ranks(save, 2)[0]
    copy_as(form, tmp_path)
    run_ranks(load, 2)


def test_options_that_the_checkpoint_replaces_are_named(tmp_path: Path) -> None:
    def make(lr: float, **options: Any) -> tuple[nn.Module, Optimizer, Any]:
        model, optimizer = train(lambda model: torch.optim.AdamW(model.net.parameters(), lr=lr, **options), 0)
        return model, optimizer, WarmupCosine(optimizer, warmup_steps=4, total_steps=9)

    def run() -> None:
        model, optimizer, scheduler = make(0.5)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        save_checkpoint(tmp_path / "a.ckpt", model, optimizer)
        model, optimizer, _ = make(0.5)  # with a different rate in this step, but the same options
        load_checkpoint(tmp_path / "a.ckpt", model, optimizer)
        model, optimizer, _ = make(0.25, betas=(0.8, 0.9), eps=1e-8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_checkpoint(tmp_path / "a.ckpt", model, optimizer)
        messages = [str(warning.message) for warning in caught if "goes on with" in str(warning.message)]
        assert len(messages) == (dist.get_rank() == 0)
        theirs = r"betas=\(0.9, 0.999\), lr=0.5 of the checkpoint"
        assert all(re.search(rf"{theirs}, not with betas=\(0.8, 0.9\), lr=0.25 of", text) for text in messages)

    run_ranks(run, 2)


@pytest.mark.parametrize("form", ["directory", pytest.param("file", marks=pytest.mark.slow)])
def test_the_state_of_an_optimizer_of_another_kind_is_refused(form: str, tmp_path: Path) -> None:
    def save() -> None:
        save_checkpoint(tmp_path / "a.ckpt", *train(make_momentum, 1))

    def load() -> None:
        model, _ = train(make_averages, 0)
        with pytest.raises(ValueError, match=r"has dampening, momentum, nesterov.*AdamW.* has amsgrad, betas, "):
            load_checkpoint(tmp_path / "b.ckpt", model, torch.optim.AdamW(model.net.parameters()))
        # a later version of torch may add an option, and a schedule its own numbers
        group = torch.optim.SGD(model.net.parameters(), momentum=0.9)
        group.defaults["added"] = group.param_groups[0]["added"] = True
        load_checkpoint(tmp_path / "b.ckpt", model, group)
        assert group.param_groups[0]["max_lr"] == 2

    run_ranks(save, 2)
    copy_as(form, tmp_path)
    run_ranks(load, 2)


def make_momentum(model: Any) -> Optimizer:
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 2, total_steps=9)
    return optimizer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_state_goes_on_in_the_implementation_of_its_new_optimizer(form: str, fused: bool, tmp_path: Path) -> None:
    def make(model: Any, fused: bool) -> Optimizer:
        return torch.optim.AdamW(model.net.parameters(), lr=0.1, fused=fused, foreach=False)

    def save() -> list[torch.Tensor]:
        save_checkpoint(tmp_path / "a.ckpt", *train(lambda model: make(model, not fused), 2))
        return whole(list(train(lambda model: make(model, fused), 4)[0].parameters()))

    def load() -> list[torch.Tensor]:
        model, _ = train(lambda model: make(model, fused), 0)
        optimizer = make(model, fused)
        load_checkpoint(tmp_path / "b.ckpt", model, optimizer)
        assert [optimizer.param_groups[0][name] for name in ("fused", "foreach", "lr")] == [fused, False, 0.1]
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            with StepCounter() as counter:
                optimizer.step()
            assert ("aten::_fused_adamw_" in counter.operations) == fused
        return whole(list(model.parameters()))

    expected = run_ranks(save, 2)[0]
    copy_as(form, tmp_path)
    torch.testing.assert_close(run_ranks(load, 2)[0], expected, rtol=1e-6, atol=1e-6)


def test_numbers_of_numpy_are_saved_as_plain_ones_wherever_they_are(tmp_path: Path) -> None:
    """Schedules and sweeps leave them, and `weights_only=True` would refuse them."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(np.float64(0.5), 0.75))  # type: ignore[arg-type]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["count"] = np.int64(3)
    save_checkpoint(tmp_path / "a.ckpt", model, optimizer)
    other = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path / "a.ckpt", model, other)
    assert other.param_groups[0]["betas"] == (0.5, 0.75)
    assert other.state[model.weight]["count"] == 3


class Packed(torch.Tensor):
    """A tensor in a format of its own."""


@pytest.mark.parametrize("form", ["local", "sharded", "in a list"])
def test_states_of_a_tensor_subclass_are_refused_before_anything_is_written(form: str, tmp_path: Path) -> None:
    def run() -> None:
        model, optimizer = train(lambda model: torch.optim.AdamW(model.net.parameters()), 1)
        for values in optimizer.state.values():
            average = values["exp_avg"]
            local = average.to_local().as_subclass(Packed)
            values["exp_avg"] = {
                "local": local,
                "sharded": DTensor.from_local(local, average.device_mesh, average.placements, run_check=False),
                "in a list": [local],
            }[form]
        with pytest.raises(ValueError, match=r"AdamW keeps 'exp_avg' of net\.weight as .*Packed: .* such as torch.opt"):
            save_checkpoint(tmp_path / "x.ckpt", model, optimizer)
        assert not (tmp_path / "x.ckpt").exists()

    run_ranks(run, 1)

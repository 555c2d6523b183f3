"""Weights and buffers reach a model that has them under other names, in other shapes, or not at all."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.models import LLAMA, make_causal_lm
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.strategies import STRATEGIES
from helpers.user_modules import WIDTH, UserModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lightning_fsdp2 import (
    CheckpointConfig,
    FSDP2Config,
    FSDP2Manager,
    create_device_mesh,
    load_checkpoint,
    save_checkpoint,
)
from lightning_fsdp2.checkpoint.convert import read_whole_checkpoint
from lightning_fsdp2.checkpoint.loading import load_model_state, read_checkpoint
from lightning_fsdp2.ranks.whole_tensors import gather


class Named(UserModule):
    """Sharded weights, plain buffers, and a metric with a list in its state dict, in an attribute of any name."""

    make_optimizer = staticmethod(partial(torch.optim.AdamW, lr=0.1))

    def __init__(self, name: str = "net", width: int = WIDTH) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Sequential(nn.Linear(width, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)))
        self.seen = CatMetric()
        self.seen.persistent(True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # as under DDP, a checkpoint keeps the values of rank 0
        for _ in range(1 + self.global_rank):
            self.seen.update(torch.tensor([1.0 + self.global_rank, batch_idx]))
        return getattr(self, self.name)(batch).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


class Renames(Named):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = {key.replace("net.", "other."): value for key, value in checkpoint["state_dict"].items()}
        # buffers were no DTensors when they were saved
        assert not any(isinstance(value, DTensor) for key, value in state.items() if "running" in key)
        checkpoint["state_dict"] = state


make_trainer = partial(STRATEGIES["fsdp2"].make_trainer, use_distributed_sampler=True)


def make_loader() -> DataLoader[Tensor]:
    return DataLoader(torch.rand(16, WIDTH), batch_size=4)  # type: ignore[arg-type]


def test(module: pl.LightningModule, path: Path, **options: Any) -> dict[str, Tensor]:
    make_trainer(**options).test(module, make_loader(), ckpt_path=path, verbose=False)
    return whole({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)})


test.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("format_", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_hook_may_rename_weights_and_buffers_and_lists_come_back_as_they_were(format_: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def run() -> None:
        trainer = make_trainer(checkpoint=CheckpointConfig(format=format_))
        trainer.fit(module := Named(), make_loader())
        trainer.save_checkpoint(path)
        expected = whole({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)})
        actual = test(renamed := Renames("other"), path)
        assert actual.keys() == {name.replace("net.", "other.") for name in expected}
        assert all(actual[name.replace("net.", "other.")].equal(value) for name, value in expected.items())
        assert [value.tolist() for value in renamed.seen.value] == [[1, 0], [1, 1]]

    run_ranks(run, 2)
    assert [value.tolist() for value in read_whole_checkpoint(path)["state_dict"]["seen.value"]] == [[1, 0], [1, 1]]


def test_buffers_in_a_directory_of_others_may_be_renamed_too(tmp_path: Path) -> None:
    """Only our directories say which tensors were plain."""

    def run() -> None:
        state = nn.BatchNorm1d(WIDTH).state_dict()
        state["running_mean"] += torch.arange(WIDTH)
        torch.distributed.checkpoint.save({"state_dict": state}, checkpoint_id=tmp_path / "a.ckpt")
        if torch.distributed.get_rank() == 0:
            torch.save({}, tmp_path / "a.ckpt" / "meta.pt")
        torch.distributed.barrier()
        model = FSDP2Manager(FSDP2Config(), create_device_mesh()).parallelize(nn.Sequential(nn.BatchNorm1d(WIDTH)))
        read = read_checkpoint(tmp_path / "a.ckpt", model)["state_dict"]
        load_model_state("a.ckpt", model, {"0." + name: value for name, value in read.items()})
        assert model[0].running_mean.tolist() == list(range(WIDTH))

    run_ranks(run, 2)


class KeepsItsHead(Named):
    """A new head on old weights: what is in the checkpoint for it is left out."""

    strict_loading = False  # type: ignore[assignment]


class DropsInHook(KeepsItsHead):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_load_state_dict_pre_hook(lambda module, state, *args: state.pop("net.2.weight"))


class DropsInMethod(KeepsItsHead):
    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict({k: v for k, v in state_dict.items() if k != "net.2.weight"}, *args, **options)


class Head(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({k: v for k, v in state.items() if k != prefix + "weight"}, prefix, *args)


class DropsInPart(KeepsItsHead):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = Head(WIDTH, 1)


def test_weights_that_a_module_leaves_out_keep_their_values(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer()
        trainer.fit(module := Named(), make_loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        for kind in (DropsInHook, DropsInMethod, DropsInPart):
            own = kind()
            before = own.net[2].weight.detach().clone()
            actual = test(own, tmp_path / "a.ckpt")
            assert torch.equal(actual["net.2.weight"], before), kind
            assert torch.equal(actual["net.0.weight"], module.net[0].weight.full_tensor()), kind

    run_ranks(run, 2)


def test_a_module_that_takes_all_its_weights_is_read_in_place(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer()
        trainer.fit(module := Named(), make_loader())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        own = dict(module.named_parameters())
        with torch.no_grad():
            expected = {name: value.full_tensor() for name, value in own.items()}
            for value in own.values():
                value.zero_()
        read_checkpoint(tmp_path / "a.ckpt", module, in_place=True)
        assert all(torch.equal(value.full_tensor(), expected[name]) for name, value in own.items())

    run_ranks(run, 2)


class Loose(Named):
    strict_loading = False  # type: ignore[assignment]


def test_without_strict_loading_weights_of_another_shape_are_left_out_with_a_warning(tmp_path: Path) -> None:
    def run() -> None:
        trainer = make_trainer()
        trainer.fit(module := Named(width=WIDTH - 2), DataLoader(torch.rand(8, WIDTH - 2), batch_size=4))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        own = Loose()
        before = own.net[0].weight.detach().clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            actual = test(own, tmp_path / "a.ckpt")
        messages = [str(warning.message) for warning in caught if "a different shape" in str(warning.message)]
        assert len(messages) == (torch.distributed.get_rank() == 0)
        assert all("net.0.weight (8, 6), here (8, 8)" in message for message in messages)
        assert torch.equal(actual["net.0.weight"], before)
        assert torch.equal(actual["net.2.weight"], module.net[2].weight.full_tensor())
        with pytest.raises(
            ValueError, match=r"(?s)does not fit this Named; .*`strict=False`.* for Named:.*size mismatch"
        ):
            test(Named(), tmp_path / "a.ckpt")

    run_ranks(run, 2)


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_the_optimizer_begins_without_states_for_weights_of_another_shape(tmp_path: Path, format: Any) -> None:
    def run() -> None:
        saving = make_trainer(checkpoint=CheckpointConfig(format=format))
        saving.fit(saved := Named(width=WIDTH - 2), DataLoader(torch.rand(8, WIDTH - 2), batch_size=4))
        saving.save_checkpoint(tmp_path / "a.ckpt")
        own, batch = Loose(), torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(0))
        alone = copy.deepcopy(own.net)
        resumed = make_trainer(max_steps=saving.global_step + 2, max_epochs=-1)
        resumed.fit(own, DataLoader([batch] * 8, batch_size=None), ckpt_path=tmp_path / "a.ckpt")

        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        states = {id(old): saving.optimizers[0].state[old] for old in saved.net.parameters()}
        with torch.no_grad():
            for old, new in zip(saved.net.parameters(), alone.parameters(), strict=True):
                if old.shape == new.shape:
                    new.copy_(gather(old))
                    optimizer.state[new] = {key: gather(value).clone() for key, value in states[id(old)].items()}
        for _ in range(2):
            optimizer.zero_grad()
            alone(batch).square().mean().backward()
            optimizer.step()
        for actual, expected in zip(own.net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(gather(actual), expected)

    run_ranks(run, 2)


def test_the_error_of_a_hook_is_its_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "a.ckpt", model)

    def fail(*args: Any) -> None:
        raise RuntimeError("my own")

    model.register_load_state_dict_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^my own$"):
        load_checkpoint(tmp_path / "a.ckpt", model)


def test_averaged_weights_come_back_sharded_over_the_whole_mesh(tmp_path: Path) -> None:
    def run() -> None:
        torch.manual_seed(0)
        model = make_causal_lm({**LLAMA, "num_hidden_layers": 1})
        model = FSDP2Manager(FSDP2Config(), create_device_mesh(tp_size=2)).parallelize(model)
        average = {"ema." + name: value.detach() * 2 for name, value in model.state_dict().items()}
        save_checkpoint(tmp_path / "a.ckpt", model, extra=average)
        for name, value in load_checkpoint(tmp_path / "a.ckpt", model).items():
            own = model.get_parameter(name.removeprefix("ema."))
            # some of the ranks have a row more than others of what does not divide
            assert value.to_local().numel() <= -(-len(value) // 4) * value[0].numel(), name
            with torch.no_grad():
                own.copy_(value)
            assert torch.equal(own.full_tensor(), average[name].full_tensor()), name

    run_ranks(run, 4)


def test_keys_that_differ_are_shortened_and_an_adapter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    weights = {f"{index}.lora_A.weight": torch.ones(1) for index in range(7)}
    message = (
        r'LoRA adapter, the model has none; build(.|\n)*Unexpected.*: "0.lora_A.weight", "1.lora_A.weight",'
        r' "2.lora_A.weight" and 4 more'
    )
    with pytest.raises(ValueError, match=message):
        load_model_state(path, nn.Sequential(), dict(weights))
    adapted = nn.ModuleDict({"lora_A": nn.Linear(2, 2)})
    for state, hint in (
        ({"0.lora_A.weight": torch.ones(4, 2)}, r"the same options of LoRA, such as `r`"),
        ({"0.weight": torch.ones(2, 2)}, r"the checkpoint has no LoRA adapter; build the model without one"),
    ):
        with pytest.raises(ValueError, match=hint) as caught:
            load_model_state(path, nn.Sequential(adapted), state)
        assert "strict_loading" not in str(caught.value)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    other = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))).state_dict()
    with pytest.raises(
        ValueError, match=r"strict_loading(.|\n)*mismatch for 0\.weight(.|\n)*mismatch for 7 more tensors"
    ) as caught:
        load_model_state(path, model, other)
    assert "LoRA" not in str(caught.value)

"""Weights that a forward changes in place are those of one process afterwards, or an error names the parameter."""

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.collectives import StepCounter
from helpers.models import GPT2, LLAMA, make_causal_lm
from helpers.oracle import whole
from helpers.ranks import RankError, raises_on_all_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.compat.torch import set_group_timeout
from lightning_fsdp2.parallel.data import in_place
from lightning_fsdp2.parallel.pipeline.plain_loop import train_on_stages
from lightning_fsdp2.parallelizer import unshard_fsdp2_model
from lightning_fsdp2.ranks.whole_tensors import gather

WIDTH = 6

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class UnitRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


class FrozenRows(UnitRows):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.requires_grad_(False)


class Limited(nn.Module):
    """torch's own option of this kind: only the rows that a batch reads are renormalised."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3 * rows, width, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x.abs() * 100).long()[:, 0] % self.embedding.num_embeddings)


class ActNorm(nn.Module):
    """Initialised by the mean over the first batches of all ranks."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(width))
        self.is_ready = self.make_flag()

    def make_flag(self) -> Tensor:
        return nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            mean = x.detach().mean(0)
            if x.shape[0] == 2:  # a rank's half of the batch
                dist.all_reduce(mean)
                mean /= 2
            with torch.no_grad():
                self.mean.copy_(mean)
            with torch.no_grad():
                self.is_ready.fill_(1.0)
        return x - self.mean


class Flagged(ActNorm):
    """With a flag of one element in a parameter, of which only the first rank has a part."""

    def make_flag(self) -> Tensor:
        return nn.Parameter(torch.zeros(1), requires_grad=False)


class OwnCodebook(nn.Module):
    """A codebook that moves to the rank's own data, so that each rank has another one."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(rows, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.lerp_(x.detach().mean(0).expand_as(self.codes), 0.1)
        return x + self.codes.sum(0)


class Block(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kind = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.kind(self.first(x)))


class Net(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module], *, limits_scale: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.limits_scale = limits_scale
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))
        self.scale = nn.Parameter(torch.full((WIDTH,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.limits_scale:  # a parameter of the root, which stays gathered until backward
            with torch.no_grad():
                self.scale.clamp_(max=1.0)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def make_batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, halves: bool, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        batch = make_batch(step)
        batch = batch.chunk(2)[dist.get_rank() % 2] if halves else batch
        (model(batch) - 0.5).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model: nn.Module, replicas: int = 1, **options: Any) -> nn.Module:
    config = FSDP2Config(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32), **options)
    mesh = create_device_mesh(config, dp_replicate_size=replicas, device_type="cpu")
    return FSDP2Manager(config, mesh).parallelize(model)


KINDS = [Clipped, UnitRows, FrozenRows, Limited, ActNorm, Flagged]


def compare(kind: Any, **options: Any) -> None:
    model = Net(kind)
    alone = copy.deepcopy(model)
    shard(model, **options)
    train(model, halves=True)
    train(alone, halves=False)
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(gather(parameter.detach()), other.detach(), msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.guarantees("weights-changed-in-place")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"activation_checkpointing": True},
        {"enable_fsdp2_prefetch": False, "replicas": 2},
    ],
    ids=["default", "gathered", "recomputed", "replicas"],
)
def test_weights_changed_in_place_are_those_of_one_process(options: dict[str, Any]) -> None:
    def run() -> None:
        for kind in KINDS:
            try:
                compare(kind, **options)
            except Exception as error:
                raise AssertionError(kind.__name__) from error

    run_ranks(run, 2)


def test_changes_reach_the_shards_that_fewer_ranks_hold_until_backward() -> None:
    """On four ranks, of which the last has no rows."""

    def run() -> None:
        for kind in (Clipped, Limited):
            compare(kind, reshard_after_forward=2)

    run_ranks(run, 4)


@pytest.mark.guarantees("weights-changed-in-place-differently")
@pytest.mark.parametrize("replicas", [1, 2])
def test_changes_that_differ_between_ranks_are_refused(replicas: int) -> None:
    def run() -> None:
        train(shard(Net(OwnCodebook), replicas), halves=True)

    with raises_on_all_ranks(RuntimeError, r"layers\.0\.kind\.codes.*all_reduce"):
        run_ranks(run, 2)


def test_a_change_on_one_rank_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sometimes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if dist.get_rank() == 0:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(x)

    def run() -> str:
        model = shard(Net(Sometimes))
        try:
            train(model, halves=True)
        except RuntimeError as error:
            return str(error)
        return ""

    monkeypatch.setattr(in_place, "_TIMEOUT", timedelta(seconds=1))
    first, _ = run_ranks(run, 2)
    assert "layers.0.kind.weight" in first
    assert "rank 1 did not" in first


def test_a_long_timeout_lets_a_rank_come_late_to_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [1.5]  # once; the store of this test counts whole seconds

    class IsLate(Clipped):
        def forward(self, x: Tensor) -> Tensor:
            if seconds and dist.get_rank() == 0:
                time.sleep(seconds.pop())
            return super().forward(x)

    def run() -> None:
        set_group_timeout(cast(Any, dist.group.WORLD), timedelta(minutes=31))
        train(shard(Net(IsLate)), halves=True, steps=1)

    monkeypatch.setattr(in_place, "_TIMEOUT", timedelta(seconds=0.01))
    run_ranks(run, 2)


def test_a_change_on_one_rank_in_a_second_model_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a second fit: the store still has the keys of the first model, whose weights have the same names."""

    class Sometimes(nn.Linear):
        ranks = (0, 1)

        def forward(self, x: Tensor) -> Tensor:
            if dist.get_rank() in self.ranks:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(x)

    def run() -> str:
        train(shard(Net(Sometimes)), halves=True, steps=1)
        Sometimes.ranks = (0,)
        try:
            train(shard(Net(Sometimes)), halves=True, steps=1)
        except RuntimeError as error:
            return str(error)
        return ""

    monkeypatch.setattr(in_place, "_TIMEOUT", timedelta(seconds=1))
    first, _ = run_ranks(run, 2)
    assert "layers.0.kind.weight" in first
    assert "rank 1 did not" in first


class Recomputed(nn.Linear):
    """A change that depends on what it changes, so that a second run of it gives another weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def test_a_change_that_recomputation_repeats_is_refused() -> None:
    def run() -> None:
        compare(Recomputed)
        train(shard(Net(Recomputed), activation_checkpointing=True), halves=True)

    with raises_on_all_ranks(RuntimeError, r"layers\.\d\.kind\.weight.*activation_checkpointing=False"):
        run_ranks(run, 2)


class ByData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ByAssignment(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class ByParameter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight.detach().clamp(-0.1, 0.1))
        return super().forward(x)


class BySet(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.set_(self.weight.clamp(-0.1, 0.1))
        return super().forward(x)


@pytest.mark.guarantees("weights-changed-through-data")
@pytest.mark.parametrize("kind", [ByData, ByAssignment, ByParameter, BySet])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False, "activation_checkpointing": True}])
def test_changes_through_data_are_refused_in_the_first_step(kind: Any, options: dict[str, Any]) -> None:
    def run() -> None:
        train(shard(Net(kind), **options), halves=True)

    with raises_on_all_ranks(RuntimeError, r"layers\.0\.kind\.weight.*`\.data`.*torch\.no_grad"):
        run_ranks(run, 2)


def clamp(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.02, 0.02)


def make_clamping_model(layout: str) -> nn.Module:
    """A model of which a hook changes the weights that each rank has a part of, or the head, which all have."""
    torch.manual_seed(0)
    model = make_causal_lm(QWEN3_MOE if layout == "ep_size" else LLAMA)
    (model.model.layers[1].mlp.experts if layout == "ep_size" else model.lm_head).register_forward_pre_hook(clamp)
    return model


@pytest.mark.parametrize("layout", ["tp_size", "ep_size"])
def test_changes_of_parts_of_weights_are_those_of_one_process(layout: str) -> None:
    tokens = torch.arange(16).view(2, 8)

    def run() -> None:
        model = make_clamping_model(layout)
        alone = copy.deepcopy(model)
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        mesh = create_device_mesh(config, device_type="cpu", **{layout: 2})
        FSDP2Manager(config, mesh).parallelize(model)
        for each in (model, alone):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
            for _ in range(2):
                each(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = whole(dict(model.named_parameters()))
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), msg=lambda text, n=name: f"{n}: {text}")

    run_ranks(run, 2)


def test_changes_in_a_pipeline_are_refused() -> None:
    def run() -> None:
        model = make_causal_lm(GPT2)
        for layer in model.transformer.h:
            layer.mlp.register_forward_pre_hook(clamp)
        config = FSDP2Config(pp_microbatches=2)
        mesh = create_device_mesh(config, pp_size=2, device_type="cpu")
        FSDP2Manager(config, mesh).parallelize(model)
        tokens = torch.arange(16).view(2, 8)
        batch = {"input_ids": tokens, "labels": tokens}
        train_on_stages(model, lambda part: model(**part).loss, batch)

    with pytest.raises(RankError, match=r"transformer\.h\.0\.mlp.*pp_size=1"):
        run_ranks(run, 2)


def test_only_elements_that_changed_are_rounded_to_the_compute_dtype() -> None:
    def run() -> None:
        model = Net(Clipped)
        alone = copy.deepcopy(model)
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        FSDP2Manager(config, create_device_mesh(config, device_type="cpu")).parallelize(model)
        with torch.no_grad():
            model(make_batch(0))
        expected = alone.layers[0].kind.weight.detach()
        is_kept = expected.abs() < 0.099
        actual = gather(model.layers[0].kind.weight.detach())
        assert actual[is_kept].equal(expected[is_kept])
        assert actual[~is_kept].abs().max() < 0.1005

    run_ranks(run, 2)


def test_models_that_change_nothing_communicate_as_before() -> None:
    def run() -> None:
        model = shard(Net(nn.Linear, limits_scale=False))
        train(model, halves=True, steps=1)
        with StepCounter() as counter:
            model(make_batch(0)).sum().backward()
        assert set(counter.collectives) <= {"all_gather", "reduce_scatter"}

    run_ranks(run, 2)


def test_changes_of_weights_gathered_for_a_block_are_lost_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> list[str]:
        model = shard(Net(Clipped))
        model(make_batch(0))
        with unshard_fsdp2_model(model), torch.no_grad():
            if dist.get_rank() == 0:
                model.layers[0].first.weight.zero_()
        assert gather(model.layers[0].first.weight.detach()).abs().sum() > 0
        return [record.getMessage() for record in caplog.records]

    first, second = run_ranks(run, 2)
    assert any("layers.0.first.weight" in message for message in first)
    assert not any("layers.0.first.weight" in message for message in second)

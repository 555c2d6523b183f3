"""``Trainer(precision=)`` and ``FSDP2Config.mp_policy``: which tensor has which dtype, and what they refuse."""

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from helpers.families import keep_known, make_family_model
from helpers.models import LLAMA, VOCABULARY, make_causal_lm, make_token_batches
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.user_modules import UserModule, make_trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import DDPStrategy, FSDP2Config, FSDP2Manager, FSDP2Strategy, create_device_mesh
from lightning_fsdp2.cli import FSDP2CLI
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.strategies.precision import ShardedPrecision, check_optimization, get_mp_policy

WIDTH = 16
FP32, BF16 = torch.float32, torch.bfloat16

Batch = dict[str, Tensor]


def make_batches(count: int) -> list[Batch]:
    """Tokens, and floats in [sequence, width] with a target each."""
    generator = torch.Generator().manual_seed(2)
    batches = make_token_batches(count, ragged=False)
    for batch in batches:
        batch["floats"] = torch.randn(2, 6, WIDTH, generator=generator)
        batch["targets"] = torch.randn(2, 6, generator=generator)
    return batches


def make_loader(batches: list[Batch]) -> DataLoader[Batch]:
    return DataLoader(batches[dist.get_rank() :: dist.get_world_size()], batch_size=None)


# ---------------------------------------------------------------------- who has which dtype


class Observed(UserModule):
    """A Hugging Face model, a layer and a parameter of its own; writes down every dtype it meets."""

    seed = 0
    make_optimizer = staticmethod(partial(torch.optim.AdamW, lr=1e-3))

    def build(self) -> None:
        self.model = make_causal_lm(LLAMA)
        self.layer = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)
        self.autocast: set[bool] = set()

        blocks = [module for name, module in self.model.named_modules() if name.endswith("q_proj")]
        assert len(blocks) == LLAMA["num_hidden_layers"]
        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        for module in (*blocks, *ends, self.layer):
            module.register_forward_hook(self._observe_weight)
        for module in blocks:
            module.register_forward_hook(self._observe_output)

    def _observe_weight(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.dtypes["weight in a unit"].add(module.weight.dtype)
        self.autocast.add(torch.is_autocast_enabled("cpu"))

    def _observe_output(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.dtypes["inside a block"].add(output.dtype)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        own = self.layer(batch["floats"])
        scaled = logits * self.scale
        loss = F.cross_entropy(scaled.flatten(0, 1), batch["labels"].flatten()) + own.square().mean()
        self.autocast.add(torch.is_autocast_enabled("cpu"))
        assert batch["input_ids"].dtype == torch.int64
        for name, value in {
            "batch": batch["floats"],
            "logits": logits,
            "output of an own layer": own,
            "own parameter": self.scale,
            "loss": loss,
        }.items():
            self.dtypes[name].add(value.dtype)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters()]
        assert all(gradient is not None for gradient in gradients)
        self.dtypes["gradient"].update(gradient.dtype for gradient in gradients)

    def on_train_end(self) -> None:
        self.dtypes["stored parameter"].update(p.dtype for p in self.parameters())
        states = self.trainer.optimizers[0].state.values()
        assert len(states) == len(list(self.parameters()))
        self.dtypes["optimizer state"].update(s[name].dtype for s in states for name in ("exp_avg", "exp_avg_sq"))


@contextmanager
def record_reductions(dtypes: set[torch.dtype]) -> Iterator[None]:
    """The dtypes that gradients are reduced in."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    function = getattr(dist, name)

    def recorded(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes.add(output.dtype)
        return function(output, *args, **kwargs)

    with patch.object(dist, name, recorded):
        yield


TABLE = {
    "32-true": dict.fromkeys(
        (
            "stored parameter",
            "weight in a unit",
            "inside a block",
            "logits",
            "output of an own layer",
            "own parameter",
            "batch",
            "loss",
            "gradient",
            "reduction",
            "optimizer state",
        ),
        FP32,
    )
}
TABLE["bf16-mixed"] = {**TABLE["32-true"], "weight in a unit": BF16, "inside a block": BF16}
TABLE["bf16-true"] = {**dict.fromkeys(TABLE["32-true"], BF16), "reduction": FP32}


@pytest.mark.guarantees("precision-32", "precision-bf16-mixed", "precision-bf16-true")
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_dtypes(world_size: int) -> None:
    batches = make_batches(2 * world_size)

    def run() -> dict[str, dict[str, set[torch.dtype]]]:
        seen = {}
        for precision in TABLE:
            module = Observed()
            with record_reductions(module.dtypes["reduction"]):
                make_trainer(precision=precision).fit(module, make_loader(batches))
            assert module.autocast == {False}, precision
            seen[precision] = dict(module.dtypes)
        return seen

    expected = {precision: {name: {d} for name, d in row.items()} for precision, row in TABLE.items()}
    for seen in run_ranks(run, world_size):
        if world_size == 1:  # nothing to reduce
            for rows in (seen, expected):
                for row in rows.values():
                    row.pop("reduction")
        assert seen == expected


DDP_TABLE = {
    "32-true": TABLE["32-true"],
    # autocast: weights are cast where they are used
    "bf16-mixed": {
        **TABLE["32-true"],
        **dict.fromkeys(("inside a block", "logits", "output of an own layer"), BF16),
    },
    "bf16-true": TABLE["bf16-true"],
}


def test_dtypes_of_ddp() -> None:
    batches = make_batches(4)

    def run() -> None:
        for precision, row in DDP_TABLE.items():
            module, strategy = Observed(), DDPStrategy()
            make_trainer(strategy, precision=precision).fit(module, make_loader(batches))
            assert module.autocast == {precision == "bf16-mixed"}, precision
            assert module.dtypes == {name: {dtype} for name, dtype in row.items() if name != "reduction"}, precision

    run_ranks(run, 2)


POLICIES = {
    "dtype names": ({"param_dtype": "bfloat16"}, {"logits": BF16, "output of an own layer": BF16}),
    "output_dtype": (MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32), {}),
    "reduce_dtype": (
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
        {"logits": BF16, "output of an own layer": BF16, "reduction": BF16},
    ),
}
"""Policies, and where they differ from bf16-mixed."""


@pytest.mark.guarantees("mp-policy")
@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-mixed"])
def test_an_explicit_policy_wins(precision: Any) -> None:
    batches = make_batches(4)

    def run() -> None:
        for name, (policy, differences) in POLICIES.items():
            module, strategy = Observed(), FSDP2Strategy(config=FSDP2Config(mp_policy=policy))
            with record_reductions(module.dtypes["reduction"]):
                make_trainer(strategy, precision=precision, max_steps=1).fit(module, make_loader(batches))
            expected = {**TABLE["bf16-mixed"], **differences}
            assert module.dtypes == {key: {dtype} for key, dtype in expected.items()}, name

    run_ranks(run, 2)


# ---------------------------------------------------------------------- users' own modules under bf16-mixed


class LinearOnModule(UserModule):
    seed = 0
    make_optimizer = staticmethod(partial(torch.optim.AdamW, lr=3e-3))

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []

    def build(self) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss((self.layer(batch["floats"]) * self.scale).sum(-1), batch["targets"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(whole({name: p.grad for name, p in self.named_parameters()}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class FloatModel(nn.Module):
    """Takes floats where a language model takes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, floats: Tensor) -> Tensor:
        for block in self.blocks:
            floats = block(floats)
        return self.head(floats)


class FloatInputs(LinearOnModule):
    def build(self) -> None:
        self.model = FloatModel()

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.model(batch["floats"]).squeeze(-1), batch["targets"])


class OwnLossOnLogits(LinearOnModule):
    def build(self) -> None:
        self.model = make_causal_lm(LLAMA)
        self.class_weights = nn.Parameter(torch.rand(VOCABULARY))

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits + self.class_weights
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)


def get_gradient_error(module: pl.LightningModule, batches: list[Batch], gradients: dict[str, Tensor]) -> float:
    """Distance to the gradients of ``module`` in float32 on all batches, relative to their norm."""
    for batch in batches:
        (module.loss(batch) / len(batches)).backward()
    exact = {name: p.grad for name, p in module.named_parameters()}
    assert gradients.keys() == exact.keys()
    distance = sum((gradients[name] - gradient).square().sum() for name, gradient in exact.items())
    return (distance / sum(gradient.square().sum() for gradient in exact.values())).sqrt().item()


def get_bf16_gradients(module: pl.LightningModule, batches: list[Batch]) -> dict[str, Tensor]:
    """One process that computes everything in bfloat16."""
    module.to(BF16)
    for batch in batches:
        floats = {name: value.to(BF16) for name, value in batch.items() if value.is_floating_point()}
        (module.loss({**batch, **floats}) / len(batches)).backward()
    return {name: p.grad.float() for name, p in module.named_parameters()}


@pytest.mark.guarantees("bfloat16-gradients", "modules-under-bf16-mixed")
@pytest.mark.parametrize("kind", [LinearOnModule, FloatInputs, OwnLossOnLogits])
def test_users_own_modules_train_under_bf16_mixed(kind: type[LinearOnModule]) -> None:
    batches = make_batches(2)

    def run() -> None:
        module, expected = kind(), kind()
        loader = DataLoader([batches[dist.get_rank()]] * 6, batch_size=None)
        make_trainer(precision="bf16-mixed", max_steps=6).fit(module, loader)
        assert {loss.dtype for loss in module.losses} == {FP32}
        assert module.losses[-1] < 0.97 * module.losses[0]
        one_process = get_bf16_gradients(copy.deepcopy(expected), batches)
        reference = get_gradient_error(copy.deepcopy(expected), batches, one_process)
        error = get_gradient_error(expected, batches, module.gradients[0])
        assert 0 < error <= 1.25 * reference, (error, reference)

    run_ranks(run, 2)


class ListOnModule(LinearOnModule):
    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dtypes: list[torch.dtype] = []

    def loss(self, batch: Batch) -> Tensor:
        hidden = batch["floats"]
        for block in self.blocks:
            hidden = block(hidden)
            self.dtypes.append(hidden.dtype)
        return F.mse_loss(hidden.mean(-1).float(), batch["targets"])


@pytest.mark.guarantees("layers-of-a-list")
def test_layers_of_a_list_on_the_module_return_bfloat16() -> None:
    def run() -> None:
        module = ListOnModule()
        make_trainer(precision="bf16-mixed", max_steps=1).fit(module, make_loader(make_batches(2)))
        assert module.dtypes == [BF16, BF16]

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what is refused

CONTRADICTIONS: list[tuple[Any, dict[str, str], str]] = [
    ("bf16-mixed", {"param_dtype": "float16"}, r"computes in bfloat16, but .*mp_policy.param_dtype is torch.float16"),
    ("bf16-mixed", {"param_dtype": "float32"}, r"computes in bfloat16, but .*mp_policy.param_dtype is torch.float32"),
    ("bf16-true", {"param_dtype": "float32"}, r"computes in bfloat16, but .*mp_policy.param_dtype is torch.float32"),
    ("bf16-mixed", {"reduce_dtype": "float32"}, r"computes in bfloat16, but .*mp_policy has no param_dtype"),
]
"""Precision, policy, message."""


def test_a_policy_that_contradicts_the_precision_is_refused() -> None:
    def run() -> None:
        for precision, policy, message in CONTRADICTIONS:
            trainer = make_trainer(FSDP2Strategy(config=FSDP2Config(mp_policy=policy)), precision=precision)
            with pytest.raises(ValueError, match=rf'precision="{precision}".\ {message}'):
                trainer.fit(LinearOnModule(), DataLoader(make_batches(1), batch_size=None))
            assert not dist.is_initialized()

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(param_dtype=BF16), MixedPrecisionPolicy(reduce_dtype=BF16)])
def test_a_policy_that_agrees_with_the_precision_is_taken_as_it_is(policy: MixedPrecisionPolicy) -> None:
    assert get_mp_policy("bf16-true", policy) is policy
    assert get_mp_policy("32-true", policy) is policy


REFUSED = {
    "16-mixed": "bf16-mixed",
    "16-true": "bf16-true",
    "64-true": "32-true",
    "transformer-engine": "bf16-mixed",
    "transformer-engine-float16": "bf16-mixed",
    "8-true": "32-true",
}


@pytest.mark.guarantees("refused-precisions")
@pytest.mark.parametrize("precision", REFUSED)
def test_other_precisions_are_refused_and_the_alternative_named(precision: Any) -> None:
    message = rf"precision='{precision}' is not supported.*use precision=\"{REFUSED[precision]}\""
    with pytest.raises(ValueError, match=message):
        ShardedPrecision(precision)
    if precision in ("16-true", "64-true"):  # the others Lightning replaces on a CPU, or refuses itself
        with pytest.raises(ValueError, match=message):
            make_trainer(precision=precision)


def test_gradients_are_clipped_to_a_norm_that_is_told() -> None:
    precision, told = ShardedPrecision("32-true"), []
    precision.norm_observers.append(told.append)
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    precision.clip_grad_by_norm(torch.optim.SGD(weights), 2.5)
    torch.testing.assert_close([*weights[0].grad, *weights[1].grad], [torch.tensor(x) for x in (1.5, 0.0, 2.0)])
    assert precision.gradient_norm == 5.0
    assert told == [precision.gradient_norm]


@pytest.mark.guarantees("new-errors")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_steps": 3, "max_steps": 2}, r"min_steps=3, max_steps=2\): a run of at most 2 steps has no 3"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0.* at least 1"),
        ({"val_check_interval": 0}, "val_check_interval=0.* more than 0"),
        ({"log_every_n_steps": -1}, "log_every_n_steps=-1.* or 0 to log no steps"),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps=-2.* or -1 for"),
        ({"gradient_clip_val": -0.5}, "gradient_clip_val=-0.5.* at least 0"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan.* at least 0"),
        ({"min_steps": 2, "max_steps": 2, "num_sanity_val_steps": -1, "log_every_n_steps": 0}, None),
        ({"min_steps": 3, "max_steps": -1, "gradient_clip_val": 0, "val_check_interval": 0.1}, None),
    ],
)
def test_options_that_no_run_can_have_are_refused(options: dict[str, Any], message: str | None) -> None:
    defaults = {"accumulate_grad_batches": 1, "max_steps": -1, "gradient_clip_val": None}
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_optimization(cast(Any, SimpleNamespace(**{**defaults, **options})))


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("fsdp2", "16-mixed"),
        ("lightning_fsdp2.FSDP2Strategy", "16"),
        pytest.param("fsdp2", "16", marks=pytest.mark.slow),
        pytest.param("lightning_fsdp2.FSDP2Strategy", "16-mixed", marks=pytest.mark.slow),
    ],
)
def test_the_command_line_refuses_16_mixed_which_lightning_would_replace_on_a_cpu(
    strategy: str,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])
    chosen: Any = strategy if "." not in strategy else {"class_path": strategy}
    trainer = {"accelerator": "cpu", "precision": precision, "strategy": chosen, "default_root_dir": str(tmp_path)}
    model = {"class_path": f"{BoringModel.__module__}.BoringModel"}
    data = {"class_path": f"{BoringModel.__module__}.BoringDataModule"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": model, "data": data}))
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI(["fit", f"--config={tmp_path / 'run.yaml'}"])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "error: trainer.precision='16-mixed' is not supported by this strategy" in message
    assert 'use precision="bf16-mixed"' in message


@pytest.mark.guarantees("float32-of-a-family")
@pytest.mark.parametrize(
    "family", keep_known("ernie4_5_moe", "deepseek_v3", "inkling_text", "bailing_hybrid", "hunyuan_v1_moe")
)
def test_weights_that_a_family_keeps_in_float32_compute_in_it(family: str, tmp_path: Path) -> None:
    """Routers and others; the same weights in the same dtypes as in transformers, and gradients as in one process."""
    torch.manual_seed(0)
    make_family_model(family).save_pretrained(tmp_path)
    policy = get_mp_policy("bf16-true", None)
    batch = make_token_batches(1, ragged=False)[0]

    def run() -> None:
        alone = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).train()
        kept = {name for name, parameter in alone.named_parameters() if parameter.dtype is FP32}
        model: Any = ShardedPrecision("bf16-true").convert_module(from_pretrained(tmp_path, dtype=BF16))
        config = FSDP2Config(mp_policy=policy)
        FSDP2Manager(config, create_device_mesh(config, device_type="cpu")).parallelize(model)
        used: dict[str, Tensor] = {}
        for name in kept:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner).register_forward_hook(
                lambda module, *_, name=name, attribute=attribute: used.update(
                    {name: getattr(module, attribute).detach().clone()}
                ),
                prepend=True,  # while the weights are gathered
            )
        losses = [each(**batch, use_cache=False).loss for each in (model, alone)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses, rtol=0.01, atol=0)
        expected = dict(alone.named_parameters())
        # wrappers of convolutions read their weights without calling them
        assert used.keys() == {name for name in kept if "conv1d" not in name}
        for name, weight in used.items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=0, msg=name)
        gradients = {n: p.grad for n, p in model.named_parameters() if n in kept and p.grad is not None}
        for name, gradient in whole(gradients).items():
            reference = expected[name].grad
            assert gradient.dtype is FP32
            assert (gradient - reference).norm() <= 0.05 * reference.norm() + 1e-6, name

    run_ranks(run, 2)

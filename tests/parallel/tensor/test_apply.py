"""Plans applied to models, against the plain model in one process; and what is refused before anything is touched."""

import copy
import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.collectives import StepCounter
from helpers.families import make_family_config, make_family_model
from helpers.models import GPT2, LLAMA, VOCABULARY, PlainTransformer, add_adapters, plain_loss
from helpers.oracle import assert_equal_gradients, make_config
from helpers.ranks import run_ranks
from helpers.tensor_parallel import COUNTED_GPT2, get_gradients, make_mesh, make_rough_model, refuse, roughen, to_whole
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForSequenceClassification,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.tensor.apply import apply_tensor_parallel

LAYER = "model.layers.*."
TIED_LLAMA: dict[str, Any] = {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
PLAIN_PLAN: dict[str, Any] = {
    "embedding": "embedding_rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "colwise_gather_output",
}


def make_batch(length: int = 12) -> dict[str, Tensor]:
    input_ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = input_ids.clone()
    labels[0, :5] = -100
    return {"input_ids": input_ids, "labels": labels}


def assert_trains_like(plain: nn.Module, sharded: nn.Module, **batch: Any) -> None:
    """Compare logits, loss and gradients of two Hugging Face models."""
    batch = batch or make_batch()
    expected, actual = (model(**batch, use_cache=False) for model in (plain, sharded))
    torch.testing.assert_close(to_whole(actual.logits), expected.logits, rtol=1e-4, atol=1e-5)
    assert abs(actual.loss.item() - expected.loss.item()) <= 1e-5
    for output in (expected, actual):
        output.loss.backward()
    assert_equal_gradients(get_gradients(sharded), get_gradients(plain))


def count_local(module: nn.Module) -> int:
    return sum(parameter.to_local().numel() for parameter in module.parameters())


# ---------------------------------------------------------------------- whole models


@pytest.mark.parametrize(
    "config", [TIED_LLAMA, pytest.param(LLAMA, marks=pytest.mark.slow), GPT2], ids=["tied-llama", "llama", "gpt2"]
)
def test_a_model_trains_like_in_one_process_and_each_rank_keeps_its_part(config: dict[str, Any]) -> None:
    def run() -> None:
        plain = make_rough_model(config)
        for frozen in (1, 4):
            list(plain.parameters())[-frozen].requires_grad = False
        sharded = copy.deepcopy(plain)
        mesh = make_mesh()
        apply_tensor_parallel(find_structure(sharded), mesh)

        parameters = dict(sharded.named_parameters())
        assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in parameters.values())
        names = {name: p.requires_grad for name, p in plain.named_parameters()}
        assert {name: p.requires_grad for name, p in parameters.items()} == names
        is_tied = sharded.lm_head.weight is sharded.get_input_embeddings().weight
        assert is_tied == (plain.lm_head.weight is plain.get_input_embeddings().weight)
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameters[name].full_tensor(), parameter), name

        replicated = {n: p for n, p in parameters.items() if isinstance(p.placements[0], Replicate)}
        # norms, positions, biases of row-wise projections; packed biases; nothing else
        assert all(p.ndim == 1 or "wpe" in n for n, p in replicated.items()), replicated.keys()
        whole = sum(p.numel() for p in replicated.values())
        half = (sum(p.numel() for p in parameters.values()) - whole) / 2
        assert abs(count_local(sharded) - (half + whole)) <= 0.02 * (half + whole)
        assert_trains_like(plain, sharded)
        assert all(p.grad is None or p.grad.placements == p.placements for p in parameters.values())

    run_ranks(run, 2)


@pytest.mark.parametrize("config", [LLAMA, COUNTED_GPT2], ids=["llama", "gpt2"])
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(config: dict[str, Any]) -> None:
    def run() -> None:
        model = make_rough_model(config)
        layers = model.config.num_hidden_layers
        apply_tensor_parallel(find_structure(model), make_mesh())
        with StepCounter() as counter:
            loss = model(**make_batch(), use_cache=False).loss
        assert counter.collectives == {"all_reduce": 2 * layers + 1, "all_gather": 1}  # embedding; logits
        with StepCounter() as counter:
            loss.backward()
        packed_biases = layers if config is GPT2 else 0  # kept whole, and used in parts
        assert counter.collectives == {"all_reduce": 2 * layers + 1 + packed_biases}  # head

    run_ranks(run, 2)


def test_four_ranks_and_a_vocabulary_that_they_do_not_divide() -> None:
    def run() -> None:
        plain = make_rough_model({**TIED_LLAMA, "num_key_value_heads": 4})
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh())
        assert sharded.lm_head.weight.to_local().size(0) == [26, 26, 26, 23][dist.get_rank()]
        assert_trains_like(plain, sharded)

    run_ranks(run, 4)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_checkpointing_by_transformers_computes_the_same_gradients(sequence_parallel: bool) -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA)
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=sequence_parallel)
        sharded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_trains_like(plain, sharded)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- given plans


def test_a_plain_module_with_a_plan_of_names_or_of_torch_s_styles() -> None:
    torch_plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def run() -> None:
        mesh = make_mesh()
        for plan in (PLAIN_PLAN, torch_plan, lambda model: PLAIN_PLAN):
            assert_plain_module_trains_alike(mesh, plan, tied=True)
        assert_plain_module_trains_alike(mesh, {k: v for k, v in PLAIN_PLAN.items() if k != "head"}, tied=False)

    run_ranks(run, 2)


def assert_plain_module_trains_alike(mesh: DeviceMesh, plan: Any, *, tied: bool) -> None:
    torch.manual_seed(0)
    plain = PlainTransformer(tied=tied)
    roughen(plain)
    sharded = copy.deepcopy(plain)
    apply_tensor_parallel(find_structure(sharded), mesh, plan=plan)
    assert (sharded.head.weight is sharded.embedding.weight) == tied
    assert sharded.embedding.weight.to_local().size(0) == [51, 50][dist.get_rank()]
    assert sharded.blocks[0].mlp[0].weight.to_local().shape == (32, 32)
    losses = [plain_loss(model, make_batch())[0] for model in (plain, sharded)]
    torch.stack(losses).sum().backward()
    assert abs(losses[0] - losses[1]) <= 1e-5
    assert_equal_gradients(get_gradients(sharded), get_gradients(plain))


def test_a_projection_whose_output_is_gathered_may_have_any_size_in_a_plain_module_too() -> None:
    run_ranks(lambda: assert_plain_module_trains_alike(make_mesh(), PLAIN_PLAN, tied=False), 2)


def test_a_parameter_s_entry_wins_over_its_module_s_and_a_later_one_over_an_earlier_one() -> None:
    def run() -> None:
        model = make_rough_model({**LLAMA, "mlp_bias": True})
        plan = {
            f"{LAYER}mlp.up_proj.bias": "packed_colwise",
            f"{LAYER}mlp.*": "colwise",
            f"{LAYER}mlp.down_proj": "rowwise",
            f"{LAYER}mlp.act_fn": "replicate",
        }
        apply_tensor_parallel(find_structure(model), make_mesh(), plan=plan)
        mlp = model.model.layers[1].mlp
        shapes = [tuple(p.to_local().shape) for p in (mlp.gate_proj.weight, mlp.down_proj.weight, mlp.gate_proj.bias)]
        assert shapes == [(32, 32), (32, 32), (32,)]
        assert mlp.up_proj.bias.to_local().shape == (64,)  # a packed bias stays whole

    run_ranks(run, 2)


def test_one_pattern_may_stand_for_embeddings_and_linear_layers() -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = nn.ModuleDict({"ends": nn.ModuleDict({"embedding": nn.Embedding(7, 6), "head": nn.Linear(6, 7)})})
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), plan={"ends.*": "colwise_gather_output"})
        ids = torch.tensor([0, 6, 3])
        for model in (plain, sharded):
            model["ends"]["head"](model["ends"]["embedding"](ids)).square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))
        assert sharded["ends"]["embedding"].weight.to_local().shape == (7, 3)
        assert sharded["ends"]["head"].weight.to_local().shape == ([4, 3][dist.get_rank()], 6)

    run_ranks(run, 2)


@pytest.mark.guarantees("several-families")
def test_tied_weights_of_which_the_plan_shards_one_stay_tied_whole_and_right() -> None:
    def run() -> None:
        plain = make_rough_model(TIED_LLAMA)
        mlp = {f"{LAYER}mlp.{name}_proj": style for name, style in (("gate", "colwise"), ("up", "colwise"))}
        for end in ({"lm_head": "colwise_gather_output"}, {"model.embed_tokens": "embedding_rowwise"}):
            plain.zero_grad()
            sharded = copy.deepcopy(plain)
            apply_tensor_parallel(
                find_structure(sharded), make_mesh(), plan={**mlp, f"{LAYER}mlp.down_proj": "rowwise", **end}
            )
            assert sharded.lm_head.weight is sharded.model.embed_tokens.weight
            assert_trains_like(plain, sharded)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- styles of torch with layouts of their own


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(hidden))))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = Mlp()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5, 0.7]))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden) * self.scale


IN_TORCH_S_SEQUENCE_PARALLELISM: dict[str, ParallelStyle] = {
    "mlp.norm": SequenceParallel(),
    "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.down": RowwiseParallel(output_layouts=Replicate(), use_local_output=True),
}
WITH_DTENSORS_BETWEEN: dict[str, ParallelStyle | str] = {
    "mlp.up": ColwiseParallel(use_local_output=False),
    "mlp.down": RowwiseParallel(),
}
AROUND_NAMED_STYLES: dict[str, ParallelStyle | str] = {
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
}
AROUND_OTHER_LAYOUTS: dict[str, ParallelStyle | str] = {
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    "mlp.up": ColwiseParallel(use_local_output=False),
    "mlp.down": RowwiseParallel(output_layouts=Replicate(), input_layouts=Shard(-1)),
}


@pytest.mark.parametrize(
    ("plan", "is_input_sharded"),
    [
        (IN_TORCH_S_SEQUENCE_PARALLELISM, True),
        (WITH_DTENSORS_BETWEEN, False),
        (AROUND_NAMED_STYLES, True),
        (AROUND_OTHER_LAYOUTS, True),
    ],
    ids=["torch-sequence-parallel", "dtensors-between", "around-named-styles", "around-other-layouts"],
)
def test_torch_s_styles_with_other_layouts_are_applied_as_they_are(
    plan: dict[str, Any], is_input_sharded: bool
) -> None:
    def run() -> None:
        plain = Holder()
        roughen(plain)
        sharded = copy.deepcopy(plain)
        mesh = make_mesh()
        apply_tensor_parallel(find_structure(sharded), mesh, plan=plan)
        hidden = torch.randn(2, 4, 6)
        expected = plain(hidden)
        actual = sharded(hidden.chunk(2, 1)[dist.get_rank()] if is_input_sharded else hidden)
        torch.testing.assert_close(to_whole(actual), expected, rtol=1e-5, atol=1e-6)
        for output in (expected, actual):
            output.square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))
        assert all(isinstance(p, DTensor) and p.device_mesh == mesh for p in sharded.parameters())

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what hangs around a model


class Distillation(pl.LightningModule):
    """A frozen teacher, a student of another family, and parameters of its own, in and beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_rough_model(LLAMA).eval().requires_grad_(False)
        self.student = make_rough_model(GPT2)
        self.value_head = nn.Sequential(nn.Linear(VOCABULARY, 3), nn.Tanh(), nn.Linear(3, 2))
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        self.seen: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(self.temperature)
        logits = self.student(batch["input_ids"], use_cache=False).logits
        target = self.teacher(batch["input_ids"], use_cache=False).logits
        values = self.value_head(logits)
        return F.mse_loss(logits * self.temperature, target) + (values * self.temperature).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx).detach()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_several_models_and_parameters_around_them(sequence_parallel: bool) -> None:
    def run() -> None:
        plain = Distillation()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=sequence_parallel)
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        assert sharded.teacher.model.layers[0].self_attn.q_proj.weight.to_local().shape == (16, 32)
        assert sharded.student.transformer.h[0].attn.c_attn.weight.to_local().shape == (32, 48)
        batch = make_batch()
        losses = [module.training_step(batch, 0) for module in (plain, sharded)]
        assert abs(losses[0] - losses[1]) <= 1e-5 * losses[0]
        torch.stack(losses).sum().backward()
        gradients = get_gradients(sharded)
        assert_equal_gradients(gradients, get_gradients(plain))
        assert all((gradient is None) == name.startswith("teacher.") for name, gradient in gradients.items())
        assert [type(value) for value in sharded.seen] == [Tensor], "a step computes with plain tensors"
        with torch.no_grad():
            torch.testing.assert_close(sharded.validation_step(batch, 0), losses[0].detach(), rtol=1e-5, atol=0)

    run_ranks(run, 2)


class Alias(nn.Module):
    """Holds a part of its model once more."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = make_rough_model(LLAMA).model
        self.model = make_rough_model(LLAMA)
        self.model.model = self.backbone

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


class ActorAndCritic(nn.Module):
    """Two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = make_rough_model(LLAMA)
        self.critic: Any = LlamaForSequenceClassification(make_config({**LLAMA, "pad_token_id": 0}))
        self.critic.model = self.actor.model

    def forward(self, input_ids: Tensor) -> Tensor:
        values = self.critic(input_ids=input_ids, use_cache=False).logits
        return self.actor(input_ids=input_ids, labels=input_ids, use_cache=False).loss + values.square().mean()


class Draft(nn.Module):
    """A draft model with the embedding and the head of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.draft = make_rough_model(LLAMA), make_rough_model({**LLAMA, "num_hidden_layers": 1})
        self.draft.model.embed_tokens, self.draft.lm_head = self.target.model.embed_tokens, self.target.lm_head

    def forward(self, input_ids: Tensor) -> Tensor:
        models = (self.target, self.draft)
        return sum(model(input_ids=input_ids, labels=input_ids, use_cache=False).loss for model in models)


SHARED = {"alias": Alias, "actor-and-critic": ActorAndCritic, "draft": Draft}
FLAGS: dict[str, dict[str, Any]] = {"tp": {}, "sp": {"sequence_parallel": True}, "loss": {"loss_parallel": True}}
FAST = [("alias", "tp"), ("actor-and-critic", "sp"), ("draft", "loss")]


@pytest.mark.parametrize(
    ("kind", "flags"),
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in itertools.product(SHARED, FLAGS)],
)
def test_modules_that_hang_in_two_places_are_sharded_once(kind: str, flags: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = SHARED[kind]()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), **FLAGS[flags])
        ids = make_batch()["input_ids"]
        for model in (plain, sharded):
            model(ids).backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)


# ---------------------------------------------------------------------- adapters


ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
KEPT = {"target_modules": "all-linear", "modules_to_save": ["lm_head", "embed_tokens"]}


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-all-linear": ("llama", {"target_modules": "all-linear"}),
    "llama-modules-to-save": ("llama", KEPT),
    "llama-head": ("llama", {"target_modules": ["lm_head"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "qwen3_moe-attention": ("qwen3_moe", ATTENTION),
}
FAST_ADAPTERS = [
    ("llama-all-linear", "tp"),
    ("llama-modules-to-save", "sp"),
    ("llama-head", "sp"),
    ("gpt2", "tp"),
    ("qwen3_moe-attention", "sp"),
]


@pytest.mark.guarantees("several-families")
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param(*cell, marks=() if cell in FAST_ADAPTERS else pytest.mark.slow)
        for cell in itertools.product(ADAPTERS, ("tp", "sp"))
    ],
)
def test_adapters_of_low_rank_on_a_frozen_base(name: str, flags: str) -> None:
    model_type, options = ADAPTERS[name]

    def run() -> None:
        torch.manual_seed(0)
        plain: Any = add_adapters(make_family_model(model_type), **options)
        if "modules_to_save" not in options:
            plain.add_adapter("second", LoraConfig(r=2, init_lora_weights=False, **options))
            plain.base_model.set_adapter(["default", "second"])
        trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
        assert all("lora_" in name or "modules_to_save" in name for name in trained)
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), **FLAGS[flags])
        assert trained == {name for name, parameter in sharded.named_parameters() if parameter.requires_grad}
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        assert_trains_like(plain, sharded)

    run_ranks(run, 2)


@pytest.mark.guarantees("adapters-under-tensor-parallelism")
@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        (
            "llama",
            {"target_modules": ["q_proj"], "use_dora": True},
            r"layers\.0\.self_attn\.q_proj: Linear has the parameters lora_magnitude_vector.* without DoRA",
        ),
        ("llama", {"target_modules": ["o_proj"], "lora_bias": True}, r"o_proj: .* without lora_bias"),
        # tied to the head; with transformers 5.17, an embedding with an adapter is left whole if it is not tied
        ("gemma", {"target_modules": ["embed_tokens"]}, "adapters on an embedding do not work"),
        (
            "mixtral",
            {"target_parameters": ["mlp.experts.down_proj"]},
            "Adapters that replace the parameters of",
        ),
    ],
    ids=["dora", "lora-bias", "embedding", "experts"],
)
def test_other_adapters_are_refused_by_name(model_type: str, options: dict[str, Any], message: str) -> None:
    def run() -> None:
        model = add_adapters(make_family_model(model_type), **options)
        with refuse(model, (TypeError, ValueError), message):
            apply_tensor_parallel(find_structure(model), make_mesh())

    run_ranks(run, 2)


# ---------------------------------------------------------------------- loss on a sharded vocabulary


@pytest.mark.guarantees("loss-parallel")
@pytest.mark.parametrize(
    ("config", "sequence_parallel"),
    [
        pytest.param(LLAMA, True, id="llama-sp"),
        pytest.param(GPT2, False, id="gpt2-tp"),
        pytest.param(LLAMA, False, id="llama-tp", marks=pytest.mark.slow),
        pytest.param(GPT2, True, id="gpt2-sp", marks=pytest.mark.slow),
    ],
)
def test_the_loss_on_a_sharded_vocabulary_and_its_gradients(config: dict[str, Any], sequence_parallel: bool) -> None:
    def run() -> None:
        plain = make_rough_model(config)
        sharded = copy.deepcopy(plain)
        mesh = make_mesh()
        apply_tensor_parallel(find_structure(sharded), mesh, sequence_parallel=sequence_parallel, loss_parallel=True)
        batch = make_batch()
        shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        for extra in (
            {"labels": batch["labels"]},
            {"labels": batch["labels"], "num_items_in_batch": torch.tensor(7)},
            {"labels": batch["labels"], "num_items_in_batch": 7},
            {"labels": batch["labels"], "shift_labels": shifted.roll(1, 1)},  # these count
        ):
            for model in (plain, sharded):
                model.zero_grad()
            assert_trains_like(plain, sharded, input_ids=batch["input_ids"], **extra)
        logits = sharded(batch["input_ids"]).logits
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(2),)
        assert logits.device_mesh == mesh
        assert logits.shape == (2, 12, VOCABULARY)
        assert logits.to_local().shape == (2, 12, [51, 50][dist.get_rank()])

    run_ranks(run, 2)


@pytest.mark.guarantees("loss-parallel")
def test_logits_of_a_sharded_vocabulary_are_never_gathered() -> None:
    def run() -> None:
        model = make_rough_model(LLAMA)
        apply_tensor_parallel(find_structure(model), make_mesh(), loss_parallel=True)
        batch = make_batch()
        with StepCounter() as counter:
            model(**batch, use_cache=False).loss.backward()
        assert "all_gather" not in counter.collectives
        assert max(counter.elements["all_reduce"]) == batch["input_ids"].numel() * 32, "hidden states are the largest"

    run_ranks(run, 2)


def test_the_loss_on_a_sharded_vocabulary_in_bfloat16() -> None:
    def compute(model: Any) -> tuple[Tensor, Tensor]:
        loss = model(**make_batch(), use_cache=False).loss
        loss.backward()
        return loss.detach().float(), torch.cat([to_whole(p.grad).flatten().float() for p in model.parameters()])

    def run() -> None:
        exact = make_rough_model(LLAMA)
        one_process, sharded = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()
        apply_tensor_parallel(find_structure(sharded), make_mesh(), loss_parallel=True)
        loss, gradient = compute(exact)
        (_, reference), (own_loss, own) = compute(one_process), compute(sharded)
        assert abs(own_loss - loss) <= 1e-2 * loss
        assert 0 < (own - gradient).norm() <= 1.25 * (reference - gradient).norm()

    run_ranks(run, 2)


def test_a_head_that_stays_whole_with_its_tied_embedding_is_no_loss_parallelism() -> None:
    def run() -> None:
        model = make_rough_model(TIED_LLAMA)
        try:
            apply_tensor_parallel(
                find_structure(model), make_mesh(), plan={"lm_head": "colwise_gather_output"}, loss_parallel=True
            )
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = ""
        assert "loss_parallel" in refusal or isinstance(model(**make_batch()).logits, DTensor), "the flag is ignored"

    run_ranks(run, 2)


# ---------------------------------------------------------------------- recorded hidden states


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_recorded_hidden_states_are_whole_sequences(config: dict[str, Any]) -> None:
    def run() -> None:
        plain = make_rough_model(config).eval()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=True)
        for length in (12, 2, 7):
            ids = make_batch(length)["input_ids"]
            with torch.no_grad():
                expected, actual = (m(ids, output_hidden_states=True).hidden_states for m in (plain, sharded))
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
                expected, actual = (
                    m.base_model(ids, output_hidden_states=True, return_dict=False, use_cache=False)
                    for m in (plain, sharded)
                )
            assert len(expected) == 2
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    run_ranks(run, 2)


def test_a_rank_holds_its_part_of_what_is_sharded_and_all_of_the_rest() -> None:
    def run() -> None:
        for plain in (make_rough_model(LLAMA), make_rough_model(GPT2), make_family_model("mixtral")):
            sharded = copy.deepcopy(plain)
            apply_tensor_parallel(find_structure(sharded), make_mesh())
            whole = {name: parameter.numel() for name, parameter in plain.named_parameters()}
            held = {name: parameter.to_local() for name, parameter in sharded.named_parameters()}
            split = sum(whole[name] for name, local in held.items() if local.numel() < whole[name])
            replicated = sum(whole.values()) - split
            assert split > replicated
            expected = split / 2 + replicated
            assert sum(local.numel() for local in held.values()) == pytest.approx(expected, rel=0.02)
            # no shard keeps the memory of the whole weight
            stored = sum(local.untyped_storage().nbytes() for local in held.values())
            assert stored / 4 == pytest.approx(expected, rel=0.02)

    run_ranks(run, 2)


# ---------------------------------------------------------------------- what would train wrong without a word


def make_vision_language_model() -> Any:
    text = {
        "vocab_size": 120,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "initializer_range": 0.2,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    ids = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112, "vision_end_token_id": 113}
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids)).train()


def test_a_language_model_with_a_vision_tower_that_stays_whole() -> None:
    def run() -> None:
        plain = make_vision_language_model()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh())
        input_ids = torch.randint(3, 100, (1, 16))
        input_ids[0, 2:8] = torch.tensor([112, 110, 110, 110, 110, 113])
        batch = {
            "input_ids": input_ids,
            "labels": input_ids,
            "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (input_ids == 110).int(),
        }
        assert_trains_like(plain, sharded, **batch)
        with pytest.raises(ValueError, match="adds features of its images to whole sequences between its layers"):
            apply_tensor_parallel(find_structure(make_vision_language_model()), make_mesh(), sequence_parallel=True)

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("family", "option"), [("glm4_moe", "use_qk_norm"), ("phi", "qk_layernorm"), ("cohere", "use_qk_norm")]
)
def test_norms_that_a_config_switches_on_have_the_gradients_of_one_process(family: str, option: str) -> None:
    def run() -> None:
        config = make_family_config(family)
        setattr(config, option, True)
        for sequence_parallel in (False, True):
            torch.manual_seed(0)
            plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
            roughen(plain)
            sharded = copy.deepcopy(plain)
            apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=sequence_parallel)
            assert_trains_like(plain, sharded)

    run_ranks(run, 2)


def test_experts_whose_parameters_no_entry_shards_are_refused() -> None:
    def run() -> None:
        plan = {"model.layers.*.mlp.experts": "moe_tp_experts"}
        with pytest.raises(ValueError, match=r"model\.layers\.\d\.mlp\.experts .* no entry shards the parameters of"):
            apply_tensor_parallel(find_structure(make_family_model("mixtral")), make_mesh(), plan=plan)

    run_ranks(run, 2)


def test_ids_and_labels_outside_of_the_vocabulary_are_errors() -> None:
    def run() -> None:
        model = make_rough_model(LLAMA)
        apply_tensor_parallel(find_structure(model), make_mesh(), loss_parallel=True)
        ids = torch.randint(3, VOCABULARY, (1, 6))
        for wrong in (VOCABULARY, -1):
            with pytest.raises(RuntimeError, match="token id is not in the embedding's range of 0 to 100"):
                model(input_ids=ids.index_fill(1, torch.tensor([2]), wrong))
            with pytest.raises(RuntimeError, match="label is not in the vocabulary's range of 0 to 100"):
                model(input_ids=ids, labels=ids.index_fill(1, torch.tensor([2]), wrong))

    run_ranks(run, 2)


@pytest.mark.parametrize("family", ["bloom", "llama", "gemma3n_text"])
def test_evaluation_under_sequence_parallelism_takes_sequences_of_any_length(family: str) -> None:
    def run() -> None:
        torch.manual_seed(0)
        plain = make_family_model(family).eval()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=True)
        for length in (5, 1, 2):
            with torch.no_grad():
                expected, actual = (model(**make_batch(length), use_cache=False).logits for model in (plain, sharded))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    run_ranks(run, 2)


def test_generate_works_with_a_sharded_vocabulary() -> None:
    def run() -> None:
        plain = make_rough_model(LLAMA).eval()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), loss_parallel=True)
        ids = torch.randint(3, VOCABULARY, (2, 6))
        for options in ({}, {"num_beams": 2}, {"repetition_penalty": 1.3}):
            settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
            assert torch.equal(sharded.generate(ids, **settings), plain.generate(ids, **settings))

    run_ranks(run, 2)


def test_falcon_with_one_key_value_head_is_refused_with_a_remedy() -> None:
    def run() -> None:
        config = AutoConfig.for_model("falcon", hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(
            ValueError, match=r"tp_size=2 does not divide num_kv_heads=1 of FalconAttention; use one of 1"
        ):
            apply_tensor_parallel(find_structure(model), make_mesh())
        assert model.transformer.h[0].self_attention.num_heads == 4

    run_ranks(run, 2)


class ByName(nn.Module):
    """Calls its children with keywords only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(ByNameLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(input=ids)
        for layer in self.layers:
            hidden = layer(x=hidden)
        return hidden


class ByNameLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = ByNameMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x=x)


class ByNameMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=F.gelu(self.up(input=x)))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_arguments_may_be_given_by_name(sequence_parallel: bool) -> None:
    def run() -> None:
        plan = {"embed": "embedding_rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
        plain = ByName()
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), plan=plan, sequence_parallel=sequence_parallel)
        ids = torch.randint(3, VOCABULARY, (2, 6))
        for model in (plain, sharded):
            model(ids).square().sum().backward()
        assert_equal_gradients(get_gradients(sharded), get_gradients(plain))

    run_ranks(run, 2)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_a_layer_compiles_to_one_graph_inside_of_activation_checkpointing(sequence_parallel: bool) -> None:
    def run() -> None:
        plain = make_rough_model({**LLAMA, "num_hidden_layers": 2})  # one splits the sequence, one gathers it
        sharded = copy.deepcopy(plain)
        apply_tensor_parallel(find_structure(sharded), make_mesh(), sequence_parallel=sequence_parallel)
        for index, layer in enumerate(sharded.model.layers):
            layer.compile(backend="aot_eager", fullgraph=True)
            sharded.model.layers[index] = checkpoint_wrapper(layer)
        batch = make_batch()
        for model in (plain, sharded):
            model(**batch, use_cache=False).loss.backward()
        gradients = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in get_gradients(sharded).items()}
        assert_equal_gradients(gradients, get_gradients(plain))

    run_ranks(run, 2)

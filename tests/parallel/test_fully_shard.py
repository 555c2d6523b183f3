"""Units, their settings, and what a step sends; gradients of every grouping are those of one process."""

import contextlib
import copy
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.collectives import StepCounter
from helpers.models import GPT2, LLAMA, VOCABULARY, Block, PlainTransformer, make_causal_lm
from helpers.oracle import QUIET
from helpers.ranks import run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fsdp2 import FSDP2Strategy, create_device_mesh, defer_grad_sync
from lightning_fsdp2.parallel.fully_shard import Unit, build_unit_plan, reshard
from lightning_fsdp2.parallel.structure import get_layer_lists
from lightning_fsdp2.parallelizer import (
    fsdp2_strategy_parallelize,
    unshard_fsdp2_model,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def make_tokens(rank: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(rank))


def token_loss(model: nn.Module, rank: int) -> Tensor:
    output = model(make_tokens(rank))
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), make_tokens(rank)[:, 1:].flatten())


# ---------------------------------------------------------------------- models


class UserLlama(LlamaForCausalLM):
    """A user's subclass with a head of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        return self.lm_head(hidden) + self.value(hidden)


class Wrapper(nn.Module):
    """Hides a model under another prefix and beside another part."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = nn.Module()
        self.engine.net = make_causal_lm(LLAMA)
        self.value = nn.Linear(VOCABULARY, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.engine.net(input_ids, use_cache=False).logits
        return logits + self.value(logits)


class OneModel(pl.LightningModule):
    """A LightningModule with a model, a Linear and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_causal_lm(LLAMA)
        self.adapter = nn.Linear(VOCABULARY, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.adapter(self.model(input_ids, use_cache=False).logits) * self.scale


class Distillation(pl.LightningModule):
    """A frozen teacher and a student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_causal_lm(LLAMA).requires_grad_(False)
        self.student = make_causal_lm({**LLAMA, "num_hidden_layers": 2})

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(input_ids, use_cache=False).logits
        return self.student(input_ids, use_cache=False).logits + target


class Stack(nn.Module):
    """Runs blocks one after the other between an embedding and a head."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = blocks
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            for part in block.values() if isinstance(block, nn.ModuleDict) else [block]:
                hidden = part(hidden)
        return self.head(hidden)


class ExpertBlock(nn.Module):
    """A mixture of experts; every token uses all of them."""

    def __init__(self, gate_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3, dtype=gate_dtype)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden.to(self.gate.weight.dtype)).softmax(-1).to(hidden.dtype)
        return hidden + sum(expert(hidden) * weights[..., i, None] for i, expert in enumerate(self.experts))


class LoraLinear(nn.Module):
    """What peft puts in place of a Linear."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + self.lora_B["default"](self.lora_A["default"](hidden))


class PeftLike(nn.Module):
    """The module tree of ``PeftModel``: ``base_model.model`` is the Hugging Face model, frozen but for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = make_causal_lm(LLAMA).requires_grad_(False)
        for layer in self.base_model.model.model.layers:
            layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.base_model.model(input_ids, use_cache=False).logits


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    return T5ForConditionalGeneration(config).train()


def t5_loss(model: nn.Module, rank: int) -> Tensor:
    return model(input_ids=make_tokens(rank), labels=make_tokens(rank + 7)).loss


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(max_position_embeddings=32, num_labels=5, **SIZES)).train()


def bert_loss(model: nn.Module, rank: int) -> Tensor:
    return model(input_ids=make_tokens(rank), labels=torch.tensor([rank, 4])).loss


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **SIZES)).train()


def vit_loss(model: nn.Module, rank: int) -> Tensor:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    return model(pixel_values=images, labels=torch.tensor([rank, 4])).loss


def make_user_llama() -> nn.Module:
    return UserLlama(LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"}))


def make_partly_frozen_llama() -> nn.Module:
    model = make_causal_lm(LLAMA)
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    return model


def make_moe(gate_dtype: torch.dtype = torch.float32) -> nn.Module:
    return Stack(nn.ModuleList(ExpertBlock(gate_dtype) for _ in range(2)))


def make_dict_stack() -> nn.Module:
    return Stack(nn.ModuleList(nn.ModuleDict({"a": Block(32), "b": Block(32)}) for _ in range(2)))


# ---------------------------------------------------------------------- units


@dataclass
class Model:
    """A kind of model, the units it must become, and how to train it."""

    make: Callable[[], nn.Module]
    units: str
    """One unit per line: its modules, and the settings that are not the default; see :func:`describe`."""

    loss: Callable[[nn.Module, int], Tensor] = token_loss


LLAMA_UNITS = """
    {}model.layers.0
    {}model.layers.1
    {}model.layers.2 kept
    {}model.embed_tokens forward-only
    {}model.norm + {}lm_head kept
"""

MODELS = {
    "llama": Model(partial(make_causal_lm, LLAMA), LLAMA_UNITS.replace("{}", "") + "root kept output"),
    "llama-tied": Model(
        partial(make_causal_lm, {**LLAMA, "tie_word_embeddings": True}),
        """
        model.layers.0
        model.layers.1
        model.layers.2 kept
        model.embed_tokens + model.norm + lm_head kept
        root kept output
        """,
    ),
    "llama-partly-frozen": Model(make_partly_frozen_llama, LLAMA_UNITS.replace("{}", "") + "root kept output"),
    "llama-subclass": Model(make_user_llama, LLAMA_UNITS.replace("{}", "") + "root kept output"),
    "llama-under-a-prefix": Model(
        Wrapper,
        LLAMA_UNITS.replace("{}", "engine.net.") + "engine.net kept\n value\n root kept output",
    ),
    "gpt2": Model(
        partial(make_causal_lm, GPT2),
        """
        transformer.h.0
        transformer.h.1 kept
        transformer.wte + transformer.ln_f + lm_head kept
        root kept output
        """,
    ),
    "t5": Model(
        make_t5,
        """
        encoder.block.0
        encoder.block.1 kept
        decoder.block.0
        decoder.block.1 kept
        root kept output
        """,
        t5_loss,
    ),
    "bert": Model(
        make_bert,
        """
        bert.encoder.layer.0
        bert.encoder.layer.1 kept
        bert.embeddings.word_embeddings forward-only
        root kept output
        """,
        bert_loss,
    ),
    "vit": Model(make_vit, "vit.layers.0\n vit.layers.1 kept\n root kept output", vit_loss),
    "lightning-module": Model(
        OneModel,
        LLAMA_UNITS.replace("{}", "model.") + "model kept output\n adapter output\n root kept container",
    ),
    "teacher-and-student": Model(
        Distillation,
        """
        teacher.model.layers.0
        teacher.model.layers.1
        teacher.model.layers.2
        student.model.layers.0
        student.model.layers.1 kept
        teacher.model.embed_tokens forward-only
        teacher.model.norm + teacher.lm_head
        student.model.embed_tokens forward-only
        student.model.norm + student.lm_head kept
        teacher output
        student kept output
        root kept container
        """,
    ),
    "peft-like": Model(
        PeftLike,
        LLAMA_UNITS.replace("{}", "base_model.model.") + "base_model.model kept\n root kept output",
    ),
    "plain": Model(
        PlainTransformer,
        "blocks.0\n blocks.1\n blocks.2 kept\n embedding\n norm\n head\n root kept output",
    ),
    "plain-tied": Model(
        partial(PlainTransformer, tied=True),
        "blocks.0\n blocks.1\n blocks.2 kept\n embedding + head\n norm\n root kept output",
    ),
    "experts-in-blocks": Model(make_moe, "blocks.0\n blocks.1 kept\n embedding\n head\n root kept output"),
    "dicts-in-a-list": Model(
        make_dict_stack,
        "blocks.0.a\n blocks.0.b kept\n blocks.1.a\n blocks.1.b kept\n embedding\n head\n root kept output",
    ),
    "two-dtypes": Model(
        partial(make_moe, torch.float64),
        "blocks.0.gate\n blocks.0\n blocks.1.gate kept\n blocks.1 kept\n embedding\n head\n root kept output",
    ),
}


def describe(unit: Unit, root: nn.Module) -> str:
    """The unit in one line: ``kept`` after forward, casts its ``output``, ..."""
    names = {module: name or "root" for name, module in root.named_modules()}
    settings = {
        "kept": unit.reshard_after_forward is False,
        "output": unit.casts_output,
        "container": unit.is_container,
        "forward-only": not unit.unshard_in_backward,
    }
    return " ".join([" + ".join(names[module] for module in unit.modules), *[key for key in settings if settings[key]]])


def parallelize(model: nn.Module, **options: Any) -> nn.Module:
    return fsdp2_strategy_parallelize(
        model, create_device_mesh(device_type="cpu"), mp_policy=MixedPrecisionPolicy(), **options
    )


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Compare with the tolerances of DESIGN, "What correct means"; every rank must call it."""
    reshard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    actual = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max().item()
        assert error <= 1e-5 * gradient.abs().max().item() + 1e-7 * largest, f"{name}: off by {error}"


@pytest.mark.parametrize("name", MODELS)
def test_units_of_a_model(name: str) -> None:
    model = MODELS[name].make()
    expected = [line.strip() for line in MODELS[name].units.strip().splitlines()]
    assert [describe(unit, model) for unit in build_unit_plan(model).units] == expected


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Train every model two steps on two ranks and in one process, all in one fork; what failed, by model."""

    def run() -> dict[str, str]:
        found = {}
        for name, case in MODELS.items():
            try:
                train_two_steps(case)
            except Exception:  # the test of that model reports it
                found[name] = traceback.format_exc()
        return found

    return run_ranks(run, 2)[0]


def train_two_steps(case: Model) -> None:
    torch.manual_seed(0)
    model = case.make()
    reference = copy.deepcopy(model)
    parallelize(model)
    for step in range(2):
        model.zero_grad()
        case.loss(model, 2 * step + dist.get_rank()).backward()
        reference.zero_grad()
        torch.stack([case.loss(reference, 2 * step + rank) for rank in range(2)]).mean().backward()
        assert_equal_gradients(model, reference)


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_two_ranks_have_the_gradients_of_one_process(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


def test_a_module_with_two_dtypes_is_refused_with_its_parameters() -> None:
    model = make_moe()
    model.blocks[1].gate.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"blocks\.1\.gate\.weight \(torch\.float32\), blocks\.1\.gate\.bias"):
        build_unit_plan(model)
    model.blocks[1].gate.bias.requires_grad_(False)
    build_unit_plan(model)


def test_parameters_tied_across_blocks_are_refused_with_their_names() -> None:
    model = PlainTransformer()
    model.blocks[2].mlp[0].weight = model.blocks[0].mlp[0].weight
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.0\.weight, blocks\.2\.mlp\.0\.weight are tied"):
        build_unit_plan(model)


# ---------------------------------------------------------------------- what a step sends


def padded_size(modules: list[nn.Module]) -> int:
    """Elements of one all-gather: every parameter's rows are padded to a multiple of the ranks."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    ranks = dist.get_world_size()
    return sum(math.ceil(p.shape[0] / ranks) * ranks * p[0].numel() for p in parameters)


def count_step(model: nn.Module, seed: int | None = None) -> tuple[StepCounter, StepCounter]:
    """Train one micro-batch and return what its forward and its backward sent."""
    with StepCounter() as forward:
        loss = token_loss(model, dist.get_rank() if seed is None else seed)
    with StepCounter() as backward:
        loss.backward()
    return forward, backward


@dataclass
class Counts:
    """Collectives of one step of a three-layer Llama, which is its options: all-gathers are one per unit in forward."""

    options: dict[str, Any]
    forward: int
    backward: int
    tied: bool = False


COUNTS = {
    "default": Counts({}, 5, 2),
    "without-prefetch": Counts({"enable_fsdp2_prefetch": False}, 5, 2),
    "far-prefetch": Counts({"fsdp2_forward_prefetch_depth": 3, "fsdp2_backward_prefetch_depth": 4}, 5, 2),
    "tied": Counts({}, 4, 2, tied=True),
    "tied-without-prefetch": Counts({"enable_fsdp2_prefetch": False}, 4, 2, tied=True),
    "reshard": Counts({"reshard_after_forward": True}, 5, 4),
    "reshard-tied": Counts({"reshard_after_forward": True}, 4, 4, tied=True),
    "no-reshard": Counts({"reshard_after_forward": False}, 5, 0),
}


def test_collectives_of_a_step() -> None:
    def run() -> None:
        for name, case in COUNTS.items():
            model = parallelize(make_causal_lm({**LLAMA, "tie_word_embeddings": case.tied}), **case.options)
            units = 4 if case.tied else 5
            for _ in range(2):
                forward, backward = count_step(model)
                assert forward.collectives == {"all_gather": case.forward}, name
                expected = {"all_gather": case.backward, "reduce_scatter": units}
                assert backward.collectives == {kind: count for kind, count in expected.items() if count}, name

    run_ranks(run, 2)


def test_units_are_gathered_and_reduced_in_the_order_they_run() -> None:
    def run() -> None:
        model = make_causal_lm(LLAMA)
        layers = [padded_size([layer]) for layer in model.model.layers]
        embedding = padded_size([model.model.embed_tokens])
        head = padded_size([model.model.norm, model.lm_head])
        forward, backward = count_step(parallelize(model))
        assert forward.elements == {"all_gather": [embedding, *layers, head]}
        assert backward.elements == {
            "all_gather": [layers[1], layers[0]],
            "reduce_scatter": [head, layers[2], layers[1], layers[0], embedding],
        }

    run_ranks(run, 2)


def test_collectives_over_four_ranks() -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA), reshard_after_forward=2)
        for _ in range(2):
            forward, backward = count_step(model)
        layer = padded_size([model.model.layers[0]])
        assert forward.collectives == {"all_gather": 5}
        assert backward.collectives == {"all_gather": 3, "reduce_scatter": 5}
        assert max(backward.elements["all_gather"]) <= layer, "blocks are gathered whole, from two ranks"
        reference = make_reference(model)
        torch.stack([token_loss(reference, rank) for rank in range(4)]).mean().backward()
        model.zero_grad()
        token_loss(model, dist.get_rank()).backward()
        assert_equal_gradients(model, reference)

        hsdp = create_device_mesh(dp_replicate_size=2, device_type="cpu")
        model = fsdp2_strategy_parallelize(make_causal_lm(LLAMA), hsdp, mp_policy=MixedPrecisionPolicy())
        forward, backward = count_step(model)
        assert forward.collectives == {"all_gather": 5}
        assert backward.collectives == {"all_gather": 2, "reduce_scatter": 5, "all_reduce": 5}
        for reduce_scatter in (False, True):
            with defer_grad_sync(model, reduce_scatter=reduce_scatter):
                for _ in range(2):
                    _, backward = count_step(model)
                    assert backward.collectives["reduce_scatter"] == (5 if reduce_scatter else 0)
                    assert backward.collectives["all_reduce"] == 0
            _, backward = count_step(model)
            assert backward.collectives == {"all_gather": 2, "reduce_scatter": 5, "all_reduce": 5}

    run_ranks(run, 4)


def test_replicas_without_shards_gather_nothing() -> None:
    def run() -> None:
        mesh = create_device_mesh(dp_replicate_size=2, device_type="cpu")
        model = fsdp2_strategy_parallelize(make_causal_lm(LLAMA), mesh, mp_policy=MixedPrecisionPolicy())
        forward, backward = count_step(model)
        assert forward.collectives == {}
        assert backward.collectives == {"all_reduce": 5}

    run_ranks(run, 2)


def test_accumulation_reduces_once_per_unit_and_gathers_no_more_than_single_steps() -> None:
    def run() -> None:
        for options in ({}, {"enable_fsdp2_prefetch": False}):
            model = make_causal_lm(LLAMA)
            reference = copy.deepcopy(model)
            parallelize(model, **options)
            for micro_batch in range(3):
                is_last = micro_batch == 2
                with contextlib.nullcontext() if is_last else defer_grad_sync(model):
                    forward, backward = count_step(model, 2 * micro_batch + dist.get_rank())
                assert forward.collectives == {"all_gather": 5}
                expected = {"all_gather": 2, "reduce_scatter": 5} if is_last else {"all_gather": 2}
                assert backward.collectives == expected, f"micro-batch {micro_batch}, {options}"
            torch.stack([token_loss(reference, index) for index in range(6)]).sum().div(2).backward()
            assert_equal_gradients(model, reference)

    run_ranks(run, 2)


def test_a_forward_without_backward_leaves_the_next_step_as_it_was() -> None:
    def run() -> None:
        model = parallelize(make_causal_lm(LLAMA))
        before = [counter.elements for counter in count_step(model)]
        with torch.no_grad():
            token_loss(model, 0)
        reshard(model)
        assert [counter.elements for counter in count_step(model)] == before

    run_ranks(run, 2)


def test_nothing_is_gathered_for_a_teacher_in_backward() -> None:
    def run() -> None:
        model = parallelize(Distillation())
        for _ in range(2):
            forward, backward = count_step(model)
            assert forward.collectives == {"all_gather": 9}
            assert backward.collectives == {"all_gather": 1, "reduce_scatter": 4}

    run_ranks(run, 2)


def make_reference(model: nn.Module) -> nn.Module:
    """An unsharded Llama with the weights of ``model``; every rank must call it."""
    reference = make_causal_lm(LLAMA)
    reference.load_state_dict({name: tensor.full_tensor() for name, tensor in model.state_dict().items()})
    return reference


# ---------------------------------------------------------------------- through the Trainer


class TrainerModule(pl.LightningModule):
    """A user's module with a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_causal_lm(LLAMA)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


class HandShardedModule(TrainerModule):
    """Shards as Lightning's ModelParallelStrategy asks its users to."""

    def configure_model(self) -> None:
        mesh, model = self.device_mesh["data_parallel"], self.model
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not model.model.layers[-1])
        fully_shard(model.model.embed_tokens, mesh=mesh).set_unshard_in_backward(False)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)


class CountingCallback(pl.Callback):
    """Counts from the start of one window of micro-batches to the start of the next, the loop of Lightning included."""

    def __init__(self, micro_batches: int) -> None:
        self.counter = StepCounter()
        self.window = (2 * micro_batches, 3 * micro_batches)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.window[0]:
            self.counter.__enter__()
        if batch_idx == self.window[1]:
            self.counter.__exit__(None, None, None)


def count_trainer_step(strategy: Any, module: pl.LightningModule, micro_batches: int = 1) -> StepCounter:
    tokens = make_tokens(0)
    batches = [{"input_ids": tokens, "labels": tokens}] * (3 * micro_batches + 1)
    callback = CountingCallback(micro_batches)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=micro_batches,
        callbacks=[callback],
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return callback.counter


def test_a_trainer_step_costs_no_more_than_that_of_model_parallel_strategy() -> None:
    def run() -> None:
        for micro_batches in (1, 3):
            ours = count_trainer_step(FSDP2Strategy(), TrainerModule(), micro_batches)
            theirs = count_trainer_step(ModelParallelStrategy(2, 1), HandShardedModule(), micro_batches)
            expected = {"all_gather": 7 * micro_batches, "reduce_scatter": 5}
            # Lightning itself broadcasts one flag per micro-batch
            assert ours.collectives == {**expected, "broadcast": micro_batches}
            assert theirs.collectives == {**expected, "broadcast": micro_batches, "reduce_scatter": 5 * micro_batches}
            assert ours.host_syncs <= theirs.host_syncs
            extra = f"{micro_batches} micro-batches: {ours.operations - theirs.operations}"
            assert ours.operations.total() <= theirs.operations.total(), extra

    run_ranks(run, 2)


# ---------------------------------------------------------------------- the public functions


@pytest.mark.parametrize("name", ["llama", "llama-tied", "plain"])
def test_unshard_fsdp2_model(name: str) -> None:
    def compute_logits(model: nn.Module, tokens: Tensor) -> Tensor:
        output = model(tokens)
        return getattr(output, "logits", output)

    def use_unsharded(model: nn.Module, reference: nn.Module) -> None:
        """What may be done inside the block, and an exception at its end."""
        with unshard_fsdp2_model(model), torch.no_grad(), StepCounter() as counter:
            for parameter_name, parameter in model.named_parameters():
                assert not isinstance(parameter, DTensor), parameter_name
                torch.testing.assert_close(parameter, reference.get_parameter(parameter_name), rtol=0, atol=0)
            for tokens in map(make_tokens, range(3 * dist.get_rank())):  # rank 0 calls nothing
                actual, expected = (compute_logits(each, tokens) for each in (model, reference))
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
                get_layer_lists(model)[0][1].mlp(torch.ones(1, 3, 32))
            assert counter.collectives == {}
            raise KeyError("inside")

    def run() -> None:
        torch.manual_seed(0)
        model = MODELS[name].make()
        reference = copy.deepcopy(model)
        parallelize(model)
        before = [counter.elements for counter in count_step(model)]
        with pytest.raises(KeyError, match="inside"):
            use_unsharded(model, reference)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.zero_grad()
        assert [counter.elements for counter in count_step(model)] == before
        torch.stack([token_loss(reference, rank) for rank in range(2)]).mean().backward()
        assert_equal_gradients(model, reference)

    run_ranks(run, 2)


FOREIGN_MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...] | None, dict[str, Any]]] = {
    "three-axes": ((2, 1, 1), ("data_parallel", "context_parallel", "tensor_parallel"), {}),
    "unnamed": ((2,), None, {}),
    "one-axis": ((2,), ("dp",), {"dp_mesh_name": "dp"}),
    "replicate-x-shard": ((2, 1), ("replicate", "shard"), {"dp_mesh_name": ("replicate", "shard")}),
    "replicate1-x-shard": ((1, 2), ("replicate", "shard"), {"dp_mesh_name": ("replicate", "shard")}),
    "dp_cp": ((2, 1), ("dp_cp", "tensor_parallel"), {}),
}


def test_meshes_made_elsewhere() -> None:
    def run() -> None:
        torch.manual_seed(0)
        reference = make_causal_lm(LLAMA)
        torch.stack([token_loss(reference, rank) for rank in range(2)]).mean().backward()
        for name, (shape, axes, options) in FOREIGN_MESHES.items():
            torch.manual_seed(0)
            model = make_causal_lm(LLAMA)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
            fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), **options)
            token_loss(model, dist.get_rank()).backward()
            try:
                assert_equal_gradients(model, reference)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    run_ranks(run, 2)


def test_a_mesh_without_the_named_axis_is_refused() -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match=r"no axis 'data_parallel'; it has \['dp'\]"):
            fsdp2_strategy_parallelize(PlainTransformer(), mesh)

    run_ranks(run, 1)


def test_a_scalar_parameter_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"0\.temperature.*torch\.ones\(1\)"):
        build_unit_plan(model)


def test_a_container_without_a_forward_is_refused_before_anything_is_sharded() -> None:
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match=r"A Module(List|Dict) has no forward"):
            build_unit_plan(container)


def test_a_model_that_owns_nothing_but_its_blocks_has_a_unit_to_cast_its_output() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    module = pl.LightningModule()
    module.model = Stack()
    (unit,) = [unit for unit in build_unit_plan(module).units if unit.modules == [module.model]]
    assert unit.casts_output

"""CausalLM: any Hugging Face causal language model, from a config or from weights, under our strategy and others."""

import itertools
import math
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import user_modules
from helpers.collectives import CountsStep, StepCounter
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.families import make_family_config
from helpers.mesh_runs import Case, MetricsLogger, check_parity
from helpers.models import GPT2, LLAMA, VOCABULARY, make_causal_lm, make_token_batches
from helpers.oracle import EPSILON, LEARNING_RATE, token_sum_loss, whole
from helpers.ranks import raises_on_all_ranks, run_ranks
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import lightning_fsdp2
from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy, MegatronFSDPStrategy
from lightning_fsdp2.compat import torch as torch_compat
from lightning_fsdp2.models import causal_lm
from lightning_fsdp2.models.hugging_face import build_config
from lightning_fsdp2.modules.structure import find_structure
from lightning_fsdp2.parallel.layers.activation_checkpointing import apply_activation_checkpointing
from lightning_fsdp2.parallel.loss import chunked as chunked_loss

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROPHETNET: dict[str, Any] = {
    "model_type": "prophetnet",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
PRETRAINED = {"llama": LLAMA, "llama-tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2, "mixtral": MIXTRAL}


make_trainer = partial(user_modules.make_trainer, log_every_n_steps=1, use_distributed_sampler=True)


def make_loader(count: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(make_token_batches(count, **options), batch_size=None)


FAST_PRETRAINED = [
    ("32-true", "llama-tied"),
    ("32-true", "mixtral"),
    ("bf16-true", "llama"),
    ("bf16-true", "gpt2"),
]


@pytest.mark.guarantees("shard-by-shard")
@pytest.mark.parametrize(
    ("precision", "name"),
    [
        pytest.param(*cell, marks=() if cell in FAST_PRETRAINED else pytest.mark.slow)
        for cell in itertools.product(["32-true", "bf16-true"], PRETRAINED)
    ],
)
def test_pretrained_weights_are_read_as_shards(name: str, precision: str, tmp_path: Path) -> None:
    source = make_causal_lm(PRETRAINED[name]).eval()
    source.save_pretrained(tmp_path, max_shard_size="20KB")  # several files and an index
    tokens = make_token_batches(1)[0]["input_ids"]

    def run() -> tuple[dict[str, torch.Tensor], bool, torch.Tensor]:
        module = CausalLM(pretrained=str(tmp_path), attn_implementation="eager")
        make_trainer(precision=precision, limit_train_batches=0).fit(module, make_loader())
        model = module.model
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens, use_cache=False).logits
        return whole(model.state_dict()), tied, logits.float()

    weights, tied, logits = run_ranks(run, 2)[0]
    assert tied == bool(source.config.tie_word_embeddings)
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    for key, value in source.state_dict().items():
        torch.testing.assert_close(weights[key], value.to(dtype).float(), rtol=0, atol=0, msg=key)
    if precision == "32-true":
        torch.testing.assert_close(logits, source(input_ids=tokens).logits, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_stay_frozen_when_weights_are_read(tmp_path: Path) -> None:
    make_causal_lm(LLAMA).save_pretrained(tmp_path)

    class Frozen(CausalLM):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.model.embed_tokens.requires_grad_(False)

    def run() -> list[str]:
        module = Frozen(pretrained=str(tmp_path))
        make_trainer().fit(module, make_loader())
        return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]

    assert run_ranks(run, 2)[0] == ["model.model.embed_tokens.weight"]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them in the tests' batches."""
    small = partial(chunked_loss.compute_chunked_token_losses, chunk_size=7)
    monkeypatch.setattr(causal_lm, "compute_chunked_token_losses", small)


class OwnSharding(CausalLM):
    """Written for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new:
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model.lm_head, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


@pytest.mark.guarantees("token-mean")
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("strategy", "loss"),
    [
        ("auto", "chunked"),
        ("ddp", "full"),
        ("model-parallel", "chunked"),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (("auto", "full"), ("ddp", "chunked"), ("model-parallel", "full"))
        ),
    ],
)
def test_the_same_module_trains_under_lightnings_own_strategies(strategy: str, loss: Any) -> None:
    """Same loss and weights as the oracle: the token mean does not depend on our strategy."""
    ranks = 1 if strategy == "auto" else 2
    batches = make_token_batches(8)

    def run() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
        torch.manual_seed(0)
        optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
        module_class = OwnSharding if strategy == "model-parallel" else CausalLM
        module = module_class(config=LLAMA, optimizer=optimizer, decay_norms_and_biases=True, loss=loss)
        initial: dict[str, torch.Tensor] = {}
        logger = MetricsLogger()
        chosen = {"auto": "auto", "ddp": DDPStrategy(), "model-parallel": ModelParallelStrategy(ranks, 1)}[strategy]
        recorder = pl.callbacks.LambdaCallback(
            on_train_start=lambda trainer, module: initial.update(whole(module.model.state_dict()))
        )
        trainer = make_trainer(
            chosen, accumulate_grad_batches=2, logger=logger, callbacks=[recorder], use_distributed_sampler=False
        )
        rank = torch.distributed.get_rank() if ranks > 1 else 0
        trainer.fit(module, DataLoader(batches[rank::ranks], batch_size=None))
        return initial, whole(module.model.state_dict()), [metrics["train/loss"] for metrics in logger.history]

    initial, weights, losses = run_ranks(run, ranks, group=ranks > 1)[0]
    model = make_causal_lm(LLAMA)
    model.load_state_dict(initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    window = 2 * ranks
    for step, actual in enumerate(losses):
        parts = [token_sum_loss(model, batch) for batch in batches[step * window : (step + 1) * window]]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        assert actual == pytest.approx(loss.item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=5e-5, msg=name)


class DocumentData(pl.LightningDataModule):
    """Says of its batches what those of this package do."""

    separate_documents = True


@pytest.mark.guarantees("packed-sequences-are-not-sought")
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_step_waits_for_packed_sequences_only_where_there_may_be_some(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[torch.Size] = []
    find = masking_utils.find_packed_sequence_indices

    def find_and_note(position_ids: Tensor) -> Any:
        searches.append(position_ids.shape)
        return find(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find_and_note)
    (batch,) = make_token_batches(1, ragged=False)
    counted = {**batch, "position_ids": torch.arange(12).expand(2, -1)}

    def run(module: CausalLM, batch: dict[str, Tensor]) -> tuple[int, int, list[Tensor]]:
        searches.clear()
        module.zero_grad()
        with StepCounter() as counter:
            module.training_step(batch, 0).backward()
        return len(searches), counter.host_syncs, [parameter.grad.clone() for parameter in module.parameters()]

    module = CausalLM(config=LLAMA, loss=loss)
    module.configure_model()
    run(module, batch)  # the first of its length is checked
    free, looking = run(module, batch), run(module, counted)
    module._trainer = SimpleNamespace(datamodule=DocumentData())
    packing = run(module, counted)
    assert [result[:2] for result in (free, looking, packing)] == [(0, 0), (1, 1), (1, 1)]
    for others in (looking[2], packing[2]):
        torch.testing.assert_close(free[2], others, rtol=0, atol=0)
    assert masking_utils.find_packed_sequence_indices is find_and_note


FUSED = {
    "fsdp2": lambda: FSDP2Strategy(),
    "tp2+sp": lambda: FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True)),
    "offload": lambda: FSDP2Strategy(config=FSDP2Config(offload_policy=True)),
    "ddp": lambda: lightning_fsdp2.DDPStrategy(),
    "megatron": lambda: MegatronFSDPStrategy(),
    "lightning-ddp": lambda: DDPStrategy(),
}


def run_one_step(
    strategy: Any, *, module: dict[str, Any] | None = None, **options: Any
) -> tuple[set[Any], Counter[str], list[warnings.WarningMessage]]:
    """Train a step; what the optimizer's groups say, what was run in the step, and warnings."""
    model = CausalLM(config=LLAMA, **(module or {}))
    counts = CountsStep(0)
    trainer = make_trainer(
        strategy, max_steps=2, callbacks=[counts], precision="bf16-mixed", gradient_clip_val=1.0, **options
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, make_loader(2))
    groups = {group["fused"] for group in trainer.optimizers[0].param_groups}
    return groups, counts.counter.operations, [w for w in caught if "fused" in str(w.message)]


@pytest.mark.guarantees("fused-optimizer")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name not in ("tp2+sp", "lightning-ddp") else ()) for name in FUSED],
)
def test_the_default_optimizer_is_fused(name: str) -> None:
    def run() -> None:
        with cuda_on_cpu() if name == "megatron" else nullcontext():
            groups, operations, messages = run_one_step(FUSED[name](), use_distributed_sampler=False)
        assert (groups, messages) == ({True}, [])
        assert operations["aten::_fused_adamw_"] > 0
        assert operations["aten::sqrt"] + operations["aten::addcdiv_"] == 0

    run_ranks(run, 2)


@pytest.mark.parametrize("is_asked", [False, True])
def test_where_torch_has_no_fused_kernel_the_optimizer_steps_without(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compat, "_get_fused_kernels_supported_devices", lambda: ["cuda"])

    def run() -> None:
        options = {"optimizer": partial(torch.optim.AdamW, fused=True)} if is_asked else {}
        groups, operations, messages = run_one_step(FSDP2Strategy(), module=options)
        assert groups == {None}
        assert "aten::_fused_adamw_" not in operations
        message = "AdamW(fused=True): torch has no fused kernel for cpu; fused is ignored."
        assert [str(caught.message) for caught in messages] == [message] * is_asked

    run_ranks(run, 1)


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, True),
        ({"foreach": True}, None),
        ({"foreach": False}, None),
        ({"fused": False}, False),
        ({"differentiable": True}, None),
    ],
    ids=str,
)
def test_an_optimizer_that_says_how_it_steps_steps_so(options: dict[str, Any], fused: bool | None) -> None:
    cli = LightningCLI(
        CausalLM,
        run=False,
        save_config_callback=None,
        args={"model": {"config": LLAMA, "optimizer": {"class_path": "torch.optim.AdamW", "init_args": options}}},
    )
    cli.model.configure_model()
    optimizer = cli.model.configure_optimizers()
    assert {group["fused"] for group in optimizer.param_groups} == {fused}


@pytest.mark.guarantees("recomputed-packed-sequences")
def test_layers_that_are_computed_again_are_not_searched_for_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        modeling_flash_attention_utils, "_is_packed_sequence", lambda *args, **kwargs: calls.append(args)
    )

    def attend(module: nn.Module, *tensors: Any, **kwargs: Any) -> Any:
        modeling_flash_attention_utils._is_packed_sequence(None, 1)  # as flash attention does in every layer
        return sdpa_attention_forward(module, *tensors, **kwargs)

    AttentionInterface.register("searching", attend)
    AttentionMaskInterface.register("searching", sdpa_mask)
    module = CausalLM(config=LLAMA, attn_implementation="searching")
    module.configure_model()
    apply_activation_checkpointing(find_structure(module.model), "full")
    loss = module.training_step(make_token_batches(1, ragged=False)[0], 0)
    loss.backward(retain_graph=True)
    loss.backward()
    assert not calls


def test_what_is_logged_and_when() -> None:
    def run() -> tuple[list[dict[str, float]], dict[str, float]]:
        logger = MetricsLogger()
        module = CausalLM(config=LLAMA, lr_scheduler=partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.5))
        trainer = make_trainer(max_steps=4, log_every_n_steps=2, logger=logger, use_distributed_sampler=False)
        loader = make_loader(4, ragged=False)
        trainer.fit(module, loader, loader)
        metrics = trainer.validate(module, loader, verbose=False)[0]
        return logger.history, metrics

    history, validation = run_ranks(run, 2)[0]
    assert [sorted(name for name in metrics if name != "epoch") for metrics in history] == [
        [
            "train/gradient_norm",
            "train/learning_rate",
            "train/loss",
            "train/perplexity",
            "train/tokens",
            "train/total_tokens",
        ]
    ] * 2
    assert [metrics["train/tokens"] for metrics in history] == [2 * 2 * 11] * 2  # ranks, sequences, predictions
    assert history[0]["train/perplexity"] == pytest.approx(math.exp(history[0]["train/loss"]))
    # of the second and the fourth step themselves
    rates = [metrics["train/learning_rate"] for metrics in history]
    assert rates == pytest.approx([3e-4 * (0.5 + 0.5 * steps / 5) for steps in (1, 3)])
    assert validation["val/perplexity"] == pytest.approx(math.exp(validation["val/loss"]), rel=1e-6)


@pytest.mark.guarantees("token-mean-in-validation")
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_evaluation_loss_counts_every_token_once_and_prediction_scores_every_sequence(loss: Any) -> None:
    batches = make_token_batches(4)

    def run() -> tuple[dict[str, torch.Tensor], float, float, list[dict[str, torch.Tensor]]]:
        module = CausalLM(config=LLAMA, loss=loss)
        trainer = make_trainer(use_distributed_sampler=False)
        own = DataLoader(batches[torch.distributed.get_rank() :: 2], batch_size=None)
        validated = trainer.validate(module, own, verbose=False)[0]["val/loss"]
        tested = trainer.test(module, own, verbose=False)[0]["test/loss"]
        return whole(module.model.state_dict()), validated, tested, trainer.predict(module, own)

    results = run_ranks(run, 2)
    weights, validated, tested, _ = results[0]
    model = make_causal_lm(LLAMA)
    model.load_state_dict(weights)
    parts = [token_sum_loss(model, batch) for batch in batches]
    expected = sum(part.item() for part, _ in parts) / sum(count for _, count in parts)
    assert validated == pytest.approx(expected, abs=1e-5)
    assert tested == pytest.approx(expected, abs=1e-5)
    for index, (part, count) in enumerate(parts):
        scores = results[index % 2][3][index // 2]
        assert scores["log_probability"].shape == scores["tokens"].shape == (2,)
        assert scores["log_probability"].sum() == pytest.approx(-part.item(), abs=1e-4)
        assert scores["tokens"].sum() == count


CHUNKED = {
    "tp2+sp+loss-32-true-gpt2": (
        2,
        "32-true",
        GPT2,
        {
            "tp_size": 2,
            "config": FSDP2Config(sequence_parallel=True, loss_parallel=True, activation_checkpointing=True),
        },
    ),
    "dp2-bf16-mixed-llama-tied": (2, "bf16-mixed", {**LLAMA, "tie_word_embeddings": True}, {}),
}


@pytest.mark.guarantees("chunked-loss")
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell == "dp2-bf16-mixed-llama-tied" else pytest.mark.slow) for cell in CHUNKED],
)
def test_the_chunked_loss_trains_as_one_process_with_the_full_loss(cell: str) -> None:
    ranks, precision, config, strategy = CHUNKED[cell]

    def make_module() -> CausalLM:
        optimizer = partial(torch.optim.AdamW, lr=LEARNING_RATE, eps=EPSILON)
        return CausalLM(config=config, optimizer=optimizer, decay_norms_and_biases=True, loss="chunked")

    def run() -> None:
        case = Case(
            make_module=make_module,
            make_model=partial(make_causal_lm, config),
            loss=token_sum_loss,
            batches=make_token_batches(12),
            accumulate=2,
            precision=precision,
            strategy=strategy,
        )
        check_parity(case)

    run_ranks(run, ranks)


def test_the_chunked_loss_leaves_the_forward_as_it_is() -> None:
    def run() -> torch.Size:
        module = CausalLM(config=LLAMA, loss="chunked")
        make_trainer().fit(module, make_loader())
        return module(make_token_batches(1)[0]["input_ids"]).shape

    assert run_ranks(run, 2)[0] == (2, 12, VOCABULARY)


class Scaled(CausalLM):
    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        return super().forward(input_ids, **inputs) / 4


class SelfMade(CausalLM):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_causal_lm(LLAMA)


def test_the_chunked_loss_refuses_what_it_would_pass_over() -> None:
    with pytest.raises(ValueError, match=r"Scaled\(loss='chunked'\) would not call the `forward`.*use loss='full'"):
        Scaled(config=LLAMA, loss="chunked").configure_model()
    module = SelfMade(config=LLAMA, loss="chunked")
    module.configure_model()
    with pytest.raises(RuntimeError, match=r"call `super\(\)\.configure_model\(\)` in your override"):
        module.training_step(make_token_batches(1)[0], 0)


def test_norms_and_biases_are_not_decayed() -> None:
    module = CausalLM(config=GPT2, optimizer=partial(torch.optim.AdamW, weight_decay=0.3))
    module.configure_model()
    decayed, undecayed = module.configure_optimizers().param_groups
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert decayed["weight_decay"] == 0.3
    assert undecayed["weight_decay"] == 0.0
    assert all(names[id(p)].endswith("weight") and "ln_" not in names[id(p)] for p in decayed["params"])
    assert all(names[id(p)].endswith("bias") or "ln_" in names[id(p)] for p in undecayed["params"])


NO_SDPA = ["gpt_oss", "gemma2"]


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), *((name, "eager") for name in NO_SDPA)])
def test_attention_is_by_default_that_which_transformers_chooses_and_another_than_sdpa_is_said(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(causal_lm, "rank_zero_info", said.append)
    module = CausalLM(config=make_family_config(name).to_dict())
    module.configure_model()
    assert module.model.config._attn_implementation == attention
    expected = [] if attention == "sdpa" else ["'eager', because transformers has no SDPA"]
    assert [part in text for part, text in zip(expected, said, strict=True)] == [True] * len(expected)
    module.configure_model()
    assert len(said) == len(expected)
    if attention != "sdpa":
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            CausalLM(config=make_family_config(name).to_dict(), attn_implementation="sdpa").configure_model()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give exactly one"):
        CausalLM()
    with pytest.raises(ValueError, match="give exactly one"):
        CausalLM(pretrained="x", config=LLAMA)
    with pytest.raises(ValueError, match="no `model_type`"):
        CausalLM(config={"hidden_size": 3})
    with pytest.raises(ValueError, match=r"CausalLM\(loss='fused'\) is unknown; use 'full' or 'chunked'."):
        CausalLM(config=LLAMA, loss="fused")
    with pytest.raises(ValueError, match=r"'chunked' is not possible for ProphetNetForCausalLM: .*; use loss='full'"):
        CausalLM(config=PROPHETNET, loss="chunked", attn_implementation="eager").configure_model()
    assert CausalLM(config=LLAMA, loss="chunked").hparams["loss"] == "chunked"
    make_causal_lm(LLAMA).config.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        CausalLM(pretrained=str(tmp_path)).configure_model()


@pytest.mark.guarantees("errors-on-every-rank")
def test_a_tokenizer_larger_than_the_vocabulary_is_refused_before_the_first_step() -> None:
    class Data(pl.LightningDataModule):
        tokenizer = range(VOCABULARY + 1)

        def train_dataloader(self) -> DataLoader[Any]:
            return make_loader()

    def run() -> None:
        make_trainer().fit(CausalLM(config=LLAMA), datamodule=Data())

    with raises_on_all_ranks(ValueError, match=r"tokenizer has 102 tokens, but the model's vocab_size is 101"):
        run_ranks(run, 2)


def test_an_unknown_field_of_the_config_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"LlamaConfig has no 'hiden_size'; did you mean 'hidden_size'\?$"):
        CausalLM(config={"model_type": "llama", "hiden_size": 64})
    for fields in (
        {"model_type": "llama", "rope_theta": 5e5},
        {**GPT2, "hidden_size": 32},
        {**LLAMA, "use_cache": False},
        {"model_type": "qwen3_moe", "head_dim": 64},  # which its attention reads, and its class does not declare
    ):
        CausalLM(config=fields)


@pytest.mark.skipif("gemma4_assistant" not in CONFIG_MAPPING, reason="this transformers has no such model")
def test_fields_are_checked_although_a_config_has_no_defaults_that_fit_together() -> None:
    fields = {
        "model_type": "gemma4_assistant",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        },
    }
    assert build_config(fields).text_config.hidden_size_per_layer_input == 0
    with pytest.raises(ValueError, match=r"Gemma4AssistantConfig has no 'backbone_hiden_size'; did you mean 'backbone"):
        build_config({**fields, "backbone_hiden_size": 8})

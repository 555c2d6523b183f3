"""Models whose tokens see their labels are refused, and sequences that are longer than a model's positions are said."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import get_families, make_family_config
from helpers.models import GPT2, LLAMA, make_token_batches
from helpers.ranks import RankError, run_ranks
from helpers.user_modules import make_loader, make_trainer
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fsdp2 import CausalLM
from lightning_fsdp2.compat.torch_simulation import FakeTensorMode
from lightning_fsdp2.models import trial
from lightning_fsdp2.models.causal_lm import _METRICS
from lightning_fsdp2.models.language_checks import check_causal, check_length, check_names, warn_of_unknown_monitors

SAMPLE = ("llama", "gpt2", "mixtral", "gemma3_text", "qwen3_next", "deepseek_v3")


def see_later_tokens(config: Any) -> bool:
    """Whether a gradient flows from the logits at a position to a later token: what `trial` finds another way."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    embedded = model.get_input_embeddings()(torch.arange(3, 11)[None]).detach().requires_grad_()
    model(inputs_embeds=embedded).logits[:, :4].square().sum().backward()
    return bool(embedded.grad[:, 4:].abs().max() > 0)


@pytest.mark.guarantees("causal-models-only")
@pytest.mark.parametrize("options", [{}, {"is_decoder": True}])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_an_encoder_is_refused_unless_it_is_a_decoder(model_type: str, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, vocab_size=64, **options)
    assert see_later_tokens(config) is (not options)
    if options:
        check_causal(config, "config=...")
        return
    with pytest.raises(ValueError, match=rf"'{model_type}' is not causal.*is_decoder: true"):
        check_causal(config, "config=...")


@pytest.mark.guarantees("causal-models-only")
def test_what_a_config_switches_is_seen() -> None:
    """No name tells: the same architecture, with causal attention and without."""
    for is_bidirectional in (False, True):
        config = make_family_config("gemma3_text")
        config.use_bidirectional_attention = is_bidirectional
        assert see_later_tokens(config) is is_bidirectional
        assert trial.try_config(config).is_causal is not is_bidirectional


@pytest.mark.parametrize("is_causal", [False, True])
def test_names_of_sizes_that_only_one_config_has_are_cut(is_causal: bool) -> None:
    """As large as its authors have it, it would be judged by `is_decoder`, which it lacks."""
    assert trial.try_config(AutoConfig.for_model("xlm", causal=is_causal)).is_causal is is_causal


def test_a_config_that_cannot_be_cut_is_judged_by_what_it_says() -> None:
    config = AutoConfig.for_model("xmod")  # which asks for a language before it runs
    assert trial.try_config(config) is None
    with pytest.raises(ValueError, match="not causal"):
        check_causal(config, "config=...")
    config.is_decoder = True
    check_causal(config, "config=...")


def test_a_trial_has_values_where_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plan, whose training step asks for it."""
    monkeypatch.setattr(trial, "_TRIALS", {})
    config = AutoConfig.for_model("qwen3_moe", hidden_size=32, num_hidden_layers=2, num_experts=4, vocab_size=64)
    with FakeTensorMode():
        tried = trial.try_config(config)
    assert tried is not None
    assert tried.is_causal


@pytest.mark.guarantees("causal-models-only")
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in get_families()],
)
def test_causal_families_pass(model_type: str) -> None:
    check_causal(make_family_config(model_type), "config=...")
    check_causal(AutoConfig.for_model(model_type), "config=...")  # as large as its authors have it


def test_a_model_that_takes_images_passes() -> None:
    """Tokens of an image see each other; those of a text do not."""
    text = make_family_config("gemma3_text").to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    assert trial.try_config(config).is_causal


def test_the_trial_leaves_random_numbers_alone_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=3)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded the accelerators"))
    check_causal(config, "config=...")
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(trial, "_try", lambda config: pytest.fail("tried twice"))
    check_causal(config, "config=...")


def test_a_module_with_steps_of_its_own_may_train_an_encoder() -> None:
    class Masked(CausalLM):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self(**batch).mean()

    module = Masked(config={"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 64})
    module.configure_model()
    assert module.model is not None


class Tokens(LightningDataModule):
    """Batches of a length that nothing says beforehand."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([{"input_ids": torch.arange(self.length) % 7} for _ in range(2)])


def fit(module: CausalLM, data: Tokens) -> None:
    make_trainer(strategy="auto", devices=1, max_steps=1).fit(module, data)


@pytest.mark.guarantees("tables-of-positions")
def test_a_table_of_positions_that_ends_is_an_error_before_the_forward() -> None:
    for data, source in ((Tokens(33), "A batch of 33 tokens"), (Tokens(32), "sequence_length=40")):
        if "sequence" in source:
            data.sequence_length = 40
        module = CausalLM(config=GPT2)
        with pytest.raises(RankError, match=rf"{source} is more than the 32 positions of this gpt2 \(n_positions\)"):
            run_ranks(fit, 1, module, data, group=False)
    run_ranks(fit, 1, CausalLM(config=GPT2), Tokens(32), group=False)


@pytest.mark.guarantees("rotary-positions")
@pytest.mark.parametrize(
    ("config", "length", "says"),
    [
        ({**LLAMA, "max_position_embeddings": 32}, 32, None),
        ({**LLAMA, "max_position_embeddings": 32}, 33, "not scaled that far"),
        (
            {
                **LLAMA,
                "max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "rope_theta": 1e4,
                },
            },
            128,
            None,
        ),
        ({"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 2}, 100_000, None),  # linear biases
        ({"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "alibi": True}, 100_000, None),
    ],
)
def test_rotary_positions_go_on_with_a_warning(config: dict[str, Any], length: int, says: str | None) -> None:
    module = CausalLM(config=config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_length(module.hf_config, length, "sequence_length", restarts=False)
    assert [says in str(warning.message) for warning in caught] == ([] if says is None else [True])


def test_positions_that_a_table_keeps_for_padding_do_not_count() -> None:
    """RoBERTa begins at its padding's position plus one; this package's users meet it as a decoder."""
    config = AutoConfig.for_model(
        "roberta", is_decoder=True, num_hidden_layers=2, max_position_embeddings=34, pad_token_id=1, vocab_size=64
    )
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.full((1, 32), 3))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 33), 3))
    check_length(config, 32, "sequence_length=32", restarts=False)
    with pytest.raises(ValueError, match="more than the 32 positions"):
        check_length(config, 33, "sequence_length=33", restarts=False)


def test_what_a_tokenizer_returns_is_not_misspelt() -> None:
    """Gemma 4 takes `mm_token_type_ids`, and its tokenizer may return `token_type_ids`."""

    class Model(torch.nn.Module):
        def forward(self, input_ids: Any, mm_token_type_ids: Any = None) -> None: ...

    check_names(Model(), {"input_ids", "token_type_ids"})
    with pytest.raises(ValueError, match="'mm_token_type_id', which Model would ignore"):
        check_names(Model(), {"input_ids", "mm_token_type_id"})


def test_documents_that_start_anew_are_only_warned_of() -> None:
    config = CausalLM(config=GPT2).hf_config
    with pytest.warns(UserWarning, match="a longer document would end the run"):
        check_length(config, 64, "sequence_length=64", restarts=True)


@pytest.mark.parametrize(("name", "nearest"), [("attention_msk", "attention_mask"), ("lables", "labels")])
def test_a_misspelt_name_in_a_batch_is_an_error(name: str, nearest: str) -> None:
    def run() -> None:
        row = {"input_ids": torch.arange(8), "row": torch.zeros(1), name: torch.arange(8)}
        message = f"has '{name}', which LlamaForCausalLM would ignore. Rename it to '{nearest}', which the batch lacks"
        with pytest.raises(ValueError, match=message):
            make_trainer(devices=1).fit(CausalLM(config=LLAMA), DataLoader([row]))

    run_ranks(run, 1, group=False)


@pytest.mark.parametrize(
    ("monitor", "meant"),
    [
        ("val_loss", "val/loss"),
        ("val/los", "val/loss"),
        ("validation/loss", "val/loss"),
        ("train_perplexity", "train/perplexity"),
        ("val/loss", None),
        ("val_acc", None),
        ("accuracy", None),  # a callback may log it
        ("throughput/tokens_per_second", None),
    ],
)
def test_a_misspelt_metric_is_said_before_training(monitor: str, meant: str | None) -> None:
    callbacks = [EarlyStopping(monitor), ModelCheckpoint(monitor=monitor), ModelCheckpoint()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_unknown_monitors(callbacks, ("train/loss", "train/perplexity", "val/loss", "val/perplexity"))
    said = [str(each.message) for each in caught]
    assert len(said) == (2 if meant else 0)
    for kind, line in zip(("EarlyStopping", "ModelCheckpoint"), said, strict=False):
        assert line.startswith(f"{kind}(monitor={monitor!r}): CausalLM logs no such metric; did you mean {meant!r}?")


def test_a_fit_says_it_and_its_metrics_are_those_that_are_known(tmp_path: Path) -> None:
    batches = make_token_batches(4, ragged=False)

    def run() -> set[str]:
        trainer = make_trainer(
            callbacks=[EarlyStopping("val_loss", strict=False)], log_every_n_steps=1, val_check_interval=2
        )
        with pytest.warns(UserWarning, match="did you mean 'val/loss'"):
            trainer.fit(CausalLM(config=LLAMA), make_loader(batches), make_loader(batches))
        return set(trainer.callback_metrics)

    assert {*_METRICS} - {"train/load_balance_loss"} == run_ranks(run, 1)[0]

"""The table of a model's modules: their own names, and parameters counted by hand."""

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
from helpers.models import LLAMA, make_token_batches
from helpers.ranks import run_ranks
from helpers.user_modules import make_loader, make_trainer
from lightning.pytorch.callbacks import ModelSummary as LightningModelSummary
from lightning.pytorch.callbacks import RichModelSummary

from lightning_fsdp2 import CausalLM, FSDP2Config, FSDP2Strategy
from lightning_fsdp2.callbacks import ModelSummary
from lightning_fsdp2.cli import FSDP2CLI

INTERLEAVED = {"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 2, "pp_layers_per_stage": [1, 1, 1, 1]}


def show(max_depth: int, strategy: FSDP2Strategy | None = None, **options: Any) -> str:
    trainer = make_trainer(strategy or FSDP2Strategy(), callbacks=[ModelSummary(max_depth)], max_steps=1)
    module = CausalLM(**{"config": {**LLAMA, "tie_word_embeddings": True}, **options})
    with redirect_stdout(io.StringIO()) as output:
        trainer.fit(module, make_loader(make_token_batches(1) * 2))
    return output.getvalue()


def read(text: str) -> dict[str, list[str]]:
    """The cells of each row by its name."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[-1] != "rank" and "─" not in row[0]}


def count_parameters(layers: int = LLAMA["num_hidden_layers"]) -> int:
    """The parameters of a Llama without its embedding, after its paper."""
    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    keys = LLAMA["num_key_value_heads"] * hidden // LLAMA["num_attention_heads"]
    return layers * (2 * hidden**2 + 2 * keys * hidden + 3 * hidden * inner + 2 * hidden)


def test_every_module_has_its_own_name_and_its_numbers() -> None:
    texts = run_ranks(show, 2, 4)
    assert texts[1] == "", "a rank other than the first prints a table"
    rows = read(texts[0])
    assert rows["model.model.layers.0"][0] == "LlamaDecoderLayer"
    one_layer = count_parameters(layers=1)
    assert rows["model.model.layers.0"][1:3] == [f"{one_layer / 1000:.1f}", "K"]
    total = count_parameters() + LLAMA["vocab_size"] * LLAMA["hidden_size"] + LLAMA["hidden_size"]
    assert rows["total"][:2] == [f"{total / 1000:.1f}", "K"], "a tied weight counts once"
    assert float(rows["total"][4]) == pytest.approx(total / 2000, abs=0.1), "half of it is on each of two ranks"
    assert "FLOPs" not in texts[0]


def test_parameters_that_are_not_trained() -> None:
    rows = read(run_ranks(lambda: show(1, lora={"r": 4, "target_modules": ["q_proj"]}), 2)[0])
    hidden = LLAMA["hidden_size"]
    assert rows["total"][2] == str(LLAMA["num_hidden_layers"] * 4 * 2 * hidden)


@pytest.mark.parametrize(
    ("flags", "title", "layers"),
    [
        pytest.param({}, "stage 0 of the stages 0 to 1", {"0", "1"}, marks=pytest.mark.slow),
        (INTERLEAVED, "stages 0 and 2 of the stages 0 to 3", {"0", "2"}),
    ],
    ids=["1f1b", "interleaved"],
)
def test_a_pipeline_rank_says_which_stages_it_counts(flags: dict[str, Any], title: str, layers: set[str]) -> None:
    config = {**LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": False}

    def run() -> str:
        return show(4, FSDP2Strategy(pp_size=2, config=FSDP2Config(**flags)), config=config)

    text = run_ranks(run, 2)[0]
    assert text.splitlines()[0].strip() == title
    found = {name.rpartition(".")[2] for name in read(text) if name.rpartition(".")[0] == "model.model.layers"}
    assert found == layers


def test_no_depth_prints_no_table() -> None:
    assert run_ranks(show, 2, 0) == ["", ""]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [ModelSummary]),
        (["--trainer.enable_model_summary=true"], [ModelSummary]),
        (["--trainer.enable_model_summary=false"], []),
        (["--trainer.barebones=true"], []),
        (["--trainer.callbacks=RichModelSummary"], [RichModelSummary]),
    ],
    ids=["default", "asked-for", "refused", "barebones", "of-lightning"],
)
def test_the_command_line_has_it_unless_the_config_says_otherwise(options: list[str], expected: list[type]) -> None:
    cli = FSDP2CLI(["--model=CausalLM", f"--model.config={LLAMA}", *options], run=False)
    found = [type(callback) for callback in cli.trainer.callbacks if isinstance(callback, LightningModelSummary)]
    assert found == expected

"""Files that have more than the model are said; files that do not fit it are refused (see `test_pretrained.py`)."""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.families import make_family_config
from helpers.models import GPT2, LLAMA, make_causal_lm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_fsdp2 import export_hf
from lightning_fsdp2.models import from_pretrained
from lightning_fsdp2.weights.pretrained_checks import check_loaded


def load(config: dict[str, object], unexpected: set[str], stored: Collection[str] = ()) -> None:
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=unexpected, mismatched_keys=set(), conversion_errors={})
    check_loaded(make_causal_lm(config), info, Path("m"), (), stored=stored)


@pytest.mark.parametrize(
    ("config", "unexpected", "message"),
    [
        (
            {**LLAMA, "num_hidden_layers": 2},
            {"model.layers.2.mlp.up_proj.weight", "model.layers.3.input_layernorm.weight"},
            "2 tensors of the files are not used, because the model has only 2 layers in 'model.layers'",
        ),
        (
            {**GPT2, "n_layer": 1},
            {"transformer.h.1.ln_1.bias"},
            "1 tensors of the files are not used, because the model has only 1 layers in 'transformer.h'",
        ),
        (LLAMA, {"score.weight"}, None),  # a head that the model does not have
        (LLAMA, {"vision.layers.7.weight"}, None),  # and a tower
        (LLAMA, {"model.layers.1.note"}, None),
    ],
    ids=["llama", "gpt2", "head", "tower", "own-layer"],
)
def test_layers_of_the_files_that_the_model_lacks_are_said(
    config: dict[str, object], unexpected: set[str], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(config, unexpected)
    said = [line for line in caplog.messages if "of the files are not used" in line]
    assert len(said) == (message is not None)
    if message is not None:
        assert said[0].startswith(f"pretrained='m': {message}: ")
        assert all(name in said[0] for name in unexpected)
        assert "num_hidden_layers" in said[0]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_said_once_and_not_exported(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The classes of transformers ignore them without a word."""
    config = make_family_config(family, num_nextn_predict_layers=1)
    number = config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    tensors = load_file(tmp_path / "in/model.safetensors")
    extra = {
        name.replace(f".{number - 1}.", f".{number}."): t.clone()
        for name, t in tensors.items()
        if f".{number - 1}." in name
    }
    save_file(tensors | extra, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        model = from_pretrained(tmp_path / "in", on_meta=False)
    (said,) = [line for line in caplog.messages if "of the files are not used" in line]
    assert f"{len(extra)} tensors of the files are not used, because the model has only {number} layers" in said
    assert "1 of them predict further tokens (num_nextn_predict_layers)" in said
    export_hf(model, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == tensors.keys()
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0

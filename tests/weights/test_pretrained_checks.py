"""Files that have more than the model are said; files that do not fit it are refused (see `test_pretrained.py`)."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.models import GPT2, LLAMA, make_causal_lm

from lightning_fsdp2.weights.pretrained_checks import check_loaded


def load(config: dict[str, object], unexpected: set[str]) -> None:
    info = SimpleNamespace(missing_keys=set(), unexpected_keys=unexpected, mismatched_keys=set(), conversion_errors={})
    check_loaded(make_causal_lm(config), info, Path("m"), ())


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

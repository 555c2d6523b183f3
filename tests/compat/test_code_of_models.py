"""Code that comes with a model or a tokenizer never runs, whatever a person answers to transformers' question."""

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.models import LLAMA
from transformers import dynamic_module_utils

from lightning_fsdp2 import CausalLM, TextDataModule
from lightning_fsdp2.export.hugging_face import _load_tokenizer
from lightning_fsdp2.models import from_pretrained

CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
CLASSES = "class C(LlamaConfig):\n    model_type = 'own'\nclass M(LlamaForCausalLM):\n    config_class = C\nT = C\n"


def write_folder(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(mark=str(folder / "code-ran")) + CLASSES)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()
    return folder


OWN_CONFIG = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
OWN_MODEL = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.M"}}
OWN_HEAD = {"auto_map": {"AutoModelForMultipleChoice": "own.M"}}  # Llama has no such class in transformers
OWN_TOKENIZER = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.T", None]}}


def read_config(folder: Path) -> Any:
    return CausalLM(config=str(folder)).hf_config


def read_pretrained(folder: Path) -> Any:
    return CausalLM(pretrained=str(folder)).hf_config


def read_other_head(folder: Path) -> Any:
    return from_pretrained(folder, auto_class="AutoModelForMultipleChoice")


def read_tokenizer(folder: Path) -> Any:
    return TextDataModule(path="python-stdlib", tokenizer=str(folder)).tokenizer


def read_tokenizer_of_export(folder: Path) -> Any:
    return _load_tokenizer(str(folder), "")


@pytest.mark.guarantees("code-of-models")
@pytest.mark.parametrize(
    ("read", "config"),
    [
        (read_config, OWN_CONFIG),
        (read_pretrained, OWN_CONFIG),
        (read_pretrained, OWN_MODEL),
        (from_pretrained, OWN_MODEL),
        (from_pretrained, OWN_CONFIG),
        (read_other_head, OWN_HEAD),
        (read_tokenizer, {}),
        (read_tokenizer_of_export, {}),
    ],
)
def test_code_in_the_files_never_runs(
    read: Callable[[Path], Any], config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": (asked.append(text), "y")[1])
    folder = write_folder(tmp_path / "model", config, OWN_TOKENIZER)
    with pytest.raises(ValueError, match=r"has code of its own .* which this package never runs"):
        read(folder)
    assert asked == []
    assert not (folder / "code-ran").exists()


def test_files_whose_code_transformers_has_too_are_read_without_it(tmp_path: Path) -> None:
    """Many older models have code of their own for an architecture that transformers has by now."""
    folder = write_folder(tmp_path / "model", {"auto_map": {"AutoConfig": "own.C"}}, {})
    assert type(read_config(folder)).__name__ == "LlamaConfig"
    assert not (folder / "code-ran").exists()

"""Every YAML block of the documentation is parsed by the command line, and every line of JSON is JSON."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from helpers.documents import Block, get_blocks
from helpers.models import LLAMA

from lightning_fsdp2.cli import FSDP2CLI

# what a block leaves out, as text, in which YAML's numbers are the command line's
REST = yaml.safe_dump({"model": {"class_path": "lightning_fsdp2.CausalLM", "init_args": {"config": LLAMA}}})


@pytest.mark.guarantees("pages-are-measured")
@pytest.mark.slow
@pytest.mark.parametrize("block", get_blocks("yaml"), ids=str)
def test_yaml_is_parsed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fsdp2"])
    given = yaml.safe_load(block.text)
    (tmp_path / "run.yaml").write_text(block.text if "model" in given else block.text + REST)
    with pytest.raises(SystemExit) as exit_:
        FSDP2CLI(["fit", f"--config={tmp_path / 'run.yaml'}", "--print_config"])
    assert exit_.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for part, options in given.items():
        assert set(options) <= set(printed[part])


@pytest.mark.parametrize("block", get_blocks("json"), ids=str)
def test_lines_are_json(block: Block) -> None:
    for line in block.text.splitlines():
        assert set(json.loads(line)) & {"messages", "prompt"}

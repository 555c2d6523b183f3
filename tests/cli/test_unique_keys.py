"""A key that is given twice is an error with its line, in every YAML file that the command line reads."""

from pathlib import Path

import pytest

from lightning_fsdp2.cli import main
from lightning_fsdp2.cli.unique_keys import RepeatedKeyError, check_keys

LEGAL = """
defaults: &defaults {devices: 1, logger: false}
trainer:
  <<: *defaults
  logger: true
validation: *defaults
again:
- {devices: 1}
- {devices: 1}
1: a number
"1": a text
"""


def test_merges_anchors_and_keys_of_other_mappings_are_legal() -> None:
    check_keys(LEGAL)
    check_keys("")
    check_keys("&self [*self]")


@pytest.mark.guarantees("new-errors")
@pytest.mark.parametrize(
    ("content", "line"),
    [("a: 1\nb: 2\na: 3", 3), ("a:\n  b: 1\n  b: 1", 3), ("- x\n- {a: 1, a: 2}", 2), ("a: &m {b: 1}\na: *m", 2)],
)
def test_a_key_twice_is_an_error_with_its_line(content: str, line: int) -> None:
    with pytest.raises(RepeatedKeyError, match="is given twice, first in line") as caught:
        check_keys(content)
    assert caught.value.problem_mark.line + 1 == line


@pytest.mark.guarantees("new-errors")
@pytest.mark.parametrize("place", ["run.yaml", "model.yaml"])
def test_the_command_line_names_file_line_and_key(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    twice = "  learning_rate: 0.1\n  learning_rate: 0.2\n" if place == "model.yaml" else ""
    Path("model.yaml").write_text(f"class_path: lightning_fsdp2.CausalLM\ninit_args:\n  config: {{}}\n{twice}")
    last = "trainer: {max_steps: 2}\n" if place == "run.yaml" else ""
    Path("run.yaml").write_text(f"trainer: {{max_steps: 1}}\nmodel: model.yaml\n{last}")
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "run.yaml"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "is given twice, first in line" in error
    assert place in error
    assert ("'trainer'" if place == "run.yaml" else "'learning_rate'") in error

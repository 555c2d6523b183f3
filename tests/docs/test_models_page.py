"""The page of supported models is the one that the pages of parity give."""

import re

import pytest
from helpers.documents import ROOT

from tools import supported_models

PAGE = (ROOT / "docs/models.md").read_text()


def test_the_page_is_up_to_date() -> None:
    assert supported_models.write_page() == PAGE, "run tools/supported_models.py"


@pytest.mark.parametrize(
    ("family", "name", "cells", "reason"),
    [
        ("`llama`", "`LlamaForCausalLM`", ["yes"] * 4 + ["", "yes"], ""),
        ("`mixtral`", "`MixtralForCausalLM`", ["yes"] * 6, ""),
        ("`gemma2`", "`Gemma2ForCausalLM`", ["yes", "yes", "no", "yes", "", "yes"], "attn_logit_softcapping"),
        ("`inkling2_text`", "`Inkling2ForCausalLM`", ["yes", "no", "no", "no", "yes", "in part"], "block_states"),
        ("`llama4_text`", "`Llama4ForCausalLM`", ["yes", "yes", "no", "yes", "no", "yes"], "chunked_attention"),
        ("`qwen2_vl`", "`Qwen2VLForConditionalGeneration`", ["yes", "yes", "yes", ""], ""),
        ("`qwen3_vl`", "`Qwen3VLForConditionalGeneration`", ["yes", "yes", "no", ""], "features of its images"),
        ("`udop`", "`UdopForConditionalGeneration`", ["no", "no", "no", ""], "are tied"),
    ],
)
def test_a_row_says_what_was_compared(family: str, name: str, cells: list[str], reason: str) -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {family} |") and f"| {name} |" in line]
    found = line.removeprefix(f"| {family} |").removesuffix(f"| {name} |")
    assert [re.sub(r"\[.*", "", cell.strip()) for cell in found.rstrip("|").split("|")] == cells
    notes = dict(re.findall(r"^(\[\^\d+\]): (.*)$", PAGE, re.MULTILINE))
    said = [notes[number] for number in re.findall(r"\[\^\d+\]", found)]
    assert any(reason in note for note in said) == bool(reason)

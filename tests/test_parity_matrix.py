"""A sample of `make parity`: families that differ in the styles their plans use, each on one of the layouts."""

from typing import Any

import pytest
from helpers.families import FAMILIES, NOT_BUILT, VARIED
from helpers.family_parity import (
    CONTEXT_LAYOUTS,
    LAYOUTS,
    PIPELINE_LAYOUTS,
    get_optional_refusal,
    has_plan,
    measure_parity,
)
from helpers.ranks import RankError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools.parity_matrix import IMAGES, TEXT

FAST = ("gemma2", "phi3", "bloom", "gpt_oss", "deepseek_v3")
"""Those that `make test` trains, on two ranks."""

CONTEXT_SAMPLE = (
    "deepseek_v3",
    "mixtral",
    "gemma3_text",
    "gpt_oss",
    "gemma4_text",  # keys and values of earlier layers, a part of the mask
)

PIPELINE_SAMPLE = (
    "opt",  # a layer's tuple with nothing behind the hidden states
    "bloom",  # a norm of the embedding
    "gemma2",  # tied, a scaled embedding, sequence parallel
    "qwen3_next",  # linear attention
    "deepseek_v3",  # a dense stage and a sparse one
    "gpt_oss",
)


def mark(families: tuple[str, ...], fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(family, marks=() if family in fast else pytest.mark.slow) for family in families]


@pytest.mark.guarantees("pipeline-parallel-families")
@pytest.mark.parametrize("family", mark(PIPELINE_SAMPLE, ("opt",)))
def test_a_family_trains_as_in_one_process_over_stages(family: str) -> None:
    layout = list(PIPELINE_LAYOUTS)[PIPELINE_SAMPLE.index(family) % len(PIPELINE_LAYOUTS)]
    assert measure_parity(family, layout) < 1e-5


@pytest.mark.guarantees("refused-pipeline-families")
def test_a_family_that_cannot_be_divided_is_refused_with_the_reason() -> None:
    with pytest.raises(RankError) as error:
        measure_parity("gemma3n_text", "pp2")
    assert "layers.0" in str(get_optional_refusal("gemma3n_text", error.value))


@pytest.mark.guarantees("context-parallel-families")
@pytest.mark.parametrize("family", mark(CONTEXT_SAMPLE, ("deepseek_v3",)))
def test_a_family_trains_as_in_one_process_on_parts_of_its_sequences(family: str) -> None:
    layout = list(CONTEXT_LAYOUTS)[CONTEXT_SAMPLE.index(family) % len(CONTEXT_LAYOUTS)]
    assert measure_parity(family, layout) < 1e-5


@pytest.mark.guarantees("families-with-a-plan")
@pytest.mark.parametrize("family", mark(VARIED, FAST))
def test_a_family_trains_as_in_one_process(family: str) -> None:
    layout = list(LAYOUTS)[VARIED.index(family) % len(LAYOUTS)]
    assert measure_parity(family, layout) < 1e-5


@pytest.mark.guarantees("families-with-a-plan")
def test_no_family_with_a_plan_is_forgotten() -> None:
    with_plan = {family for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if has_plan(family)}
    assert with_plan - set(NOT_BUILT) <= set(FAMILIES)


def test_results_are_kept_by_the_files_that_decide_them() -> None:
    assert len({TEXT.get_key(), IMAGES.get_key()}) == 2

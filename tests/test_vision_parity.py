"""A sample of `make parity`'s models that see images: gradients over micro-batches are those of one process."""

import pytest
from helpers.families import keep_known
from helpers.ranks import raises_on_all_ranks
from helpers.vision import get_family
from helpers.vision_families import FAMILIES, NOT_BUILT
from helpers.vision_parity import measure_vision_parity
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


@pytest.mark.guarantees("families-with-images")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("chameleon", "dp2"),  # modules without a forward in a list
        pytest.param("internvl", "tp2", marks=pytest.mark.slow),
        *((family, "tp2") for family in keep_known("cosmos3_edge")),  # its weights are read from around it
        ("dots3_note", "tp2+sp"),  # a tower with a plan, which hands on patches without a batch
        ("qwen2_vl", "tp2+sp"),
        # a plan of ours, beside a tower with layers of the same name
        pytest.param("llava (olmo2)", "tp2+sp", marks=pytest.mark.slow),
        pytest.param("muse_glimmer", "tp2+sp", marks=pytest.mark.slow),
        pytest.param("step3p7", "tp2", marks=pytest.mark.slow),
        # an embedding that puts another vector in the place of one token
        pytest.param("t5gemma2", "tp2", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(family: str, layout: str) -> None:
    assert measure_vision_parity(family, layout) <= 1e-5


@pytest.mark.guarantees("sequence-parallel-images")
@pytest.mark.parametrize("family", keep_known("granite4_vision", "qwen3_vl"))
def test_images_between_the_layers_refuse_sequence_parallelism(family: str) -> None:
    with raises_on_all_ranks(ValueError, match="features of its images"):
        measure_vision_parity(family, "tp2+sp")


@pytest.mark.guarantees("families-with-images")
def test_no_family_that_sees_images_is_forgotten() -> None:
    listed = {get_family(name) for name in FAMILIES} | NOT_BUILT.keys()
    assert MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() <= listed

"""Division of batches into micro-batches: what has rows is divided, and everything else is given whole."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from lightning_fsdp2.parallel.pipeline.batches import (
    add_rows_without_labels,
    count_rows,
    describe_shapes,
    divide_batch,
)

TOKENS = torch.arange(24).view(4, 6)
Pair = namedtuple("Pair", ["inputs", "name"])


@dataclass
class Sample:
    inputs: Tensor
    name: str


def make_batch() -> dict[str, Any]:
    return {
        "input_ids": TOKENS,
        "position_ids": torch.arange(3 * 4 * 6).view(3, 4, 6),
        "pixel_values": torch.arange(10.0).view(5, 2),
        "nested": [TOKENS + 1, {"weights": torch.arange(4.0)}],
        "scale": torch.tensor(2.0),
        "name": "batch",
    }


@pytest.mark.guarantees("divided-batches")
def test_rows_are_divided_and_everything_else_is_whole() -> None:
    batch = make_batch()
    assert count_rows(batch) == 4
    parts = divide_batch(batch, 2)
    for number, part in enumerate(parts):
        rows = slice(2 * number, 2 * number + 2)
        assert torch.equal(part["input_ids"], TOKENS[rows])
        assert torch.equal(part["position_ids"], batch["position_ids"][:, rows])
        assert torch.equal(part["nested"][0], TOKENS[rows] + 1)
        assert torch.equal(part["nested"][1]["weights"], torch.arange(4.0)[rows])
        assert torch.equal(part["pixel_values"], batch["pixel_values"])
        assert part["scale"] is batch["scale"]
        assert part["name"] == "batch"


def test_names_count_at_any_depth_and_lists_of_items_go_with_their_rows() -> None:
    inputs = {"input_ids": TOKENS[:3], "position_ids": torch.arange(3 * 3 * 2).view(3, 3, 2)}
    batch = {
        "class_weights": torch.ones(101),
        "inputs": inputs,
        "texts": ["a", "b", "c"],
        "images": [torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 4)],
        "scales": [torch.arange(3.0), torch.arange(3.0), torch.arange(3.0)],
        "pair": ("x", "y"),
    }
    assert count_rows(batch) == 3
    parts = divide_batch(batch, 3)
    for row, part in enumerate(parts):
        assert torch.equal(part["inputs"]["position_ids"], inputs["position_ids"][:, row : row + 1])
        assert part["texts"] == [batch["texts"][row]]
        assert [image.shape for image in part["images"]] == [(1, row + 2)]
        assert [scale.tolist() for scale in part["scales"]] == [[row]] * 3
        assert part["pair"] == ("x", "y")
        assert part["class_weights"] is batch["class_weights"]
    with pytest.raises(ValueError, match="'cu_seq_lens_q'"):
        divide_batch({"inputs": {**inputs, "cu_seq_lens_q": torch.tensor([0, 3])}}, 3)


@pytest.mark.guarantees("divided-batches")
def test_positions_are_divided_along_the_batch_even_if_there_are_as_many_rows_as_axes() -> None:
    positions = torch.arange(3 * 3 * 2).view(3, 3, 2)
    parts = divide_batch({"input_ids": TOKENS[:3], "position_ids": positions}, 3)
    assert [part["position_ids"].tolist() for part in parts] == [
        positions[:, row : row + 1].tolist() for row in range(3)
    ]


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        (TOKENS, lambda part: part),
        ((TOKENS, "x"), lambda part: part[0]),
        (["x", TOKENS], lambda part: part[1]),
        (Pair(TOKENS, "x"), lambda part: part.inputs),
        (Sample(TOKENS, "x"), lambda part: part.inputs),
        (BatchEncoding({"input_ids": TOKENS}), lambda part: part["input_ids"]),
    ],
    ids=["tensor", "tuple", "list", "namedtuple", "dataclass", "BatchEncoding"],
)
def test_containers_keep_their_class(batch: Any, get: Any) -> None:
    parts = divide_batch(batch, 4)
    assert [get(part).tolist() for part in parts] == [[row] for row in TOKENS.tolist()]
    assert all(type(part) is type(batch) for part in parts)


def test_added_rows_repeat_the_last_one_and_have_no_labels() -> None:
    batch = {name: value for name, value in make_batch().items() if name in ("input_ids", "position_ids")}
    longer = add_rows_without_labels(batch, 2)
    assert longer["input_ids"].tolist() == [*TOKENS.tolist(), TOKENS[3].tolist(), TOKENS[3].tolist()]
    assert longer["labels"].tolist() == [*TOKENS.tolist(), [-100] * 6, [-100] * 6]
    assert torch.equal(longer["position_ids"][:, 4], batch["position_ids"][:, 3])
    labels = torch.full_like(TOKENS, 7)
    assert add_rows_without_labels({**batch, "labels": labels}, 1)["labels"].tolist() == [[7] * 6] * 4 + [[-100] * 6]
    assert torch.equal(labels, torch.full_like(TOKENS, 7))
    assert batch.keys() == {"input_ids", "position_ids"}


def test_batches_of_equal_shapes_and_dtypes_look_alike() -> None:
    assert describe_shapes(make_batch()) == describe_shapes(make_batch())
    assert describe_shapes(make_batch()) != describe_shapes({**make_batch(), "input_ids": TOKENS[:, :3]})
    assert describe_shapes(TOKENS) != describe_shapes(TOKENS.int())


def test_batches_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="holds no tensor with rows"):
        count_rows({"name": "x", "scale": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"the batch has 'cu_seq_lens_q'.*position_ids"):
        divide_batch({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 3, 24])}, 2)
    images = {"input_ids": TOKENS, "image_grid_thw": torch.ones(4, 3, dtype=torch.long)}
    assert [part.keys() for part in divide_batch(images, 1)] == [images.keys()]
    with pytest.raises(ValueError, match=r"the batch has 'image_grid_thw'.*pp_microbatches=1"):
        divide_batch(images, 2)

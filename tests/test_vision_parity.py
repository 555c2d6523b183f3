"""Models that see images train as in one process, over micro-batches, on data and tensor parallel ranks."""

from typing import Any

import pytest
import torch.distributed as dist
from helpers.oracle import whole
from helpers.ranks import run_ranks
from helpers.vision import FAMILIES, get_vision_loss, make_image_batch, make_vision_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh, defer_grad_sync

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "config": {"sequence_parallel": True}},
}
STEPS = 2
SAMPLE = {("internvl", "tp2"), ("qwen2_vl", "tp2+sp")}
REFUSED = {("qwen3_vl", "tp2+sp"): "features of its images"}


def accumulate(family: str, model: nn.Module, own: slice) -> dict[str, Tensor]:
    """Return the gradients of the micro-batches that are this rank's."""
    batches = [make_image_batch(family, seed) for seed in range(2 * STEPS)][own]
    with defer_grad_sync(model):
        for batch in batches[:-1]:
            (get_vision_loss(model, batch) / len(batches)).backward()
    (get_vision_loss(model, batches[-1]) / len(batches)).backward()
    return whole({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in SAMPLE else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
    ],
)
def test_gradients_are_those_of_one_process(family: str, layout: str) -> None:
    def run() -> dict[str, Tensor]:
        options = LAYOUTS[layout]
        config = FSDP2Config(mp_policy=MixedPrecisionPolicy(), **options.get("config", {}))
        mesh = create_device_mesh(tp_size=options.get("tp_size", 1), device_type="cpu")
        manager = FSDP2Manager(config, mesh)
        model = manager.parallelize(make_vision_model(family))
        own = slice(dist.get_rank(), None, 2) if layout == "dp2" else slice(None)
        return accumulate(family, model, own)

    if (family, layout) in REFUSED:
        with pytest.raises(AssertionError, match=REFUSED[family, layout]):
            run_ranks(run, 2)
        return
    [expected] = run_ranks(lambda: accumulate(family, make_vision_model(family), slice(None)), 1)
    [gradients, _] = run_ranks(run, 2)
    assert gradients.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        # a gradient that is a sum of rounding, such as that of a bias of keys, is measured by the others
        bound = 1e-5 * float(value.abs().max()) + 1e-8 * largest
        assert float((gradients[name] - value).abs().max()) <= bound, name
    assert sum(float(expected[name].abs().max()) > 0 for name in expected if "vis" in name) > 10

"""What a step with LoRA sends and allocates: gradients of adapters alone, and nothing for what is frozen."""

from pathlib import Path
from typing import Any

import pytest
from helpers.collectives import CountsStep, StepCounter
from helpers.lora import LORA, fit, make_module, save_base
from helpers.ranks import run_ranks
from torch.distributed.tensor import DTensor

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy

ALL = {"target_modules": "all-linear"}
ONE = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}


class Products(StepCounter):
    """Counts, and keeps the shapes of matrix products: gradients of weights are some."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.shapes.add(tuple(result.shape))
        return result


def run_counted(base: str, lora: dict[str, Any], config: FSDP2Config) -> Any:
    """The counts of a step of two micro-batches, and the model that was trained."""
    counts = [CountsStep(step) for step in (2, 3)]
    for count in counts:
        count.counter = Products()
    module = make_module(base, lora={**LORA, **lora})
    fit(module, FSDP2Strategy(config=config), steps=3, accumulate_grad_batches=2, callbacks=counts)
    return [count.counter for count in counts], module.model


def count_adapters(model: Any, part: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "lora_" in name and part in name)


@pytest.mark.guarantees("lora-around-shards", "traffic-of-adapters")
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, "full"], ids=["kept", "recomputed"])
def test_gradients_of_adapters_alone_are_made_and_reduced(checkpointing: Any, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")

    def run() -> None:
        config = FSDP2Config(activation_checkpointing=checkpointing)
        (first, last), model = run_counted(base, ALL, config)
        assert first.collectives["reduce_scatter"] == 0  # deferred
        # the second layer's is reduced first
        assert last.elements["reduce_scatter"] == [count_adapters(model, f"layers.{n}.") for n in (1, 0)]
        frozen = {tuple(p.shape) for name, p in model.named_parameters() if "lora_" not in name and p.ndim == 2}
        made = first.shapes | last.shapes
        assert made  # of adapters, and activations, whose 48 tokens are the dim of no weight
        assert not made & (frozen | {shape[::-1] for shape in frozen})

        (first, last), model = run_counted(base, ONE, config)
        assert first.collectives["reduce_scatter"] == 0
        assert last.elements["reduce_scatter"] == [count_adapters(model)] == [count_adapters(model, "layers.1.")]
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())  # sharded again

    run_ranks(run, 2)

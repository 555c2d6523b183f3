"""What is drawn of a plan is legible."""

from typing import Any

import pytest
from helpers.planning import make_batch, make_module, make_trainer
from matplotlib.figure import Figure

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy
from lightning_fsdp2.plan import plan_run
from lightning_fsdp2.plan.plot import draw_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figure() -> Figure:
    drawn: list[Figure] = []
    strategy = FSDP2Strategy(tp_size=2, config=FSDP2Config(sequence_parallel=True))
    trainer = make_trainer(strategy, accumulate_grad_batches=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
        draw_plan(plan_run(trainer, make_module(), make_batch(), world_size=8, suggest=False), "plan.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    return figure


def test_what_is_written_beside_bars_is_within_the_frame(figure: Figure) -> None:
    traffic: Any = figure.axes[1]
    ends = [label.get_window_extent().x1 for label in traffic.texts]
    assert len(ends) > 2
    assert max(ends) < traffic.get_window_extent().x1


def test_it_says_that_not_all_micro_batches_are_drawn(figure: Figure) -> None:
    assert figure.axes[0].get_xlabel().endswith("; 3 of 1000 micro-batches")

"""The flags of pipeline parallelism, and the figures that prove what they do; see :mod:`helpers.flags`.

The figures are those of the first rank, in a training step of a Llama of four layers on two stages of two data parallel
ranks. A rank reads four sequences of 12 tokens. The first rank of two stages holds the embedding and two layers.
"""

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from helpers.collectives import StepCounter
from helpers.flags import HIDDEN, Flag, Setting
from helpers.models import LLAMA, make_causal_lm, make_token_batches
from lightning_fsdp2 import FSDP2Config, FSDP2Manager, create_device_mesh
from lightning_fsdp2.parallel.pipeline.apply import get_pipeline
from lightning_fsdp2.parallel.pipeline.batches import describe_shapes, divide_batch
from lightning_fsdp2.parallel.pipeline.schedule import build_orders

LAYERS, ROWS, LENGTH = 4, 4, 12
UNITS = 1 + LAYERS // 2
CROSSING = ROWS * LENGTH * HIDDEN


def make_setting(
    value: str,
    *,
    micro_batches: int = 4,
    kept: int = 2,
    crossings: int = 1,
    gathers: int = UNITS,
    reductions: int = UNITS,
    **flags: Any,
) -> Setting:
    return Setting(
        value=value,
        flags={"pp_microbatches": micro_batches, **flags},
        ranks=4,
        figures={
            "runs of `training_step`": micro_batches * flags.get("pp_stages_per_rank", 1),
            "runs kept for backward": kept,
            "values sent": crossings * CROSSING,
            "all-gathers": gathers,
            "reduce-scatters": reductions,
        },
    )


PIPELINE_FLAGS = (
    Flag(
        name="pp_size, pp_schedule, pp_stages_per_rank",
        effect="See [pipeline_parallel.md](pipeline_parallel.md). The figures are those of the first of two stages of"
        " two data parallel ranks, with a Llama of four layers, and four micro-batches of one sequence. A value is an"
        " element of the hidden states or of their gradients.",
        settings=(
            make_setting("1f1b"),
            make_setting("gpipe", kept=4, pp_schedule="gpipe"),
            make_setting(
                "interleaved_1f1b, 2 stages on each rank",
                kept=5,
                crossings=3,  # forward to the second and the fourth stage, and backward from the third
                pp_schedule="interleaved_1f1b",
                pp_stages_per_rank=2,
            ),
        ),
    ),
    Flag(
        name="pp_microbatches",
        effect="Sets into how many micro-batches a batch is divided. What travels, and what FSDP2 gathers and reduces,"
        " does not depend on it.",
        settings=(make_setting("2", micro_batches=2), make_setting("4")),
    ),
    Flag(
        name="reshard_after_forward, defer_fsdp_grad_sync with pp_size=2",
        effect="By default, the units of a stage are gathered and reduced once per batch. The flags make FSDP2 gather"
        " or reduce them for each of the four micro-batches, which saves memory.",
        settings=(
            make_setting("None, True"),
            # in backward, the embedding is not needed again
            make_setting("True, True", gathers=4 * (2 * UNITS - 1), reshard_after_forward=True),
            make_setting("None, False", reductions=4 * UNITS, defer_fsdp_grad_sync=False),
        ),
    ),
)


def measure_stages(setting: Setting) -> dict[str, Any]:
    """The figures of a step, on every rank of ``run_ranks``. Another one precedes it."""
    torch.manual_seed(0)
    config = FSDP2Config(**{"mp_policy": MixedPrecisionPolicy(), **setting.flags})
    mesh = create_device_mesh(config, pp_size=2)
    model: Any = FSDP2Manager(config, mesh).parallelize(make_causal_lm({**LLAMA, "num_hidden_layers": LAYERS}))
    pipeline, number, runs = get_pipeline(model), config.pp_microbatches or 0, 0
    stages = config.stages_per_rank
    orders = build_orders(config.pp_schedule, ranks=2, micro_batches=number, stages_per_rank=stages)
    micro_batches = divide_batch(make_token_batches(1, size=ROWS, length=LENGTH)[0], number)

    def step(micro_batch: Any) -> torch.Tensor:
        nonlocal runs
        runs += 1
        loss: torch.Tensor = model(**micro_batch).loss
        return loss

    def run() -> None:
        pipeline.execute(
            orders,
            step,
            micro_batches,
            key=describe_shapes(micro_batches[0]),
            reduces_each=not config.defer_fsdp_grad_sync,
        )

    run()
    runs, sent = 0, pipeline.transfers.elements
    with StepCounter() as counter:
        run()
    return {
        "runs of `training_step`": runs,
        "runs kept for backward": pipeline.peak,
        "values sent": pipeline.transfers.elements - sent,
        "all-gathers": counter.collectives["all_gather"],
        "reduce-scatters": counter.collectives["reduce_scatter"],
    }

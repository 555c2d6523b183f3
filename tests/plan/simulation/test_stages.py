"""A simulated rank of a pipeline does what it does among other ranks: the same transfers, and as much memory."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.cover import Matrix
from helpers.planning import Call, make_batch, make_module, make_trainer, train_ranks
from helpers.ranks import run_ranks

from lightning_fsdp2 import FSDP2Config, FSDP2Strategy
from lightning_fsdp2.parallel.pipeline.transfers import Transfers
from lightning_fsdp2.plan.result import RankPlan, build_rank_plan
from lightning_fsdp2.plan.simulation.recorder import OPTIMIZER_STATES, TRANSFERS, WEIGHTS
from lightning_fsdp2.plan.simulation.step import Simulation, simulate
from lightning_fsdp2.plan.timing.devices import DEVICES

ROWS = 8
INTERLEAVED = FSDP2Config(pp_schedule="interleaved_1f1b", pp_stages_per_rank=2, pp_microbatches=4)
SEQUENCE_PARALLEL = FSDP2Config(sequence_parallel=True, activation_checkpointing="full")

CASES: dict[str, tuple[int, Callable[[], Any], dict[str, Any]]] = {
    "pp 2": (2, lambda: FSDP2Strategy(pp_size=2), {}),
    "pp 2, GPipe": (2, lambda: FSDP2Strategy(pp_size=2, config=FSDP2Config(pp_schedule="gpipe")), {}),
    "pp 2, interleaved": (2, lambda: FSDP2Strategy(pp_size=2, config=INTERLEAVED), {}),
    "pp 2 x dp 2": (4, lambda: FSDP2Strategy(pp_size=2), {"accumulate_grad_batches": 2}),
    "pp 2 x tp 2, SP": (4, lambda: FSDP2Strategy(pp_size=2, tp_size=2, config=SEQUENCE_PARALLEL), {}),
    "pp 4": (4, lambda: FSDP2Strategy(pp_size=4), {}),
}
TRAINED = Matrix(
    "simulated stages beside real ones",
    {
        "pp 2": {"pp": 2, "schedule": "1f1b"},
        "pp 2, GPipe": {"pp": 2, "schedule": "gpipe"},
        "pp 2, interleaved": {"pp": 2, "schedule": "interleaved_1f1b"},
        "pp 2 x dp 2": {"pp": 2, "schedule": "1f1b", "dp": 2, "accumulation": 2},
        "pp 2 x tp 2, SP": {"pp": 2, "schedule": "1f1b", "tp": 2, "recomputation": "full"},
        "pp 4": {"pp": 4, "schedule": "1f1b"},
    },
    whole=True,
)


def plan_stages(ranks: int, strategy: Any, **options: Any) -> list[tuple[RankPlan, list[Call], Simulation]]:
    """Simulate the first rank of each stage."""

    def plan_rank(rank: int, boundary: Any) -> tuple[RankPlan, list[Call], Simulation]:
        trainer = make_trainer(strategy(), **options)
        simulation = simulate(
            trainer, make_module(layers=4), make_batch(ROWS), world_size=ranks, rank=rank, boundary=boundary
        )
        calls = [(call.kind, len(call.group.ranks), call.bytes) for call in simulation.recording.collectives]
        return build_rank_plan(rank, simulation.recording, DEVICES["h100"], overlapped_axes=()), calls, simulation

    def run() -> list[tuple[RankPlan, list[Call], Simulation]]:
        first = plan_rank(0, None)
        size = ranks // strategy().pp_size
        return [first, *(plan_rank(rank, first[2].boundary) for rank in range(size, ranks, size))]

    return run_ranks(run, 1, group=False)[0]


def leave_out_numbers(calls: list[Call]) -> list[Call]:
    """Leave out the loss and the token counts, of which a stage learns from the last one."""
    return [call for call in calls if call[2] > 64]


@pytest.mark.guarantees("simulated-stages")
@pytest.mark.parametrize("name", [pytest.param(name, marks=TRAINED.mark(name)) for name in CASES])
def test_a_simulated_stage_is_that_of_processes_that_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_and_wait(self: Transfers, *args: Any, **options: Any) -> None:
        send(self, *args, **options)
        self.finish()

    # how long a tensor is on its way, in memory, depends on how fast the next rank is
    send = Transfers.send_known
    monkeypatch.setattr(Transfers, "send_known", send_and_wait)
    ranks, strategy, options = CASES[name]
    real = train_ranks(strategy, ranks, module={"layers": 4}, batch_size=ROWS, **options)
    for planned, calls, _ in plan_stages(ranks, strategy, **options):
        real_calls, added = real[planned.rank]
        assert leave_out_numbers(calls) == leave_out_numbers(real_calls)
        # the gradients of the step before are there when a step begins, and are freed before its peak
        kept = 2 * planned.peak[WEIGHTS] + planned.peak[OPTIMIZER_STATES]
        on_its_way = max(size for kind, _, size in calls if kind in TRANSFERS)
        assert planned.peak_bytes - kept == pytest.approx(added, rel=0.07, abs=on_its_way)

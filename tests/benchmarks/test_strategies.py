"""The benchmarks whose runs take turns, on two ranks and a few steps: their tables against counting by hand."""

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest
from helpers.ranks import run_ranks

from benchmarks import step_overhead, strategies
from benchmarks.strategies import DDP, FSDP2, LIGHTNING_DDP, MEGATRON_FSDP, MODEL_PARALLEL, NOT_RUN

FEW_STEPS = "--blocks 2 --steps 1 --warmup-steps 2 --counted-steps 2 --batch-size 1"
MIB = 2**20

# of configs/quickstart.yaml
VOCABULARY, WIDTH, KEY_VALUE_WIDTH, MLP_WIDTH, LAYERS = 257, 128, 64, 352, 4
LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * KEY_VALUE_WIDTH + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH
PARAMETERS = VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH


def run_script(main: Callable[[list[str]], None], arguments: str) -> list[dict[str, str]]:
    """The rows of all tables that rank 0 prints."""

    def run() -> str:
        with redirect_stdout(io.StringIO()) as output:
            main(arguments.split())
        return output.getvalue()

    report, other = run_ranks(run, 2)
    assert "losses of" in report
    assert "|" not in other
    rows: list[dict[str, str]] = []
    for table in report.split("\n\n"):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
        rows += [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
    return rows


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return run_script(strategies.main, f"{FEW_STEPS} --saves 2 --sequence-length 16")


@pytest.fixture(scope="module")
def runs(rows: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {row["strategy"]: row for row in rows if "strategy" in row}


@pytest.mark.slow
def test_every_strategy_has_a_row(runs: dict[str, dict[str, str]]) -> None:
    assert list(runs) == [FSDP2, MEGATRON_FSDP, DDP, LIGHTNING_DDP, MODEL_PARALLEL]
    assert [cell for cell in runs.pop(MEGATRON_FSDP).values() if cell] == [MEGATRON_FSDP, NOT_RUN]
    for row in runs.values():
        assert all(math.isfinite(float(cell)) for column, cell in row.items() if column != "strategy")
        assert min(float(row[column]) for column in ("wall ms", "CPU ms", "save ms")) > 0


TOLD = {FSDP2: 1, DDP: 1, MODEL_PARALLEL: 0, LIGHTNING_DDP: 0}
"""On the host, whether the job must end; Lightning has a broadcast for it."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP2, MODEL_PARALLEL])
def test_sharding_gathers_each_unit_and_scatters_its_gradients(runs: dict[str, dict[str, str]], strategy: str) -> None:
    # the embedding is tied to the head; they and the last layer stay gathered for backward
    units = LAYERS + 1
    assert float(runs[strategy]["all-gathers"]) == units + LAYERS - 1
    assert float(runs[strategy]["reduce-scatters"]) == units
    assert float(runs[strategy]["all-reduces"]) == TOLD[strategy]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DDP, LIGHTNING_DDP])
def test_replicas_reduce_each_bucket(runs: dict[str, dict[str, str]], strategy: str) -> None:
    # torch closes the first bucket at 1 MiB, the others at 25
    assert MIB < 4 * PARAMETERS < 25 * MIB
    assert float(runs[strategy]["all-reduces"]) == 2 + TOLD[strategy]
    assert float(runs[strategy]["all-gathers"]) == float(runs[strategy]["reduce-scatters"]) == 0


@pytest.mark.slow
def test_what_a_rank_holds(runs: dict[str, dict[str, str]]) -> None:
    replica = 4 * 4 * PARAMETERS / MIB  # float32 weights, gradients, two moments
    shares = {FSDP2: 2, MODEL_PARALLEL: 2, DDP: 1, LIGHTNING_DDP: 1}
    for strategy, share in shares.items():
        held = float(runs[strategy]["parameters, gradients and optimizer state MiB"])
        assert held == pytest.approx(replica / share, rel=0.01)
        # without the gradients
        assert 0.75 * replica < float(runs[strategy]["checkpoint MiB"]) < replica


@pytest.mark.slow
def test_ratios_are_of_like_to_like(rows: list[dict[str, str]]) -> None:
    ratios = [(row["ratio"], row["of"]) for row in rows if "ratio" in row]
    pairs = [(FSDP2, MODEL_PARALLEL), (DDP, LIGHTNING_DDP), (MODEL_PARALLEL, LIGHTNING_DDP)]
    assert ratios == [(f"{a} / {b}", measure) for a, b in pairs for measure in ("wall", "CPU", "save")]


@pytest.mark.slow
def test_sharding_by_hand_has_the_collectives_of_the_strategy() -> None:
    rows = run_script(step_overhead.main, f"{FEW_STEPS} --hidden-size 64")
    runs = [row for row in rows if "run" in row]
    # an embedding of its own, the layers, and the head
    units = 1 + LAYERS + 1
    assert [(row["all-gathers"], row["reduce-scatters"]) for row in runs] == [(f"{units + LAYERS - 1}", f"{units}")] * 3
    assert runs[0]["operations"] == runs[2]["operations"]
    assert [row["ratio"] for row in rows if "ratio" in row] == ["a/b", "a/b", "a/c", "a/c"]


@pytest.mark.parametrize(("option", "rule"), [("--warmup-steps", "2 or more"), ("--saves", "1 or more")])
def test_too_few_are_refused(option: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        strategies.main([option, "0"])
    assert f"{option} must be {rule}" in capsys.readouterr().err

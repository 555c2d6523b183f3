"""The benchmarks for one GPU run whole at toy size without one; their parts keep to a budget and lose nothing."""

import argparse
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cuda_on_cpu import cuda_on_cpu
from helpers.ranks import run_ranks

from benchmarks.gpu import attention_part, check, many, parity_part, speed
from benchmarks.gpu.arms import LIGHTNING_FSDP, Workload
from benchmarks.gpu.page import write_files
from benchmarks.gpu.parts import DONE, FAILED, LEFT_OUT, TOY, WAITING, Part, Table, part, run_parts
from lightning_fsdp2 import DDPStrategy

README = Path(__file__).parent.parent.parent / "benchmarks" / "README.md"


def read_parts(folder: Path, name: str) -> dict[str, Any]:
    return {part["name"]: part for part in json.loads((folder / f"{name}.json").read_text())["parts"]}


# ---------------------------------------------------------------------- the commands


@pytest.mark.timeout(600)  # more than four times as long as it takes alone
@pytest.mark.guarantees("gpu-commands")
@pytest.mark.parametrize(
    "parts",
    [
        ["attention", "waits"],
        pytest.param(
            ["plan-8b", "parity", "float8", "tests", "plan-8b-tp", "plan-70b", "plan-30b-a3b"], marks=pytest.mark.slow
        ),
    ],
    ids=["usual", "rest"],
)
def test_a_gpu_is_checked(parts: list[str], tmp_path: Path) -> None:
    with suppress(SystemExit):  # it tells the status alone
        check.main(["--scale", "toy", "--output", str(tmp_path), "--parts", *parts])
    found = read_parts(tmp_path, "gpu-check")
    assert {name: one["reason"] for name, one in found.items() if one["status"] != DONE} == {}
    assert sorted(found) == sorted(parts)
    page = (tmp_path / "gpu-check.md").read_text()
    assert f"torch {version('torch')}" in page
    assert all(f"| {name} | done |" in page for name in parts)


@pytest.mark.timeout(600)  # more than four times as long as it takes alone
@pytest.mark.guarantees("gpu-commands")
@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ["attention-kernels", "trace"],
        ["save", "baselines", "experts", "float8-speed", "pipeline", "baselines-8b", "options", "offload"],
    ],
    ids=["usual", "rest"],
)
def test_speed_is_measured(parts: list[str], tmp_path: Path, compile_without_code: None) -> None:
    with suppress(SystemExit):
        speed.main(["--scale", "toy", "--rounds", "2", "--output", str(tmp_path), "--parts", *parts])
    found = read_parts(tmp_path, "gpu-speed")
    assert {name: one["reason"] for name, one in found.items() if one["status"] != DONE} == {}
    assert all(one["tables"][0]["rows"] for one in found.values())
    if "trace" in parts:
        assert list(tmp_path.glob("step*.json.gz"))


@pytest.mark.guarantees("decisions-of-parts")
def test_every_part_is_documented_and_says_what_it_decides() -> None:
    text = README.read_text()
    for one in (*check.PARTS, *speed.PARTS):
        assert f"`{one.name}`" in text
        assert one.purpose


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--parts", "fast"], "invalid choice: 'fast'"), (["--budget", "0"], "give a number of seconds > 0")],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check.main([*arguments, "--output", str(tmp_path)])
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- parts


def run_toys(parts: Sequence[Part], folder: Path, budget: float = 60) -> tuple[bool, dict[str, Any]]:
    args = argparse.Namespace(scale=TOY, output=folder, budget=budget)
    succeeded = run_parts(parts, args, partial(write_files, "Toy", args))
    return succeeded, read_parts(folder, "toy")


@part("good", toy=1, real=1)
def good(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Nothing."""
    yield [Table("A table", ("name", "value"), [["one", 1.0]])]


@part("failing", toy=1, real=1)
def failing(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Nothing."""
    yield from good.run(args)
    raise ValueError("of the toy")


@part("reading", toy=1, real=1)
def reading(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """What is on the page while it runs."""
    yield [Table("Status", ("status",), [[part["status"]] for part in read_parts(args.output, "toy").values()])]


@part("endless", toy=0.1, real=1)
def endless(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Nothing."""
    yield from good.run(args)
    time.sleep(600)


@part("long", toy=100, real=1)
def long(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Nothing."""
    raise AssertionError("started")
    yield


@pytest.mark.guarantees("decisions-of-parts")
def test_a_part_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    succeeded, found = run_toys([failing, good], tmp_path)
    assert not succeeded
    assert found["failing"]["status"] == FAILED
    assert found["failing"]["reason"].endswith("ValueError: of the toy")
    assert found["failing"]["tables"] == found["good"]["tables"] != []
    assert found["good"]["status"] == DONE
    assert "ValueError: of the toy" in (tmp_path / "toy.md").read_text()
    assert "ValueError: of the toy" in (tmp_path / "failing.log").read_text()


@pytest.mark.guarantees("budgets")
def test_no_part_is_started_that_cannot_end_within_the_budget(tmp_path: Path) -> None:
    succeeded, found = run_toys([long, good], tmp_path)
    assert succeeded
    assert found["long"]["status"] == LEFT_OUT
    assert "takes up to 100 s, and of the budget 60 s are left" in found["long"]["reason"]
    assert found["good"]["status"] == DONE


def test_a_part_that_takes_longer_is_stopped_and_keeps_what_it_has(tmp_path: Path) -> None:
    started = time.monotonic()
    succeeded, found = run_toys([endless, good], tmp_path, budget=3)
    assert time.monotonic() - started < 60
    assert not succeeded
    assert found["endless"]["status"] == FAILED
    assert "the budget ended" in found["endless"]["reason"]
    assert len(found["endless"]["tables"]) == 1
    assert found["good"]["status"] == LEFT_OUT


def test_the_page_is_complete_after_every_part(tmp_path: Path) -> None:
    _, found = run_toys([good, reading, failing], tmp_path)
    first, _, last = found["reading"]["tables"][0]["rows"]
    assert (first, last) == ([DONE], [WAITING])
    assert not list(tmp_path.glob("*.tmp"))


def test_a_part_that_dies_is_a_failure(tmp_path: Path) -> None:
    @part("dying", toy=1, real=1)
    def dying(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
        """Nothing."""
        yield from good.run(args)
        os._exit(3)

    succeeded, found = run_toys([dying], tmp_path)
    assert not succeeded
    assert found["dying"]["reason"] == "its process died (exit code 3)"


def test_a_part_for_gpus_alone_is_left_out(tmp_path: Path) -> None:
    succeeded, found = run_toys([part("cuda", toy=1, real=1, needs_cuda=True)(good.run)], tmp_path)
    assert succeeded
    assert (found["cuda"]["status"], found["cuda"]["reason"]) == (LEFT_OUT, "needs CUDA")


# ---------------------------------------------------------------------- what a check would see


def test_wrong_attention_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attend = attention_part.attend

    def attend_wrongly(*inputs: Any, **options: Any) -> Any:
        output, normalizer = attend(*inputs, **options)
        return output * 1.1, normalizer

    monkeypatch.setattr(attention_part, "attend", attend_wrongly)
    succeeded, found = run_toys([check.compare_attention], tmp_path, budget=600)
    assert not succeeded
    assert "More than 1.25 times the distance" in found["attention"]["reason"]
    assert "['attend', 'causal', 'equal', None, 1]" in found["attention"]["reason"]
    assert "block_attention" not in found["attention"]["reason"]


def test_wrong_gradients_are_seen() -> None:
    right = 1.0, {"a": torch.ones(2), "b": torch.zeros(2)}
    assert parity_part.compare(right, right) == (0, 0)
    loss, gradients = parity_part.compare((1.5, {"a": torch.ones(2) + 1e-4, "b": torch.zeros(2)}), right)
    assert loss == 0.5
    assert gradients == pytest.approx(1e-4 / (1e-5 + 1e-7), rel=1e-2)
    assert parity_part.compare((1.0, {**right[1], "b": torch.full((2,), 2e-7)}), right)[1] == pytest.approx(2)


@pytest.mark.slow
def test_rows_of_megatron_fsdp_are_equal_with_a_stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = {name: layout for name, layout in parity_part.LAYOUTS.items() if layout.is_megatron}
    monkeypatch.setattr(parity_part, "LAYOUTS", layouts)
    with cuda_on_cpu():
        *_, [table] = check.compare_with_one_process.run(argparse.Namespace(scale=TOY, ranks=4))
    assert [row[:2] for row in table.rows] == [[name, "equal"] for name in layouts]
    assert any(layout.sizes == {"tp_size": 2} for layout in layouts.values())


# ---------------------------------------------------------------------- many ranks, and other strategies

TINY = (
    "--rounds 1 --warmup-steps 1 --blocks 2 --steps 1 --hidden-size 32 --head-size 8 --layers 2 --vocab-size 101"
    " --batch-size 1 --sequence-length 16"
)


def run_many(*arguments: str, ranks: int = 1, context: Any = nullcontext) -> tuple[str, str | int | None]:
    """The first rank's report, and with what the script ends."""

    def run() -> tuple[str, str | int | None]:
        code = None
        with redirect_stdout(io.StringIO()) as output, context():
            try:
                many.main([*TINY.split(), *arguments])
            except SystemExit as ended:
                code = ended.code
        return output.getvalue(), code

    return run_ranks(run, ranks)[0]


def read_rows(report: str) -> list[str]:
    return [line.split(" | ")[0].removeprefix("| ") for line in report.splitlines() if line.startswith("| ")]


@pytest.mark.slow
def test_every_arm_has_a_row(compile_without_code: None) -> None:
    report, code = run_many(ranks=2)
    assert code is None
    names = [name for name in many.ARMS if name != LIGHTNING_FSDP]
    assert read_rows(report) == ["arm", "---", *names, f"{LIGHTNING_FSDP}: needs CUDA"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron_fsdp"])
def test_a_strategy_is_compared_with_fsdp2_under_tensor_parallelism(strategy: str) -> None:
    report, code = run_many(
        *("--strategy", strategy, "--tp-size", "2", "--rounds", "2", "--head-size", "4"), ranks=4, context=cuda_on_cpu
    )
    assert code is None
    assert read_rows(report) == ["arm", "---", "FSDP2Strategy", strategy]
    assert "1 x 16 tokens, bf16-mixed, tp_size 2" in report


@pytest.mark.slow
def test_expert_parallelism_is_compared_with_fsdp2() -> None:
    report, code = run_many("--strategy", "fsdp2", "--ep-size", "2", "--rounds", "2", ranks=2)
    assert code is None
    assert read_rows(report) == ["arm", "---", "FSDP2Strategy", "fsdp2"]
    assert "mixture of 8 experts" in report


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_pipelines_are_compared_with_fsdp2(schedule: str) -> None:
    sizes = ("--pp-size", "2", "--pp-schedule", schedule, "--layers", "4")
    report, code = run_many("--strategy", "fsdp2", *sizes, "--rounds", "2", ranks=4)
    assert code is None
    assert read_rows(report) == ["arm", "---", "FSDP2Strategy", "fsdp2"]


class WrongStrategy(DDPStrategy):
    """Steps as if the learning rate were another."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 3e-4
        return super().optimizer_step(optimizer, *args, **kwargs)


@pytest.mark.guarantees("losses-of-two-strategies")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_strategy_is_compared_with_fsdp2(strategy: str) -> None:
    report, code = run_many("--strategy", strategy, "--rounds", "2")
    assert code is None
    assert read_rows(report) == ["arm", "---", "FSDP2Strategy", strategy]
    assert "in 5 steps" in report
    assert ("differ from them by 0.00e+00" in report) == (strategy == "fsdp2")


@pytest.mark.guarantees("losses-of-two-strategies")
@pytest.mark.slow
def test_other_losses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(many.COMPARED, "ddp", WrongStrategy)
    report, code = run_many("--strategy", "ddp", "--rounds", "2")
    assert "differ from them by" in report
    assert code == "The losses differ by more than twice the noise of bfloat16."


def test_a_comparison_takes_more_steps() -> None:
    assert many.parse_args([]).blocks == 3
    assert many.parse_args(["--strategy", "ddp"]).blocks == 12
    assert many.parse_args(["--strategy", "ddp", "--blocks", "2"]).blocks == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "fsdp"], "invalid choice: 'fsdp'"),
        (["--strategy", "ddp", "--arms", "compiled"], "not allowed with"),
        (["--arms", "fast"], "invalid choice: 'fast'"),
        (["--strategy", "megatron_fsdp"], "needs a CUDA device"),
        (["--strategy", "ddp", "--tp-size", "2"], "--tp-size 2 needs --strategy fsdp2 or megatron_fsdp"),
        (["--strategy", "ddp", "--ep-size", "2"], "--ep-size 2 needs --strategy fsdp2"),
        (["--strategy", "ddp", "--pp-size", "2"], "--pp-size 2 needs --strategy fsdp2"),
        (["--tp-size", "2"], "--tp-size 2 needs --strategy fsdp2 or megatron_fsdp"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        many.main(arguments)
    assert message in capsys.readouterr().err


def test_tensor_parallel_ranks_read_the_same_batches() -> None:
    def run() -> list[int]:
        workload = many.build_workload(many.parse_args([*TINY.split(), "--strategy", "fsdp2", "--tp-size", "2"]))
        return next(iter(workload.make_batches()))["input_ids"].flatten().tolist()

    first, second, third, fourth = run_ranks(run, 4)
    assert first == second != third == fourth


def test_the_ranks_of_a_pipeline_read_the_batches_of_as_many_ranks() -> None:
    def run() -> list[list[list[int]]]:
        workload = many.build_workload(many.parse_args([*TINY.split(), "--strategy", "fsdp2", "--pp-size", "2"]))
        loaders = (workload.make_batches(), replace(workload, pp_size=2).make_batches())
        return [next(iter(loader))["input_ids"].tolist() for loader in loaders]

    alone, piped = zip(*run_ranks(run, 4), strict=True)
    assert piped[0] == piped[2] == [*alone[0], *alone[1]]
    assert piped[1] == piped[3] == [*alone[2], *alone[3]]


def test_batches_of_a_comparison_repeat() -> None:
    def run() -> list[bool]:
        workload = many.build_workload(many.parse_args([*TINY.split(), "--strategy", "ddp", "--blocks", "5"]))
        assert isinstance(workload, Workload)
        batches = [batch["input_ids"] for batch in workload.make_batches()]
        return [bool((batch == batches[0]).all()) for batch in batches]

    assert run_ranks(run, 1) == [[True, False, False, False, True, False, False, False]]

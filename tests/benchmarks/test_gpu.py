"""The benchmark for GPUs runs at toy size without one."""

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks

from benchmarks import gpu
from lightning_fsdp2 import DDPStrategy

TOY = "--rounds 1 --warmup-steps 1 --steps 2 --hidden-size 32 --head-size 8 --layers 2 --vocab-size 101 --batch-size 1"


@pytest.mark.slow
def test_every_variant_has_a_row_and_the_flops_are_those_of_the_products(compile_without_code: None) -> None:
    def run() -> str:
        with redirect_stdout(io.StringIO()) as output:
            gpu.main([*TOY.split(), "--sequence-length", "16"])
        return output.getvalue()

    report = run_ranks(run, 1)[0]
    rows = [line.split(" | ")[0] for line in report.splitlines() if line.startswith("| ")]
    assert rows == ["| variant", *(f"| {name}" for name in gpu.VARIANTS if name != "FSDPStrategy")]
    assert "FSDPStrategy needs a GPU" in report


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--variants", "fast"])
    assert "invalid choice: 'fast'" in capsys.readouterr().err


def test_flops_of_a_token() -> None:
    args = gpu.parse_args([*TOY.split(), "--sequence-length", "16"])
    layer = 2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 128 + 2 * 32
    expected = 6 * (2 * layer + 101 * 32 + 32) + 12 * 2 * 32 * 16
    assert gpu.count_flops_per_token(gpu.make_config(args), 16) == expected


class WrongStrategy(DDPStrategy):
    """Steps as if the learning rate were another."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 3e-4
        return super().optimizer_step(optimizer, *args, **kwargs)


def run_comparison(strategy: str) -> tuple[str, str | int | None]:
    """The report, and with what the script ends."""

    def run() -> tuple[str, str | int | None]:
        code = None
        with redirect_stdout(io.StringIO()) as output:
            try:
                gpu.main([*TOY.split(), "--sequence-length", "16", "--strategy", strategy, "--rounds", "2"])
            except SystemExit as ended:
                code = ended.code
        return output.getvalue(), code

    return run_ranks(run, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_strategy_is_compared_with_fsdp2(strategy: str) -> None:
    report, code = run_comparison(strategy)
    assert code is None
    rows = [line.split(" | ")[0] for line in report.splitlines() if line.startswith("| ")]
    assert rows == ["| strategy", "| FSDP2Strategy", f"| {strategy}"]
    assert "in 4 steps" in report
    assert ("differ from them by 0.00e+00" in report) == (strategy == "fsdp2")


@pytest.mark.slow
def test_other_losses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.COMPARED, "ddp", WrongStrategy)
    report, code = run_comparison("ddp")
    assert "differ from them by" in report
    assert code == "The losses differ by more than twice the noise of bfloat16."


def test_a_comparison_takes_50_steps() -> None:
    assert gpu.parse_args([]).steps == 10
    assert gpu.parse_args(["--strategy", "ddp"]).steps == 50
    assert gpu.parse_args(["--strategy", "ddp", "--steps", "3"]).steps == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "fsdp"], "invalid choice: 'fsdp'"),
        (["--strategy", "ddp", "--variants", "compile"], "not allowed with"),
        (["--strategy", "megatron_fsdp"], "needs a CUDA device"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert message in capsys.readouterr().err


def test_batches_of_a_comparison_repeat() -> None:
    def run() -> list[bool]:
        args = gpu.parse_args([*TOY.split(), "--sequence-length", "16", "--strategy", "ddp", "--steps", "6"])
        batches = [batch["input_ids"] for batch in gpu.make_batches(args)]
        return [bool((batch == batches[0]).all()) for batch in batches]

    assert run_ranks(run, 1) == [[True, False, False, False, True, False, False, False]]

"""The benchmark for GPUs runs at toy size without one."""

import io
from contextlib import redirect_stdout

import pytest
from helpers.ranks import run_ranks

from benchmarks import gpu

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

"""Check on a GPU that the package works there as on CPUs: tests, attention, waits, plans and parity with one process.

Each part runs in a separate process. The page ``gpu-check.md`` and the file ``gpu-check.json`` in the output folder are
complete after every part. The logs of the parts are in the same folder.

    python -m benchmarks.gpu.check --budget 1500
    python -m benchmarks.gpu.check --parts attention waits
"""

from collections.abc import Sequence

from benchmarks.gpu.attention_part import compare_attention
from benchmarks.gpu.command import build_parser, run
from benchmarks.gpu.float8_part import check_float8
from benchmarks.gpu.parity_part import compare_with_one_process
from benchmarks.gpu.plan_parts import compare_8b, compare_8b_tp, compare_30b_a3b, compare_70b
from benchmarks.gpu.pytest_part import run_tests
from benchmarks.gpu.waits_part import count_waits

PARTS = (
    compare_attention,
    count_waits,
    compare_8b,
    compare_with_one_process,
    check_float8,
    run_tests,
    compare_30b_a3b,
    compare_8b_tp,
    compare_70b,
)
"""Parts in the order of their importance."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and exit with 1 if one fails."""
    parser = build_parser(__doc__, PARTS, "gpu-check")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="processes of the parity part; default: 2")
    run("GPU check", PARTS, parser, arguments)


if __name__ == "__main__":
    main()

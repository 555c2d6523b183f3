"""Whether what runs on CPUs is right on a GPU: its tests, attention, waits, plans, and ranks beside one process.

Each part runs in a process of its own. The page and the JSON file in the output folder are complete after every part;
their names are ``gpu-check.md`` and ``gpu-check.json``. Beside them are the logs of the parts.

    python -m benchmarks.gpu.check --budget 1500
    python -m benchmarks.gpu.check --parts attention waits
"""

from collections.abc import Sequence

from benchmarks.gpu.attention_part import compare_attention
from benchmarks.gpu.command import build_parser, run
from benchmarks.gpu.parity_part import compare_with_one_process
from benchmarks.gpu.plan_parts import compare_8b, compare_8b_tp, compare_70b
from benchmarks.gpu.pytest_part import run_tests
from benchmarks.gpu.waits_part import count_waits

PARTS = (
    compare_attention,
    count_waits,
    compare_8b,
    compare_with_one_process,
    run_tests,
    compare_8b_tp,
    compare_70b,
)
"""What decides most comes first."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts; exit with 1 when one fails."""
    parser = build_parser(__doc__, PARTS, "gpu-check")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="processes of parity; default: 2")
    run("GPU check", PARTS, parser, arguments)


if __name__ == "__main__":
    main()

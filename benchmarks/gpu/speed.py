"""Measure training speed on one GPU, against a hand-written loop and Lightning's strategies, and with each option.

Each part runs in a separate process. The page ``gpu-speed.md`` and the file ``gpu-speed.json`` in the output folder are
complete after every part, and after every round of a part.

    python -m benchmarks.gpu.speed --budget 1500
    python -m benchmarks.gpu.speed --parts baselines trace
"""

from collections.abc import Sequence

from benchmarks.gpu.arm_parts import compare_baselines, compare_baselines_8b, compare_offload, compare_options
from benchmarks.gpu.command import build_parser, run
from benchmarks.gpu.experts_part import compare_experts
from benchmarks.gpu.float8_part import compare_float8
from benchmarks.gpu.kernel_part import compare_kernels
from benchmarks.gpu.pipeline_part import compare_micro_batches
from benchmarks.gpu.save_part import compare_saves
from benchmarks.gpu.trace_part import write_trace

PARTS = (
    compare_baselines,
    compare_kernels,
    compare_experts,
    compare_float8,
    compare_micro_batches,
    write_trace,
    compare_options,
    compare_baselines_8b,
    compare_saves,
    compare_offload,
)
"""Parts in the order of their importance."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and exit with 1 if one fails."""
    parser = build_parser(__doc__, PARTS, "gpu-speed")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm and kernel; default: 3")
    run("GPU speed", PARTS, parser, arguments)


if __name__ == "__main__":
    main()

"""Part that runs the project's tests on a GPU."""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.parts import TOY, Table, part

ROOT = Path(__file__).parent.parent.parent
TOY_TESTS = ("tests/parallel/context/test_block_attention.py", "tests/strategies/test_offload.py")
"""Test files at toy size, which are enough to see that tests are found and counted."""


@part("tests", toy=120, real=300)
def run_tests(args: argparse.Namespace) -> Iterator[Sequence[Table]]:
    """Run the tests marked `gpu`, which need a GPU. Each failure is a bug to fix first."""
    report = args.output / "tests.xml"
    paths = TOY_TESTS if args.scale == TOY else ("tests",)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report.resolve()}"]
    code = subprocess.run([*command, *paths], cwd=ROOT, check=False).returncode
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    yield [Table("Tests marked `gpu`", list(counts), [list(counts.values())])]
    if code:
        raise ValueError(f"pytest ended with {code}; what it said is in tests.log.")

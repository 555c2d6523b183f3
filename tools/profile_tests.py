"""Measure what the tests of some files spend their time on: ``python tools/profile_tests.py tests/test_parity.py``.

Arguments are those of pytest. The table has a row for each file, in processor seconds of all processes of its tests.
Time inside another part counts there only: what is compiled during a step is not in the steps.
"""

import functools
import importlib.machinery
import inspect
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  imports everything before anything is measured
import pytest
import torch._dynamo.convert_frame
from helpers import models, ranks
from helpers.fork_server import FORKED_SECONDS
from helpers.results import get_processor_seconds
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _PredictionLoop
from lightning.pytorch.trainer import call
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

MEASURED = {
    "imports": [(importlib.machinery.SourceFileLoader, "exec_module")],
    "models": [(models, "make_causal_lm"), (PreTrainedModel, "_from_config"), (PreTrainedModel, "from_pretrained")],
    "set-up": [(call, "_call_setup_hook"), (call, "_call_configure_model")],
    "compile": [(torch._dynamo.convert_frame.ConvertFrameAssert, "__call__")],
    "steps": [(loop, "run") for loop in (_FitLoop, _EvaluationLoop, _PredictionLoop)],
}
"""The functions that do each part."""

REAL = "real processes"
WAITING = "waiting"
"""Wall time beyond the processor time. It is the least that a test can have waited, as its ranks run side by side."""


class Profile:
    """A pytest plugin that sums up the parts. Forked ranks write theirs to the same file.

    Args:
        path: A file for the measurements of all processes.
    """

    def __init__(self, path: Path) -> None:
        self.output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.input = path.open()
        self.within: list[float] = []
        """For each measured function that runs, the time of others that it has called."""
        self.seconds: dict[str, Counter[str]] = defaultdict(Counter)
        for part, functions in MEASURED.items():
            for owner, name in functions:
                self.measure(part, owner, name)
        self.measure_ranks()

    def measure(self, part: str, owner: Any, name: str) -> None:
        """Replace a function by one that writes how long it took."""
        found = inspect.getattr_static(owner, name)
        function = found.__func__ if isinstance(found, classmethod) else found

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            self.within.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.process_time() - start
                self.write(part, whole - self.within.pop())
                if self.within:
                    self.within[-1] += whole

        setattr(owner, name, classmethod(measured) if isinstance(found, classmethod) else measured)

    def measure_ranks(self) -> None:
        """Let each forked rank write what it used in all, so that the rest of the children are real processes."""
        write_result = ranks._write_result

        def measured(path: Path, data: bytes) -> None:
            self.write("ranks", sum(os.times()[:4]))
            write_result(path, data)

        ranks._write_result = measured

    def write(self, part: str, seconds: float) -> None:
        os.write(self.output, f"{json.dumps([part, seconds])}\n".encode())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        wall, own, every = time.monotonic(), time.process_time(), get_processor_seconds()
        result = yield
        wall, own, every = time.monotonic() - wall, time.process_time() - own, get_processor_seconds() - every
        parts: Counter[str] = Counter()
        for line in self.input:
            part, seconds = json.loads(line)
            parts[part] += seconds
        parts[REAL] = max(0.0, every - own - parts.pop("ranks", 0.0))
        parts["others"] = max(0.0, every - sum(parts.values()))
        parts[WAITING] = max(0.0, wall - every)
        self.seconds[item.path.relative_to(item.config.rootpath).as_posix()] += parts
        return result

    def print_table(self) -> None:
        columns = [REAL, *MEASURED, "others", WAITING]
        table = Table("file", *columns, "all", title="processor seconds, and seconds of waiting")
        total: Counter[str] = Counter()
        for name, parts in sorted(self.seconds.items(), key=lambda item: -sum(item[1].values())):
            total += parts
            table.add_row(name, *describe(parts, columns))
        table.add_row("all", *describe(total, columns))
        Console(width=None if sys.stdout.isatty() else 140).print(table)


def describe(parts: Counter[str], columns: list[str]) -> list[str]:
    """Return the cells of a row: each part, and all parts together."""
    return [f"{parts[name]:.1f}" for name in columns] + [f"{sum(parts.values()):.1f}"]


def main(arguments: list[str]) -> int:
    """Run pytest, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        forked = Path(folder) / "forked"
        forked.touch()
        os.environ[FORKED_SECONDS] = str(forked)
        profile = Profile(Path(folder) / "parts.jsonl")
        status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[profile])
    profile.print_table()
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

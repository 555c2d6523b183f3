"""Break one line of the package at a time, and see whether the tests beside it notice.

It works on a copy of the last commit. The tests that mirror a file run first, of these the ones that reach the broken
line. If none fails, further tests that reach the file run for as long as `--others` allows. Tests that are marked
`slow` or `release` do not run. A test that fails on the unbroken copy too has noticed nothing. Results are kept in the
folder `.mutants`, and an interrupted run goes on. With `--again`, all tests that mirror the file and reach it run for
the lines that nobody noticed, or for those with another `--outcome`.

    python tools/mutate.py lightning_fsdp2/ranks lightning_fsdp2/mesh.py --count 50
    python tools/mutate.py lightning_fsdp2/ranks --again --outcome mirror --outcome hang
    python tools/mutate.py --summary
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import benchmarks.gpu  # noqa: F401  first, since it keeps transformers from importing torchao, which starts CUDA

# isort: split
import pytest
from helpers import reach
from helpers.ledger import Ledger, hold
from helpers.line_trace import FirstFailure, LineTracer
from helpers.reach import PACKAGE, ROOT

from tools.mutants import Mutant, find_mutants, sample

FOLDER = ROOT / ".mutants"
OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not release")
PATIENCE = 8
"""Factor by which tests may exceed their usual time; beyond it the mutant counts as noticed."""

HANG_SECONDS = 60
"""Time that tests always have."""

OUTCOMES = {
    "mirror": "noticed by mirror",
    "hang": "by a hang",
    "other": "by others",
    "equal": "equal",
    "survived": "survived",
}
"""Heads of the columns of a summary. Outcomes that were noted by hand have columns of their own name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants, or list them or what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders of the package")
    parser.add_argument("--count", type=int, default=50, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--others", type=float, default=0.0, help="seconds for tests beyond those that mirror the file")
    parser.add_argument("--again", action="store_true", help="try once more those with an outcome")
    parser.add_argument("--outcome", action="append", help="the outcome for --again, survived by default")
    parser.add_argument("--equal", nargs=2, metavar=("NAME", "REASON"), help="note that a survivor changes nothing")
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    parser.add_argument("--summary", action="store_true", help="show what was found and try none")
    options = parser.parse_args(arguments)
    ledger = Ledger(FOLDER / "results.jsonl")
    if options.equal:
        name, reason = options.equal
        ledger.add(name, **{**ledger.results[name], "outcome": "equal", "reason": reason})
    elif options.summary:
        print(summarise(ledger))
    elif options.list:
        for mutant, source in choose(ROOT, options.paths, options.count, options.seed):
            print(f"{mutant.file}:{mutant.line} {mutant.operator}\n{mutant.diff(source)}")
    else:
        with hold(FOLDER):
            try_all(Workplace(FOLDER / "copy"), ledger, options)
        print(summarise(ledger))
    return 0


def choose(root: Path, paths: Sequence[str], count: int, seed: int) -> list[tuple[Mutant, bytes]]:
    """Return a sample of the mutants of files and folders, each with the source of its file."""
    found = [root / path for path in paths]
    files = sorted(file for path in found for file in ([path] if path.is_file() else path.rglob("*.py")))
    sources = {str(file.relative_to(root)): file.read_bytes() for file in files}
    mutants = {file: find_mutants(file, source) for file, source in sources.items()}
    return [(mutant, sources[mutant.file]) for mutant in sample(mutants, count, seed)]


def try_all(workplace: "Workplace", ledger: Ledger, options: argparse.Namespace) -> None:
    """Try each mutant that the ledger does not know yet."""
    for mutant, source in choose(workplace.copy, options.paths, options.count, options.seed):
        name = mutant.get_name(source)
        outcome = ledger.results.get(name, {}).get("outcome")
        if outcome is not None and not (options.again and outcome in (options.outcome or ["survived"])):
            continue
        start = time.monotonic()
        result = workplace.try_mutant(mutant, options.others, is_thorough=options.again)
        seconds = round(time.monotonic() - start, 1)
        ledger.add(name, line=mutant.line, diff=mutant.diff(source), seconds=seconds, **result)
        print(f"{result['outcome']:10} {mutant.file}:{mutant.line} {result.get('test', '')}", flush=True)


@cache
def list_mirrors(root: Path, file: str) -> list[str]:
    """Return the test files beside a file of the package, of which the first should notice a mutant.

    They are that of the same name, and those of the same folder that import the file. Without any, they are three:
    of those that import it, wherever they are, the shortest; otherwise of the mirrors of the files of the package that
    import it; and otherwise of those that reach it and little else. There are none if no test reaches the file.

    So there can be more than the one of the same name, whether it exists or not, that ``tools.changes.get_mirror``
    returns to order what a change can reach.
    """
    module = Path(file).with_suffix("") if Path(file).name != "__init__.py" else Path(file).parent
    folder = Path("tests") / module.parent.relative_to(PACKAGE)
    importing = list_importing(root, "tests", module, "test_*.py")
    found = [test for test in importing if test.parent == folder]
    if (root / (same := folder / f"test_{module.name}.py")).exists():
        found = [same, *(test for test in found if test != same)]
    if found or importing:
        importing.sort(key=lambda test: (root / test).stat().st_size)
        return [str(test) for test in found or importing[:3]]
    users = list_importing(root, PACKAGE, module, "*.py")
    beside = [user for user in users if user.parent == module.parent]
    mirrors = [mirror for user in beside or users for mirror in list_mirrors(root, str(user))]
    return list(dict.fromkeys(mirrors or list_reaching(root, file)))[:3]


def list_importing(root: Path, folder: str, module: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that import a module of the package."""
    parent = r"\.".join(module.parent.parts)
    imports = re.compile(rf"^ *from {parent}(\.{module.name} import |\s+import [^\n]*\b{module.name}\b)", re.MULTILINE)
    files = sorted((root / folder).rglob(pattern))
    return [file.relative_to(root) for file in files if imports.search(file.read_text())]


def list_reaching(root: Path, file: str) -> list[str]:
    """Return the test files that reach a file of the package, those first that reach few files."""
    reaches = {test: reach.find_reach(test) for test in (root / "tests").rglob("test_*.py")}
    reaching = [test for test, reached in reaches.items() if root / file in reached]
    return [str(test.relative_to(root)) for test in sorted(reaching, key=lambda test: len(reaches[test]))]


def summarise(ledger: Ledger) -> str:
    """Return a table of the outcomes in each folder, and the survivors."""
    counts: dict[str, Counter[str]] = {}
    survivors = ""
    for name, result in sorted(ledger.results.items()):
        file, operator, _ = name.split(":")
        counts.setdefault(str(Path(file).parent), Counter())[result["outcome"]] += 1
        if result["outcome"] not in ("mirror", "hang"):
            note = result.get("reason") or result.get("test", "")
            survivors += (
                f"\n{result['outcome']}: {file}:{result['line']} ({operator}) {note}\n{name}\n{result['diff']}\n"
            )
    total = sum(counts.values(), Counter())
    columns = OUTCOMES | {outcome: outcome for outcome in sorted(total) if outcome not in OUTCOMES}
    rows = [(folder, *(str(count[outcome]) for outcome in columns)) for folder, count in counts.items()]
    rows.append(("all", *(str(total[outcome]) for outcome in columns)))
    head = [("folder", *columns.values()), ("---", *len(columns) * ("--:",))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (*head, *rows)) + f"\n{survivors}"


class Workplace:
    """A copy of the last commit, and this process, which has imported the libraries that tests need.

    Args:
        copy: Folder of the copy.
    """

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        self.traces = Ledger(copy.parent / "traces.jsonl")
        subprocess.run(["rm", "-rf", copy], check=True)
        copy.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], cwd=copy, input=archive.stdout, check=True)
        reach.ROOT = copy  # the tests of the copy run, and the checkout may be another one by now
        reach.forget()
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        report = copy.parent / "libraries.json"
        self.fork(lambda: report.write_text(json.dumps(list_libraries(copy))) and 0, 600, is_quiet=False)
        for name in json.loads(report.read_text()):
            try:
                importlib.import_module(name)
            except Exception:  # one that only its own package can import
                continue
        gc.freeze()

    def try_mutant(self, mutant: Mutant, others: float, *, is_thorough: bool) -> dict[str, Any]:
        """Run tests on the copy with one line broken, until one notices."""
        mirrors = list_mirrors(self.copy, mutant.file)
        reaching = list_reaching(self.copy, mutant.file) if others else []
        traces = [self.trace(test, mutant.file) for test in mirrors]
        start = max((trace["start"] for trace in traces), default=0.0)
        passing = {test: result for trace in traces for test, result in trace["tests"].items()}
        first, last = mutant.reached_by
        quickest = sorted(passing, key=lambda test: passing[test][0])
        lines = {test: found for test in quickest if (found := passing[test][1].get(mutant.file))}
        chosen = [test for test, found in lines.items() if any(first <= line <= last for line in found)]
        # the rest may look at what a test that reaches the line has left behind
        rest = [test for test in lines if test not in chosen] if is_thorough else []
        for tests in (chosen, rest):
            seconds = start + sum(passing[test][0] for test in tests)
            if noticed := self.run_broken(mutant, tests, HANG_SECONDS + PATIENCE * seconds):
                return {"outcome": "hang" if noticed == "hang" else "mirror", "test": noticed}
        deadline = time.monotonic() + others
        for test in reaching:
            if test not in mirrors and (left := deadline - time.monotonic()) > 0:
                noticed = self.run_broken(mutant, [test], left)
                if noticed not in (None, "hang"):  # in which case there may have been too little time
                    return {"outcome": "other", "test": noticed}
        return {"outcome": "survived"}

    def run_broken(self, mutant: Mutant, tests: Sequence[str], limit: float) -> str | None:
        """Run tests with one line broken, and return which one failed, or "hang", or None.

        What failed runs once more on the copy as it is. If it fails there too, the others decide.
        """
        while tests:
            with self.broken(mutant):
                noticed = self.run(tests, limit)
            # of a hang or a dead process it is not known which test it was
            suspects = [noticed] if noticed and "::" in noticed else tests
            if noticed is None or self.run(suspects, limit) is None:
                return noticed
            files = {test.partition("::")[0] for test in suspects}
            tests = [test for test in tests if test not in suspects and test not in files]
        return None

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """Change a file of the copy, and change it back; what was compiled of it before is valid again then."""
        file = self.copy / mutant.file
        source, times = file.read_bytes(), file.stat()
        try:
            file.write_bytes(mutant.apply(source))
            yield
        finally:
            file.write_bytes(source)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Sequence[str], limit: float) -> str | None:
        """Run tests and return which one failed, or "hang", or None."""
        report = self.copy.parent / "failed.txt"
        report.unlink(missing_ok=True)
        sys.dont_write_bytecode = True
        status = self.fork(lambda: pytest.main([*OPTIONS, *tests], plugins=[FirstFailure(report)]), limit)
        sys.dont_write_bytecode = False
        if status in (0, "hang"):
            return status or None
        if report.exists():
            return report.read_text()
        output = (self.copy.parent / "output.log").read_text(errors="replace")
        if status < 0 or "while loading conftest" in output:
            return f"pytest ended with {status}"
        raise RuntimeError(f"pytest ended with {status}, but no test failed:\n{output[-4000:]}")

    def trace(self, test_file: str, file: str) -> dict[str, Any]:
        """Return, for each test that passes, its seconds and the lines that it reaches, and the seconds before all."""
        reached = {str(path.relative_to(self.copy)) for path in reach.find_reach(self.copy / test_file)} | {file}
        names = {*reached, *(str(path.relative_to(self.copy)) for path in (self.copy / PACKAGE).rglob("*.py"))}
        contents = {name: hashlib.sha256((self.copy / name).read_bytes()).hexdigest()[:8] for name in names}
        known = self.traces.results.get(test_file, {"contents": {}})["contents"]
        if any(known.get(name) != contents[name] for name in reached):
            report = self.copy.parent / "trace.json"
            report.unlink(missing_ok=True)
            tracer = LineTracer(self.copy / PACKAGE, report)
            start = time.monotonic()
            self.fork(lambda: pytest.main([*OPTIONS, "--maxfail=1000", test_file], plugins=[tracer]), 1800)
            tests = json.loads(report.read_text()) if report.exists() else {}
            start = time.monotonic() - start - sum(seconds for seconds, _ in tests.values())
            self.traces.add(test_file, start=start, contents=contents, tests=tests)
        return self.traces.results[test_file]

    def fork(self, action: Callable[[], Any], limit: float, *, is_quiet: bool = True) -> Any:
        """Run ``action`` in a fork, in the copy; return its exit status, or "hang" if it took longer than ``limit``."""
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.setsid()  # ended together with the ranks that it starts
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                if is_quiet:
                    output = os.open(self.copy.parent / "output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                self._leave_checkout()
                status = int(action())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            ended, code = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(code)
            time.sleep(0.02)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return "hang"

    def _leave_checkout(self) -> None:
        """Import from the copy what was imported from the checkout."""
        os.chdir(self.copy)
        own = {ROOT / folder for folder in ("tests", "tools", "benchmarks", PACKAGE)}
        for name, module in list(sys.modules.items()):
            file = Path(getattr(module, "__file__", None) or "/")
            if name != "__main__" and own & set(file.parents):
                del sys.modules[name]
        theirs = [path for path in sys.path if Path(path) not in (ROOT, *own)]
        sys.path[:] = [str(self.copy), str(self.copy / "tests"), *theirs]
        os.environ["PYTHONPATH"] = f"{self.copy}:{self.copy / 'tests'}"


def list_libraries(copy: Path) -> list[str]:
    """Import what all tests import, and return the names of all modules from outside of ``copy``, in this order."""
    importlib.import_module("conftest")
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if not file.startswith(str(copy)) and name != "__main__"]


if __name__ == "__main__":
    sys.exit(main())

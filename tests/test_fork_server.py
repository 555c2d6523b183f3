"""A program that is forked runs, and ends, as a fresh interpreter would run it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.fork_server import FORKED_SECONDS, get_python
from helpers.results import get_processor_seconds

pytestmark = pytest.mark.slow

TELLS = """
import os, sys
main = sys.modules["__main__"]
print(__name__, main.__spec__ and main.__spec__.name, os.path.basename(getattr(main, "__file__", "")))
print(sys.argv, sys.path[:2], os.getcwd())
print(*map(os.environ.get, ("OWN", "PYTHONPATH", "HF_HOME", "PATH")))
print(sys.stdin.read(), sys.stdout.isatty(), os.read(int(sys.argv[-1]), 9))
sys.exit(int(os.environ["OWN"]))
"""


def run(python: str, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "package.module"], ["-c", TELLS], ["-u", "script.py"]])
def test_what_a_program_sees_and_ends_with(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("script.py", "package/module.py"):
        (tmp_path / name).write_text(TELLS)

    def tell(python: str) -> tuple[int, str]:
        readable, writable = os.pipe()
        os.write(writable, b"inherited")
        os.close(writable)
        with open(readable, "rb"):
            ended = run(
                python,
                [*arguments, "a b", str(readable)],
                cwd=tmp_path,
                env={"OWN": "7", "PYTHONPATH": "/one"},
                input="given",
                pass_fds=[readable],
            )
        return ended.returncode, ended.stdout.replace(str(readable), "N")

    code, told = tell(get_python())
    assert (code, told) == tell(sys.executable)
    assert told.startswith("__main__")
    assert code == 7


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('mine')",
        "raise KeyboardInterrupt",
        "import sys; sys.exit('mine')",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import atexit, threading, time; atexit.register(print, 'last'); threading.Timer(0.1, print, ['mine']).start()",
        "import sys; print(sys.flags.no_site)",
    ],
)
def test_how_a_program_ends(code: str) -> None:
    fresh, forked = (run(python, ["-c", code]) for python in (sys.executable, get_python()))
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_other_options_start_a_fresh_interpreter() -> None:
    ended = run(get_python(), ["-I", "-S", "-c", "import sys; print(sys.flags.isolated, 'torch' in sys.modules)"])
    assert ended.stdout == "1 False\n"


WAITS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
print(signal.getsignal(signal.SIGHUP).name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSEGV])
def test_signals_reach_the_program(number: signal.Signals) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which shells ignore in what runs in the background

    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "preexec_fn": prepare}
    with subprocess.Popen([get_python(), "-c", WAITS], **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "SIG_IGN\n"
        process.send_signal(number)
        assert process.wait(60) == (85 if number == signal.SIGUSR1 else -number)
        assert process.stdout.read() == ""  # the program has ended, too


def test_the_time_that_programs_use_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the programs that a program starts."""
    (tmp_path / "seconds").touch()
    monkeypatch.setenv(FORKED_SECONDS, str(tmp_path / "seconds"))
    use = "import time\nwhile time.process_time() < 0.4: pass"
    before = get_processor_seconds()
    run(get_python(), ["-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {use!r}])"])
    assert 0.4 <= get_processor_seconds() - before < 3


def test_what_a_program_starts_is_forked() -> None:
    inner = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    forked, code_of_inner = run(get_python(), ["-c", code]).stdout.splitlines()
    assert forked == "True"
    assert code_of_inner == "0"


def test_the_server_ends_with_the_process_that_uses_it() -> None:
    """Even if it is killed, and with the programs that run."""
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from helpers.fork_server import get_python
program = subprocess.Popen([get_python(), "-c", "import time; print('runs', flush=True); time.sleep(600)"])
program.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        process.kill()
        assert process.stdout.read() == ""  # nobody holds the other end

"""Every call of a save on the file system, in turn, fails, kills the process, or interrupts it.

Whatever happens, the old checkpoint or the new one must be there afterwards, and the next save must leave nothing else.
The library `storage_faults.c` strikes the calls, so this runs in a process of its own, which has it preloaded::

    PYTHONPATH=.:tests python -m helpers.fault_sweep              # the count is the last line
    PYTHONPATH=.:tests python -m helpers.fault_sweep --stride 7 --kinds directory link

It forks a process for each save, which imports nothing any more.
"""

import argparse
import collections
import ctypes
import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("storage_faults.c")
ACTIONS = ("fails", "keeps failing", "kills", "interrupts")
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES, errno.EMFILE)
"""Errors of the calls that fail, one after the other."""

KINDS = ("directory", "file", "file for directory", "directory for link", "link", "background", "export")

OLD, NEW, NEXT = 1, 2, 3
_SAVED, _FAILED, _INTERRUPTED, _WRONG = range(4)
"""Exit codes of the process that saves. If it was killed, it has none."""


@dataclass(frozen=True)
class Kind:
    """A way to save: ``write(path, value)`` replaces what is at the path, and ``read(path)`` returns its value."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], int]
    write_old: Callable[[Path, int], None] | None = None
    others: frozenset[str] = frozenset()
    """Names beside the path that belong to it."""


def build_library(folder: Path) -> Path:
    library = folder / "storage_faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def run_sweep(library: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run this file in a process that has the library preloaded."""
    command = [sys.executable, "-m", "helpers.fault_sweep", "--library", str(library), *arguments]
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


# ---------------------------------------------------------------------- what is saved


def _make_kinds(names: Sequence[str]) -> dict[str, Kind]:
    import torch
    from torch import nn

    from lightning_fsdp2.checkpoint.asynchronous import BackgroundWriter
    from lightning_fsdp2.checkpoint.files.drafts import link_checkpoint
    from lightning_fsdp2.checkpoint.files.paths import resolve_checkpoint
    from lightning_fsdp2.checkpoint.find import find_checkpoint
    from lightning_fsdp2.checkpoint.formats.directory import take_snapshot, write_snapshot
    from lightning_fsdp2.checkpoint.formats.single_file import read_file, write_file_alone
    from lightning_fsdp2.checkpoint.plain_loop import load_checkpoint, save_checkpoint

    torch.set_num_threads(1)
    logging.disable()  # of what could not be cleaned at once, which is checked below
    warnings.simplefilter("ignore")

    def make_model(value: int) -> nn.Module:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        return model

    def save_directory(path: Path, value: int) -> None:
        save_checkpoint(path, make_model(value), extra=value)

    def load_directory(path: Path) -> int:
        model = make_model(0)
        value: int = load_checkpoint(path, model)
        assert all((parameter == value).all() for parameter in model.parameters())
        return value

    def save_file(path: Path, value: int) -> None:
        write_file_alone(path, {"state_dict": make_model(value).state_dict()})

    def load_file(path: Path) -> int:
        return int(read_file(find_checkpoint(path))["state_dict"]["bias"][0])

    def save_in_background(path: Path, value: int) -> None:
        snapshot = take_snapshot({"state_dict": make_model(value).state_dict()}, {"extra": value})
        bare, writer = snapshot.with_tensors({}), BackgroundWriter(torch.device("cpu"))
        writer.start(snapshot.tensors, lambda tensors: write_snapshot(path, bare.with_tensors(tensors)))
        writer.wait()

    def make_link(path: Path, value: int) -> None:
        link_checkpoint(path.with_name(f"{value}.ckpt"), path)

    def make_linked(path: Path, value: int) -> None:
        for each in (OLD, NEW, NEXT):
            save_file(path.with_name(f"{each}.ckpt"), each)
        make_link(path, value)

    def load_either(path: Path) -> int:
        return load_directory(path) if resolve_checkpoint(path).is_dir() else load_file(path)

    linked = frozenset(f"{each}.ckpt" for each in (OLD, NEW, NEXT))
    kinds = {
        "directory": Kind(save_directory, load_directory),
        "file": Kind(save_file, load_file),
        "file for directory": Kind(save_file, load_either, save_directory),
        "directory for link": Kind(save_directory, load_either, make_linked, linked),
        "link": Kind(make_link, load_file, make_linked, linked),
        "background": Kind(save_in_background, load_directory),
    }
    return kinds | (_make_export() if "export" in names else {})


def _make_export() -> dict[str, Kind]:
    import torch
    from safetensors.torch import load_file

    from helpers.models import LLAMA, make_causal_lm
    from lightning_fsdp2 import export_hf
    from lightning_fsdp2.checkpoint.files.drafts import clean_folder

    model = make_causal_lm(LLAMA)

    def export(path: Path, value: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        export_hf(model, path, overwrite=True)

    def read(path: Path) -> int:
        if not path.exists():
            clean_folder(path.parent)
        (value,) = {int(tensor.unique()) for tensor in load_file(path / "model.safetensors").values()}
        return value

    return {"export": Kind(export, read)}


# ---------------------------------------------------------------------- the sweep


class _Sweep:
    def __init__(self, folder: Path, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.fault_count.restype = ctypes.c_long
        self._folder = folder
        self.runs: collections.Counter[str] = collections.Counter()
        self.losses: list[str] = []

    def run(self, name: str, kind: Kind, *, stride: int) -> None:
        old = self._folder / "old"
        old.mkdir()
        _fork(lambda: (kind.write_old or kind.write)(old / "last.ckpt", OLD))
        for exchange in (True, False):
            calls = self._count(kind, exchange)
            for number, action in self._choose(calls, stride):
                self._strike(f"{name}{'' if exchange else ' without exchange'}", kind, number, action, exchange)
        shutil.rmtree(old)

    def _choose(self, calls: int, stride: int) -> Iterator[tuple[int, int]]:
        chances = [(number, action) for number in range(1, calls + 1) for action in range(len(ACTIONS))]
        yield from chances[::stride]

    def _make_folder(self) -> Path:
        work = self._folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self._folder / "old", work, symlinks=True)
        return work

    def _arm(self, work: Path, number: int, action: int, error: int, exchange: bool) -> None:
        self._library.fault_arm(os.fsencode(work), ctypes.c_long(number), action, error, int(exchange))

    def _count(self, kind: Kind, exchange: bool) -> int:
        work, counted = self._make_folder(), self._folder / "count"

        def count() -> None:
            self._arm(work, 0, 0, 0, exchange)
            kind.write(work / "last.ckpt", NEW)
            counted.write_text(str(self._library.fault_count()))

        assert _fork(count)[0] == _SAVED
        return int(counted.read_text())

    def _strike(self, name: str, kind: Kind, number: int, action: int, exchange: bool) -> None:
        work, error = self._make_folder(), ERRORS[number % len(ERRORS)]

        def save() -> None:
            self._arm(work, number, action, error, exchange)
            kind.write(work / "last.ckpt", NEW)

        def look() -> None:
            value = kind.read(work / "last.ckpt")
            assert value in expected, f"{value} is there instead of {expected}"
            kind.write(work / "last.ckpt", NEXT)
            assert kind.read(work / "last.ckpt") == NEXT
            left = {path.name for path in work.iterdir()} - kind.others
            assert left == {"last.ckpt"}, f"the next save leaves {left}"

        code, text = _fork(save)
        expected = {OLD, NEW}
        if code == _SAVED:
            expected = {NEW}
        elif code == _FAILED:
            expected = {NEW} if "is complete" in text else {OLD}
        told = code != _FAILED or str(work) in text
        problem = text if code == _WRONG else "" if told else f"an error without a file: {text}"
        if not problem:
            after, text = _fork(look)
            problem = "" if after == _SAVED else text or f"it ends with {after}"
        self.runs[name] += 1
        if problem:
            self.losses.append(f"{name}: call {number} {ACTIONS[action]} ({os.strerror(error)}): {problem}")


def _fork(action: Callable[[], Any]) -> tuple[int | None, str]:
    """Run ``action`` in a forked process. Return one of the codes above, or None if it was killed, and its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = _SAVED
        try:
            action()
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except OSError as error:
            code = _FAILED
            os.write(writer, str(error).encode())
        except BaseException as error:
            code = _WRONG
            os.write(writer, f"{type(error).__name__}: {error}"[:4000].encode())
        os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return (os.WEXITSTATUS(status) if os.WIFEXITED(status) else None), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--stride", type=int, default=1, help="strike every n-th call and action")
    parser.add_argument("--library", type=Path)
    arguments = parser.parse_args()
    if arguments.library is None:
        with tempfile.TemporaryDirectory() as folder:
            done = run_sweep(build_library(Path(folder)), sys.argv[1:])
        sys.stdout.write(done.stderr + done.stdout)
        sys.exit(done.returncode)
    kinds = _make_kinds(arguments.kinds)
    with tempfile.TemporaryDirectory() as folder:
        sweep = _Sweep(Path(folder).resolve(), arguments.library)
        for name in arguments.kinds:
            sweep.run(name, kinds[name], stride=arguments.stride)
    for name, runs in sweep.runs.items():
        sys.stdout.write(f"{name}: {runs} runs\n")
    for loss in sweep.losses:
        sys.stdout.write(f"{loss}\n")
    sys.stdout.write(f"{sum(sweep.runs.values())} runs, {len(sweep.losses)} problems\n")
    sys.exit(1 if sweep.losses else 0)


if __name__ == "__main__":
    main()

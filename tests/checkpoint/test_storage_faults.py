"""Whatever call of a save fails, kills the process or is interrupted, the old checkpoint or the new one is there."""

from pathlib import Path

import pytest
from helpers.compiler import needs_c_compiler
from helpers.fault_sweep import KINDS, build_library, run_sweep

pytestmark = [needs_c_compiler, pytest.mark.guarantees("complete-or-absent", "any-call-of-a-save")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("faults"))


def assert_nothing_is_lost(library: Path, *arguments: str, runs: int) -> None:
    sweep = run_sweep(library, arguments)
    assert sweep.returncode == 0, sweep.stdout[-4000:] + sweep.stderr[-4000:]
    assert int(sweep.stdout.splitlines()[-1].partition(" runs, ")[0]) >= runs


@pytest.mark.slow
def test_some_calls_of_each_save(library: Path) -> None:
    assert_nothing_is_lost(library, "--stride", "41", runs=90)


@pytest.mark.release
@pytest.mark.parametrize("kind", KINDS)
def test_all_calls_of_a_save(kind: str, library: Path) -> None:
    assert_nothing_is_lost(library, "--kinds", kind, runs=300)

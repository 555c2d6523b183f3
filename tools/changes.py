"""Find the files that a change touches, and sort test files by how likely the change breaks them."""

import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

from helpers.reach import PACKAGE, ROOT, find_reach
from helpers.results import TIERS, FileLedger


def find_changed(since: str | None) -> set[Path]:
    """Return the files that differ from the commit ``since``, new and deleted ones included.

    Without ``since`` a change begins where the branch left main. On main itself it is what is not committed yet, or
    else the last commit.

    Raises:
        SystemExit: When git knows no such commit.
    """
    untracked = _git("ls-files", "--others", "--exclude-standard")
    base = since or _git("merge-base", "HEAD", "main")[0]
    if not since and base == _git("rev-parse", "HEAD")[0] and not untracked and not _git("diff", "--name-only", "HEAD"):
        base = "HEAD~1"
    # the old name of a renamed file, too, since something may still import it
    return {ROOT / name for name in [*_git("diff", "--name-only", "--no-renames", base), *untracked]}


def order_by_likelihood(ledgers: Iterable[FileLedger], changed: Collection[Path]) -> list[tuple[FileLedger, str]]:
    """Return the test files that can reach a changed file, with a kind of tests, the most likely to fail first.

    First come files of which a test failed when it last ran. Then come those that mirror a changed file or are changed
    themselves, then the fast tests of others, and in the end the slow ones of others. Among others, those that import
    a changed file come before those that import what imports it, and so on.
    """
    mirrors = {get_mirror(path) for path in changed}
    deleted = {path for path in changed if not path.exists()}
    steps = []
    for ledger in ledgers:
        reached = find_reach(ledger.file, deleted)
        distances = [reached[path] for path in changed if path in reached]
        if distances:
            distance = 0 if ledger.name in mirrors else min(distances)
            for kind in TIERS["all"]:
                key = (not has_failed(ledger, kind), distance > 0, kind == "slow", distance)
                steps.append((key, ledger, kind))
    return [(ledger, kind) for _, ledger, kind in sorted(steps, key=lambda step: step[0])]


def has_failed(ledger: FileLedger, kind: str) -> bool:
    """Return whether a test of this kind failed when it last ran."""
    last = ledger.earlier | ledger.tests
    return any(result.get("kind") == kind and result["outcome"] == "failed" for result in last.values())


def get_mirror(path: Path) -> str:
    """Return the name of the test file that a file of the package has."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] != PACKAGE:
        return str(inside)
    return str(Path("tests", *inside.parts[1:-1], f"test_{inside.stem.lstrip('_')}.py"))


def _git(*arguments: str) -> list[str]:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        reason = run.stderr.partition("\n")[0] or "no common commit"
        raise SystemExit(f"git {' '.join(arguments)}: {reason}; name where the change began with --since.")
    return run.stdout.splitlines()

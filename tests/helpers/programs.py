"""Programs that tests call, or that they wait for."""

import subprocess
from contextlib import suppress
from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def git(folder: Path, *arguments: str) -> str:
    """Run git in ``folder`` as somebody with a name, and return what it prints."""
    who = ["-c", "user.name=name", "-c", "user.email=address"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit_all(folder: Path) -> str:
    """Commit all files of ``folder``, which becomes a repository if it is none, and return the commit."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD").strip()

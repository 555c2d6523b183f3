"""Git LFS pointers: small text files that stand in place of large ones in a clone without Git LFS."""

from pathlib import Path

LFS_POINTER = "a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned, or download the file"
"""Description of a pointer and its remedy, for errors."""

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024  # the specification allows no longer pointers


def is_lfs_pointer(file: str | Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    path = Path(file)
    if path.stat().st_size > _LONGEST:
        return False
    with path.open("rb") as content:
        return content.read(len(_BEGINNING)) == _BEGINNING

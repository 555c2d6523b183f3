"""The pages of the documentation, and the blocks of code in them."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
"""What a user reads, by its path; written by hand or from data."""

_FENCE = re.compile(r"^ *(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *(?P=fence)$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str) -> list[Block]:
    """All blocks of a page, in their order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text[: match.start()].count("\n") + 1, match["language"], match["text"])
        for match in _FENCE.finditer(text)
    ]


def get_blocks(*languages: str, page: str | None = None) -> list[Block]:
    """All blocks in one of the languages, of all pages or of one."""
    pages = PAGES if page is None else (page,)
    return [block for page in pages for block in read_blocks(page) if block.language in languages]


def list_anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = _FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings]


def build_site(folder: Path, *, repository: str) -> Path:
    """Build the documentation, as a host does that knows the repository's address or does not; return the folder."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": repository}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder

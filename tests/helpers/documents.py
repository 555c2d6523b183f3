"""The pages of the documentation, and the blocks of code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

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

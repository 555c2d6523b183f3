"""The messages that the documentation quotes are those of the source, and can be linked to."""

import ast
import re
from functools import cache

import pytest
from helpers.documents import ROOT, Block, list_anchors, read_blocks

PACKAGE = ROOT / "lightning_fsdp2"

PAGE = ROOT / "docs/troubleshooting.md"
MESSAGES = [block for block in read_blocks("docs/troubleshooting.md") if block.language == "text"]


@cache
def get_patterns() -> list[re.Pattern[str]]:
    """Every string of the source that could be a message, with anything in place of what is filled in."""
    patterns = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*?" for part in node.values
                ]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [re.escape(node.value).replace("%s", ".*?").replace("%d", ".*?")]
            else:
                continue
            if len("".join(parts)) > 40:  # short ones, and those that are all gaps, would match anything
                patterns.add("".join(parts))
    return [re.compile(pattern, re.DOTALL) for pattern in patterns]


def is_in_source(message: str) -> bool:
    """Whether some string of the source says this."""
    return any(pattern.fullmatch(message) for pattern in get_patterns())


@pytest.mark.guarantees("quoted-messages")
@pytest.mark.parametrize("block", MESSAGES, ids=str)
def test_a_quoted_message_is_in_the_source(block: Block) -> None:
    assert is_in_source(block.text.strip())


def test_a_message_that_is_none_is_seen() -> None:
    assert len(MESSAGES) > 15
    assert not any(is_in_source(block.text.strip().replace(" ", "  ")) for block in MESSAGES)


@pytest.mark.guarantees("quoted-messages")
@pytest.mark.parametrize("block", MESSAGES, ids=str)
def test_a_message_has_a_heading_of_its_own_words(block: Block) -> None:
    """In their order, so that whoever knows the message knows the anchor; the table of contents has the heading."""
    heading, between = PAGE.read_text().splitlines()[block.line - 3 : block.line - 1]
    assert heading.startswith("### ")
    assert between == ""
    words = iter(re.findall(r"\w+", block.text.lower()))
    assert [word for word in re.findall(r"\w+", heading.lower()) if word not in words] == []


def test_anchors_are_unique() -> None:
    anchors = list_anchors(PAGE)
    assert len(anchors) > len(MESSAGES)
    assert sorted(set(anchors)) == sorted(anchors)

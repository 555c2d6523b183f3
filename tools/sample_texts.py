"""Print random texts of the package and its pages, for somebody to judge whether they are easy to read.

    python tools/sample_texts.py [--seed 20261125]

The sample has sixteen docstrings, ten comments, seven error messages and seven paragraphs. A text passes if a native
speaker understands it at the first reading. At least 38 of 40 should pass.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = {"docstring": 16, "comment": 10, "error": 7, "paragraph": 7}
GENERATED = ("parity", "test-all", "matrices", "flags", "compatibility", "moved")
"""Beginnings of the names of pages that a program writes."""

FENCED_BLOCK = re.compile(r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=20261125)
    chooser = random.Random(parser.parse_args().seed)
    texts: dict[str, list[tuple[str, str]]] = {kind: [] for kind in COUNTS}
    for path in sorted((ROOT / "lightning_fsdp2").rglob("*.py")):
        for kind, line, text in list_texts(path.read_text()):
            texts[kind].append((f"{path.relative_to(ROOT)}:{line}", text))
    for path in sorted((ROOT / "docs").glob("*.md")):
        if not path.name.startswith(GENERATED):
            texts["paragraph"] += [(str(path.relative_to(ROOT)), text) for text in list_paragraphs(path.read_text())]
    for kind, count in COUNTS.items():
        for place, text in chooser.sample(texts[kind], count):
            print(f"[{kind}] {place}\n    {text}\n")


def list_texts(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, the line and the words of each docstring, comment and error message of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if text := ast.get_docstring(node):
                yield "docstring", getattr(node, "lineno", 1), text
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = ast.unparse(node.exc.args[0])
            if len(text) > 60:
                yield "error", node.lineno, text
    for line, text in list_comments(source):
        if len(text) > 30 and not any(mark in text for mark in ("---", "noqa", "type: ignore")):
            yield "comment", line, text


def list_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the words of each comment. Lines of comments below each other are one comment."""
    comments: list[list[tokenize.TokenInfo]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comments and is_continued(comments[-1][-1], token):
                comments[-1].append(token)
            else:
                comments.append([token])
    for lines in comments:
        yield lines[0].start[0], "\n    ".join(line.string for line in lines)


def is_continued(last: tokenize.TokenInfo, token: tokenize.TokenInfo) -> bool:
    """Return whether two lines form one comment. A comment after code always stands alone."""
    is_below = token.start == (last.start[0] + 1, last.start[1])
    return is_below and last.line.lstrip().startswith("#") and token.line.lstrip().startswith("#")


def list_paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of a page that are prose. Fenced blocks are left out, even if they have blank lines."""
    for text in re.split(r"\n\s*\n", FENCED_BLOCK.sub("\n", page)):
        if len(text) > 120 and not text.startswith(("|", "#", "    ", "!")):
            yield text.strip("\n")


if __name__ == "__main__":
    main()

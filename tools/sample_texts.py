"""Print texts of the package and its pages, chosen at random, for somebody to read with fresh eyes.

    python tools/sample_texts.py [--seed 20261125]

Sixteen docstrings, ten comments, seven error messages and seven paragraphs. A text passes if a native reader
understands it at the first reading; 38 of 40 should.
"""

import argparse
import ast
import io
import random
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = {"docstring": 16, "comment": 10, "error": 7, "paragraph": 7}
GENERATED = ("parity", "test-all", "flags", "compatibility", "moved")
"""Beginnings of the names of pages that a program writes."""


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
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.COMMENT and len(token.string) > 30
        if is_text and not any(mark in token.string for mark in ("---", "noqa", "type: ignore")):
            yield "comment", token.start[0], token.string


def list_paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of a page that are prose."""
    for text in page.split("\n\n"):
        if len(text) > 120 and not text.startswith(("|", "```", "#", "    ", "!")):
            yield text


if __name__ == "__main__":
    main()

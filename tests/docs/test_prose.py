"""Docstrings and comments are plain English, as far as a test can tell: how they begin, and a few words to avoid."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_fsdp2

PACKAGE = Path(lightning_fsdp2.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

NO_VERBS = {"a", "all", "an", "as", "by", "for", "from", "how", "in", "of", "the", "those", "what", "where", "whether"}
"""Words that a function's docstring does not begin with: it says what the function does, in the imperative."""

NO_NOUNS = {"of", "those", "what", "where"}
"""Words that the docstring of a class or a value does not begin with."""

TO_AVOID = {
    r"\bbehind\b": "after",
    r"\banew\b": "again, new",
    r"\bbut for\b": "except",
    r"\bof (which|whom)\b": "a sentence of its own",
}
"""Words and what to write in their place."""

Text = tuple[str, str]
"""Where it is, and what it says."""


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def list_docstrings(path: Path) -> Iterator[tuple[ast.AST | None, Text]]:
    """Each docstring with what it is of; None for a value."""
    tree = ast.parse(path.read_text())
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and node.body:
            text = ast.get_docstring(node)
            if text is not None:
                own.add(node.body[0])
                yield node, (f"{path.name}:{node.body[0].lineno}", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node not in own:
            yield None, (f"{path.name}:{node.lineno}", str(node.value.value))


def list_comments(path: Path) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield f"{path.name}:{token.start[0]}", token.string


def get_first_word(text: str) -> str:
    return text.split()[0].rstrip(",.:;").lower()


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: Path) -> None:
    wrong = []
    for path in sorted(folder.glob("*.py")):
        for node, (place, text) in list_docstrings(path):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
            if not isinstance(node, ast.Module) and get_first_word(text) in (NO_VERBS if is_function else NO_NOUNS):
                wrong.append((place, text.splitlines()[0]))
    assert wrong == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_words_to_avoid(folder: Path) -> None:
    texts = [text for path in folder.glob("*.py") for _, text in list_docstrings(path)]
    texts += [text for path in folder.glob("*.py") for text in list_comments(path)]
    found = [
        (place, re.search(rf".*{word}.*", text)[0].strip(), f"write: {better}")
        for place, text in texts
        for word, better in TO_AVOID.items()
        if re.search(word, text)
    ]
    assert found == []

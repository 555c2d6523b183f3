"""A hook of mkdocs: files of the repository that pages link to are pages of the site.

The pages are read in the repository too, where ``[recipes](../configs/README.md)`` leads to a file, or to a folder.
Here each of these is a page under its own path, and the links lead to it: Markdown as it is, any other file in a block,
a folder as its README or as all of its files. Tests are too many to be pages, so links to them lead to the repository,
if its address is known.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TESTS = ROOT / "tests"

_LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
_LINK_TO_A_TEST = re.compile(r"\[(?P<text>[^\]]+)\]\((?:\.\./)*(?P<path>tests/[^)\s]+)\)")
_LANGUAGES = {".sbatch": "bash", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".py": "python", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what that links to."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    found = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, get_uri(path), content=get_text(path)))
        new = set(get_targets(path)) - found
        found |= new
        waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Let links lead to the pages of what they lead to in the repository."""
    address = config.repo_url and f"{config.repo_url.rstrip('/')}/blob/HEAD"
    markdown = _LINK_TO_A_TEST.sub(rf"[\g<text>]({address}/\g<path>)" if address else r"\g<text>", markdown)
    path = next(path for path in (DOCS / page.file.src_uri, ROOT / page.file.src_uri, ROOT) if path.exists())

    def replace(match: re.Match[str]) -> str:
        target = resolve(path, match["path"])
        if target is None:
            return match[0]  # mkdocs will say so
        uri = os.path.relpath(get_uri(target), Path(page.file.src_uri).parent)
        return f"]({uri}{match['anchor'] or ''})"

    return _LINK.sub(replace, markdown)


def get_targets(path: Path) -> list[Path]:
    """The files and folders that a page links to."""
    if path.suffix != ".md":
        return []
    targets = (resolve(path, match["path"]) for match in _LINK.finditer(path.read_text()))
    return [
        target
        for target in targets
        if target is not None and not target.is_relative_to(TESTS) and target.parent != DOCS / "drawings"
    ]


def resolve(path: Path, link: str) -> Path | None:
    """Where a link of the page leads to in the repository; None if there is nothing."""
    target = Path(os.path.normpath(path.parent / link))
    if (target / "README.md").is_file():
        target /= "README.md"
    return target if target.exists() and target.is_relative_to(ROOT) else None


def get_uri(path: Path) -> str:
    """The source path of the page of a file or folder."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = path.relative_to(ROOT).as_posix()
    return f"{uri}/index.md" if path.is_dir() else uri if path.suffix == ".md" else f"{uri}.md"


def get_text(path: Path) -> str:
    """The Markdown of a file or folder outside of ``docs``."""
    if path.suffix == ".md":
        return path.read_text()
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return "\n\n".join([f"# {path.relative_to(ROOT)}", *(_show(file, path) for file in files)])


def _show(file: Path, page: Path) -> str:
    title = "" if file == page else f"## {file.name}\n\n"
    return f"{title}````{_LANGUAGES.get(file.suffix, '')}\n{file.read_text().rstrip()}\n````"

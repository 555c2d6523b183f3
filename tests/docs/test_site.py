"""The documentation is built, complete, and leads nowhere that is not there; `make lint` builds it too."""

import importlib
import inspect
import re
import runpy
import zlib
from pathlib import Path

import pytest
from helpers.documents import PAGES, ROOT, build_site, list_anchors

import lightning_fsdp2
from lightning_fsdp2 import callbacks, loggers

DRAWINGS = ROOT / "docs" / "drawings"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    fetched = [
        (page.name, element)
        for page in pages
        for element in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        if re.search(r'(?:src|href)="(?:https?:)?//', element)
    ]
    assert fetched == []


@pytest.mark.guarantees("links")
@pytest.mark.slow
def test_pages_link_to_the_repository_if_its_address_is_known(site: Path, tmp_path: Path) -> None:
    """The theme's own link would ask GitHub for numbers; that is the component "source" of its script."""
    link = '<a href="https://example.org/owner/name"'
    with_address = build_site(tmp_path, repository="https://example.org/owner/name")
    for page in ("index.html", "404.html", "api/configs/index.html"):
        assert link in (with_address / page).read_text()
        assert 'component="source"' not in (with_address / page).read_text()
        assert "md-source" not in (site / page).read_text()
    test = "https://example.org/owner/name/blob/HEAD/tests/test_parity.py"
    assert test in (with_address / "guaranteed-by/index.html").read_text()


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """By the inventory, which the pages that are built write."""
    *_, compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    documented = {line.split()[0] for line in zlib.decompress(compressed).decode().splitlines()}
    public = {
        *(f"lightning_fsdp2.{name}" for name in lightning_fsdp2.__all__),
        *(f"lightning_fsdp2.callbacks.{name}" for name in callbacks.__all__),
        *(f"lightning_fsdp2.loggers.{name}" for name in loggers.__all__),
        "lightning_fsdp2.schedulers.WarmupCosine",
        "lightning_fsdp2.models.from_pretrained",
        "lightning_fsdp2.parallelizer.fsdp2_strategy_parallelize",
        "lightning_fsdp2.parallelizer.unshard_fsdp2_model",
        "lightning_fsdp2.parallel.tensor.plans.register_tp_plan",
    }
    assert public - documented == set()


@pytest.mark.slow
def test_the_reference_is_typeset(site: Path) -> None:
    """Arguments are lists with types, references are links or code, examples are blocks."""
    pages = {path.parent.name: path.read_text() for path in (site / "api").rglob("index.html")}
    markup = [(name, found) for name, text in pages.items() for found in re.findall(r":\w+:`[^`]*|::\n|``\w+", text)]
    assert markup == []
    arguments = re.search(r'id="lightning_fsdp2.FSDP2Strategy".*?<ul>(.*?)</ul>', pages["strategies"], re.DOTALL)[1]
    names = re.findall(r"<b><code>(\w+)</code></b>\s*\(<code>", arguments)  # and their types
    assert names == list(inspect.signature(lightning_fsdp2.FSDP2Strategy).parameters)
    assert 'href="../configs/#lightning_fsdp2.FSDP2Config"' in arguments


def test_what_docstrings_refer_to_is_there() -> None:
    """Of this package; that other names are spelled right, nobody looks."""
    texts = "\n".join(path.read_text() for path in (ROOT / "lightning_fsdp2").rglob("*.py"))
    names = set(re.findall(r":(?:class|func|meth|attr|mod|data):`~?(lightning_fsdp2\.[\w.]+)`", texts))
    assert len(names) > 20
    missing = [name for name in sorted(names) if not is_there(name)]
    assert missing == []


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or leads to something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_drawings_are_those_of_the_script() -> None:
    drawings = runpy.run_path(str(DRAWINGS / "draw.py"))["DRAWINGS"]
    assert {path.stem for path in DRAWINGS.glob("*.svg")} == set(drawings)
    for name, draw in drawings.items():
        assert (DRAWINGS / f"{name}.svg").read_text() == draw().render(), "run docs/drawings/draw.py"


def test_links_to_elsewhere_are_addresses() -> None:
    """Whether they answer is not asked: tests have no network."""
    links = [link for page in PAGES.values() for link in re.findall(r"\]\((https?:[^)]*)\)", page.read_text())]
    assert links
    assert [link for link in links if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./#?=%~-]*)?", link)] == []


def test_extras_that_are_named_exist() -> None:
    named = {extra for page in PAGES.values() for extra in re.findall(r"lightning-fsdp2\[(\w+)\]", page.read_text())}
    assert named >= {"lora", "megatron"}
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in named)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "configs/README.md"])
def test_links_of_the_repository_lead_somewhere(name: str) -> None:
    """Those of pages in ``docs`` are checked by the build."""
    page = ROOT / name
    links = LINK.findall(page.read_text())
    assert links
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor[1:] in list_anchors(target), path + anchor


def test_the_map_of_the_source_is_true() -> None:
    """Paths and names that the page on the architecture has in code are there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    codes = re.findall(r"`([^`\n]+)`", text)
    paths = [code for code in codes if re.fullmatch(r"(lightning_fsdp2|tests|docs)/[\w/.]*", code)]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    sources = "\n".join(path.read_text() for path in (ROOT / "lightning_fsdp2").rglob("*.py"))
    names = [code.rpartition(".")[2] for code in codes if re.fullmatch(r"(\w+\.)?_?[a-z]+_\w+|_[A-Z_]+", code)]
    assert len(names) > 30
    assert [name for name in names if not re.search(rf"\b{name}\b", sources)] == []

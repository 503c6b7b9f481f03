"""The pages for users: their links lead somewhere, and their Python is Python."""

import re
import urllib.parse
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = [
    *(_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((_ROOT / "docs").glob("*.md")),
    _ROOT / "benchmarks" / "README.md",
]
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
_NAMED = re.compile(
    r"`([\w./-]*test_\w+\.py|(?:shmload|workers|integrations|tests|scripts)/[\w./-]+)`"
)
_LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]+)\"")

each_page = pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))


def _prose(page):
    """Return the text of a page without its blocks of code."""
    return _BLOCK.sub("", page.read_text())


def _anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    anchors = set()
    for heading in re.findall(r"^#+ +(.+)$", _prose(page), re.M):
        shown = re.sub(r"\]\([^)]*\)", "", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        assert name not in anchors, f"two headings of {page.name} have the anchor {name}"
        anchors.add(name)
    return anchors


@each_page
def test_links_lead_somewhere(page):
    lost = []
    for groups in _LINK.findall(_prose(page)):
        link = "".join(groups)
        if urllib.parse.urlsplit(link).scheme:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            lost.append(link)
    assert lost == []


@each_page
def test_python_compiles(page):
    for language, block in _BLOCK.findall(page.read_text()):
        if language == "python":
            compile(block, page.name, "exec")


@each_page
def test_files_that_are_named_exist(page):
    """A test may be named by the end of its path: `test_clocks.py`, `ranks/test_ranks.py`."""
    tests = [str(path) for path in (_ROOT / "tests").rglob("test_*.py")]
    lost = [
        name
        for name in _NAMED.findall(_prose(page))
        if not (_ROOT / name).exists() and not any(path.endswith(f"/{name}") for path in tests)
    ]
    assert lost == []

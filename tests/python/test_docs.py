"""The pages read well where they are read: in an editor, on the site, without a network."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that other rules hold.
UNWRAPPED = {"contract.md", "development.md"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page):
    """Lines that are no code, no table, no link alone, and not made by a command."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^<!-- results:begin -->.*?^<!-- results:end -->", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if not line.startswith(("|", "!["))]


@each_page
def test_lines_of_prose_fit_an_editor(page):
    if page.name not in UNWRAPPED:
        assert [line for line in prose(page) if len(line) > 120] == []


@each_page
def test_a_page_has_one_title(page):
    """Of several a site's table of contents would list the sections of the first alone."""
    assert len([line for line in prose(page) if line.startswith("# ")]) == 1


@each_page
def test_a_page_shows_all_that_it_has_without_a_script(page):
    """A diagram in another language than text would be drawn by one, which the site would fetch."""
    languages = re.findall(r"^\s*```(\w+)", page.read_text(), flags=re.MULTILINE)
    assert set(languages) <= {"cmake", "python", "sh", "text"}


def test_the_site_lists_every_page():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}

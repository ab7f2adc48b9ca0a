"""The documentation site: built without warnings, every page can be reached, links and anchors lead somewhere, the
public names are documented, and no page asks another host for anything."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fedloom

ROOT = Path(__file__).parents[1]


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` does, into another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=120)


class Page(HTMLParser):
    """Anchors, links and resources of a page, and the text of its paragraphs."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []  # that a browser fetches without being asked
        self.paragraphs: list[str] = []
        self.in_paragraph = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "p":
            self.in_paragraph = True
            self.paragraphs.append("")
        self.resources += [found[key] for key in ("src", "srcset", "data") if key in found]
        if tag == "link":
            self.resources.append(found["href"])

    def handle_endtag(self, tag):
        self.in_paragraph &= tag != "p"

    def handle_data(self, data):
        if self.in_paragraph:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, and its pages by file."""
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out.resolve(), {file.resolve(): Page(file) for file in out.rglob("*.html") if file.name != "404.html"}


def target(file: Path, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link leads to."""
    parts = urlsplit(link)
    path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)


def is_local(link: str) -> bool:
    return not urlsplit(link).scheme and not link.startswith("//")


def test_links_and_anchors_lead_somewhere(site):
    _, pages = site
    for file, page in pages.items():
        for link in filter(is_local, page.links + page.resources):
            path, anchor = target(file, link)
            assert path.is_file(), f"{file}: {link}"
            assert not anchor or path not in pages or anchor in pages[path].ids or anchor == "__top", f"{file}: {link}"


def test_every_page_can_be_reached_from_the_first(site):
    out, pages = site
    reached, new = set(), [out / "index.html"]
    while new:
        file = new.pop()
        if file in pages and file not in reached:
            reached.add(file)
            new += [target(file, link)[0] for link in pages[file].links if is_local(link)]
    assert set(pages) - reached == set()


def test_no_other_host_is_asked(site):
    out, pages = site
    for file, page in pages.items():
        assert [link for link in page.resources if not is_local(link) and not link.startswith("data:")] == [], file
        assert 'class="mermaid"' not in file.read_text(), "for diagrams the theme fetches a script"
    for file in out.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", file.read_text()), file


def test_every_public_name_is_in_the_reference(site):
    _, pages = site
    known = set().union(*(page.ids for page in pages.values()))
    assert [name for name in fedloom.__all__ if f"fedloom.{name}" not in known] == []


def test_lists_and_tables_are_not_taken_for_paragraphs(site):
    """Where a list follows a paragraph, code hosts need no empty line between, and the site needs one."""
    _, pages = site
    for file, page in pages.items():
        for text in page.paragraphs:
            assert not re.search(r"\n *(?:[*-] |\d\. |\|)", text), f"{file}: {text}"


def test_a_notebook_is_a_page_with_what_it_shows(site):
    out, _ = site
    for notebook in (ROOT / "docs/notebooks").glob("*.ipynb"):
        page = (out / "notebooks" / notebook.stem / "index.html").read_text()
        assert f'href="../{notebook.name}"' in page
        assert "data:image/png;base64," in page


def test_every_picture_of_the_gallery_is_made_by_a_command_of_the_page():
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "tools" / "make_gallery.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text()
    written = [
        words[words.index(to) + 1] for words in tool.commands(text) for to in ("--out", "--picture") if to in words
    ]
    for name in tool.pictures(text):
        assert tool.OTHERS.get(name, name).startswith(tuple(written)), name
        assert (tool.PICTURES / name).stat().st_size < tool.LARGEST, name
    assert {file.name for file in tool.PICTURES.glob("gallery-*")} == set(tool.pictures(text))


@pytest.fixture
def small_site(tmp_path):
    """A function that builds a site of one page with the project's configuration."""
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "docs" / "stylesheets").mkdir(parents=True)
    (tmp_path / "docs" / "stylesheets" / "site.css").touch()
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md]\n")

    def make(text, **others):
        for name, content in {"index": text, **others}.items():
            (tmp_path / "docs" / f"{name}.md").write_text(content)
        done = build(tmp_path, tmp_path / "site")
        return done.returncode, done.stderr, tmp_path / "site" / "index.html"

    return make


@pytest.mark.parametrize(
    ("text", "others", "said"),
    [
        ("[a page](nothing.md)", {}, "nothing.md"),
        ("# Title\n\n[a place](#nothing)", {}, "#nothing"),
        ("[a folder](folder/)", {}, "folder/"),
        ("::: fedloom.nothing", {}, "fedloom.nothing"),
        ("# Title", {"forgotten": "# A page"}, "forgotten.md"),
    ],
)
def test_a_mistake_ends_the_build(small_site, text, others, said):
    code, log, _ = small_site(text, **others)
    assert code == 1
    assert re.search(rf"(?s)(?:WARNING|ERROR).*{re.escape(said)}", log), log


def test_a_file_outside_of_the_pages_is_named_instead_of_linked(small_site):
    code, log, page = small_site("Read [the code](../src/fedloom) and `[code](../stays)`.")
    assert code == 0, log
    assert "Read <span>the code</span> (src/fedloom) and <code>[code](../stays)</code>." in page.read_text()

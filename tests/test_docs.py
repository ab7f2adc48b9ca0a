"""Every method has a page that names its settings and no others, the index has it, and links lead to files."""

import importlib.util
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import methods

from fedloom.config.settings import Settings
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.settings import build, fields
from fedloom.data.dataset import DATASETS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
INDEX = PAGES / "README.md"
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """What stands in backticks, in one line or over the end of one."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def links(text: str) -> list[str]:
    """Targets of links, without those to other sites and without the place in the file."""
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", prose(text)))
    return [target.partition("#")[0] for target in found if not re.match(r"[a-z]+:|#", target)]


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def settings_part(name: str) -> str:
    found = re.search(r"^## (?:Settings|Parameters)\n(.*?)(?=^## |\Z)", page(name), re.MULTILINE | re.DOTALL)
    assert found, f"docs/methods/{name}.md has no section 'Settings'"
    return found[1]


def settings(name: str) -> set[str]:
    cls = ALGORITHMS[name]
    return {*fields(cls), *(["variant"] if cls.variants else [])}


def choices(name: str) -> set[str]:
    """Words that a setting of the method can be."""

    def words(hint: typing.Any) -> Iterator[str]:
        for option in typing.get_args(hint):
            yield from [option] if isinstance(option, str) else words(option)

    cls = ALGORITHMS[name]
    hints = typing.get_type_hints(cls)
    return {word for field in fields(cls) for word in words(hints[field])} | set(cls.variants)


def assigned(span: str) -> tuple[list[str], str]:
    """Names and value of `name=value`, also of `one=two=value`; of anything else no names."""
    *names, value = span.split("=")
    return (names, value) if all(re.fullmatch(r"\w+", name) for name in names) else ([], span)


def named(name: str) -> set[str]:
    """Settings that the page names, or the page of a method it inherits from, if there is a link to it."""
    cls = ALGORITHMS[name]
    found = {word for span in spans(page(name)) for word in (assigned(span)[0] or [span])}
    for parent in (c.name for c in cls.__mro__[1:] if vars(c).get("name") in methods()):
        if f"{parent}.md" in links(page(name)):
            found |= named(parent) & settings(parent)
    return found & settings(name)


def test_every_method_has_a_page_and_every_page_a_method():
    assert {file.stem for file in PAGES.glob("*.md")} - {INDEX.stem} == set(methods())


@pytest.mark.parametrize("name", methods())
def test_a_page_says_where_the_code_is(name):
    files = [span for span in spans(page(name)) if span.endswith(".py")]
    assert f"src/{ALGORITHMS[name].__module__.replace('.', '/')}.py" in files
    for file in files:
        assert (ROOT / file).is_file() or (ROOT / "src/fedloom/algorithms" / file).is_file(), file


@pytest.mark.parametrize("name", methods())
def test_a_page_names_every_setting(name):
    assert settings(name) - named(name) == set()


@pytest.mark.parametrize("name", methods())
def test_the_settings_of_a_page_are_those_of_the_class(name):
    """Whatever is in backticks there is a setting of the method or of the run, or a word that one of them can be."""
    known = settings(name) | choices(name) | set(fields(Settings)) | set(DATASETS.names()) | {"algorithm"}
    for span in spans(settings_part(name)):
        if not span.startswith(("fedloom ", "--")):
            names, _ = assigned(span)
            for word in names or re.findall(r"[A-Za-z_]\w*", span):
                assert word in known, f"`{span}`"
    rows = re.findall(r"^\| (`.*?) \|", settings_part(name), re.MULTILINE)
    for span in (span for row in rows for span in spans(row)):
        words = assigned(span)[0] or [span]
        assert set(words) <= settings(name) | set(fields(Settings)), f"`{span}`"


@pytest.mark.parametrize("name", methods())
def test_values_on_a_page_are_accepted(name):
    cls = ALGORITHMS[name]
    for span in spans(page(name)):
        names, value = assigned(span)
        for key in names:
            if key == "variant":
                assert value in cls.variants, f"`{span}`"
            else:
                owner = cls if key in fields(cls) else Settings
                build(owner, {key: value}, f"`{span}` in docs/methods/{name}.md:")


def test_the_index_has_every_method_once_with_what_is_shared_and_private():
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\.md\) \| (.*?) \| (.*?) \| (.+) \|$", INDEX.read_text(), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(methods())
    for name, shared, private, _ in rows:
        assert (shared, private) == (ALGORITHMS[name].shared, ALGORITHMS[name].private), name


def test_what_is_sent_is_what_the_methods_declare():
    spec = importlib.util.spec_from_file_location("make_what_is_sent", ROOT / "tools" / "make_what_is_sent.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.page(), "run tools/make_what_is_sent.py"


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_files(file):
    assert [target for target in links(file.read_text()) if not (file.parent / target).is_file()] == []


def test_every_data_set_is_in_the_table_of_data_sets():
    rows = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert {name for name in DATASETS.names() if DATASETS[name].__module__.startswith("fedloom.")} <= set(rows)

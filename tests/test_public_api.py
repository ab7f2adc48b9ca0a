"""The public interface is documented, complete in `help()` and in editors, and its stub is up to date."""

import dataclasses
import importlib.util
import inspect
from functools import cached_property
from pathlib import Path

import pytest
from sentences import user_error

import fedloom
from fedloom.config.settings import Settings

ROOT = Path(__file__).parents[1]


def members(cls):
    """Public functions and properties that a class defines."""
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        value = value.fget if isinstance(value, property) else value
        value = value.func if isinstance(value, cached_property) else value
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(value):
            yield name, value


@pytest.mark.parametrize("name", fedloom.__all__)
def test_every_exported_name_has_a_docstring_of_its_own(name):
    thing = getattr(fedloom, name)
    assert (thing.__doc__ or "").strip()
    assert not thing.__doc__.startswith(f"{name}(")  # what dataclasses write
    if inspect.isclass(thing):
        assert [key for key, function in members(thing) if not function.__doc__] == []


@pytest.mark.parametrize("name", fedloom.__all__)
def test_every_exported_name_is_in_the_reference(name):
    assert f"`{name}" in (ROOT / "docs" / "api.md").read_text()


@pytest.mark.parametrize(("name", "without"), [("run", set()), ("compare", {"seed"}), ("sweep", {"seed"})])
def test_signature_and_help_have_all_settings(name, without):
    function = getattr(fedloom, name)
    settings = {field.name for field in dataclasses.fields(Settings)} - without
    expected = settings | {"partition", "model", "head", "data_dir", "out", "resume"}
    assert expected <= set(inspect.signature(function).parameters)
    assert without.isdisjoint(inspect.signature(function).parameters)
    for key in expected:
        assert f"    {key}: " in inspect.getdoc(function)


def test_the_stub_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_stub", ROOT / "tools" / "make_stub.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.STUB.read_text() == tool.stub(), "run tools/make_stub.py"


@pytest.mark.parametrize(
    ("word", "setting"),
    [("learning_rate", "lr"), ("num_clients", "clients"), ("epochs", "local_epochs"), ("n_rounds", "rounds")],
)
def test_names_of_other_libraries_get_a_suggestion(word, setting):
    with user_error(f"'{word}'", f"did you mean '{setting}'?"):
        fedloom.run("fedavg", **{word: 1})

"""Runs by the label of their method, from whatever has runs."""

import pytest
from sentences import user_error

import fedloom
from fedloom.plots import results
from fedloom.plots.sources import with_view

TINY = {"rounds": 1, "clients": 3, "device": "cpu", "plan": "per-client"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders: `one` and `two` have a run of ditto each, `both` a comparison, `other` a run on other data."""
    home = tmp_path_factory.mktemp("sources")
    fedloom.run("ditto", lam=0.5, out=home / "one", **TINY)
    fedloom.run("ditto", lam=2.0, out=home / "two", **TINY)
    fedloom.run("ditto", "synthetic", out=home / "other", **TINY)
    fedloom.compare("fedavg", seeds=2, out=home / "both", **TINY)
    return home


def described(found):
    return {label: [result.config["seed"] for result in of] for label, of in found.items()}


def test_the_folder_of_a_run_a_comparison_and_their_objects(folder):
    assert described(results(folder / "one")) == {"ditto": [0]}
    expected = {"local": [0, 1], "fedavg": [0, 1]}
    assert described(results(folder / "both")) == expected
    assert described(results(str(folder / "both"))) == expected
    assert described(results(fedloom.load(folder / "both"))) == expected
    assert described(results(fedloom.load(folder / "one"))) == {"ditto": [0]}


def test_runs_of_several_folders_are_named_by_what_differs(folder):
    found = results(folder / "one", fedloom.load(folder / "two"))
    assert described(found) == {"ditto:lam=0.5": [0], "ditto:lam=2.0": [0]}


def test_equal_runs_are_named_by_their_folders(folder, tmp_path):
    fedloom.run("ditto", lam=0.5, out=tmp_path / "again", **TINY)
    assert list(results(folder / "one", tmp_path / "again")) == ["one: ditto", "again: ditto"]


def test_runs_in_memory_are_named_by_what_differs(made):
    a, b = made(settings={"lam": 0.5}), made(settings={"lam": 2.0})
    found = results(a, b, made(seed=1, settings={"lam": 2.0}))
    assert described(found) == {"ditto:lam=0.5": [0], "ditto:lam=2.0": [0, 1]}
    assert found["ditto:lam=0.5"][0] is a


def test_results_by_label_are_taken_as_they_are(made):
    mine = {"mine": (made(),)}
    assert results(mine) == {"mine": [mine["mine"][0]]}


def test_what_has_no_runs_or_runs_that_cannot_be_compared(folder, made):
    with user_error("cannot be compared", "the data set differs (digits and synthetic)"):
        results(folder / "one", folder / "other")
    other = made()
    other.partition = "q"
    with user_error("cannot be compared", "the division of the data differs"):
        results(made(), other)
    with user_error("Give the folder"):
        results()
    with user_error("no runs in '7'"):
        results(7)
    with user_error("memory and folders cannot be mixed"):
        results(made(), folder / "one")
    with user_error("There is no folder"):
        results(folder / "nowhere")
    with user_error("kept no runs", "out=FOLDER"):
        results(fedloom.compare("fedavg", seeds=1, **TINY))


def test_a_view_is_pre_post_or_global(made):
    with user_error("view cannot be 'gobal'", "pre, post, global"):
        with_view({"ditto": [made()]}, "gobal")

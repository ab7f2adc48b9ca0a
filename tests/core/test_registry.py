"""Names to things: what is found in a package, and what other packages add through entry points."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from sentences import user_error

from fedloom.core.registry import Registry


def distribution(folder, name, group, points, **modules):
    """An installed distribution: its modules, and what it says about itself."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {target}" for point, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A package with a registry of its own, in which `own` registers itself; its modules are forgotten afterwards."""
    package = tmp_path / "shelf_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fedloom.core.registry import Registry\nSHELF = Registry('book', 'shelf_of_tests')\n"
    )
    (package / "own.py").write_text("from shelf_of_tests import SHELF\nSHELF.add('own', 'ours')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    import shelf_of_tests  # not here before the fixture

    yield tmp_path, shelf_of_tests.SHELF
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def adds(name, thing):
    return f"from shelf_of_tests import SHELF\nSHELF.add({name!r}, {thing!r})\n"


def test_every_module_of_the_package_is_found(shelf):
    folder, books = shelf
    (folder / "shelf_of_tests" / "later.py").write_text(adds("later", "a new file is all it takes"))
    assert books.names() == ["later", "own"]
    assert books["later"] == "a new file is all it takes"


def test_an_unknown_name_gets_the_nearest_one(shelf):
    _, books = shelf
    with user_error("Unknown book 'onw'", "did you mean 'own'?"):
        books["onw"]


def test_other_packages_add_theirs(shelf):
    folder, books = shelf
    distribution(folder, "guest", "shelf_of_tests", {"whatever": "guest_of_tests"}, guest_of_tests=adds("guest", "hi"))
    assert books.names() == ["guest", "own"]
    assert books["guest"] == "hi"


def test_what_other_packages_add_to_other_groups_is_not_loaded(shelf):
    folder, books = shelf
    distribution(folder, "guest", "shelf_elsewhere", {"x": "guest_of_tests"}, guest_of_tests="raise SystemError")
    assert books.names() == ["own"]
    assert "guest_of_tests" not in sys.modules


BROKEN = {
    "an error": ("broken_of_tests", "raise RuntimeError('out of order')", "out of order"),
    "a syntax error": ("broken_of_tests", "def (", "invalid syntax"),
    "a missing package": ("broken_of_tests", "import not_there_at_all", "not_there_at_all"),
    "a missing module": ("absent_of_tests", "", "absent_of_tests"),
    "a missing class": ("broken_of_tests:Absent", "", "Absent"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_package_is_named_in_a_warning_and_hinders_nobody(problem, shelf, caplog):
    folder, books = shelf
    target, text, words = BROKEN[problem]
    distribution(
        folder, "guests", "shelf_of_tests", {"a": "first_of_tests", "b-broken": target, "c": "last_of_tests"},
        first_of_tests=adds("first", 1), broken_of_tests=text, last_of_tests=adds("last", 2),
    )  # fmt: skip
    assert books.names() == ["first", "last", "own"]
    (warning,) = [record for record in caplog.records if record.name == "fedloom"]
    assert warning.levelname == "WARNING"
    message = warning.getMessage()
    assert "book 'b-broken'" in message
    assert words in message
    assert books.names() == ["first", "last", "own"]  # asked again, it is not loaded or reported again
    assert len(caplog.records) == 1


def test_another_package_does_not_replace_what_is_there(shelf, caplog):
    folder, books = shelf
    text = "from shelf_of_tests import SHELF\nclass Mine: pass\nSHELF.add('own', Mine)\n"
    distribution(folder, "guest", "shelf_of_tests", {"theirs": "clash_of_tests"}, clash_of_tests=text)
    assert books["own"] == "ours"
    (warning,) = caplog.records
    for words in ("'theirs'", "two books are called 'own'", "clash_of_tests.Mine"):
        assert words in warning.getMessage()


def test_a_name_that_is_taken_before_the_package_is_loaded_does_not_break_it(shelf):
    """A script defines its class before anything is asked for; whoever is told, what is built in stays."""
    folder, books = shelf
    (folder / "shelf_of_tests" / "zebra.py").write_text(adds("zebra", "last to be loaded"))
    with suppress(ValueError):
        books.add("own", type("Mine", (), {}))
    assert books.names() == ["own", "zebra"]
    assert books["own"] == "ours"


def test_two_things_of_one_name_are_a_mistake_and_the_first_stays():
    class First: ...

    class Second: ...

    registry = Registry("thing", "fedloom.algorithms")
    registry.add("x", First)
    with pytest.raises(ValueError, match=r"two things are called 'x'.*First.*Second"):
        registry.add("x", Second)
    assert registry["x"] is First


def test_a_thing_defined_again_replaces_itself():
    def define():
        class Cell: ...

        return Cell

    registry = Registry("thing", "fedloom.algorithms")
    before, after = define(), define()
    registry.add("x", before)
    registry.add("x", after)
    assert registry["x"] is after is not before


GUEST = '''
from dataclasses import dataclass

from fedloom import setting
from fedloom.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Guest(FedAvg):
    """FedAvg whose server goes a part of the way."""

    name = "guest"
    source = "Somebody else"
    shared = "model"
    private = "nothing"
    share: float = setting(1.0, "of the way", low=0, high=1)

    def aggregate(self, task, server, up, info, t, key):
        new = super().aggregate(task, server, up, info, t, key)
        return {"w": {k: (1 - self.share) * server["w"][k] + self.share * v for k, v in new["w"].items()}}
'''
CLASH = '''
from fedloom.algorithms.local import Local


class Impostor(Local):
    """Not FedAvg."""

    name = "fedavg"
    source = "Somebody else"
'''


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment of a process that has three more distributions: one works, one is broken, one takes a name."""
    folder = tmp_path_factory.mktemp("site")
    group = "fedloom.algorithms"
    distribution(
        folder, "aaa", group, {"broken-one": "broken_guest"}, broken_guest="raise RuntimeError('out of order')"
    )
    distribution(folder, "bbb", group, {"impostor": "clashing_guest:Impostor"}, clashing_guest=CLASH)
    distribution(folder, "ccc", group, {"guest": "working_guest:Guest"}, working_guest=GUEST)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def python(environment, *args):
    done = subprocess.run(
        [sys.executable, *args], env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_method_of_another_package_is_listed(environment):
    done = python(environment, "-m", "fedloom", "list", "algorithms", "--json")
    found = {a["name"]: a for a in json.loads(done.stdout)}
    assert found["guest"]["source"] == "Somebody else"
    assert found["guest"]["settings"]["share"] == {"default": 1.0, "about": "of the way"}
    assert found["fedavg"]["source"] != "Somebody else"
    assert {"local", "fedavg", "ditto"} <= set(found)
    warnings = done.stderr.strip().splitlines()
    assert len(warnings) == 2
    assert sum("'broken-one'" in w and "out of order" in w for w in warnings) == 1
    assert sum("'impostor'" in w and "two algorithms are called 'fedavg'" in w for w in warnings) == 1


def test_a_method_of_another_package_runs(environment):
    """All the way it is FedAvg, no part of the way the model stays what it was."""
    probe = """
import json, fedloom
task = dict(dataset="synthetic", per_client=60, clients=5, rounds=2, engine="reference")
def norm(result): return sum(float(v.abs().sum()) for v in result.server["w"].values())
plain, all_, none = fedloom.run("fedavg", **task), fedloom.run("guest", **task), fedloom.run("guest", share=0, **task)
board = fedloom.compare(["guest:share=0.5"], seeds=1, **task).rows()
print(json.dumps([norm(plain), norm(all_), norm(none), all_.config["algorithm"], [row["method"] for row in board]]))
"""
    plain, all_, none, described, methods = json.loads(python(environment, "-c", probe).stdout)
    assert all_ == pytest.approx(plain, rel=1e-6)
    assert plain > 0
    assert none == 0  # logistic regression starts at zero
    assert described == {"name": "guest", "share": 1.0}
    assert sorted(methods) == ["guest:share=0.5", "local"]

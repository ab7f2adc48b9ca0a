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
def example(tmp_path, monkeypatch):
    """The folder of a package with a registry, in which its module `builtin` registers a value, and the registry. The
    modules are removed from `sys.modules` afterwards."""
    package = tmp_path / "example_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fedloom.core.registry import Registry\nREGISTRY = Registry('widget', 'example_package')\n"
    )
    (package / "builtin.py").write_text(adds("builtin", "built in"))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    import example_package  # it exists since the lines above

    yield tmp_path, example_package.REGISTRY
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def adds(name, thing):
    """The text of a module that registers something."""
    return f"from example_package import REGISTRY\nREGISTRY.add({name!r}, {thing!r})\n"


def test_every_module_of_the_package_is_found(example):
    folder, registry = example
    (folder / "example_package" / "later.py").write_text(adds("later", "from a new file"))
    assert registry.names() == ["builtin", "later"]
    assert registry["later"] == "from a new file"


def test_an_unknown_name_gets_the_nearest_one(example):
    _, registry = example
    with user_error("Unknown widget 'bultin'", "did you mean 'builtin'?"):
        registry["bultin"]


def test_other_packages_register_through_entry_points(example):
    folder, registry = example
    distribution(folder, "guest", "example_package", {"whatever": "guest_module"}, guest_module=adds("guest", "hi"))
    assert registry.names() == ["builtin", "guest"]
    assert registry["guest"] == "hi"


def test_what_other_packages_add_to_other_groups_is_not_loaded(example):
    folder, registry = example
    distribution(folder, "guest", "another_group", {"x": "guest_module"}, guest_module="raise SystemError")
    assert registry.names() == ["builtin"]
    assert "guest_module" not in sys.modules


BROKEN = {
    "an error": ("broken_module", "raise RuntimeError('out of order')", "out of order"),
    "a syntax error": ("broken_module", "def (", "invalid syntax"),
    "a missing package": ("broken_module", "import not_there_at_all", "not_there_at_all"),
    "a missing module": ("absent_module", "", "absent_module"),
    "a missing class": ("broken_module:Absent", "", "Absent"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_package_is_named_in_a_warning_and_others_are_loaded(problem, example, caplog):
    folder, registry = example
    target, text, words = BROKEN[problem]
    distribution(
        folder, "guests", "example_package", {"a": "first_module", "b-broken": target, "c": "last_module"},
        first_module=adds("first", 1), broken_module=text, last_module=adds("last", 2),
    )  # fmt: skip
    assert registry.names() == ["builtin", "first", "last"]
    (warning,) = [record for record in caplog.records if record.name == "fedloom"]
    assert warning.levelname == "WARNING"
    message = warning.getMessage()
    assert "widget 'b-broken'" in message
    assert words in message
    assert registry.names() == ["builtin", "first", "last"]  # asked again, it is not loaded or reported again
    assert len(caplog.records) == 1


def test_another_package_does_not_replace_what_is_there(example, caplog):
    folder, registry = example
    text = "from example_package import REGISTRY\nclass Mine: pass\nREGISTRY.add('builtin', Mine)\n"
    distribution(folder, "guest", "example_package", {"theirs": "clash_module"}, clash_module=text)
    assert registry["builtin"] == "built in"
    (warning,) = caplog.records
    for words in ("'theirs'", "two widgets are called 'builtin'", "clash_module.Mine"):
        assert words in warning.getMessage()


def test_a_name_that_is_taken_before_the_package_is_loaded_does_not_break_it(example):
    """A script defines its class before anything is looked up. Whether this is an error or not, the built-in
    one stays."""
    folder, registry = example
    (folder / "example_package" / "zebra.py").write_text(adds("zebra", "last to be loaded"))
    with suppress(ValueError):
        registry.add("builtin", type("Mine", (), {}))
    assert registry.names() == ["builtin", "zebra"]
    assert registry["builtin"] == "built in"


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
    """FedAvg whose server moves to a share of the average."""

    name = "guest"
    source = "Somebody else"
    shared = "model"
    private = "nothing"
    share: float = setting(1.0, "of the average", low=0, high=1)

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
    assert found["guest"]["settings"]["share"] == {"default": 1.0, "about": "of the average"}
    assert found["fedavg"]["source"] != "Somebody else"
    assert {"local", "fedavg", "ditto"} <= set(found)
    warnings = done.stderr.strip().splitlines()
    assert len(warnings) == 2
    assert sum("'broken-one'" in w and "out of order" in w for w in warnings) == 1
    assert sum("'impostor'" in w and "two algorithms are called 'fedavg'" in w for w in warnings) == 1


def test_a_method_of_another_package_runs(environment):
    """With a share of 1 it is FedAvg, with a share of 0 the model does not change."""
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
    assert sorted(methods) == ["guest:share=0.5", "local", "majority"]

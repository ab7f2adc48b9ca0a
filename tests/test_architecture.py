"""The packages are layered as docs/architecture.md says: the imports are computed from the source."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedloom"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ENGINE = ("graph", "executors", "planning")  # each may import those before it
SERVER_SIDE = ("clients", "driver", "simulation", "run_group", "stacked_settings", "grouping")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imports(path: Path) -> Iterator[str]:
    """Modules of FedLoom that a file imports, anywhere in it, also for type checking only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "fedloom")


def package(module: str) -> str:
    """`engine` of `fedloom.engine.driver`; the root package has none."""
    return module.split(".")[1] if module.count(".") else ""


def documented() -> dict[str, set[str]]:
    """Packages in the order of the page, with those that they may import."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", PAGE.partition("## The engine")[0], re.MULTILINE)
    found: dict[str, set[str]] = {}
    for name, allowed in rows:
        found[name] = set(found) if "all of the above" in allowed else set(re.findall(r"\w+", allowed))
    return found


def test_the_page_names_every_package():
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} - {"presets"}
    assert set(documented()) == folders


def test_packages_come_after_those_that_they_import():
    before: set[str] = set()
    for name, allowed in documented().items():
        assert allowed <= before, name
        before.add(name)


@pytest.mark.parametrize("name", sorted(documented()))
def test_a_package_imports_what_the_page_says_and_nothing_else(name):
    found = {
        package(other)
        for module, path in MODULES.items()
        if package(module) == name
        for other in imports(path)
        if package(other) not in (name, "")
    }
    assert found == documented()[name] if name not in ("studies", "cli") else found <= documented()[name]


def test_algorithms_import_core_and_each_other_only():
    for module, path in MODULES.items():
        if package(module) == "algorithms":
            assert {package(other) for other in imports(path)} <= {"core", "algorithms"}, module


def test_no_module_imports_itself_through_others():
    """Without imports for type checking only, and without those inside functions, which run later."""
    graph = {}
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        graph[module] = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedloom"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in MODULES else node.module for name in names}
    graph["fedloom"] = set()  # it imports lazily
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


def test_the_parts_of_the_engine_are_layered():
    for module, path in MODULES.items():
        parts = module.split(".")
        if package(module) != "engine" or len(parts) < 4:
            continue
        later = (*ENGINE[ENGINE.index(parts[2]) + 1 :], *SERVER_SIDE)
        for other in imports(path):
            assert not other.startswith(tuple(f"fedloom.engine.{name}" for name in later)), f"{module} imports {other}"

"""What a reader can copy from the README and the documentation works.

Every page is carried out from top to bottom in a folder of its own: Python blocks in one scope, commands as the real
command line does, in this process. Only training is cut, to one or two rounds with one batch each. On the pages of
results, commands are checked up to the first round.

What a block is follows from the language after its fence: `python` is run; without a language, or with `sh`, `bash` or
`console`, every line is a command, or every line that begins with `$`, followed by what it prints; `text` and `csv` are
only shown. A block with a title (```python title="my_method.py") is the contents of a file. Commands and calls in
backticks count, too. What cannot be carried out is in EXCEPTIONS, with the reason.
"""

import argparse
import ast
import contextlib
import dataclasses
import doctest
import functools
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from helpers import run_cli
from owndata import arrays, csv, rows, write

import fedloom.cli.commands
import fedloom.studies.audit
import fedloom.studies.compare
import fedloom.studies.costs
import fedloom.studies.run
from fedloom.cluster.actors import session
from fedloom.config import keywords, resolve
from fedloom.config.files import preset
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.federation import Federation
from fedloom.data import dataset, fetch
from fedloom.data.dataset import DATASETS
from fedloom.data.partitions import PARTITIONS
from fedloom.deployment.host import Host
from fedloom.deployment.links import InProcess
from fedloom.deployment.serve import Server
from fedloom.metrics import registry
from fedloom.models.zoo import MODELS
from fedloom.studies import execute, reproduce, study
from fedloom.studies.build import make_task, optimization

ROOT = Path(__file__).parents[1]
HOME = os.environ.get("HOME", "/")
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
RESULTS = "docs/results/"  # pages whose commands made their tables: hours of training

EXCEPTIONS = {  # first line of an example -> why it is not carried out
    "from datasets import load_from_disk": "needs the library datasets, which FedLoom does without",
    ".venv/bin/python -m pytest tests/algorithms/test_averaging.py": "a test that the reader writes",
    ".venv/bin/pip install pre-commit": "needs an index of packages",
    ".venv/bin/pre-commit install": "needs the tool pre-commit",
    "fedloom compare fedavg fedrep ditto --seeds 3 --devices 0,1   # on two GPUs, a process on each": "needs GPUs",
    "fedloom --install-completion": "changes the configuration of the shell; tests/cli/test_help.py has completion",
}

PROGRAMS = ("fedloom", "make", "pip", "pytest", "python")  # that a Reader knows
FEDERATION = ("join", "serve", "status")  # commands that need a server and sites
COMMANDS = ("", "sh", "bash", "console")  # languages of blocks with commands
SHOWN = ("text", "csv")  # languages of blocks with nothing to carry out

PLACEHOLDERS = {  # (word before it, placeholder) -> what a reader may put there
    ("algorithms", "NAME"): "ditto",
    ("datasets", "NAME"): "digits",
    ("models", "NAME"): "mlp",
    ("download", "NAME"): "digits",
    ("--dataset", "NAME"): "digits",
    ("--model", "NAME"): "mlp",
    ("--models", "MODEL"): "mlp",
    ("--data-dir", "FOLDER"): ".",
    ("--dtype", "tf32"): "float32",  # on a CPU
    ("check", "PATH"): "patients.csv",
    ("run", "package.module:Class"): "fedloom.algorithms.ditto:Ditto",
}


# -- examples of a page


@dataclass(frozen=True)
class Example:
    kind: str  # "python", "command", "call" (Python in backticks), "options" (of some command), "file", or "unknown"
    code: str
    line: int  # in the page
    inline: bool = False
    shows: str = ""  # what a command prints, according to the page, or the name of a file

    @property
    def first(self) -> str:
        return self.code.strip().splitlines()[0]


FENCE = re.compile(
    r"^ *(?P<fence>```+|~~~+)(?P<language>[^\n`]*)\n(?P<code>.*?)^ *(?P=fence) *$", re.MULTILINE | re.DOTALL
)


def examples(text: str) -> list[Example]:
    """All examples of a page, in their order."""
    found = []
    for block in FENCE.finditer(text):
        code, line = textwrap.dedent(block["code"]), line_of(text, block.start("code"))
        language = block["language"].strip()
        if title := re.search(r' title="(.+)"', language):
            found.append(Example("file", code, line, shows=title[1]))
        elif language == "python":
            found.append(Example("python", code, line))
        elif language in COMMANDS:
            found += commands(code, line)
        elif language in SHOWN:  # where a command may stand above what it does
            found += [e for e in commands(code, line) if e.code.startswith("fedloom ")]
        else:
            found.append(Example("unknown", f"```{language}", line))
    prose = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    assert not re.search(r"^ *(```|~~~)", prose, re.MULTILINE), "a block does not end, or not as it began"
    for span in re.finditer(r"`([^`]+)`", prose):
        code, line = " ".join(span[1].split()), line_of(text, span.start())
        if is_command(code):
            found.append(Example("command", code, line, inline=True))
        elif re.match(r"fedloom\.\w", code):
            found.append(Example("call", code, line, inline=True))
        elif code.startswith("--"):
            found.append(Example("options", code, line, inline=True))
    for block in re.finditer(
        r"(?:\A|^[ \t]*\n)((?:(?: {4}|\t)[ \t]*\S.*\n?)+)", prose, re.MULTILINE
    ):  # an indented block
        indented = commands(textwrap.dedent(block[1]), line_of(text, block.start(1)))
        found += [example for example in indented if is_command(example.code)]
    return sorted(found, key=lambda example: example.line)


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def commands(code: str, line: int) -> Iterator[Example]:
    """The commands of a block. If some lines begin with `$`, the others are what they print."""
    logical: list[tuple[int, str]] = []
    for number, text in enumerate(code.splitlines(), line):
        if logical and logical[-1][1].endswith("\\"):
            logical[-1] = logical[-1][0], logical[-1][1][:-1] + text.strip()
        else:
            logical.append((number, text))
    if not any(text.startswith("$ ") for _, text in logical):
        yield from (Example("command", text, n) for n, text in logical if text.strip() and not text.startswith("#"))
        return
    starts = [place for place, (_, text) in enumerate(logical) if text.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(logical)], strict=True):
        number, text = logical[start]
        yield Example("command", text[2:], number, shows="\n".join(text for _, text in logical[start + 1 : end]))


def is_command(code: str) -> bool:
    """True for what stands in backticks and is a program with arguments, or a script with arguments."""
    words = without_variables(code.split())
    if len(words) > 1 and program_name(words) in PROGRAMS:
        return True
    return bool(words) and bool(re.fullmatch(r"[\w/]+\.py", words[0])) and (len(words) > 1 or words != code.split())


def program_name(words: list[str]) -> str:
    """The program of a command: python for `.venv/bin/python3`."""
    return Path(words[0]).name.removesuffix("3")


def without_variables(words: list[str]) -> list[str]:
    """The words of a command without variables in front of it, such as OMP_NUM_THREADS=1."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return words


def tables(text: str) -> list[tuple[list[str], set[str]]]:
    """The tables that a command prints: the names of the columns, and the names of the rows."""
    found, lines = [], text.splitlines()
    for above, rule in zip(range(len(lines)), lines[1:], strict=False):
        if re.fullmatch(r"\s*─+\s*", rule):
            columns = re.split(r"\s{2,}", lines[above].strip())
            body = (line.strip() for line in lines[above + 2 :])
            cells = [re.split(r"\s{2,}", line) for line in iter(lambda b=body: next(b, ""), "")]
            found.append((columns, {row[columns[0] == "#"] for row in cells if len(row) > 1}))
    return found


# -- what a reader does with them


class NotTrained(Exception):
    """Everything before the first round was fine."""


class Parsed(Exception):
    """A script has accepted its options, which are the argument."""


class Reader:
    """Carries out the examples of one page in the current folder."""

    def __init__(self, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.page, self.monkeypatch, self.capsys = page, monkeypatch, capsys
        self.scope: dict = {"__name__": "example"}

    def carry_out(self, example: Example) -> None:
        try:
            if example.first in EXCEPTIONS:
                return
            if example.kind == "python":
                exec(compile("\n" * (example.line - 1) + example.code, self.page, "exec"), self.scope)
            elif example.kind == "file":
                write(Path(example.shows), example.code)
            elif example.kind == "call":
                check_call(example.code)
            elif example.kind == "options":
                check_options(example.code)
            elif example.kind == "command":
                self.command(example)
            else:
                pytest.fail(f"name the language of the block {example.code}: python, text, csv, or none for commands")
        except BaseException as error:
            error.add_note(f"{self.page}, line {example.line}: {example.first}")
            raise

    def command(self, example: Example) -> None:
        code = re.sub(r"\[(--[^]]*)\]", r"\1", example.code)  # in brackets are options that may be left out
        words = without_variables(shlex.split(code, comments=True))
        words = [self.filled(words, place) for place in range(len(words))]
        program = program_name(words)
        if program == "fedloom":
            if not (example.inline and names_a_command(words[1:])):
                self.run_fedloom(words[1:], example.shows)
        elif program in PROGRAMS:
            getattr(self, f"run_{program}")(words[1:])
        elif program.endswith(".py"):
            self.run_python(words)
        else:
            pytest.fail(f"'{program}' is no program that this test knows; mark what is no command as ```text")

    def filled(self, words: list[str], place: int) -> str:
        """A word, or what a placeholder stands for. DIR is the folder of an earlier run, comparison or sweep."""
        word = words[place]
        if re.match(r"DIR\b", word):
            folder = f"DIR-{words[1]}"
            if not Path(folder).exists():
                grid = ["--grid", "lr=0.01,0.1"] if words[1] == "sweep" else []
                self.run_fedloom([words[1], "--rounds", "1", "--clients", "3", "--out", folder, *grid])
            return word.replace("DIR", folder)
        known = PLACEHOLDERS.get((words[place - 1], word))
        assert known or not re.fullmatch(r"[A-Z]{2,}", word), f"say in PLACEHOLDERS what {word} stands for"
        return known or word

    def run_fedloom(self, words: list[str], shows: str = "") -> None:
        if words[0] in FEDERATION and "--dry-run" not in words:  # tests/federation has servers and sites
            context = typer.main.get_command(fedloom.cli.commands.app).make_context("fedloom", list(words))
            context.command.get_command(context, words[0]).make_context(words[0], words[1:], parent=context)
            return
        try:
            code, out, err = run_cli(self.monkeypatch, self.capsys, *words)
        except NotTrained:
            return
        if missing := re.search(r"^fedloom: Data set '(\S+)' was not found", err, re.MULTILINE):
            assert not DATASETS[missing[1]].built_in
            return  # everything else about the command is right
        assert code == (2 if "not ready" in shows else 0), err
        if words[:2] == ["data", "check"] and shows:
            assert [line.rstrip() for line in out.strip().splitlines()] == shows.strip().splitlines()
        printed = tables(out)
        for table in tables(shows):
            assert table in printed, f"{table} is not among {printed}"

    def run_make(self, words: list[str]) -> None:
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), f"make has no target {' '.join(words)}"

    def run_pip(self, words: list[str]) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[0] == "install"
        for word in words[1:]:
            found = re.fullmatch(r"(?:\.|fedloom)(?:\[(.*)\])?|--?[a-z]+", word)
            assert found, f"pip is not asked for FedLoom, but for {word}"
            assert set(found[1].split(",") if found[1] else ()) <= set(extras), f"there is no extra {found[1]}"

    def run_pytest(self, words: list[str]) -> None:
        for word in words:
            assert "/" not in word or (ROOT / word.partition("::")[0]).exists(), f"there is no {word}"

    def run_python(self, words: list[str]) -> None:
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"there is no module {words[1]}"
            if words[1] in PROGRAMS:
                getattr(self, f"run_{words[1]}")(words[2:])
            return
        path = next((p for p in (ROOT / words[0], ROOT / "benchmarks" / words[0]) if p.is_file()), None)
        assert path, f"there is no {words[0]}"
        options = parsed(path, words[1:], self.monkeypatch)
        fedloom.studies.compare.configurations(getattr(options, "methods", None) or [], {})


def names_a_command(words: list[str]) -> bool:
    """True for `predict` or `data check`: the name of a command, without arguments."""
    command = typer.main.get_command(fedloom.cli.commands.app)
    for word in words:
        command = getattr(command, "commands", {}).get(word)
    return command is not None


def check_options(code: str) -> None:
    """`--set keep=last` and the like are options of some command, or of a benchmark."""
    known = {"--help"}
    groups = [typer.main.get_command(fedloom.cli.commands.app)]
    for command in groups:  # which grows
        known |= {option for parameter in command.params for option in parameter.opts}
        groups += getattr(command, "commands", {}).values()
    for path in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r"add_argument\(\"(--[\w-]+)", path.read_text()))
    for option in re.findall(r"(?<!\S)--[a-z][\w-]*", code):
        assert option in known, f"no command has the option {option}"
    for name in re.findall(r"--preset ([a-z]\S*)", code):
        preset(name)  # raises UserError for an unknown one


def check_call(code: str) -> None:
    """The names in `fedloom.run(..., out="folder")` exist, and the functions take these arguments."""
    dotted = re.compile(r"fedloom(\.\w+)+")
    for node in ast.walk(ast.parse(code, mode="eval")):
        if isinstance(node, ast.Attribute) and dotted.fullmatch(name := ast.unparse(node)):
            find(name)
        if isinstance(node, ast.Call) and dotted.fullmatch(name := ast.unparse(node.func)):
            named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(find(name)).bind(*node.args, **named)


def find(dotted: str) -> Any:
    """The object with a dotted name, such as fedloom.core.tree.add."""
    parts = dotted.split(".")
    found: Any = fedloom
    for end in range(1, len(parts)):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(".".join(parts[: end + 1]))
        found = getattr(found, parts[end])
    return found


def parsed(path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The options as a script reads them. It is imported, with what lies beside it, but does nothing else."""
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser):
        raise Parsed(parse(parser, options))

    def refuse(parser, message):
        pytest.fail(message)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patched.setattr(argparse.ArgumentParser, "error", refuse)
        with pytest.raises(Parsed) as found:
            module.main()
    return found.value.args[0]


# -- files that pages talk about

Files = Callable[[], object]


def hospitals(columns: str, n: int = 90) -> str:
    """A table of patients: site, age, sex, pressure and diagnosis, or some of these, under the names given."""
    draw = np.random.default_rng(0)
    made = [(*row[:3], 100 + int(draw.integers(60)), row[3]) for row in rows(n)]
    usual = ["site", "age", "sex", "pressure", "diagnosis"]
    others = {"client": "site", "label": "diagnosis"}
    places = [usual.index(others.get(name, name)) for name in columns.split(",")]
    return csv([[row[place] for place in places] for row in made], columns)


def own_method() -> None:
    method = next(e.code for e in examples((ROOT / "docs/new-method.md").read_text()) if e.kind == "python")
    write(Path("my_method.py"), method.replace('"averaging"', '"mine"'))


def readme() -> None:
    own_method()
    write(Path("hospitals.csv"), hospitals("site,age,sex,pressure,label"))
    arrays(Path("new.npz"), x=np.zeros((3, 1, 8, 8)))


def trained_models() -> None:
    write(Path("hospitals.csv"), hospitals("site,age,sex,pressure,diagnosis"))
    write(Path("patients.csv"), hospitals("site,age,sex,pressure", 5))
    write(Path("oslo.csv"), hospitals("age,sex,pressure,diagnosis", 30))
    write(Path("oslo-new.csv"), hospitals("age,sex,pressure", 5))


def own_data() -> None:
    write(Path("patients.csv"), hospitals("client,age,sex,pressure,label"))
    write(Path("hospitals.csv"), hospitals("site,age,sex,pressure,diagnosis"))


def with_mistakes() -> str:
    page = (ROOT / "docs/own-data.md").read_text()
    (table,) = re.findall(r"^```csv\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    write(Path("hospitals.csv"), table)
    return table


def without_mistakes() -> None:
    write(Path("hospitals.csv"), with_mistakes().replace("rome", "Rome").replace("high", "148"))


def tutorial_data() -> None:
    """The data that one tutorial makes, and another uses."""
    page = (ROOT / "docs/tutorials/own-data.md").read_text()
    exec(next(e.code for e in examples(page) if e.kind == "python"), {})


def site() -> None:
    """What a site has: its folder and its data."""
    shutil.copytree("federation/site-0", "site-0")
    write(Path("patients.csv"), hospitals("age,sex,pressure,label"))
    write(Path("public.csv"), hospitals("age,sex,pressure,diagnosis"))


def trained_site() -> None:
    """A site that has taken part in a run, and what its models are used for."""
    train_sites({f"site-{i}": "patients.csv" for i in range(2)})
    write(Path("new-patients.csv"), hospitals("age,sex,pressure", 5))


def trained_tutorial_sites() -> None:
    train_sites({"federation/site-0": "Athens.csv", "federation/site-1": "Berlin.csv"}, label="diagnosis")


def train_sites(files: dict[str, str], **options: str) -> None:
    """A round of a federation, in this process; the folders of the sites and their data are given."""
    sites = [(folder, {"name": "own", "path": path, **options}) for folder, path in files.items()]
    hosts = {i: Host(i, Path(site, "runs"), {"dataset": data, "device": "cpu"}) for i, (site, data) in enumerate(sites)}
    Server(InProcess(hosts)).run_on_own_data({"algorithm": "fedrep", "rounds": 1}, len(hosts))


FILES: dict[str, dict[str, Files]] = {  # page -> start of an example, or "" for the first -> what is written before it
    "README.md": {"": readme},
    "docs/new-method.md": {"": own_method},
    "docs/federation.md": {"fedloom join site-0 --dataset": site, "fedloom predict": trained_site},
    "docs/comparisons.md": {"": own_method},
    "docs/trained-models.md": {"": trained_models},
    "docs/tutorials/own-method.md": {"": tutorial_data},
    "docs/tutorials/federation.md": {"": tutorial_data, "fedloom predict": trained_tutorial_sites},
    "docs/own-data.md": {
        "": own_data,
        "fedloom data check hospitals.csv --set label": with_mistakes,
        "fedloom data check hospitals.csv --set label=diagnosis --set client=site --set missing": without_mistakes,
    },
}


# -- less training


def cut(config: resolve.Config) -> resolve.Config:
    """The configuration with one batch per epoch, unless the method needs several, and at most 8 clients, unless the
    data have more. A few rounds stay, because an example may look at the last one; many become one or two, so that a
    run that is given more has something to do."""
    s = config.settings
    optimization(s)  # raises UserError where fewer rounds could hide a mistake
    rounds = s.rounds if s.rounds <= 5 else 1 if s.rounds <= 20 else 2
    fixed = isinstance(config.dataset, Federation) or config.dataset.natural_clients() is not None
    less = {
        "clients": s.clients if fixed else min(s.clients, 8),
        "rounds": rounds,
        "lr_warmup": min(s.lr_warmup, rounds - 1),
        "local_epochs": 1,
        "batch_size": s.batch_size if hasattr(config.algorithm, "allow_small") else 10**6,
        "plan": "per-client" if s.plan == "auto" else s.plan,
        "device": "cpu" if s.device == "auto" else s.device,
    }
    return dataclasses.replace(config, settings=dataclasses.replace(s, **less))


def refuse_training(configs: list[resolve.Config], **options: object) -> None:
    make_task(configs[0])
    raise NotTrained


@pytest.fixture
def reader(tmp_path, monkeypatch, capsys):
    """A function that makes a Reader for a page. Whatever examples register is forgotten afterwards."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("HOME", "XDG_CACHE_HOME", "FEDLOOM_DATA"):  # no data set is there, and nothing is installed for good
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for known in (ALGORITHMS, DATASETS, MODELS, PARTITIONS):
        monkeypatch.setattr(known, "_known", {name: known[name] for name in known.names()})
    for name in DATASETS.names():
        monkeypatch.setattr(DATASETS[name], "debian", None)
    monkeypatch.setattr(registry, "OWN", {})

    @functools.wraps(fetch.download)
    def download(data, data_dir=None, on_progress=None):
        return dataset.folders(data, data_dir)[0]

    monkeypatch.setattr(fetch, "download", download)
    configure, parse_seeds = resolve.configure, study.parse_seeds

    def make_reader(page: str) -> Reader:
        if page.startswith(RESULTS):
            for module in (execute, reproduce, study):
                monkeypatch.setattr(module, "execute_group", refuse_training)
        else:
            for module in (resolve, keywords):
                monkeypatch.setattr(module, "configure", lambda *given, **named: cut(configure(*given, **named)))
            monkeypatch.setattr(study, "parse_seeds", lambda seeds: parse_seeds(seeds)[:1])
        return Reader(page, monkeypatch, capsys)

    return make_reader


# -- tests


@pytest.mark.parametrize("page", [page for page in PAGES if examples((ROOT / page).read_text())])
def test_a_page_can_be_carried_out(page, reader, monkeypatch):
    someone, prepared = reader(page), FILES.get(page, {})
    if page == "docs/cluster.md":
        monkeypatch.setenv("HOME", HOME)  # Ray keeps a token there, which a process reads once
    with session() if page == "docs/cluster.md" else contextlib.nullcontext():  # Ray starts once, not for every command
        for number, example in enumerate(examples((ROOT / page).read_text())):
            for start, make_files in prepared.items():
                if example.first.startswith(start) if start else number == 0:
                    make_files()
            someone.carry_out(example)
    for name, thing in list(someone.scope.items()):
        if name.startswith("test_"):  # a page about testing shows a test
            thing()


def test_every_exception_and_every_file_is_needed():
    each = {page: [example.first for example in examples((ROOT / page).read_text())] for page in PAGES}
    assert set(EXCEPTIONS) <= {first for found in each.values() for first in found}
    for page, prepared in FILES.items():
        for start in prepared:
            assert any(first.startswith(start) for first in each[page]), (page, start)


@pytest.mark.parametrize("page", ["docs/page.md", "docs/results/page.md"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nimport fedloom\n\nfedloom.run('fedavgg')\n```", "did you mean 'fedavg'"),
        ("```\nfedloom run --set lamda=1\n```", "Unknown setting 'lamda'"),
        ("```\nfedloom run fedrep --dataset fmnist --set bta=3\n```", "Unknown setting 'bta'"),  # data are not there
        ("```\nfedloom compare fedavg ditto --set aggregation=median --set trim=0.1\n```", "belongs to aggregation="),
        ("```\nfedloom sweep ditto --grid lam=0.1,-1\n```", "must be"),
        ("```\nfedloom run --preset gpfl/nothing\n```", "Unknown preset"),
        ("```\n$ fedloom list models\n name   width\n ────────────\n mlp    64\n```", "is not among"),
        ("```\ndata/berlin.csv\n```", "mark what is no command"),
        ("```unheard-of\nfedloom run\n```", "name the language"),
        ("* In a list:\n  ```\n  fedloom run --nothing 3\n  ```", "option"),
        ("    fedloom compare --seeds none", "seeds must be"),
        ("Use `fedloom nothing`.", "command 'nothing'"),
        ("Use `fedloom list models SOMETHING`.", "say in PLACEHOLDERS"),
        ("```text\nfedloom run nothing\ncli -> engine\n```", "Unknown algorithm"),
        ("Set `--set lam=1 --nothing 1`.", "no command has the option --nothing"),
        ("Take `--preset nothing`.", "Unknown preset"),
        ("Use `fedloom.nothing`.", "has no attribute 'nothing'"),
        ("Use `fedloom.load(file='x')`.", "missing a required argument"),
        ("Use `make nothing`.", "make has no target"),
        ("Use `pip install '.[nothing]'`.", "there is no extra"),
        ("Use `python3 -m fedloom run nothing`.", "Unknown algorithm"),
        ("Use `python -m pytest tests/test_nothing.py`.", "there is no tests/test_nothing.py"),
        ("Use `python benchmarks/nothing.py`.", "there is no benchmarks/nothing.py"),
        ("Use `python benchmarks/robustness.py nothing`.", "invalid choice"),
        ("Use `python benchmarks/methods.py --methods nothing`.", "Unknown algorithm"),
    ],
)
def test_a_wrong_example_is_found(text, said, page, reader):
    (example,) = examples(text)
    with pytest.raises((Exception, pytest.fail.Exception), match=re.escape(said)):
        reader(page).carry_out(example)


@pytest.mark.parametrize(
    "module",
    [fedloom.studies.run, fedloom.studies.compare, fedloom.studies.costs, fedloom.studies.audit],
    ids=lambda module: module.__name__,
)
def test_the_examples_of_functions_are_true(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0

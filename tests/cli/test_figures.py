"""`fedloom plot` and `fedloom diagnose`: what they write and print, and one sentence for every mistake."""

import csv
import json
import math
import re
import shutil
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from helpers import make_unfinished, run_cli
from PIL import Image

import fedloom
from fedloom import plots

TINY = {"rounds": 2, "clients": 3, "device": "cpu", "plan": "per-client"}
MODELS = ("landscape", "tsne")  # figures that need models


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with runs: `both` is a comparison of plgu-lf and local with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    fedloom.compare("plgu-lf", seeds=2, out=folder / "both", **TINY)
    fedloom.run("fedrep", out=folder / "fedrep", **TINY)
    fedloom.run("fedavg", out=folder / "none", keep="none", **TINY)
    fedloom.run("fedavg", "synthetic", out=folder / "synthetic", **TINY)
    fedloom.run("pfedkt", case="B", hn_update="step", out=folder / "pfedkt", **TINY)
    fedloom.sweep("fedprox", grid={"mu": [1.0, 0.1]}, out=folder / "sweep", **TINY)
    return folder


@pytest.fixture
def fed(made, tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with these runs, which must succeed; returns what it prints."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words):
        code, out, err = run_cli(monkeypatch, capsys, *words)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def refused(fed, monkeypatch, capsys):
    """Runs a command, which must end with exit code 2 and one sentence that has the given words, and write nothing."""

    def call(*words, says):
        code, out, err = run_cli(monkeypatch, capsys, *words)
        assert (code, out) == (2, ""), (code, out, err)
        message = err.removeprefix("fedloom: ").removesuffix("\n")
        assert message != err
        assert message.endswith((".", "?")), message
        assert not re.search(r"[.?!]\s+[A-Z]|\n", message), message
        assert says in message

    return call


# -- plot


@pytest.mark.parametrize("figure", ["convergence", "distribution", "clients", "landscape", "tsne"])
def test_a_figure_is_an_svg_file_named_after_run_and_figure(figure, fed, tmp_path):
    more = ["--samples", "20"] if figure in MODELS else []
    assert fed("plot", figure, "both", *more) == f"both-{figure}.svg\n"
    root = ET.parse(tmp_path / "work" / f"both-{figure}.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_file_is_that_of_the_function(fed, tmp_path):
    fed("plot", "convergence", "both", "--smooth", "1", "--method", "plgu-lf", "--view", "global", "--out", "a.svg")
    expected = plots.figure("convergence", "both", smooth=1, method=["plgu-lf"], view="global")
    assert (tmp_path / "work" / "a.svg").read_bytes() == plots.save(expected, "b.svg").read_bytes()


def test_pdf_and_png_by_the_name_of_the_file(fed):
    fed("plot", "sweep", "sweep", "--setting", "mu", "--out", "a.pdf")
    fed("plot", "distribution", "both", "--below", "50,60.5", "--out", "a.png")
    with open("a.pdf", "rb") as file:
        assert file.read(5) == b"%PDF-"
    with Image.open("a.png") as picture:
        assert picture.format == "PNG"


def test_runs_of_several_folders_in_one_figure(fed):
    assert fed("plot", "convergence", "both", "fedrep", "--out", "a.svg") == "a.svg\n"


def test_a_run_without_models_has_figures_of_its_records(fed):
    assert fed("plot", "convergence", "none") == "none-convergence.svg\n"


MISTAKES = {
    "figure": (("plot", "convergense", "both"), "did you mean 'convergence'?"),
    "figure far off": (("plot", "pie", "both"), "known: "),
    "nothing there": (("plot", "convergence", "nowhere"), "There is no folder nowhere"),
    "kind of file": (("plot", "convergence", "both", "--out", "a.jpg"), "svg, pdf or png file, not 'a.jpg'"),
    "folder of the file": (("plot", "convergence", "both", "--out", "none/where/a.svg"), "no folder none/where"),
    "method": (("plot", "convergence", "both", "--method", "plgu"), "did you mean 'plgu-lf'?"),
    "view": (("plot", "convergence", "both", "--view", "gobal"), "view cannot be 'gobal'"),
    "view that no method has": (("plot", "clients", "fedrep", "--view", "global"), "None of these methods"),
    "option of another figure": (("plot", "tsne", "both", "--smooth", "3"), "'tsne' has no option 'smooth'"),
    "smooth 0": (("plot", "convergence", "both", "--smooth", "0"), "smooth must be at least 1, not 0"),
    "smooth a word": (("plot", "convergence", "both", "--smooth", "x"), "--smooth"),
    "thresholds": (("plot", "distribution", "both", "--below", "60,x"), "numbers with commas between them"),
    "threshold not finite": (("plot", "distribution", "both", "--below", "nan"), "not 'nan'"),
    "client": (("plot", "landscape", "both", "--client", "7"), "no client '7'"),
    "when": (("plot", "landscape", "both", "--when", "bets"), "did you mean 'best'?"),
    "samples 0": (("plot", "landscape", "both", "--samples", "0"), "samples must be at least 1, not 0"),
    "three samples": (("plot", "tsne", "fedrep", "--samples", "3"), "at least 4 samples, and there are 3"),
    "no sweep": (("plot", "sweep", "both"), "both is not the folder of a sweep"),
    "setting of the sweep": (("plot", "sweep", "sweep", "--setting", "lr"), "'lr'"),
    "two sweeps": (("plot", "sweep", "sweep", "sweep"), "of one sweep"),
    "no rewards": (("plot", "rewards", "both"), "give a run of page"),
    "no hypernetwork": (("plot", "hypernetwork", "both"), "give runs of pfedkt"),
    "different tasks": (("plot", "convergence", "both", "synthetic"), "the data set differs (digits and synthetic)"),
    "different tasks, measured": (("diagnose", "fedrep", "synthetic"), "the data set differs"),
    "landscape without models": (("plot", "landscape", "none"), "run with keep=none; run it again with keep=best"),
    "features without models": (("plot", "tsne", "none"), "keep=none"),
    "diagnosis without models": (("diagnose", "none"), "keep=none"),
    "diagnosis of nothing": (("diagnose", "nowhere"), "There is no folder nowhere"),
    "method to measure": (("diagnose", "both", "--method", "x"), "'x'"),
    "clients 0": (("diagnose", "both", "--clients", "0"), "clients must be at least 1, not 0"),
    "planes 0": (("diagnose", "both", "--planes", "0"), "planes must be at least 1, not 0"),
    "samples to measure": (("diagnose", "both", "--samples", "0"), "samples must be at least 1, not 0"),
    "when to measure": (("diagnose", "both", "--when", "lst"), "did you mean 'last'?"),
    "table": (("diagnose", "both", "--out", "a.txt"), "a .csv file, not as 'a.txt'"),
    "folder of the table": (("diagnose", "both", "--out", "none/where/a.csv"), "no folder none/where"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(name, refused, tmp_path):
    words, says = MISTAKES[name]
    before = sorted(path.name for path in (tmp_path / "work").iterdir())
    refused(*words, says=says)
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == before


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("rounds.parquet", ("plot", "convergence", "fedrep")),
        ("clients.parquet", ("plot", "clients", "fedrep")),
        ("config.yaml", ("plot", "convergence", "fedrep")),
        ("final/models_last.safetensors", ("plot", "landscape", "fedrep", "--when", "last")),
        ("final/models_last.safetensors", ("diagnose", "fedrep", "--when", "last")),
    ],
)
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_named(file, words, damage, refused, tmp_path):
    path = tmp_path / "work" / "fedrep" / file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    refused(*words, says="fedrep is damaged")


def test_an_unfinished_run_has_no_models_yet(refused, tmp_path, monkeypatch, capsys):
    make_unfinished(tmp_path / "work" / "fedrep")
    code, _, err = run_cli(monkeypatch, capsys, "plot", "convergence", "fedrep")
    assert code == 0, err
    refused("plot", "landscape", "fedrep", says="not finished")


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ("plot", "convergence", "both")),
        ("sklearn.manifold", ("plot", "tsne", "both", "--samples", "20")),
        ("sklearn.metrics", ("plot", "tsne", "both", "--samples", "20")),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(package, words, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    name = {"matplotlib": "matplotlib"}.get(package, "scikit-learn")
    refused(*words, says=f"need the package '{name}'; install it with: pip install {name}.")


# -- diagnose


def test_the_table_has_a_row_per_method_and_kind_of_model(fed):
    text = fed("diagnose", "both", "--layers", "--clients", "2", "--out", "all.csv")
    models = text.partition("Layers")[0]
    rows = re.findall(r"^ (plgu-lf|local) +(global|personal) +\d", models, re.MULTILINE)
    assert rows == [("local", "personal"), ("plgu-lf", "global"), ("plgu-lf", "personal")]
    for title in ("loss", "sharpness", "margin", "norms", "wrong, %", "margin term", "perturb. term", "spectral norm"):
        assert title in text
    assert re.search(r"head\.weight +10x64", text)
    assert "no bounds themselves" in text.replace("\n", " ")
    assert "means over 2 clients" in text.replace("\n", " ")
    with open("all.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6  # three kinds of models, two seeds
    result = fedloom.load("both").run("plgu-lf", 1)
    (row,) = [r for r in table if (r["method"], r["seed"], r["model"]) == ("plgu-lf", "1", "global")]
    assert float(row["sharpness"]) == pytest.approx(plots.sharpness(result), rel=1e-4)


def test_json_has_what_the_function_measures(fed):
    found = json.loads(fed("diagnose", "pfedkt", "--json", "--clients", "2"))
    measured = plots.diagnose(plots.results("pfedkt"), clients=2)
    assert found["clients"] == measured.clients == [0, 2]
    for name, table in (("models", measured.rows), ("layers", measured.layers), ("hypernetworks", measured.generators)):
        assert len(found[name]) == len(table)
        for row, expected in zip(found[name], table, strict=True):
            assert row.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, float):
                    assert row[key] is None if math.isnan(value) else row[key] == pytest.approx(value)
    assert found["hypernetworks"][0]["parameters"] == 51_900


def test_means_and_deviations_are_over_seeds(fed):
    """Two values a and b have the standard deviation |a - b| / sqrt 2."""
    found = plots.diagnose(plots.results("both"), clients=1)
    a, b = (row["sharpness"] for row in found.rows if (row["method"], row["model"]) == ("local", "personal"))
    (row,) = [row for row in found.summary() if (row["method"], row["model"]) == ("local", "personal")]
    assert row["sharpness"] == pytest.approx((a + b) / 2)
    assert row["sharpness_std"] == pytest.approx(abs(a - b) / np.sqrt(2))

"""Costs of methods on a task, from Python and on the command line, and the papers' tables of costs."""

import csv
import io

import pytest
import torch
from helpers import methods, run_cli
from rich.console import Console
from sentences import user_error

import fedloom
from fedloom.algorithms.pfedkt import PFedKT
from fedloom.cli import display
from fedloom.config.resolve import describe
from fedloom.engine.costs import counted
from fedloom.papers.catalog import find_experiment
from fedloom.studies.build import make_task
from fedloom.studies.cost_metrics import hypernetwork, samples
from fedloom.studies.costs import configurations, cost_rows, on_cpu
from fedloom.studies.reproduce import configuration

MLP = 64 * 64 + 64 + 64 * 10 + 10  # parameters of digits' model


@pytest.fixture(scope="module")
def everything():
    return configurations(methods(), {})


@pytest.fixture(scope="module")
def rows(everything):
    return cost_rows(everything)


def test_all_methods_have_costs_on_digits(rows):
    found = {row["method"]: row for row in rows}
    assert set(methods()) <= set(found)
    for name in methods():
        row = found[name]
        assert row["problem"] == ""
        assert (row["parameters"], row["flops_forward"]) == (MLP, 2 * (64 * 64 + 64 * 10))
        assert row["flops"] >= row["samples"] * row["flops_forward"] > 0
        assert row["bytes_up"] > 0 or name == "local"


def test_the_table_fits_80_columns(rows, everything):
    console = Console(width=80, file=io.StringIO())
    display.print_costs(console, rows, describe(everything[0]))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    (line,) = (line for line in text.splitlines() if line.startswith(" fedavg ") and "MFLOP" in line)
    assert line.split() == ["fedavg", "19.2", "kB", "19.2", "kB", "6", "56.1", "1.13", "MFLOP", "0", "B"]
    assert "page* " in text
    assert "4,810 parameters, 9.47 kFLOP for a sample" in text


def test_from_python_with_settings_classes_and_data_of_ones_own():
    data = fedloom.federation(torch.randn(40, 3).numpy(), [0, 1] * 20, clients=[0, 1] * 20)
    ditto, kt = fedloom.costs(["ditto:personal_epochs=2", PFedKT], data, model="logreg", local_epochs=3)
    assert ditto["method"] == "ditto:personal_epochs=2"
    assert ditto["flops"] == pytest.approx((2 + 3) * 14 * 4 * 3 * 2)  # 14 training samples, forward and weights
    assert kt["client_bytes"] == 4 * (3 * 2 + 2 + 51_900)
    assert fedloom.costs("ditto", dtype="float64")[0]["bytes_up"] == 8 * MLP


def test_a_method_that_does_not_fit_is_listed_with_the_reason(monkeypatch, capsys):
    task = ["--model", "logreg", "--clients", "5"]
    code, out, _ = run_cli(monkeypatch, capsys, "costs", "fedavg", "fedrep", *task)
    assert code == 0
    assert "fedrep has no costs here: fedrep shares the body" in " ".join(out.split())
    code, _, err = run_cli(monkeypatch, capsys, "costs", "fedrep", *task)
    assert (code, err.count("\n")) == (2, 1)
    assert "fedrep shares the body" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fedavgg"], "did you mean 'fedavg'?"),
        (["fedavg", "--dataset", "digitz"], "did you mean 'digits'?"),
        (["ditto:lamb=1"], "did you mean 'lam'?"),
        (["ditto", "--lam", "1"], "ditto:lam=1"),
    ],
)
def test_mistakes_get_one_sentence(words, said, monkeypatch, capsys):
    code, out, err = run_cli(monkeypatch, capsys, "costs", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_file_of_a_run_or_a_comparison_names_methods(tmp_path, monkeypatch, capsys):
    common = "dataset: {name: digits}\nclients: 4\nper_method: {ditto: {personal_epochs: 2}}\n"
    (tmp_path / "run.yaml").write_text(f"algorithm: {{name: ditto, lam: 0.5}}\nseed: 3\n{common}")
    (tmp_path / "compare.yaml").write_text(f"methods: [local, fedavg]\nseeds: [0, 1]\nequal_budget: local\n{common}")
    for file, found in (("run", "ditto:lam=0.5,personal_epochs=2"), ("compare", "2 methods")):
        code, out, err = run_cli(monkeypatch, capsys, "costs", "--config", str(tmp_path / f"{file}.yaml"))
        assert (code, err) == (0, "")
        assert found.split(",")[0] in out
    _, out, _ = run_cli(monkeypatch, capsys, "costs", "moon", "--config", str(tmp_path / "run.yaml"))
    assert "1 method on digits" in out
    assert "moon" in out


# -- the papers' tables


def by_cell(experiment, folder, **settings):
    found = fedloom.reproduce(experiment, out=folder / experiment, **settings)
    assert {file.suffix for file in found.folder.iterdir()} == {".csv", ".md", ".tex"}
    return {(row["task"], row["method"], row["metric"]): row for row in found.rows}


def test_pfedkts_table_12_is_exact(tmp_path):
    """The hypernetwork has layers 13 -> 100 -> 100 -> 400, or the number of the CNN's parameters at its end."""
    rows = {key[1:]: row for key, row in by_cell("pFedKT-T12", tmp_path).items()}
    expected = {
        ("CNN(CIFAR10)", "params"): 1_706_458,
        ("HN-small", "params"): 51_900,
        ("HN-small", "flops_forward"): 102_600,
        ("HN-small", "storage_MB"): 4 * 51_900 / 2**20,
        ("HN-small", "generation_cost_GB"): 4 * 1_706_458 / 400 * 102_600 / 2**30,
        ("HN-large", "params"): 172_363_758,
        ("HN-large", "flops_forward"): 2 * (13 * 100 + 100 * 100 + 100 * 1_706_458),
        ("HN-large", "storage_MB"): 4 * 172_363_758 / 2**20,
        ("HN-large", "generation_cost_GB"): 4 * 341_314_200 / 2**30,
    }
    assert {key: rows[key]["ours"] for key in expected} == pytest.approx(expected)
    printed = {key: row for key, row in rows.items() if row["paper"] is not None}
    assert len(printed) == 6
    for (_, metric), row in printed.items():
        assert row["difference"] == pytest.approx(0, abs=1 if metric == "storage_MB" and row["paper"] > 1 else 5e-5)
    with (tmp_path / "pFedKT-T12" / "pFedKT-T12.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_sizes_of_hypernetworks_are_those_that_the_method_uses():
    """The small one of pFedKT's model for CIFAR-10, which has 4,267 chunks."""
    experiment = find_experiment("pFedKT-T12")
    method = next(one for one in experiment.methods if one.label == "HN-small")
    config = on_cpu(configuration(experiment.tasks[0], method, {}))
    alg, made = config.algorithm, make_task(config, samples(config))
    down = alg.constants(made, 0)
    varphi = alg.init_client(made, 0, torch.tensor(0))["varphi"]
    size = hypernetwork(alg, 1_706_458, 400).size
    assert sum(v.numel() for v in varphi.values()) == size.parameters
    assert counted(alg.hypernetwork.generate, made, varphi, down)[1] == 4_267 * size.flops


def test_generation_by_the_size_of_the_output(tmp_path):
    rows = by_cell("pFedKT-F9a", tmp_path)
    ratios = [row["ours"] for row in rows.values()]
    assert rows["cifar10", "out=400", "flops_ratio"]["ours"] == pytest.approx(4_267 * 102_600 / 341_314_200)
    assert round(rows["cifar10", "out=400", "flops_ratio"]["ours"], 2) == 1.28
    assert ratios[-1] == 1
    assert all(ratio < 1.03 for ratio in ratios[-4:])


def test_storage_of_hypernetworks(tmp_path):
    rows = by_cell("pFedKT-G2", tmp_path)
    assert int(rows["cifar10", "HN-small", "clients"]["ours"]) == 3321
    assert rows["cifar10", "HN-small", "storage_MB"]["paper"] == 0.198
    assert ("cifar10", "HN-large", "clients") not in rows


def test_costs_of_a_client_compared_with_fedavg(tmp_path):
    """960 training samples in 15 batches of 64, ten times; one hidden layer of 64 units."""
    rows = by_cell("pFedKT-G4", tmp_path, tasks=["cifar10"], model="mlp", algorithms=["FedAvg", "MOON"])
    first, last = 2 * 3072 * 64, 2 * 64 * 10
    gradient, forward = 2 * (first + last) + last, first + last
    ours = {key[1:]: row["ours"] for key, row in rows.items()}
    assert ours == pytest.approx(
        {
            ("FedAvg", "client_GFLOP"): 9600 * gradient / 1e9,
            ("FedAvg", "times_FedAvg"): 1,
            ("FedAvg", "state_MB"): 0,
            ("MOON", "client_GFLOP"): 9600 * (gradient + 2 * forward) / 1e9,
            ("MOON", "times_FedAvg"): (gradient + 2 * forward) / gradient,
            ("MOON", "state_MB"): 4 * (3072 * 64 + 64 + 64 * 10 + 10) / 2**20,
        }
    )
    assert {row["state"] for row in rows.values()} == {"model=mlp (paper cnn_kt)"}


def test_times_are_no_targets(tmp_path):
    rows = by_cell("PAGE-T5", tmp_path, model="mlp")
    assert len(rows) == 4
    for row in rows.values():
        assert 0 < row["ours"] < 1
        assert row["paper"] < 2e-4
        assert row["unusable"] == "depends on the machine"
    assert "[1.45e-04]" in (tmp_path / "PAGE-T5" / "PAGE-T5.md").read_text()


def test_experiments_of_costs_are_run_on_the_command_line(tmp_path, monkeypatch, capsys):
    words = ["reproduce", "pFedKT-T12", "--algorithms", "HN-small", "--out", str(tmp_path / "kt")]
    code, out, _ = run_cli(monkeypatch, capsys, *words)
    assert code == 0
    assert "51,900" in out
    assert "without training" in " ".join(out.split())
    with user_error("method of pFedKT-T12 'HN-smal'", "did you mean"):
        fedloom.reproduce("pFedKT-T12", out=tmp_path / "kt", algorithms=["HN-smal"])

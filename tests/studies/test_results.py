"""Results as data frames, as short texts, and sweeps that are read again."""

import sys
from types import SimpleNamespace

from helpers import run_cli
from sentences import user_error

import fedloom
from fedloom.studies.sweep import load_sweep

SMALL = {"rounds": 2, "clients": 4}


def test_without_pandas_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with user_error("pip install 'fedloom[pandas]'"):
        fedloom.run("fedavg", **SMALL).to_pandas()


def test_tables_as_data_frames(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    result = fedloom.run("fedavg", **SMALL)
    assert result.to_pandas() == result.rounds
    assert result.to_pandas("timings") == result.timings
    with user_error("did you mean 'rounds'?"):
        result.to_pandas("round")
    found = fedloom.compare(["fedavg"], seeds=1, **SMALL)
    assert found.to_pandas() == found.rows()
    swept = fedloom.sweep("fedavg", grid={"lr": [0.01, 0.1]}, **SMALL)
    assert swept.to_pandas() == swept.table


def test_tables_of_arrow_with_pandas_itself():
    result = fedloom.run("fedavg", **SMALL)
    for name in ("clients", "reports", "metrics"):
        assert len(result.to_pandas(name)) == len(getattr(result, name))


def test_short_texts(tmp_path):
    result = fedloom.run("fedavg", out=tmp_path / "run", **SMALL)
    assert repr(result).startswith("Result(fedavg on digits, 4 clients, round 2 of 2, accuracy mean ")
    assert repr(result).endswith(f"{tmp_path / 'run'})")
    assert repr(result.model(0)).startswith("ClientModel(fedavg, ")
    found = fedloom.compare(["fedavg"], seeds=1, **SMALL)
    assert repr(found).startswith("Comparison(2 methods on digits, seeds 0, first ")
    data = fedloom.federation([[0.0], [1.0]] * 20, [0, 1] * 20, ["a", "b", "c", "d"] * 10)
    assert repr(data).startswith("Federation(4 clients, samples of 1: ")


def test_a_sweep_is_read_again(tmp_path):
    made = fedloom.sweep("fedprox", grid={"lr": [0.01, 0.1], "mu": [0.1]}, seeds=2, out=tmp_path / "sweep", **SMALL)
    read = load_sweep(tmp_path / "sweep")
    assert read.table == made.table
    assert read.command == made.command
    assert repr(read) == repr(made)
    assert "best lr=0.1, mu=0.1" in repr(read)


def test_a_sweep_is_loaded_and_its_folder_has_no_single_model(tmp_path, monkeypatch, capsys):
    done = fedloom.sweep("fedavg", grid={"lr": [0.1, 0.2]}, rounds=1, clients=4, out=tmp_path / "s", plan="per-client")
    found = fedloom.load(tmp_path / "s")
    assert found.table == done.table
    code, _, err = run_cli(monkeypatch, capsys, "predict", str(tmp_path / "s"), str(tmp_path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "is a sweep" in err

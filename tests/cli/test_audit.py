"""`fedloom audit`: what it prints and writes, and mistakes in one sentence."""

import json

import pytest
from helpers import run_cli

import fedloom
from fedloom.cli import audit as command

TASK = {"rounds": 1, "clients": 20, "subset": 3, "partition": "iid", "device": "cpu", "plan": "per-client"}
TINY = [
    *("--rounds", "1", "--clients", "20", "--partition", "iid", "--set", "subset=3"),
    *("--device", "cpu", "--plan", "per-client"),
]
QUICK = ["--iterations", "1", "--victims", "1", "--batches", "1"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def audited(monkeypatch, capsys, *words):
    code, out, err = run_cli(monkeypatch, capsys, "audit", *words)
    assert code == 0, err
    return out


def test_the_table_and_what_it_means(monkeypatch, capsys):
    out = audited(monkeypatch, capsys, "fedavg", "local", *TINY, *QUICK)
    assert all(len(line) <= 80 for line in out.splitlines())
    for words in ("membership:", "one step:", "guessing the mean sample", "0.5 and advantage 0 are a coin toss"):
        assert words in out
    assert "local: no reconstruction, because it uploads nothing." in out
    assert command.FAILED in " ".join(out.split())


def test_columns_without_a_number_are_left_out(monkeypatch, capsys):
    out = audited(monkeypatch, capsys, "fedavg", *TINY, "--attacks", "membership")
    assert "PSNR" not in out
    assert "epsilon" not in out.partition("─")[0]
    assert "membership:" in out


def test_parts_of_an_upload_are_named_with_the_method(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    wide = audited(monkeypatch, capsys, "gpfl", *TINY, *QUICK, "--attacks", "round", "--every-part")
    for part in ("gpfl (body)", "gpfl (body, valve)", "gpfl (body, valve, embeddings)"):
        assert part in wide
    monkeypatch.setenv("COLUMNS", "80")
    out = audited(monkeypatch, capsys, "gpfl", *TINY, *QUICK, "--attacks", "round", "--every-part")
    assert out.count("gpfl (body") == 3


def test_files_are_named(monkeypatch, capsys, tmp_path):
    out = audited(monkeypatch, capsys, "fedavg", *TINY, *QUICK, "--attacks", "round", "--out", "found")
    named = [line for line in out.splitlines() if line.startswith("found/")]
    assert named == ["found/audit.json", "found/summary.csv", "found/attacks.csv", "found/recoveries.png"]
    assert all((tmp_path / name).exists() for name in named)


def test_json(monkeypatch, capsys):
    out = audited(monkeypatch, capsys, "local", *TINY, "--json")
    found = json.loads(out)
    assert [row["method"] for row in found["summary"]] == ["local"]
    assert found["summary"][0]["round_psnr"] is None
    assert len(found["clients"]) == 3


def test_a_finished_run(monkeypatch, capsys):
    fedloom.run("fedrep", out="runs/a", **TASK)
    out = audited(monkeypatch, capsys, "runs/a", "--attacks", "membership")
    assert "fedrep" in out


def test_noise(monkeypatch, capsys):
    noise = ["--dp-clip", "1", "--dp-noise", "0.01,10"]
    out = audited(monkeypatch, capsys, "fedavg", *TINY, "--attacks", "membership", *noise, "--out", "found")
    assert "noise" in out
    assert "epsilon" in out
    assert "found/epsilon.png" in out


MISTAKES = {
    "unknown attack": (["--attacks", "round,steps"], "Unknown attack 'steps'; did you mean 'step'?"),
    "no attack": (["--attacks", ""], "Unknown attack ''"),
    "victims in words": (["--victims", "many"], "victims must be a whole number of at least 1, or all, not 'many'."),
    "no victims": (["--victims", "0"], "victims must be a whole number of at least 1, not 0."),
    "a negative number": (["--batches", "-1"], "batches must be a whole number of at least 1, not -1."),
    "no number": (["--iterations", "x"], "'x' is not a valid"),
    "noise without a norm": (["--dp-noise", "1"], "dp_noise=1 belongs to dp_clip"),
    "a setting of noise without a norm": (["--set", "dp_noise=1"], "dp_noise=1 belongs to dp_clip"),
    "noise in words": (["--dp-clip", "1", "--dp-noise", "1,much"], "dp_noise must be numbers above 0"),
    "noise of 0": (["--dp-clip", "1", "--dp-noise", "0,1"], "dp_noise must be numbers above 0"),
    "noise that is no number": (["--dp-clip", "1", "--dp-noise", "nan"], "dp_noise must be numbers above 0"),
    "a negative norm": (["--dp-clip", "-1"], "dp_clip must be greater than 0, not -1"),
    "unknown option": (["--attack", "round"], "did you mean '--attacks'?"),
    "a method that cannot have noise": (["hypcluster", "--dp-clip", "1"], "hypcluster cannot have dp_clip"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_end_in_one_sentence(case, monkeypatch, capsys):
    words, said = MISTAKES[case]
    method = [] if words[0] == "hypcluster" else ["fedavg"]
    assert_one_sentence(run_cli(monkeypatch, capsys, "audit", *method, *words, *TINY), said)


def assert_one_sentence(found, said):
    code, out, err = found
    assert len(err.splitlines()) == 1, err
    assert said in err
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fedavgg", "did you mean 'fedavg'?"),
        ("runs/none", "There is no folder runs/none"),
        ("folder", "folder is not the folder of a run; of a comparison or a sweep, name one of its runs."),
        ("sites", "The samples of sites are at sites of their own"),
        ("x" * 300, ""),
        ("a/" + "x" * 300, ""),
    ],
)
def test_what_is_neither_a_method_nor_a_run(what, said, monkeypatch, capsys, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "federation.json").write_text("{}")
    assert_one_sentence(run_cli(monkeypatch, capsys, "audit", what), said)


def test_a_finished_run_keeps_its_settings(monkeypatch, capsys):
    fedloom.run("fedavg", out="run", **TASK)
    for words in (["--rounds", "2"], ["--dp-noise", "1"], ["--lr", "1"]):
        found = run_cli(monkeypatch, capsys, "audit", "run", *words)
        assert_one_sentence(found, "A finished run has its settings; leave out")

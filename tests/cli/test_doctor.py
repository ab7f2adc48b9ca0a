"""`fedloom doctor`: what it says of a machine, and what it exits with."""

import json

import pytest
import torch
from helpers import run_cli

from fedloom.storage import user_cache
from fedloom.studies import doctor
from fedloom.studies.doctor import Finding


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLOOM_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    return tmp_path / "fedloom"


def findings(monkeypatch, capsys, *args):
    code, out, _ = run_cli(monkeypatch, capsys, "doctor", "--json", *args)
    return code, {(f["part"], f["name"]): f for f in json.loads(out)}


def test_it_shows_the_machine_and_tests_it(monkeypatch, capsys, cache):
    code, out, err = run_cli(monkeypatch, capsys, "doctor")
    assert code == 0, out
    assert err == ""
    for words in ("machine", "processor", "GPU", "packages", torch.__version__, str(cache), "digits", "mlp on cpu"):
        assert words in out
    assert "Nothing is wrong." in out


def test_without_a_self_test_nothing_is_trained(monkeypatch, capsys, cache):
    monkeypatch.setattr(doctor, "execute", None)
    code, found = findings(monkeypatch, capsys, "--no-test")
    assert code == 0
    assert not [part for part, _ in found if part == "self-test"]
    assert found["data", "not here"]["state"] == "missing"


def test_a_self_test_that_fails_is_named(monkeypatch, capsys, cache):
    def broken(config):
        raise RuntimeError("this CPU is broken")

    monkeypatch.setattr(doctor, "execute", broken)
    code, out, _ = run_cli(monkeypatch, capsys, "doctor")
    assert code == 1
    assert "failed: RuntimeError: this CPU is broken" in out
    assert "To be mended: mlp on cpu" in out


@pytest.mark.parametrize("losses", [(1.0, 1.01), (1.0, float("nan"))])
def test_stacked_clients_must_learn_what_others_learn(losses, monkeypatch):
    left = list(losses)

    class Result:
        def last(self):
            return {"pre_train_loss": left.pop(0)}

    monkeypatch.setattr(doctor, "execute", lambda config: Result())
    assert doctor._trained("cpu", "mlp").state == "wrong"


def test_more_threads_than_cores_are_wrong(monkeypatch):
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    threads = next(f for f in doctor._machine() if f.name == "threads")
    assert threads == Finding(
        "machine", "threads", "8, set by OMP_NUM_THREADS=8, more than cores: set OMP_NUM_THREADS=2", "wrong"
    )


def test_a_cache_that_cannot_be_written_is_wrong(monkeypatch, capsys, cache):
    cache.write_text("a file where a folder should be")
    code, found = findings(monkeypatch, capsys, "--no-test")
    assert code == 1
    assert found["cache", "folder"]["state"] == "wrong"
    assert "cannot be written" in found["cache", "folder"]["value"]


def test_a_cache_that_is_switched_off_is_said_to_be(monkeypatch, capsys, cache):
    monkeypatch.setenv("FEDLOOM_CACHE", "off")
    code, found = findings(monkeypatch, capsys, "--no-test")
    assert code == 0
    assert "switched off" in found["cache", "folder"]["value"]


def test_the_cache_can_be_cleared(monkeypatch, capsys, cache):
    for name in ("a", "b"):
        user_cache.keep("plans", name, lambda file: file.write(b"12345"))
    data = cache / "digits-like"
    data.mkdir()
    _, found = findings(monkeypatch, capsys, "--no-test")
    assert found["cache", "plans"]["value"] == "2 execution plans, 0.0 MB"
    code, out, _ = run_cli(monkeypatch, capsys, "doctor", "--no-test", "--clear-cache")
    assert code == 0
    assert "Removed 2 files" in out
    assert user_cache.contents("plans") == (0, 0)
    assert data.exists()  # data sets stay

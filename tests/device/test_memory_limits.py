"""Limits for the memory of a run."""

import logging

import pytest
import torch
from sentences import user_error

import fedloom
from fedloom.config.sizes import parse_bytes
from fedloom.device import memory
from fedloom.device.memory import available_memory, limited_memory, memory_of_process
from fedloom.engine.planning import choose

CPU = torch.device("cpu")
TASK = {"dataset": "digits", "clients": 8, "rounds": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3GB", 3 * 10**9), ("800 mb", 8 * 10**8), ("1.5GiB", 3 << 29), ("1kb", 1000), (" 2TB ", 2 * 10**12)],
)
def test_sizes_are_numbers_with_a_unit(text, expected):
    assert parse_bytes("memory", text) == expected


@pytest.mark.parametrize("text", ["", "3", "GB", "3 GB 2", "-3GB", "0GB", "3G", "nanGB", "1e3MB", "3\nPB"])
def test_other_sizes_are_refused(text):
    with user_error("memory cannot be", "3GB or 800MB"):
        parse_bytes("memory", text)


def test_within_a_limit_there_is_less_memory():
    free, taken = available_memory(CPU), memory_of_process()
    assert taken > 10 << 20
    with limited_memory(CPU, taken + (64 << 20)):
        assert available_memory(CPU) < 80 << 20
        with limited_memory(CPU, 1):
            assert available_memory(CPU) == 0
        assert 0 < available_memory(CPU) < 80 << 20
    with limited_memory(CPU, None):
        assert available_memory(CPU) > free / 2
    assert memory.limit_of_memory(CPU) is None


def test_a_run_stacks_as_many_clients_as_the_limit_allows(monkeypatch, caplog):
    whole = fedloom.run("fedavg", plan="stacked", dtype="float64", **TASK)
    assert whole.plan["chunk"] == 8
    each = whole.plan["client_bytes"]
    monkeypatch.setattr(memory, "memory_of_process", lambda: 10**9)
    limit = 10**9 + 3.5 * each / choose.MEMORY_SHARE
    monkeypatch.setattr("fedloom.studies.build.memory_of_process", lambda: 10)
    with caplog.at_level(logging.INFO, "fedloom"):
        part = fedloom.run("fedavg", plan="stacked", dtype="float64", memory=f"{limit / 1000}KB", **TASK)
    assert part.plan["chunk"] == 3  # 3 + 3 + 2 clients
    assert "clients stacked (traced), 3 at once, about " in caplog.text
    assert part.last()["pre_train_loss"] == pytest.approx(whole.last()["pre_train_loss"], rel=1e-9)


def test_limits_that_cannot_be_kept_are_refused_before_training(tmp_path):
    for value, words in (("300", ["write a number and a unit"]), ("10MB", ["is too little", "give it"])):
        with user_error("memory", *words):
            fedloom.run("fedavg", memory=value, out=tmp_path / "run", **TASK)
    with user_error("memory limits a run in one process"):
        fedloom.run("fedavg", memory="3GB", engine="ray", **TASK)


def test_a_run_may_go_on_with_another_limit(tmp_path):
    fedloom.run("fedavg", memory="8GB", out=tmp_path, **TASK)
    longer = fedloom.run("fedavg", memory="9GB", out=tmp_path, resume=True, **{**TASK, "rounds": 2})
    assert len(longer.rounds) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_no_more_than_the_limit():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    with limited_memory(device, torch.cuda.memory_reserved() + (64 << 20)):
        assert available_memory(device) <= 64 << 20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 << 20, dtype=torch.uint8, device=device)
    torch.empty(256 << 20, dtype=torch.uint8, device=device)

"""What is checked of a method and a task before training, and what is made of a configuration."""

import logging

import numpy as np
import pytest
from helpers import methods, run_cli
from torch import nn

import fedloom
from fedloom import UserError
from fedloom.config.resolve import configure
from fedloom.studies.build import make_task


def with_batch_norm(inputs: int, classes: int):
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 3), nn.BatchNorm1d(3), nn.ReLU())
    model.add_module("head", nn.Linear(3, classes))
    return model


@pytest.mark.parametrize("name", methods())
def test_batchnorm_refuses_batches_of_one_sample(name):
    settings = {"rounds": 1, "clients": 4, "batch_size": 1, "server_share": 0.1}
    with pytest.raises(UserError, match="BatchNorm cannot train on batches of one sample; use a batch_size of 2"):
        fedloom.run(name, model=lambda: with_batch_norm(64, 10), **settings)


def test_a_client_that_batchnorm_leaves_without_a_batch_is_named(caplog):
    x, y = np.random.default_rng(0).normal(size=(24, 4)).astype("float32"), np.arange(24) % 2
    sites = ["Berlin"] * 10 + ["Paris"] * 2 + ["Rome"] * 12  # Paris has one sample to train on, and one to test
    data = fedloom.federation(x, y, sites, split=(0.5, 0, 0.5))
    with caplog.at_level(logging.WARNING, "fedloom"):
        make_task(configure("fedavg", data, model=lambda: with_batch_norm(4, 2)))
    assert "BatchNorm cannot train on one sample, so these clients do not train: Paris." in caplog.text
    caplog.clear()
    make_task(configure("fedavg", data, model="mlp"))
    assert not caplog.text


def test_a_batch_is_at_most_the_largest_client():
    """Memory follows the data, not the request; the result is that of one batch per client."""
    huge, large = (
        fedloom.run("fedrep", clients=5, rounds=2, batch_size=size, dtype="float64", plan="stacked-eager")
        for size in (10**9, 1500)
    )
    for a, b in zip(huge.rounds, large.rounds, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-9)
    task = make_task(configure("fedavg", values={"clients": 5, "batch_size": 10**9}))
    assert task.batch_size == max(int(rows.sizes.max()) for rows in task.data.splits.values())
    assert make_task(configure("fedavg", values={"clients": 5, "batch_size": 7})).batch_size == 7


@pytest.mark.parametrize("name", ["fedavg", "local", "pfedhn", "page"])
def test_a_run_in_which_all_clients_diverge_says_so_and_exits_with_1(name, monkeypatch, capsys, caplog):
    small = ("--clients", "4", "--rounds", "2", "--plan", "stacked-eager", "--set", "server_share=0.1", "--no-save")
    tuned = ("--set", "lr_max=1e30", "--set", "lr_min=1e29") if name == "page" else ("--lr", "1e30")
    code, _, err = run_cli(monkeypatch, capsys, "run", name, *small, *tuned)
    assert code == 1, err
    assert "All clients diverged, so the results mean nothing; use a smaller lr." in caplog.text + err
    code, _, _ = run_cli(monkeypatch, capsys, "run", name, *small)
    assert code == 0

"""A run by Flower's apps gives the bytes of a run in one process, for every registered method."""

from dataclasses import replace

import pytest
from helpers import methods

pytest.importorskip("flwr")
from flower_grid import LocalGrid, run_server_app

from fedloom import load
from fedloom.config.keywords import from_keywords
from fedloom.config.resolve import describe
from fedloom.core.algorithm import ALGORITHMS
from fedloom.deployment.host import Host
from fedloom.studies.execute import execute

QUICK = {
    "page": {"ep_max": 2}, "dap-fl": {"ep_max": 2}, "fedrecon": {"query_epochs": 2, "pseudo_clients": 3},
    "fedala": {"start_epochs": 2},
}  # fmt: skip
TERMS = {"deadline": 60.0, "minimum": None, "repeats": 0}
LOCAL = {"dataset": "digits", "device": "cpu"}


def config_for(name, **settings):
    share = {"participation": 0.7} if ALGORITHMS[name].partial else {}
    usual = {"clients": 3, "rounds": 3, "server_share": 0.1, "device": "cpu", **share, **QUICK.get(name, {})}
    return from_keywords(name, "digits", {**usual, **settings})


def reference(config):
    return execute(replace(config, settings=replace(config.settings, engine="reference")))


def grid(tmp_path, clients=3):
    return LocalGrid({i: Host(i, tmp_path / f"site-{i}" / "runs", LOCAL) for i in range(clients)})


def same_records(found, expected):
    """Every number of every round and client is the same."""
    for a, b in zip(found.rounds, expected.rounds, strict=True):
        assert repr(a) == repr(b)  # NaN is not equal to itself
    assert found.clients.equals(expected.clients)


@pytest.mark.parametrize("name", methods())
def test_flower_gives_what_one_process_gives(name, tmp_path):
    config = config_for(name)
    job = {"config": describe(config), "terms": TERMS, "clients": None, "out": str(tmp_path / "run")}
    run_server_app(tmp_path / "server", grid(tmp_path), job)
    same_records(load(tmp_path / "run"), reference(config))

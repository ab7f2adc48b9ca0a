"""A federation of real processes on this machine: a server and three sites, with certificates and keys.

These tests take minutes; `make test-federation` runs them.
"""

import time

import pytest

pytest.importorskip("flwr")

from federation.deployment import DEADLINE, SITES, reference, same_rounds

from fedloom import load
from fedloom.deployment.flower.keys import make_keys

pytestmark = pytest.mark.federation

SETTINGS = {  # methods with messages of different kinds, and what makes them quick
    "fedavg": {},
    "fedrep": {},
    "plgu-lf": {},
    "gpfl": {},
    "page": {"server_share": 0.1, "ep_max": 2},
    "pfedkt": {},
    "scaffold": {},
    "fedfomo": {},
}


def test_a_deployment_gives_the_bits_of_one_process(deployment):
    """One run after the other, for which the sites stay joined."""
    for i in range(SITES):
        deployment.join(i)
    for method, settings in SETTINGS.items():
        given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        server = deployment.serve(
            method, "--dataset", "digits", "--rounds", "2", *given, out=deployment.folder / method
        )
        deployment.completed(server)
        same_rounds(load(deployment.out), reference(method, rounds=2, **settings))


def test_sites_and_server_that_are_killed_change_nothing(deployment):
    for i in range(SITES):
        deployment.join(i)
    rounds = 15
    command = ("ditto", "--dataset", "digits", "--rounds", str(rounds), "--deadline", "120", "--repeats", "5")
    deployment.serve(*command)
    deployment.wait_for_round(1)
    deployment.kill("site-1")
    time.sleep(1)
    deployment.join(1)
    deployment.wait_for_round(5)
    deployment.kill("server")
    time.sleep(1)
    assert deployment.rounds() < rounds
    deployment.completed(deployment.serve(*command))
    same_rounds(load(deployment.out), reference("ditto", rounds=rounds))


def test_sites_train_on_data_of_their_own(deployment):
    for i in range(SITES):
        lines = [f"{k % 7 + 10 * (k % 2)},{k % 5},{'ab'[k % 2]}" for k in range(40 + i)]
        path = deployment.folder / f"{i}.csv"
        path.write_text("\n".join(["x,z,label", *lines]))
        deployment.join(i, dataset=path)
    deployment.completed(deployment.serve("fedavg", "--rounds", "2"))
    assert len(load(deployment.out).rounds) == 2


def test_a_site_with_an_unknown_key_or_another_authority_is_refused(deployment, tmp_path):
    """The others train without it."""
    other = tmp_path / "other"
    make_keys(other, ["localhost"], SITES)
    site = deployment.folder / "keys" / "site-2"
    (site / "node.key").write_bytes((other / "site-2" / "node.key").read_bytes())
    for i in range(SITES):
        deployment.join(i)
    server = deployment.serve("fedavg", "--dataset", "digits", "--rounds", "1", "--deadline", "40", "--repeats", "0")
    assert server.wait(DEADLINE) == 2
    assert "The run cannot begin without the sites 2: its site is not connected" in deployment.said("server")
    assert "refused" in deployment.said("site-2") or "ended" in deployment.said("site-2")

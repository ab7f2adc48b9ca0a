"""A server and its sites on hosts of their own, which reach each other by the network only."""

import pytest

pytest.importorskip("flwr")

from federation.deployment import Deployment, reference, same_rounds
from federation.network import hosts, why_not

from fedloom import load

pytestmark = pytest.mark.federation


def test_three_hosts_give_the_bits_of_one_process(tmp_path):
    if why := why_not():
        pytest.skip(why)
    with hosts("server", "north", "south") as found:
        address, there = found["server"]
        deployment = Deployment(tmp_path, host=address, sites=2)
        try:
            for i, name in enumerate(("north", "south")):
                deployment.join(i, inside=found[name][1])
            deployment.completed(deployment.serve("fedrep", "--dataset", "digits", "--rounds", "2", inside=there))
        finally:
            deployment.stop()
    same_rounds(load(deployment.out), reference("fedrep", rounds=2, clients=2))

"""Clients at sites of their own give what clients in one process give, to the bit, for every registered method."""

import pytest
from federations import Federated, variants
from helpers import methods


@pytest.mark.parametrize("name", methods())
def test_sites_give_what_one_process_gives(name, tmp_path):
    """With BatchNorm, dropout, and some of the clients in a round where the method allows it."""
    federated = Federated(name, tmp_path, sizes=(7, 12, 21, 5), participation=0.5, norm=True, dropout=0.2)
    federated.compare(rounds=3)


@pytest.mark.parametrize(("name", "settings"), variants())
def test_settings_that_change_what_is_sent(name, settings, tmp_path):
    Federated(name, tmp_path, settings=settings).compare(rounds=3)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "pfedhn", "page"])
def test_a_site_may_start_again_at_any_time(name, tmp_path):
    """What it keeps is on its disk."""
    Federated(name, tmp_path).compare(rounds=3, restart=True)

"""Fixtures of tests with real processes."""

import pytest


@pytest.fixture
def deployment(tmp_path):
    """A server and sites on this machine, of which none has started yet."""
    pytest.importorskip("flwr")
    from federation.deployment import Deployment

    made = Deployment(tmp_path)
    yield made
    made.stop()

"""Actors for all tests of this folder: starting a process takes longer than most of the tests."""

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from actors import Actors

from fedloom.cluster.actors import session


@pytest.fixture(scope="session")
def actors():
    """`actors(n)` are n processes."""
    with session():
        yield Actors

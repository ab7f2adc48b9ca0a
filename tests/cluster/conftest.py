"""Actors for all tests of this folder: starting a process takes longer than most of the tests."""

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from actors import Actors, LocalActors

from fedloom.cluster.actors import session


@pytest.fixture(scope="session")
def actors():
    """`actors(n)` are n processes."""
    with session():
        yield Actors


@pytest.fixture
def local_actors():
    """`local_actors(n)` are n actors in this process."""
    made = []

    def make(count):
        made.append(LocalActors(count))
        return made[-1]

    yield make
    for worker in reversed([worker for each in made for worker in each.workers]):
        worker.clear()  # they change how the process logs and computes

"""For all tests."""

import gc


def pytest_collection_finish():
    """What is imported by now stays: to look at it again took a third of a second, every few tests."""
    gc.collect()
    gc.freeze()

"""What holds for all tests."""

import gc
import logging

# pytest attaches handlers to loggers that do not propagate, and where this one has a handler, torch formats a traceback
# of every fake tensor
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish():
    """Objects of modules that are imported by now live until the end, so the garbage collector need not scan them: a
    full collection took a third of a second, every few tests."""
    gc.collect()
    gc.freeze()

"""What holds for all tests."""

import gc
import logging
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch does, too

os.environ.pop("COLUMNS", None)  # which pytest-xdist sets for its workers; tests that need a width set it
os.environ["FEDLOOM_CACHE"] = "off"  # no test depends on what an earlier one, or the user, has measured

# pytest attaches handlers to loggers that do not propagate, and where this one has a handler, torch formats a traceback
# of every fake tensor
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish():
    """Objects of modules that are imported by now live until the end, so the garbage collector need not scan them: a
    full collection took a third of a second, every few tests."""
    gc.collect()
    gc.freeze()

"""Real data sets, where there are any."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def real() -> Callable[[str], Path]:
    """The folder that holds the folder of a data set; the test is skipped where there is none."""

    def find(folder: str) -> Path:
        root = os.environ.get("FEDLOOM_DATA")
        if not root:
            pytest.skip("FEDLOOM_DATA is not set, so there are no real data sets to read")
        if not (Path(root) / folder).is_dir():
            pytest.skip(f"FEDLOOM_DATA, {root}, has no folder {folder}")
        return Path(root)

    return find

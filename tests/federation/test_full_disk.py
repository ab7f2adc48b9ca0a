"""A site whose disk is full is named and left out, and takes part again once there is space."""

import os
import resource
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr")

from federation.deployment import SITES

from fedloom import load

pytestmark = pytest.mark.federation

DISK_BYTES = 4 << 20
FILE_BYTES = 1000  # less than a state


@contextmanager
def disk(folder: Path):
    """A small disk of its own for a folder with the files that are there; None where none can be mounted."""
    before = {path.name: (path.read_bytes(), path.stat().st_mode) for path in folder.iterdir()}
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        for name, (data, mode) in before.items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(mode)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def no_space(mounted: Path | None, process: int):
    """Fill a disk; without one, the process can write no files of some size."""
    if mounted is None:
        limited = psutil.Process(process)
        limited.rlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
        yield
        limited.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    filler = mounted / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    yield
    filler.unlink()


def test_a_site_with_a_full_disk_is_left_out_until_there_is_space(deployment):
    with disk(deployment.site(1)) as mounted:
        for i in range(SITES):
            deployment.join(i)
        terms = ("--deadline", "60", "--repeats", "0", "--minimum", "2")
        server = deployment.serve("ditto", "--dataset", "digits", "--rounds", "9", *terms)
        deployment.wait_for_round(1)

        def cohorts():
            return [row["cohort"] for row in load(deployment.out).rounds]

        with no_space(mounted, deployment.processes["site-1"].pid):
            full = len(cohorts())
            deployment.wait_for_round(full + 2)
        deployment.completed(server)
        assert cohorts()[0] == cohorts()[-1] == SITES
        # two more rounds may have been trained when the last result was written: sites train ahead
        assert SITES - 1 in cohorts()[full : full + 3]
        assert "client 1 is left out: its site" in deployment.said("server")
        deployment.stop("site-1")

"""What `fedloom keys`, `fedloom status` and `fedloom join --dry-run` make and show."""

import json
import os
import re
import time

import pytest
from helpers import run_cli

pytest.importorskip("flwr")

import fedloom
from fedloom.core.errors import UserError
from fedloom.deployment.flower import keys, status
from fedloom.deployment.flower.launch import LINK_LOG, PID_FILE
from fedloom.deployment.flower.processes import recorded
from fedloom.deployment.flower.server_app import JOB_FILE
from fedloom.deployment.kinds import ORDER
from fedloom.deployment.messages import Message

SECRET = {keys.CA_KEY, keys.SERVER_KEY, keys.NODE_KEY}


def files(folder):
    return {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def ran(monkeypatch, capsys):
    """What a command prints."""

    def run(*arguments, code=0):
        found, output, error = run_cli(monkeypatch, capsys, *arguments)
        assert found == code, error
        return output + error

    return run


@pytest.fixture
def folder(tmp_path):
    keys.make_keys(tmp_path / "federation", ["localhost"], 2)
    return tmp_path / "federation"


# -- keys


def test_only_their_owner_reads_keys(tmp_path):
    """Whatever mode the process gives to new files."""
    before = os.umask(0)
    try:
        keys.make_keys(tmp_path / "all", ["localhost"], 2)
    finally:
        os.umask(before)
    found = files(tmp_path / "all")
    assert {path.name for path in found} >= SECRET
    for path, file in found.items():
        assert file.stat().st_mode & 0o777 == (0o600 if path.name in SECRET else 0o644), path
    for name in ("server", "site-0", "site-1"):
        assert (tmp_path / "all" / name).stat().st_mode & 0o777 == 0o700


def test_what_is_there_stays_and_sites_can_be_added(folder, ran):
    before = {path: file.read_bytes() for path, file in files(folder).items()}
    ran("keys", str(folder), "--sites", "3", "--host", "elsewhere")
    after = {path: file.read_bytes() for path, file in files(folder).items()}
    assert {path: after[path] for path in before} == before
    assert {path.parts[0] for path in after.keys() - before.keys()} == {"site-2", "server"}


def test_a_client_that_has_a_key_gets_no_other(folder):
    """Its key is at its own machine, and not here any more."""
    known = folder / "server" / keys.SITES / "client-1.pub"
    before = known.read_bytes()
    (folder / "site-1" / keys.NODE_KEY).unlink()
    with pytest.raises(UserError, match="Client 1 has a key already"):
        keys.make_keys(folder, ["localhost"], 2)
    assert known.read_bytes() == before
    assert not (folder / "site-1" / keys.NODE_KEY).exists()


# -- status


def test_status_of_a_server_and_its_sites(folder, tmp_path, ran):
    """The round, the accuracy, and of every site what it does, when it last answered, and what went wrong."""
    server = folder / "server"
    assert "No run was started yet" in ran("status", str(server))
    fedloom.run("fedavg", "digits", clients=3, rounds=2, device="cpu", out=tmp_path / "run")
    (server / JOB_FILE).write_text(json.dumps({"out": str(tmp_path / "run")}))
    sites = status.Sites(server)
    sites.connected([0, 1, 2])
    sites.answered(0)
    sites.answered(1, "it was too late")
    sites.asked({2: Message(ORDER, {"t": 1, "jobs": [{"job": "train"}]})})
    sites.connected([0, 2])
    with recorded((server / LINK_LOG).with_suffix(".pid")):
        said = ran("status", str(server))
    assert "The server is running" in said
    assert "Round 2 of 2" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()[:1].isdigit()}
    for client, told in {
        "0": ["waits", "s ago"],
        "1": ["not connected", "never", "it was too late"],
        "2": ["train, round 2", "never"],
    }.items():
        assert all(text in rows[client] for text in told), rows[client]
    assert "The run has ended" in ran("status", str(server))


def test_status_is_live(folder):
    """The file is written when something changes, and a waiting server writes it again after a second."""
    sites = status.Sites(folder)
    sites.connected([0])
    (one,) = status.read(folder)
    assert (one.connected, one.answered, one.problem) == (True, 0, "")
    start = time.time()
    sites.answered(0)
    assert status.read(folder)[0].answered >= start
    sites.connected([])
    assert not status.read(folder)[0].connected


def test_status_of_a_site(folder, ran):
    assert "Client 1 does not take part now." in ran("status", str(folder / "site-1"))
    with recorded(folder / "site-1" / PID_FILE):
        assert "Client 1 takes part." in ran("status", str(folder / "site-1"))
    assert "neither a server nor a site" in " ".join(ran("status", str(folder), code=2).split())


# -- join --dry-run


def test_a_dry_run_lists_every_tensor(folder, ran):
    """Its name, type, shape and bytes, and what the method says it means; the site's folder stays as it is."""
    site = folder / "site-0"
    before = {path: file.read_bytes() for path, file in files(site).items()}
    wanted = ("join", str(site), "--dataset", "digits", "--dry-run", "--method", "fedrep", "--device", "cpu")
    listed = json.loads(ran(*wanted, "--json"))
    tensors = [one for one in listed if one["name"].startswith("up/")]
    assert tensors
    said = ran(*wanted)
    for one in tensors:
        assert re.fullmatch(r"\d+(x\d+)*, float32, [\d,]+ bytes", one["what"])
        assert one["meaning"]
        assert one["name"] in said
    assert {path: file.read_bytes() for path, file in files(site).items()} == before

"""Strangers, wrong keys and wrong certificates at a running federation: each is refused and told why, and the run is
completed by those who may take part. `test_hostile_input.py` has what needs no processes."""

import datetime
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

pytest.importorskip("flwr")

from federation.deployment import DEADLINE, SITES, Deployment, reference, same_rounds, wait
from federation.network import hosts, why_not
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedloom import load
from fedloom.deployment.flower import keys
from fedloom.deployment.flower.launch import APP, EXEC_LOG, PID_FILE
from fedloom.deployment.flower.processes import environment, program

pytestmark = pytest.mark.federation

BODY = 64 << 20  # bytes of a request that a stranger sends
START_SECONDS = 15  # in which a program starts


def listens(deployment):
    """Wait until the server can be reached."""

    def answers():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", deployment.port)) == 0

    wait(answers, lambda: deployment.said("server"))


def post(deployment, path, body=b""):
    """The status of a stranger's request. It does not check who the server is."""
    trusting = ssl._create_unverified_context()
    about = {"Content-Type": PROTOBUF_MEDIA_TYPE}
    request = urllib.request.Request(f"https://127.0.0.1:{deployment.port}{path}", body, about, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30, context=trusting) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return 0  # the connection was closed


def plain(deployment, data):
    """What the server answers to somebody who does not encrypt."""
    with socket.create_connection(("127.0.0.1", deployment.port), 10) as stranger, suppress(OSError):
        stranger.sendall(data)
        return stranger.recv(1000)
    return b""


def own_processes(deployment, name):
    process = psutil.Process(deployment.processes[name].pid)
    return [process, *process.children(recursive=True)]


def test_strangers_are_refused_and_the_run_goes_on(deployment, tmp_path):
    """A site with another authority, one with an unknown key, one that is joined twice, and bytes of any kind."""
    keys.make_keys(tmp_path / "other", ["localhost"], SITES)
    copy, unknown, right = tmp_path / "copy-of-site-1", deployment.site(2), tmp_path / "right"
    shutil.copytree(deployment.site(1), copy)
    shutil.copytree(unknown, right)
    wrong = deployment.site(0) / keys.CA_CERTIFICATE
    authority = wrong.read_bytes()
    wrong.write_bytes((tmp_path / "other" / "server" / keys.CA_CERTIFICATE).read_bytes())
    (unknown / keys.NODE_KEY).write_bytes((tmp_path / "other" / "site-2" / keys.NODE_KEY).read_bytes())
    server = deployment.serve("ditto", "--dataset", "digits", "--rounds", "3")
    listens(deployment)
    deployment.join(1)
    wait((deployment.site(1) / PID_FILE).exists, lambda: deployment.said("site-1"))
    deployment.join(1, name="again")
    deployment.join(1, name="copy", site=copy)
    deployment.join(0)
    deployment.join(2)
    # strangers at the server
    assert plain(deployment, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") in (b"", None)
    assert plain(deployment, b"\x16\x03\x01" + bytes(range(256)) * 8)[:5] != b"HTTP/"
    for path in ("/v1/fleet/register-node", "/v1/fleet/pull-messages", "/v1/fleet/push-object"):
        assert post(deployment, path) == 401
        assert post(deployment, path, b"\xff" * 1000) == 401
    # what each of them says
    assert deployment.processes.pop("again").wait(DEADLINE) == 2
    assert "is in use by another process" in deployment.said("again")
    for name in ("copy", "site-0", "site-2"):
        deployment.wait_until_said(name, "The connection has ended")
    # the first of the two stays, and the others take part once they have what they need
    deployment.stop("copy", "site-0", "site-2")
    wrong.write_bytes(authority)
    deployment.join(0)
    deployment.join(2, site=right)
    deployment.completed(server)
    same_rounds(load(deployment.out), reference("ditto", rounds=3))


def test_an_expired_certificate_is_named(deployment, monkeypatch):
    """The server does not start with it."""
    passed = datetime.timedelta(days=400)

    class Past(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) - passed

    monkeypatch.setattr(keys, "datetime", SimpleNamespace(**{**vars(datetime), "datetime": Past}))
    shutil.rmtree(deployment.keys)
    keys.make_keys(deployment.keys, ["localhost"], SITES)
    assert deployment.serve("fedavg", "--dataset", "digits", "--rounds", "1").wait(DEADLINE) == 2
    assert "expired" in deployment.said("server")


ATTACK = """\
open({trace!r}, "w")
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    pass
"""


@pytest.mark.parametrize("where", ["elsewhere", "there"])
def test_strangers_cannot_run_programs_at_the_server(where, tmp_path):
    """Somebody who has no key, but reaches the port, would have the server run a program of theirs, from another host,
    or as another user of the server's."""
    if why := why_not():
        pytest.skip(why)
    with hosts("server", "stranger") as found:
        (address, there), (_, elsewhere) = found["server"], found["stranger"]
        deployment = Deployment(tmp_path, host=address)
        trace, folder = tmp_path / "was-loaded", tmp_path / "stranger"
        for path in (folder / "flwr", folder / "app"):
            path.mkdir(parents=True)
        certificate = deployment.site(0) / keys.CA_CERTIFICATE  # which is no secret
        name = address if where == "elsewhere" else "localhost"
        about = f'address = "{name}:{deployment.port}"\nroot-certificates = "{certificate}"\n'
        (folder / "flwr" / "config.toml").write_text(f"[superlink.victim]\n{about}")
        (folder / "app" / "pyproject.toml").write_text(re.sub(r'= "fedloom\.[^:]*:\w+"', '= "attack:app"', APP))
        (folder / "app" / "attack.py").write_text(ATTACK.format(trace=str(trace)))
        try:
            deployment.serve("fedavg", "--dataset", "digits", "--rounds", "1", inside=there)
            started = (deployment.keys / "server" / EXEC_LOG).with_suffix(".pid")
            wait(started.exists, lambda: deployment.said("server"))
            line = [
                *{"elsewhere": elsewhere, "there": there}[where],
                program("flwr"),
                "run",
                str(folder / "app"),
                "victim",
            ]
            done = subprocess.run(line, env=environment(folder), capture_output=True, text=True, timeout=60)
            time.sleep(0 if done.returncode else START_SECONDS)
            assert not trace.exists(), done.stdout
            assert done.returncode, done.stdout
            refusal = {"elsewhere": "403 Forbidden", "there": "Authentication failed"}[where]
            assert refusal in done.stdout + done.stderr
        finally:
            deployment.stop()


def test_a_stranger_cannot_fill_the_memory_of_the_server(deployment):
    deployment.serve("fedavg", "--dataset", "digits", "--rounds", "1")
    listens(deployment)
    link = next(p for p in own_processes(deployment, "server") if "flower.superlink" in " ".join(p.cmdline()))
    before = link.memory_info().rss
    most = []
    watching = threading.Event()

    def watch():
        while not watching.wait(0.01):
            most.append(link.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        status = post(deployment, "/v1/fleet/register-node", b"\0" * BODY)
    finally:
        watching.set()
        watcher.join()
    assert max(most) - before < BODY / 2
    assert status in (0, 401)  # the connection is closed while it is still sent

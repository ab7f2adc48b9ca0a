"""The server of a live report: what it answers, to whom, and that it keeps up with runs that go on."""

import http.client
import json
import shutil
import threading
from contextlib import contextmanager

import pytest
import torch
from helpers import Crash, crash_after, make_federation, make_unfinished
from sentences import user_error

import fedloom
from fedloom.studies import live_report
from fedloom.studies.live_report import LiveReport

SMALL = {"width": 8, "device": "cpu", "plan": "per-client", "rounds": 4, "checkpoint_every": 1}


def start(folder, resume=False, **more):
    return fedloom.run(
        "fedavg", make_federation((20, 30), dtype=torch.float32), out=folder, resume=resume, **SMALL, **more
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live") / "run"
    start(folder)
    return folder


@contextmanager
def serving(folder):
    """A server in another thread, and a function that asks it for a path."""
    with LiveReport(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def ask(path="/", method="GET", **headers):
            connection = http.client.HTTPConnection(*server.server_address, timeout=30)
            try:
                connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
                answer = connection.getresponse()
                return answer, answer.read().decode()
            finally:
                connection.close()

        try:
            yield server, ask
        finally:
            server.shutdown()
            thread.join()


def test_the_page_may_ask_its_own_server_and_nobody_else(done):
    with serving(done) as (server, ask):
        answer, text = ask()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "connect-src 'self';" in text
        assert '"live":"' in text
        assert server.address == f"http://127.0.0.1:{server.server_address[1]}/"
        assert server.server_address[0] == "127.0.0.1"
        assert ask("/config.yaml")[0].status == 404
        assert ask("/../config.yaml")[0].status == 404
        assert ask(method="POST")[0].status == 501


def test_data_are_sent_once(done):
    with serving(done) as (_, ask):
        answer, text = ask("/data.json")
        assert answer.status == 200
        etag = answer.headers["ETag"]
        assert etag == f'"{json.loads(text)["live"]}"'
        answer, text = ask("/data.json", If_None_Match=etag)
        assert (answer.status, text) == (304, "")
        assert answer.headers["ETag"] == etag
        assert ask("/data.json", If_None_Match='"older"')[0].status == 200


def test_who_asks_for_another_host_gets_nothing(done):
    with serving(done) as (server, ask):
        port = server.server_address[1]
        for host in ("example.org", f"example.org:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
            for path in ("/", "/data.json"):
                answer, text = ask(path, Host=host)
                assert (answer.status, text) == (403, f"Open {server.address}\n")
        assert ask(Host=f"localhost:{port}")[0].status == 200


def test_it_keeps_up_with_a_run(tmp_path):
    folder = tmp_path / "<b>runs"
    folder.mkdir()
    with serving(folder) as (_, ask):
        answer, text = ask()
        assert answer.status == 200
        assert "refresh" in text
        assert "There are no runs in" in text
        assert "<b>" not in text
        assert ask("/data.json")[0].status == 404
        with pytest.raises(Crash):
            start(folder / "run", on_round=crash_after(3))
        answer, text = ask("/data.json")
        first, etag = json.loads(text), answer.headers["ETag"]
        assert first["progress"] == "1 run not finished"
        assert first["runs"][0]["round"] < 4
        assert ask("/data.json", If_None_Match=etag)[0].status == 304
        start(folder / "run", resume=True)
        answer, text = ask("/data.json", If_None_Match=etag)
        assert (answer.status, answer.headers["ETag"] != etag) == (200, True)
        assert (json.loads(text)["runs"][0]["round"], json.loads(text)["progress"]) == (4, "")


def test_the_end_of_a_run_is_noticed(done, tmp_path):
    """The summary is the last file of a run: it is written when the others have been seen already."""
    folder = shutil.copytree(done, tmp_path / "run")
    make_unfinished(folder)
    with serving(folder) as (_, ask):
        assert json.loads(ask("/data.json")[1])["progress"] == "1 run not finished"
        for name in ("summary.json", "manifest.json"):
            shutil.copy(done / name, folder / name)
        assert json.loads(ask("/data.json")[1])["progress"] == ""


def test_while_files_are_replaced_the_last_data_are_shown(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done, tmp_path / "run")
    with serving(folder) as (server, ask):
        before = ask("/data.json")[1]
        content = (folder / "rounds.parquet").read_bytes()
        (folder / "rounds.parquet").write_bytes(content[:100])
        answer, text = ask("/data.json")
        assert (answer.status, text) == (200, before)
        assert "damaged" in server.problem
        (folder / "rounds.parquet").write_bytes(content)
        monkeypatch.setattr(live_report, "collect", lambda found: 1 / 0)  # tables of different rounds
        assert ask("/data.json")[1] == before
        monkeypatch.undo()
        assert ask("/data.json")[0].status == 200
        assert server.problem == ""


def test_what_cannot_be_read_is_told_and_tried_again(done, monkeypatch):
    with serving(done) as (_, ask):
        monkeypatch.setattr(live_report, "collect", lambda found: 1 / 0)
        answer, text = ask()
        assert answer.status == 200
        assert "cannot be read just now (division by zero); this page tries again." in text
        monkeypatch.undo()
        assert '"live":"' in ask()[1]


def test_ports_and_folders_that_cannot_be_served(done, tmp_path):
    with LiveReport(done, 0) as first:
        port = first.server_address[1]
        with user_error(str(port), "--port"):
            LiveReport(done, port)
    with user_error("There is no folder"):
        LiveReport(tmp_path / "nothing", 0)


def test_a_browser_that_goes_away_is_no_error(done, capsys):
    with LiveReport(done, 0) as server:
        for error, said in ((BrokenPipeError(), False), (ValueError("a mistake"), True)):
            try:
                raise error
            except type(error):
                server.handle_error(None, ("127.0.0.1", 1))
            assert ("a mistake" in capsys.readouterr().err) == said

"""Downloads from a server that fails, breaks off, sends wrong headers, changes its files and sends hostile archives."""

import hashlib
import io
import itertools
import json
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from helpers import run_cli
from sentences import user_error

from fedloom.data import fetch, limits
from fedloom.data.dataset import DATASETS, Dataset, Source, locate
from fedloom.data.sets import (
    agnews,
    amazon,
    cifar10,
    cifar100,
    femnist,
    fmnist,
    har,
    mnist_by_writer,
    shakespeare,
    stackoverflow,
    tiny,
)

DATA = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)


class Site:
    """Files by path. `faults[path]` is what goes wrong, one for every request, nothing once they are used up."""

    def __init__(self):
        self.files, self.faults, self.tags, self.requests = {}, {}, {}, []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                site.requests.append((self.path, dict(self.headers)))
                faults = site.faults.get(self.path, [])
                site.answer(self, faults.pop(0) if faults else "")

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                pass  # a client that went away

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, to, fault):
        to.close_connection = True
        if fault == "silent":
            time.sleep(0.5)
            return
        if to.path not in self.files or fault.isdecimal():
            to.send_error(int(fault or 404))
            return
        if fault.startswith("to "):
            to.send_response(302)
            to.send_header("Location", fault[3:])
            to.send_header("Content-Length", "0")
            to.end_headers()
            return
        data, tag = self.files[to.path], self.tags.get(to.path, '"one"')
        asked, start = to.headers.get("Range"), 0
        if asked and fault != "no ranges" and (fault == "glue" or to.headers.get("If-Range") == tag):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            to.send_response(206)
            shown = start + 7 if fault == "wrong range" else start
            to.send_header("Content-Range", f"bytes {shown}-{len(data) - 1}/{len(data)}")
        else:
            to.send_response(200)
        body = data[start:]
        to.send_header("Content-Type", "text/html" if fault == "page" else "application/octet-stream")
        if tag:
            to.send_header("ETag", tag)
        if fault in ("chunked", "chunked and cut"):
            to.send_header("Transfer-Encoding", "chunked")
            to.end_headers()
            to.wfile.write(b"%x\r\n" % len(body) + body + (b"\r\n0\r\n\r\n" if fault == "chunked" else b"\r\nff\r\n"))
            return
        if fault != "no length":
            to.send_header("Content-Length", str(len(body) + (5 if fault == "too long a length" else 0)))
        to.end_headers()
        to.wfile.write(body[: int(fault.removeprefix("cut "))] if fault.startswith("cut ") else body)


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "PAUSE", 0.01)
    found = Site()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def publish(site, monkeypatch):
    """A data set of one file; `mirrors` are paths on the site."""
    names = itertools.count()

    def make(file="file.bin", data=DATA, mirrors=("/a",), unpack=False):
        site.files.update(dict.fromkeys(mirrors, data))
        sources = (Source(file, tuple(site.url + path for path in mirrors), unpack),)
        body = {"name": f"published{next(names)}", "about": "a file", "size": "one", "model": "mlp",
                "licence": "to be read first", "sources": sources, "load": None}  # fmt: skip
        return type("Published", (Dataset,), body)

    known = {name: DATASETS[name] for name in DATASETS.names()}
    yield make
    DATASETS._known.clear()
    DATASETS._known.update(known)


def sha(data):
    return hashlib.sha256(data).hexdigest()


def files_in(folder):
    """Paths of all files below a folder, without the lock."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != fetch.LOCK)


def test_a_file_arrives_whole_with_its_checksum_and_is_not_fetched_twice(site, publish, tmp_path):
    data, seen = publish("deep/file.bin"), []
    folder = fetch.download(data, tmp_path, lambda *now: seen.append(now))
    assert folder == tmp_path / data.name
    assert (folder / "deep/file.bin").read_bytes() == DATA
    assert files_in(folder) == ["checksums.json", "deep/file.bin"]
    record = json.loads((folder / "checksums.json").read_text())
    assert record == {"deep/file.bin": {"sha256": sha(DATA), "bytes": 300_000, "url": f"{site.url}/a", "unpacked": []}}
    assert seen[0] == ("deep/file.bin", 0, 300_000)
    assert seen[-1] == ("deep/file.bin", 300_000, 300_000)
    assert fetch.download(data, tmp_path) == folder
    assert len(site.requests) == 1
    assert site.requests[0][1]["User-Agent"].startswith("fedloom/")


def test_a_download_goes_where_the_loader_looks_first(publish, tmp_path, monkeypatch):
    data = publish()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert fetch.download(data) == tmp_path / "cache" / "fedloom" / data.name
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "mine"))
    assert fetch.download(data) == tmp_path / "mine" / data.name


@pytest.mark.parametrize(
    "faults",
    [["500"], ["503", "429"], ["cut 100000"], ["cut 0"], ["cut 100000", "cut 50000"], ["chunked"], ["chunked and cut"],
     ["cut 100000", "no ranges"], ["cut 100000", "wrong range"], ["cut 100000", "416"]],
    ids="-".join,
)  # fmt: skip
def test_temporary_failures_are_retried(site, publish, tmp_path, faults):
    site.faults["/a"] = list(faults)
    data = publish()
    folder = fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == DATA
    assert files_in(folder) == ["checksums.json", "file.bin"]
    assert site.faults["/a"] == []


def interrupted(site, publish, tmp_path, monkeypatch, at=100_000, **options):
    """A download that was stopped: its data set and its folder, with a part of the file."""
    data = publish(**options)
    site.faults |= {"/a": [f"cut {at}"], "/b": ["404"]}
    with monkeypatch.context() as once:
        once.setattr(fetch, "TRIES", 1)
        with user_error("sent 100000 of 300000 bytes"):
            fetch.download(data, tmp_path)
    site.requests.clear()
    return data, tmp_path / data.name


def test_an_interrupted_download_continues_where_it_ended(site, publish, tmp_path, monkeypatch):
    data, folder = interrupted(site, publish, tmp_path, monkeypatch)
    assert (folder / "file.bin.part").read_bytes() == DATA[:100_000]
    assert not (folder / "file.bin").exists()
    seen = []
    fetch.download(data, tmp_path, lambda *now: seen.append(now[1]))
    [(_, headers)] = site.requests
    assert headers["Range"] == "bytes=100000-"
    assert headers["If-Range"] == '"one"'
    assert seen[0] == 100_000
    assert (folder / "file.bin").read_bytes() == DATA
    assert files_in(folder) == ["checksums.json", "file.bin"]


def test_a_download_continues_at_the_mirror_where_it_was_interrupted(site, publish, tmp_path, monkeypatch):
    data = publish(mirrors=("/a", "/b"))
    site.faults |= {"/a": ["404"], "/b": ["cut 100000"]}
    with monkeypatch.context() as once:
        once.setattr(fetch, "TRIES", 1)
        with user_error("404", "100000 of 300000"):
            fetch.download(data, tmp_path)
    site.requests.clear()
    fetch.download(data, tmp_path)
    [(path, headers)] = site.requests
    assert (path, headers["Range"]) == ("/b", "bytes=100000-")


def test_ctrl_c_leaves_what_can_be_continued(site, publish, tmp_path):
    data = publish()

    def stop(file, done, total):
        if done > 200_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.download(data, tmp_path, stop)
    part = tmp_path / data.name / "file.bin.part"
    assert 200_000 < part.stat().st_size < 300_000
    assert part.read_bytes() == DATA[: part.stat().st_size]
    fetch.download(data, tmp_path)
    assert site.requests[1][1]["Range"].startswith("bytes=2")
    assert (tmp_path / data.name / "file.bin").read_bytes() == DATA


@pytest.mark.parametrize("how", ["new tag", "glue", "no tag", "weak tag", "other mirror"])
def test_parts_of_different_files_are_never_glued_together(site, publish, tmp_path, monkeypatch, how):
    site.tags["/a"] = {"no tag": "", "weak tag": 'W/"one"'}.get(how, '"one"')
    data, folder = interrupted(site, publish, tmp_path, monkeypatch, mirrors=("/a", "/b"))
    site.files |= {"/a": OTHER, "/b": OTHER}
    site.tags["/a"] = {"new tag": '"two"', "glue": '"two"'}.get(how, site.tags["/a"])
    site.faults["/a"] = {"glue": ["glue"], "other mirror": ["404"]}.get(how, [])
    fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == OTHER


def test_a_part_that_is_complete_needs_no_request(site, publish, tmp_path, monkeypatch):
    data, folder = interrupted(site, publish, tmp_path, monkeypatch)
    (folder / "file.bin.part").write_bytes(DATA)  # the process died before it could rename it
    fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == DATA
    assert site.requests == []


@pytest.mark.parametrize("fault", ["404", "cut 10", "500", "page", "no length", "too long a length"])
def test_the_next_mirror_is_asked_when_one_does_not_deliver(site, publish, tmp_path, fault):
    data = publish(mirrors=("/a", "/b"))
    site.faults["/a"] = [fault] * fetch.TRIES
    folder = fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == DATA
    assert site.requests[-1][0] == "/b"
    assert files_in(folder) == ["checksums.json", "file.bin"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("404", "answered 404, Not Found"),
        ("500", "answered 500, Internal Server Error"),
        ("cut 10", "of 300000 bytes"),
        ("too long a length", "sent 300000 of 300005 bytes"),
        ("page", "a web page"),
        ("no length", "does not say how long"),
        ("to ftp://127.0.0.1/file", "redirects to ftp://127.0.0.1/file"),
        ("to file:///etc/passwd", "redirects to file:///etc/passwd"),
        ("to /a", "redirects to http://127.0.0.1"),
    ],
)
def test_one_sentence_says_what_each_address_did_and_where_the_file_belongs(site, publish, tmp_path, fault, words):
    data = publish(mirrors=("/a", "/b"))
    site.faults |= {"/a": [fault] * 20, "/b": ["404"] * 20}
    with user_error(
        "file.bin could not be downloaded", f"{site.url}/a", words, f"{site.url}/b", str(tmp_path / data.name)
    ):
        fetch.download(data, tmp_path)
    assert not (tmp_path / data.name / "file.bin").exists()
    assert not (tmp_path / data.name / "checksums.json").exists()


def test_a_redirect_to_another_place_on_the_web_is_followed_but_never_from_https_to_http(site, publish, tmp_path):
    site.files["/there"], site.faults["/a"] = DATA, [f"to {site.url}/there"]
    folder = fetch.download(publish(data=b"old"), tmp_path)
    assert (folder / "file.bin").read_bytes() == DATA
    from urllib.request import Request

    with pytest.raises(fetch.DownloadError, match="http://b"):
        fetch._Redirects().redirect_request(Request("https://a"), None, 302, "", {}, "http://b")


@pytest.mark.parametrize("address", ["ftp://127.0.0.1/file", "file:///etc/hostname"])
def test_only_the_web_is_asked(publish, tmp_path, address):
    data = publish()
    data.sources = (Source("file.bin", (address,)),)
    with user_error("unknown url type", address):
        fetch.download(data, tmp_path)


def test_a_server_that_does_not_answer_is_given_up(site, publish, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.1)
    data = publish(mirrors=("/a", "/b"))
    site.faults["/a"] = ["silent"] * 3
    fetch.download(data, tmp_path)
    assert [path for path, _ in site.requests] == ["/a"] * 3 + ["/b"]
    other = publish()
    site.faults["/a"] = ["silent"] * 3
    with user_error("no answer within 0.1 s"):
        fetch.download(other, tmp_path)


def test_a_server_that_refuses_connections_is_reported(publish, tmp_path, site):
    data = publish()
    site.server.shutdown()
    site.server.server_close()
    with user_error("connection refused", site.url, "by hand"):
        fetch.download(data, tmp_path)


# -- checksums


def test_a_file_that_changed_since_the_first_download_is_refused(site, publish, tmp_path):
    data = publish(mirrors=("/a", "/b"))
    folder = fetch.download(data, tmp_path)
    (folder / "file.bin").unlink()
    site.files |= {"/a": OTHER, "/b": OTHER}
    with user_error("file.bin", sha(DATA), sha(OTHER), "remove its entry", str(folder / "checksums.json")):
        fetch.download(data, tmp_path)
    assert files_in(folder) == ["checksums.json"]
    site.files["/b"] = DATA  # one mirror has the right file
    fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == DATA
    (folder / "checksums.json").unlink()
    (folder / "file.bin").unlink()
    fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == OTHER


def test_a_file_that_changed_on_disk_is_noticed(site, publish, tmp_path):
    data = publish()
    folder = fetch.download(data, tmp_path)
    (folder / "file.bin").write_bytes(OTHER)
    with user_error(str(folder / "file.bin"), sha(DATA), sha(OTHER), "delete it"):
        fetch.download(data, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"file.bin": 3}', '{"file.bin": {"sha256": "x"}}', '{"file.bin": {"sha256": 1, "unpacked": []}}',
     '{"file.bin": {"sha256": "x", "unpacked": 3}}', '{"file.bin": {"sha256": "x", "unpacked": [["a"], 3]}}', "", "3",
     "[" * 100_000, "9" * 5000],
    ids=lambda text: text[:50],
)  # fmt: skip
def test_a_damaged_record_is_named(publish, tmp_path, text):
    data = publish()
    folder = tmp_path / data.name
    folder.mkdir()
    (folder / "checksums.json").write_text(text)
    with user_error(str(folder / "checksums.json"), "delete it"):
        fetch.download(data, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"url": 3}', "[" * 100_000, '{"url": "%s", "validator": ["x"], "size": 300000}',
     '{"url": "%s", "validator": "a\\nb: c", "size": 300000}', '{"url": "%s", "validator": "x", "size": "all"}'],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_a_damaged_note_about_a_part_only_means_that_the_download_begins_again(site, publish, tmp_path, text):
    data = publish()
    folder = tmp_path / data.name
    folder.mkdir()
    (folder / "file.bin.part").write_bytes(OTHER[:1000])
    (folder / "file.bin.part.json").write_text(text.replace("%s", f"{site.url}/a"))
    fetch.download(data, tmp_path)
    assert (folder / "file.bin").read_bytes() == DATA
    assert files_in(folder) == ["checksums.json", "file.bin"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", ["file.bin", "file.bin.part", "file.bin.part.json", "checksums.json"])
def test_a_pipe_or_a_folder_where_a_file_should_be_is_named_before_anything_is_fetched(
    site, publish, tmp_path, name, make
):
    data = publish()
    (tmp_path / data.name).mkdir()
    make(tmp_path / data.name / name)
    with user_error(f"{name} is a", "not a file; remove it"):
        fetch.download(data, tmp_path)
    assert site.requests == []


# -- archives


def zipped(members):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as packed:
        for name, value in members.items():
            info = zipfile.ZipInfo(name)
            if value is LINK:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            packed.writestr(info, b"target" if value is LINK else value, zipfile.ZIP_DEFLATED)
    return raw.getvalue()


def tarred(members):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as rolled:
        for name, value in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(value, bytes):
                info.size = len(value)
                rolled.addfile(info, io.BytesIO(value))
            else:
                info.type, info.linkname = value
                rolled.addfile(info)
    return raw.getvalue()


LINK = (tarfile.SYMTYPE, "/etc")
MEMBERS = {"set/a.txt": b"aaa", "set/deep/b.txt": b"bb" * 50_000, "readme": b"read"}
PACKERS = {"a.zip": zipped, "a.tar.gz": tarred}


@pytest.mark.parametrize("file", PACKERS)
def test_an_archive_is_unpacked_and_not_fetched_again_while_all_of_it_is_there(site, publish, tmp_path, file):
    data = publish(file, PACKERS[file](MEMBERS), unpack=True)
    folder = fetch.download(data, tmp_path)
    assert files_in(folder) == ["checksums.json", "readme", "set/a.txt", "set/deep/b.txt"]
    for name, value in MEMBERS.items():
        assert (folder / name).read_bytes() == value
    assert json.loads((folder / "checksums.json").read_text())[file]["unpacked"] == ["readme", "set"]
    fetch.download(data, tmp_path)
    assert len(site.requests) == 1
    (folder / "readme").unlink()
    (folder / "set/a.txt").write_bytes(b"mine")
    fetch.download(data, tmp_path)
    assert len(site.requests) == 2
    assert (folder / "readme").read_bytes() == b"read"
    assert (folder / "set/a.txt").read_bytes() == b"aaa"


def test_an_archive_in_an_archive_is_unpacked_too(publish, tmp_path):
    folder = fetch.download(publish("a.zip", zipped({"b.zip": zipped(MEMBERS), "names": b"n"}), unpack=True), tmp_path)
    assert files_in(folder) == ["checksums.json", "names", "readme", "set/a.txt", "set/deep/b.txt"]


def test_an_archive_that_was_put_there_by_hand_is_unpacked(site, publish, tmp_path):
    data = publish("a.zip", b"", unpack=True)
    folder = tmp_path / data.name
    folder.mkdir()
    (folder / "a.zip").write_bytes(zipped(MEMBERS))
    for _ in range(2):
        fetch.download(data, tmp_path)
        assert files_in(folder) == ["a.zip", "checksums.json", "readme", "set/a.txt", "set/deep/b.txt"]
    assert site.requests == []
    (folder / "a.zip").write_bytes(b"PK nothing")
    with user_error(str(folder / "a.zip"), "sha256"):
        fetch.download(data, tmp_path)
    (folder / "checksums.json").unlink()
    with user_error(str(folder / "a.zip"), "no whole archive", "delete it"):
        fetch.download(data, tmp_path)


HOSTILE = {
    "above": ("../out.txt", b"x"),
    "above in the middle": ("set/../../out.txt", b"x"),
    "absolute": ("/tmp/fedloom-out.txt", b"x"),
    "backslashes": ("..\\out.txt", b"x"),
    "drive": ("C:\\out.txt", b"x"),
    "symbolic link": ("set/link", LINK),
    "the record of checksums": ("checksums.json", b"{}"),
}
IN_TAR = {
    "hard link": ("set/link", (tarfile.LNKTYPE, "../../../etc/passwd")),
    "device": ("set/zero", (tarfile.CHRTYPE, "")),
    "pipe": ("set/pipe", (tarfile.FIFOTYPE, "")),
}


@pytest.mark.parametrize(
    ("file", "how"), [*itertools.product(PACKERS, HOSTILE), *itertools.product(["a.tar.gz"], IN_TAR)]
)
def test_a_hostile_archive_writes_nothing(publish, tmp_path, file, how):
    name, value = (HOSTILE | IN_TAR)[how]
    data = publish(file, PACKERS[file]({**MEMBERS, name: value}), unpack=True)
    with user_error(file, repr(name)):
        fetch.download(data, tmp_path)
    assert files_in(tmp_path) == []


def damaged(raw):
    middle = len(raw) // 2
    return raw[:middle] + bytes(b ^ 255 for b in raw[middle : middle + 50]) + raw[middle + 50 :]


RANDOM = {"set/noise": OTHER, **MEMBERS}


@pytest.mark.parametrize("file", PACKERS)
@pytest.mark.parametrize(
    "spoil",
    [
        damaged,
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"no archive" * 99,
        lambda raw: zipped({}),
    ],
    ids=["bits turned", "half", "empty", "text", "no members"],
)
def test_a_damaged_archive_leaves_nothing_and_the_next_mirror_is_asked(site, publish, tmp_path, file, spoil):
    data = publish(file, PACKERS[file](RANDOM), mirrors=("/a", "/b"), unpack=True)
    site.files["/a"] = spoil(site.files["/a"])
    folder = fetch.download(data, tmp_path)
    assert files_in(folder) == ["checksums.json", "readme", "set/a.txt", "set/deep/b.txt", "set/noise"]
    assert (folder / "set/noise").read_bytes() == OTHER
    single = publish(file, site.files["/a"], unpack=True)
    with user_error(file, "archive" if spoil is not damaged else "it "):
        fetch.download(single, tmp_path)
    assert files_in(tmp_path / single.name) == []


@pytest.mark.parametrize("file", PACKERS)
def test_an_archive_that_the_disk_cannot_hold_is_refused(publish, tmp_path, monkeypatch, file):
    bomb = PACKERS[file]({"zeros": bytes(3_000_000)})
    assert len(bomb) < 10_000
    usage = type("Usage", (), {"free": 2_000_000})
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage)
    data = publish(file, bomb, unpack=True)
    with user_error(file, "more than the 2000000 bytes"):
        fetch.download(data, tmp_path)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("file", PACKERS)
def test_an_archive_that_inflates_too_much_is_refused_also_in_an_archive(publish, tmp_path, monkeypatch, file):
    monkeypatch.setattr(limits, "INFLATED", 100_000)
    bomb = PACKERS[file]({"zeros": bytes(3_000_000)})
    for name, raw in ((file, bomb), ("b.zip", zipped({"inner.zip": zipped({"zeros": bytes(3_000_000)})}))):
        with user_error(name, "than 200 times its size"):
            fetch.download(publish(name, raw, unpack=True), tmp_path)
    assert files_in(tmp_path) == []


def test_a_file_that_the_disk_cannot_hold_is_not_begun(publish, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 299_999}))
    with user_error("300000 bytes", "room for 299999"):
        fetch.download(publish(), tmp_path)
    assert files_in(tmp_path) == []


SETS = {"cifar10": cifar10, "cifar100": cifar100, "tiny": tiny, "har": har, "amazon": amazon, "fmnist": fmnist,
        "mnist-by-writer": mnist_by_writer, "femnist": femnist, "agnews": agnews, "shakespeare": shakespeare,
        "stackoverflow": stackoverflow}  # fmt: skip


def test_every_set_that_can_be_downloaded_is_tried():
    assert set(SETS) == {name for name in DATASETS.names() if DATASETS[name].sources}


@pytest.mark.parametrize("name", SETS)
def test_what_is_downloaded_is_what_the_loader_looks_for(site, monkeypatch, tmp_path, name):
    """Archives are made as their publishers make them: one folder with all files (UCI: in an archive in an archive)."""
    cls, layouts = DATASETS[name], SETS[name].LAYOUTS
    first = next(iter(layouts))
    moved = []
    for number, source in enumerate(cls.sources):
        path = f"/{number}"
        moved.append(Source(source.file, (site.url + path,), source.unpack))
        packed = PACKERS["a.zip" if source.file.endswith(".zip") else "a.tar.gz"](dict.fromkeys(layouts[first], b"x"))
        inner = {"UCI HAR Dataset.zip": packed, "UCI HAR Dataset.names": b"x"}
        site.files[path] = b"x" if not source.unpack else zipped(inner) if name == "har" else packed
    monkeypatch.setattr(cls, "sources", tuple(moved))
    folder = fetch.download(name, tmp_path)
    assert locate(cls, tmp_path, layouts) == (folder, first)


# -- two at once, and the command


def test_two_downloads_at_once_fetch_a_file_once(site, publish, tmp_path):
    data = publish()
    folder = tmp_path / data.name
    folder.mkdir()
    done = []
    with FileLock(folder / fetch.LOCK):
        threads = [threading.Thread(target=lambda: done.append(fetch.download(data, tmp_path))) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert site.requests == []  # the lock is taken
    for thread in threads:
        thread.join()
    assert done == [folder, folder]
    assert len(site.requests) == 1


def test_the_command_shows_the_licence_first_and_then_where_the_data_are(publish, tmp_path, monkeypatch, capsys):
    data = publish()
    seen, real = [], fetch._fetch_with_retries
    monkeypatch.setattr(fetch, "_fetch_with_retries", lambda *args: seen.append(capsys.readouterr().err) or real(*args))
    code, out, _ = run_cli(monkeypatch, capsys, "data", "download", data.name, "--data-dir", tmp_path)
    assert code == 0
    assert "Licence: to be read first" in seen[0]
    assert str(tmp_path / data.name) in seen[0]
    assert out == f"{data.name} is in {tmp_path / data.name}\n"


def test_the_command_fails_with_one_sentence_and_exit_code_2(site, publish, tmp_path, monkeypatch, capsys):
    data = publish()
    site.faults["/a"] = ["404"]
    code, out, err = run_cli(monkeypatch, capsys, "data", "download", data.name, "--data-dir", tmp_path)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"fedloom: file.bin could not be downloaded ({site.url}/a: it answered 404")
    assert "Traceback" not in err


def test_the_command_says_how_to_go_on_after_ctrl_c(publish, tmp_path, monkeypatch, capsys):
    data = publish()

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_start_transfer", stop)
    code, _, err = run_cli(monkeypatch, capsys, "data", "download", data.name, "--data-dir", tmp_path)
    assert code == 130
    assert f"Continue with: fedloom data download {data.name} --data-dir {tmp_path}" in err


def test_the_command_says_which_data_sets_need_no_download_or_have_none(publish, tmp_path, monkeypatch, capsys):
    code, out, _ = run_cli(monkeypatch, capsys, "data", "download", "digits")
    assert code == 0
    assert "digits needs no download" in out
    data = publish()
    data.debian = ("package-of-it", tmp_path)
    code, out, _ = run_cli(monkeypatch, capsys, "data", "download", data.name)
    assert code == 0
    assert f"{data.name} is there already: {tmp_path}, from Debian's package 'package-of-it'" in out
    data.sources = ()
    code, _, err = run_cli(monkeypatch, capsys, "data", "download", data.name, "--data-dir", tmp_path)
    assert code == 2
    assert f"put into {tmp_path / data.name}" in err
    code, _, err = run_cli(monkeypatch, capsys, "data", "download", "cifar11")
    assert code == 2
    assert "did you mean" in err


def test_a_download_that_was_killed_is_continued(site, publish, tmp_path):
    """A process that is killed in the middle, without a chance to tidy up."""
    site.files["/a"] = DATA
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from fedloom.data import fetch\n"
        "from fedloom.data.dataset import Source\n"
        "stop = lambda file, done, total: done > 200_000 and os._exit(9)\n"
        "fetch._fetch_source(Source('file.bin', (sys.argv[1],)), Path(sys.argv[2]), stop)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, f"{site.url}/a", str(tmp_path)], check=False)
    assert done.returncode == 9
    part = tmp_path / "file.bin.part"
    assert part.stat().st_size > 200_000
    fetch._fetch_source(Source("file.bin", (f"{site.url}/a",)), tmp_path, lambda *_: None)
    assert Path(tmp_path / "file.bin").read_bytes() == DATA
    assert site.requests[1][1]["Range"].startswith("bytes=2")

"""Data sets from where they are published: resumed after an interruption, checked, unpacked as a whole or not at all.

A file arrives as NAME.part, with what is needed to go on with it in NAME.part.json; once complete it is renamed, or
unpacked and removed. What its sha256 was the first time stands in checksums.json and holds for every later download.
"""

from __future__ import annotations

import http
import http.client
import json
import logging
import lzma
import os
import re
import shutil
import socket
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import IO, Any
from urllib import error as urlerror
from urllib import request
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from fedloom import __version__
from fedloom.core.errors import UserError, oserror_as_user_error
from fedloom.data.dataset import DATASETS, Dataset, Source, folders
from fedloom.storage.files import Damaged, file_checksum, read_json, sync_folder, write_json

log = logging.getLogger("fedloom")

Watch = Callable[[str, int, int | None], None]  # a file, its bytes that are here, its bytes in all where they are known
RECORD, LOCK, UNPACKING = "checksums.json", ".download.lock", ".unpacking-"
AGENT = f"fedloom/{__version__}"
TIMEOUT = 30.0  # seconds without a byte
TRIES, PAUSE = 3, 2.0  # at each address; seconds before the second try, doubled each time
BLOCK = 1 << 16
FILE_COST = 4096  # bytes that even an empty file takes on a disk


class Failed(Exception):
    """An address did not deliver what was wanted; another may."""


class Again(Failed):
    """The same address may."""


def download(dataset: str | type[Dataset], data_dir: Path | None = None, watch: Watch | None = None) -> Path:
    """Fetch what a data set is made from, if it is not there yet; its folder."""
    cls = DATASETS[dataset] if isinstance(dataset, str) else dataset
    folder = folders(cls, data_dir)[0]
    if cls.built_in:
        raise UserError(f"Data set '{cls.name}' needs no download.")
    if not cls.sources:
        raise UserError(
            f"Data set '{cls.name}' cannot be downloaded; docs/data.md says which files to put into {folder}."
        )
    with oserror_as_user_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        for source in cls.sources:
            _obtain(source, folder, watch or (lambda *_: None))
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; what another left half unpacked is removed."""
    lock = FileLock(folder / LOCK)
    with oserror_as_user_error(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning("Another process is downloading to %s; waiting for it.", folder)
            lock.acquire()
    try:
        for left in folder.glob(f"{UNPACKING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


def _obtain(source: Source, folder: Path, watch: Watch) -> None:
    """The file of a source, or what was in it, from before or from the first address that delivers."""
    record = _read_record(folder)
    known, target = record.get(source.file), folder / source.file
    unpacked = known is not None and known["unpacked"] and all((folder / name).exists() for name in known["unpacked"])
    if target.is_file():
        try:
            _keep(source, folder, target, record, unpacked)
        except Failed as why:
            raise UserError(f"{target} cannot be used ({why}); delete it, and it is fetched again.") from why
        return
    if unpacked:
        return
    part = target.with_name(f"{target.name}.part")
    failures = []
    for url in sorted(source.urls, key=lambda url: url != _state(part).get("url")):  # where it was interrupted
        try:
            _fetch(url, source.file, part, watch)
            try:
                _keep(source, folder, part, record)
            except Failed:
                _drop(part)
                raise
            return
        except Failed as why:
            failures.append(f"{url}: {why}")
    more = " and run this again" if source.unpack else ""
    raise UserError(
        f"{source.file} could not be downloaded ({'; '.join(failures)}); try again later, or put the file into "
        f"{target.parent} by hand{more}."
    )


def _keep(source: Source, folder: Path, path: Path, record: dict[str, Any], unpacked: bool = False) -> None:
    """A complete file is compared with what it was the first time, then put in its place or unpacked."""
    known = record.get(source.file)
    try:
        found = file_checksum(path)
    except OSError as why:
        raise Failed(_reason(why)) from why
    if known and known["sha256"] != found:
        raise Failed(
            f"its sha256 is {found}, but the first time {source.file} had {known['sha256']}, and if the publisher "
            f"changed it on purpose, remove its entry in {folder / RECORD}"
        )
    if unpacked:
        return
    target, url = folder / source.file, _state(path).get("url")
    entry: dict[str, Any] = {"sha256": found, "bytes": path.stat().st_size, "url": url, "unpacked": []}
    if source.unpack:
        entry["unpacked"] = _unpack(path, folder)
    elif path != target:
        with oserror_as_user_error(target):
            os.replace(path, target)
            sync_folder(target.parent)
    if known is None or entry["unpacked"] != known["unpacked"]:
        write_json(folder / RECORD, {**record, source.file: entry})
    if path != target:
        _drop(path)


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        found = read_json(path)
        sound = all(isinstance(one["sha256"], str) and isinstance(one["unpacked"], list) for one in found.values())
    except (Damaged, AttributeError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(f"{path} is damaged; delete it, and checksums are recorded anew.")
    return dict(found)


# -- over the network -------------------------------------------------------------------------------------------------


class _Redirects(request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        now, then = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if then not in ("http", "https") or (now, then) == ("https", "http"):
            raise Failed(f"it redirects to {newurl}, which is not safe")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> request.OpenerDirector:
    """For http and https, and nothing else."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(), request.UnknownHandler(), request.HTTPHandler(), request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(), request.HTTPErrorProcessor(), _Redirects(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _fetch(url: str, file: str, part: Path, watch: Watch) -> None:
    """All of a file at `part`."""
    with oserror_as_user_error(part):
        part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(TRIES):
        try:
            return _transfer(url, file, part, watch)
        except Again as why:
            if attempt + 1 == TRIES:
                raise Failed(str(why)) from why
            time.sleep(PAUSE * 2**attempt)


def _transfer(url: str, file: str, part: Path, watch: Watch) -> None:
    """Go on where `part` ends if the server still has the same file, otherwise from the start."""
    state = _state(part)
    have = part.stat().st_size if part.exists() and state.get("url") == url and state.get("validator") else 0
    if have and have == state.get("size"):
        return  # complete: the checks afterwards were interrupted
    headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": state["validator"]}
    try:
        with _opener().open(request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
            have, size = _begin(answer, url, part, state, have)
            done = have
            watch(file, done, size)
            with part.open("ab" if have else "wb") as out:
                while block := answer.read(BLOCK):
                    with oserror_as_user_error(part):
                        out.write(block)
                        out.flush()
                    done += len(block)
                    watch(file, done, size)
                os.fsync(out.fileno())
    except urlerror.HTTPError as why:
        if why.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            _drop(part)
        again = why.code in (408, 416, 429) or why.code >= 500
        raise (Again if again else Failed)(_answered(why)) from why
    except (OSError, http.client.HTTPException) as why:
        nowhere = isinstance(getattr(why, "reason", None), socket.gaierror)
        raise (Failed if nowhere else Again)(_reason(why)) from why
    if size is not None and done != size:
        if done > size:
            _drop(part)
        raise Again(f"it sent {done} of {size} bytes")


def _begin(answer: Any, url: str, part: Path, state: dict[str, Any], have: int) -> tuple[int, int | None]:
    """From which byte on the answer goes, and the size of the whole file."""
    if answer.headers.get_content_type() == "text/html":
        raise Failed("it answered with a web page, not with the file")
    validator = _validator(answer.headers)
    if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        right = span and (int(span[1]), int(span[2])) == (have, state.get("size"))
        if not right or validator not in ("", state["validator"]):
            _drop(part)  # glued together they would be no file that ever was
            raise Again("it continued with another file")
        return have, state["size"]
    length = answer.headers.get("Content-Length", "")
    if not length.isdecimal() and answer.headers.get("Transfer-Encoding", "").lower() != "chunked":
        raise Failed("it does not say how long the file is")
    size = int(length) if length.isdecimal() else None
    free = shutil.disk_usage(part.parent).free
    if size is not None and size > free:
        raise UserError(f"{url} has {size} bytes, but {part.parent} has room for {free}; free some space.")
    _drop(part)
    write_json(_state_file(part), {"url": url, "validator": validator, "size": size})
    return 0, size


def _validator(headers: Any) -> str:
    """What tells one version of a file from another, for `If-Range`; a weak tag does not."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _state_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _state(part: Path) -> dict[str, Any]:
    try:
        found = json.loads(_state_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _drop(part: Path) -> None:
    part.unlink(missing_ok=True)
    _state_file(part).unlink(missing_ok=True)


def _answered(error: urlerror.HTTPError) -> str:
    if 300 <= error.code < 400:
        return f"it redirects to {error.url}, which is not possible"
    phrase = http.HTTPStatus(error.code).phrase if error.code in set(http.HTTPStatus) else "an unknown code"
    return f"it answered {error.code}, {phrase}"


def _reason(error: Exception) -> str:
    why = getattr(error, "reason", error)
    if isinstance(why, socket.gaierror):
        return "its name was not found, so there may be no network"
    if isinstance(why, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(why, http.client.IncompleteRead):
        return "it broke off"
    text = getattr(why, "strerror", None) or str(why) or type(why).__name__
    return text.splitlines()[0].rstrip(".").lower()


# -- archives ---------------------------------------------------------------------------------------------------------


def _unpack(archive: Path, folder: Path) -> list[str]:
    """What is in an archive, moved into the folder once all of it is on disk; the names there."""
    with oserror_as_user_error(folder):
        work = Path(tempfile.mkdtemp(prefix=UNPACKING, dir=folder))
    try:
        inside, old = work / "new", work / "old"
        inside.mkdir()
        old.mkdir()
        _extract(archive, inside)
        for inner in sorted(inside.glob("*.zip")):  # UCI puts archives into an archive
            _extract(inner, inside)
            inner.unlink()
        names = sorted(path.name for path in inside.iterdir())
        if not names:
            raise Failed("the archive is empty")
        for name in names:
            if name in (RECORD, LOCK) or name.startswith(UNPACKING):
                raise Failed(f"its member {name!r} has a name that is taken")
        if hasattr(os, "sync"):
            os.sync()
        with oserror_as_user_error(folder):
            for name in names:
                if (folder / name).exists():
                    os.replace(folder / name, old / name)
                os.replace(inside / name, folder / name)
            sync_folder(folder)
        return names
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _extract(archive: Path, into: Path) -> None:
    """Plain files and folders only, all below `into`, and no more than the disk can hold."""
    free = room = shutil.disk_usage(into).free
    try:
        for name, kind, size, opened in _members(archive):
            parts = PureWindowsPath(name)  # takes both kinds of slashes and drives apart
            if parts.anchor or ".." in parts.parts or "\0" in name:
                raise Failed(f"its member {name!r} would be written outside of the folder")
            if kind == "other":
                raise Failed(f"its member {name!r} is a link or a device, not a file")
            room -= size + FILE_COST
            if room < 0:
                raise Failed(f"it unpacks to more than the {free} bytes that are free on the disk")
            target = into.joinpath(*parts.parts)
            with oserror_as_user_error(target):
                (target if kind == "folder" else target.parent).mkdir(parents=True, exist_ok=True)
            if kind == "file":
                with opened() as member, _written(target) as file:
                    while block := member.read(BLOCK):
                        with oserror_as_user_error(target):
                            file.write(block)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as why:
        raise Failed(f"it is no whole archive: {_reason(why)}") from why
    except (RuntimeError, NotImplementedError, ValueError, OSError) as why:  # encrypted, of an unknown kind, damaged
        raise Failed(f"it cannot be unpacked: {_reason(why)}") from why


@contextmanager
def _written(target: Path) -> Iterator[IO[bytes]]:
    with oserror_as_user_error(target):
        file = target.open("wb")
    try:
        yield file
    finally:
        with oserror_as_user_error(target):
            file.close()


def _members(archive: Path) -> Iterator[tuple[str, str, int, Callable[[], Any]]]:
    """Name, kind (file, folder, other), size, and how to open it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for one in packed.infolist():
                mode = stat.S_IFMT(one.external_attr >> 16)
                plain = mode in (0, stat.S_IFREG, stat.S_IFDIR)
                kind = "other" if not plain else "folder" if one.is_dir() else "file"
                yield one.filename, kind, one.file_size, partial(packed.open, one)
    else:
        with tarfile.open(archive) as rolled:
            for each in rolled:
                kind = "folder" if each.isdir() else "file" if each.isfile() else "other"
                yield each.name, kind, each.size, partial(rolled.extractfile, each)
            while rolled.fileobj is not None and rolled.fileobj.read(BLOCK):
                pass  # the checksum of gzip comes last, behind what tar reads

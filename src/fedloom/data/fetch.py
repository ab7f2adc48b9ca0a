"""Downloads data sets from their publishers.

A file is downloaded to NAME.part, while NAME.part.json holds what is needed to resume it. Once complete, it is renamed,
or unpacked and removed. Its sha256 is recorded in checksums.json, and later downloads must have the same.
"""

import http
import http.client
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib import error as urlerror
from urllib import request
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from fedloom import __version__
from fedloom.core.errors import UserError, oserror_as_user_error, reason
from fedloom.data.archives import ArchiveError, extract
from fedloom.data.dataset import DATASETS, Dataset, Source, folders
from fedloom.data.limits import inflated_limit, require_file
from fedloom.storage.files import Damaged, file_checksum, json_writer, read_json, sync_folder, write_file

log = logging.getLogger("fedloom")

OnProgress = Callable[[str, int, int | None], None]  # file, bytes downloaded, bytes in all (None: unknown)
RECORD, LOCK, UNPACK_PREFIX = "checksums.json", ".download.lock", ".unpacking-"
AGENT = f"fedloom/{__version__}"
TIMEOUT = 30.0  # seconds without a byte
TRIES, PAUSE = 3, 2.0  # attempts at each URL; seconds before the second one, doubled each time
BLOCK = 1 << 16


class DownloadError(Exception):
    """A URL did not deliver the file; the next URL is tried."""


class TransientError(DownloadError):
    """A failure that may be temporary; the same URL is tried again."""


def download(dataset: str | type[Dataset], data_dir: Path | None = None, on_progress: OnProgress | None = None) -> Path:
    """Download the files of a data set that are not there yet, and return its folder.

    Args:
        dataset: name or class of the data set.
        data_dir: folder for data sets; by default $FEDLOOM_DATA or a cache.
        on_progress: called with a file's name, the bytes downloaded and the bytes in all (None if they are unknown).
    """
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
    with _exclusive_lock(folder):
        for source in cls.sources:
            _fetch_source(source, folder, on_progress or (lambda *_: None))
    return folder


@contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock the folder, waiting for another process if necessary, and remove what an interrupted one left unpacked."""
    lock = FileLock(folder / LOCK)
    with oserror_as_user_error(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning("Another process is downloading to %s; waiting for it.", folder)
            lock.acquire()
    try:
        for leftover in folder.glob(f"{UNPACK_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


def _fetch_source(source: Source, folder: Path, on_progress: OnProgress) -> None:
    """Make sure that the file of a source, or its unpacked content, is in the folder: download it if it is not."""
    record = _read_record(folder)
    entry, target = record.get(source.file), folder / source.file
    part = target.with_name(f"{target.name}.part")
    for path in (target, part, _state_file(part)):
        if os.path.exists(path):
            require_file(path)
    unpacked = entry is not None and entry["unpacked"] and all((folder / name).exists() for name in entry["unpacked"])
    if target.is_file():
        try:
            _store(source, folder, target, record, unpacked)
        except DownloadError as error:
            raise UserError(f"{target} cannot be used ({error}); delete it, and it is fetched again.") from error
        return
    if unpacked:
        return
    failures = []
    for url in sorted(source.urls, key=lambda url: url != _read_state(part).get("url")):  # resume first
        try:
            _fetch_with_retries(url, source.file, part, on_progress)
            try:
                _store(source, folder, part, record)
            except DownloadError:
                _remove_part(part)
                raise
            return
        except DownloadError as error:
            failures.append(f"{url}: {error}")
    more = " and run this again" if source.unpack else ""
    raise UserError(
        f"{source.file} could not be downloaded ({'; '.join(failures)}); try again later, or put the file into "
        f"{target.parent} by hand{more}."
    )


def _store(source: Source, folder: Path, path: Path, record: dict[str, Any], unpacked: bool = False) -> None:
    """Compare the checksum of a complete file with the recorded one, move or unpack the file, and record it.

    With `unpacked`, it has been unpacked before, and is only checked.
    """
    recorded = record.get(source.file)
    try:
        checksum = file_checksum(path)
    except OSError as error:
        raise DownloadError(_error_text(error)) from error
    if recorded and recorded["sha256"] != checksum:
        raise DownloadError(
            f"its sha256 is {checksum}, but the first time {source.file} had {recorded['sha256']}, and if the "
            f"publisher changed it on purpose, remove its entry in {folder / RECORD}"
        )
    if unpacked:
        return
    target, url = folder / source.file, _read_state(path).get("url")
    entry: dict[str, Any] = {"sha256": checksum, "bytes": path.stat().st_size, "url": url, "unpacked": []}
    if source.unpack:
        entry["unpacked"] = _unpack(path, folder)
    elif path != target:
        with oserror_as_user_error(target):
            os.replace(path, target)
            sync_folder(target.parent)
    if recorded is None or entry["unpacked"] != recorded["unpacked"]:
        write_file(folder / RECORD, json_writer({**record, source.file: entry}))
    if path != target:
        _remove_part(path)


def _read_record(folder: Path) -> dict[str, Any]:
    """The content of checksums.json, by file; {} if there is none."""
    path = folder / RECORD
    if not os.path.exists(path):
        return {}
    require_file(path)
    try:
        record = read_json(path)
        valid = all(
            isinstance(entry["sha256"], str) and all(isinstance(name, str) for name in entry["unpacked"])
            for entry in record.values()
        )
    except (Damaged, AttributeError, KeyError, TypeError):
        valid = False
    if not valid:
        raise UserError(f"{path} is damaged; delete it, and checksums are recorded anew.")
    return dict(record)


# -- over the network -------------------------------------------------------------------------------------------------


class _Redirects(request.HTTPRedirectHandler):
    """Follows redirects to http and https, but not from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """As the base class; raises a DownloadError for a redirect that is not safe."""
        old_scheme, new_scheme = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if new_scheme not in ("http", "https") or (old_scheme, new_scheme) == ("https", "http"):
            raise DownloadError(f"it redirects to {newurl}, which is not safe")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> request.OpenerDirector:
    """An opener for http and https URLs only; urllib's default one also opens local files."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(), request.UnknownHandler(), request.HTTPHandler(), request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(), request.HTTPErrorProcessor(), _Redirects(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _fetch_with_retries(url: str, file: str, part: Path, on_progress: OnProgress) -> None:
    """Download a file to `part`, resuming it, with several attempts."""
    with oserror_as_user_error(part):
        part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(TRIES):
        try:
            return _fetch_once(url, file, part, on_progress)
        except TransientError as error:
            if attempt + 1 == TRIES:
                raise DownloadError(str(error)) from error
            time.sleep(PAUSE * 2**attempt)


def _fetch_once(url: str, file: str, part: Path, on_progress: OnProgress) -> None:
    """Download a file to `part`: the rest of it if the server still has the same version, otherwise all of it."""
    state = _read_state(part)
    have = part.stat().st_size if part.exists() and state.get("url") == url and state.get("validator") else 0
    if have and have == state.get("size"):
        return  # complete already; it was interrupted afterwards, while being checked
    headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": state["validator"]}
    try:
        with _opener().open(request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            have, size = _start_transfer(response, url, part, state, have)
            done = have
            on_progress(file, done, size)
            with part.open("ab" if have else "wb") as out:
                while block := response.read(BLOCK):
                    with oserror_as_user_error(part):
                        out.write(block)
                        out.flush()
                    done += len(block)
                    on_progress(file, done, size)
                os.fsync(out.fileno())
    except urlerror.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            _remove_part(part)
        transient = error.code in (408, 416, 429) or error.code >= 500
        raise (TransientError if transient else DownloadError)(_http_error_text(error)) from error
    except (OSError, http.client.HTTPException) as error:
        unknown_host = isinstance(getattr(error, "reason", None), socket.gaierror)
        raise (DownloadError if unknown_host else TransientError)(_error_text(error)) from error
    if size is not None and done != size:
        if done > size:
            _remove_part(part)
        raise TransientError(f"it sent {done} of {size} bytes")


def _start_transfer(response: Any, url: str, part: Path, state: dict[str, Any], have: int) -> tuple[int, int | None]:
    """Check a response: the byte it starts from, and the size of the whole file (None if it is unknown).

    `have` is the number of bytes of `part`, which is removed if the response starts from 0.
    """
    if response.headers.get_content_type() == "text/html":
        raise DownloadError("it answered with a web page, not with the file")
    validator = _validator(response.headers)
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        range_ = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        continues = range_ and (int(range_[1]), int(range_[2])) == (have, state.get("size"))
        if not continues or validator not in ("", state["validator"]):
            _remove_part(part)  # it is a part of another version
            raise TransientError("it continued with another file")
        return have, state["size"]
    length = response.headers.get("Content-Length", "")
    if not length.isdecimal() and response.headers.get("Transfer-Encoding", "").lower() != "chunked":
        raise DownloadError("it does not say how long the file is")
    size = int(length) if length.isdecimal() else None
    free = shutil.disk_usage(part.parent).free
    if size is not None and size > free:
        raise UserError(f"{url} has {size} bytes, but {part.parent} has room for {free}; free some space.")
    _remove_part(part)
    write_file(_state_file(part), json_writer({"url": url, "validator": validator, "size": size}))
    return 0, size


def _validator(headers: Any) -> str:
    """The value for `If-Range` that identifies a version of a file: a strong ETag or the time of modification."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _state_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _read_state(part: Path) -> dict[str, Any]:
    """URL, validator and size of the file that `part` is a part of; {} if they are unknown."""
    try:
        state = read_json(_state_file(part))
        url, validator, size = state["url"], state["validator"], state["size"]
    except (Damaged, KeyError, TypeError):
        return {}
    valid = isinstance(url, str) and isinstance(validator, str) and validator.isprintable() and validator.isascii()
    return {"url": url, "validator": validator, "size": size} if valid and isinstance(size, int | None) else {}


def _remove_part(part: Path) -> None:
    part.unlink(missing_ok=True)
    _state_file(part).unlink(missing_ok=True)


def _http_error_text(error: urlerror.HTTPError) -> str:
    if 300 <= error.code < 400:
        return f"it redirects to {error.url}, which is not possible"
    phrase = http.HTTPStatus(error.code).phrase if error.code in set(http.HTTPStatus) else "an unknown code"
    return f"it answered {error.code}, {phrase}"


def _error_text(error: Exception) -> str:
    """The cause of an error, as a part of a sentence."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, socket.gaierror):
        return "its name was not found, so there may be no network"
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(cause, http.client.IncompleteRead):
        return "it broke off"
    return reason(cause)


# -- archives ---------------------------------------------------------------------------------------------------------


def _unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack an archive into the folder, and return the names of the files and folders that it adds there.

    They are moved into the folder when all of them are on disk.
    """
    with oserror_as_user_error(folder):
        work = Path(tempfile.mkdtemp(prefix=UNPACK_PREFIX, dir=folder))
    try:
        unpacked, replaced = work / "new", work / "old"
        unpacked.mkdir()
        replaced.mkdir()
        try:
            limit = inflated_limit(archive.stat().st_size)
            extract(archive, unpacked, limit)
            for inner in sorted(unpacked.glob("*.zip")):  # UCI puts archives into an archive
                extract(inner, unpacked, limit)
                inner.unlink()
        except ArchiveError as error:
            raise DownloadError(str(error)) from error
        names = sorted(path.name for path in unpacked.iterdir())
        if not names:
            raise DownloadError("the archive is empty")
        for name in names:
            if name in (RECORD, LOCK) or name.startswith(UNPACK_PREFIX):
                raise DownloadError(f"its member {name!r} has a name that is taken")
        if hasattr(os, "sync"):
            os.sync()
        with oserror_as_user_error(folder):
            for name in names:
                if (folder / name).exists():
                    os.replace(folder / name, replaced / name)
                os.replace(unpacked / name, folder / name)
            sync_folder(folder)
        return names
    finally:
        shutil.rmtree(work, ignore_errors=True)

"""The report of runs that go on, served to browsers on the same machine."""

from __future__ import annotations

import hashlib
import html
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.report.page.assemble import as_json, page
from fedloom.studies.found_runs import find_runs, run_directories
from fedloom.studies.report_data import collect

HOST = "127.0.0.1"
WATCHED = ("rounds.parquet", "plan.json", "summary.json")  # of a run; one of them changes with its results
WAITING = (
    "<!DOCTYPE html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    "<meta name='color-scheme' content='light dark'><meta http-equiv='refresh' content='2'><title>FedLoom</title>"
    "<body style='font-family: sans-serif; margin: 2rem'><p>"
)


class LiveReport(ThreadingHTTPServer):
    """A server of the page of a folder; it reads the runs again when their files have changed.

    It listens on this machine only, and answers requests that name it as such: a page of another site that a browser
    has open cannot read it under a name of its own.
    """

    daemon_threads = True
    state: tuple[Any, ...] | None  # of the files that `data` was collected from
    data: dict[str, Any]
    problem: str  # why there are no data

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.state, self.data, self.problem = None, {}, ""
        if not folder.is_dir():
            raise UserError(f"There is no folder {folder}; give the folder of a run, or one that has runs in it.")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"Port {port} cannot be used ({error.strerror}); give another one with --port.") from None

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def names(self) -> set[str]:
        """Under which names it may be asked for."""
        return {f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")}

    def current(self) -> tuple[dict[str, Any], str]:
        """The data of the page, and an empty text; or nothing, and why. While files are being replaced, the last data
        that could be read."""
        with self.lock:
            state = tuple(_stamp(path / name) for path in run_directories(self.folder) for name in WATCHED)
            if state != self.state:
                stamp = hashlib.sha256(repr(state).encode()).hexdigest()[:32]
                try:
                    self.data, self.problem = collect(find_runs(self.folder)) | {"live": stamp}, ""
                    self.state = state
                except UserError as error:
                    self.problem = str(error)
                except Exception as error:  # tables of different rounds, because files are replaced one by one
                    self.problem = f"{self.folder} cannot be read just now ({error}); this page tries again."
            return self.data, self.problem

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away before it has its answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveReport

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.names:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"Open {self.server.address}\n")
            return
        data, problem = self.server.current()
        if self.path == "/":
            text = page(data, live=True) if data else f"{WAITING}{html.escape(problem)}</p>"
            self._send(HTTPStatus.OK, "text/html", text)
        elif self.path == "/data.json" and data:
            etag = f'"{data["live"]}"'
            if self.headers.get("If-None-Match") == etag:
                self._send(HTTPStatus.NOT_MODIFIED, etag=etag)
            else:
                self._send(HTTPStatus.OK, "application/json", as_json(data), etag)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n")

    def _send(self, status: HTTPStatus, kind: str = "", text: str = "", etag: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        if etag:
            self.send_header("ETag", etag)
        if kind:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), found.st_mtime_ns, found.st_size

"""How far a federation is, for people: read from the files of a server or a site."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from fedloom.core.errors import UserError
from fedloom.deployment.flower import keys, status
from fedloom.deployment.flower.launch import LINK_LOG, PID_FILE
from fedloom.deployment.flower.processes import is_running
from fedloom.deployment.flower.server_app import JOB_FILE
from fedloom.runs.directory import CONFIG
from fedloom.studies import personal_models
from fedloom.studies.personal_models import PersonalModels
from fedloom.studies.result import Result, load_run


class Overview(NamedTuple):
    """Sentences, and a row per site: client, state, last answer, problem."""

    sentences: list[str]
    sites: list[tuple[str, str, str, str]]
    run: Result | None = None


def overview(folder: Path) -> Overview:
    """How far the federation of this server's or site's folder is."""
    if (folder / keys.SITE_FILE).exists():
        return _of_site(folder)
    if (folder / keys.SERVER_KEY).exists():
        return _of_server(folder)
    raise UserError(
        f"{folder} is the folder of neither a server nor a site; such folders are made with 'fedloom keys'."
    )


def _of_server(folder: Path) -> Overview:
    alive = is_running((folder / LINK_LOG).with_suffix(".pid"))
    job = folder / JOB_FILE
    if not job.exists():
        return Overview(["No run was started yet; 'fedloom serve' starts one."], [])
    out = Path(json.loads(job.read_text())["out"])
    run = load_run(out) if (out / CONFIG).exists() else None
    done = run is not None and run.rounds and run.last()["round"] == run.config["rounds"]
    state = "The server is running" if alive else "The run has ended" if done else "The server is not running"
    hint = "" if alive or done else "; the command that started it continues"
    rows = [_row(site, alive) for site in status.read(folder)]
    return Overview([f"{state}{hint}. Results: {out}"], rows, run)


def _row(site: status.SiteStatus, alive: bool) -> tuple[str, str, str, str]:
    if not alive:
        state = ""
    elif site.asked:
        state = f"{site.asked}, for {_seconds(time.time() - site.since)}"
    else:
        state = "waits" if site.connected else "not connected"
    answered = f"{_seconds(time.time() - site.answered)} ago" if site.answered else "never"
    return str(site.client), state, answered, site.problem


def _of_site(folder: Path) -> Overview:
    client, alive = keys.client_of(folder), is_running(folder / PID_FILE)
    said = [f"Client {client} {'takes part' if alive else 'does not take part now'}."]
    if (found := personal_models.find(folder)) is not None:
        models = PersonalModels(found)
        method, rounds = models.config["algorithm"]["name"], models.rounds
        said.append(f"It has models of {method} after round {rounds['last']}, and after the best, {rounds['best']}.")
        said.append(f"Use them with 'fedloom predict {folder} DATA'.")
    return Overview(said, [])


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"

"""A run whose clients are at sites: the server's side from the first message to the results."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.config.methods import FROM
from fedloom.config.resolve import Config, describe
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.federation import SPLITS, Federation
from fedloom.core.keys import root
from fedloom.core.task import Task
from fedloom.federation.host import HELLO, LOCAL, OFFER, READY, SETUP
from fedloom.federation.messages import BadMessage, Message
from fedloom.federation.remote import Link, RemoteClients
from fedloom.federation.site import FAILURE
from fedloom.metrics.registry import find_metric
from fedloom.metrics.scores import basic_metric
from fedloom.runs.directory import AT_SITES
from fedloom.storage.files import json_writer, write_file
from fedloom.studies.build import make_data
from fedloom.studies.callbacks import Callback
from fedloom.studies.execute import execute_group
from fedloom.studies.result import Result

log = logging.getLogger("fedloom")


@dataclass(frozen=True)
class Terms:
    """How long a server waits for its sites, and how many it needs."""

    deadline: float = 600.0  # seconds after which a site that has not answered is left out of a round
    minimum: int | None = None  # replies that a round needs; None for all of those that are asked
    repeats: int = 2  # how often sites that have failed are asked again if there are too few replies


def serve(
    config: Config,
    link: Link,
    terms: Terms | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Carry out a run with the sites that a link reaches; one site has one client.

    In a folder, a checkpoint is made after every round, and `resume` continues from the last one.
    """
    terms = terms or Terms()
    s = replace(config.settings, engine="reference", checkpoint_every=1)
    config = replace(config, settings=s)
    data = make_data(config).without_samples()

    def make_clients(alg: Algorithm, task: Task) -> RemoteClients:
        run = _known_run(out) or _start(config, task, link, terms)
        if out is not None:
            write_file(Path(out) / AT_SITES, json_writer({"run": run}))
        metric = None if s.metric == basic_metric(data.kind) else find_metric(s.metric, data.kind)
        return RemoteClients(
            alg, task, s.seed, run, link, deadline=terms.deadline, minimum=terms.minimum, repeats=terms.repeats,
            durable=out is not None, metric=metric, names=data.client_names,
        )  # fmt: skip

    (result,) = execute_group(
        [config], out=[out], resume=resume, callbacks=callbacks, data=data, make_clients=make_clients
    )
    return result


def _known_run(out: str | Path | None) -> str | None:
    """The name of the run in a folder, if it was started."""
    path = None if out is None else Path(out) / AT_SITES
    if path is None or not path.exists():
        return None
    try:
        return str(json.loads(path.read_text())["run"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; start a new run.") from None


def _start(config: Config, task: Task, link: Link, terms: Terms) -> str:
    """Set up a new run at all sites; returns its name."""
    alg, data = config.algorithm, task.data
    run = f"{alg.name}-{secrets.token_hex(8)}"
    sent = _for_sites(describe(config))
    hello = {i: Message(HELLO, {"run": run, "client": i, "config": sent}) for i in range(data.clients)}
    for i, offer in _all(link, hello, OFFER, terms).items():
        _check_offer(i, offer, data)
    more = {"run": run, "config": sent, "mean_samples": data.mean_samples}
    constants = {"constants": alg.constants(task, root(config.settings.seed, "init"))}
    setup = {i: Message(SETUP, {"client": i, **more}, constants) for i in range(data.clients)}
    _all(link, setup, READY, terms)
    log.info("All %d sites are ready for run %s.", data.clients, run)
    return run


def _for_sites(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration is sent: not where the server keeps its data and methods, nor its device."""
    made = {key: value for key, value in config.items() if key not in LOCAL}
    made["algorithm"] = {key: value for key, value in config["algorithm"].items() if key != FROM}
    return made


def _all(link: Link, messages: Mapping[int, Message], kind: str, terms: Terms) -> dict[int, Message]:
    """The answers of all sites; a run cannot begin without one of them."""
    answers: dict[int, Message] = {}
    for attempt in range(1 + terms.repeats):
        missing = {i: message for i, message in messages.items() if i not in answers}
        wrong = {}
        for i, answer in link.exchange(missing, terms.deadline).items():
            if isinstance(answer, Message) and answer.kind == kind:
                answers[i] = answer
            else:
                wrong[i] = answer if isinstance(answer, str) else _why(answer)
        if not wrong:
            return answers
        for i, why in sorted(wrong.items()):
            log.warning("Site %d is not ready: %s.", i, why)
        if attempt == terms.repeats:
            break
    raise UserError(
        f"The run cannot begin without the sites {', '.join(map(str, sorted(wrong)))}: {next(iter(wrong.values()))}."
    )


def _why(answer: Message) -> str:
    return str(answer["why"])[:500] if answer.kind == FAILURE else f"its answer is of kind '{answer.kind[:20]}'"


def _check_offer(i: int, offer: Message, data: Federation) -> None:
    """Raise UserError unless a site has the FedLoom and the samples that the server expects."""
    try:
        if offer["version"] != __version__:
            raise UserError(f"Site {i} has FedLoom {offer['version']}, the server {__version__}; install the same.")
        for split in SPLITS:
            found, expected = offer["samples"][split], int(data.splits[split].sizes[i])
            if found != expected:
                raise UserError(f"Site {i} has {found} samples for {split}, not {expected}; its data are others.")
    except (BadMessage, KeyError, TypeError) as error:
        raise UserError(f"Site {i} does not say what it has ({error}).") from None

"""A run whose clients are at sites: the server's side from the first message to the results."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.config.files import ConfigDict
from fedloom.config.methods import FROM
from fedloom.config.resolve import Config, describe
from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError, printable, shown
from fedloom.core.federation import SPLITS, Federation
from fedloom.core.keys import root
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.task import Task
from fedloom.data.moments import merge_moments
from fedloom.data.sets.own import OwnData
from fedloom.data.user_data.merging import merge
from fedloom.deployment import own_data
from fedloom.deployment.host import LOCAL, configured
from fedloom.deployment.kinds import AGREE, COUNTED, DONE, END, FAILURE, HELLO, OFFER, READY, SETUP
from fedloom.deployment.messages import BadMessage, Message
from fedloom.deployment.remote import Link, RemoteClients
from fedloom.deployment.replies import said
from fedloom.metrics.registry import find_metric
from fedloom.metrics.scores import basic_metric
from fedloom.runs.directory import AT_SITES, RunDirectory
from fedloom.storage.files import json_writer, write_file
from fedloom.studies.build import make_data
from fedloom.studies.callbacks import Callback, TrainingRun
from fedloom.studies.execute import execute_group
from fedloom.studies.result import Result, best_on_validation

log = logging.getLogger("fedloom")

END_SECONDS = 60.0  # to tell sites that a run is over
OWN_USUAL = {**OwnData.usual, "split": list(own_data.SPLIT), "partition_seed": 1}  # of runs on own data


@dataclass(frozen=True)
class Terms:
    """How long a server waits for its sites, and how many it needs."""

    deadline: float = 600.0  # seconds after which a site that has not answered is left out of a round
    minimum: int | None = None  # replies that a round needs; None for all of those that are asked
    repeats: int = 2  # how often sites that have failed are asked again if there are too few replies


class BestRound(Callback):
    """Lets the clients know which round was the best so far: sites keep the models of that one."""

    def __init__(self, made: Sequence[RemoteClients]) -> None:
        self.made = made  # the clients of the run, as soon as there are any

    def on_start(self, run: TrainingRun) -> None:
        self._tell(run)

    def on_evaluation(self, run: TrainingRun) -> None:
        self._tell(run)

    def _tell(self, run: TrainingRun) -> None:
        if run.history:
            for clients in self.made:
                clients.best = best_on_validation(list(run.history), "pre", run.metric)["round"]


class Server:
    """Sets up a run at all sites, and carries it out."""

    def __init__(self, link: Link, terms: Terms | None = None) -> None:
        self.link, self.terms = link, terms or Terms()

    def run(
        self, config: Config, *, out: str | Path | None = None, resume: bool = False, callbacks: Sequence[Callback] = ()
    ) -> Result:
        """Carry out a run on a data set with a name, of which client i is at site i.

        In a folder, a checkpoint is made after every round, and `resume` continues from the last one.
        """
        sent, data = _for_sites(describe(config)), make_data(config).without_samples()

        def start(task: Task, run: str) -> dict[str, Any]:
            offers = self._all(HELLO, OFFER, data.clients, {"run": run, "config": sent})
            for i, offer in offers.items():
                _check_sizes(i, offer, data)
            return {"config": sent}

        return self._execute(config, data, start, out, resume, callbacks)

    def run_on_own_data(
        self,
        asked: ConfigDict,
        clients: int,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        schema: Preprocessing | None = None,
    ) -> Result:
        """Carry out a run on the data that the sites have, one client each. What they have in common is agreed on
        first: columns, words, classes, and the scale of numbers, unless there is a schema that says it. `asked` has
        method, model and settings."""
        asked = _for_sites({**OWN_USUAL, **asked, "dataset": {"name": OwnData.name}})
        more = {"config": asked, **{name: asked[name] for name in ("split", "partition_seed", "stratify")}}
        run = _known_run(out)
        if run is not None and out is not None:
            directory = RunDirectory(Path(out))
            directory.config()
            final, agreed, sizes = directory.preprocessing(), None, directory.split_sizes()
            each = [{name: sizes[name][i] for name in SPLITS} for i in range(clients)]
        else:
            agreed, final, each = self._agree(clients, more, schema)
        data = own_data.server_federation(final, each)
        config = configured(asked, data)

        def start(task: Task, run: str) -> dict[str, Any]:
            assert agreed is not None
            about = {"about": agreed.to_json(), "final": final.to_json()}
            return {**more, **about, "clients": clients, "batch_size": task.batch_size}

        return self._execute(config, make_data(config), start, out, resume, callbacks)

    # -- before training ----------------------------------------------------------------------------------------------

    def _agree(
        self, clients: int, more: Mapping[str, Any], schema: Preprocessing | None
    ) -> tuple[Preprocessing, Preprocessing, list[dict[str, int]]]:
        """How samples are encoded at all sites, the same with the scale of numbers, and everybody's sample counts."""
        run = {"run": "agreement", **more}
        agreed, normalise = (schema, True) if schema is not None else self._described(clients, run)
        counted = self._all(AGREE, COUNTED, clients, {**run, "about": agreed.to_json()})
        moments, sizes = [], []
        for i in range(clients):
            with _understood(i):
                _check_version(i, counted[i])
                moments.append(own_data.from_json(counted[i]["moments"], agreed))
                found = counted[i]["samples"]
                if any(type(found[name]) is not int or not 0 <= found[name] <= own_data.MOST for name in SPLITS):
                    raise ValueError(f"it cannot have {shown(found)} samples")
                sizes.append({name: found[name] for name in SPLITS})
        merged = {name: merge_moments([one[name] for one in moments]) for name in moments[0]}
        return agreed, own_data.scaled(agreed, merged, normalise), sizes

    def _described(self, clients: int, run: Mapping[str, Any]) -> tuple[Preprocessing, bool]:
        """How samples are encoded according to all sites, and whether numbers are scaled."""
        offers = self._all(HELLO, OFFER, clients, run)
        each, normalise = {}, set()
        for i in range(clients):
            with _understood(i):
                _check_version(i, offers[i])
                each[f"Site {i}"] = Preprocessing.from_json(offers[i]["about"])
                normalise.add(bool(offers[i]["normalise"]))
        if len(normalise) > 1:
            raise UserError("Some sites have normalise=true and some have not; set the same at all.")
        try:
            return merge(each), normalise.pop()
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"The sites' descriptions of their samples do not fit together ({error}); install the same FedLoom "
                "everywhere."
            ) from None

    def _execute(
        self,
        config: Config,
        data: Federation,
        start: Callable[[Task, str], dict[str, Any]],
        out: str | Path | None,
        resume: bool,
        callbacks: Sequence[Callback],
    ) -> Result:
        """The results of a run. `start` prepares a new one, and returns what its sites need to know."""
        s = replace(config.settings, engine="reference", checkpoint_every=1)
        terms = self.terms
        made: list[RemoteClients] = []

        def make_clients(alg: Algorithm, task: Task) -> RemoteClients:
            run = _known_run(out)
            if run is None:
                run = f"{alg.name}-{secrets.token_hex(8)}"
                fields = {"run": run, "mean_samples": task.data.mean_samples, **start(task, run)}
                constants = {"constants": alg.constants(task, root(s.seed, "init"))}
                self._all(SETUP, READY, task.clients, fields, constants)
                log.info("All %d sites are ready for run %s.", task.clients, run)
            if out is not None:
                write_file(Path(out) / AT_SITES, json_writer({"run": run}))
            metric = None if s.metric == basic_metric(task.data.kind) else find_metric(s.metric, task.data.kind)
            found = RemoteClients(
                alg, task, s.seed, run, self.link, deadline=terms.deadline, minimum=terms.minimum,
                repeats=terms.repeats, durable=out is not None, metric=metric, names=task.data.client_names,
            )  # fmt: skip
            made.append(found)
            return found

        told = BestRound(made)
        options: dict[str, Any] = {"out": [out], "resume": resume, "callbacks": [told, *callbacks]}
        (result,) = execute_group([replace(config, settings=s)], data=data, make_clients=make_clients, **options)
        for clients in made:
            self._end(clients.run, data.clients, result.best_on_validation()["round"])
        return result

    def _end(self, run: str, clients: int, best: int) -> None:
        """Tell all sites that the run is over."""
        messages = {i: Message(END, {"run": run, "client": i, "best": best}) for i in range(clients)}
        for i, answer in sorted(self.link.exchange(messages, min(END_SECONDS, self.terms.deadline)).items()):
            if not isinstance(answer, Message) or answer.kind != DONE:
                why = answer if isinstance(answer, str) else _why(answer)
                log.warning("Site %d does not know that the run is over, nor which round was best: %s.", i, why)

    def _all(
        self, kind: str, answer: str, clients: int, fields: Mapping[str, Any], trees: Mapping[str, Any] | None = None
    ) -> dict[int, Message]:
        """The answers of all sites; a run cannot begin without one of them."""
        messages = {i: Message(kind, {**fields, "client": i}, trees or {}) for i in range(clients)}
        found: dict[int, Message] = {}
        wrong: dict[int, str] = {}
        for _ in range(1 + self.terms.repeats):
            missing = {i: message for i, message in messages.items() if i not in found}
            wrong = {}
            for i, got in self.link.exchange(missing, self.terms.deadline).items():
                if isinstance(got, Message) and got.kind == answer:
                    found[i] = got
                else:
                    wrong[i] = got if isinstance(got, str) else _why(got)
            if not wrong:
                return found
            for i, why in sorted(wrong.items()):
                log.warning("Site %d is not ready: %s.", i, why)
        who = ", ".join(map(str, sorted(wrong)))
        raise UserError(f"The run cannot begin without the sites {who}: {next(iter(wrong.values()))}.")


@contextmanager
def _understood(i: int) -> Iterator[None]:
    """Errors about what a site says of its data, as a UserError that names the site."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind, since anything can have been sent
        raise UserError(
            f"Site {i} does not say what it has ({printable(str(error))[:100]}); install the same FedLoom everywhere."
        ) from None


def serve(
    config: Config,
    link: Link,
    terms: Terms | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Carry out a run on a data set with a name, see `Server.run`."""
    return Server(link, terms).run(config, out=out, resume=resume, callbacks=callbacks)


def _known_run(out: str | Path | None) -> str | None:
    """The name of the run in a folder, if it was started."""
    path = None if out is None else Path(out) / AT_SITES
    if path is None or not path.exists():
        return None
    try:
        return str(json.loads(path.read_text())["run"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; start a new run.") from None


def _for_sites(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration is sent: not where the server keeps its data and methods, nor its device."""
    made = {key: value for key, value in config.items() if key not in LOCAL}
    if isinstance(made.get("algorithm"), Mapping):
        made["algorithm"] = {key: value for key, value in config["algorithm"].items() if key != FROM}
    return made


def _why(answer: Message) -> str:
    return said(answer) if answer.kind == FAILURE else f"its answer is of kind '{shown(answer.kind)!a}'"


def _check_version(i: int, offer: Message) -> None:
    if offer["version"] != __version__:
        raise UserError(f"Site {i} has FedLoom {offer['version']}, the server {__version__}; install the same.")


def _check_sizes(i: int, offer: Message, data: Federation) -> None:
    """Raise UserError unless a site has the FedLoom and the samples that the server expects."""
    try:
        _check_version(i, offer)
        for split in SPLITS:
            found, expected = offer["samples"][split], int(data.splits[split].sizes[i])
            if found != expected:
                raise UserError(f"Site {i} has {found} samples for {split}, not {expected}; its data are others.")
    except (BadMessage, KeyError, TypeError) as error:
        raise UserError(f"Site {i} does not say what it has ({error}).") from None

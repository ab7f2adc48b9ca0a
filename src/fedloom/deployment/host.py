"""A site's program: it takes part in runs with its own data, and keeps the state of each run in a folder."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.config.files import ConfigDict
from fedloom.config.methods import FROM
from fedloom.config.resolve import Config, combine, configure, describe, flat, resolve
from fedloom.config.settings import Settings
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.errors import UserError, shown
from fedloom.core.federation import SPLITS, Federation
from fedloom.core.keys import root
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.settings import build
from fedloom.core.task import Task
from fedloom.core.tree import tree_map
from fedloom.data.sets.own import OwnData
from fedloom.deployment import own_data
from fedloom.deployment.kinds import AGREE, COUNTED, DONE, END, FAILURE, HELLO, OFFER, ORDER, READY, SETUP
from fedloom.deployment.messages import BadMessage, Message, decode, encode, whole_number
from fedloom.deployment.site import Site
from fedloom.deployment.site_models import SiteModels
from fedloom.deployment.site_privacy import SiteAccount
from fedloom.device.torch_settings import deterministic, precision
from fedloom.engine.clients import initial_state
from fedloom.metrics.registry import find_metric
from fedloom.metrics.scores import basic_metric
from fedloom.storage.files import json_writer, make_folder, write_file
from fedloom.studies.build import make_data, make_task

log = logging.getLogger("fedloom")

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SETUP_FILE = "setup.safetensors"
LOCAL = ("data_dir", "device")  # what a site decides, besides its data
AGREEMENT = "agreement.json"  # in the folder of a site: how its samples are encoded and divided
USUAL_METHOD = "ditto"
MOST_CLIENTS, MOST_SEED = 10**6, 2**63 - 1
NEEDS_SCHEMA = (
    "this site asks for differential privacy, so it tells nothing of its samples before; give a schema with --schema, "
    "here and at the server"
)
OF_DATA = ("dataset", "partition", "clients", "head")  # what a configuration does not say of own data


class Host:
    """Answers a server's messages about any run. It may end and start again between two messages."""

    def __init__(self, client: int, folder: Path, local: ConfigDict) -> None:
        """
        Args:
            client: the number of this site's client.
            folder: where the site keeps its state.
            local: what the site decides itself: its data, where they are, the device.
        """
        self.client, self.folder, self.local = client, folder, local
        self._last: tuple[str, Site, Settings] | None = None  # the run of the last message
        self._answered: tuple[bytes, Message] | None = None  # digest of the last order, and the answer
        self.account = SiteAccount(folder, local.get("max_epsilon"))
        section = local.get("dataset")
        self.dataset = dict(section) if isinstance(section, Mapping) else {"name": section}
        self._data: tuple[Any, Federation] | None = None  # what was read last, and for which configuration

    @property
    def own(self) -> OwnData | None:
        """The site's own data; None if it takes part with a part of a data set that has a name."""
        if self.dataset.get("name") != OwnData.name:
            return None
        return build(OwnData, {k: v for k, v in self.dataset.items() if k != "name"}, "dataset 'own'")

    def check(self) -> None:
        """Raise UserError if what the site has decided cannot be: an unknown data set or device, unreadable data."""
        if self.own is not None:
            own_data.described(self.own)
            self._schema()
        resolve(combine({"dataset": "digits"}, self._local() if self.own is not None else self._settings()))

    def handle(self, message: Message) -> Message:
        """The answer to a message; one that says what is wrong if it cannot be carried out."""
        try:
            return self._carry_out(message)
        except (BadMessage, UserError) as error:
            return Message(FAILURE, {"client": self.client, "why": str(error).rstrip(".")})

    def _carry_out(self, message: Message) -> Message:
        if message["client"] != self.client:
            raise BadMessage(f"the message is for client {shown(message['client'])}, but this is client {self.client}")
        run = message["run"]
        if not isinstance(run, str) or not RUN_NAME.fullmatch(run):
            raise BadMessage("the name of a run consists of lower-case letters, digits and hyphens")
        if message.kind == HELLO:
            return self._offer(message)
        if message.kind == AGREE:
            return self._counted(message)
        if message.kind == SETUP:
            path, content = self.folder / run / SETUP_FILE, encode(message)
            if path.exists() and path.read_bytes() != content:
                raise BadMessage(f"run {run} was set up otherwise here")
            made = self._made(run, message)
            make_folder(self.folder)
            make_folder(self.folder / run)
            write_file(path, lambda file: file.write(content))
            self._last = run, *made
            log.info("Run %s is set up.", run)
            return Message(READY, {"client": self.client, "run": run})
        if message.kind == ORDER:
            return self._in_round(run, message)
        if message.kind == END:
            models = self._site(run)[0].models
            if models is not None:
                models.end(whole_number(message, "best", 0))
            log.info("Run %s is over.", run)
            return Message(DONE, {"client": self.client, "run": run})
        raise BadMessage(f"a site does not know what to do with a message of kind '{shown(message.kind)}'")

    def _in_round(self, run: str, message: Message) -> Message:
        """The answer to an order. One that is sent again, since the answer came too late, is not carried out again."""
        order = hashlib.sha256(encode(message)).digest()
        if self._answered is None or self._answered[0] != order:
            self._answered = None  # to have its memory
            site, s = self._site(run)
            start = time.monotonic()
            with deterministic(s.deterministic), precision(s.dtype):
                answer = site.handle(message)
            what = "answered" if answer.kind != FAILURE else f"could not be answered: {answer['why']}"
            log.info("Run %s, round %s: %s, %.1f s.", run, message["t"] + 1, what, time.monotonic() - start)
            if answer.kind == FAILURE:
                return answer
            self._answered = order, answer
        return self._answered[1]

    # -- before training ----------------------------------------------------------------------------------------------

    def _offer(self, message: Message) -> Message:
        """What the site has: of own data, how its samples would be encoded."""
        config, fields = self._checked(message), {"client": self.client, "version": __version__}
        if (own := self.own) is not None:
            if self.account.limit is not None and self._schema() is None:
                raise UserError(NEEDS_SCHEMA)
            with _own_mistakes():
                about = (self._schema() or own_data.described(own)).to_json()
            return Message(OFFER, {**fields, "about": about, "normalise": own.normalise})
        data = self._read(self._resolved(config))
        return Message(OFFER, {**fields, "samples": {s: int(data.splits[s].sizes[self.client]) for s in SPLITS}})

    def _counted(self, message: Message) -> Message:
        """How many samples of its own the site has, and their moments for scaling, unless a schema has the scale."""
        config, samples = self._checked(message), self._samples(message)
        if self.account.limit is not None and own_data.needs_moments(samples.agreed):
            raise UserError(NEEDS_SCHEMA)
        with _own_mistakes():
            moments = own_data.to_json(samples.moments())
        sizes = samples.sizes if config.get("dp_clip") is None else own_data.NOT_SAID
        return Message(COUNTED, {"client": self.client, "version": __version__, "samples": sizes, "moments": moments})

    def _samples(self, message: Message) -> own_data.LocalSamples:
        own = self.own
        if own is None:
            raise BadMessage("this site has no data of its own")
        shares, stratify = message["split"], message["stratify"]
        if not _are_shares(shares) or type(stratify) is not bool:
            raise BadMessage("'split' or 'stratify' cannot be what they are")
        seed, agreed = whole_number(message, "partition_seed", 0, MOST_SEED), Preprocessing.from_json(message["about"])
        with _own_mistakes():
            schema = self._schema()
            if schema is None:
                own_data.check_agreed(own_data.described(own), agreed)
            elif own_data.without_scale(schema) != own_data.without_scale(agreed) or schema.numbers != agreed.numbers:
                raise UserError("The schema of the server is not that of this site.")
            found = own_data.LocalSamples(own, agreed, (shares[0], shares[1], shares[2]), seed, stratify)
        self._agree({name: message[name] for name in ("about", "split", "partition_seed", "stratify")})
        return found

    def _agree(self, terms: dict[str, Any]) -> None:
        """Remember how samples are encoded and divided, and refuse any other way: sums over several divisions of the
        same samples would tell of single ones."""
        path = self.folder / AGREEMENT
        if not path.exists():
            make_folder(self.folder)
            write_file(path, json_writer(terms))
        elif json.loads(path.read_text()) != terms:
            raise UserError(
                "the server asks for another encoding or division of this site's samples than before; if that is "
                f"right, remove {path} at the site"
            )

    def _schema(self) -> Preprocessing | None:
        """What this site says that samples look like, whatever a server says; None if it leaves that to the server."""
        path = self.local.get("schema")
        return None if path is None else own_data.read_schema(path)

    def _checked(self, message: Message) -> ConfigDict:
        """The server's configuration; raises UserError if it is one that a site does not carry out. A server never
        chooses what is read, nor which code is loaded."""
        asked = message["config"]
        if not isinstance(asked, dict) or not isinstance(asked.get("per_method", {}), dict):
            raise BadMessage("the configuration is missing")
        section = asked.get("dataset") or {}
        name = section.get("name") if isinstance(section, dict) else section
        if name != self.dataset.get("name"):
            have = shown(self.dataset.get("name"))
            raise UserError(f"the run is about the data set {shown(name)!a}, but this site takes part with {have!a}")
        method = asked.get("algorithm", USUAL_METHOD)
        sections = [method if isinstance(method, dict) else {"name": method}, *asked.get("per_method", {}).values()]
        sections.append({key.partition(".")[2]: value for key, value in asked.items() if key.startswith("algorithm.")})
        for values in sections:
            known = isinstance(values, dict) and values.get("name", USUAL_METHOD) in ALGORITHMS.names()
            if not known or FROM in values:
                raise UserError(
                    "the server would have this site load a method that is not installed; install it as a package here"
                )
        return asked

    # -- the site of a run --------------------------------------------------------------------------------------------

    def _site(self, run: str) -> tuple[Site, Settings]:
        """The site of a run that was set up, perhaps by an earlier process."""
        if self._last is None or self._last[0] != run:
            path = self.folder / run / SETUP_FILE
            if not path.exists():
                raise BadMessage(f"run {run} was never set up here")
            self._last = run, *self._made(run, decode(path.read_bytes()))
        return self._last[1:]

    def _made(self, run: str, message: Message) -> tuple[Site, Settings]:
        config, task = self._task(message)
        s, alg = config.settings, config.algorithm
        with deterministic(s.deterministic), precision(s.dtype):
            start = initial_state(alg, task, s.seed, alg.init_server(task, root(s.seed, "init")))
            constants = tree_map(lambda v: v.to(task.data.device), message.tree("constants"))
            metric = None if s.metric == basic_metric(task.data.kind) else find_metric(s.metric, task.data.kind)
            start = start._replace(constants=constants)
            folder = self.folder / run
            models = SiteModels(folder, self._about_models(config, task))
            more: dict[str, Any] = {"metric": metric, "models": models, "account": self.account}
            return Site(self.client, alg, task, s.seed, start, folder, run, **more), s

    def _task(self, message: Message) -> tuple[Config, Task]:
        """The configuration of a run at this site, and its task with this site's samples."""
        asked, mean = self._checked(message), message["mean_samples"]
        if type(mean) not in (int, float) or not 0 < mean < own_data.MOST:
            raise BadMessage(f"'mean_samples' cannot be {shown(mean)}")
        if self.own is None:
            config = self._resolved(asked)
            task = make_task(config, replace(self._read(config), mean_samples_of_all=mean))
            return config, replace(task, data=task.data.only([self.client]))
        samples, final = self._samples(message), Preprocessing.from_json(message["final"])
        if own_data.without_scale(final) != own_data.without_scale(samples.agreed):
            raise BadMessage("'final' is not what was agreed on")
        clients = whole_number(message, "clients", self.client + 1, MOST_CLIENTS)
        batch_size = whole_number(message, "batch_size", 1)
        config = configured(asked, samples.federation(final, self.client, clients, float(mean)), self._local())
        task = make_task(config, make_data(config), complete=False)
        return config, replace(task, batch_size=batch_size)

    def _about_models(self, config: Config, task: Task) -> dict[str, Any]:
        """What is needed to use a model when there are only its weights."""
        found, names = describe(config), task.data.client_names
        about = task.data.preprocessing_or_default()
        if self.own is not None:  # the column has another name at other sites, perhaps
            about = replace(about, label=self.own.label)
        return {
            "client": names[self.client] if names else str(self.client),
            "config": {**{name: found[name] for name in ("algorithm", "model", "dtype")}, "head": config.head},
            "preprocessing": about.to_json(),
        }

    def _local(self) -> ConfigDict:
        return {"device": self.local.get("device", "auto")}

    def _settings(self) -> ConfigDict:
        """What the site decides that is a setting of runs."""
        return {key: value for key, value in self.local.items() if key in ("dataset", *LOCAL)}

    def _resolved(self, asked: ConfigDict) -> Config:
        """The configuration of a run on a data set with a name: the server's, but with the site's files."""
        own = {key: None if key == "data_dir" else "auto" for key in LOCAL} | self._settings()
        return resolve(combine(asked, own))

    def _read(self, config: Config) -> Federation:
        key = config.dataset, config.partition, config.settings
        if self._data is None or self._data[0] != key:
            self._data = key, make_data(config)
        return self._data[1]


def _are_shares(values: Any) -> bool:
    """True for shares of training, validation and test data."""
    numbers = type(values) is list and len(values) == 3 and all(type(v) in (int, float) and 0 <= v <= 1 for v in values)
    return numbers and values[0] > 0 and sum(values) <= 1 + 1e-9


@contextmanager
def _own_mistakes() -> Iterator[None]:
    """What is wrong with a site's data is said at the site, because the sentence may quote them."""
    try:
        yield
    except UserError as error:
        log.error("%s", error)
        raise UserError("its data cannot be used; what is wrong with them is said at the site") from None


def configured(asked: ConfigDict, data: Federation, local: ConfigDict | None = None) -> Config:
    """The configuration of a run on own data: what was asked for, with the federation in place of files."""
    values = flat({key: value for key, value in asked.items() if key not in (*OF_DATA, *LOCAL)})
    model = values.pop("model", None) or usual_model(data)
    return configure(values.pop("algorithm", USUAL_METHOD), data, model=model, values={**values, **(local or {})})


def usual_model(data: Federation) -> str:
    """The name of the model that is used unless another is asked for."""
    if data.vocab is not None:
        return "fasttext"
    if data.x.dim() == 4:
        side = min(data.x.shape[2:])
        return "cnn4" if side >= 16 else "cnn8" if side >= 4 else "mlp"
    return "mlp"

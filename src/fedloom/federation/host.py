"""A site's program: it takes part in runs with its own data, and keeps the state of each run in a folder."""

from __future__ import annotations

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
from fedloom.core.errors import UserError, shown
from fedloom.core.federation import SPLITS, Federation
from fedloom.core.keys import root
from fedloom.core.preprocessing import Preprocessing
from fedloom.core.settings import build
from fedloom.core.task import Task
from fedloom.core.tree import tree_map
from fedloom.data.sets.own import OwnData
from fedloom.device.torch_settings import deterministic, precision
from fedloom.engine.clients import initial_state
from fedloom.federation import own_data
from fedloom.federation.kinds import AGREE, COUNTED, DONE, END, FAILURE, HELLO, OFFER, ORDER, READY, SETUP
from fedloom.federation.messages import BadMessage, Message, decode, encode
from fedloom.federation.site import Site
from fedloom.federation.site_models import SiteModels
from fedloom.metrics.registry import find_metric
from fedloom.metrics.scores import basic_metric
from fedloom.storage.files import make_folder, write_file
from fedloom.studies.build import make_data, make_task

log = logging.getLogger("fedloom")

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SETUP_FILE = "setup.safetensors"
LOCAL = ("data_dir", "device")  # what a site decides, besides its data
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
            samples = self._samples(message)
            counted = {"samples": samples.sizes, "moments": own_data.to_json(samples.moments())}
            return Message(COUNTED, {"client": self.client, **counted})
        if message.kind == SETUP:
            made = self._made(run, message)
            make_folder(self.folder)
            make_folder(self.folder / run)
            write_file(self.folder / run / SETUP_FILE, lambda file: file.write(encode(message)))
            self._last = run, *made
            log.info("Run %s is set up.", run)
            return Message(READY, {"client": self.client, "run": run})
        if message.kind == ORDER:
            site, s = self._site(run)
            start = time.monotonic()
            with deterministic(s.deterministic), precision(s.dtype):
                answer = site.handle(message)
            what = "answered" if answer.kind != FAILURE else f"could not be answered: {answer['why']}"
            log.info("Run %s, round %s: %s, %.1f s.", run, message["t"] + 1, what, time.monotonic() - start)
            return answer
        if message.kind == END:
            models = self._site(run)[0].models
            if models is not None:
                models.end(int(message["best"]))
            log.info("Run %s is over.", run)
            return Message(DONE, {"client": self.client, "run": run})
        raise BadMessage(f"a site does not know what to do with a message of kind '{shown(message.kind)}'")

    # -- before training ----------------------------------------------------------------------------------------------

    def _offer(self, message: Message) -> Message:
        """What the site has: of own data, how its samples would be encoded."""
        config, fields = self._checked(message), {"client": self.client, "version": __version__}
        if (own := self.own) is not None:
            with _own_mistakes():
                about = own_data.described(own).to_json()
            return Message(OFFER, {**fields, "about": about, "normalise": own.normalise})
        data = self._read(self._resolved(config))
        return Message(OFFER, {**fields, "samples": {s: int(data.splits[s].sizes[self.client]) for s in SPLITS}})

    def _samples(self, message: Message) -> own_data.LocalSamples:
        own = self.own
        if own is None:
            raise BadMessage("this site has no data of its own")
        agreed = Preprocessing.from_json(message["about"])
        train, val, test = (float(share) for share in message["split"])
        seed, stratify = int(message["partition_seed"]), bool(message["stratify"])
        with _own_mistakes():
            return own_data.LocalSamples(own, agreed, (train, val, test), seed, stratify)

    def _checked(self, message: Message) -> ConfigDict:
        """The server's configuration; raises UserError if it is one that a site does not carry out. A server never
        chooses what is read."""
        asked = message["config"]
        if not isinstance(asked, dict):
            raise BadMessage("the configuration is missing")
        section = asked.get("dataset") or {}
        name = section.get("name") if isinstance(section, dict) else section
        if name != self.dataset.get("name"):
            have = shown(self.dataset.get("name"))
            raise UserError(f"the run is about the data set {shown(name)!a}, but this site takes part with {have!a}")
        method = asked.get("algorithm")
        if isinstance(method, dict) and FROM in method:
            raise UserError("the server would have this site load a method from a file; install it as a package here")
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
            folder, limit = self.folder / run, self.local.get("max_epsilon")
            models = SiteModels(folder, self._about_models(config, task))
            more: dict[str, Any] = {"metric": metric, "models": models, "max_epsilon": limit}
            return Site(self.client, alg, task, s.seed, start, folder, run, **more), s

    def _task(self, message: Message) -> tuple[Config, Task]:
        """The configuration of a run at this site, and its task with this site's samples."""
        asked, mean = self._checked(message), float(message["mean_samples"])
        if self.own is None:
            config = self._resolved(asked)
            task = make_task(config, replace(self._read(config), mean_samples_of_all=mean))
            return config, replace(task, data=task.data.only([self.client]))
        samples, final = self._samples(message), Preprocessing.from_json(message["final"])
        config = configured(asked, samples.federation(final, self.client, int(message["clients"]), mean), self._local())
        task = make_task(config, make_data(config), complete=False)
        return config, replace(task, batch_size=int(message["batch_size"]))

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
    return configure(values.pop("algorithm", "ditto"), data, model=model, values={**values, **(local or {})})


def usual_model(data: Federation) -> str:
    """The name of the model that is used unless another is asked for."""
    if data.vocab is not None:
        return "fasttext"
    if data.x.dim() == 4:
        side = min(data.x.shape[2:])
        return "cnn4" if side >= 16 else "cnn8" if side >= 4 else "mlp"
    return "mlp"

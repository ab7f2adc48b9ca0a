"""A site's program: it takes part in runs with its own data, and keeps the state of each run in a folder."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.config.files import ConfigDict
from fedloom.config.methods import FROM
from fedloom.config.resolve import Config, combine, resolve
from fedloom.core.errors import UserError, shown
from fedloom.core.federation import SPLITS, Federation
from fedloom.core.keys import root
from fedloom.core.tree import tree_map
from fedloom.device.torch_settings import deterministic, precision
from fedloom.engine.clients import initial_state
from fedloom.federation.messages import BadMessage, Message, decode, encode
from fedloom.federation.site import FAILURE, ORDER, Site
from fedloom.metrics.registry import find_metric
from fedloom.metrics.scores import basic_metric
from fedloom.storage.files import make_folder, write_file
from fedloom.studies.build import make_data, make_task

log = logging.getLogger("fedloom")

HELLO, OFFER, SETUP, READY = "hello", "offer", "setup", "ready"  # kinds of messages before training
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SETUP_FILE = "setup.safetensors"
LOCAL = ("data_dir", "device")  # what a site decides, besides its data


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
        self.sites: dict[str, Site] = {}
        self._data: tuple[Any, Federation] | None = None  # what was read last, and for which configuration

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
            data = self._read(self._config(message))
            return Message(OFFER, {"client": self.client, "version": __version__, "samples": self._samples(data)})
        if message.kind == SETUP:
            site = self._made(run, message)
            make_folder(self.folder)
            make_folder(self.folder / run)
            write_file(self.folder / run / SETUP_FILE, lambda file: file.write(encode(message)))
            self.sites[run] = site
            return Message(READY, {"client": self.client, "run": run})
        if message.kind == ORDER:
            return self._site(run).handle(message)
        raise BadMessage(f"a site does not know what to do with a message of kind '{shown(message.kind)}'")

    def _site(self, run: str) -> Site:
        """The site of a run that was set up, perhaps by an earlier process."""
        if run not in self.sites:
            path = self.folder / run / SETUP_FILE
            if not path.exists():
                raise BadMessage(f"run {run} was never set up here")
            self.sites[run] = self._made(run, decode(path.read_bytes()))
        return self.sites[run]

    def _made(self, run: str, message: Message) -> Site:
        config = self._config(message)
        s, data = config.settings, self._read(config)
        with deterministic(s.deterministic), precision(s.dtype):
            task = make_task(config, replace(data, mean_samples_of_all=float(message["mean_samples"])))
            task = replace(task, data=task.data.only([self.client]))
            alg = config.algorithm
            start = initial_state(alg, task, s.seed, alg.init_server(task, root(s.seed, "init")))
            constants = tree_map(lambda v: v.to(task.data.device), message.tree("constants"))
            metric = None if s.metric == basic_metric(data.kind) else find_metric(s.metric, data.kind)
            start = start._replace(constants=constants)
            return Site(self.client, alg, task, s.seed, start, self.folder / run, run, metric=metric)

    def _config(self, message: Message) -> Config:
        """The configuration of a run: the server's, but with the site's own data."""
        asked = message["config"]
        if not isinstance(asked, dict):
            raise BadMessage("the configuration is missing")
        _check_data(asked, self.local)
        method = asked.get("algorithm")
        if isinstance(method, dict) and FROM in method:
            raise UserError("the server would have this site load a method from a file; install it as a package here")
        own = {key: None if key == "data_dir" else "auto" for key in LOCAL} | dict(self.local)
        return resolve(combine(asked, own))

    def _read(self, config: Config) -> Federation:
        key = config.dataset, config.partition, config.settings
        if self._data is None or self._data[0] != key:
            self._data = key, make_data(config)
        return self._data[1]

    def _samples(self, data: Federation) -> dict[str, int]:
        return {split: int(data.splits[split].sizes[self.client]) for split in SPLITS}


def _check_data(asked: Mapping[str, Any], local: Mapping[str, Any]) -> None:
    """Raise UserError unless a server asks for the data that a site has for it: a server never chooses what is read."""
    name, own = ((config.get("dataset") or {}) for config in (asked, local))
    name, own = (value.get("name") if isinstance(value, dict) else value for value in (name, own))
    if name != own:
        raise UserError(f"the run is about the data set {shown(name)!a}, but this site takes part with {shown(own)!a}")

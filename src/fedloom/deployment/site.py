"""A site: it has one client's samples and private state, and answers the server's orders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.task import Task
from fedloom.core.tree import Tree, leaves, take, tree_map
from fedloom.deployment.kinds import FAILURE, ORDER, REPLY
from fedloom.deployment.messages import BadMessage, Message, whole_number
from fedloom.deployment.site_models import SiteModels
from fedloom.deployment.site_privacy import SiteAccount, check_limit
from fedloom.deployment.site_store import NEVER, SiteStore, StateMissing
from fedloom.engine.clients import ClientReplies, ClientRequest, InitialState, LocalClients
from fedloom.engine.cohort import Executor
from fedloom.engine.planning.choose import REFERENCE, make_executor
from fedloom.metrics.registry import Metric

AGAIN = "-again"  # end of the names of downloads for the second job of an order, if they are not those for the first
REPORTS = "reports.jsonl"


class Site:
    """Answers orders about one client. What it keeps is in a folder, so it may end and start again at any time."""

    def __init__(
        self,
        client: int,
        alg: Algorithm,
        task: Task,
        seed: int,
        initial: InitialState,
        folder: Path,
        run: str,
        *,
        metric: Metric | None = None,
        executor: Executor | None = None,
        models: SiteModels | None = None,
        account: SiteAccount | None = None,
    ) -> None:
        """`task` has the samples of this client, and empty lists for the others. `run` is the name of the run, so that
        the state of one is never used in another. `models` keeps the personal models, to be used at the site. `account`
        is that of the site's uploads with noise, in all runs."""
        self.client, self.run, self.folder, self.models = client, run, folder, models
        store = partial(SiteStore, client=client, folder=folder / "state", run=run)
        self.clients = LocalClients(alg, task, task, seed, initial, store, metric=metric)
        self.privacy, self.account = task.privacy, account or SiteAccount(folder)
        check_limit(self.privacy, self.account.limit)
        self.executor = executor or make_executor(alg, task, REFERENCE, task)

    @property
    def store(self) -> SiteStore:
        assert isinstance(self.clients.store, SiteStore)
        return self.clients.store

    def handle(self, message: Message) -> Message:
        """The answer to a message; one that says what is wrong if it cannot be carried out."""
        try:
            return self._carry_out(message)
        except (BadMessage, StateMissing, UserError) as error:
            fields = {"run": self.run, "client": self.client, "why": str(error).rstrip(".")}
            return Message(FAILURE, fields)

    @torch.no_grad()
    def _carry_out(self, message: Message) -> Message:
        if message.kind != ORDER:
            raise BadMessage(f"a site does not know what to do with a message of kind '{message.kind}'")
        if (message["run"], message["client"]) != (self.run, self.client):
            raise BadMessage(
                f"the order is for client {message['client']} of run {message['run']}, but this is client "
                f"{self.client} of run {self.run}"
            )
        t, base, saved = (whole_number(message, name, NEVER) for name in ("t", "base", "saved"))
        if not (saved <= base < t):
            raise BadMessage(f"an order for round {t + 1} cannot begin from the state after round {base + 1}")
        results: list[dict[str, Any]] = []
        up: Tree = {}
        for number, job in enumerate(message["jobs"]):
            self.store.open(base)
            own = AGAIN if number and "shared" + AGAIN in message.trees else ""
            request = self._request(message, t, job, own)
            if self.privacy is not None:
                self.clients.noise = self.account.noise(self._digest(request, base))
            replies = self.clients.ask(request, self.executor)
            self._keep_scores(t, replies)
            if job["job"] == "evaluate":
                self._keep_model(request, replies, whole_number(message, "best", 0))
            if job["job"] == "train":
                up = {name: _first(part) for name, part in replies.up.items()}
                self._check_declared(up)
                try:
                    if self.privacy is not None and up:
                        self.account.release(self.run, t, up, self.privacy)
                except UserError as error:  # what came before is sent
                    up = {}
                    results.append({"why": str(error).rstrip(".")})
                    break
                self.store.save(t, {base, saved} - {NEVER})
                self._keep_report(t, replies.report)
            results.append(_result(replies) if self.privacy is None else _withheld(replies))
        fields = {"run": self.run, "client": self.client, "t": t, "results": results}
        return Message(REPLY, fields, {"up": up} if up else {})

    def _digest(self, request: ClientRequest, base: int) -> bytes:
        """A digest of all that an upload is an answer to."""
        made = hashlib.sha256(f"{self.run} {request.t} {base}".encode())
        for v in leaves({"shared": request.shared, "parts": request.parts}):
            made.update(v.cpu().contiguous().numpy().tobytes())
        return made.digest()

    def _request(self, message: Message, t: int, job: dict[str, Any], own: str) -> ClientRequest:
        """What is asked of the client; the names of its downloads end with `own`."""
        on_device = partial(_on, self.clients.task.data.device)
        more: dict[str, Any] = {}
        if job["job"] == "train":
            more["scored"] = np.array([bool(job["scored"])])
        if "global" in message.trees:
            more |= {"global_params": on_device(message.tree("global")), "global_splits": tuple(job["global_splits"])}
        return ClientRequest(
            job=job["job"],
            ids=np.array([self.client]),
            t=t,
            shared=on_device(message.tree("shared" + own)),
            parts=on_device(message.tree("part" + own)),
            splits=tuple(job["splits"]),
            models=self.models is not None and job["job"] == "evaluate" and bool(job["splits"]),
            **more,
        )

    def _keep_model(self, request: ClientRequest, replies: ClientReplies, best: int) -> None:
        """Keep the model that was scored; it stays at the site."""
        if self.models is None:
            return
        if not request.models:  # PM_pre is the global model
            only = replace(request, models=True, global_params=None, global_splits=())
            replies = self.clients.ask(only, self.executor)
        self.models.keep(request.t, replies.models, best)

    def _check_declared(self, up: Tree) -> None:
        """Raise UserError, instead of sending anything, for an upload that the method does not declare."""
        alg = self.clients.alg
        for name in up:
            if name not in alg.uploads:
                raise UserError(
                    f"{alg.name} would send '{name}', which its class does not declare, so nothing was sent; add it to "
                    "'uploads', with its meaning"
                )

    def _keep_scores(self, t: int, replies: ClientReplies) -> None:
        """Add the site's own scores to its file: correct predictions, summed loss, samples."""
        self._keep_report(t, {}, _result(replies)["scores"])

    def _keep_report(self, t: int, report: Tree, scores: dict[str, Any] | None = None) -> None:
        """Add the method's numbers of a round to a file of the site's own; they are not sent. Of a round that was
        repeated, the last line counts."""
        numbers = {**{name: value[0].tolist() for name, value in report.items()}, **(scores or {})}
        if numbers:
            with (self.folder / REPORTS).open("a") as file:
                file.write(json.dumps({"round": t + 1, **numbers}) + "\n")


def _result(replies: ClientReplies) -> dict[str, Any]:
    """Numbers of a reply: scores and, after training, samples and what was computed."""
    scores = {view: {s: v[0].tolist() for s, v in found.items()} for view, found in replies.scores.items()}
    if replies.info is None:
        return {"scores": scores}
    assert replies.computed is not None
    return {"scores": scores, "n": int(replies.info.n[0]), "computed": replies.computed[0].tolist()}


def _withheld(replies: ClientReplies) -> dict[str, Any]:
    """A result that tells nothing, as of a client without samples: differential privacy covers the upload only."""
    found = _result(replies)
    scores = {view: {s: [0.0] * len(v) for s, v in each.items()} for view, each in found["scores"].items()}
    return {**found, "scores": scores, **({"computed": [0.0, 0.0]} if "computed" in found else {})}


def _first(tree: Tree) -> Tree:
    return take(tree, 0)


def _on(device: torch.device, tree: Tree) -> Tree:
    return tree_map(lambda v: v.to(device), tree)

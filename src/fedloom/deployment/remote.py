"""The clients of a run as its server sees them when each is at a site of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Info
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, root
from fedloom.core.task import Task
from fedloom.core.tree import Tree, take, tree_map
from fedloom.deployment.expected import upload_like
from fedloom.deployment.kinds import ORDER
from fedloom.deployment.messages import BadMessage, Message, paths, same_bits
from fedloom.deployment.replies import Expected, JobResult, SplitScores, checked, columns, views
from fedloom.deployment.site import AGAIN
from fedloom.deployment.site_store import NEVER
from fedloom.device.transfer import to_device
from fedloom.engine.client_store import ClientStore, MemoryStore, Snapshot
from fedloom.engine.clients import ClientReplies, ClientRequest
from fedloom.engine.cohort import Executor
from fedloom.engine.screening import update_norms
from fedloom.metrics.registry import Metric

log = logging.getLogger("fedloom")


class Link(Protocol):
    """Carries messages to sites and brings back their answers."""

    def exchange(self, messages: Mapping[int, Message], deadline: float) -> dict[int, Message | str]:
        """The answers by client; a sentence instead of a message where none came within `deadline` seconds."""


class TooFewReplies(UserError):
    """A round had fewer replies than it needs, also after it was repeated."""


class Bases(MemoryStore):
    """For every client, the round of its last upload that was accepted: the state from which it continues."""

    def __init__(self, clients: int, durable: bool) -> None:
        """`durable`: the server makes checkpoints, to the last of which it may go back."""
        super().__init__(lambda ids: {"base": torch.full((len(ids),), NEVER)}, clients)
        self.durable = durable
        self.saved = np.full(clients, NEVER)  # the bases as they are in the last checkpoint

    def of(self, ids: np.ndarray) -> np.ndarray:
        """The bases of these clients."""
        return self.read(ids)["base"].numpy()

    def accept(self, ids: np.ndarray, t: int) -> None:
        """The uploads of these clients in round t are used."""
        self.write(ids, {"base": torch.full((len(ids),), t)})
        if not self.durable:
            self.committed()

    def committed(self) -> None:
        self.saved = self.of(np.arange(len(self)))

    def restore(self, saved: Snapshot) -> None:
        super().restore(saved)
        self.committed()


class RemoteClients:
    """Asks sites over a link, checks what they answer, and goes on without those that do not."""

    best_store: ClientStore | None = None  # the models of the best round are at the sites

    def __init__(
        self,
        alg: Algorithm,
        task: Task,
        seed: int,
        run: str,
        link: Link,
        *,
        deadline: float = 600.0,
        minimum: int | None = None,
        repeats: int = 2,
        durable: bool = False,
        trains_ahead: bool = True,
        metric: Metric | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            task: has the server's samples, and the numbers of those of the clients (`Federation.without_samples`).
            run: the name of the run; sites keep their state under it.
            deadline: seconds after which a site that has not answered is left out of a round.
            minimum: replies that a round needs; None for all of those that are asked.
            repeats: how often sites that have failed are asked again if there are too few replies.
            durable: the server makes checkpoints.
            trains_ahead: clients train for the next round when they are evaluated, which saves an exchange.
            names: of the clients, for messages to people.
        """
        self.alg, self.task, self.seed, self.run, self.link = alg, task, seed, run, link
        self.deadline, self.minimum, self.repeats, self.metric, self.names = deadline, minimum, repeats, metric, names
        self.trains_ahead, self.key = trains_ahead, root(seed, "init")
        self.samples = task.data.splits["train"].sizes if task.privacy is None else np.ones(task.clients, np.int64)
        self.positions = math.prod(task.data.y.shape[1:]) if task.data.sequences else 1
        self.constants = alg.constants(task, self.key)
        self.best = 0  # the best round so far, whose models sites keep
        self.bases = Bases(task.clients, durable)
        self.store: ClientStore = self.bases
        self._ahead: dict[
            int, dict[int, list[JobResult]]
        ] = {}  # by round: results of clients that have trained already
        self._upload: tuple[list[Any], Tree] | None = None  # what downloads looked like, and uploads to them must

    @property
    def bytes_per_client(self) -> int:
        """Size of what the server keeps for a client."""
        return 0

    def keep_best(self) -> None:
        """Sites keep their own models."""

    def ask(self, request: ClientRequest, executor: Executor) -> ClientReplies:
        """Send a request to the sites of its clients, and collect their replies."""
        if request.job == "evaluate":
            return self._evaluated(request)
        known = {i: result for i, result in self._ahead.pop(request.t, {}).items() if i in request.ids}
        found = self._collect([request], request.ids, known)
        ids = np.array(sorted(found), dtype=np.int64)
        return self._trained(request.only(ids), [found[i][-1] for i in ids.tolist()], executor)

    def _evaluated(self, request: ClientRequest) -> ClientReplies:
        """Scores; clients that train next do so at once, if the request says which: that saves an exchange."""
        after = request.then
        ids = request.ids if after is None else np.union1d(request.ids, after.ids)
        found = self._collect([request, *([] if after is None else [after])], ids)
        if after is not None:
            trained = {i: results for i, results in found.items() if results[-1].job == "train"}
            self._ahead = {after.t: trained}
        scores = [found[i][0].scores if i in found else None for i in request.ids.tolist()]
        return ClientReplies(scores=self._rows(request, scores))

    def _collect(
        self, jobs: list[ClientRequest], ids: np.ndarray, known: Mapping[int, list[JobResult]] | None = None
    ) -> dict[int, list[JobResult]]:
        """The results of the jobs of every client that answers, up to the first that cannot be used. `known` are there
        already."""
        results = dict(known or {})
        of_client = {i: [job for job in jobs if i in job.ids] for i in ids.tolist()}
        messages = {i: self._order(mine, i) for i, mine in of_client.items() if i not in results}
        least, t = len(ids) if self.minimum is None else min(self.minimum, len(ids)), jobs[0].t
        for attempt in range(1 + self.repeats):
            missing = {i: message for i, message in messages.items() if i not in results}
            answers = self.link.exchange(missing, self.deadline) if missing else {}
            for i in sorted(missing):
                try:
                    results[i] = self._usable(answers.get(i, "no answer"), i, of_client[i])
                except BadMessage as error:
                    log.warning("Round %d: client %s is left out: %s.", t + 1, self._name(i), error)
            if len(results) >= least:
                return results
            if attempt < self.repeats:
                has = len(results)
                log.warning("Round %d needs %d replies and has %d; other clients are asked again.", t + 1, least, has)
        who = ", ".join(self._name(i) for i in messages if i not in results)
        raise TooFewReplies(
            f"Round {t + 1} needs {least} replies and has {len(results)}; nothing usable came from clients {who}. "
            "Start their sites, and then the server again: it continues with this round."
        )

    def _usable(self, answer: Message | str, i: int, jobs: list[ClientRequest]) -> list[JobResult]:
        """The results of a client's jobs up to the first that cannot be used, which is asked for again in its turn."""
        trains = next((job for job in jobs if job.job == "train"), None)
        upload = {} if trains is None else self._upload_like(trains)
        counted = {split: int(rows.sizes[i]) * self.positions for split, rows in self.task.data.splits.items()}
        has_metric, has_classes = self.metric is not None, self.task.data.kind != "number"
        expected = Expected(self.run, i, jobs[0].t, int(self.samples[i]), counted, upload, has_metric, has_classes)
        usable: list[JobResult] = []
        for found in checked(answer, jobs, expected):
            if isinstance(found, BadMessage):
                if not usable:
                    raise found
                log.warning("Round %d: client %s is asked again: %s.", jobs[0].t + 1, self._name(i), found)
                break
            usable.append(found)
        return usable

    # -- what is sent -------------------------------------------------------------------------------------------------

    def _order(self, jobs: list[ClientRequest], i: int) -> Message:
        """What a site is asked to do: its jobs begin from the same state and the same download."""
        fields = {
            "run": self.run,
            "client": i,
            "t": jobs[0].t,
            "base": int(self.bases.of(np.array([i]))[0]),
            "saved": int(self.bases.saved[i]),
            "best": self.best,
            "jobs": [_job(job, i) for job in jobs],
        }
        trees: dict[str, Tree] = {}
        for number, job in enumerate(jobs):
            j = int(np.searchsorted(job.ids, i))
            mine = {"shared": job.shared, "part": take(job.parts, slice(j, j + 1))}
            if number and same_bits(mine, {name: trees[name] for name in mine}):
                continue  # the usual case: it is sent once
            trees |= {name + AGAIN * number: tree for name, tree in mine.items()}
        if jobs[0].global_params is not None:
            trees["global"] = jobs[0].global_params
        return Message(ORDER, fields, trees)

    def _name(self, i: int) -> str:
        return f"{i} ({self.names[i]})" if self.names else str(i)

    # -- what comes back ----------------------------------------------------------------------------------------------

    def _upload_like(self, request: ClientRequest) -> Tree:
        """What every upload to this request must look like."""
        one = [(name, None if v is None else (v.shape, v.dtype)) for name, v in paths(request.shared, "shared")]
        one += [(name, None if v is None else (v.shape[1:], v.dtype)) for name, v in paths(request.parts, "parts")]
        if self._upload is None or self._upload[0] != one:
            self._upload = one, upload_like(self.alg, self.task, self.seed, request)
        return self._upload[1]

    def _trained(self, request: ClientRequest, results: list[JobResult], executor: Executor) -> ClientReplies:
        ids, device = request.ids, self.task.data.device
        if not len(ids):
            return ClientReplies(scores={}, ids=ids)
        up = tree_map(lambda *rows: torch.stack(rows).to(device), *(result.up for result in results))
        norms = torch.zeros(len(ids), 3, device=device)
        if up:
            shared = {**self.constants, **request.shared}
            norms = executor.call("norms", partial(update_norms, self.alg, self.task), up, shared, request.parts, {})
        info = self._info(ids, request.t)
        self.bases.accept(ids, request.t)
        return ClientReplies(
            scores=self._rows(request, [result.scores for result in results]),
            ids=ids,
            up=up,
            info=info,
            norms=norms,
            computed=torch.tensor([result.computed for result in results], dtype=torch.float64, device=device),
        )

    def _info(self, ids: np.ndarray, t: int) -> Info:
        """What the server knows of the clients that have trained."""
        key = fold(root(self.seed, "client"), ids, t)
        first = self.store.trained[ids] == 0
        table = np.stack([ids, self.samples[ids], np.full(len(ids), t), first, key])
        client, n, now, is_first, key = to_device(self.task.data.device, table).unbind()
        return Info(client, n, torch.zeros(len(ids), 0, dtype=torch.int64, device=n.device), now, is_first.bool(), key)

    def _rows(
        self, request: ClientRequest, scores: Sequence[dict[str, SplitScores] | None]
    ) -> dict[str, dict[str, Tensor]]:
        """Scores of clients, stacked; a client that did not answer counts as one without samples."""

        def rows(view: str, split: str) -> Tensor:
            nothing = [0.0] * columns(split, self.metric is not None)
            each = [nothing if one is None else one[view][split] for one in scores]
            return torch.tensor(each, dtype=torch.float64, device=self.task.data.device)

        return {view: {split: rows(view, split) for split in splits} for view, splits in views(request).items()}


def _job(request: ClientRequest, i: int) -> dict[str, Any]:
    scored = request.scored is None or bool(request.scored[np.searchsorted(request.ids, i)])
    splits = {"splits": list(request.splits), "global_splits": list(request.global_splits)}
    return {"job": request.job, **splits, "scored": scored}

"""The clients of a run as its server sees them when each is at a site of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
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
from fedloom.device.transfer import to_device
from fedloom.engine.client_store import ClientStore, MemoryStore, Snapshot
from fedloom.engine.clients import ClientReplies, ClientRequest
from fedloom.engine.cohort import Executor
from fedloom.engine.screening import update_norms
from fedloom.federation.expected import upload_like
from fedloom.federation.messages import BadMessage, Message, check_like, paths
from fedloom.federation.site import FAILURE, ORDER, REPLY
from fedloom.federation.site_store import NEVER
from fedloom.metrics.registry import Metric

log = logging.getLogger("fedloom")

VIEWS = {"train": {"post"}, "evaluate": {"pre", "global"}}
BASIC, WITH_METRIC = 3, 4  # numbers of a score


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
            names: of the clients, for messages to people.
        """
        self.alg, self.task, self.seed, self.run, self.link = alg, task, seed, run, link
        self.deadline, self.minimum, self.repeats, self.metric, self.names = deadline, minimum, repeats, metric, names
        self.key = root(seed, "init")
        self.samples = task.data.splits["train"].sizes
        self.constants = alg.constants(task, self.key)
        self.bases = Bases(task.clients, durable)
        self.store: ClientStore = self.bases
        self._upload: tuple[list[Any], Tree] | None = None  # what downloads looked like, and uploads to them must

    @property
    def bytes_per_client(self) -> int:
        """Size of what the server keeps for a client."""
        return 0

    def keep_best(self) -> None:
        """Sites keep their own models."""

    def ask(self, request: ClientRequest, executor: Executor) -> ClientReplies:
        """Send a request to the sites of its clients, and collect their replies."""
        like = self._upload_like(request) if request.job == "train" else None
        bases = dict(zip(request.ids.tolist(), self.bases.of(request.ids).tolist(), strict=True))
        messages = {i: self._order(request, j, bases[i]) for j, i in enumerate(request.ids.tolist())}
        replies: dict[int, Message] = {}
        least = len(messages) if self.minimum is None else min(self.minimum, len(messages))
        for attempt in range(1 + self.repeats):
            missing = {i: message for i, message in messages.items() if i not in replies}
            failed = {}
            for i, answer in self.link.exchange(missing, self.deadline).items():
                try:
                    replies[i] = self._checked(answer, request, i, like)
                except BadMessage as error:
                    failed[i] = str(error)
            for i, why in sorted(failed.items()):
                log.warning("Round %d: client %s is left out: %s.", request.t + 1, self._name(i), why)
            if len(replies) >= least:
                break
            if attempt < self.repeats:
                log.warning(
                    "Round %d needs %d replies and has %d; the other clients are asked again.",
                    request.t + 1, least, len(replies),
                )  # fmt: skip
        else:
            who = ", ".join(self._name(i) for i in messages if i not in replies)
            raise TooFewReplies(
                f"Round {request.t + 1} needs {least} replies and has {len(replies)}; nothing usable came from clients "
                f"{who}. Start their sites, and then the server again: it continues with this round."
            )
        ids = np.array(sorted(replies), dtype=np.int64)
        ordered = [replies[i] for i in ids.tolist()]
        return (
            self._trained(request, ids, ordered, executor) if request.job == "train" else self._scored(request, replies)
        )

    # -- what is sent -------------------------------------------------------------------------------------------------

    def _order(self, request: ClientRequest, j: int, base: int) -> Message:
        i = int(request.ids[j])
        scored = request.scored is None or bool(request.scored[j])
        job = {
            "job": request.job,
            "splits": list(request.splits),
            "global_splits": list(request.global_splits),
            "scored": scored,
        }
        saved = int(self.bases.saved[i])
        fields = {"run": self.run, "client": i, "t": request.t, "base": base, "saved": saved, "jobs": [job]}
        trees = {"shared": request.shared, "part": take(request.parts, slice(j, j + 1))}
        if request.global_params is not None:
            trees["global"] = request.global_params
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

    def _checked(self, answer: Message | str, request: ClientRequest, i: int, like: Tree | None) -> Message:
        """An answer that is a reply to this request; raises BadMessage for any other."""
        if isinstance(answer, str):
            raise BadMessage(answer)
        if answer.kind == FAILURE:
            raise BadMessage(f"its site says: {str(answer['why'])[:500]}")
        if answer.kind != REPLY:
            raise BadMessage("its answer is no reply")
        if (answer["run"], answer["client"], answer["t"]) != (self.run, i, request.t):
            raise BadMessage("its reply is one to another order")
        results = answer["results"]
        if type(results) is not list or len(results) != 1 or type(results[0]) is not dict:
            raise BadMessage("its reply has no results")
        self._check_scores(results[0].get("scores"), request)
        if like is None:
            if answer.trees:
                raise BadMessage("its reply has an upload that was not asked for")
            return answer
        check_like({"up": answer.trees.get("up", {})}, {"up": like})
        if set(answer.trees) - {"up"}:
            raise BadMessage("its reply has more than an upload")
        if results[0].get("n") != self.samples[i]:
            raise BadMessage(
                f"it has {results[0].get('n')} training samples, but it said {self.samples[i]} at the start of the run"
            )
        computed: Any = results[0].get("computed")
        if not _numbers(computed, 2) or not all(math.isfinite(v) and v >= 0 for v in computed):
            raise BadMessage("its reply does not say what it computed")
        return answer

    def _check_scores(self, scores: Any, request: ClientRequest) -> None:
        columns = BASIC if self.metric is None else WITH_METRIC
        if type(scores) is not dict or not set(scores) <= VIEWS[request.job]:
            raise BadMessage("its reply has no scores")
        for view, found in scores.items():
            splits = request.global_splits if view == "global" or not request.splits else request.splits
            if type(found) is not dict or set(found) != set(splits):
                raise BadMessage(f"its {view} scores are not of the data that were asked for")
            for split, row in found.items():
                wide = columns if split in ("val", "test") else BASIC
                if not _numbers(row, wide):
                    raise BadMessage(f"its {view} scores of {split} data are not {wide} numbers")

    def _trained(
        self, request: ClientRequest, ids: np.ndarray, replies: list[Message], executor: Executor
    ) -> ClientReplies:
        device = self.task.data.device
        if not len(ids):
            return ClientReplies(scores={}, ids=ids)
        request = request.only(ids)
        results = [reply["results"][0] for reply in replies]
        up = tree_map(lambda *rows: torch.stack(rows).to(device), *(reply.trees.get("up", {}) for reply in replies))
        norms = torch.zeros(len(ids), 3, device=device)
        if up:
            shared = {**self.constants, **request.shared}
            norms = executor.call("norms", partial(update_norms, self.alg, self.task), up, shared, request.parts, {})
        info = self._info(ids, request.t)
        self.bases.accept(ids, request.t)
        return ClientReplies(
            scores={"post": self._rows([result["scores"]["post"] for result in results])},
            ids=ids,
            up=up,
            info=info,
            norms=norms,
            computed=torch.tensor([result["computed"] for result in results], dtype=torch.float64, device=device),
        )

    def _info(self, ids: np.ndarray, t: int) -> Info:
        """What the server knows of the clients that have trained."""
        key = fold(root(self.seed, "client"), ids, t)
        first = self.store.trained[ids] == 0
        table = np.stack([ids, self.samples[ids], np.full(len(ids), t), first, key])
        client, n, now, is_first, key = to_device(self.task.data.device, table).unbind()
        return Info(client, n, torch.zeros(len(ids), 0, dtype=torch.int64, device=n.device), now, is_first.bool(), key)

    def _scored(self, request: ClientRequest, replies: Mapping[int, Message]) -> ClientReplies:
        """Scores of all clients of an evaluation request; those that did not answer have no samples."""
        each = [replies[i]["results"][0]["scores"] if i in replies else None for i in request.ids.tolist()]
        known = next(scores for scores in each if scores is not None)
        nothing = {view: {s: [0.0] * len(row) for s, row in found.items()} for view, found in known.items()}
        rows = [nothing if scores is None else scores for scores in each]
        return ClientReplies(scores={view: self._rows([scores[view] for scores in rows]) for view in known})

    def _rows(self, rows: list[dict[str, list[float]]]) -> dict[str, Tensor]:
        device = self.task.data.device
        return {s: torch.tensor([row[s] for row in rows], dtype=torch.float64, device=device) for s in rows[0]}


def _numbers(values: Any, count: int) -> bool:
    return type(values) is list and len(values) == count and all(type(v) in (int, float) for v in values)

"""The server's side of a run: who takes part, what is sent, what comes back, how good everybody's model is."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm
from fedloom.core.errors import UserError
from fedloom.core.keys import rng, root
from fedloom.core.kinds import Kind
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, leaves, size_bytes, take, tree_map
from fedloom.device.transfer import to_device, to_numpy
from fedloom.engine.clients import ClientReplies, ClientRequest
from fedloom.engine.cohort import global_slot
from fedloom.engine.executors.scoring import score_rows
from fedloom.engine.screening import Directions, Screening, scaled_updates, update_vectors
from fedloom.metrics.registry import Metric

log = logging.getLogger("fedloom")

T = TypeVar("T")
ROUNDING = 1e-5  # of the norm of what was sent: by which rounding may change the norm of an update
Steps = Generator[ClientRequest, ClientReplies, T]  # yields requests, is sent the replies, returns a result
# Limits of one evaluation request, so that memory does not grow with the number of clients
MAX_EVAL_CLIENTS, MAX_EVAL_BYTES = 4096, 1 << 30


@dataclass(frozen=True, kw_only=True)
class TrainedRound:
    """What happened while a cohort trained."""

    t: int
    cohort: np.ndarray
    reports: dict[str, np.ndarray]  # numbers of the method, one row per client of the cohort
    server_report: dict[str, float]
    bytes_down: int
    bytes_up: int
    gradients: float  # that a client of the cohort computed, on average
    samples: float  # of which these gradients were taken, see `fedloom.engine.budget`
    participation: float  # share of the clients that are in the cohort


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good everybody's models are. Scores are arrays (clients, 3): correct predictions, summed loss, samples; a
    fourth column has the run's metric, if there is one."""

    scores: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # view (pre, post, global) -> split
    server: np.ndarray | None = None  # scores of the global model on the server's samples
    unseen_scores: dict[str, np.ndarray] = field(default_factory=dict)  # view (new, joined), of held-out clients


@dataclass(frozen=True, kw_only=True)
class Round(TrainedRound, Evaluation):
    """What happened in a round; without scores if it was not evaluated."""

    eval_client_ids: np.ndarray  # clients that the rows of scores belong to
    unseen: np.ndarray  # held-out clients that the rows of unseen_scores belong to
    train_seconds: float
    eval_seconds: float
    metric: Metric | None = None  # in the fourth column of scores
    kind: Kind = "classes"  # what is predicted


class ServerState(NamedTuple):
    """The server's state after a round, from which the models of that round are made."""

    t: int
    server: Tree
    stats: Tree  # mean running statistics of the clients


class GlobalModel(NamedTuple):
    """The global model after a round."""

    t: int
    params: Params
    stats: Tree  # mean running statistics of the clients, by slot


class _Turn(NamedTuple):
    """What came of asking some clients to train."""

    ids: np.ndarray  # the clients that trained
    bytes_down: int = 0
    bytes_up: int = 0
    computed: np.ndarray = np.zeros(2)  # gradients and samples, of all these clients
    report: dict[str, np.ndarray] = {}
    n_and_stats: tuple[Tensor, Tree] | None = None  # numbers of samples and running statistics of clients that are used


class Driver:
    """Holds the server's state of a run and advances it, round by round.

    `train_round` and `evaluation` are generators: they yield what is asked of the clients and are sent the replies, so
    the same driver serves clients in this process, several stacked runs, and remote sites.
    """

    def __init__(
        self,
        alg: Algorithm,
        task: Task,
        seed: int,
        *,
        held_out: int = 0,
        eval_client_ids: np.ndarray | None = None,
        unseen: np.ndarray | None = None,
        join_rounds: int = 1,
        screening: bool = True,
        screen_directions: bool = False,
        clip_updates: float | None = None,
        label: str = "",
    ) -> None:
        """`task` has the participating clients only.

        Args:
            held_out: number of clients that do not take part; their ids follow those of the participants.
            eval_client_ids: participants to evaluate; None for all.
            unseen: held-out clients to evaluate; None for all.
            join_rounds: rounds for which a held-out client trains before it is scored as joined.
            screening: leave out uploads that are far larger than usual.
            screen_directions: leave out updates that point away from those of others.
            clip_updates: scale updates that are larger than so many times the usual size down to it.
            label: distinguishes this run in messages, such as " of seed 3".
        """
        self.alg, self.task, self.seed, self.held_out, self.label = alg, task, seed, held_out, label
        self.key = root(seed, "init")
        self.t = 0  # rounds that are done
        task.init(self.key)  # drawn here, because a module cannot draw under vmap
        self.server = alg.init_server(task, self.key)
        self.eval_client_ids = np.arange(task.clients) if eval_client_ids is None else np.sort(eval_client_ids)
        self.unseen = task.clients + np.arange(held_out) if unseen is None else np.sort(unseen)
        self.join_rounds = join_rounds
        self.post: dict[str, np.ndarray] = {}  # split -> scores of the last PM_post of the evaluated clients
        self.stats: Tree = {}  # mean running statistics, for a global model without a client and for new clients
        self.screening: dict[str, Screening] = {}  # of updates, and of running statistics
        if screening or clip_updates is not None:
            self.screening["updates"] = Screening(alg.turns, screening, clip_updates)
        if screening and task.network.buffers:
            self.screening["stats"] = Screening(alg.turns)
        self.directions = Directions(task.clients) if screen_directions else None
        self.best: ServerState | None = None  # of the best round of personal models, if it is kept
        self.best_global: GlobalModel | None = None  # of its best round, if it is kept
        self.diverged: set[int] = set()
        self.left_out: set[int] = set()  # clients whose update was once too large, or pointed away from the others'
        if len(self.unseen):
            self._check_joining()

    def sample(self, t: int) -> np.ndarray:
        """The clients of round t, in ascending order."""
        n, ratio, low = self.task.clients, self.task.participation, self.task.participation_low
        m = int(ratio) if ratio > 1 else math.floor(ratio * n + 1e-9)
        draw = rng("sample", self.seed, t)
        if low is not None:
            m = int(draw.integers(math.floor(low * n + 1e-9), m + 1))
        return np.sort(draw.choice(n, size=max(1, m), replace=False)).astype(np.int64)

    def first_request(self, ids: np.ndarray | None = None) -> ClientRequest:
        """A training request such as an executor will get, to some clients or to those of round 0; the execution plan
        is made for it."""
        ids = self.sample(0) if ids is None else ids
        return self._request("train", ids[:1] if self.alg.turns else ids, 0, self.server)

    def _request(self, job: Any, ids: np.ndarray, t: int, server: Tree, **more: Any) -> ClientRequest:
        shared, parts = self.alg.download(self.task, server, to_device(self.task.data.device, ids), t, self.key)
        return ClientRequest(job=job, ids=ids, t=t, shared=shared, parts=parts, **{"splits": (), **more})

    # -- training -------------------------------------------------------------------------------------------------

    def train_round(self, evaluate: bool = True, cohort: np.ndarray | None = None) -> Steps[TrainedRound]:
        """One round of training of the sampled clients, or of a given cohort."""
        t, ids = self.t, self.sample(self.t) if cohort is None else np.sort(np.asarray(cohort, dtype=np.int64))
        asked = [ids[j : j + 1] for j in range(len(ids))] if self.alg.turns else [ids]
        # between evaluations PM_post matters only for clients that may not train again before the next one
        splits = ("val", "test") if evaluate or len(ids) < self.task.clients else ()
        turns: list[_Turn] = []
        for some in asked:
            turn = yield from self._train(some, t, splits)
            turns += [turn] if len(turn.ids) else []
        stats = [turn.n_and_stats for turn in turns if turn.n_and_stats is not None]
        if stats:
            n = torch.cat([n for n, _ in stats])
            self.stats = self.task.average(tree_map(lambda *rows: torch.cat(rows), *(rows for _, rows in stats)), n)
        self.t = t + 1
        trained = np.concatenate([turn.ids for turn in turns]) if turns else ids[:0]
        names = dict.fromkeys(name for turn in turns for name, value in turn.report.items() if value.ndim)
        of_clients = {
            name: np.concatenate([turn.report.get(name, np.zeros(len(turn.ids))) for turn in turns]) for name in names
        }
        last = turns[-1].report if turns else {}
        computed = sum((turn.computed for turn in turns), np.zeros(2))
        gradients, samples = (computed / max(1, len(trained))).tolist()
        return TrainedRound(
            t=t,
            cohort=trained,
            reports=of_clients,
            server_report={name: float(value) for name, value in last.items() if not value.ndim},
            bytes_down=sum(turn.bytes_down for turn in turns),
            bytes_up=sum(turn.bytes_up for turn in turns),
            gradients=gradients,
            samples=samples,
            participation=len(trained) / self.task.clients,
        )

    def _training_request(self, ids: np.ndarray, t: int, splits: tuple[str, ...]) -> ClientRequest:
        scored, next_ids = np.isin(ids, self.eval_client_ids), None if self.alg.turns else self.sample(t + 1)
        return self._request("train", ids, t, self.server, splits=splits, scored=scored, next_ids=next_ids)

    def _train(self, ids: np.ndarray, t: int, splits: tuple[str, ...]) -> Steps[_Turn]:
        """Let these clients train, and aggregate what they send."""
        scored = np.isin(ids, self.eval_client_ids)
        request = self._training_request(ids, t, splits)
        replies = yield request
        if replies.ids is not None:
            request = request.only(replies.ids)
            ids, scored = request.ids, np.isin(request.ids, self.eval_client_ids)
        if not len(ids):
            return _Turn(ids)
        assert replies.info is not None
        # here, and nowhere else in a round without evaluation, the program waits for the device
        found = replies.norms, replies.info.n, replies.scores["post"], replies.report, replies.computed
        norms, samples, scores, report, computed = to_numpy(found)
        at = np.searchsorted(self.eval_client_ids, ids[scored])
        self._remember(at, {split: found[scored] for split, found in scores.items()})
        factors = self._factors(request, replies, norms, samples)
        used = factors > 0
        if not used.all():  # 1 for clients whose upload was not used because it was not finite, or too large
            finite = np.isfinite(norms).all(1)
            report |= {"diverged": (~finite).astype(float), "left_out": (finite & ~used).astype(float)}
        up, info = replies.up, replies.info
        if (factors[used] < 1).any():
            scale = torch.from_numpy(np.where(used, factors, 1)).to(self.task.data.device)
            up = scaled_updates(self.alg, self.task, up, self._shared(request), request.parts, scale)
        if not used.all() and self.alg.takes_diverged:
            up = _without(up, torch.from_numpy(used).to(self.task.data.device))
        elif not used.all():
            up, info = self._take((up, info), used)
        if used.any() or self.alg.takes_diverged:
            server = self.alg.aggregate(self.task, self.server, up, info, t, self.key)
            self.server = tree_map(lambda v: v.contiguous(), server)  # as a resumed run has it
        of_server = self.alg.report_server(self.task, self.server, replies.info)
        report |= to_numpy({name: value.double() for name, value in of_server.items()})
        down = size_bytes(request.shared) * len(ids) + self.alg.size_of_parts(request.parts)
        stats = self._usual_stats(replies, norms, samples, used) if replies.stats else None
        return _Turn(ids, down, size_bytes(replies.up), computed.sum(0), report, stats)

    def _take(self, rows: Tree, chosen: np.ndarray) -> Tree:
        return take(rows, to_device(self.task.data.device, np.flatnonzero(chosen)))

    def _shared(self, request: ClientRequest) -> Tree:
        """What all clients of a request know of the server."""
        return {**self.alg.constants(self.task, self.key), **request.shared}

    def _factors(
        self, request: ClientRequest, replies: ClientReplies, norms: np.ndarray, samples: np.ndarray
    ) -> np.ndarray:
        """By what each update is multiplied, 0 for those that are not used; their clients are named in the log."""
        ids, t = request.ids, request.t
        used = np.isfinite(norms).all(1)
        self._warn(ids[~used], bool(replies.up), t)
        factors = used.astype(float)
        if "updates" in self.screening and replies.up:
            sent, size, _ = norms[used].T
            factors[used] = self.screening["updates"].factors(sent, size, samples[used])
            self._name(ids[used & (factors == 0)], "sent an update far larger than usual", t)
        if self.task.privacy is not None and replies.up:
            numbers = sum(v[0].numel() for v in leaves(replies.up))
            factors[used] *= norms[used, 1] <= self.task.privacy.largest(numbers) + ROUNDING * norms[used, 0]
            self._name(ids[used & (factors == 0)], "sent an update larger than clipping and noise make it", t)
        used = factors > 0
        if self.directions is not None and replies.up:
            if self.directions.judges(int(used.sum()), t):
                up, parts = self._take((replies.up, request.parts), used)
                self.directions.compare(
                    ids[used], update_vectors(self.alg, self.task, up, self._shared(request), parts)
                )
            factors[used] *= self.directions.accept(ids[used])
            self._name(ids[used & (factors == 0)], "sent updates that point away from those of others", t)
        return factors

    def _name(self, ids: np.ndarray, why: str, t: int) -> None:
        """Name clients whose updates are left out, each once."""
        for i in set(ids.tolist()) - self.left_out:
            log.warning("Client %d %s in round %d%s: such updates are left out.", i, why, t + 1, self.label)
            self.left_out.add(i)

    def _usual_stats(
        self, replies: ClientReplies, norms: np.ndarray, samples: np.ndarray, used: np.ndarray
    ) -> tuple[Tensor, Tree] | None:
        """(n, running statistics) of the clients that are used and whose statistics are not far larger than usual."""
        assert replies.info is not None
        if "stats" in self.screening and used.any():
            size = norms[used, 2]
            used = used.copy()
            used[used] = self.screening["stats"].factors(np.zeros(len(size)), size, samples[used]) > 0
        if not used.any():
            return None
        n_and_stats = replies.info.n, replies.stats
        return n_and_stats if used.all() else self._take(n_and_stats, used)

    def _warn(self, diverged: np.ndarray, uploads: bool, t: int) -> None:
        what = "upload has NaN or infinite values and is left out until it is finite again"
        for i in diverged.tolist():
            if i not in self.diverged:  # one message per client is enough
                log.warning(
                    "Client %d diverged in round %d%s: its %s.",
                    i, t + 1, self.label, what if uploads else "model has NaN or infinite values",
                )  # fmt: skip
            self.diverged.add(i)

    def _remember(self, at: np.ndarray, scores: dict[str, np.ndarray]) -> None:
        """Keep scores of PM_post, which does not change until the client trains again; `at` are positions among the
        evaluated clients."""
        for split, found in scores.items():
            if split not in self.post:
                self.post[split] = np.full((len(self.eval_client_ids), found.shape[1]), np.nan)
            self.post[split][at] = found

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluation(self, bytes_per_client: int = 0, stacked_runs: int = 1, announce: bool = False) -> Steps[Evaluation]:
        """Scores of everybody's models at the start of the next round.

        `bytes_per_client` and `stacked_runs` (how many runs are evaluated at the same time) bound the clients that one
        request asks. With `announce`, the request says how clients will be asked to train next.
        """
        params = self.alg.global_model(self.task, self.server)
        scored = []
        size = bytes_per_client + self._parts_bytes(self.eval_client_ids[:1], self.server)
        for ids in _blocks(self.eval_client_ids, size, stacked_runs):
            request = self._evaluation_request(ids, params)
            if announce and len(ids) == len(self.eval_client_ids) and not self.alg.turns and self.t < self.task.rounds:
                cohort = self.sample(self.t)
                request = replace(request, then=self._training_request(cohort, self.t, ("val", "test")))
            scored.append((yield request).scores)
        found, server = to_numpy((tree_map(lambda *rows: torch.cat(rows), *scored), self._score_server(params)))
        # a client that never trained has no PM_post: it uses what it would start from
        if self.post:
            found["post"] = {s: np.where(np.isnan(v[:, 2:3]), found["pre"][s], v) for s, v in self.post.items()}
        unseen = (yield from self._joining(bytes_per_client, stacked_runs)) if len(self.unseen) else {}
        return Evaluation(scores=found, server=server, unseen_scores=unseen)

    def _evaluation_request(self, ids: np.ndarray, params: Params | None) -> ClientRequest:
        everything = ("train", "val", "test")
        splits, of_global = ((), everything) if self.alg.pre_is_global else (everything, ("val", "test"))
        more = {} if params is None else {"global_params": params, "global_splits": of_global}
        return self._request("evaluate", ids, self.t, self.server, splits=splits, **more)

    def _parts_bytes(self, one: np.ndarray, server: Tree) -> int:
        """Size of one client's individual download."""
        return size_bytes(self._request("evaluate", one, self.t, server).parts)

    def _score_server(self, params: Params | None) -> Tensor | None:
        """Scores on the server's own samples."""
        found = self.alg.score_server(self.task, self.server, self.stats, self.key)
        rows = self.task.data.server_test
        if found is None and params is not None and rows is not None:
            slot = global_slot(self.alg, self.task, params, self.stats)
            found = score_rows(self.task, lambda x: self.task.predict(slot, x).logits, rows)
        return None if found is None else found.double()

    # -- clients that join after training ---------------------------------------------------------------------------

    def _joining(self, bytes_per_client: int, stacked_runs: int) -> Steps[dict[str, np.ndarray]]:
        """Scores, on test data, of clients that never took part: with the model they receive on arrival (`new`), and
        after they took part in `join_rounds` rounds (`joined`). Each joins as if it came alone: the server learns
        nothing from it but what it keeps for this client, and the server state is not changed."""
        now = self.now._replace(server=self._admit(self.server))
        found = []
        size = bytes_per_client + self._parts_bytes(self.unseen[:1], now.server)
        for ids in _blocks(self.unseen, size, stacked_runs):
            arrived = yield self._joining_request("evaluate", now, ids, splits=("test",))
            joined = yield from self._join(now, ids, splits=("test",))
            found.append({"new": arrived.scores["pre"]["test"], "joined": joined.scores["post"]["test"]})
        return to_numpy({view: torch.cat([one[view] for one in found]) for view in found[0]})

    def _join(self, state: ServerState, ids: np.ndarray, **more: Any) -> Steps[ClientReplies]:
        """What clients reply after the last of the rounds in which they take part to join."""
        t, server, _ = state
        replies = yield self._joining_request("train", state, ids, **more)
        for k in range(1, self.join_rounds):
            assert replies.info is not None
            server = self.alg.welcome(self.task, server, replies.up, replies.info, t + k - 1, self.key)
            later = state._replace(t=t + k, server=server)
            replies = yield self._joining_request("train", later, ids, **{**more, "join_round": k})
        return replies

    def _joining_request(self, job: str, state: ServerState, ids: np.ndarray, **more: Any) -> ClientRequest:
        return self._request(job, ids, state.t, state.server, **{"join_round": 0, "stats": state.stats, **more})

    def _admit(self, server: Tree) -> Tree:
        n = self.task.clients
        ids = torch.arange(n, n + self.held_out, device=self.task.data.device)
        return self.alg.admit(self.task, server, ids, self.key)

    # -- models to hand out -------------------------------------------------------------------------------------------

    @property
    def now(self) -> ServerState:
        """The state after the last round."""
        return ServerState(self.t, self.server, self.stats)

    def global_model(self, best: bool = False) -> GlobalModel | None:
        """The global model after the last or its best round; None for methods without one."""
        if best and self.best_global is not None:
            return self.best_global
        params = self.alg.global_model(self.task, self.server)
        return None if params is None else GlobalModel(self.t, params, self.stats)

    def model_blocks(self, bytes_per_client: int) -> list[np.ndarray]:
        """All clients, those that are held out included, in blocks whose models fit memory."""
        n = self.task.clients
        size = bytes_per_client + self._parts_bytes(np.zeros(1, np.int64), self.server)
        size += size_bytes(self.task.init(self.key))
        blocks = _blocks(np.arange(n), size, 1)
        return blocks + (_blocks(n + np.arange(self.held_out), size, 1) if self.held_out else [])

    def models(self, ids: np.ndarray, best: bool = False) -> Steps[Tree]:
        """The models of clients after the last or the best round, stacked, as the method's `model` returns them: PM_pre
        or, for clients that are held out, PM_post after they have joined."""
        state = self.best if best and self.best is not None else self.now
        if ids[0] < self.task.clients:
            request = self._request("evaluate", ids, state.t, state.server, models=True, best=state is self.best)
            return (yield request).models
        state = state._replace(server=self._admit(state.server))
        return (yield from self._join(state, ids, models=True)).models

    def _check_joining(self) -> None:
        try:
            self._request("evaluate", self.unseen[-1:], self.t, self._admit(self.server))
        except IndexError:
            raise UserError(
                f"{self.alg.name} keeps something per client at the server, but nothing for those who are held out; "
                "give the method a function 'admit', or set holdout_clients=0."
            ) from None


def _without(up: Tree, used: Tensor) -> Tree:
    """The uploads with NaN in place of those that are not used, for a method that handles diverged clients itself."""
    return tree_map(
        lambda v: v.masked_fill(~used.view(-1, *[1] * (v.dim() - 1)), math.nan) if v.is_floating_point() else v, up
    )


def _blocks(ids: np.ndarray, bytes_per_client: int, stacked_runs: int) -> list[np.ndarray]:
    """Clients in blocks whose state fits memory together with those of other runs."""
    most = min(MAX_EVAL_CLIENTS, MAX_EVAL_BYTES // max(1, bytes_per_client)) // stacked_runs
    return np.array_split(ids, -(-len(ids) // max(1, most)))

"""A whole cohort in one batched step.

Clients are sorted by their number of steps, and a step runs for the prefix that still has work. Rows of finished
clients are saved the moment they finish and never read again, so whatever is computed on them afterwards (a prefix is
rounded up to one of a few sizes) reaches nobody.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.autodiff import vmap
from fedloom.core.contract import Algorithm, Info, Phase, Slot
from fedloom.core.errors import UserError
from fedloom.core.federation import Ragged
from fedloom.core.memory import free_memory, let_go, out_of_memory
from fedloom.core.network import Params
from fedloom.core.task import Task
from fedloom.core.transfer import onto
from fedloom.core.tree import Tree, take, tree_flatten, tree_map, tree_unflatten
from fedloom.engines import schedule
from fedloom.engines.cohort import (
    Cohort,
    Outcome,
    Scores,
    eval_batch,
    eval_rows,
    global_slot,
    keep_stats,
    put_stats,
    score_client,
)
from fedloom.engines.plan import Plan
from fedloom.engines.recent import Recent
from fedloom.engines.replayed import Replayed
from fedloom.engines.runners import Captured, Functional, Runner, StackedStep, flat_rest
from fedloom.engines.schedule import Ahead, Schedule
from fedloom.kernels.convolution import convolutions

log = logging.getLogger("fedloom")

WINDOW = 1 << 20  # batch positions that are worked out ahead
TABLES = 1 << 26  # bytes of tables of evaluation that are kept
EVAL_ROWS = {"cpu": 1 << 12, "cuda": 1 << 15}  # samples per evaluation step over all clients
LEAST_ROWS = 1 << 8  # fewer save no memory that counts
BLOCK = 1 << 11  # samples of one model that own convolutions see as one client's
Where = tuple[str, int]  # which phase: of training or of adaptation, and its index


class Table(NamedTuple):
    """Samples that models score in one step, padded, a row per model."""

    rows: Tensor
    mask: Tensor


class Coming(NamedTuple):
    """Who will probably train next, and what is known of their batches."""

    t: int
    ids: np.ndarray
    seeds: np.ndarray
    run: np.ndarray
    ahead: Ahead

    def are(self, cohort: Cohort) -> bool:
        same = zip((self.ids, self.seeds, self.run), (cohort.ids, cohort.seeds, cohort.run), strict=True)
        return self.t == cohort.t and all(np.array_equal(mine, theirs) for mine, theirs in same)


class Stacked:
    def __init__(self, alg: Algorithm, task: Task, plan: Plan) -> None:
        self.alg, self.task, self.plans = alg, task, [plan]
        self.population = task  # has the clients' samples; `task` is what the method sees
        self.phases = {"train": alg.phases(task), "adapt": alg.adapt(task)}
        self.runners: dict[tuple[Where, int], Runner] = {}  # by phase and size of chunks
        self.tables: Recent[list[Table]] = Recent(TABLES)  # by lists of samples, clients and width
        self.joined: Recent[Tensor] = Recent(TABLES)  # by lists of samples and clients
        self.coming: Coming | None = None
        self.pool = torch.cuda.graph_pool_handle() if plan.replay == "captured" else None
        still = task.data.x, task.data.y, *(split.flat for split in task.data.splits.values())
        self.replayed = Replayed(plan.replay != "eager", self.pool, still)

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.plans[0] = plan

    @property
    def rows(self) -> int:
        """Samples per evaluation step."""
        return self.plan.rows or EVAL_ROWS[self.task.data.device.type]

    def serving(self, population: Task) -> Stacked:
        other = copy.copy(self)  # with the same runners and the same plan
        other.population = population
        return other

    @torch.no_grad()
    def train(self, cohort: Cohort, splits: tuple[str, ...]) -> Outcome:
        found = self._in_chunks(cohort, lambda chunk: self._train(chunk, splits))
        self._look_ahead(cohort)
        return found

    @torch.no_grad()
    def score_personal(self, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        return self._in_chunks(cohort, lambda chunk: self._score_personal(chunk, splits))

    @torch.no_grad()
    def score_global(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        if not cohort.stats:
            return self._fitting(lambda: self._score_shared(params, cohort, splits), len(cohort))

        def predict(stats: Tree, params: Params, x: Tensor) -> Tensor:
            return self.task.predict(global_slot(self.alg, self.task, params, stats), x).logits

        def job(chunk: Cohort) -> Scores:
            return {s: self._score("global", chunk.stats, params, chunk, s, predict) for s in splits}

        return self._in_chunks(cohort, job)

    def _in_chunks(self, cohort: Cohort, job: Callable[[Cohort], Any]) -> Any:
        return self._fitting(lambda: self._all_chunks(cohort, job), len(cohort))

    def _fitting(self, job: Callable[[], Any], clients: int) -> Any:
        """What the job gives; when memory is not enough for it, it starts again with less at once."""
        while True:
            try:
                return job()
            except Exception as error:
                if not out_of_memory(error):
                    raise
            self._take_less(clients)

    def _take_less(self, clients: int) -> None:
        """Half as many clients and samples at once, after memory was not enough."""
        before, rows = min(self.plan.chunk, clients), self.rows
        self.runners.clear()
        self.replayed.clear()
        self.tables.clear()
        self.joined.clear()
        let_go()
        if before == 1 and rows <= LEAST_ROWS:
            where = self.task.data.device
            raise UserError(
                f"The model of one client does not fit the memory of {where} ({free_memory(where) / 1e9:.1f} GB free); "
                "use a smaller batch_size, a smaller model, or another device."
            )
        self.plan = replace(self.plan, rows=max(LEAST_ROWS, rows // 2))
        if before > 1:
            self.plan = replace(self.plan, chunk=-(-before // 2))
            log.warning("Out of memory with %d clients at once: going on with %d.", before, self.plan.chunk)
        else:
            log.warning("Out of memory with one client: going on with %d samples scored at once.", self.rows)

    def _all_chunks(self, cohort: Cohort, job: Callable[[Cohort], Any]) -> Any:
        """Equal chunks of at most `plan.chunk` clients by ascending id, in each the largest first; results in the
        cohort's order, on which they do not depend."""
        groups = self._groups(cohort.ids)
        if len(groups) == 1 and not cohort.by_run and np.array_equal(groups[0], np.arange(len(cohort))):
            return job(cohort)
        done = [job(cohort.rows(group)) for group in groups]
        back = onto(self.task.data.device, np.argsort(np.concatenate(groups)))
        return tree_map(lambda *rows: torch.cat(rows)[back], *done)

    def _groups(self, ids: np.ndarray) -> list[np.ndarray]:
        """The places of the clients of each chunk."""
        sizes = self.population.data.splits["train"].sizes[ids]
        chunks = np.array_split(np.argsort(ids, kind="stable"), -(-len(ids) // self.plan.chunk))
        return [chunk[np.argsort(-sizes[chunk], kind="stable")] for chunk in chunks]

    # -- training -----------------------------------------------------------------------------------------------

    def _train(self, cohort: Cohort, splits: tuple[str, ...]) -> Outcome:
        work = self.begin(cohort)
        for index, phase in enumerate(self.phases["train"]):
            work = self.run_phase(("train", index), phase, work, cohort)
        own, up = self.finish(work, cohort)
        scores = self._score_trained(work, cohort, splits)
        return Outcome(own, up, keep_stats(work), self.report(work, cohort), scores)

    def _score_trained(self, work: Tree, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        """Scores of PM_post, for those clients for whom anybody asks."""
        some, device = np.flatnonzero(cohort.scored), self.task.data.device
        nothing = torch.full((len(cohort), 3), torch.nan, dtype=self.task.dtype, device=device)
        if not splits or not len(some):
            return dict.fromkeys(splits, nothing)
        index = onto(device, some)
        if len(some) < len(cohort):
            work, cohort = take(work, index), cohort.rows(some)
        model = self.trained(work, cohort)
        return {s: nothing.index_copy(0, index, self._score_each(model, cohort, s)) for s in splits}

    def _score_personal(self, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        work = self.begin(cohort)
        for index, phase in enumerate(self.phases["adapt"]):
            work = self.run_phase(("adapt", index), phase, work, cohort)
        model = self._each("model", self.alg.model, cohort, work, cohort.info)
        return {s: self._score_each(model, cohort, s) for s in splits}

    def begin(self, cohort: Cohort) -> Tree:
        def everyone(shared: Tree, *rows: Tree) -> Tree:
            def one(parts: Tree, own: Tree, stats: Tree, info: Info) -> Tree:
                return put_stats(self.alg.begin(self.task, {**shared, **parts}, own, info), stats)

            return _solid(vmap(one)(*rows))

        return self.replayed("begin", everyone, cohort.shared, cohort.parts, cohort.own, cohort.stats, cohort.info)

    def _each(self, name: Hashable, f: Callable[..., Any], cohort: Cohort, work: Tree, *rest: Tree) -> Any:
        """f(task, work, down, *rest) for every client."""

        def everyone(shared: Tree, *rows: Tree) -> Any:
            def one(work: Tree, parts: Tree, *rest: Tree) -> Any:
                return f(self.task, work, {**shared, **parts}, *rest)

            return _solid(vmap(one)(*rows))

        return self.replayed(name, everyone, cohort.shared, work, cohort.parts, *rest)

    def report(self, work: Tree, cohort: Cohort) -> Tree:
        if type(self.alg).report is Algorithm.report:  # which says nothing
            return {}
        return self._each("report", self.alg.report, cohort, work, cohort.info)

    def finish(self, work: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        """What is kept, and what is sent."""
        own, up = self._each("finish", self.alg.finish, cohort, work, cohort.own, cohort.info)
        return own, up

    def trained(self, work: Tree, cohort: Cohort) -> Any:
        """PM_post"""
        info = cohort.info._replace(first=torch.zeros_like(cohort.info.first))
        return self._each("model", self.alg.model, cohort, work, info)

    def enter(self, where: Where, phase: Phase, work: Tree, cohort: Cohort) -> Tree:
        return work if phase.enter is None else self._each(where, phase.enter, cohort, work, cohort.info)

    def epochs(self, phase: Phase, work: Tree, cohort: Cohort) -> np.ndarray:
        decide = phase.epochs
        if isinstance(decide, int):
            return np.full(len(cohort), decide)
        return vmap(lambda work, info: decide(self.task, work, info))(work, cohort.info).long().cpu().numpy()

    def run_phase(self, where: Where, phase: Phase, work: Tree, cohort: Cohort) -> Tree:
        task, work = self.task, self.enter(where, phase, work, cohort)
        epochs = self.epochs(phase, work, cohort)
        if phase.until is None:
            return self._run(where, phase, work, cohort, self._schedule(phase, cohort, epochs))
        epoch, going = 0, epochs > 0
        while going.any():
            some = np.flatnonzero(going)
            index = onto(task.data.device, some)
            few = cohort.rows(some)
            timetable = self._schedule(phase, few, np.ones_like(some), epoch)
            rows = self._run(where, phase, take(work, index), few, timetable)
            work = tree_map(lambda mine, new: mine.index_copy(0, index, new), work, rows)  # noqa: B023
            epoch += 1
            going[some[vmap(phase.until)(rows).cpu().numpy()]] = False
            going &= epochs > epoch
        return work

    def _schedule(self, phase: Phase, cohort: Cohort, epochs: np.ndarray, first_epoch: int = 0) -> Schedule:
        if self.coming and phase is self.phases["train"][0] and self.coming.are(cohort):
            return self.coming.ahead.timetable
        who = cohort.seeds, cohort.ids, cohort.t
        return schedule.build(self.population, phase, *who, epochs, first_epoch, cohort.run, self._call)

    @property
    def _call(self) -> schedule.Call:
        """Batches are worked out from traces only where these are captured: of small operations on integers, a CPU's
        take as long as traced ones."""
        return schedule.plainly if self.pool is None else self.replayed

    def _look_ahead(self, cohort: Cohort) -> None:
        """While a GPU is at work, find the first batches of those who will come next."""
        self.coming, ids = None, cohort.coming
        if ids is None or self.pool is None or len(ids) != len(cohort) or len(ids) > self.plan.chunk:
            return
        phase = self.phases["train"][0]
        if phase.until is not None or not isinstance(phase.epochs, int):  # it depends on what they do
            return
        places, t = self._groups(ids)[0], cohort.t + 1
        ids, seeds, run = ids[places], cohort.seeds[places], cohort.run[places]
        with contextlib.suppress(torch.OutOfMemoryError):  # then it is done when they come
            epochs = np.full(len(ids), phase.epochs)
            timetable = schedule.build(self.population, phase, seeds, ids, t, epochs, run=run, call=self._call)
            ahead = self._ahead(timetable)
            if timetable.steps[0]:
                ahead.look(self.plan.prefix(int((timetable.steps > 0).sum())))
                if runner := self.runners.get((("train", 0), self.plan.chunk)):
                    runner.load(ahead.window)
            self.coming = Coming(t, ids, seeds, run, ahead)

    def _ahead(self, timetable: Schedule) -> Ahead:
        coming, self.coming = self.coming, None  # it serves once
        if coming and coming.ahead.timetable is timetable:
            return coming.ahead
        return Ahead(self.task, timetable, self._window_length(timetable.batch * timetable.group), self._call)

    def _run(self, where: Where, phase: Phase, work: Tree, cohort: Cohort, timetable: Schedule) -> Tree:
        order = np.argsort(-timetable.steps, kind="stable")
        if not np.array_equal(order, np.arange(len(order))):
            index = onto(self.task.data.device, order)
            done = self._run(where, phase, take(work, index), cohort.rows(order), timetable.rows(order))
            return take(done, torch.argsort(index))
        steps = timetable.steps
        if not steps[0]:
            return work
        state, spec = tree_flatten(work)
        runner = self.runner(where, phase, work, cohort)
        runner.start(state, *flat_rest(cohort))
        ahead = self._ahead(timetable)
        ragged = steps[-1] != steps[0]
        result = [v.clone() for v in state] if ragged else []
        for stop in np.unique(steps[steps > 0]).tolist():  # the steps after which some clients are done
            active, left = int((steps >= stop).sum()), int((steps > stop).sum())
            prefix = self.plan.prefix(active)
            for window, first, last in ahead.until(stop, prefix):
                runner.advance(window, first, last, prefix)
            if ragged:
                for mine, new, moves in zip(result, runner.rows(left, active), runner.moves, strict=True):
                    if moves:
                        mine[left:active] = new
        return tree_unflatten(result if ragged else runner.rows(0, len(cohort)), spec)

    def _window_length(self, batch: int) -> int:
        return max(1, WINDOW // (self.plan.chunk * batch))

    def runner(self, where: Where, phase: Phase, work: Tree, cohort: Cohort) -> Runner:
        which = where, self.plan.chunk
        if which not in self.runners:
            step = StackedStep(self.task, phase, work, cohort, self.plan)
            if self.plan.replay == "captured":
                length = self._window_length((phase.batch or self.task.batch_size) * phase.group)
                self.runners[which] = Captured(step, self.plan, length, self.pool)
            else:
                self.runners[which] = Functional(step, traced=self.plan.replay == "traced")
        return self.runners[which]

    # -- scores -------------------------------------------------------------------------------------------------

    def _score_each(self, models: Tree, cohort: Cohort, split: str) -> Tensor:
        def predict(model: Any, _: Tree, x: Tensor) -> Tensor:
            return self.alg.logits(self.task, model, x)

        return self._score("personal", models, {}, cohort, split, predict)

    def _score(
        self,
        name: str,
        models: Tree,
        shared: Tree,
        cohort: Cohort,
        split: str,
        predict: Callable[[Any, Tree, Tensor], Tensor],
    ) -> Tensor:
        """Scores of stacked models, each on its client's samples; predict(model, shared, x) gives logits."""
        data = self.population.data
        lists = data.splits[split]
        if self.plan.scoring == "per-client":
            each = ((take(models, j), lists[int(i)]) for j, i in enumerate(cohort.ids))
            return torch.stack([score_client(self.task, partial(predict, model, shared), rows) for model, rows in each])
        most = max(8 * len(cohort), self.rows)
        width = max(1, eval_rows(self.task, most) // len(cohort))
        total = torch.zeros(len(cohort), 3, dtype=self.task.dtype, device=data.device)

        def everyone(shared: Tree, models: Tree, x: Tensor, y: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
            def one(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
                return self.task.score(predict(model, shared, x), y, mask).sum(0)

            with convolutions(self.plan.convolutions):
                return vmap(one)(models, data.prepare(x[rows]), y[rows], mask)

        key = lists, cohort.ids.tobytes(), width
        for rows, mask in self.tables.get(key, lambda: self._tables(lists, cohort.ids, width)):
            some = take(models, slice(len(rows)))
            total[: len(rows)] += self.replayed(name, everyone, shared, some, data.x, data.y, rows, mask)
        return total

    def _tables(self, lists: Ragged, ids: np.ndarray, width: int) -> list[Table]:
        """All samples of these clients, at most `width` of each at a time."""
        device, sizes = lists.flat.device, lists.sizes[ids]
        longest, found = int(sizes.max(initial=0)), []
        own = np.minimum(lists.starts[ids], len(lists.flat) - 1)[:, None]  # padding stays within a client's samples
        for low in range(0, longest, width):
            prefix = int(np.flatnonzero(sizes > low)[-1]) + 1
            at = low + np.arange(min(width, longest))
            valid = at < sizes[:prefix, None]
            rows = lists.flat[onto(device, np.where(valid, own[:prefix] + at, own[:prefix]))]
            found.append(Table(rows, onto(device, valid).to(self.task.dtype)))
        return found

    def _score_shared(self, params: Params, cohort: Cohort, splits: tuple[str, ...]) -> Scores:
        """Scores of one model on every client's samples: no padding, one pass over all of them."""
        data, ids = self.population.data, cohort.ids
        lists = [data.splits[split] for split in splits]
        rows = self.joined.get((*lists, ids.tobytes()), lambda: torch.cat([v.joined(ids) for v in lists]))
        scores = self._score_samples(params, rows).cpu().double()
        lengths = torch.from_numpy(np.concatenate([v.sizes[ids] for v in lists]))
        sums = torch.segment_reduce(scores, "sum", lengths=lengths, initial=0).to(self.task.dtype)
        return dict(zip(splits, sums.split(len(ids)), strict=True))

    def _score_samples(self, params: Params, rows: Tensor) -> Tensor:
        data, most = self.population.data, eval_batch(self.task, self.rows // 4)
        if not len(rows):
            return torch.zeros(0, 3, dtype=self.task.dtype, device=data.device)

        def score(params: Params, x: Tensor, y: Tensor) -> Tensor:
            everyone = torch.ones(len(x), dtype=self.task.dtype, device=data.device)
            return self.task.score(self.task.predict(Slot(params, {}, {}), x).logits, y, everyone)

        def blocks(params: Params, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
            with convolutions(self.plan.convolutions):
                return vmap(partial(score, params))(data.prepare(x[rows]), y[rows]).flatten(0, 1)

        if self.plan.convolutions is None:
            return torch.cat([score(params, data.samples(some), data.y[some]) for some in torch.split(rows, most)])
        steps = _blocks(rows, most)
        return torch.cat([self.replayed("shared", blocks, params, data.x, data.y, some) for some in steps])[: len(rows)]


def _blocks(rows: Tensor, most: int) -> Tensor:
    """The rows in steps of at most `most`, each in a few blocks (steps, blocks, rows), all of one size, so that one
    trace serves them all. The first row fills up the end."""
    steps = -(-len(rows) // most)
    blocks = -(-len(rows) // (steps * BLOCK))
    size = -(-len(rows) // (steps * blocks))
    more = steps * blocks * size - len(rows)
    return torch.cat([rows, rows[:1].expand(more)]).view(steps, blocks, size)


def _solid(tree: Tree) -> Tree:
    """vmap returns values that are the same for all clients without memory of their own."""
    return tree_map(lambda x: x.contiguous(), tree)

"""Scoring the models of many clients at once."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.algorithm import Algorithm, Slot
from fedloom.core.autodiff import vmap
from fedloom.core.federation import Ragged, gather_rows
from fedloom.core.task import Task
from fedloom.core.tree import Params, Tree, take
from fedloom.device.transfer import to_device
from fedloom.engine.cohort import Cohort, Scores, global_slot
from fedloom.engine.executors.scoring import eval_batch, fitting_rows, logits_of_rows, score_rows
from fedloom.engine.graph.function_cache import FunctionCache
from fedloom.engine.lru_cache import LRUCache
from fedloom.engine.plan import Plan
from fedloom.nn.kernels.convolution import convolutions

CACHE_BYTES = 1 << 26  # of tables of samples that are kept between evaluations
EVAL_ROWS = {"cpu": 1 << 12, "cuda": 1 << 15}  # samples per evaluation step over all clients
MIN_EVAL_ROWS = 1 << 8  # fewer would not save a relevant amount of memory
SHARED_MODEL_BLOCK = 1 << 11  # samples of one model that stacked convolutions treat as one client's


Predict = Callable[[Any, Tree, Tensor], Tensor]  # (one client's model, what all share, samples) -> logits


class EvalTable(NamedTuple):
    """Samples that models score in one step, padded, one row per model."""

    rows: Tensor
    mask: Tensor


class StackedScoring:
    """Scores stacked models on their clients' samples, and one shared model on everybody's."""

    def __init__(self, alg: Algorithm, task: Task, population: Task, call: FunctionCache) -> None:
        self.alg, self.task, self.population, self.call = alg, task, population, call
        self.tables: LRUCache[list[EvalTable]] = LRUCache(CACHE_BYTES)  # by lists of samples, clients and width
        self.joined: LRUCache[Tensor] = LRUCache(CACHE_BYTES)  # by lists of samples and clients

    def clear(self) -> None:
        """Release cached tables."""
        self.tables.clear()
        self.joined.clear()

    def rows(self, plan: Plan) -> int:
        """Samples per evaluation step."""
        return plan.rows or EVAL_ROWS[self.task.data.device.type]

    def personal(self, models: Tree, cohort: Cohort, split: str, plan: Plan) -> Tensor:
        """Scores of stacked personal models, each on its client's samples."""

        return self._scores("personal", models, {}, cohort, split, self._predict_personal, plan)

    def global_model(self, params: Params, cohort: Cohort, split: str, plan: Plan) -> Tensor:
        """Scores of a global model that has the running statistics of the client."""
        return self._scores("global", cohort.stats, params, cohort, split, self._predict_global, plan)

    def logits(self, models: Tree, ids: np.ndarray, split: str, plan: Plan) -> Tensor:
        """Outputs of stacked personal models, one row per sample, client after client."""
        return self._logits("personal logits", models, {}, ids, split, self._predict_personal, plan)

    def global_logits(self, params: Params, cohort: Cohort, split: str, plan: Plan) -> Tensor:
        """Outputs of a global model, one row per sample, client after client."""
        if cohort.stats:
            return self._logits("global logits", cohort.stats, params, cohort.ids, split, self._predict_global, plan)
        rows = self.population.data.splits[split].joined(cohort.ids)
        return logits_of_rows(self.task, partial(self._predict_global, {}, params), rows)

    def _predict_personal(self, model: Any, _: Tree, x: Tensor) -> Tensor:
        return self.alg.logits(self.task, model, x)

    def _predict_global(self, stats: Tree, params: Params, x: Tensor) -> Tensor:
        return self.task.predict(global_slot(self.alg, self.task, params, stats), x).logits

    def _scores(
        self, name: str, models: Tree, shared: Tree, cohort: Cohort, split: str, predict: Predict, plan: Plan
    ) -> Tensor:
        """Scores of stacked models, each on its client's samples."""
        data = self.population.data
        lists = data.splits[split]
        if plan.scoring == "per-client":
            each = ((take(models, j), lists[int(i)]) for j, i in enumerate(cohort.ids))
            return torch.stack([score_rows(self.task, partial(predict, model, shared), rows) for model, rows in each])
        total = torch.zeros(len(cohort), 3, dtype=self.task.dtype, device=data.device)

        def everyone(shared: Tree, models: Tree, x: Tensor, y: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
            def one(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
                return self.task.score(predict(model, shared, x), y, mask).sum(0)

            with convolutions(plan.convolutions):
                return vmap(one)(models, data.prepare(gather_rows(x, rows)), gather_rows(y, rows), mask)

        for rows, mask in self._steps(lists, cohort.ids, plan):
            some = take(models, slice(len(rows)))
            total[: len(rows)] += self.call(name, everyone, shared, some, data.x, data.y, rows, mask)
        return total

    def _logits(
        self, name: str, models: Tree, shared: Tree, ids: np.ndarray, split: str, predict: Predict, plan: Plan
    ) -> Tensor:
        """Outputs of stacked models, each on its client's samples; as many clients at once as the plan says."""
        data = self.population.data
        lists = data.splits[split]

        def everyone(shared: Tree, models: Tree, x: Tensor, rows: Tensor) -> Tensor:
            with convolutions(plan.convolutions):
                return vmap(lambda model, x: predict(model, shared, x))(models, data.prepare(gather_rows(x, rows)))

        found = [torch.zeros(0, *self.task.network.positions, self.task.network.outputs, device=data.device)]
        for low in range(0, len(ids), plan.chunk):
            some, chunk = ids[low : low + plan.chunk], take(models, slice(low, low + plan.chunk))
            if plan.scoring == "per-client":
                each = ((take(chunk, j), lists[int(i)]) for j, i in enumerate(some))
                found += [logits_of_rows(self.task, partial(predict, model, shared), rows) for model, rows in each]
                continue
            each_step = [
                self.call(name, everyone, shared, take(chunk, slice(len(rows))), data.x, rows)
                for rows, _ in self._steps(lists, some, plan)
            ]
            for j, size in enumerate(lists.sizes[some].tolist()):
                found += [torch.cat([step[j] for step in each_step if j < len(step)])[:size]] if size else []
        return torch.cat([v.to(self.task.dtype) for v in found])

    def _steps(self, lists: Ragged, ids: np.ndarray, plan: Plan) -> list[EvalTable]:
        most = max(8 * len(ids), self.rows(plan))
        width = max(1, fitting_rows(self.task, most) // len(ids))
        key = lists, ids.tobytes(), width
        return self.tables.get(key, lambda: self._tables(lists, ids, width))

    def _tables(self, lists: Ragged, ids: np.ndarray, width: int) -> list[EvalTable]:
        """All samples of these clients, at most `width` of each at a time."""
        device, sizes = lists.flat.device, lists.sizes[ids]
        longest, found = int(sizes.max(initial=0)), []
        start = np.minimum(lists.starts[ids], len(lists.flat) - 1)[:, None]  # padding repeats a sample of the client
        for low in range(0, longest, width):
            prefix = int(np.flatnonzero(sizes > low)[-1]) + 1
            at = low + np.arange(min(width, longest))
            valid = at < sizes[:prefix, None]
            rows = lists.flat[to_device(device, np.where(valid, start[:prefix] + at, start[:prefix]))]
            found.append(EvalTable(rows, to_device(device, valid).to(self.task.dtype)))
        return found

    def shared_model(self, params: Params, cohort: Cohort, splits: tuple[str, ...], plan: Plan) -> Scores:
        """Scores of one model on every client's samples: one pass over all of them, without padding."""
        data, ids = self.population.data, cohort.ids
        lists = [data.splits[split] for split in splits]
        rows = self.joined.get((*lists, ids.tobytes()), lambda: torch.cat([v.joined(ids) for v in lists]))
        scores = self._score_samples(params, rows, plan).cpu().double()
        lengths = torch.from_numpy(np.concatenate([v.sizes[ids] for v in lists]))
        sums = torch.segment_reduce(scores, "sum", lengths=lengths, initial=0).to(self.task.dtype)
        return dict(zip(splits, sums.split(len(ids)), strict=True))

    def _score_samples(self, params: Params, rows: Tensor, plan: Plan) -> Tensor:
        data, most = self.population.data, eval_batch(self.task, self.rows(plan) // 4)
        if not len(rows):
            return torch.zeros(0, 3, dtype=self.task.dtype, device=data.device)

        def score(params: Params, x: Tensor, y: Tensor) -> Tensor:
            mask = torch.ones(len(x), dtype=self.task.dtype, device=data.device)
            return self.task.score(self.task.predict(Slot(params, {}, {}), x).logits, y, mask)

        def blocks(params: Params, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
            with convolutions(plan.convolutions):
                return vmap(partial(score, params))(data.prepare(gather_rows(x, rows)), gather_rows(y, rows)).flatten(
                    0, 1
                )

        if plan.convolutions is None:
            return torch.cat([score(params, data.samples(some), data.y[some]) for some in torch.split(rows, most)])
        steps = _equal_blocks(rows, most)
        return torch.cat([self.call("shared", blocks, params, data.x, data.y, some) for some in steps])[: len(rows)]


def _equal_blocks(rows: Tensor, most: int) -> Tensor:
    """The rows in steps of at most `most`, each in a few blocks: (steps, blocks, rows), all of one size, so that one
    trace serves them all. The first row pads the end."""
    steps = -(-len(rows) // most)
    blocks = -(-len(rows) // (steps * SHARED_MODEL_BLOCK))
    size = -(-len(rows) // (steps * blocks))
    more = steps * blocks * size - len(rows)
    return torch.cat([rows, rows[:1].expand(more)]).view(steps, blocks, size)

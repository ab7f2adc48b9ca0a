"""MAPPER: a client's model lies on the line between a global and a personal one; the client finds out where.

Mansour, Mohri, Ro, Suresh. Three Approaches for Personalization with Applications to Federated Learning.
arXiv:2002.10619, 2020.
"""

from dataclasses import dataclass

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts.measuring import measuring, smallest, tally
from fedloom.core.algorithm import Phase
from fedloom.core.autodiff import vmap
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import axpy, scale, sub, take, tree_map


@dataclass(frozen=True)
class Mapper(FedAvg):
    name = "mapper"
    source = "Mansour et al."
    paper = "Three Approaches for Personalization with Applications to Federated Learning"
    year = 2020
    private = "model theta_i, weight lambda_i"
    pre_is_global = False

    lambdas: tuple[float, ...] = setting((0.25, 0.5, 0.75), "candidates for lambda_i", low=0, high=1)

    def check(self, task):
        if not self.lambdas:
            raise UserError("mapper needs at least one candidate; set lambdas=0.5, for example.")

    def init_client(self, task, key, key_i):
        lam = torch.zeros((), dtype=task.dtype, device=key_i.device)  # until it trains, a client uses w
        return {"theta": task.init(key), "lam": lam}

    def begin(self, task, down, state, info):
        return {"w": task.slot(down["w"]), **state}

    def phases(self, task):
        return [
            Phase(self.personal_step, task.epochs, enter=self.start_candidates),
            measuring(task, self.measure),
            Phase(self.global_step, task.epochs, enter=self.keep_best),
        ]

    def start_candidates(self, task, work, down, info):
        """For every candidate a theta of its own, with running statistics that are not kept."""
        lam = torch.cat([torch.full((1,), lam, dtype=task.dtype, device=info.n.device) for lam in self.lambdas])
        theta = task.slot(work["theta"])._replace(buffers=work["w"].buffers)
        tried = tree_map(lambda v: v.expand(len(lam), *v.shape), theta)
        return {"w": work["w"], "tried": tried, "lam": lam, "seen": lam.new_zeros(len(lam), 3)}

    def personal_step(self, task, work, batch, down, info):
        def one(theta, lam):
            g, at = task.grad(theta._replace(params=mixed(lam, theta.params, down["w"])), batch)
            return task.step(theta._replace(buffers=at.buffers), scale(g, lam))

        return {**work, "tried": vmap(one)(work["tried"], work["lam"])}

    def measure(self, task, work, batch, down, info):
        def one(theta, lam):
            return tally(task, theta._replace(params=mixed(lam, theta.params, down["w"])), batch)

        return {**work, "seen": work["seen"] + vmap(one)(work["tried"], work["lam"])}

    def keep_best(self, task, work, down, info):
        j = smallest(work["seen"][:, 1])
        return {"w": work["w"], "theta": take(work["tried"].params, j), "lam": work["lam"][j]}

    def global_step(self, task, work, batch, down, info):
        w, lam = work["w"], work["lam"]
        g, at = task.grad(w._replace(params=mixed(lam, work["theta"], w.params)), batch)
        return {**work, "w": task.step(w._replace(buffers=at.buffers), scale(g, 1 - lam))}

    def report(self, task, work, down, info):
        return {"lambda": work["lam"]}

    def finish(self, task, work, down, state, info):
        return {"theta": work["theta"], "lam": work["lam"]}, {"w": work["w"].params}

    def model(self, task, work, down, info):
        w = work["w"]
        return w._replace(params=mixed(work["lam"], work["theta"], w.params))


def mixed(lam, theta, w):
    """lambda theta + (1 - lambda) w, written so that equal models give the same for every lambda, to the bit."""
    return axpy(lam, sub(theta, w), w)

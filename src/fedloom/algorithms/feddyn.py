"""FedDyn: every client adds a linear and a quadratic term to its loss and updates them in each round in which it
trains, so that the minima of the clients come to agree with that of all.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated Learning Based on Dynamic Regularization. ICLR 2021.
"""

from dataclasses import dataclass

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.settings import setting
from fedloom.core.tree import axpy, sub, zeros_like


@dataclass(frozen=True)
class FedDyn(FedAvg):
    name = "feddyn"
    source = "Acar et al., ICLR"
    paper = "Federated Learning Based on Dynamic Regularization"
    year = 2021
    private = "dual vector lam_i"
    server_step = "its dual vectors belong to its own step"

    alpha: float = setting(0.01, "a, strength of the quadratic term", above=0)
    adaptive: bool = setting(False, "a_i = a * mean(n) / n_i instead of a (authors' code)")

    def init_server(self, task, key):
        w = task.init(key)
        return {"w": w, "h": zeros_like(w)}

    def init_client(self, task, key, key_i):
        return {"lam": zeros_like(task.init(key))}

    def download(self, task, server, ids, t, key):
        return {"w": server["w"]}, {}

    def strength(self, task, info):
        """a_i"""
        if not self.adaptive:
            return self.alpha
        return self.alpha * task.data.mean_samples / info.n.to(task.dtype)

    def begin(self, task, down, state, info):
        return {"w": task.slot(down["w"]), "lam": state["lam"]}

    def step(self, task, work, batch, down, info):
        g, theta = task.grad(work["w"], batch)
        pull = sub(theta.params, down["w"])  # gradient of ||theta - w^t||^2 / 2
        g = axpy(self.strength(task, info), pull, sub(g, work["lam"]))
        return {**work, "w": task.step(theta, g)}

    def finish(self, task, work, down, state, info):
        theta = work["w"].params
        return {"lam": axpy(-self.strength(task, info), sub(theta, down["w"]), state["lam"])}, {"w": theta}

    def aggregate(self, task, server, up, info, t, key):
        average = task.average(up["w"])
        share = len(info.n) / task.clients  # who did not train counts as not having moved
        h = axpy(-self.alpha * share, sub(average, server["w"]), server["h"])
        return {"w": axpy(-1 / self.alpha, h, average), "h": h}

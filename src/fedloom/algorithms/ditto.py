"""Ditto: every client keeps a model of its own, pulled towards the global one, which is FedAvg's.

Li, Hu, Beirami, Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
"""

from dataclasses import dataclass

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.settings import setting
from fedloom.core.tree import axpy, sub, where


@dataclass(frozen=True)
class Ditto(Algorithm):
    name = "ditto"
    source = "Li et al., ICML"
    paper = "Ditto: Fair and Robust Federated Learning Through Personalization"
    year = 2021
    shared = "model w"
    private = "model v_i"
    uploads = {"w": "the trained global model"}
    averages = True

    lam: float = setting(0.1, "lambda, strength of the pull towards w", low=0)
    personal_epochs: int = setting(1, "E_p, epochs on the personal model", low=0)

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        return {"v": task.init(key)}

    def begin(self, task, down, state, info):
        return {"v": task.slot(state["v"]), "w": task.slot(down["w"])}

    def phases(self, task):
        return [Phase(self.personal_step, self.personal_epochs), Phase(self.global_step, task.epochs)]

    def personal_step(self, task, work, batch, down, info):
        g, v = task.grad(work["v"], batch)
        pull = sub(v.params, down["w"])  # v_i - w^t
        return {**work, "v": task.step(v, axpy(self.lam, pull, g))}

    def global_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {**work, "w": task.step(w, g)}

    def finish(self, task, work, down, state, info):
        return {"v": work["v"].params}, {"w": work["w"].params}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"], info.n)}

    def model(self, task, work, down, info):
        return where(info.first, work["w"], work["v"])  # a client that never trained uses the global model

    def global_model(self, task, server):
        return server["w"]

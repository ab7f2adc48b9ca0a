"""SCAFFOLD: control variates correct the drift of local steps towards the client's own optimum.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020. Option II for the control variates.
"""

from dataclasses import dataclass

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import add, axpy, scale, sub, where, zeros_like


@dataclass(frozen=True)
class Scaffold(FedAvg):
    name = "scaffold"
    source = "Karimireddy et al., ICML"
    paper = "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning"
    year = 2020
    shared = "model w, control variate c"
    private = "control variate c_i"
    uploads = {"dy": "the change of the model", "dc": "the change of the control variate"}
    server_step = "its control variates belong to its own step"

    eta_g: float = setting(1.0, "eta_g, step size of the server", above=0)

    def check(self, task):
        if task.momentum:
            raise UserError(f"scaffold's control variates assume plain SGD; set momentum=0, not {task.momentum:g}.")
        if not task.optimizer.plain:
            kind = task.optimizer.kind
            raise UserError(f"scaffold's control variates assume plain SGD; set optimizer=sgd, not {kind}.")

    def init_server(self, task, key):
        w = task.init(key)
        return {"w": w, "c": zeros_like(w)}

    def init_client(self, task, key, key_i):
        return {"c": zeros_like(task.init(key))}

    def begin(self, task, down, state, info):
        correction = sub(down["c"], state["c"])
        return {
            "w": task.slot(down["w"]),
            "correction": correction,
            "steps": torch.zeros_like(info.n, dtype=task.dtype),
        }

    def step(self, task, work, batch, down, info):
        g, y = task.grad(work["w"], batch)
        return {**work, "w": task.step(y, add(g, work["correction"])), "steps": work["steps"] + 1}

    def finish(self, task, work, down, state, info):
        delta = sub(work["w"].params, down["w"])  # y_i - w^t
        trained = work["steps"] > 0
        rate = 1 / (torch.clamp(work["steps"], min=1) * task.in_round(info.t).eta)
        change = axpy(-rate, delta, scale(down["c"], -1.0))  # c_i^+ - c_i
        change = where(trained, change, zeros_like(change))
        return {"c": add(state["c"], change)}, {"dy": delta, "dc": change}

    def aggregate(self, task, server, up, info, t, key):
        w = axpy(self.eta_g, task.average(up["dy"]), server["w"])
        share = len(info.n) / task.clients  # who did not train counts as not having changed its variate
        return {"w": w, "c": axpy(share, task.average(up["dc"]), server["c"])}

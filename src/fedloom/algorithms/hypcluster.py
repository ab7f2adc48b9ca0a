"""HypCluster: there are a few global models; a client trains, in every round, the one that fits its data best.

Mansour, Mohri, Ro, Suresh. Three Approaches for Personalization with Applications to Federated Learning.
arXiv:2002.10619, 2020.
"""

from dataclasses import dataclass

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts.measuring import measuring, smallest, tally_each
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.errors import UserError
from fedloom.core.keys import fold
from fedloom.core.settings import setting
from fedloom.core.tree import take, tree_map


@dataclass(frozen=True)
class HypCluster(FedAvg):
    name = "hypcluster"
    source = "Mansour et al."
    paper = "Three Approaches for Personalization with Applications to Federated Learning"
    year = 2020
    shared = "models w_1 to w_Kc"
    uploads = {"w": "the trained model of its cluster", "j": "the cluster that the client chose"}
    no_privacy = "it uploads which cluster a client chose"
    pre_is_global = False
    server_step = "it has a model of every cluster, and not all of them change in a round"
    global_model = Algorithm.global_model  # none

    Kc: int = setting(2, "number of models", low=1)

    def check(self, task):
        one, other = task.init(0), task.init(1)
        if self.Kc > 1 and all(torch.equal(one[k], other[k]) for k in one):
            raise UserError(
                "hypcluster's models must start from different values, but this model always starts from the same; "
                "use another model, give it as a function, or set Kc=1."
            )

    def init_server(self, task, key):
        models = [task.init(key), *(task.init(fold(key, j)) for j in range(1, self.Kc))]
        return {"models": tree_map(lambda *rows: torch.stack(rows), *models)}

    def begin(self, task, down, state, info):
        return {
            "w": task.slot(take(down["models"], 0)),
            "seen": torch.zeros(self.Kc, 3, dtype=task.dtype, device=info.n.device),
            "j": torch.zeros_like(info.n),
        }

    def phases(self, task):
        return [measuring(task, self.measure), Phase(self.step, task.epochs, enter=self.choose)]

    def adapt(self, task):
        return [measuring(task, self.measure), Phase(self.step, 0, enter=self.choose)]

    def measure(self, task, work, batch, down, info):
        return {**work, "seen": work["seen"] + tally_each(task, work["w"], down["models"], batch)}

    def choose(self, task, work, down, info):
        j = smallest(work["seen"][:, 1])  # sums over the same samples
        return {**work, "w": work["w"]._replace(params=take(down["models"], j)), "j": j}

    def report(self, task, work, down, info):
        return {"cluster": work["j"]}

    def finish(self, task, work, down, state, info):
        return state, {"w": work["w"].params, "j": work["j"]}

    def reference(self, task, up, down):
        j = up["j"].clamp(0, self.Kc - 1)  # of a client that says anything else, nothing is used
        return {"w": tree_map(lambda v: v.index_select(0, j[None])[0], down["models"])}

    def aggregate(self, task, server, up, info, t, key):
        models = []
        for j in range(self.Kc):
            members = torch.nonzero(up["j"] == j).flatten()
            old = take(server["models"], j)
            models.append(task.average(take(up["w"], members), info.n[members]) if len(members) else old)
        return {"models": tree_map(lambda *rows: torch.stack(rows), *models)}

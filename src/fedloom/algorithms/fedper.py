"""FedPer: the body is shared, every client keeps a head of its own; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers. 2019.
"""

from dataclasses import dataclass

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.settings import setting


@dataclass(frozen=True)
class FedPer(Algorithm):
    name = "fedper"
    source = "Arivazhagan et al."
    paper = "Federated Learning with Personalization Layers"
    year = 2019
    shared = "body phi"
    private = "head h_i"
    uploads = {"phi": "the trained body"}
    needs_split = True
    averages = True

    allow_degenerate: bool = setting(False, "run although the model has no body to share, as Local then")

    def init_server(self, task, key):
        return {"phi": task.body(task.init(key))}

    def init_client(self, task, key, key_i):
        return {"h": task.head(task.init(key))}

    def begin(self, task, down, state, info):
        return {"w": task.slot({**down["phi"], **state["h"]})}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {"w": task.step(w, g)}

    def finish(self, task, work, down, state, info):
        return {"h": task.head(work["w"].params)}, {"phi": task.body(work["w"].params)}

    def aggregate(self, task, server, up, info, t, key):
        return {"phi": task.average(up["phi"], info.n)}

    def model(self, task, work, down, info):
        return work["w"]

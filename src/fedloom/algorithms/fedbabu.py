"""FedBABU: only the body is trained together, under a head that stays random; a client fits its head when it needs one.

Oh, Kim, Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.
"""

from dataclasses import dataclass
from typing import Literal

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.settings import setting


@dataclass(frozen=True)
class FedBABU(Algorithm):
    name = "fedbabu"
    source = "Oh et al., ICLR"
    paper = "FedBABU: Toward Enhanced Representation for Federated Image Classification"
    year = 2022
    shared = "body phi"
    private = "nothing"
    uploads = {"phi": "the trained body"}
    needs_split = True
    averages = True

    finetune_epochs: int = setting(5, "tau_f, epochs of fine-tuning before a client uses its model", low=0)
    finetune: Literal["head", "full"] = setting("head", "what is fine-tuned: the head, or body and head")

    def init_server(self, task, key):
        w = task.init(key)
        return {"phi": task.body(w), "h": task.head(w)}  # h is never updated

    def constants(self, task, key):
        return {"h": task.head(task.init(key))}  # the same random head everywhere, drawn from the seed

    def download(self, task, server, ids, t, key):
        return {"phi": server["phi"]}, {}

    def begin(self, task, down, state, info):
        return {"w": task.slot({**down["phi"], **down["h"]})}

    def phases(self, task):
        return [Phase(self.body_step, task.epochs)]

    def body_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch, only=task.network.body)
        return {"w": task.step(w, g)}

    def finish(self, task, work, down, state, info):
        return state, {"phi": task.body(work["w"].params)}

    def aggregate(self, task, server, up, info, t, key):
        return {**server, "phi": task.average(up["phi"], info.n)}

    def adapt(self, task):
        return [Phase(self.finetune_step, self.finetune_epochs)]

    def finetune_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch, only=task.network.head if self.finetune == "head" else None)
        return {"w": task.step(w, g)}

    def model(self, task, work, down, info):
        return work["w"]

    def global_model(self, task, server):
        return {**server["phi"], **server["h"]}

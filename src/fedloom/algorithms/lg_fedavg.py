"""LG-FedAvg: every client keeps a body of its own and the head is shared, the other way round than in FedPer.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think Locally, Act Globally: Federated Learning with
Local and Global Representations. 2020.
"""

from dataclasses import dataclass

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Algorithm
from fedloom.core.settings import setting
from fedloom.core.tree import where


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    name = "lg-fedavg"
    source = "Liang et al."
    paper = "Think Locally, Act Globally: Federated Learning with Local and Global Representations"
    year = 2020
    shared = "head h"
    private = "body phi_i"
    uploads = {"h": "the trained head", "phi": "the trained body, while all of the model is pretrained"}
    pre_is_global = False
    global_model = Algorithm.global_model  # none

    pretrain_rounds: int = setting(0, "rounds of FedAvg at first, after which bodies are private", low=0)

    def init_server(self, task, key):
        w = task.init(key)
        return {"h": task.head(w), **({"phi": task.body(w)} if self.pretrain_rounds else {})}

    def init_client(self, task, key, key_i):
        alone = torch.zeros_like(key_i, dtype=torch.bool)  # has it trained since bodies are private?
        return {"phi": task.body(task.init(key)), **({"alone": alone} if self.pretrain_rounds else {})}

    def download(self, task, server, ids, t, key):
        """The pretrained body is always sent: a client that comes late starts from it. The mark, which takes no bytes,
        says that bodies are sent back, too."""
        return {**server, **({"pretraining": ()} if t < self.pretrain_rounds else {})}, {}

    def begin(self, task, down, state, info):
        phi = where(state["alone"], state["phi"], down["phi"]) if self.pretrain_rounds else state["phi"]
        return {"w": task.slot({**phi, **down["h"]})}

    def finish(self, task, work, down, state, info):
        phi, h = task.body(work["w"].params), task.head(work["w"].params)
        kept = {"phi": phi, **({"alone": info.t >= self.pretrain_rounds} if self.pretrain_rounds else {})}
        return kept, {"h": h, **({"phi": phi} if "pretraining" in down else {})}

    def aggregate(self, task, server, up, info, t, key):
        return {**server, **task.average(up, info.n)}

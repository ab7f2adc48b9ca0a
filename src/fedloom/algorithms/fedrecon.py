"""FedRECON: only the body is shared; a head is rebuilt in every round from a few of the client's samples and forgotten.

Singhal, Sidahmed, Garrett, Wu, Rush, Prakash. Federated Reconstruction: Partially Local Federated Learning.
NeurIPS 2021.
"""

import math
from dataclasses import dataclass
from functools import partial

from fedloom.algorithms.parts import pseudo_clients
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import axpy, sub

TRAIN = 0.7  # share of a pseudo-client's samples that would be its training set (PAGE)


@dataclass(frozen=True)
class FedRECON(Algorithm):
    name = "fedrecon"
    source = "Singhal et al., NeurIPS"
    paper = "Federated Reconstruction: Partially Local Federated Learning"
    year = 2021
    shared = "body phi"
    private = "nothing (head h_i lives for one round)"
    uploads = {"delta": "the change of the body"}
    averages = True

    support: float = setting(0.1, "share of the training samples that the head is rebuilt from", above=0, high=0.9)
    recon_epochs: int = setting(2, "epochs on the head, over the support", low=0)
    query_epochs: int = setting(18, "epochs on the body, over the other samples", low=0)
    recon_lr: float | None = setting(None, "learning rate of the head [lr]", above=0)
    query_lr: float | None = setting(None, "learning rate of the body [lr]", above=0)
    eta_g: float = setting(1.0, "eta_s in the paper, step size of the server", above=0)
    stateful: bool = setting(False, "a client keeps its head between rounds (PAGE's code)")
    pseudo_clients: int = setting(25, "parts of the server's samples that each rebuild a head to test phi", low=1)

    def check(self, task):
        if not task.network.body:
            raise UserError("fedrecon shares the body of the model, but this one is a single layer; use another model.")

    def init_server(self, task, key):
        return {"phi": task.body(task.init(key))}

    def constants(self, task, key):
        return {"h": task.head(task.init(key))}  # where every reconstruction begins

    def init_client(self, task, key, key_i):
        return self.constants(task, key) if self.stateful else {}

    def begin(self, task, down, state, info):
        return {"w": task.slot({**down["phi"], **(state if self.stateful else down)["h"]})}

    def phases(self, task):
        query = Phase(self.body_step, self.query_epochs, select=lambda n, draw: self.divided(n, draw)[1])
        return [*self.adapt(task), query]

    def adapt(self, task):
        return [Phase(self.rebuild, self.recon_epochs, select=lambda n, draw: self.divided(n, draw)[0])]

    def divided(self, n, draw):
        """Support and query, the same in all rounds."""
        order, few = draw.rng("recon", draw.i).permutation(n), max(1, math.floor(self.support * n + 1e-9))
        return order[:few], order[few:]

    def rebuild(self, task, work, batch, down, info):
        return {"w": self.head_step(task, work["w"], batch)}

    def head_step(self, task, w, batch):
        g, w = task.grad(w, batch, only=task.network.head)
        return task.step(w, g, lr=self.recon_lr)

    def body_step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch, only=task.network.body)
        return {"w": task.step(w, g, lr=self.query_lr)}

    def finish(self, task, work, down, state, info):
        w = work["w"].params
        kept = {"h": task.head(w)} if self.stateful else {}
        return kept, {"delta": sub(task.body(w), down["phi"])}

    def aggregate(self, task, server, up, info, t, key):
        return {"phi": axpy(self.eta_g, task.average(up["delta"], info.n), server["phi"])}

    def model(self, task, work, down, info):
        return work["w"]

    def score_server(self, task, server, stats, key):
        """Scores on D_CS: it is divided among pseudo-clients; each rebuilds a head from its support samples and is
        scored on its other samples."""
        w = task.slot({**server["phi"], **self.constants(task, key)["h"]})
        w = w._replace(buffers=stats.get("w", w.buffers))
        share = TRAIN * self.support
        return pseudo_clients.scores(
            task, w, partial(self.head_step, task), self.recon_epochs, self.pseudo_clients, share, key
        )

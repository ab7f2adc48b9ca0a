"""FedProto: clients share nothing but prototypes, the mean feature vector of each class, towards which they pull their
own features and by which they predict.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. FedProto: Federated Prototype Learning across Heterogeneous Clients. AAAI 2022.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedloom.algorithms.parts.distances import batch_mean
from fedloom.algorithms.parts.measuring import measuring
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.autodiff import vmap
from fedloom.core.settings import setting

FAR = 27.6  # how much less likely, in logarithms, a class without a prototype is than the farthest one with


@dataclass(frozen=True)
class FedProto(Algorithm):
    name = "fedproto"
    source = "Tan et al., AAAI"
    paper = "FedProto: Federated Prototype Learning across Heterogeneous Clients"
    year = 2022
    shared = "prototypes G[c]"
    private = "model theta_i"
    uploads = {"C": "mean features of each class", "has": "which classes the client has"}
    no_privacy = "it uploads which classes a client has"
    averages = True
    server_step = "it averages prototypes, not models"
    targets = ("classes",)  # of which each has a prototype

    lam: float = setting(10.0, "lambda, weight of the distance to the prototypes", low=0)

    def init_server(self, task, key):
        G = torch.zeros(task.classes, task.network.feature_dim, dtype=task.dtype, device=task.data.device)
        return {"G": G, "known": torch.zeros(task.classes, dtype=torch.bool, device=task.data.device)}

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        return {"theta": task.slot(state["theta"]), "sums": torch.zeros_like(down["G"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs), measuring(task, self.collect)]

    def step(self, task, work, batch, down, info):
        def loss(out, batch):
            return task.loss(out, batch) + self.lam * self.gap(out.features, batch, down)

        g, theta = task.grad(work["theta"], batch, loss=loss)
        return {**work, "theta": task.step(theta, g)}

    def gap(self, f, batch, down):
        """Mean square of f(x) - G[y] over samples and dimensions; a sample whose class has no prototype adds 0."""
        return batch_mean(((f - down["G"][batch.y]) ** 2).mean(-1) * down["known"][batch.y], batch)

    def collect(self, task, work, batch, down, info):
        """Sums of the features of each class, by the trained model."""
        of_class = F.one_hot(batch.y.clamp(min=0), task.classes) * batch.weight[..., None]
        f = task.predict(work["theta"], batch.x).features
        return {**work, "sums": work["sums"] + of_class.flatten(0, -2).T @ f.flatten(0, -2)}

    def finish(self, task, work, down, state, info):
        C = work["sums"] / info.counts.clamp(min=1)[:, None]
        return {"theta": work["theta"].params}, {"C": C, "has": info.counts > 0}

    def aggregate(self, task, server, up, info, t, key):
        """Plain means over the clients that have a class; a class that nobody sent keeps its prototype."""
        sent = up["has"].any(0)
        found = vmap(task.average, in_dims=1)(up["C"], up["has"])
        return {"G": torch.where(sent[:, None], found, server["G"]), "known": server["known"] | sent}

    def model(self, task, work, down, info):
        return {"theta": work["theta"], "G": down["G"], "known": down["known"]}

    def logits(self, task, model, x):
        """Minus squared distances to the prototypes, but for ||f||^2, which all classes share; the head before any
        prototype exists."""
        out, G, known = task.predict(model["theta"], x), model["G"], model["known"]
        near = 2 * out.features @ G.T - (G**2).sum(-1)
        farthest = torch.where(known, near, torch.inf).amin(-1, keepdim=True)
        near = torch.where(known, near, farthest - FAR)  # infinitely far would do, but for the loss in the records
        return torch.where(known.any(), near, out.logits[..., : task.classes])

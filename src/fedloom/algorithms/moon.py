"""MOON: FedAvg whose features are drawn towards those of the global model and away from those of the client's last one.

Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021.
"""

from dataclasses import dataclass

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts import dense, joint
from fedloom.algorithms.parts.distances import batch_mean, contrast
from fedloom.core.algorithm import Phase, Slot
from fedloom.core.keys import fold, stream
from fedloom.core.settings import setting


@dataclass(frozen=True)
class Moon(FedAvg):
    name = "moon"
    source = "Li, He, Song, CVPR"
    paper = "Model-Contrastive Federated Learning"
    year = 2021
    private = "nothing but OLD_i, its last model, as sent"
    uploads = {"w": "the trained model", "proj": "the trained projection head, if there is one"}

    mu: float = setting(1.0, "mu, weight of the contrastive loss", low=0)
    tau: float = setting(0.5, "tau, temperature of the contrastive loss", above=0)
    proj: int | None = setting(None, "outputs of a projection before features are compared [no projection]", low=1)

    def start(self, task, key):
        models = {"w": task.init(key)}
        if self.proj is not None:
            draw, k = torch.full((), fold(key, stream("projection")), device=task.data.device), task.network.feature_dim
            models["proj"] = dense.draw(draw, (k, k, self.proj), task.dtype)
        return models

    def init_server(self, task, key):
        return self.start(task, key)

    def init_client(self, task, key, key_i):
        return {"old": self.start(task, key)}

    def begin(self, task, down, state, info):
        work = {m: task.slot(params)._replace(buffers={}) for m, params in down.items()}
        return {**work, "w": task.slot(down["w"]), "old": state["old"]}

    def phases(self, task):
        return [Phase(self.step, task.epochs, enter=self.freeze)]

    def freeze(self, task, work, down, info):
        """The models that do not learn keep the running statistics of now."""
        return {**work, "statistics": work["w"].buffers}

    def step(self, task, work, batch, down, info):
        def view(out, at):  # a vector for every sample, or for every position of a sequence
            f = out.features.flatten(batch.weight.dim())
            return f if self.proj is None else dense.apply(at["proj"], f)

        fg, fo = (view(task.predict(Slot(m["w"], work["statistics"], {}), batch.x), m) for m in (down, work["old"]))

        def loss(at):
            out = task.forward(work["w"]._replace(params=at["w"]), batch)
            contrastive = batch_mean(contrast(view(out, at), fg, fo, self.tau), batch)
            return task.loss(out, batch) + self.mu * contrastive, {"w": out.buffers}

        return joint.step(task, work, down, loss, one_norm=True)

    def finish(self, task, work, down, state, info):
        trained = {m: work[m].params for m in down}
        return {"old": trained}, trained

    def aggregate(self, task, server, up, info, t, key):
        return task.average(up, info.n)

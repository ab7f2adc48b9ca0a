"""FML: a private model and a copy of the global one learn from the client's data and from each other's predictions.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu. Federated Mutual Learning. 2020.
"""

from dataclasses import dataclass

from fedloom.algorithms.parts import joint
from fedloom.algorithms.parts.distances import batch_mean
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.settings import setting
from fedloom.core.tree import where


@dataclass(frozen=True)
class FML(Algorithm):
    name = "fml"
    source = "Shen et al."
    paper = "Federated Mutual Learning"
    year = 2020
    shared = "model w"
    private = "model theta_i"
    uploads = {"w": "the trained global model"}
    averages = True

    a: float = setting(0.5, "alpha, share of the labels in the loss of theta_i; the rest is for w", low=0, high=1)
    b: float = setting(0.5, "beta, share of the labels in the loss of w; the rest is for theta_i", low=0, high=1)

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        return {"theta": task.slot(state["theta"]), "w": task.slot(down["w"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        def loss(at):
            """Each model learns from what the other says, which is a constant to it."""
            theta, w = (task.forward(work[m]._replace(params=at[m]), batch) for m in ("theta", "w"))
            L = self.mutual(task, theta, w, batch, self.a)
            Lg = self.mutual(task, w, theta, batch, self.b)
            return L + Lg, {"theta": theta.buffers, "w": w.buffers}

        return joint.step(task, work, ("theta", "w"), loss)

    def mutual(self, task, out, other, batch, share):
        far = batch_mean(task.divergence(out.logits, other.logits), batch)
        return share * task.loss(out, batch) + (1 - share) * far

    def finish(self, task, work, down, state, info):
        return {"theta": work["theta"].params}, {"w": work["w"].params}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"])}

    def model(self, task, work, down, info):
        return where(info.first, work["w"], work["theta"])  # a client that never trained uses the global model

    def global_model(self, task, server):
        return server["w"]

"""Per-FedAvg: the global model is trained to be good after one gradient step of a client, not as it is.

Fallah, Mokhtari, Ozdaglar. Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach. NeurIPS 2020. First-order variant.
"""

from dataclasses import dataclass

from fedloom.algorithms.fedavg import FedAvg
from fedloom.core.algorithm import Phase
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import axpy


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    name = "per-fedavg"
    source = "Fallah et al., NeurIPS"
    paper = "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach"
    year = 2020
    pre_is_global = False

    inner_lr: float | None = setting(None, "a, size of the step that a client adapts by [lr]", low=0)
    allow_small: bool = setting(False, "a client with fewer samples than two batches trains on two halves of them")

    def check(self, task):
        least, need = int(task.data.splits["train"].sizes.min()), 2 * task.batch_size
        if least < need and not self.allow_small:
            raise UserError(
                f"per-fedavg takes batches in pairs, {need} training samples, but one client has {least}; set "
                "allow_small=true or a smaller batch_size."
            )

    def phases(self, task):
        return [Phase(self.step, task.epochs, group=2, halve=self.allow_small)]

    def step(self, task, work, batch, down, info):
        w = work["w"]
        ahead = self.adapted(task, w, batch.part(0))
        g, ahead = task.grad(ahead, batch.part(1))
        return {"w": task.step(w._replace(buffers=ahead.buffers), g)}  # both passes count for the running statistics

    def adapted(self, task, w, batch):
        """w - a * grad F_B(w)"""
        g, w = task.grad(w, batch)
        a = task.eta if self.inner_lr is None else task.scheduled(self.inner_lr)
        return w._replace(params=axpy(-a, g, w.params))

    def adapt(self, task):
        return [Phase(self.adapt_step, steps=1)]

    def adapt_step(self, task, work, batch, down, info):
        return {"w": self.adapted(task, work["w"], batch)}

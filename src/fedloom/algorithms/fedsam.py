"""FedSAM: FedAvg whose clients train by sharpness-aware minimisation, so that the average lies in a flat region.

Qu, Li, Duan, Liu, Tang, Lu. Generalized Federated Learning via Sharpness Aware Minimization. ICML 2022.
"""

from dataclasses import dataclass

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts.lwsam import perturbation
from fedloom.core.settings import setting
from fedloom.core.tree import add


@dataclass(frozen=True)
class FedSAM(FedAvg):
    name = "fedsam"
    source = "Qu et al., ICML"
    paper = "Generalized Federated Learning via Sharpness Aware Minimization"
    year = 2022

    rho: float = setting(0.05, "radius of the perturbation", low=0)

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        eps = perturbation(g, self.rho)  # rho * g / ||g||
        g_tilde, _ = task.grad(w._replace(params=add(w.params, eps)), batch)  # w keeps the statistics of the first pass
        return {"w": task.step(w, g_tilde)}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"])}

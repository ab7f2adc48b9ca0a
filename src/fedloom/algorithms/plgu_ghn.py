"""PLGU-GHN: pFedHN whose hypernetwork steps with the gradient at a perturbed point, as in sharpness-aware minimisation,
once per round for the whole cohort.

Qu, Li, Han, Duan, Shen, Chen. How to Prevent the Poor Performance Clients for Personalized Federated Learning?
CVPR 2023. Supplement C, Algorithm 4.
"""

from dataclasses import dataclass

from fedloom.algorithms.parts.lwsam import perturbation
from fedloom.algorithms.pfedhn import PFedHN
from fedloom.core.settings import setting
from fedloom.core.tree import add


@dataclass(frozen=True)
class PLGUGHN(PFedHN):
    name = "plgu-ghn"
    source = "Qu et al., CVPR"
    paper = "How to Prevent the Poor Performance Clients for Personalized Federated Learning?"
    year = 2023

    batch_update: bool = setting(True, "one step for the whole cohort instead of one after each client")
    rho: float = setting(0.05, "radius of the perturbation", low=0)

    def gradient(self, task, net, delta):
        eps = perturbation(super().gradient(task, net, delta)["phi"], self.rho)  # Eq. 23
        return super().gradient(task, {**net, "phi": add(net["phi"], eps)}, delta)  # Eq. 24, 25

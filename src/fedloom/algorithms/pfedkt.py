"""pFedKT: a private hypernetwork proposes the client's next model, a contrastive loss ties it to the global one.

Yi, Shi, Wang, Wang, Liu, Shi, Yu. pFedKT: Personalized federated learning with dual knowledge transfer. Knowledge-Based
Systems 2024. Equations are numbered as in the preprint, "Personalized Federated Learning via Knowledge Transfer".
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts import dense
from fedloom.algorithms.parts.distances import DISTANCES, batch_mean, contrast, kl
from fedloom.core.algorithm import Phase, Slot
from fedloom.core.autodiff import grad
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, normal, stream
from fedloom.core.settings import setting
from fedloom.core.task import clip_norm
from fedloom.core.tree import axpy, leaves, sub, where

CHUNK = 400  # parameters that one call of the small hypernetwork generates
WIDTH = 100  # units of its hidden layers


@dataclass(frozen=True)
class PFedKT(FedAvg):
    name = "pfedkt"
    source = "Yi et al., Knowledge-Based Systems"
    paper = "pFedKT: Personalized federated learning with dual knowledge transfer"
    year = 2024
    shared = "model w"
    private = "model omega_k, hypernetwork varphi_k"
    pre_is_global = False
    global_slot = "omega"

    emb_dim: int = setting(13, "e, length of the embedding of a chunk", low=1)
    n_hidden: int = setting(1, "hidden layers of the hypernetwork after its first", low=0, high=1000)
    mu: float = setting(0.001, "mu, weight of the contrastive loss", low=0, high=1)
    alpha: float = setting(0.1, "alpha, margin of the triplet loss", low=0)
    eta_hn: float = setting(0.005, "eta_HN, step size of the hypernetwork", low=0)
    hn_clip: float = setting(50.0, "norm that the hypernetwork's gradient is clipped to", above=0)
    case: Literal["A", "B", "C", "D"] = setting("D", "A: neither part, B: hypernetwork, C: contrastive loss, D: both")
    loss: Literal["triplet", "moon", "regularizer"] = setting("triplet", "contrastive loss")
    distance: Literal["kl", "cos", "l2", "mse"] = setting("kl", "distance between the outputs of two models")
    level: Literal["logits", "feature"] = setting("logits", "outputs that are compared")
    train_emb: bool = setting(False, "the embeddings of the chunks are trained with the hypernetwork")
    hn: Literal["small", "large"] = setting("small", "the model chunk by chunk, or all of it in one call")
    local_momentum: float = setting(0.9, "momentum of local SGD, instead of the run's", low=0, high=0.9999)
    local_decay: float = setting(5e-5, "weight decay of local SGD, instead of the run's", low=0)
    local_clip: float = setting(50.0, "norm a local gradient is clipped to, instead of the run's", above=0)

    generates = property(lambda self: self.case in "BD")
    contrasts = property(lambda self: self.case in "CD" and self.mu > 0)

    def check(self, task):
        if self.loss == "moon" and self.distance != "cos":
            raise UserError(f"pfedkt's moon loss compares by cosine; set distance=cos, not {self.distance}.")
        if task.data.kind == "number" and self.level == "logits" and self.distance == "cos" and self.contrasts:
            raise UserError("pfedkt's distance=cos compares directions, but a number has none; set level=feature.")
        if self.hn == "large" and self.generates:
            dense.check_memory(task, self.widths(task), task.clients, "use hn=small")

    def chunks(self, task):
        """J and the values in a chunk."""
        total = sum(p.numel() for p in task.init(0).values())  # P
        return (1, total) if self.hn == "large" else (-(-total // CHUNK), CHUNK)

    def widths(self, task):
        return (self.emb_dim, *[WIDTH] * (self.n_hidden + 1), self.chunks(task)[1])

    def embeddings(self, task, key):
        draw = torch.tensor(fold(key, stream("chunks")), device=task.data.device)
        return {"E": normal(draw, (self.chunks(task)[0], self.emb_dim), task.dtype)}

    def constants(self, task, key):
        return self.embeddings(task, key) if self.generates and not self.train_emb else {}

    def init_client(self, task, key, key_i):
        state = {} if self.case == "A" else {"old": task.init(key)}
        if self.generates:
            trained = self.embeddings(task, key) if self.train_emb else {}
            state["varphi"] = {**trained, **dense.draw(key_i, self.widths(task), task.dtype)}
        return state

    def generate(self, task, varphi, down):
        """theta0 = HN(E): all chunks in one matrix product."""
        values = dense.apply(varphi, {**down, **varphi}["E"])
        return dense.cut(values.flatten(), like=task.init(0))

    def absorb(self, task, varphi, omega, down):
        """Eq. (1), with Delta = theta0 - omega: Eq. (8) has it the other way round, which leads away from omega."""

        def half_gap(varphi):  # ||theta0 - omega||^2 / 2, whose gradient is J^T Delta
            return sum((d**2).sum() / 2 for d in leaves(sub(self.generate(task, varphi, down), omega))), {}

        g, _ = grad(half_gap, varphi)
        return axpy(-self.eta_hn, clip_norm(g, self.hn_clip), varphi)

    def local(self, task):
        return replace(task, momentum=self.local_momentum, weight_decay=self.local_decay, clip=self.local_clip)

    def begin(self, task, down, state, info):
        # between rounds a client uses the model it trained last; without a hypernetwork it uses w, as in FedAvg
        return {"omega": self.local(task).slot(state["old"] if self.generates else down["w"]), **state}

    def phases(self, task):
        return [Phase(self.step, task.epochs, enter=self.release)]

    def release(self, task, work, down, info):
        """theta0 takes the place of omega; the frozen models keep the running statistics of now."""
        omega = work["omega"]
        frozen = {"old": work["old"], "statistics": omega.buffers} if self.contrasts else {}
        theta0 = self.generate(task, work["varphi"], down) if self.generates else omega.params
        return {"omega": omega._replace(params=theta0), **frozen}

    def step(self, task, work, batch, down, info):
        local, loss = self.local(task), self.complete_loss(task, work, batch, down) if self.contrasts else None
        g, omega = local.grad(work["omega"], batch, loss=loss)
        return {**work, "omega": local.step(omega, g)}  # Eq. (4)

    def complete_loss(self, task, work, batch, down):
        def view(out):  # a vector for every sample, or for every position of a sequence
            return (out.logits if self.level == "logits" else out.features).flatten(batch.weight.dim())

        divergence = task.divergence if self.level == "logits" else kl
        gm, old = (view(task.predict(Slot(p, work["statistics"], {}), batch.x)) for p in (down["w"], work["old"]))

        def f(out, batch):  # Eq. (3)
            return self.mu * self.contrastive(view(out), gm, old, batch, divergence) + (1 - self.mu) * task.loss(
                out, batch
            )

        return f

    def contrastive(self, z, gm, old, batch, kl=kl):
        """l_con: Eq. (2), and its alternatives of Table 10."""
        if self.loss == "moon":
            return batch_mean(contrast(z, gm, old), batch)
        distance = kl if self.distance == "kl" else DISTANCES[self.distance]
        d_plus, d_minus = (batch_mean(distance(z, other), batch) for other in (gm, old))
        return d_plus if self.loss == "regularizer" else F.relu(d_plus - d_minus + self.alpha)

    def finish(self, task, work, down, state, info):
        omega = work["omega"].params
        kept = {} if self.case == "A" else {"old": omega}
        if self.generates:
            kept["varphi"] = self.absorb(task, state["varphi"], omega, down)
        return kept, {"w": omega}

    def model(self, task, work, down, info):
        omega = work["omega"]  # a client that never trained uses the global model
        return omega._replace(params=where(info.first, down["w"], omega.params))

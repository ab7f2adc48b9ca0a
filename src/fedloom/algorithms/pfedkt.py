"""pFedKT: a private hypernetwork proposes the client's next model, a contrastive loss ties it to the global one.

Yi, Shi, Wang, Wang, Liu, Shi, Yu. pFedKT: Personalized federated learning with dual knowledge transfer. Knowledge-Based
Systems 2024. Equations are numbered as in the preprint, "Personalized Federated Learning via Knowledge Transfer".
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch.nn.functional as F

from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.parts import adam, approach, dense
from fedloom.algorithms.parts.distances import DISTANCES, batch_mean, contrast, kl
from fedloom.algorithms.parts.private_hypernetwork import PrivateHypernetwork
from fedloom.core.algorithm import Phase, Slot
from fedloom.core.autodiff import grad
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.task import clip_norm
from fedloom.core.tree import axpy, norm, where


@dataclass(frozen=True)
class PFedKT(FedAvg):
    name = "pfedkt"
    source = "Yi et al., Knowledge-Based Systems"
    paper = "pFedKT: Personalized federated learning with dual knowledge transfer"
    year = 2024
    shared = "model w"
    private = "hypernetwork varphi_k (and omega_k, its last model, as sent)"
    uploads = {"w": "the trained model omega_k"}
    pre_is_global = False
    global_slot = "omega"
    variants = MappingProxyType(
        {"paper": {"eta_hn": 0.005, "hn_init": "default", "hn_update": "step", "local_clip": 50.0}}
    )

    emb_dim: int = setting(13, "e, length of the embedding of a chunk", low=1)
    n_hidden: int = setting(1, "hidden layers of the hypernetwork after its first", low=0, high=1000)
    mu: float = setting(0.001, "mu, weight of the contrastive loss", low=0, high=1)
    alpha: float = setting(0.1, "alpha, margin of the triplet loss", low=0)
    eta_hn: float = setting(0.001, "eta_HN, step size of the hypernetwork; the paper's is 0.005", low=0)
    hn_init: Literal["fan_in", "default"] = setting("fan_in", "scale of generated weights; default: the paper's")
    hn_update: Literal["end_to_end", "fit", "line", "step"] = setting(
        "end_to_end",
        "how the hypernetwork learns: in every batch; from the trained model by Adam, by a line search, or "
        "by the paper's single step",
    )
    hn_steps: int = setting(60, "fit: steps of Adam in a round", low=1)
    hn_clip: float = setting(50.0, "step: norm that the hypernetwork's gradient is clipped to", above=0)
    case: Literal["A", "B", "C", "D"] = setting("D", "A: neither part, B: hypernetwork, C: contrastive loss, D: both")
    loss: Literal["triplet", "moon", "regularizer"] = setting("triplet", "contrastive loss")
    distance: Literal["kl", "cos", "l2", "mse"] = setting("kl", "distance between the outputs of two models")
    level: Literal["logits", "feature"] = setting("logits", "outputs that are compared")
    train_emb: bool = setting(False, "the embeddings of the chunks are trained with the hypernetwork")
    hn: Literal["small", "large"] = setting("small", "the model chunk by chunk, or all of it in one call")
    local_momentum: float = setting(0.9, "momentum of local SGD, instead of the run's", low=0, high=0.9999)
    local_decay: float = setting(5e-5, "weight decay of local SGD, instead of the run's", low=0)
    local_clip: float | None = setting(None, "norm a local gradient is clipped to, instead of the run's", above=0)

    generates = property(lambda self: self.case in "BD")
    contrasts = property(lambda self: self.case in "CD" and self.mu > 0)

    @property
    def hypernetwork(self):
        return PrivateHypernetwork(self.emb_dim, self.n_hidden, self.hn == "large", self.hn_init == "fan_in")

    def check(self, task):
        if self.loss == "moon" and self.distance != "cos":
            raise UserError(f"pfedkt's moon loss compares by cosine; set distance=cos, not {self.distance}.")
        if task.data.kind == "number" and self.level == "logits" and self.distance == "cos" and self.contrasts:
            raise UserError("pfedkt's distance=cos compares directions, but a number has none; set level=feature.")
        if self.hn == "large" and self.generates:
            dense.check_memory(task, self.hypernetwork.widths(task), task.clients, "use hn=small")

    def constants(self, task, key):
        if not self.generates:
            return {}
        fixed = {} if self.train_emb else self.hypernetwork.embeddings(task, key)
        return {**fixed, "usual": self.hypernetwork.usual(task, key)}

    def init_client(self, task, key, key_i):
        state = {} if self.case == "A" else {"old": task.init(key)}
        if self.generates:
            embeddings = self.hypernetwork.embeddings(task, key)
            trained = embeddings if self.train_emb else {}
            state["varphi"] = {**trained, **self.hypernetwork.init(task, key_i, embeddings["E"])}
        return state

    def local(self, task):
        return replace(task, momentum=self.local_momentum, weight_decay=self.local_decay, clip=self.local_clip)

    def begin(self, task, down, state, info):
        # between rounds a client uses the model it trained last; without a hypernetwork it uses w, as in FedAvg
        return {"omega": self.local(task).slot(state["old"] if self.generates else down["w"]), **state}

    def phases(self, task):
        train = Phase(self.step, task.epochs, enter=self.release)
        if not self.generates or self.hn_update != "fit":
            return [train]
        # its batches are not used: the hypernetwork learns from the trained model
        fit = Phase(self.fit, steps=self.hn_steps, enter=self.begin_fit, select=one_sample, batch=1, train=False)
        return [train, fit]

    def release(self, task, work, down, info):
        """theta0 takes the place of omega; the frozen models keep the running statistics of now."""
        omega = work["omega"]
        frozen = {"old": work["old"], "statistics": omega.buffers} if self.contrasts else {}
        theta0 = self.hypernetwork.generate(task, work["varphi"], down) if self.generates else omega.params
        learning = {"varphi": work["varphi"]} if self.generates else {}
        if self.generates and self.hn_update == "end_to_end":
            learning["adam"] = adam.start_tree(work["varphi"])
        return {"omega": omega._replace(params=theta0), **frozen, **learning}

    def step(self, task, work, batch, down, info):
        local, loss = self.local(task), self.complete_loss(task, work, batch, down) if self.contrasts else None
        g, omega = local.grad(work["omega"], batch, loss=loss)
        if not self.generates or self.hn_update != "end_to_end":
            return {**work, "omega": local.step(omega, g)}  # Eq. (4)
        g = axpy(self.local_decay, omega.params, g if self.local_clip is None else clip_norm(g, self.local_clip))
        through, _ = grad(lambda varphi: (self.hypernetwork.pulled(task, varphi, g, down), {}), work["varphi"])
        varphi, moments = adam.step_tree(work["varphi"], through, work["adam"], batch.k + 1, self.eta_hn)
        theta = self.hypernetwork.generate(task, varphi, down)
        return {**work, "varphi": varphi, "adam": moments, "omega": omega._replace(params=theta)}

    # -- the hypernetwork approaches the trained model: Eq. (1) --------------------------------------------------------
    # Delta = theta0 - omega; Eq. (8) has it the other way round, which leads away from omega

    def gap(self, task, omega, down):
        """||theta0 - omega||^2 / 2 as a function of varphi; its gradient is J^T Delta."""
        return lambda varphi: self.hypernetwork.half_gap(task, varphi, omega, down)

    def begin_fit(self, task, work, down, info):
        omega, varphi = work["omega"].params, work["varphi"]
        size = norm(self.hypernetwork.generate(task, varphi, down))
        return {**work, **approach.begin(self.gap(task, omega, down), varphi, self.eta_hn, size)}

    def fit(self, task, work, batch, down, info):
        """A step of Adam towards omega."""
        f = self.gap(task, work["omega"].params, down)
        return {**work, **approach.adam_step(f, work, batch.k, self.hn_steps)}

    def learnt(self, task, work, state, down):
        """The hypernetwork after the round."""
        if self.hn_update == "fit":
            return work["nearest"]["varphi"]
        if self.hn_update == "end_to_end":
            return work["varphi"]
        f = self.gap(task, work["omega"].params, down)
        if self.hn_update == "line":
            return approach.best_step(f, state["varphi"], self.eta_hn)["varphi"]
        return approach.clipped_step(f, state["varphi"], self.eta_hn, self.hn_clip)

    # -- the contrastive loss ------------------------------------------------------------------------------------------

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
            kept["varphi"] = self.learnt(task, work, state, down)
        return kept, {"w": omega}

    def model(self, task, work, down, info):
        omega = work["omega"]  # a client that never trained uses the global model
        return omega._replace(params=where(info.first, down["w"], omega.params))


def one_sample(n, draw):
    """A single sample, for a phase that uses none."""
    return np.zeros(1, np.int64)

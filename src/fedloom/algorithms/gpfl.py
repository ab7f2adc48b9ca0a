"""GPFL: one shared body learns global and personal features at once; a conditional valve tells them apart.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan. GPFL: Simultaneously Learning Global and Personalized Feature Information
for Personalized Federated Learning. ICCV 2023. Equation numbers are the paper's.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.autodiff import grad
from fedloom.core.keys import fold, normal, uniform
from fedloom.core.settings import setting
from fedloom.core.task import clip_norm
from fedloom.core.tree import axpy, nonzero, zeros_like


@dataclass(frozen=True)
class GPFL(Algorithm):
    name = "gpfl"
    source = "Zhang et al., ICCV"
    paper = (
        "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated Learning"
    )
    year = 2023
    shared = "body phi, valve V, embeddings C"
    private = "head psi_i"
    uploads = {"phi": "the trained body", "V": "the trained valve", "C": "the trained embeddings"}
    averages = True
    targets = ("classes",)  # of which each has an embedding
    variants = MappingProxyType({"paper": {"pci_div_U": True}, "code": {"stale_cond": True}})

    lam: float = setting(0.01, "lambda, weight of the magnitude-level guidance", low=0)
    mu: float = setting(0.1, "mu, weight decay of V and C", low=0)
    ablation: Literal["full", "wo_pci", "wo_cov", "wo_mlg", "wo_gce", "wo_cov_gce"] = setting(
        "full", "or an ablation: wo_pci, wo_cov, wo_mlg, wo_gce, wo_cov_gce leave out what they name"
    )
    pci_div_U: bool = setting(False, "divide p_i by the number of classes U, as Eq. (7) is printed")
    mlg: Literal["batch", "per_sample"] = setting("batch", "Eq. (9) as one norm for a batch, or its mean over samples")
    stale_cond: bool = setting(False, "g and p_i from the embeddings that the client itself trained last, at first 0")

    def init_server(self, task, key):
        server, k = {"phi": task.body(task.init(key))}, task.network.feature_dim
        if "cov" not in self.ablation:  # gamma-net and beta-net side by side, as nn.Linear and nn.LayerNorm start
            weight, bias = ((2 * keyed(uniform, task, key, j, rows) - 1) / k**0.5 for j, rows in ((1, 2 * k), (2, 2)))
            server["V"] = {"weight": weight, "bias": bias, "scale": torch.ones_like(bias), "shift": zeros_like(bias)}
        if "gce" not in self.ablation:
            server["C"] = {"weight": keyed(normal, task, key, 3, task.classes)}  # as nn.Embedding starts
        return server

    def constants(self, task, key):
        return {"ab": keyed(normal, task, key, 4, 2)} if self.ablation in ("wo_pci", "wo_gce") else {}

    def init_client(self, task, key, key_i):
        state = {"psi": task.head(task.init(key))}
        if self.stale_cond and "gce" not in self.ablation:
            state["C"] = zeros_like(self.init_server(task, key)["C"])
        return state

    def begin(self, task, down, state, info):
        work = {"w": task.slot({**down["phi"], **state["psi"]})}
        work |= {m: task.slot(down[m])._replace(buffers={}) for m in ("V", "C") if m in down}
        if "ab" in down:
            work["c"] = down["ab"]  # in the place of g and p_i
        elif "V" in down:
            C = (state if self.stale_cond else down)["C"][
                "weight"
            ]  # the newest, C_hat, or the client's own of last time
            alpha = info.counts.to(task.dtype) / info.counts.sum()  # Eq. (6)
            g, p = C.mean(0), alpha @ C  # Eq. (5) and (7), where alpha sums to 1 already
            work["c"] = torch.stack([g, p / task.classes if self.pci_div_U else p])
        return work

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        at = {m: work[m].params for m in ("w", "V", "C") if m in work}
        g, buffers = grad(lambda at: self.loss(task, at, work, batch, down), at)
        g = g if task.clip is None else clip_norm(g, task.clip)  # one norm for all that is trained
        work = {**work, "w": work["w"]._replace(buffers=buffers)}
        decay = {"w": task.weight_decay, "V": self.mu, "C": self.mu}  # mu||V|| + mu||C|| of Eq. (11)
        return work | {m: replace(task, clip=None, weight_decay=decay[m]).step(work[m], g[m]) for m in g}

    def loss(self, task, at, work, batch, down):
        """Eq. (11) without the norms, from one pass through the body, and the running statistics after that pass."""
        out = task.forward(work["w"]._replace(params=at["w"]), batch)
        f_G = out.features
        if "V" in at:
            f_G, f_P = cov(at["V"], out.features, work["c"])
            out = out._replace(logits=task.network.apply_head(at["w"], out.buffers, f_P))
        loss = task.loss(out, batch)  # Eq. (10)
        if "C" in at:
            loss = loss + task.loss(out._replace(logits=cosines(f_G, at["C"]["weight"])), batch)  # Eq. (8)
            if nonzero(self.lam) and self.ablation != "wo_mlg":  # down["C"] is C_hat, frozen for the round
                loss = axpy(self.lam, self.magnitude(f_G - down["C"]["weight"][batch.y], batch), loss)
        return loss, out.buffers

    def magnitude(self, gap, batch):  # Eq. (9), read as the norm of a difference; padding is 0 inside the square root
        norms = torch.linalg.vector_norm(gap * batch.weight[..., None], dim=None if self.mlg == "batch" else -1)
        return norms if self.mlg == "batch" else norms.sum() / batch.weight.sum()

    def finish(self, task, work, down, state, info):
        w, extra = work["w"].params, {m: work[m].params for m in ("V", "C") if m in work}
        return {"psi": task.head(w), **{m: extra[m] for m in state if m == "C"}}, {"phi": task.body(w), **extra}

    def aggregate(self, task, server, up, info, t, key):
        return task.average(up, info.n)

    def model(self, task, work, down, info):
        return {"w": work["w"], **({"V": work["V"].params, "p": work["c"][1:]} if "V" in work else {})}

    def logits(self, task, model, x):
        w, out = model["w"], task.predict(model["w"], x)
        f_P = cov(model["V"], out.features, model["p"])[0] if "V" in model else out.features
        return task.network.apply_head(w.params, w.buffers, f_P)


def cov(V, f, c):
    """The conditional valve, Eq. (3) and (4): f transformed for every row of c, from which gamma and beta are made."""
    made = F.relu(F.linear(c, V["weight"]).unflatten(-1, (2, -1)) + V["bias"])
    made = F.layer_norm(made, c.shape[-1:]) * V["scale"] + V["shift"]
    return [F.relu((gamma + 1) * f + beta) for gamma, beta in map(torch.unbind, made.unbind())]


def cosines(f, C):  # sim(f, C[u]) of Eq. (8) for every class u; there is no temperature
    return F.normalize(f, dim=-1, eps=1e-12) @ F.normalize(C, dim=-1, eps=1e-12).T


def keyed(draw, task, key, j, rows):
    return draw(torch.tensor(fold(key, j), device=task.data.device), (rows, task.network.feature_dim), task.dtype)

"""FedRoD: one shared body with two heads; a generic one that is trained as if classes were balanced, and a personal one
that adds to it what the client's own classes ask for.

Chen, Chao. On Bridging Generic and Personalized Federated Learning for Image Classification. ICLR 2022.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedloom.algorithms.parts import dense, joint
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.keys import fold, stream
from fedloom.core.settings import setting

ABSENT = 1e-12  # counts for a class that the client does not have


@dataclass(frozen=True)
class FedRoD(Algorithm):
    name = "fedrod"
    source = "Chen, Chao, ICLR"
    paper = "On Bridging Generic and Personalized Federated Learning for Image Classification"
    year = 2022
    shared = "body phi, generic head h (hyper: hypernetwork nu)"
    private = "head hP_i (hyper: nothing)"
    uploads = {"w": "the trained body and generic head", "nu": "the trained hypernetwork, if heads are generated"}
    averages = True
    targets = ("classes",)  # whose frequencies balance the softmax

    personal_head: Literal["linear", "hyper"] = setting(
        "linear", "hP_i is the client's own, or generated from its class proportions by a shared hypernetwork"
    )
    hidden: int = setting(32, "units of the hypernetwork's hidden layer", low=1)

    def init_server(self, task, key):
        w = task.init(key)
        if self.personal_head == "linear":
            return {"w": w}
        draw = torch.tensor(fold(key, stream("head")), device=task.data.device)
        widths = (task.classes, self.hidden, sum(p.numel() for p in task.head(w).values()))
        return {"w": w, "nu": dense.draw(draw, widths, task.dtype)}

    def init_client(self, task, key, key_i):
        return {"hP": task.head(task.init(key))} if self.personal_head == "linear" else {}

    def begin(self, task, down, state, info):
        slots = {m: task.slot(params)._replace(buffers={}) for m, params in {**down, **state}.items()}
        return {**slots, "w": task.slot(down["w"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        def loss(at):
            """L_g, which moves phi and h, plus L_p, which moves hP_i or nu: they have no parameters in common."""
            out = task.forward(work["w"]._replace(params=at["w"]), batch)
            z, f = out.logits.detach(), out.features.detach()
            zP = task.network.apply_head(self.personal(task, at, info), work["w"].buffers, f)
            L_g = task.loss(out._replace(logits=out.logits + prior(task, info)), batch)
            L_p = task.loss(out._replace(logits=z + zP), batch)
            return L_g + L_p, {"w": out.buffers}

        return joint.step(task, work, work, loss)

    def personal(self, task, at, info):
        """hP_i, or what nu makes of the class proportions a_i."""
        if self.personal_head == "linear":
            return at["hP"]
        a = info.counts.to(task.dtype) / info.counts.sum()
        return dense.cut(dense.apply(at["nu"], a), like=task.head(task.init(0)))

    def finish(self, task, work, down, state, info):
        trained = {m: slot.params for m, slot in work.items()}
        return {m: trained[m] for m in state}, {m: trained[m] for m in down}

    def aggregate(self, task, server, up, info, t, key):
        return task.average(up, info.n)

    def model(self, task, work, down, info):
        return {"w": work["w"], "hP": self.personal(task, {m: slot.params for m, slot in work.items()}, info)}

    def logits(self, task, model, x):
        w, out = model["w"], task.predict(model["w"], x)
        return out.logits + task.network.apply_head(model["hP"], w.buffers, out.features)

    def global_model(self, task, server):
        return server["w"]


def prior(task, info):
    """log n_{i,c}, which makes the softmax a balanced one; outputs that stand for no class have no samples either."""
    counts = F.pad(info.counts, (0, task.network.outputs - task.classes))
    return counts.to(task.dtype).clamp(min=ABSENT).log()

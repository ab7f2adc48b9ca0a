"""pFedHN: a hypernetwork at the server generates every client's model from an embedding of the client.

Shamsian, Navon, Fetaya, Chechik. Personalized Federated Learning using Hypernetworks. ICML 2021.
"""

from dataclasses import dataclass, replace

import torch

from fedloom.algorithms.parts import hypernetwork
from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, normal
from fedloom.core.settings import setting
from fedloom.core.task import clip_norm
from fedloom.core.tree import sub, tree_map, zeros_like

COPIES = 5  # of the hypernetwork while it steps: values, momentum, two gradients, the new values


@dataclass(frozen=True)
class PFedHN(Algorithm):
    name = "pfedhn"
    source = "Shamsian et al., ICML"
    paper = "Personalized Federated Learning using Hypernetworks"
    year = 2021
    shared = "the client's own model w_i, generated"
    private = "nothing (hypernetwork phi and embeddings v_i are the server's)"
    uploads = {"delta": "the change of its model by training"}

    hidden: int = setting(5, "hidden layers of the hypernetwork, 100 units each", low=0, high=1000)
    embedding: int | None = setting(None, "e, size of an embedding [1 + N/4]", low=1)
    hn_rank: int | None = setting(None, "rank of its output layers [full]; less memory", low=1)
    hn_lr: float = setting(0.01, "alpha, step size of the hypernetwork", above=0)
    hn_momentum: float = setting(0.9, "its momentum", low=0, high=0.9999)
    hn_decay: float = setting(1e-3, "its weight decay", low=0)
    hn_clip: float = setting(50.0, "norm its gradient is clipped to", above=0)
    local_momentum: float = setting(0.9, "momentum of local SGD, whatever the run's", low=0, high=0.9999)
    local_decay: float = setting(5e-5, "weight decay of local SGD, whatever the run's", low=0)
    local_clip: float = setting(50.0, "norm a local gradient is clipped to", above=0)
    batch_update: bool = setting(False, "one step for the whole cohort instead of one after each client")

    @property
    def turns(self):
        return not self.batch_update

    def check(self, task):
        count = hypernetwork.size(self._inputs(task), self.hidden, self._targets(task), self.hn_rank)
        need = COPIES * count * task.data.x.new_empty(0, dtype=task.dtype).element_size()
        if need > task.data.available_memory():
            raise UserError(
                f"A hypernetwork for this model has {count:,} parameters and takes {need / 1e9:.1f} GB while it "
                "trains; set hn_rank=10 for a smaller one."
            )

    def _inputs(self, task):
        return self.embedding or 1 + task.clients // 4

    def _targets(self, task):
        return {name: v.shape for name, v in task.init(0).items()}

    def _local(self, task):
        return replace(task, momentum=self.local_momentum, weight_decay=self.local_decay, clip=self.local_clip)

    def init_server(self, task, key):
        like = torch.zeros((), dtype=torch.int64, device=task.data.device)
        net = {
            "phi": hypernetwork.init(task, key, self._inputs(task), self.hidden, self.hn_rank),
            "v": normal(like + fold(key, 1), (task.clients, self._inputs(task)), task.dtype),
        }
        return {**net, "momentum": zeros_like(net)}

    def download(self, task, server, ids, t, key):
        return {}, {"w": hypernetwork.generate(server["phi"], server["v"][ids], self._targets(task))}

    def begin(self, task, down, state, info):
        return {"w": self._local(task).slot(down["w"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {"w": self._local(task).step(w, g)}

    def finish(self, task, work, down, state, info):
        return state, {"delta": sub(down["w"], work["w"].params)}  # before minus after: a gradient, so to speak

    def aggregate(self, task, server, up, info, t, key):
        net = {"phi": server["phi"], "v": server["v"][info.id]}
        return self._stepped(server, net, self.gradient(task, net, up["delta"]), info.id)

    def gradient(self, task, net, delta):
        """Of phi, the sum over clients of J_phi^T delta_i; of v_i, J_v^T delta_i."""
        _, vjp = torch.func.vjp(lambda n: hypernetwork.generate(n["phi"], n["v"], self._targets(task)), net)
        (g,) = vjp(delta)
        return g

    def _stepped(self, server, net, g, ids):
        """SGD with clipping, weight decay and momentum, on phi and on the embeddings of these clients only."""
        names = {f"phi.{k}": v for k, v in g["phi"].items()} | {"v": g["v"]}
        clipped = clip_norm(names, self.hn_clip)
        g = {"phi": {k: clipped[f"phi.{k}"] for k in g["phi"]}, "v": clipped["v"]}
        before = {"phi": server["momentum"]["phi"], "v": server["momentum"]["v"][ids]}
        momentum = tree_map(lambda m, d, x: self.hn_momentum * m + d + self.hn_decay * x, before, g, net)
        moved = tree_map(lambda x, m: x - self.hn_lr * m, net, momentum)
        return {
            "phi": moved["phi"],
            "v": server["v"].index_copy(0, ids, moved["v"]),
            "momentum": {"phi": momentum["phi"], "v": server["momentum"]["v"].index_copy(0, ids, momentum["v"])},
        }

    def admit(self, task, server, ids, key):
        """A newcomer's embedding is drawn as the others' were."""
        new = normal(torch.zeros_like(ids[0]) + fold(key, 2), (len(ids), self._inputs(task)), task.dtype)
        v, momentum = torch.cat([server["v"], new]), torch.cat([server["momentum"]["v"], zeros_like(new)])
        return {**server, "v": v, "momentum": {**server["momentum"], "v": momentum}}

    def welcome(self, task, server, up, info, t, key):
        """The hypernetwork stays; the newcomer's embedding alone is trained, by what the newcomer sends."""
        v = server["v"][info.id]
        _, vjp = torch.func.vjp(lambda v: hypernetwork.generate(server["phi"], v, self._targets(task)), v)
        g = torch.func.vmap(lambda row: clip_norm({"v": row}, self.hn_clip)["v"])(vjp(up["delta"])[0])
        momentum = self.hn_momentum * server["momentum"]["v"][info.id] + g + self.hn_decay * v
        return {
            **server,
            "v": server["v"].index_copy(0, info.id, v - self.hn_lr * momentum),
            "momentum": {**server["momentum"], "v": server["momentum"]["v"].index_copy(0, info.id, momentum)},
        }

    def model(self, task, work, down, info):
        return work["w"]

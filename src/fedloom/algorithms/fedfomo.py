"""FedFomo: a client is sent the models of a few others. From where it was before its last training, it moves towards
those of them, and towards its own trained model, that do better on its held-out samples.

Zhang, Sapra, Fidler, Yeung, Alvarez. Personalized Federated Learning with First Order Model Optimization. ICLR 2021.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from fedloom.algorithms.local import Local
from fedloom.algorithms.parts.holdout import divided
from fedloom.algorithms.parts.measuring import measuring, tally, tally_each
from fedloom.algorithms.parts.picking import pick
from fedloom.core.algorithm import Phase
from fedloom.core.autodiff import vmap
from fedloom.core.keys import fold, stream
from fedloom.core.settings import setting
from fedloom.core.tree import norm, size_bytes, sub, take, tree_map


@dataclass(frozen=True)
class FedFomo(Local):
    name = "fedfomo"
    source = "Zhang et al., ICLR"
    paper = "Personalized Federated Learning with First Order Model Optimization"
    year = 2021
    shared = "models theta_n of M others, weights w_n"
    private = "held-out samples, model theta_i^- before its last training"
    uploads = {
        "theta": "the trained model theta_i, which others receive",
        "w": "weights of the models that it received",
    }
    no_privacy = "it uploads a whole model, which clipping would destroy"

    M: int = setting(5, "models that a client is sent", low=0)
    eps: float = setting(0.3, "chance, in round 0, that a random model is sent instead of the next best", low=0, high=1)
    eps_decay: float = setting(0.05, "by how much the chance falls per round", low=0)
    baseline: Literal["before", "trained"] = setting(
        "before", "the model that a client moves from: before its last training, or the trained one, no candidate then"
    )
    val_share: float = setting(0.2, "share of the training samples that is held out", above=0, high=0.9)

    def slots(self, task):
        return max(1, min(self.M, task.clients - 1))

    # -- the server ---------------------------------------------------------------------------------------------

    def init_server(self, task, key):
        n, device = task.clients, task.data.device
        return {
            "models": tree_map(lambda p: p.new_zeros((n, *p.shape)), task.init(key)),
            "known": torch.zeros(n, dtype=torch.bool, device=device),  # who has uploaded
            "P": torch.eye(n, dtype=task.dtype, device=device),  # affinities
        }

    def choose(self, task, server, ids, t, key):
        """Whose models each client is sent, and which of these slots are filled."""
        eps, draw = max(0.0, self.eps - self.eps_decay * t), fold(key, stream("fomo"), t)
        return pick(server["P"], server["known"] & (self.M > 0), ids, self.slots(task), eps, draw)

    def download(self, task, server, ids, t, key):
        who, there = self.choose(task, server, ids, t, key)
        return {}, {"models": take(server["models"], who), "there": there}

    def size_of_parts(self, parts):
        return int(parts["there"].sum()) * size_bytes(take(parts["models"], (0, 0)))

    def aggregate(self, task, server, up, info, t, key):
        who, _ = self.choose(task, server, info.id, t, key)  # as it was for the download
        return {
            "models": tree_map(lambda old, theta: old.index_copy(0, info.id, theta), server["models"], up["theta"]),
            "known": server["known"].index_fill(0, info.id, True),
            "P": server["P"].index_put((info.id[:, None], who), up["w"], accumulate=True),
        }

    def admit(self, task, server, ids, key):
        """A newcomer has no affinities yet; its own model is sent to nobody."""
        return {**server, "P": torch.cat([server["P"], server["P"].new_zeros(len(ids), task.clients)])}

    def welcome(self, task, server, up, info, t, key):
        who, _ = self.choose(task, server, info.id, t, key)
        return {**server, "P": server["P"].index_put((info.id[:, None], who), up["w"], accumulate=True)}

    # -- the client ---------------------------------------------------------------------------------------------

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key), "before": task.init(key)}

    def begin(self, task, down, state, info):
        zeros = torch.zeros(self.slots(task) + 1, 3, dtype=task.dtype, device=info.n.device)
        work = {**super().begin(task, down, state, info), "before": state["before"]}
        return {**work, "base": zeros[0], "each": zeros, "w": zeros[:-1, 0]}

    def phases(self, task):
        train, held_out = divided(self.val_share, "fomo")
        return [
            measuring(task, self.judge, select=held_out),
            Phase(self.step, task.epochs, select=train, enter=self.mix),
        ]

    def from_where(self, work):
        """The model that the client moves from."""
        return work["before"] if self.baseline == "before" else work["theta"].params

    def candidates(self, work, down):
        """The models that it may move to, its own trained one last, and which of them there are."""
        models = tree_map(lambda others, own: torch.cat([others, own[None]]), down["models"], work["theta"].params)
        own = torch.full_like(down["there"][:1], self.baseline == "before")
        return models, torch.cat([down["there"], own])

    def judge(self, task, work, batch, down, info):
        theta, (models, _) = work["theta"], self.candidates(work, down)
        base = tally(task, theta._replace(params=self.from_where(work)), batch)
        return {**work, "base": work["base"] + base, "each": work["each"] + tally_each(task, theta, models, batch)}

    def mix(self, task, work, down, info):
        start, (models, there) = self.from_where(work), self.candidates(work, down)
        gain = (work["base"][1] - work["each"][:, 1]) / work["base"][2].clamp(min=1)
        apart = vmap(lambda other: norm(sub(other, start)))(models)
        w = torch.where(there & torch.isfinite(gain) & (apart > 0), gain / (apart + 1e-5), 0)
        total = w.clamp(min=0).sum()
        share = w.clamp(min=0) / torch.where(total > 0, total, 1)

        def moved(own, origin, others):
            s = share.view(-1, *[1] * origin.dim())
            steps = torch.where(s > 0, s * (others - origin), 0)  # one without a share may have diverged
            return torch.where(total > 0, origin + steps.sum(0), own)

        theta = tree_map(moved, work["theta"].params, start, models)
        return {**work, "theta": work["theta"]._replace(params=theta), "before": theta, "w": w[:-1]}

    def report(self, task, work, down, info):
        return {"w": work["w"]}

    def finish(self, task, work, down, state, info):
        theta = work["theta"].params
        return {"theta": theta, "before": work["before"]}, {"theta": theta, "w": work["w"]}

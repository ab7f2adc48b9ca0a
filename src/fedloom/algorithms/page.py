"""PAGE: agents learn to balance personal and global models; a client's chooses its learning rate eta_i and its epochs
alpha_i, the server's the weights p_i of the average.

Chen, Wang, Hu, Yan, Zhou, Lin. PAGE: Equilibrate Personalization and Generalization in Federated Learning. WWW 2024.
The server's default reward, weights and fallback are this library's: with the paper's or the code's (`variant=paper`,
`variant=code`) its agent does harm. D_CS is signal and test set at once, unless the run's `dcs_holdout` divides it.
Step numbers are those of docs/methods/page.md, equation numbers those of the paper.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from fedloom.algorithms.parts.server_data import accuracies, did_not_diverge, scored_average
from fedloom.algorithms.parts.tuned import Tuned
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, stream
from fedloom.core.settings import setting
from fedloom.core.tree import leaves, where


@dataclass(frozen=True)
class PAGE(Tuned):
    name = "page"
    source = "Chen et al., WWW"
    paper = "PAGE: Equilibrate Personalization and Generalization in Federated Learning"
    year = 2024
    shared = "model W"
    private = "agent that chooses eta_i and alpha_i"
    uploads = {"w": "the trained model", "f": "accuracy of the model before training, for server_reward=weighted_local"}
    partial = False
    takes_diverged = True  # and gives them no weight
    needs_server_data = True
    pre_is_global = True
    targets = ("classes", "labels")  # agents see accuracies
    variants = MappingProxyType(
        {
            "paper": {"server_reward": "weighted_local", "p_map": "shift", "fallback": False},
            "code": {
                "server_reward": "global", "p_map": "shift", "fallback": False,
                "client_signal": "test", "decode": "clip",
            },
        }
    )  # fmt: skip

    tune_p: bool = setting(True, "the server's agent chooses p_i; otherwise 1/N")
    tune_eta: bool = setting(True, "the clients' agents choose eta_i; otherwise lr_max")
    tune_alpha: bool = setting(True, "the clients' agents choose alpha_i; otherwise ep_max")
    c_w: float = setting(1.0, "weight of the clients' rewards", low=0)
    s_w: float = setting(1.0, "weight of the server's reward", low=0)
    R_max: float = setting(100.0, "largest reward before its weight", above=0)
    noise_decisions: int = setting(500, "decisions after which the noise on clients' actions has gone", low=1)
    p_map: Literal["bounded", "shift", "softmax"] = setting("bounded", "from the server's action to p_i")
    p_range: float = setting(0.5, "bounded: how far p_i may be from 1/N, as a share of it", low=0, high=1)
    client_signal: Literal["train", "val", "test"] = setting(
        "train", "samples behind state and reward of clients; test: authors' code"
    )
    server_reward: Literal["relative", "global", "weighted_local"] = setting(
        "relative", "1/F_CS(W) less that of equal weights; 1/F_CS(W), the code's; 1/sum p_i f_i, the paper's"
    )
    fallback: bool = setting(True, "equal weights in a round in which the agent's are worse on D_CS")
    patience: int = setting(50, "rounds without a rise that make an equilibrium", low=1)
    stop_at_equilibrium: bool = setting(False, "end the run there")

    def check(self, task):
        super().check(task)
        if not task.data.splits[self.client_signal].sizes[: task.clients].all():
            what = {"val": "validation"}.get(self.client_signal, self.client_signal)
            raise UserError(f"client_signal={self.client_signal} needs {what} samples at every client; set another.")

    def reward(self, weight, loss, valid):
        """Steps 6 and 11; what has diverged earns nothing."""
        r = weight * (1 / (loss + 1e-5)).clamp(max=self.R_max)
        return torch.where(valid & torch.isfinite(loss), r, 0)

    # -- the client ---------------------------------------------------------------------------------------------

    @property
    def client_agents(self) -> bool:
        return self.tune_eta or self.tune_alpha

    def client_agent(self, task):
        return self.agent(task, states=1, actions=2, fade=self.noise_decisions)

    def init_client(self, task, key, key_i):
        payoff = {"U": torch.zeros((), dtype=task.dtype, device=key_i.device)}
        if not self.client_agents:
            return payoff
        return {**payoff, "agent": self.client_agent(task).init(fold(key_i, stream("ddpg")), task.dtype)}

    def phases(self, task):
        look = self.measuring_phase(task, self.client_signal)
        train = self.training_phase(self.decide if self.client_agents else None)
        return [look, train, look] if self.client_agents else [train, look]

    def decide(self, task, work, down, info):
        s = work["seen"][:1] / work["seen"][2].clamp(min=1)  # step 2: accuracy of W(t)
        key = fold(info.key, stream("ddpg"))
        agent, a = self.client_agent(task).decide(work["agent"], s, info.t, key, info.first)  # steps 3 and 4
        eta, alpha = self.decoded(a)
        chosen = {"eta": eta} if self.tune_eta else {}
        chosen |= {"alpha": alpha} if self.tune_alpha else {}
        return {**work, "agent": agent, "seen": torch.zeros_like(work["seen"]), **chosen}  # step 5 follows

    def outcome(self, work, info):
        """Step 6: f_i of the trained model, its reward, and the discounted sum of rewards so far (Eq. 7)."""
        valid = torch.stack([torch.isfinite(v).all() for v in leaves(work["w"].params)]).all()
        f = work["seen"][1] / work["seen"][2].clamp(min=1)
        r = self.reward(self.c_w, f, valid)
        return f, r, work["U"] + self.gamma ** info.t.to(r.dtype) * r

    def finish(self, task, work, down, state, info):
        f, r, payoff = self.outcome(work, info)
        kept, up = {"U": payoff}, {"w": work["w"].params}
        if self.client_agents:
            kept["agent"] = self.client_agent(task).rewarded(work["agent"], r)
        return kept, {**up, "f": f} if self.server_reward == "weighted_local" else up

    def report(self, task, work, down, info):
        _, r, payoff = self.outcome(work, info)
        state = {"state": work["agent"]["last"]["s"][0]} if self.client_agents else {}
        return {"reward": r, "U": payoff, "eta": work["eta"], "alpha": work["alpha"], **state}

    # -- the server ---------------------------------------------------------------------------------------------

    def server_agent(self, task):
        return self.agent(task, states=task.clients, actions=task.clients, noise=0.0)

    def init_server(self, task, key):
        zeros = torch.zeros(task.clients, dtype=task.dtype, device=task.data.device)
        server = {"w": task.init(key), "s": zeros, "p": zeros, "r": zeros[0], "U": zeros[0]}
        if self.tune_p:
            draw = torch.tensor(fold(key, stream("ddpg")), device=zeros.device)
            server["agent"] = self.server_agent(task).init(draw, task.dtype)
        return server

    def aggregate(self, task, server, up, info, t, key):
        signal = task.data.server_signal
        valid = did_not_diverge(up["w"])
        acc = torch.where(valid, accuracies(task, up["w"], signal), 0)
        s = server["s"].index_copy(0, info.id, acc)  # step 7; who did not reply keeps its entry
        average = partial(scored_average, task, up["w"], valid=valid, otherwise=server["w"], rows=signal)  # step 10
        equal = average(torch.ones_like(acc))
        agent, chosen = {}, equal
        if self.tune_p:
            draw, now = torch.full((), fold(key, stream("ddpg"), task.clients, t), device=s.device), info.t[0]
            agent, u = self.server_agent(task).decide(server["agent"], s, now, draw, now == 0)  # steps 8 and 9
            chosen = average(self.weights(u)[info.id])
        r = self.server_agent_reward(chosen, equal, up, valid)  # step 11
        if self.fallback and self.tune_p:
            chosen = where(chosen["loss"] <= equal["loss"], chosen, equal)
        new = {
            "w": chosen["w"],
            "s": s,
            "p": torch.zeros_like(s).index_copy(0, info.id, chosen["p"]),
            "r": r,
            "U": server["U"] + self.gamma**t * r,  # Eq. 6
        }
        return {**new, "agent": self.server_agent(task).rewarded(agent, r)} if self.tune_p else new

    def server_agent_reward(self, chosen, equal, up, valid):
        """Step 11; without an agent nothing is relative, as weights are equal."""
        if self.server_reward == "weighted_local":
            return self.reward(self.s_w, torch.where(valid, chosen["p"] * up["f"], 0).sum(), valid.any())
        r = self.reward(self.s_w, chosen["loss"], valid.any())
        relative = self.server_reward == "relative" and self.tune_p
        return r - self.reward(self.s_w, equal["loss"], valid.any()) if relative else r

    def weights(self, u):
        """Step 9: p_i from an action in [-1, 1]^N."""
        if self.p_map == "softmax":
            return torch.softmax(u, 0)
        p = 1 + self.p_range * u if self.p_map == "bounded" else u + 1 + 1e-8
        return p / p.sum()

    def report_server(self, task, server, info):
        return {"p": server["p"][info.id], "reward_CS": server["r"], "U_CS": server["U"]}

    def report_round(self, rounds):
        """`equilibrium`: in the last `patience` rounds, the means over 10 rounds of both models' accuracy rose by less
        than 0.1 points."""

        def trailing(metric, end):
            past = [row for row in rounds if row["round"] <= end]
            return np.mean([row[metric] for row in past if row["round"] > past[-1]["round"] - 10] or [-np.inf])

        now = rounds[-1]["round"]
        rises = [trailing(m, now) - trailing(m, now - self.patience) for m in ("acc_global", "post_acc_mean")]
        return {"equilibrium": bool(max(rises) < 0.1)}

    def should_stop(self, rounds):
        return self.stop_at_equilibrium and rounds[-1]["equilibrium"]

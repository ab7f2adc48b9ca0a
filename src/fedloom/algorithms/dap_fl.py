"""Dap-FL: FedAvg in which an agent at every client chooses the learning rate eta_i and the number of epochs alpha_i,
and is paid by how much better the next global model fits the client.

Chen, Wang, Chen, Yan, Lin. Dap-FL: Federated Learning Flourishes by Adaptive Tuning and Secure Aggregation. IEEE
Transactions on Parallel and Distributed Systems 34(6), 2023. Without its F1 term, cost critic and secure aggregation:
this is the version that PAGE is compared with.
"""

from dataclasses import dataclass

import torch

from fedloom.algorithms.parts.tuned import Tuned
from fedloom.core.errors import UserError
from fedloom.core.keys import fold, stream
from fedloom.core.settings import setting


@dataclass(frozen=True)
class DapFL(Tuned):
    name = "dap-fl"
    source = "Chen et al., TPDS"
    paper = "Dap-FL: Federated Learning Flourishes by Adaptive Tuning and Secure Aggregation"
    year = 2023
    shared = "model w"
    private = "agent that chooses eta_i and alpha_i"
    uploads = {"w": "the trained model"}
    pre_is_global = True
    targets = ("classes", "labels")  # agents see accuracies
    averages = True

    critic_lr: float = setting(0.001, "learning rate of critics", above=0)
    actor_lr: float = setting(0.0001, "learning rate of actors", above=0)
    tau: float = setting(0.001, "share of the new networks that targets take over", low=0, high=1)
    compat: bool = setting(False, "as PAGE's code: equal weights; rewards with the test loss after local training")

    def check(self, task):
        super().check(task)
        if self.compat and not task.data.splits["test"].sizes.all():
            raise UserError("dap-fl's compat=true needs test samples at every client; set compat=false.")

    def client_agent(self, task):
        return self.agent(task, states=2, actions=2, fade=None)  # the noise stays

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        state = {"agent": self.client_agent(task).init(fold(key_i, stream("ddpg")), task.dtype)}
        return {**state, "before": torch.zeros_like(state["agent"]["last"]["s"])} if self.compat else state

    def begin(self, task, down, state, info):
        work = super().begin(task, down, state, info)
        return {**work, "s": work["seen"][:2], "r": work["seen"][0]}

    def phases(self, task):
        phases = [self.measuring_phase(task), self.training_phase(self.decide)]
        return [*phases, self.measuring_phase(task, "test")] if self.compat else phases

    def decide(self, task, work, down, info):
        agent, s = work["agent"], quality(work["seen"])  # of w^t
        if not self.compat:  # what the last decision was good for shows in the model that follows it
            work = {**work, "r": torch.where(info.first, 0, gain(agent["last"]["s"], s))}
            agent = self.client_agent(task).rewarded(agent, work["r"])
        key = fold(info.key, stream("ddpg"))
        agent, a = self.client_agent(task).decide(agent, s, info.t, key, info.first)
        eta, alpha = self.decoded(a)
        return {**work, "agent": agent, "seen": torch.zeros_like(work["seen"]), "s": s, "eta": eta, "alpha": alpha}

    def after(self, work, info):
        """compat: accuracy before and test loss after training, and the reward of this round's decision."""
        now = torch.stack([work["s"][0], quality(work["seen"])[1]])
        return now, torch.where(info.first, 0, gain(work["before"], now))

    def finish(self, task, work, down, state, info):
        kept, up = {"agent": work["agent"]}, {"w": work["w"].params}
        if self.compat:
            kept["before"], r = self.after(work, info)
            kept["agent"] = self.client_agent(task).rewarded(kept["agent"], r)
        return kept, up

    def report(self, task, work, down, info):
        r = self.after(work, info)[1] if self.compat else work["r"]
        return {"reward": r, "eta": work["eta"], "alpha": work["alpha"], "acc": work["s"][0], "loss": work["s"][1]}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"], None if self.compat else info.n)}


def quality(seen):
    """Accuracy and mean loss."""
    return seen[:2] / seen[2].clamp(min=1)


def gain(old, new):
    """By how much accuracy rose and loss fell."""
    return (new[0] - old[0]) + (old[1] - new[1])

"""pFedMe: a client's model is the best one near the global model, which in turn moves towards what clients found.

Dinh, Tran, Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020.
"""

import logging
from dataclasses import dataclass

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.errors import UserError
from fedloom.core.settings import setting
from fedloom.core.tree import axpy, sub, where

log = logging.getLogger("fedloom")


@dataclass(frozen=True)
class PFedMe(Algorithm):
    name = "pfedme"
    source = "Dinh et al., NeurIPS"
    paper = "Personalized Federated Learning with Moreau Envelopes"
    year = 2020
    shared = "model w"
    private = "model theta_i"
    uploads = {"w": "the trained local model"}
    global_slot = "theta"  # w itself sees no samples
    averages = True

    lam: float = setting(15.0, "lambda, how near theta_i stays to w_i", above=0)
    inner_steps: int = setting(5, "K, steps on theta_i with each batch", low=1)
    personal_lr: float = setting(0.01, "eta_p, learning rate of theta_i", above=0)
    mu: float = setting(0.001, "weight decay of theta_i", low=0)
    eta_g: float = setting(1.0, "beta in the paper, step size of the server", above=0)

    def check(self, task):
        for name, rate in (("lr", task.lr), ("personal_lr", self.personal_lr)):
            factor = rate * self.lam
            if factor >= 2:
                raise UserError(
                    f"pfedme diverges where {name} times lam is 2 or more, and {rate:g} * {self.lam:g} = {factor:g}; "
                    f"set {name} below {2 / self.lam:.2g}."
                )
            if factor >= 1:
                log.warning("pfedme oversteps with %s * lam = %g; values below 1 are usual.", name, factor)

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        theta = where(info.first, down["w"], state["theta"])  # a client that never trained uses the global model
        return {"theta": task.slot(theta), "w": down["w"]}

    def phases(self, task):
        return [Phase(self.step, task.epochs, enter=self.enter)]

    def enter(self, task, work, down, info):
        return {**work, "theta": work["theta"]._replace(params=down["w"])}  # training starts from w^t

    def step(self, task, work, batch, down, info):
        theta, w = work["theta"], work["w"]
        for _ in range(self.inner_steps):
            g, theta = task.grad(theta, batch)
            g = axpy(self.lam, sub(theta.params, w), axpy(self.mu, theta.params, g))
            theta = task.step(theta, g, lr=self.personal_lr)
        return {"theta": theta, "w": axpy(-task.eta * self.lam, sub(w, theta.params), w)}

    def finish(self, task, work, down, state, info):
        return {"theta": work["theta"].params}, {"w": work["w"]}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": axpy(self.eta_g, sub(task.average(up["w"], info.n), server["w"]), server["w"])}

    def model(self, task, work, down, info):
        return work["theta"]

    def global_model(self, task, server):
        return server["w"]

"""Local: every client trains alone; the baseline that federation has to beat."""

from dataclasses import dataclass

from fedloom.core.algorithm import Algorithm, Phase


@dataclass(frozen=True)
class Local(Algorithm):
    name = "local"
    source = "baseline"
    shared = "nothing"
    private = "model theta_i"
    uploads = {}

    def init_client(self, task, key, key_i):
        return {"theta": task.init(key)}

    def begin(self, task, down, state, info):
        return {"theta": task.slot(state["theta"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        g, theta = task.grad(work["theta"], batch)
        return {**work, "theta": task.step(theta, g)}

    def finish(self, task, work, down, state, info):
        return {"theta": work["theta"].params}, {}

    def model(self, task, work, down, info):
        return work["theta"]

"""FedAvg: clients train the global model on their data, the server averages the results.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017.
"""

from dataclasses import dataclass

from fedloom.core.algorithm import Algorithm, Phase


@dataclass(frozen=True)
class FedAvg(Algorithm):
    name = "fedavg"
    source = "McMahan et al., AISTATS"
    paper = "Communication-Efficient Learning of Deep Networks from Decentralized Data"
    year = 2017
    shared = "model w"
    private = "nothing"
    uploads = {"w": "the trained model"}
    pre_is_global = True
    averages = True

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def begin(self, task, down, state, info):
        return {"w": task.slot(down["w"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        return {**work, "w": task.step(w, g)}

    def finish(self, task, work, down, state, info):
        return state, {"w": work["w"].params}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"], info.n)}

    def model(self, task, work, down, info):
        return work["w"]

    def global_model(self, task, server):
        return server["w"]

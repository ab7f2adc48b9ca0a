"""The clients of `vs_flower.py`: what Flower's workers import."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.models.zoo import MODELS

INPUTS, CLASSES, BATCH, LR = 64, 10, 10, 0.01

app = ClientApp()


@cache
def samples(i: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of client i; a worker makes them once."""
    draw = np.random.default_rng(i)
    return torch.from_numpy(draw.standard_normal((n, INPUTS), np.float32)), torch.from_numpy(
        draw.integers(0, CLASSES, n)
    )


@cache
def module(name: str) -> torch.nn.Module:
    torch.set_num_threads(1)  # a worker per core
    return MODELS[name]().build((INPUTS,), CLASSES)


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    model = module(config["model"])
    x, y = samples(context.node_config["partition-id"], config["samples"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rows in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)

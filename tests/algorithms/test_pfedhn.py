"""pFedHN: the hypernetwork's size and embeddings, who steps when, and a second implementation."""

import numpy as np
import torch
import torch.nn.functional as F
from helpers import EAGER, RAGGED, SingleRun, make_task, method, run_rounds
from oracles import assert_near, batches, is_near, net_of
from torch import nn

from fedloom.algorithms.parts import hypernetwork

SMALL = {"hidden": 1, "embedding": 3}


def test_the_number_of_parameters():
    """A target of P values needs 100 P weights and P biases; the trunk from e = 6: 6*100 + 100, and five times 100*100
    + 100."""
    shapes = {"weight": torch.Size([10, 64]), "bias": torch.Size([10])}
    trunk = 6 * 100 + 100 + 5 * (100 * 100 + 100)
    assert hypernetwork.size(6, 5, shapes, None) == trunk + 101 * 650
    assert hypernetwork.size(6, 5, shapes, 4) == trunk + 2 * (100 * 4 + 4) + 5 * 650


def test_the_embedding_grows_with_the_clients():
    task = make_task(RAGGED)
    assert SingleRun(method("pfedhn"), task, 0, plan=EAGER).server["v"].shape == (12, 4)  # 1 + 12 / 4


def test_rows_of_embeddings_give_rows_of_models():
    task = make_task(RAGGED)
    run = SingleRun(method("pfedhn", **SMALL), task, 0, plan=EAGER)
    shapes = {k: v.shape for k, v in task.init(0).items()}
    both = hypernetwork.generate(run.server["phi"], run.server["v"][:2], shapes)
    one = hypernetwork.generate(run.server["phi"], run.server["v"][1:2], shapes)
    assert {k: tuple(v.shape[1:]) for k, v in both.items()} == {k: tuple(s) for k, s in shapes.items()}
    assert_near({k: v[1:] for k, v in both.items()}, one)


def test_only_clients_of_the_round_get_new_embeddings():
    task = make_task(RAGGED, participation=3)
    run = SingleRun(method("pfedhn"), task, 0, plan=EAGER)
    before = run.server["v"].clone()
    done = run.advance(evaluate=False)
    moved = (run.server["v"] != before).any(1)
    assert np.flatnonzero(moved.numpy()).tolist() == done.cohort.tolist()


def test_in_turns_the_second_client_gets_what_the_first_one_changed():
    task = make_task((20, 20))
    in_turns, _ = run_rounds(method("pfedhn"), task, rounds=1)
    at_once, _ = run_rounds(method("pfedhn", batch_update=True), task, rounds=1)
    assert not is_near(in_turns.server, at_once.server, 1e-6)


class PlainHypernetwork(nn.Module):
    """As in the authors' description: an embedding, a trunk, an output layer per tensor."""

    def __init__(self, clients, e, hidden, shapes):
        super().__init__()
        self.shapes = shapes
        self.v = nn.ParameterList([nn.Parameter(torch.zeros(e)) for _ in range(clients)])
        trunk = [nn.Linear(e, 100)]
        for _ in range(hidden):
            trunk += [nn.ReLU(), nn.Linear(100, 100)]
        self.trunk = nn.Sequential(*trunk)
        self.out = nn.ModuleList([nn.Linear(100, s.numel()) for s in shapes.values()])

    def forward(self, i):
        x = self.trunk(self.v[i])
        return {k: o(x).view(s) for o, (k, s) in zip(self.out, self.shapes.items(), strict=True)}


def test_pfedhn_against_plain_pytorch():
    """One optimiser over everything would move the embeddings of other clients by momentum and decay; here every
    embedding has its own, which steps when its client took part."""
    sizes = (7, 25, 13)
    task = make_task(sizes, epochs=2)
    run = SingleRun(method("pfedhn", **SMALL), task, 3, plan=EAGER)
    shapes = {k: v.shape for k, v in task.init(run.key).items()}
    hyper = PlainHypernetwork(3, 3, 1, shapes).double()
    with torch.no_grad():
        for i in range(3):
            hyper.v[i].copy_(run.server["v"][i])
        for j in range(2):
            for kind in ("weight", "bias"):
                getattr(hyper.trunk[2 * j], kind).copy_(run.server["phi"][f"trunk.{j}.{kind}"])
        for j in range(len(shapes)):
            for kind in ("weight", "bias"):
                getattr(hyper.out[j], kind).copy_(run.server["phi"][f"out.{j}.{kind}"])
    rest = [p for k, p in hyper.named_parameters() if not k.startswith("v.")]
    sgd = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}
    common = torch.optim.SGD(rest, **sgd)
    per_client = [torch.optim.SGD([hyper.v[i]], **sgd) for i in range(3)]
    for t in range(3):
        for i in range(3):
            made = hyper(i)
            module = net_of({k: v.detach() for k, v in made.items()})
            local = torch.optim.SGD(module.parameters(), lr=task.lr, momentum=0.9, weight_decay=5e-5)
            for x, y in batches(task, i, t, task.epochs):
                local.zero_grad()
                F.cross_entropy(module(x), y).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 50)
                local.step()
            delta = {k: made[k].detach() - v.detach() for k, v in module.named_parameters()}
            common.zero_grad()
            per_client[i].zero_grad()
            torch.autograd.backward([made[k] for k in delta], [delta[k] for k in delta])
            nn.utils.clip_grad_norm_([*rest, hyper.v[i]], 50)
            common.step()
            per_client[i].step()
        run.advance(evaluate=False)
    assert_near(run.server["v"], torch.stack([v.detach() for v in hyper.v]), 1e-9)
    for j in range(len(shapes)):
        assert_near(run.server["phi"][f"out.{j}.weight"], hyper.out[j].weight.detach(), 1e-9)
    assert_near(run.server["phi"]["trunk.0.weight"], hyper.trunk[0].weight.detach(), 1e-9)

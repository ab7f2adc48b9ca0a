"""pFedHN and PLGU-GHN: sizes, vector-Jacobian products, who steps when, and a second implementation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import RAGGED, SingleRun, SmallNet, make_task, method
from sentences import user_error
from torch import nn

from fedloom.algorithms import pfedhn
from fedloom.algorithms.parts import hypernetwork
from fedloom.core.federation import Federation
from fedloom.core.algorithm import Phase
from fedloom.core.keys import root
from fedloom.core.tree import leaves
from fedloom.engine import batching as schedule
from fedloom.engine.planning.plan import Plan
from fedloom.studies.build import check

PLAN = Plan("stacked", "eager", chunk=len(RAGGED))
SMALL = {"hidden": 1, "embedding": 3}


def play(alg, task, rounds=2, seed=3):
    run = SingleRun(alg, task, seed, plan=PLAN)
    for _ in range(rounds):
        run.advance(evaluate=False)
    return run


def assert_near(a, b, tolerance=1e-12):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_the_number_of_parameters():
    """A target of P values needs 100 P weights and P biases; the trunk from e = 6: 6*100 + 100, and five times 100*100
    + 100."""
    shapes = {"weight": torch.Size([10, 64]), "bias": torch.Size([10])}
    trunk = 6 * 100 + 100 + 5 * (100 * 100 + 100)
    assert hypernetwork.size(6, 5, shapes, None) == trunk + 101 * 650
    assert hypernetwork.size(6, 5, shapes, 4) == trunk + 2 * (100 * 4 + 4) + 5 * 650


def test_the_embedding_grows_with_the_clients():
    task = make_task(RAGGED)
    assert SingleRun(method("pfedhn"), task, 0, plan=PLAN).server["v"].shape == (12, 4)  # 1 + 12 / 4


def test_a_hypernetwork_that_does_not_fit_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(Federation, "available_memory", lambda data: 2 << 20)
    task = make_task(RAGGED)
    with user_error("parameters", "GB", "hn_rank"):
        check(method("plgu-ghn"), task)
    check(method("plgu-ghn", hn_rank=1, hidden=0), task)


def test_rows_of_embeddings_give_rows_of_models():
    task = make_task(RAGGED)
    run = SingleRun(method("pfedhn", **SMALL), task, 0, plan=PLAN)
    shapes = {k: v.shape for k, v in task.init(0).items()}
    both = hypernetwork.generate(run.server["phi"], run.server["v"][:2], shapes)
    one = hypernetwork.generate(run.server["phi"], run.server["v"][1:2], shapes)
    assert {k: tuple(v.shape[1:]) for k, v in both.items()} == {k: tuple(s) for k, s in shapes.items()}
    assert_near({k: v[1:] for k, v in both.items()}, one)


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_are_those_of_finite_differences_at_the_perturbed_point(rank):
    """g_phi is the derivative of mean_i <h(v_i; phi + eps), Delta_i>, g_{v_i} that of <h(v_i; phi + eps), Delta_i>,
    with eps = rho * g / ||g|| and g the derivative at phi itself; checked along random directions."""
    task = make_task((5, 9, 4))
    alg = method("plgu-ghn", rho=0.3, hn_rank=rank, **SMALL)
    server = SingleRun(alg, task, 0, plan=PLAN).server
    shapes = {k: v.shape for k, v in task.init(0).items()}
    draw = torch.Generator().manual_seed(1)
    delta = {k: torch.randn(3, *s, generator=draw, dtype=torch.float64) for k, s in shapes.items()}
    phi, v = server["phi"], server["v"]

    def value(phi, v, weights):
        made = hypernetwork.generate(phi, v, shapes)
        each = sum((made[k] * delta[k]).flatten(1).sum(1) for k in made)
        return float((each * weights).sum())

    def along(direction, weights, at):
        h = 1e-5
        up = {k: at[k] + h * direction[k] for k in at}
        down = {k: at[k] - h * direction[k] for k in at}
        return (value(up, v, weights) - value(down, v, weights)) / (2 * h)

    mean = torch.full((3,), 1 / 3, dtype=torch.float64)
    plain = method("pfedhn", hn_rank=rank, **SMALL).gradient(task, {"phi": phi, "v": v}, delta)["phi"]
    length = torch.cat([g.flatten() for g in plain.values()]).norm()
    there = {k: phi[k] + 0.3 * plain[k] / length for k in phi}
    found = alg.gradient(task, {"phi": phi, "v": v}, delta)
    for _ in range(5):
        direction = {k: torch.randn(p.shape, generator=draw, dtype=torch.float64) for k, p in phi.items()}
        for at, g in ((phi, plain), (there, found["phi"])):
            expected = along(direction, mean, at)
            assert sum(float((g[k] * direction[k]).sum()) for k in g) == pytest.approx(expected, rel=1e-6)
    for i in range(3):
        one = torch.zeros(3, dtype=torch.float64)
        one[i] = 1
        for j in range(v.shape[1]):
            step = torch.zeros_like(v)
            step[i, j] = 1e-5
            expected = (value(there, v + step, one) - value(there, v - step, one)) / 2e-5
            assert float(found["v"][i, j]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_ghn_without_radius_and_with_one_client_at_a_time_is_pfedhn():
    task = make_task(RAGGED, participation=1 / 12)
    ghn, hn = play(method("plgu-ghn", rho=0.0), task, 4), play(method("pfedhn"), task, 4)
    assert_near(ghn.server, hn.server)
    task = make_task(RAGGED, participation=0.5)
    assert_near(play(method("plgu-ghn", rho=0.0), task).server, play(method("pfedhn", batch_update=True), task).server)


def test_clients_that_do_not_move_leave_only_decay():
    """Delta = 0: the first step is m = decay * x, x - lr * decay * x."""
    task = make_task((5, 9, 4))
    alg = method("plgu-ghn", **SMALL)
    run = SingleRun(alg, task, 0, plan=PLAN)
    cohort = run.cohort(np.arange(3), 0)
    still = {"delta": {k: torch.zeros_like(v) for k, v in cohort.parts["w"].items()}}
    after = alg.aggregate(task, run.server, still, cohort.info, 0, 0)
    assert_near(after["phi"], {k: v * (1 - 0.01 * 1e-3) for k, v in run.server["phi"].items()})
    assert_near(after["v"], run.server["v"] * (1 - 0.01 * 1e-3))


def test_only_clients_of_the_round_get_new_embeddings():
    task = make_task(RAGGED, participation=3)
    run = SingleRun(method("pfedhn"), task, 0, plan=PLAN)
    before = run.server["v"].clone()
    done = run.advance(evaluate=False)
    moved = (run.server["v"] != before).any(1)
    assert np.flatnonzero(moved.numpy()).tolist() == done.cohort.tolist()


def test_in_turns_the_second_client_gets_what_the_first_one_changed():
    task = make_task((20, 20))
    turns, together = play(method("pfedhn"), task, 1), play(method("pfedhn", batch_update=True), task, 1)
    assert any(not torch.allclose(a, b) for a, b in zip(leaves(turns.server), leaves(together.server), strict=True))


def test_what_travels_is_a_model_each_way():
    task = make_task(RAGGED)
    model = sum(v.numel() * v.element_size() for v in task.init(0).values())
    for name in ("pfedhn", "plgu-ghn"):
        done = SingleRun(method(name), task, 0, plan=PLAN).advance(evaluate=False)
        assert done.bytes_down == done.bytes_up == 12 * model


def batches(task, i, t):
    table = schedule.build(task, Phase(lambda *a: None), 3, np.array([i]), t, np.array([task.epochs]))
    return [(b.x, b.y) for b in table.batches(task, 0)]


class Hyper(nn.Module):
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
    run = SingleRun(method("pfedhn", **SMALL), task, 3, plan=PLAN)
    shapes = {k: v.shape for k, v in task.init(root(3, "init")).items()}
    hyper = Hyper(3, 3, 1, shapes).double()
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
    own = [torch.optim.SGD([hyper.v[i]], **sgd) for i in range(3)]
    for t in range(3):
        for i in range(3):
            made = hyper(i)
            module = SmallNet(6, 8, 4).double()
            module.load_state_dict({k: v.detach() for k, v in made.items()})
            local = torch.optim.SGD(module.parameters(), lr=task.lr, momentum=0.9, weight_decay=5e-5)
            for x, y in batches(task, i, t):
                local.zero_grad()
                F.cross_entropy(module(x), y).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 50)
                local.step()
            delta = {k: made[k].detach() - v.detach() for k, v in module.named_parameters()}
            common.zero_grad()
            own[i].zero_grad()
            torch.autograd.backward([made[k] for k in delta], [delta[k] for k in delta])
            nn.utils.clip_grad_norm_([*rest, hyper.v[i]], 50)
            common.step()
            own[i].step()
        run.advance(evaluate=False)
    assert_near(run.server["v"], torch.stack([v.detach() for v in hyper.v]), 1e-9)
    for j in range(len(shapes)):
        assert_near(run.server["phi"][f"out.{j}.weight"], hyper.out[j].weight.detach(), 1e-9)
    assert_near(run.server["phi"]["trunk.0.weight"], hyper.trunk[0].weight.detach(), 1e-9)

"""LWSAM, PLGU-LF and PLGU-GRep: the spec's oracles and invariants, and a second implementation in plain PyTorch."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import RAGGED, SingleRun, SmallNet, make_task, method
from sentences import user_error
from torch import nn

from fedloom.algorithms.parts.lwsam import by_name, distances, largest, perturbation, scores
from fedloom.config.resolve import configure
from fedloom.core.algorithm import Phase
from fedloom.core.task import Task
from fedloom.core.tree import leaves
from fedloom.engine import batching as schedule
from fedloom.engine.planning.plan import Plan
from fedloom.nn.network import Network

PLAN = Plan("stacked", "eager", chunk=len(RAGGED))


def play(alg, task, rounds=3):
    run = SingleRun(alg, task, 3, plan=PLAN)
    for _ in range(rounds):
        run.advance(evaluate=False)
    return run


def assert_near(a, b, tolerance=1e-12):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# -- LWSAM ------------------------------------------------------------------------------------------------------


def test_the_perturbation_of_a_model_with_two_layers():
    """Spec 11: distances 3 and 4, dims 4 and 16, so d = 3/4 and 4/16 and xi = d / (3/4 + 1/4) = (3/4, 1/4). The
    gradient (3, 0, 0, 0), (4, 0, ..., 0) has norm 5: eps = 0.1 * 3/4 * 3/5 = 0.045 and 0.1 * 1/4 * 4/5 = 0.02."""
    layers = (("a",), ("b",))
    w = {"a": torch.zeros(4), "b": torch.zeros(16)}
    theta = {"a": torch.tensor([3.0, 0, 0, 0]), "b": torch.tensor([0.0] * 15 + [4.0])}
    g = {"a": torch.tensor([3.0, 0, 0, 0]), "b": torch.tensor([4.0] + [0.0] * 15)}
    xi = scores(distances(theta, w, layers))
    assert xi.tolist() == pytest.approx([0.75, 0.25])
    eps = perturbation(g, 0.1, by_name(xi, layers))
    assert eps["a"].tolist() == pytest.approx([0.045, 0, 0, 0])
    assert eps["b"].tolist() == pytest.approx([0.02] + [0.0] * 15)


def test_without_scores_it_is_the_step_of_sam():
    """g = (3, 4), rho = 1: eps = g / 5."""
    assert perturbation({"w": torch.tensor([3.0, 4.0])}, 1.0)["w"].tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, 10.0, float("inf")])
def test_the_perturbation_has_norm_rho_and_no_other_of_that_norm_gains_more(p):
    g = torch.from_numpy(np.random.default_rng(0).normal(size=40))
    eps = perturbation({"a": g[:15], "b": g[15:]}, 0.3, p=p)
    flat = torch.cat([eps["a"], eps["b"]])
    assert torch.linalg.vector_norm(flat, p) == pytest.approx(0.3, rel=1e-9)
    others = torch.from_numpy(np.random.default_rng(1).normal(size=(2000, 40)))
    others = 0.3 * others / torch.linalg.vector_norm(others, p, dim=1, keepdim=True)
    assert (others @ g).max() < flat @ g


def test_a_large_p_goes_along_the_signs():
    eps = perturbation({"w": torch.tensor([2.0, -0.5, 0.0])}, 0.1, p=float("inf"))["w"]
    assert eps.tolist() == pytest.approx([0.1, -0.1, 0.0])


def test_where_there_is_no_gradient_there_is_no_perturbation():
    assert perturbation({"w": torch.zeros(3)}, 0.1)["w"].tolist() == [0, 0, 0]
    assert perturbation({"w": torch.zeros(3)}, 0.1, p=3.0)["w"].tolist() == [0, 0, 0]


def test_scores_are_normalised_as_asked_and_uniform_where_models_agree():
    d = torch.tensor([0.2, 0.6])
    assert scores(d).tolist() == pytest.approx([0.25, 0.75])
    assert scores(d, "mean1").tolist() == pytest.approx([0.5, 1.5])
    assert scores(d, "raw").tolist() == pytest.approx([0.2, 0.6])
    assert scores(torch.zeros(4)).tolist() == [0.25] * 4


def test_the_largest_scores_win_and_the_first_of_equals():
    assert largest(torch.tensor([0.2, 0.5, 0.3]), 1).tolist() == [False, True, False]  # spec 11
    assert largest(torch.tensor([0.25] * 4), 2).tolist() == [True, True, False, False]
    assert largest(torch.tensor([0.1, 0.3, 0.3, 0.3]), 2).tolist() == [False, True, True, False]
    for count in (0, 9):
        assert largest(torch.tensor([0.2, 0.5]), count).tolist() == [count > 0] * 2


# -- PLGU-LF ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [0, 1, 2, None])
def test_without_radius_the_global_model_is_fedavgs_with_a_plain_average_whatever_D_is(d):
    task = make_task([20] * 6, participation=0.5, epochs=2)  # equal sizes: plain and weighted average agree
    fedavg = play(method("fedavg"), task).server["w"]
    assert_near(play(method("plgu-lf", rho=0.0, D=d), task).server["w"], fedavg, 1e-11)


def test_without_radius_and_personal_layers_both_models_of_a_client_are_the_same():
    task = make_task(RAGGED)
    alg = method("plgu-lf", rho=0.0, D=0)
    run = SingleRun(alg, task, 3, plan=PLAN)
    run.advance(evaluate=False)
    before = run.server["w"]
    cohort = run.cohort(np.arange(len(RAGGED)), run.t)
    done = run.executor.train(cohort, ())
    ends = {k: before[k] + v for k, v in done.up["delta"].items()}
    assert_near(done.client_state["theta"], ends, 1e-12)


def test_with_all_layers_personal_a_client_trains_alone():
    task = make_task(RAGGED, participation=0.5)
    for d in (2, 7):  # clamped to the number of layers
        theta = play(method("plgu-lf", D=d), task).store.everyone()["own"]["theta"]
        assert_near(theta, play(method("local"), task).store.everyone()["own"]["theta"])


def test_by_default_a_small_model_keeps_one_layer_universal():
    task = make_task(RAGGED)
    assert_near(play(method("plgu-lf"), task).server, play(method("plgu-lf", D=1), task).server)


def test_perturb_sets_are_what_they_say():
    task = make_task(RAGGED)
    plain = play(method("plgu-lf", rho=0.0, D=1), task).server
    none_personal = play(method("plgu-lf", rho=0.5, D=0, perturb_set="per"), task).server
    assert_near(none_personal, play(method("plgu-lf", rho=0.0, D=0), task).server)
    none_universal = play(method("plgu-lf", rho=0.5, D=2, perturb_set="uni"), task).server
    assert_near(none_universal, play(method("plgu-lf", rho=0.0, D=2), task).server)
    for chosen in ("all", "per", "uni"):
        moved = play(method("plgu-lf", rho=0.5, D=1, perturb_set=chosen), task).server
        assert any(not torch.allclose(a, b) for a, b in zip(leaves(moved), leaves(plain), strict=True))


def test_steps_instead_of_epochs():
    task = make_task([35] * 4, epochs=3)
    run = SingleRun(method("plgu-lf", count="steps"), task, 0, plan=PLAN)
    (phase,) = run.alg.phases(task)
    assert schedule.build(task, phase, 0, np.arange(4), 0, np.ones(4, int)).steps.tolist() == [3] * 4


def test_layer_scores_are_reported():
    run = SingleRun(method("plgu-lf"), make_task(RAGGED), 0, plan=PLAN)
    first, second = run.advance(), run.advance()
    assert first.reports["xi"].shape == (len(RAGGED), 2)
    np.testing.assert_allclose(first.reports["xi"], 0.5)  # everybody starts from the same model
    np.testing.assert_allclose(second.reports["xi"].sum(1), 1)
    assert np.ptp(second.reports["xi"][:, 0]) > 1e-3


# -- PLGU-GRep --------------------------------------------------------------------------------------------------


def test_grep_without_radius_is_fedrep_that_steps_twice_per_batch():
    task = make_task(RAGGED, participation=0.5)
    settings = {"head_epochs": 2, "average": "clients"}
    found = play(method("plgu-grep", rho=0.0, **settings), task)
    fedrep = method("fedrep", **settings)

    def twice(task, work, batch, down, info):
        for _ in range(2):
            work = fedrep.body_step(task, work, batch, down, info)
        return work

    class Twice(type(fedrep)):
        def phases(self, task):
            return [Phase(self.head_step, 2), Phase(twice, 1)]

    expected = play(Twice(**settings), task)
    assert_near(found.server["phi"], expected.server["phi"])
    assert_near(found.store.everyone()["own"]["h"], expected.store.everyone()["own"]["h"])


def test_grep_keeps_the_body_that_it_sent():
    task = make_task(RAGGED)
    run = SingleRun(method("plgu-grep"), task, 0, plan=PLAN)
    done = run.executor.train(run.cohort(np.arange(len(RAGGED)), 0), ())
    assert_near(done.client_state["phi"], done.up["phi"])


def test_grep_scores_are_of_the_body_only_and_reported():
    run = SingleRun(method("plgu-grep"), make_task(RAGGED), 0, plan=PLAN)
    assert run.advance().reports["xi"].shape == (len(RAGGED), 1)  # SmallNet: one layer, and the head


def test_grep_needs_a_body_or_leave_to_go_without():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            return self.head(x)

    task = make_task(RAGGED)
    task = Task(task.data, Network(One, "head", task.data.x[:2]), lr=0.1, rounds=2)
    from fedloom.studies.build import check

    with user_error("single layer", "allow_degenerate"):
        check(method("plgu-grep"), task)
    alg = method("plgu-grep", allow_degenerate=True, head_epochs=1)
    assert_near(
        play(alg, task).store.everyone()["own"]["h"], play(method("local"), task).store.everyone()["own"]["theta"]
    )


@pytest.mark.parametrize(
    ("name", "values"), [("plgu-lf", {"D": -1}), ("plgu-lf", {"rho": -0.1}), ("plgu-grep", {"p": 1})]
)
def test_values_out_of_range_are_refused(name, values):
    (key,) = values
    with user_error(key, "must be"):
        configure(name, values=values)


# -- a second implementation ------------------------------------------------------------------------------------


def batches(task, i, t, epochs):
    """The samples that client i sees, from the engine's schedule."""
    table = schedule.build(task, Phase(lambda *a: None), 3, np.array([i]), t, np.array([epochs]))
    return [(b.x, b.y) for b in table.batches(task, 0)]


def gradient(module, x, y, only=lambda name: True):
    loss = F.cross_entropy(module(x), y)
    names = [k for k, _ in module.named_parameters() if only(k)]
    found = torch.autograd.grad(loss, [module.get_parameter(k) for k in names])
    return dict(zip(names, found, strict=True))


def shift(module, change, factor):
    with torch.no_grad():
        for k, v in change.items():
            module.get_parameter(k).add_(factor * v)


def layer(name):
    return name.split(".")[0]


def layer_scores(a, b, names):
    groups = {}
    for k in names:
        groups.setdefault(layer(k), []).append(k)
    d = {
        g: torch.cat([(a[k] - b[k]).flatten() for k in ks]).norm() / sum(a[k].numel() for k in ks)
        for g, ks in groups.items()
    }
    total = sum(d.values())
    return {g: v / total if total > 1e-12 else torch.tensor(1 / len(d)) for g, v in d.items()}


def sharp(g, xi, rho):
    length = torch.cat([v.flatten() for v in g.values()]).norm()
    return {k: rho * xi[layer(k)] * v / length for k, v in g.items()}


SIZES = (7, 25, 13, 1)


def start(task, seed=3):
    from fedloom.core.keys import root

    module = SmallNet(6, 8, 4).double()
    module.load_state_dict(task.init(root(seed, "init")))
    return module


def test_plgu_lf_against_plain_pytorch():
    task = make_task(SIZES, epochs=2)
    lr, rho = task.lr, 0.7
    w = start(task)
    thetas = [copy.deepcopy(w) for _ in SIZES]
    for t in range(3):
        ends = []
        for i in range(len(SIZES)):
            before = {k: v.detach().clone() for k, v in w.named_parameters()}
            mine = {k: v.detach().clone() for k, v in thetas[i].named_parameters()}
            xi = layer_scores(mine, before, list(before))
            kept = max(xi, key=lambda g: (float(xi[g]), g == "first"))  # D = 1; of equals the first layer
            theta, end = thetas[i], copy.deepcopy(w)
            theta.load_state_dict({k: mine[k] if layer(k) == kept else before[k] for k in before})
            for x, y in batches(task, i, t, 2):
                g = gradient(theta, x, y)
                eps = sharp(g, xi, rho)
                shift(end, eps, 1)
                tilde = gradient(end, x, y)
                shift(end, eps, -1)
                shift(theta, g, -lr)
                shift(end, tilde, -lr)
            ends.append({k: v.detach() for k, v in end.named_parameters()})
        w.load_state_dict({k: torch.stack([e[k] for e in ends]).mean(0) for k in ends[0]})
    run = play(method("plgu-lf", D=1, rho=rho), task)
    assert_near(run.server["w"], dict(w.named_parameters()), 1e-9)
    for i in range(len(SIZES)):
        found = {k: v[i] for k, v in run.store.everyone()["own"]["theta"].items()}
        assert_near(found, dict(thetas[i].named_parameters()), 1e-9)


def test_plgu_grep_against_plain_pytorch():
    task = make_task(SIZES)
    lr, rho = task.lr, 0.7
    w = start(task)
    heads = [copy.deepcopy(w.head.state_dict()) for _ in SIZES]
    for t in range(3):
        bodies = []
        for i in range(len(SIZES)):
            module = copy.deepcopy(w)
            module.head.load_state_dict(heads[i])
            for x, y in batches(task, i, t, 2):
                shift(module, gradient(module, x, y, lambda k: layer(k) == "head"), -lr)
            xi = {"first": 1.0}  # the body is one layer, so its score is 1 whatever the distance
            for x, y in batches(task, i, t, 1):
                body = lambda k: layer(k) == "first"  # noqa: E731
                shift(module, gradient(module, x, y, body), -lr)
                eps = sharp(gradient(module, x, y, body), xi, rho)
                shift(module, eps, 1)
                tilde = gradient(module, x, y, body)
                shift(module, eps, -1)
                shift(module, tilde, -lr)
            heads[i] = copy.deepcopy(module.head.state_dict())
            bodies.append(module.first.state_dict())
        w.first.load_state_dict({k: torch.stack([b[k] for b in bodies]).mean(0) for k in bodies[0]})
    run = play(method("plgu-grep", head_epochs=2, rho=rho), task)
    assert_near(run.server["phi"], {f"first.{k}": v for k, v in w.first.state_dict().items()}, 1e-9)
    for i in range(len(SIZES)):
        found = {k: v[i] for k, v in run.store.everyone()["own"]["h"].items()}
        assert_near(found, {f"head.{k}": v for k, v in heads[i].items()}, 1e-9)

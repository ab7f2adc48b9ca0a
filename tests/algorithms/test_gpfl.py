"""GPFL: numbers by hand, identities, every ablation, and a second implementation in plain PyTorch."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EAGER,
    PER_CLIENT,
    RAGGED,
    SingleRun,
    SmallNet,
    assert_same,
    client_info,
    client_state,
    full_batch_task,
    logreg_task,
    make_batch,
    make_federation,
    make_task,
    method,
    run_rounds,
    running_statistics,
    tensor,
)
from oracles import (
    EVERY_SETTING,
    assert_equal,
    assert_finite,
    assert_near,
    assert_same_scores,
    client_samples,
    features,
)
from torch import nn

from fedloom.algorithms import gpfl
from fedloom.algorithms.gpfl import GPFL, cosines, cov
from fedloom.core.federation import Federation, Ragged
from fedloom.core.task import Task
from fedloom.core.tree import leaves, tree_map
from fedloom.engine.plan import Plan
from fedloom.nn.network import Network
from fedloom.studies.build import check

VARIANTS = ("full", "wo_pci", "wo_cov", "wo_mlg", "wo_gce", "wo_cov_gce")


# -- numbers by hand --------------------------------------------------------------------------------------------------


def conditional_inputs(alg, embeddings, counts):
    """g and p_i as a client begins a round."""
    task = logreg_task()
    down = {**alg.init_server(task, 0), "C": {"weight": tensor(embeddings)}}
    return alg.begin(task, down, alg.init_client(task, 0, torch.tensor(0)), client_info(counts))["c"].tolist()


def test_conditional_inputs():
    """C_hat = I, 3 of 4 samples are of class 0: g = (1, 1) / 2, p_i = 0.75 (1, 0) + 0.25 (0, 1)"""
    assert conditional_inputs(GPFL(), [[1, 0], [0, 1]], [3, 1]) == [[0.5, 0.5], [0.75, 0.25]]


def test_conditional_inputs_as_the_seventh_equation_is_printed():
    """p_i above, divided by U = 2"""
    assert conditional_inputs(GPFL(pci_div_U=True), [[1, 0], [0, 1]], [3, 1]) == [[0.5, 0.5], [0.375, 0.125]]


def test_equal_proportions_give_equal_conditional_inputs_and_even_ones_give_g():
    embeddings = [[0.3, -1.7], [2.9, 0.1]]
    assert conditional_inputs(GPFL(), embeddings, [3, 9]) == conditional_inputs(GPFL(), embeddings, [10, 30])
    g, p = conditional_inputs(GPFL(), embeddings, [7, 7])
    assert p == pytest.approx(g, abs=1e-15)


def test_a_class_that_a_client_has_not_counts_nothing_in_its_conditional_input():
    assert conditional_inputs(GPFL(), [[5, 6], [math.pi, -2]], [0, 8])[1] == [math.pi, -2]


def test_the_valve():
    """gamma-net at c = (1, 2): z = (c_1 + c_2, c_2 - 1) = (3, 1); ReLU changes nothing; mean 2, variance 1, so the
    normalisation gives (r, -r) with r = 1 / sqrt(1 + 1e-5); times (2, 1) plus (0, 0.5): gamma = (2r, 0.5 - r).
    beta-net: z = (-c_1, c_2) = (-1, 2), ReLU: (0, 2); mean 1, variance 1: (-r, r); plus (0, 1): beta = (-r, 1 + r).
    f = (1, -3): (2r + 1) * 1 - r = 1 + r; (1.5 - r) * (-3) + 1 + r = -3.5 + 4r > 0; both pass the last ReLU.
    f = (-1, 0): -2r - 1 - r < 0 becomes 0; 1 + r."""
    V = {
        "weight": tensor([[1, 1], [0, 1], [-1, 0], [0, 1]]),
        "bias": tensor([[0, -1], [0, 0]]),
        "scale": tensor([[2, 1], [1, 1]]),
        "shift": tensor([[0, 0.5], [0, 1]]),
    }
    r = 1 / math.sqrt(1 + 1e-5)
    (found,) = cov(V, tensor([[1, -3], [-1, 0]]), tensor([[1, 2]]))
    torch.testing.assert_close(found, tensor([[1 + r, -3.5 + 4 * r], [0, 1 + r]]), rtol=1e-12, atol=1e-12)


def test_angle_level_guidance():
    """cos((2, 0), (1, 0)) = 1, cos((2, 0), (0, 1)) = 0: log(e + 1) - 1 = log(1 + e^-1); lengths do not matter"""
    task = logreg_task()
    for embeddings in ([[1, 0], [0, 1]], [[7, 0], [0, 0.1]]):
        found = cosines(tensor([[2, 0]]), tensor(embeddings))
        torch.testing.assert_close(found, tensor([[1, 0]]))
        assert float(task.losses(found, torch.tensor([0]))) == pytest.approx(0.313262, abs=1e-6)


@pytest.mark.parametrize(("mlg", "expected"), [("batch", 2.0), ("per_sample", 1.0)])
@pytest.mark.parametrize("padding", [0, 1])
def test_magnitude_level_guidance(mlg, expected, padding):
    """f_G = (1, 0), (0, 2) and C_hat[y] = (1, 0), (0, 0): one norm is sqrt(0 + 4), the mean of two is (0 + 2) / 2.
    The first sample has no distance at all, and padding none that counts: gradients are numbers all the same."""
    batch = make_batch([[0, 0]] * (2 + padding), [0, 1] + [0] * padding, [1, 1] + [0] * padding)
    gap = tensor([[0, 0], [0, 2]] + [[30, 40]] * padding).requires_grad_()
    found = GPFL(mlg=mlg).magnitude(gap, batch)
    assert float(found.detach()) == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(found, gap)
    torch.testing.assert_close(gradient, tensor([[0, 0], [0, expected / 2]] + [[0, 0]] * padding))


def test_no_distance_at_all_has_no_gradient():
    for mlg in ("batch", "per_sample"):
        gap = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(GPFL(mlg=mlg).magnitude(gap, make_batch([[0]] * 2, [0, 1], [1, 1])), gap)
        assert (gradient == 0).all()


E = math.e
STEP = {  # a client in the middle of a round: C has moved away from C_hat
    "V": {
        "weight": tensor([[0, 0]] * 4),
        "bias": tensor([[3, 3], [2, 2]]),
        "scale": tensor([[1, 1], [1, 1]]),
        "shift": tensor([[1, 0], [0, 1]]),
    },
    "C": {"weight": tensor([[1, 0], [0, 1]])},
    "C_hat": {"weight": tensor([[2, 0], [0, 0]])},
    "psi": {"head.weight": tensor([[math.log(3) / 2, 0], [0, 0]]), "head.bias": tensor([0, 0])},
    "batch": make_batch([[1, -1], [0, 1], [7, 7]], [0, 1, 0], [1, 1, 0]),
}


def one_step(alg, V=STEP["V"], **settings):
    """The loss, and what a client has after one step at learning rate 1."""
    task = logreg_task(lr=1.0, **settings)
    params = {"w": STEP["psi"], "V": V, "C": STEP["C"]}
    work = {**{m: task.slot(p) for m, p in params.items()}, "c": tensor([[1, 2]] * 2)}
    down = {"phi": {}, "V": V, "C": STEP["C_hat"]}
    loss, _ = alg.loss(task, params, work, STEP["batch"], down)
    return loss, alg.step(task, work, STEP["batch"], down, client_info([1, 1]))


def test_the_losses_of_a_padded_batch():
    """Both nets see equal numbers, which the normalisation makes 0: gamma = (1, 0), beta = (0, 1) whatever c is, so
    f_G = f_P = ReLU(2 f_1, f_2 + 1): (1, -1) -> (2, 0) and (0, 1) -> (0, 2). The third sample is padding.
    L_P: logits (log 3, 0), y = 0: -log(3/4); logits (0, 0), y = 1: log 2; mean 0.490415.
    L_alg: both at a right angle to the other class: log(1 + e^-1) = 0.313262.
    L_mlg: sqrt(||(2, 0) - (2, 0)||^2 + ||(0, 2) - (0, 0)||^2) = 2; per sample (0 + 2) / 2."""
    task_loss, angle = (math.log(4 / 3) + math.log(2)) / 2, math.log(1 + 1 / E)
    for alg, expected in (
        (GPFL(lam=0.0), task_loss + angle),
        (GPFL(lam=0.5), task_loss + angle + 0.5 * 2),
        (GPFL(lam=0.5, mlg="per_sample"), task_loss + angle + 0.5 * 1),
        (GPFL(lam=0.5, ablation="wo_mlg"), task_loss + angle),
    ):
        assert float(one_step(alg)[0]) == pytest.approx(expected, abs=1e-12)
    assert task_loss == pytest.approx(0.490415, abs=1e-6)


def test_one_step_of_everything():
    """The batch above with lambda = 0.5, mu = 0.1, eta = 1. Errors are (softmax - one-hot) / 2.
    psi: errors of L_P are (-1/8, 1/8) and (1/4, -1/4); times (2, 0) and (0, 2): weights get
    [[-1/4, 1/2], [1/4, -1/2]], biases (1/8, -1/8). No decay.
    C: d cos_u / dC_u = f/|f| - cos_u C_u, 0 for the own class; s = 1 / (2 (1 + e)) is the error at the other one:
    [[0, s], [s, 0]]. C_hat gives nothing. Decay 0.1 C.
    beta and gamma: d/df_P = psi^T error = log 3 / 2 * (-1/8, 0) and log 3 / 2 * (1/4, 0), of which ReLU lets pass the
    first only: entry 1 of the first sample, -log 3 / 16; entry 2 of the second, 0.
    d/df_G by L_alg: d cos_u / df = (C_u - cos_u f/|f|) / |f|, 0 for the own class and across the angle s / 2 in the
    entry that ReLU stops. By L_mlg: 0.5 * gap / 2 = 0 and (0, 0.5).
    So beta gets (-log 3 / 16, 0.5), and gamma that times f = (1, .) and (., 1): the same.
    The scales multiply 0 and get 0. At variance 0 the gradient through the normalisation is (gradient - its mean) /
    sqrt(1e-5), so with d = (log 3 / 16 + 0.5) / 2 / sqrt(1e-5) the biases get (-d, d) and the weights that times c.
    Decay 0.1 V."""
    _, work = one_step(GPFL(lam=0.5, mu=0.1))
    torch.testing.assert_close(
        work["w"].params["head.weight"], tensor([[math.log(3) / 2 + 0.25, -0.5], [-0.25, 0.5]]), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(work["w"].params["head.bias"], tensor([-1 / 8, 1 / 8]), rtol=1e-12, atol=1e-12)
    s = 1 / (2 * (1 + E))
    torch.testing.assert_close(work["C"].params["weight"], tensor([[0.9, -s], [-s, 0.9]]), rtol=1e-12, atol=1e-12)
    V, first = work["V"].params, math.log(3) / 16
    torch.testing.assert_close(V["shift"], tensor([[0.9 + first, -0.5], [first, 0.9 - 0.5]]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(V["scale"], tensor([[0.9, 0.9], [0.9, 0.9]]), rtol=1e-12, atol=1e-12)
    d = (first + 0.5) / 2 / math.sqrt(1e-5)
    torch.testing.assert_close(V["bias"], tensor([[2.7 + d, 2.7 - d], [1.8 + d, 1.8 - d]]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(V["weight"], tensor([[d, 2 * d], [-d, -2 * d]] * 2), rtol=1e-12, atol=1e-12)


def test_each_kind_of_parameter_has_its_own_decay():
    """The step above once more: the task's decay shrinks the head alone, mu the valve and the embeddings alone."""
    _, plain = one_step(GPFL(lam=0.5, mu=0.1))
    _, decayed = one_step(GPFL(lam=0.5, mu=0.1), weight_decay=0.2)
    assert_near((plain["V"], plain["C"]), (decayed["V"], decayed["C"]))
    moved = plain["w"].params["head.weight"] - decayed["w"].params["head.weight"]
    torch.testing.assert_close(moved, 0.2 * STEP["psi"]["head.weight"])
    _, free = one_step(GPFL(lam=0.5, mu=0.0), weight_decay=0.2)
    assert_near(free["w"], decayed["w"])
    torch.testing.assert_close(free["C"].params["weight"] - decayed["C"].params["weight"], 0.1 * STEP["C"]["weight"])


def test_clipping_takes_one_norm_of_all_gradients():
    """A limit of half the norm halves every step (up to 1e-6 in the divisor), decay not counted."""
    alg = GPFL(lam=0.5, mu=0.0)
    _, work = one_step(alg)
    names = ("w", "V", "C")
    before = {"w": STEP["psi"], "V": STEP["V"], "C": STEP["C"]}
    steps = [a - b for m in names for a, b in zip(leaves(work[m].params), leaves(before[m]), strict=True)]
    norm = math.sqrt(sum(float((s**2).sum()) for s in steps))
    _, clipped = one_step(alg, clip=norm / 2)
    halved = [a - b for m in names for a, b in zip(leaves(clipped[m].params), leaves(before[m]), strict=True)]
    assert_near(halved, [s / 2 for s in steps], 1e-7)


def test_features_that_are_all_zero_stop_nothing():
    """beta = (-9, -9) closes the valve: f_G = f_P = 0, so L_P = L_alg = log 2, L_mlg = ||C_hat[y]|| = 2, and every
    gradient is a number."""
    loss, work = one_step(GPFL(lam=0.01), V={**STEP["V"], "shift": tensor([[0, 0], [-9, -9]])})
    assert float(loss) == pytest.approx(2 * math.log(2) + 0.01 * 2, abs=1e-12)
    assert all(torch.isfinite(v).all() for v in leaves(work))


# -- initial values ---------------------------------------------------------------------------------------------------


def initial(seed, alg=None, width=None, **settings):
    task = make_task((4, 4), **settings)
    if width is not None:
        network = Network(lambda: SmallNet(6, width, 4), "head", task.data.x[:2], task.dtype)
        task = Task(task.data, network)
    return (alg or GPFL()).init_server(task, seed)


def test_initial_values_are_those_of_pytorchs_layers():
    """Linear(K, K): uniform within 1 / sqrt(K), standard deviation 1 / sqrt(3 K). LayerNorm: ones and zeros.
    Embedding: standard normal. K = 200, so the deviation of a deviation over 80,000 draws is about 0.2 %."""
    server = initial(1, width=200)
    V, C = server["V"], server["C"]["weight"]
    assert {k: tuple(v.shape) for k, v in V.items()} == {
        "weight": (400, 200), "bias": (2, 200), "scale": (2, 200), "shift": (2, 200),
    }  # fmt: skip
    assert C.shape == (4, 200)
    for name in ("weight", "bias"):
        assert float(V[name].abs().max()) <= 1 / math.sqrt(200)
        assert abs(float(V[name].mean())) < 0.006
    assert float(V["weight"].std()) == pytest.approx(1 / math.sqrt(600), rel=0.01)
    assert float(V["bias"].std()) == pytest.approx(1 / math.sqrt(600), rel=0.1)
    assert (V["scale"] == 1).all()
    assert (V["shift"] == 0).all()
    assert float(C.mean()) == pytest.approx(0, abs=0.15)
    assert float(C.std()) == pytest.approx(1, abs=0.1)
    assert not torch.allclose(V["weight"][:200], V["weight"][200:])


def test_initial_values_depend_on_the_seed_alone():
    assert_equal(initial(5), initial(5))
    single = initial(5, dtype=torch.float32)
    assert all(v.dtype == torch.float32 for v in leaves(single))
    assert_near(initial(5), tree_map(torch.Tensor.double, single), 1e-6)
    for a, b in zip(leaves(initial(5)), leaves(initial(6)), strict=True):
        assert torch.equal(a, b) == (a.shape == (2, 8) and bool((a == a[0, 0]).all()))  # scale and shift


def test_the_first_round_uses_the_initial_embeddings():
    task = make_task((5, 9))
    run = SingleRun(GPFL(), task, 0, plan=PER_CLIENT)
    cohort = run.cohort(np.array([1]), 0)
    _, _, info, work = run.executor.start(cohort, 0)
    C = run.server["C"]["weight"]
    torch.testing.assert_close(work["c"][0], C.mean(0))
    torch.testing.assert_close(work["c"][1], (info.counts.double() / 9) @ C)


# -- a second implementation ------------------------------------------------------------------------------------------

ROUNDS, EPOCHS, LR, MOMENTUM, DECAY, SEED, K, U = 3, 2, 0.1, 0.5, 0.01, 5, 8, 4
LAM, MU = 0.3, 0.2


class Valve(nn.Module):
    """The conditional valve: features scaled and shifted by functions of a conditional input."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.LayerNorm(K))
        self.beta = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.LayerNorm(K))

    def forward(self, f, c):
        return torch.relu((self.gamma(c) + 1) * f + self.beta(c))


class ClientModules(nn.Module):
    """What a client trains."""

    def __init__(self, norm):
        super().__init__()
        self.net, self.valve, self.embedding = SmallNet(norm=norm), Valve(), nn.Embedding(U, K)

    def features(self, x):
        return features(self.net, x)

    def trained(self):
        """Names that are averaged, and names that stay with a client (statistics included)."""
        names = list(self.state_dict())
        private = [n for n in names if n.startswith("net.head.") or "running_" in n or "num_batches" in n]
        return [n for n in names if n not in private], private


class PlainGPFL:
    """GPFL as one would write it by hand, one client after another."""

    def __init__(self, run, sizes, ablation="full", norm=False, clip=None, per_sample=False, divide=False, stale=False):
        self.sizes, self.variant, self.clip = sizes, ablation, clip
        self.per_sample, self.divide, self.stale = per_sample, divide, stale
        self.samples = {split: client_samples(run.task, split) for split in ("train", "test")}
        self.modules = ClientModules(norm).double()
        state = self.modules.state_dict()
        for name, value in run.task.init(run.key).items():
            state[f"net.{name}"] = value.clone()
        state |= self.valve_state(run.server["V"]) if "V" in run.server else {}
        state |= {"embedding.weight": run.server["C"]["weight"].clone()} if "C" in run.server else {}
        shared, private = self.modules.trained()
        self.shared = {n: state[n].clone() for n in shared}
        self.private = [{n: state[n].clone() for n in private} for _ in sizes]
        self.trained_last = [torch.zeros(U, K, dtype=torch.float64) for _ in sizes]
        self.fixed = run.constants.get("ab")

    @staticmethod
    def valve_state(V):
        found = {}
        for j, net in enumerate(("gamma", "beta")):
            found[f"valve.{net}.0.weight"] = V["weight"][j * K : (j + 1) * K].clone()
            found[f"valve.{net}.0.bias"] = V["bias"][j].clone()
            found[f"valve.{net}.2.weight"], found[f"valve.{net}.2.bias"] = V["scale"][j].clone(), V["shift"][j].clone()
        return found

    def inputs(self, i):
        """g and p_i from the newest embeddings, or what the variant puts in their place."""
        if self.fixed is not None:
            return self.fixed[0], self.fixed[1]
        table = self.trained_last[i] if self.stale else self.shared["embedding.weight"]
        labels = self.samples["train"][i][1]
        share = [float((labels == u).sum()) / len(labels) for u in range(U)]
        p = sum(share[u] * table[u] for u in range(U))
        return sum(table[u] for u in range(U)) / U, p / U if self.divide else p

    def load(self, i):
        m = copy.deepcopy(self.modules)
        m.load_state_dict({**self.shared, **self.private[i]})
        return m

    def loss(self, m, frozen, g, p, x, y):
        f = m.features(x)
        fg, fp = (f, f) if "cov" in self.variant else (m.valve(f, g), m.valve(f, p))
        loss = F.cross_entropy(m.net.head(fp), y)
        if "gce" in self.variant:
            return loss
        similar = F.cosine_similarity(fg.unsqueeze(1), m.embedding.weight.unsqueeze(0), dim=2)
        loss = loss + F.cross_entropy(similar, y)
        if self.variant == "wo_mlg":
            return loss
        if self.per_sample:
            return loss + LAM * torch.stack([torch.norm(a - frozen[c]) for a, c in zip(fg, y, strict=True)]).mean()
        return loss + LAM * torch.norm(fg - frozen[y], "fro")

    def train(self, i):
        m, (x, y), (g, p) = self.load(i).train(), self.samples["train"][i], self.inputs(i)
        frozen = self.shared["embedding.weight"]
        extra = [*m.valve.parameters(), *m.embedding.parameters()]
        groups = [{"params": m.net.parameters(), "weight_decay": DECAY}, {"params": extra, "weight_decay": MU}]
        optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            self.loss(m, frozen, g, p, x, y).backward()
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(m.parameters(), self.clip)
            optimizer.step()
        return m, p

    def round(self):
        done = [self.train(i)[0].state_dict() for i in range(len(self.sizes))]
        for i, state in enumerate(done):
            self.private[i] = {n: state[n].clone() for n in self.private[i]}
            self.trained_last[i] = state["embedding.weight"].clone()
        total = sum(self.sizes)
        self.shared = {n: sum(k / total * s[n] for k, s in zip(self.sizes, done, strict=True)) for n in self.shared}

    @torch.no_grad()
    def score(self, m, p, i):
        x, y = self.samples["test"][i]
        f = m.eval().features(x)
        logits = m.net.head(f if "cov" in self.variant else m.valve(f, p))
        right = (logits.argmax(1) == y).sum()
        return [float(right), float(F.cross_entropy(logits, y, reduction="sum")), len(y)]


CASES = {
    **{variant: {"ablation": variant} for variant in VARIANTS},
    "eq. 7 as printed": {"divide": True},
    "per sample": {"per_sample": True},
    "stale": {"stale": True},
    "stale, eq. 7 as printed": {"stale": True, "divide": True},
    "clipped": {"clip": 0.5},
    "batch norm": {"norm": True},
    "batch norm, stale, per sample, clipped": {"norm": True, "stale": True, "per_sample": True, "clip": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_gpfl_against_plain_pytorch(case):
    """Batches are as large as the largest client, so that the order of samples does not matter; a client of one sample
    is there. Server, heads, statistics, and what PM_pre and PM_post score."""
    options = CASES[case]
    norm = options.get("norm", False)
    sizes = (3 if norm else 1, 17, 8, 11)
    alg = GPFL(
        lam=LAM,
        mu=MU,
        ablation=options.get("ablation", "full"),
        pci_div_U=options.get("divide", False),
        mlg="per_sample" if options.get("per_sample") else "batch",
        stale_cond=options.get("stale", False),
    )
    task = full_batch_task(
        sizes, norm=norm, lr=LR, epochs=EPOCHS, momentum=MOMENTUM, weight_decay=DECAY, clip=options.get("clip")
    )
    run = SingleRun(alg, task, SEED, plan=PER_CLIENT)
    plain = PlainGPFL(run, sizes, **options)
    for t in range(ROUNDS):
        if t == ROUNDS - 1:
            post = [plain.score(*plain.train(i), i) for i in range(len(sizes))]
        plain.round()
        scores = run.advance().scores
    expected = plain.shared
    found = {f"net.{name}": v for name, v in run.server["phi"].items()}
    found |= plain.valve_state(run.server["V"]) if "V" in run.server else {}
    found |= {"embedding.weight": run.server["C"]["weight"]} if "C" in run.server else {}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
    missing = {name.split(".")[0] for name in expected if name not in found}
    variant = options.get("ablation", "full")
    assert missing == {part for part, word in (("valve", "cov"), ("embedding", "gce")) if word in variant}
    for i, private in enumerate(plain.private):
        for name, value in client_state(run, "psi").items():
            torch.testing.assert_close(value[i], private[f"net.{name}"], rtol=1e-9, atol=1e-11)
        for name, value in running_statistics(run, "w").items():
            torch.testing.assert_close(value[i], private[f"net.{name}"], rtol=1e-9, atol=1e-11)
        assert scores["pre"]["test"][i].tolist() == pytest.approx(plain.score(plain.load(i), plain.inputs(i)[1], i))
        assert scores["post"]["test"][i].tolist() == pytest.approx(post[i])
    assert set(scores) == {"pre", "post"}  # there is no global model


# -- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, EVERY_SETTING], ids=["defaults", "every setting"])
def test_without_valve_and_embeddings_it_is_fedper(settings):
    task = make_task(RAGGED, participation=0.5, epochs=2, **settings)
    run, records = run_rounds(GPFL(ablation="wo_cov_gce"), task, rounds=4, evaluate=True)
    fedper, expected = run_rounds(method("fedper"), task, rounds=4, evaluate=True)
    assert_near(run.server, fedper.server)
    assert_near(client_state(run, "psi"), client_state(fedper, "h"))
    assert_near(running_statistics(run), running_statistics(fedper))
    assert_same_scores(records, expected, ["pre", "post"], 1e-12)
    for a, b in zip(records, expected, strict=True):
        assert (a.bytes_down, a.bytes_up) == (b.bytes_down, b.bytes_up)


def test_with_an_open_valve_and_no_guidance_it_is_fedper(monkeypatch):
    """gamma = beta = 0 and no ReLU, L_alg and L_mlg gone, mu = 0: body and head train as FedPer's."""
    monkeypatch.setattr(gpfl, "cov", lambda V, f, c: [f for _ in c.unbind()])
    task = make_task(RAGGED)
    run, records = run_rounds(GPFL(ablation="wo_gce", mu=0.0), task, evaluate=True)
    fedper, expected = run_rounds(method("fedper"), task, evaluate=True)
    assert_near(run.server["phi"], fedper.server["phi"])
    assert_near(client_state(run, "psi"), client_state(fedper, "h"))
    assert_near(run.server["V"], GPFL().init_server(task, run.key)["V"])
    np.testing.assert_allclose(records[-1].scores["pre"]["test"], expected[-1].scores["pre"]["test"], rtol=1e-12)


def test_without_magnitude_level_guidance_is_lambda_zero():
    task = make_task(RAGGED)
    run, _ = run_rounds(GPFL(ablation="wo_mlg", lam=5.0), task)
    other, _ = run_rounds(GPFL(lam=0.0), task)
    assert_near((run.server, run.store.everyone()), (other.server, other.store.everyone()))
    full, _ = run_rounds(GPFL(), task)
    assert not torch.allclose(run.server["C"]["weight"], full.server["C"]["weight"], rtol=1e-9)


def test_the_variants_are_all_different():
    task = make_task(RAGGED)
    bodies = [run_rounds(GPFL(ablation=v), task, rounds=2)[0].server["phi"]["first.weight"] for v in VARIANTS]
    for i, a in enumerate(bodies):
        for b in bodies[:i]:
            assert not torch.allclose(a, b, rtol=1e-6)


def test_constant_inputs_are_the_same_for_all_clients_and_never_change():
    """a and b in the place of g and p_i: standard normal, from the run's seed."""
    task = make_task(RAGGED)
    for variant in ("wo_pci", "wo_gce"):
        run, _ = run_rounds(GPFL(ablation=variant), task)
        a, b = run.constants["ab"]
        assert not torch.allclose(a, b)
        work = run.executor.begin(run.cohort(np.arange(len(RAGGED)), run.t))
        assert (work["c"] == torch.stack([a, b])).all()
        again = GPFL(ablation=variant).constants(task, run.key)["ab"]
        assert torch.equal(again, run.constants["ab"])
        assert not torch.allclose(GPFL(ablation=variant).constants(task, run.key + 1)["ab"], again)
    wide = Task(task.data, Network(lambda: SmallNet(6, 5000, 4), "head", task.data.x[:2], task.dtype))
    drawn = GPFL(ablation="wo_pci").constants(wide, 1)["ab"]
    assert float(drawn.mean()) == pytest.approx(0, abs=0.05)
    assert float(drawn.std()) == pytest.approx(1, abs=0.05)


def test_stale_inputs_are_zero_at_first_and_then_from_the_clients_own_embeddings():
    """Client 1 trains, client 2 does not: client 1 goes on with what it had itself, not with the average."""
    task = make_task((12, 20, 7))
    run = SingleRun(GPFL(stale_cond=True), task, 0, plan=Plan("stacked", "eager", chunk=3))
    work = run.executor.begin(run.cohort(np.arange(3), 0))
    assert (work["c"] == 0).all()
    run.advance(evaluate=False, cohort=np.array([0, 1]))
    embeddings = client_state(run, "C")["weight"]
    work = run.executor.begin(run.cohort(np.arange(3), 1))
    counts = task.data.counts(np.arange(3)).double()
    for i in (0, 1):
        torch.testing.assert_close(work["c"][i, 0], embeddings[i].mean(0))
        torch.testing.assert_close(work["c"][i, 1], counts[i] / counts[i].sum() @ embeddings[i])
    assert (work["c"][2] == 0).all()
    torch.testing.assert_close((12 * embeddings[0] + 20 * embeddings[1]) / 32, run.server["C"]["weight"])


PARITY = {
    **{variant: {"ablation": variant} for variant in VARIANTS[1:]},
    "options": {"pci_div_U": True, "mlg": "per_sample", "stale_cond": True},
}


@pytest.mark.parametrize("case", PARITY)
def test_every_variant_gives_the_same_stacked_and_client_by_client(case):
    task = make_task(
        RAGGED, norm=True, dropout=0.3, momentum=0.9, weight_decay=0.01, clip=1.0, epochs=2, lr=0.02, participation=0.7
    )
    assert_same(GPFL(**PARITY[case]), task, Plan("stacked", "traced", chunk=7, shrink=0), 1e-9)


# -- edges ------------------------------------------------------------------------------------------------------------


def test_a_class_that_nobody_has_is_pushed_away_and_decays():
    """Its embedding is a negative of L_alg everywhere; with mu it shrinks besides."""
    data = make_federation((12, 9), classes=4)
    data = Federation(data.x, data.y % 3, 4, data.splits, dtype=data.dtype)
    task = make_task((12, 9), federation=data)
    assert (task.data.counts(np.arange(2))[:, 3] == 0).all()
    start = GPFL().init_server(task, SingleRun(GPFL(), task, 3, plan=EAGER).key)["C"]["weight"][3]
    free = run_rounds(GPFL(mu=0.0), task, rounds=1)[0].server["C"]["weight"][3]
    assert float((free - start).norm()) > 1e-4
    decayed = run_rounds(GPFL(mu=0.1), task, rounds=1)[0].server["C"]["weight"][3]
    assert float(decayed.norm()) < float(free.norm())


def test_a_single_layer_uses_its_inputs_as_features():
    task = logreg_task(RAGGED, dim=6, classes=4)
    check(GPFL(), task)
    run, records = run_rounds(GPFL(), task, evaluate=True)
    assert run.server["phi"] == {}
    assert run.server["V"]["weight"].shape == (12, 6)
    assert run.server["C"]["weight"].shape == (4, 6)
    assert_finite(run)
    assert_same(GPFL(), task, Plan("stacked", "traced", chunk=5, shrink=0), 1e-9)
    assert np.isfinite(records[-1].scores["pre"]["test"]).all()


def test_sequences_are_guided_at_every_position():
    """Two sequences of tokens with one position of padding (-1): the loss is that of the five labelled positions."""
    x, y = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[1, 0, 2], [2, 1, -1]])
    lists = {s: Ragged.of([np.arange(2)]) for s in ("train", "val", "test")}
    data = Federation(x, y, 3, lists, dtype=torch.float64)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Embedding(5, K), nn.Linear(K, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.first(x)))

    task = Task(data, Network(Tokens, "head", x, torch.float64))
    for mlg in ("batch", "per_sample"):
        alg = GPFL(lam=0.3, mlg=mlg)
        down = alg.init_server(task, 1)
        work = alg.begin(task, down, alg.init_client(task, 1, torch.tensor(0)), client_info([1, 2, 2]))
        batch = make_batch([[0]], [0], [1, 1, 0])._replace(x=torch.cat([x, x[:1]]), y=torch.cat([y, y[:1]]))
        found, _ = alg.loss(task, {m: work[m].params for m in ("w", "V", "C")}, work, batch, down)
        w, C, labels = work["w"].params, down["C"]["weight"], y[y >= 0]
        f = torch.tanh(w["first.weight"][x[y >= 0]])
        valve = Valve().double()
        valve.load_state_dict({k.removeprefix("valve."): v for k, v in PlainGPFL.valve_state(down["V"]).items()})
        alpha = tensor([0.2, 0.4, 0.4])
        with torch.no_grad():
            fg, fp = valve(f, C.mean(0)), valve(f, alpha @ C)
        norms = (fg - C[labels]).norm() if mlg == "batch" else (fg - C[labels]).norm(dim=1).mean()
        expected = F.cross_entropy(fp @ w["head.weight"].T + w["head.bias"], labels)
        expected += F.cross_entropy(F.cosine_similarity(fg[:, None], C[None], dim=2), labels) + 0.3 * norms
        torch.testing.assert_close(found, expected)


def test_a_step_passes_through_the_body_once():
    calls = []

    class Counted(SmallNet):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    data = make_federation((10,))
    task = Task(data, Network(lambda: Counted(norm=True), "head", data.x[:2], data.dtype), lr=0.1)
    run = SingleRun(GPFL(), task, 0, plan=PER_CLIENT)
    calls.clear()
    run.executor.train(run.cohort(np.array([0]), 0), ())
    assert calls == [10]


@pytest.mark.parametrize(
    ("variant", "parts"),
    [("full", "bvc"), ("wo_pci", "bvc"), ("wo_mlg", "bvc"), ("wo_cov", "bc"), ("wo_gce", "bv"), ("wo_cov_gce", "b")],
)
def test_traffic(variant, parts):
    """Numbers of the small net, in float64: body 6*8 + 8 = 56; V: 2 * (8*8 + 8 + 8 + 8) = 176; C: 4 * 8 = 32. The
    constants a and b are drawn on both sides."""
    size = sum({"b": 56, "v": 176, "c": 32}[part] for part in parts) * 8
    _, records = run_rounds(GPFL(ablation=variant), make_task(RAGGED), rounds=1)
    assert (records[0].bytes_down, records[0].bytes_up) == (len(RAGGED) * size, len(RAGGED) * size)

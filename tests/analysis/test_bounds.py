"""Spectral norms are those of torch.linalg, margins those of a computation by hand, terms those of the formulas."""

import math

import numpy as np
import pytest
import torch

import fedloom
from fedloom.analysis.bounds import (
    generator_terms,
    largest_norm,
    margins,
    margins_of,
    personal_layers,
    spectral_norm,
    spectral_norms,
    terms,
)
from fedloom.analysis.trained import load_model, load_trained
from fedloom.core.algorithm import Slot
from fedloom.core.tree import leaves
from fedloom.nn.network import Network

SHORT = {"rounds": 2, "clients": 3, "device": "cpu", "plan": "per-client"}


@pytest.fixture(scope="module")
def plgu():
    return load_trained(fedloom.run("plgu-lf", rho=0.25, **SHORT))


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (1, 5), (6, 6)])
def test_the_spectral_norm_is_the_largest_singular_value(shape):
    w = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
    assert spectral_norm(w) == pytest.approx(float(torch.linalg.matrix_norm(w, 2)), rel=1e-10)


def test_a_matrix_of_zeros_and_one_with_nan():
    assert spectral_norm(torch.zeros(3, 2)) == 0
    assert math.isnan(spectral_norm(torch.full((2, 2), torch.nan)))


def test_kernels_are_matrices_and_normalisation_has_no_norm():
    def make():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 3, 2), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
        )

    network = Network(make, "3", torch.zeros(2, 1, 3, 3, dtype=torch.float64))
    params = network.init(0)
    found = spectral_norms(Slot(params, network.buffers, {}), network)
    assert found.keys() == {"0.weight", "3.weight"}
    assert found["0.weight"] == pytest.approx(float(torch.linalg.matrix_norm(params["0.weight"].reshape(3, 4), 2)))


def test_a_second_head_has_a_name_of_its_own():
    run = load_trained(fedloom.run("fedrod", **SHORT))
    assert "head.weight'" in spectral_norms(load_model(run, 0).tree, run.task.network)


# -- margins


def test_margins_by_hand():
    logits = torch.tensor([[3.0, 1.0, 2.5], [0.0, 4.0, 1.0], [1.0, 1.0, 0.0]])
    assert margins_of(logits, torch.tensor([0, 2, 1])).tolist() == [0.5, -3.0, 0.0]


def test_margins_of_sequences_leave_out_padding():
    logits = torch.tensor([[[2.0, 0.0], [0.0, 5.0]], [[1.0, 0.5], [9.0, 9.0]]])
    assert margins_of(logits, torch.tensor([[0, 0], [1, -1]])).tolist() == [2.0, -5.0, -0.5]


def test_margins_of_labels_are_on_either_side_of_0():
    assert margins_of(torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 1.0]])).tolist() == [2.0, -1.0]


def test_a_negative_margin_is_a_wrong_prediction(plgu):
    model = load_model(plgu, 1)
    logits = model.predict(model.tree, plgu.task.data.samples(model.train))
    right = (logits.argmax(1) == plgu.task.data.y[model.train]).numpy()
    found = margins(plgu, model)
    assert ((found > 0) == right).all()
    assert 0 < right.mean() < 1


# -- terms


def test_terms_are_those_of_the_theorem(plgu):
    """The default model of digits, 64 - 64 - 10, so L = 2 and d = 64; rho is the method's."""
    model, data = load_model(plgu), plgu.task.data
    found = terms(plgu, model)
    product = math.prod(
        float(torch.linalg.matrix_norm(w.double(), 2)) for w in model.tree.params.values() if w.dim() > 1
    )
    m = int(data.splits["train"].sizes.sum())
    B = max(float(data.samples(row[None]).double().norm()) for row in data.splits["train"].flat)
    assert (found.depth, found.width, found.samples) == (2, 64, m)
    assert found.product == pytest.approx(product, rel=1e-6)
    assert found.largest_input == pytest.approx(B, rel=1e-6)
    assert found.margin == pytest.approx(B * math.sqrt(2) * product / math.sqrt(m), rel=1e-6)
    second = (B + 0.25) * 64 * math.sqrt(2 * math.log(2)) * product / math.sqrt(m)
    assert found.perturbation == pytest.approx(second, rel=1e-6)


def test_terms_of_personal_models_depend_on_the_clients(plgu):
    """N = 3 clients, and m^ = samples of the smallest, in place of m."""
    model, sizes = load_model(plgu, 1), plgu.task.data.splits["train"].sizes
    found = terms(plgu, model)
    assert found.samples == sizes[1]
    expected = found.largest_input * math.sqrt(2) * found.product / (3 * math.sqrt(min(sizes)))
    assert found.margin == pytest.approx(expected, rel=1e-9)
    assert found.perturbation == 0  # one personal layer: log D = 0


class Deep(torch.nn.Module):
    """Four layers."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(),
            torch.nn.Linear(8, 8), torch.nn.Tanh(),
        )  # fmt: skip
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.body(x))


def test_the_perturbation_of_personal_models_by_hand():
    """Theorem 1, fourth term, with L = 4 layers of which D = 2 are personal, those with the largest scores xi when the
    client trained last: both logarithms are log 2, and the widest layer is the head, with 10 rows."""
    run = load_trained(fedloom.run("plgu-lf", rho=0.5, D=2, model=Deep, **SHORT))
    model = load_model(run, 2, "last")
    found, norms = terms(run, model), spectral_norms(model.tree, run.task.network)
    xi = next(row["xi"] for row in run.result.reports.to_pylist() if (row["client"], row["round"]) == (2, 2))
    layers = ["body.1", "body.3", "body.5", "head"]
    personal = {f"{layers[i]}.weight" for i in np.argsort(xi)[-2:]}
    assert personal == {name for name in personal_layers(run, model) if name.endswith("weight")}
    B, S = found.largest_input, 3 * math.sqrt(min(run.task.data.splits["train"].sizes))
    factors = [value * (B if name in personal else B + 0.5) for name, value in norms.items()]
    assert found.perturbation == pytest.approx(10 * 2 * 2 * math.log(2) * math.prod(factors) / S, rel=1e-9)


def test_the_perturbation_of_a_representation_by_hand():
    """Theorem 2, first term: the three layers of the body, and the samples of all clients."""
    run = load_trained(fedloom.run("plgu-grep", rho=0.5, model=Deep, **SHORT))
    model = load_model(run, 0)
    found, norms = terms(run, model), spectral_norms(model.tree, run.task.network)
    body = math.prod(value for name, value in norms.items() if name.startswith("body"))
    m = run.task.data.splits["train"].sizes.sum()
    expected = (found.largest_input + 0.5) * 10 * math.sqrt(3 * math.log(3)) * body / math.sqrt(m)
    assert found.perturbation == pytest.approx(expected, rel=1e-9)


def test_without_a_perturbation_there_is_no_such_term():
    run = load_trained(fedloom.run("fedavg", **SHORT))
    assert terms(run, load_model(run)).perturbation == 0


def test_tokens_have_no_norm(plgu):
    from helpers import token_task

    data = token_task().data
    assert math.isnan(largest_norm(data, data.splits["train"].flat))


# -- hypernetworks


def test_a_hypernetwork_at_the_server():
    """With a rank, output layers are products of two matrices; all of them together are one."""
    run = load_trained(fedloom.run("pfedhn", hidden=1, hn_rank=2, embedding=5, **SHORT))
    found, server = generator_terms(run), run.result.server
    phi = {name: w.double() for name, w in server["phi"].items()}
    outputs = torch.cat([phi[f"out.{j}.weight"] @ phi[f"low.{j}.weight"] for j in range(4)])
    expected = [phi["trunk.0.weight"], phi["trunk.1.weight"], outputs]
    assert found.product == pytest.approx(math.prod(float(torch.linalg.matrix_norm(w, 2)) for w in expected), rel=1e-6)
    assert (found.hypernetworks, found.embedding, found.depth, found.width) == (1, 5, 3, 100)
    assert found.parameters == sum(w.numel() for w in leaves(server["phi"]))
    R = float(server["v"].norm(dim=1).max())
    assert found.largest_embedding == pytest.approx(R)
    assert found.radius == pytest.approx(math.sqrt(sum(float((w**2).sum()) for w in leaves(server["phi"]))))
    assert found.margin == pytest.approx(R * math.sqrt(3) * found.product / math.sqrt(3))  # three layers, three clients
    assert found.perturbation == 0


def test_the_perturbation_of_a_hypernetwork():
    """Theorem 3, with one hidden layer of 100 units after the first: L_h = 3 layers; N = 3 clients."""
    found = generator_terms(load_trained(fedloom.run("plgu-ghn", hidden=1, rho=0.25, **SHORT)))
    assert (found.depth, found.width) == (3, 100)
    expected = (found.largest_embedding + 0.25) * 100 * math.sqrt(3 * math.log(3)) * found.product / math.sqrt(3)
    assert found.perturbation == pytest.approx(expected)


def test_hypernetworks_at_the_clients():
    """pFedKT's own numbers: an embedding of 13, layers of 100, 100 and 400 units, 51,900 parameters."""
    run = load_trained(fedloom.run("pfedkt", **SHORT))
    found, varphi = generator_terms(run), run.result.store["varphi"]
    assert (found.hypernetworks, found.embedding, found.parameters, found.depth) == (3, 13, 51_900, 3)
    each = [
        math.prod(float(torch.linalg.matrix_norm(varphi[f"fc{j}.weight"][i].double(), 2)) for j in (1, 2, 3))
        for i in range(3)
    ]
    assert found.product == pytest.approx(np.mean(each), rel=1e-6)
    norms = [math.sqrt(sum(float((w[i].double() ** 2).sum()) for w in varphi.values())) for i in range(3)]
    assert found.radius == pytest.approx(max(norms))
    assert math.isnan(found.margin)


@pytest.mark.parametrize("method", ["fedavg", "pfedkt"])
def test_methods_without_a_hypernetwork_have_no_terms_of_one(method):
    settings = {"case": "A"} if method == "pfedkt" else {}
    assert generator_terms(load_trained(fedloom.run(method, **settings, **SHORT))) is None

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
    assert found.largest_embedding == pytest.approx(float(server["v"].norm(dim=1).max()))


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


@pytest.mark.parametrize("method", ["fedavg", "pfedkt"])
def test_methods_without_a_hypernetwork_have_no_terms_of_one(method):
    settings = {"case": "A"} if method == "pfedkt" else {}
    assert generator_terms(load_trained(fedloom.run(method, **settings, **SHORT))) is None

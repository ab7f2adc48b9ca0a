"""Layer-wise sharpness-aware minimisation, which the PLGU methods share: perturbations and scores of layers."""

import numpy as np
import pytest
import torch

from fedloom.algorithms.parts.lwsam import by_name, distances, largest, perturbation, scores


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

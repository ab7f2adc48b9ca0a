"""Differential privacy of uploads: updates are clipped, noise is distributed as declared, epsilon is exact."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_same, make_federation, make_task, method, methods, run_rounds
from scipy import stats
from sentences import user_error

import fedloom
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.privacy import UploadPrivacy, gaussian_epsilon
from fedloom.core.tree import leaves
from fedloom.engine.plan import Plan
from fedloom.engine.privacy import keyed_noise, protected, secret_noise
from fedloom.engine.screening import update_vectors

REFUSED = [name for name in methods() if ALGORITHMS[name].no_privacy]
PRIVATE = [name for name in methods() if name not in REFUSED]


def task_for(name, privacy=None, **settings):
    alg = method(name)
    least = alg.min_samples(make_task((6, 9, 12)))
    data = make_federation([max(n, least) for n in (6, 9, 12)], server=20)
    return alg, make_task((), federation=data, privacy=privacy, **settings)


@pytest.mark.parametrize("name", PRIVATE)
def test_stacked_equals_reference(name):
    alg, task = task_for(name, UploadPrivacy(0.5, 0.1))
    assert_same(alg, task, Plan("stacked", "eager", chunk=2), 1e-8, rounds=2)


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_be_protected_are_refused(name):
    with user_error(f"{name} cannot have dp_clip, because it uploads"):
        fedloom.run(name, "digits", clients=3, rounds=1, dp_clip=1)


def test_a_method_that_does_not_say_so_is_refused_when_it_uploads():
    alg, task = task_for("hypcluster", UploadPrivacy(0.5))
    with user_error("hypcluster uploads more than real numbers"):
        run_rounds(alg, task, 1)


def upload(clients=3, width=20_000):
    """An upload of a model and of a change, and the model that was sent; their updates have norms around 1."""
    draw = torch.Generator().manual_seed(4)
    one = torch.randn(width, generator=draw, dtype=torch.float64)
    rows = torch.randn(clients, width, generator=draw, dtype=torch.float64) / math.sqrt(width)
    scale = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)[:clients, None]
    return {"w": {"a": one + scale * rows, "b": scale * rows[:, :7]}}, {"w": {"a": one, "b": torch.zeros(7)}}


def protect(privacy, up, shared, noise=None, t=0):
    alg, task = task_for("fedavg")
    ids = torch.arange(len(up["w"]["a"]))
    return alg, task, protected(privacy, noise or keyed_noise(3), alg, task, ids, t, up, shared, {})


def test_updates_are_clipped_and_small_ones_stay():
    up, shared = upload()
    silent = lambda ids, t, updates: torch.zeros_like(updates)  # noqa: E731
    alg, task, made = protect(UploadPrivacy(0.5), up, shared, silent)
    before, after = (update_vectors(alg, task, each, shared, {}) for each in (up, made))
    sizes = torch.linalg.vector_norm(after, dim=1)
    assert sizes[0] == pytest.approx(float(torch.linalg.vector_norm(before[0])))
    np.testing.assert_allclose(sizes[1:], 0.5)
    np.testing.assert_allclose(after[2] / 0.5, before[2] / torch.linalg.vector_norm(before[2]), atol=1e-12)


@pytest.mark.parametrize("noise", [keyed_noise(3), secret_noise(b"a secret")])
def test_noise_is_normal_with_the_declared_deviation(noise):
    """Kolmogorov and Smirnov's test over 60,000 numbers, of which no two are alike; clients are independent."""
    up, shared = upload()
    alg, task, made = protect(UploadPrivacy(0.5, 1.5), up, shared, noise)
    silent = lambda ids, t, updates: torch.zeros_like(updates)  # noqa: E731
    clipped = protect(UploadPrivacy(0.5, 1.5), up, shared, silent)[2]
    found = update_vectors(alg, task, made, shared, {}) - update_vectors(alg, task, clipped, shared, {})
    assert stats.kstest(found.flatten().numpy() / 0.75, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found.numpy()) - np.eye(3)).max() < 0.03
    assert len(np.unique(found.numpy().round(12))) > 59_000


def test_an_update_with_nan_tells_nothing():
    up, shared = upload()
    up["w"]["a"][1, 3] = math.nan
    made = protect(UploadPrivacy(0.5, 0.1), up, shared)[2]
    assert all(torch.isfinite(v).all() for v in leaves(made))
    silent = lambda ids, t, updates: torch.zeros_like(updates)  # noqa: E731
    clean = protect(UploadPrivacy(0.5, 0.1), up, shared, silent)[2]
    assert torch.equal(clean["w"]["a"][1], shared["w"]["a"])


def test_secret_noise_follows_from_the_update():
    """The same upload has the same noise; another one, round or secret has another."""
    row = torch.randn(1, 9, dtype=torch.float64)
    ids = torch.tensor([2])
    first = secret_noise(b"x")(ids, 4, row)
    assert torch.equal(first, secret_noise(b"x")(ids, 4, row.clone()))
    for other in (
        secret_noise(b"y")(ids, 4, row),
        secret_noise(b"x")(ids, 5, row),
        secret_noise(b"x")(ids, 4, row + 1),
    ):
        assert not (first == other).any()


def test_clients_count_alike_when_uploads_are_private():
    """The server learns no numbers of samples."""
    alg, task = task_for("fedavg", UploadPrivacy(1e6, 1e-9))
    weighted, equal = (run_rounds(alg, t, 1)[0].server["w"] for t in (task_for("fedavg")[1], task))
    assert not all(torch.allclose(weighted[k], equal[k], atol=1e-4) for k in equal)


# -- epsilon


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("uploads", [1, 10, 200])
def test_epsilon_is_that_of_a_library(noise, uploads):
    accounting = pytest.importorskip("dp_accounting")
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(accounting.GaussianDpEvent(noise), uploads)
    expected = accountant.get_epsilon(1e-5)
    found = UploadPrivacy(1.0, noise).epsilon(uploads)
    assert found <= expected * (1 + 1e-9)  # the library's is an upper bound
    assert found == pytest.approx(expected, rel=0.02, abs=0.02)


def test_known_values_of_epsilon():
    assert UploadPrivacy(1.0, 1.0).epsilon(0) == 0
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.3771781, abs=1e-6)
    assert gaussian_epsilon(1e6, 1e-5) == 0
    assert gaussian_epsilon(1.0 / math.sqrt(50), 1e-5) == UploadPrivacy(3.0, 1.0).epsilon(50)


# -- settings


def test_runs_record_epsilon():
    result = fedloom.run("fedrep", "digits", clients=3, rounds=3, dp_clip=0.5, dp_noise=0.5, participation=0.7)
    uploads = [UploadPrivacy(0.5, 0.5).epsilon(n) for n in range(4)]
    assert [row["epsilon"] for row in result.rounds] == sorted(row["epsilon"] for row in result.rounds)
    assert result.epsilon in uploads[1:]
    assert fedloom.run("local", "digits", clients=3, rounds=1, dp_clip=0.5).epsilon is None
    assert fedloom.run("fedavg", "digits", clients=3, rounds=1).epsilon is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp_noise": 1.0}, "dp_noise=1 belongs to dp_clip"),
        ({"dp_delta": 0.1}, "dp_delta=0.1 belongs to dp_clip"),
        ({"dp_clip": 0}, "dp_clip must be"),
        ({"dp_clip": 1, "dp_delta": 0.7}, "dp_delta must be"),
    ],
)
def test_settings_that_do_not_fit(settings, said):
    name = settings.pop("algorithm", "fedavg")
    with user_error(said):
        fedloom.run(name, "digits", clients=3, rounds=1, **settings)

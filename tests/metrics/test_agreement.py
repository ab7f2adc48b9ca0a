"""Every metric, client by client, against scikit-learn, or against its formula where scikit-learn has none."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
from sklearn import metrics as sk

from fedloom.metrics import ranking
from fedloom.metrics.predictions import Predictions
from fedloom.metrics.registry import METRICS

# Clients without samples (also first, last, and next to each other), with one, and with numbers on both sides of
# powers of two, which is where clients are put side by side with others.
SIZES = (0, 1, 2, 3, 0, 0, 4, 7, 8, 31, 1, 32, 33, 90, 0)


def one_vs_rest(score, y, p, defined):
    """The mean over classes of a binary score, in percent; of two classes it is that of the second."""
    classes = [1] if p.shape[1] == 2 else range(p.shape[1])
    found = [score(y == c, p[:, c]) for c in classes if defined(y == c)]
    return 100 * np.mean(found) if found else np.nan


def over_labels(score, y, p, defined):
    found = [score(y[:, k], p[:, k]) for k in range(y.shape[1]) if defined(y[:, k])]
    return 100 * np.mean(found) if found else np.nan


def both_kinds(y):
    return 0 < np.sum(y) < len(y)


def calibration_error(y, p):
    confidence, correct = p.max(axis=1), p.argmax(axis=1) == y
    error = 0.0
    for b in range(15):
        chosen = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if chosen.any():
            error += chosen.mean() * abs(confidence[chosen].mean() - correct[chosen].mean())
    return 100 * error


REFERENCES = {
    ("classes", "accuracy"): lambda y, p: 100 * sk.accuracy_score(y, p.argmax(1)),
    ("classes", "balanced_accuracy"): lambda y, p: 100 * sk.balanced_accuracy_score(y, p.argmax(1)),
    ("classes", "macro_f1"): lambda y, p: 100 * sk.f1_score(y, p.argmax(1), average="macro"),
    ("classes", "auroc"): lambda y, p: one_vs_rest(sk.roc_auc_score, y, p, both_kinds),
    ("classes", "auprc"): lambda y, p: one_vs_rest(sk.average_precision_score, y, p, np.any),
    ("classes", "log_loss"): lambda y, p: sk.log_loss(y, p, labels=range(p.shape[1])),
    ("classes", "calibration_error"): calibration_error,
    ("labels", "accuracy"): lambda y, p: 100 * sk.accuracy_score(y.ravel(), (p >= 0.5).ravel()),
    ("labels", "exact_match"): lambda y, p: 100 * sk.accuracy_score(y, p >= 0.5),
    ("labels", "macro_f1"): lambda y, p: 100 * sk.f1_score(y, p >= 0.5, average="macro", zero_division=np.nan),
    ("labels", "auroc"): lambda y, p: over_labels(sk.roc_auc_score, y, p, both_kinds),
    ("labels", "auprc"): lambda y, p: over_labels(sk.average_precision_score, y, p, np.any),
    ("labels", "log_loss"): lambda y, p: sk.log_loss(y.ravel(), p.ravel(), labels=[0, 1]),
    ("number", "rmse"): lambda y, p: sk.root_mean_squared_error(y, p),
    ("number", "mae"): sk.mean_absolute_error,
    ("number", "r2"): sk.r2_score,
}


def starts_of(sizes):
    return np.concatenate([[0], np.cumsum(sizes)])


def classes(rng, columns, steps):
    """Probabilities that are multiples of 1 / steps, so that many are equal, 0 or 1; some clients have one class."""
    starts = starts_of(SIZES)
    own = [rng.choice(columns, rng.integers(1, columns + 1), replace=False) for _ in SIZES]
    y = np.concatenate([rng.choice(few, size) for few, size in zip(own, SIZES, strict=True)]).astype(np.int64)
    p = rng.multinomial(steps, rng.dirichlet(np.ones(columns), len(y))) / steps
    return Predictions(y, p, starts)


def labels(rng, columns, steps):
    """Labels that all samples of a client may have, or none."""
    starts = starts_of(SIZES)
    frequency = np.repeat(rng.choice([0.0, 0.3, 0.7, 1.0], (len(SIZES), columns)), SIZES, axis=0)
    y = (rng.random((starts[-1], columns)) < frequency).astype(np.int64)
    return Predictions(y, rng.integers(0, steps + 1, y.shape) / steps, starts)


def numbers(rng, columns, steps):
    starts = starts_of(SIZES)
    y = rng.integers(0, steps, starts[-1]) / 4 + 1e3
    return Predictions(y, y + rng.integers(-1, 2, len(y)) * rng.random(len(y)), starts)


MAKERS = {"classes": classes, "labels": labels, "number": numbers}


def by_client(predictions, reference):
    y, p, starts = predictions.y, predictions.p, predictions.starts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns about clients with one class
        return [reference(y[a:b], p[a:b]) if b > a else np.nan for a, b in pairwise(starts)]


def test_every_metric_has_a_reference():
    assert sorted((metric.kind, metric.name) for metric in METRICS) == sorted(REFERENCES)


@pytest.mark.parametrize("steps", [3, 10, 10**6])  # from very few distinct probabilities to hardly any equal ones
@pytest.mark.parametrize("columns", [2, 3, 10])
@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.kind}-{metric.name}")
def test_metric_of_every_client(metric, columns, steps):
    for seed in range(5):
        predictions = MAKERS[metric.kind](np.random.default_rng([seed, columns, steps]), columns, steps)
        expected = by_client(predictions, REFERENCES[metric.kind, metric.name])
        np.testing.assert_allclose(metric.per_client(predictions), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.kind}-{metric.name}")
def test_nothing_is_defined_without_samples(metric):
    empty = {"classes": np.zeros((0, 3)), "labels": np.zeros((0, 3)), "number": np.zeros(0)}[metric.kind]
    y = np.zeros(0, dtype=np.int64) if metric.kind == "classes" else empty
    found = metric.per_client(Predictions(y, empty, np.zeros(4, dtype=np.int64)))
    np.testing.assert_array_equal(found, [np.nan, np.nan, np.nan])


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.kind}-{metric.name}")
def test_a_client_does_not_change_the_values_of_others(metric):
    y, p, starts = MAKERS[metric.kind](np.random.default_rng(0), 4, 10)[:3]
    alone = [metric.per_client(Predictions(y[a:b], p[a:b], np.array([0, b - a])))[0] for a, b in pairwise(starts)]
    np.testing.assert_allclose(metric.per_client(Predictions(y, p, starts)), alone, rtol=1e-12)


@pytest.mark.parametrize("name", ["auroc", "auprc"])
@pytest.mark.parametrize("block", [1, 100, 10**9])
def test_areas_do_not_depend_on_how_many_clients_are_sorted_at_a_time(name, block, monkeypatch):
    (metric,) = (metric for metric in METRICS if (metric.kind, metric.name) == ("classes", name))
    predictions = classes(np.random.default_rng(0), 4, 10)
    expected = metric.per_client(predictions)
    monkeypatch.setattr(ranking, "BLOCK", block)
    np.testing.assert_array_equal(metric.per_client(predictions), expected)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.kind}-{metric.name}")
def test_predictions_in_single_precision_give_nearly_the_same(metric):
    y, p, starts = MAKERS[metric.kind](np.random.default_rng(1), 3, 7)[:3]
    p = np.clip(p, 0.01, 0.99) if metric.kind != "number" else p  # the bound of the log loss depends on the precision
    single = metric.per_client(Predictions(y, p.astype(np.float32), starts))
    np.testing.assert_allclose(single, metric.per_client(Predictions(y, p, starts)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("metric", [m for m in METRICS if m.kind == "classes"], ids=lambda metric: metric.name)
def test_a_model_that_diverged_is_wrong_or_undefined_and_others_keep_their_values(metric):
    predictions = classes(np.random.default_rng(3), 4, 10)
    p = predictions.p.copy()
    p[predictions.starts[12] : predictions.starts[13]] = np.nan
    expected = metric.per_client(predictions)
    expected[12] = 0 if metric.name in ("accuracy", "balanced_accuracy", "macro_f1") else np.nan
    np.testing.assert_array_equal(metric.per_client(predictions._replace(p=p)), expected)


@pytest.mark.parametrize("name", ["auroc", "auprc", "log_loss"])
@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_one_probability_that_is_nan_makes_the_areas_and_the_loss_of_its_client_undefined(kind, name):
    (metric,) = (metric for metric in METRICS if (metric.kind, metric.name) == (kind, name))
    predictions = MAKERS[kind](np.random.default_rng(3), 4, 10)
    row = predictions.starts[13] - 1
    p = predictions.p.copy()
    p[row, predictions.y[row] if kind == "classes" else 0] = np.nan
    expected = metric.per_client(predictions)
    assert not np.isnan(expected[12])
    expected[12] = np.nan
    np.testing.assert_array_equal(metric.per_client(predictions._replace(p=p)), expected)

"""Whole figures of runs that took place: which panels there are, and that they show the records of these runs."""

import inspect
import re

import numpy as np
import pytest
from sentences import user_error

import fedloom
from fedloom import plots
from fedloom.plots.figures import FIGURES

TINY = {"rounds": 2, "clients": 3, "device": "cpu", "plan": "per-client"}


@pytest.fixture(scope="module")
def runs():
    """Runs in memory, by the label of their method."""
    found = {
        "fedavg": [fedloom.run("fedavg", seed=seed, **TINY) for seed in (0, 1)],
        "fedrep": [fedloom.run("fedrep", **TINY)],
    }
    assert [len(of) for of in found.values()] == [2, 1]
    return found


@pytest.fixture(scope="module")
def pfedkt():
    return {
        f"hn={hn}": [fedloom.run("pfedkt", hn=hn, hn_update="step", model="logreg", **TINY)]
        for hn in ("small", "large")
    }


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def test_convergence_has_a_line_per_method(runs):
    figure = plots.figure("convergence", runs, smooth=1)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["fedavg", "fedrep"]
    of_seeds = [[row["pre_acc_mean"] for row in result.rounds] for result in runs["fedavg"]]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), np.mean(of_seeds, axis=0))


def test_a_method_can_be_chosen(runs):
    (axes,) = plots.figure("convergence", runs, method=["fedrep"]).axes
    assert [line.get_label() for line in axes.lines] == ["fedrep"]
    with user_error("'fedrap'", "did you mean 'fedrep'?"):
        plots.figure("convergence", runs, method=["fedrap"])


def test_a_histogram_per_method_with_the_same_axes(runs):
    figure = plots.figure("distribution", runs, below=[50])
    assert titles(figure) == ["fedavg", "fedrep"]
    left, right = figure.axes
    assert (left.get_xlim(), left.get_ylim()) == (right.get_xlim(), right.get_ylim())
    assert sum(bar.get_height() for bar in left.patches) == pytest.approx(3)  # clients, as a mean over two seeds
    assert figure.get_supxlabel() == "accuracy of personal models (%)"
    assert all("below 50" in axes.texts[0].get_text() for axes in figure.axes)


def test_a_strip_per_method(runs):
    figure = plots.figure("clients", runs)
    best = runs["fedrep"][0].best_on_validation()["round"]
    rows = [row for row in runs["fedrep"][0].clients.to_pylist() if row["round"] == best]
    strip = figure.axes[0].images[0].get_array()[1]
    assert sorted(strip) == pytest.approx(sorted(row["pre_acc"] for row in rows))


def test_features_by_class_and_by_client(runs):
    figure = plots.figure("tsne", runs, method=["fedrep"], samples=40)
    features = plots.features(runs["fedrep"][0], samples=40)
    assert titles(figure) == [
        f"fedrep, by {by}: silhouette {features.silhouette(by):.2f}" for by in ("class", "client")
    ]
    for axes in figure.axes:
        assert sum(len(drawn.get_offsets()) for drawn in axes.collections) == 40


def test_landscapes_of_the_global_and_of_a_personal_model_share_their_levels(runs):
    figure = plots.figure("landscape", runs, client=2, samples=30)
    found = {axes.get_title(): axes for axes in figure.axes}
    assert [title.partition("\n")[0] for title in found] == [
        "fedavg, global model", "fedavg, client 2", "fedrep, client 2"
    ]  # fmt: skip
    expected = plots.loss_landscape(runs["fedrep"][0], 2, samples=30)
    assert figure.axes[-1].get_title().endswith(f"\nloss {expected.centre:#.3g}, sharpness {expected.sharpness:#.3g}")
    levels = {tuple(drawn.levels) for axes in figure.axes for drawn in axes.collections}
    assert len(levels) == 1


def test_a_sweep(tmp_path):
    made = fedloom.sweep("fedprox", grid={"mu": [1.0, 0.1]}, out=tmp_path / "sweep", **TINY)
    for source in (made, tmp_path / "sweep"):
        (axes,) = plots.figure("sweep", source).axes
        expected = {row["mu"]: row["acc_mean"] for row in made.table}
        x, y = {bars.get_label(): bars for bars in axes.containers}["test"].lines[0].get_data()
        assert dict(zip(x, y, strict=True)) == pytest.approx(expected)
    fedloom.run("fedavg", out=tmp_path / "run", **TINY)
    with user_error("run is not the folder of a sweep"):
        plots.figure("sweep", tmp_path / "run")
    with user_error("of one sweep"):
        plots.figure("sweep", made, made)


def test_rewards_of_the_server_and_of_the_clients(runs):
    page = fedloom.run("page", server_share=0.2, **TINY)
    server, clients, *others = plots.figure("rewards", {**runs, "page": [page]}).axes  # runs without are left out
    assert len(others) == 2
    assert server.lines[0].get_ydata().tolist() == [row["acc_global"] for row in page.rounds]
    assert clients.lines[0].get_ydata().tolist() == [row["post_acc_mean"] for row in page.rounds]
    of_server = [row["reward_CS"] for row in page.reports.to_pylist() if row["client"] == -1]
    assert others[0].lines[0].get_ydata().tolist() == of_server
    with user_error("None of these runs has rewards", "page"):
        plots.figure("rewards", runs)


def test_hypernetworks(pfedkt, runs):
    """Fig. 9: on the left what it costs to generate the model, here logistic regression with 64 x 10 + 10 parameters,
    on the right both kinds."""
    figure = plots.figure("hypernetwork", {**runs, **pfedkt}, smooth=1)
    costs, curves = figure.axes
    assert costs.get_title() == "generating 650 parameters"
    x, y = costs.lines[0].get_data()
    assert list(x) == [100, 200, 400]
    # two calls of the one with 400 outputs, over one with 650
    assert y[2] == pytest.approx(2 * (1300 + 10_000 + 40_000) / (1300 + 10_000 + 65_000))
    assert [line.get_label() for line in curves.lines] == ["hn=small", "hn=large"]
    assert curves.get_ylabel() == "accuracy after local training (%)"
    with user_error("None of these runs has a hypernetwork at its clients", "pfedkt"):
        plots.figure("hypernetwork", runs)


def test_mistakes_are_told(runs):
    with user_error("'convergense'", "did you mean 'convergence'?"):
        plots.figure("convergense", runs)
    with user_error("'smoth'", "did you mean 'smooth'?"):
        plots.figure("convergence", runs, smoth=3)
    with user_error("'tsne' has no option 'view'", "'convergence'"):
        plots.figure("tsne", runs, view="pre")
    with user_error("25 methods are too many", "option method"):
        plots.figure("distribution", {str(i): runs["fedrep"] for i in range(25)})


def test_every_figure_is_named_in_the_documentation_of_figure():
    for name in FIGURES:
        assert name in inspect.getdoc(plots.figure)


@pytest.mark.parametrize("name", plots.__all__)
def test_everything_public_says_what_its_arguments_are(name):
    made = getattr(plots, name)
    text = inspect.getdoc(made)
    assert text
    if inspect.isfunction(made) and (names := [p for p in inspect.signature(made).parameters if p != "options"]):
        for argument in names:
            assert re.search(rf"^    \*{{0,2}}{argument}: ", text, re.MULTILINE), argument

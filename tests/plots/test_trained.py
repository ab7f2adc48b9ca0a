"""What is drawn of features and of losses is where it was measured."""

import numpy as np
import pytest
from sentences import user_error

from fedloom.plots import Features, Landscape, landscape, loss_levels, tsne

FEATURES = Features(
    np.array([[0.0], [1.0], [10.0], [11.0]]), np.array([0, 0, 2, 2]), np.array([0, 1, 0, 1]),
    ("cat", "dog", "cow"), ("ward", "clinic"),
)  # fmt: skip
POINTS = np.array([[0.0, 0.0], [1.0, 1.0], [5.0, 5.0], [6.0, 7.0]])


def bowl(size=41):
    """0.1 + a^2 + b^2: lines of equal loss are circles. On the circle of radius 0.5 it is 0.25 higher."""
    steps = np.linspace(-1, 1, size)
    a, b = np.meshgrid(steps, steps)
    return Landscape("client 3", steps, 0.1 + a**2 + b**2, 0.1, 0.25)


# -- features


def test_every_group_has_its_points_its_look_and_its_name(axes):
    """The silhouette by class, by hand in tests/analysis/test_features.py: (9.5/10.5 + 8.5/9.5)/2 = 0.90."""
    tsne(axes, FEATURES, points=POINTS)
    found = {drawn.get_label(): drawn.get_offsets().tolist() for drawn in axes.collections}
    assert found == {"cat": [[0, 0], [1, 1]], "cow": [[5, 5], [6, 7]]}
    assert len({tuple(drawn.get_facecolor()[0]) for drawn in axes.collections}) == 2
    assert [text.get_text() for text in axes.texts] == ["cat", "cow"]
    assert axes.get_title() == "by class: silhouette 0.90"


def test_by_client(axes):
    """Clients have 0 and 10, and 1 and 11: a = 10; b = (1 + 11)/2 for 0 and 11, (1 + 9)/2 for 10 and 1."""
    tsne(axes, FEATURES, by="client", points=POINTS)
    found = {drawn.get_label(): drawn.get_offsets().tolist() for drawn in axes.collections}
    assert found == {"ward": [[0, 0], [5, 5]], "clinic": [[1, 1], [6, 7]]}
    assert axes.get_title() == f"by client: silhouette {((6 - 10) / 10 + (5 - 10) / 10) / 2:.2f}"
    with user_error("'colour'"):
        tsne(axes, FEATURES, by="colour", points=POINTS)


def test_one_group_has_no_silhouette(axes):
    tsne(axes, FEATURES._replace(labels=np.zeros(4, int)), points=POINTS)
    assert axes.get_title() == "by class: one group only"


def test_without_points_features_are_embedded(axes):
    draw = np.random.default_rng(0)
    features = FEATURES._replace(x=draw.normal(size=(12, 3)), labels=np.repeat([0, 1, 2], 4), clients=np.zeros(12, int))
    tsne(axes, features)
    found = np.concatenate([drawn.get_offsets() for drawn in axes.collections])
    np.testing.assert_allclose(found, features.embed())


# -- losses


def test_lines_of_equal_loss_are_where_the_loss_is_equal(axes):
    """The loss is 0.35 at distance 0.5 of the centre, and 0.5 at sqrt 0.4."""
    landscape(axes, bowl(), levels=[0.35, 0.5])
    lines = axes.collections[1]
    assert list(lines.levels) == [0.35, 0.5]
    for level, path in zip(lines.levels, lines.get_paths(), strict=True):
        radius = np.linalg.norm(path.vertices, axis=1)
        np.testing.assert_allclose(radius, np.sqrt(level - 0.1), atol=0.002)  # linear between points of the grid
    assert axes.get_title() == "client 3\nloss 0.100, sharpness 0.250"


def test_the_first_direction_is_the_horizontal_one(axes):
    """The loss is steeper along the first: 0.1 + 4 a^2 + b^2 is 0.5 at a = sqrt 0.1 and b = sqrt 0.4."""
    found = bowl()
    a, b = np.meshgrid(found.steps, found.steps)
    landscape(axes, found._replace(losses=0.1 + 4 * a**2 + b**2), levels=[0.5])
    reach = np.abs(axes.collections[0].get_paths()[0].vertices).max(axis=0)
    assert reach == pytest.approx([np.sqrt(0.1), np.sqrt(0.4)], abs=0.005)


def test_the_circle_on_which_sharpness_is_measured(axes):
    landscape(axes, bowl())
    circle, centre = axes.lines
    np.testing.assert_allclose(np.hypot(*circle.get_data()), 0.5)
    assert np.ravel(centre.get_data()).tolist() == [0, 0]


def test_losses_that_are_not_finite_are_beyond_all_lines(axes):
    found = bowl()
    found.losses[0, 0] = np.inf
    landscape(axes, found, levels=[0.2, 0.5])
    axes.figure.canvas.draw()
    assert np.isfinite(axes.collections[1].get_paths()[1].vertices).all()


def test_levels_are_round_numbers_within_the_losses_of_all():
    """From 0.1 to 1000 with one, three: 0.3, 1, 3, 10, ..., 300 are seven; with one, two, five there are eleven."""
    far = bowl()._replace(losses=np.array([[0.1, 1000.0]]))
    assert loss_levels([far]) == pytest.approx([0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500])
    near = bowl()._replace(losses=np.array([[0.11, 10.0]]))
    assert loss_levels([near, far._replace(losses=np.array([[0.1, 1000.0]]))]) == loss_levels([far])


def test_levels_of_losses_that_hardly_differ_are_evenly_spaced():
    levels = loss_levels([bowl()._replace(losses=np.array([[1.0, 1.09]]))])
    assert np.diff(levels) == pytest.approx([0.01] * 7)
    assert (levels[0], levels[-1]) == pytest.approx((1.01, 1.08))


@pytest.mark.parametrize("losses", [[[2.0, 2.0]], [[np.nan, np.inf]]])
def test_there_are_levels_where_no_loss_differs(losses, axes):
    found = bowl(3)._replace(losses=np.resize(np.array(losses), (3, 3)))
    assert all(np.diff(loss_levels([found])) > 0)
    landscape(axes, found)


def test_a_loss_of_zero_in_the_middle_can_be_drawn(axes):
    found = bowl()
    landscape(axes, found._replace(losses=found.losses - 0.1), levels=[0.1, 0.4])
    lines = axes.collections[1]
    assert [np.linalg.norm(path.vertices, axis=1).mean() for path in lines.get_paths()] == pytest.approx(
        [np.sqrt(0.1), np.sqrt(0.4)], abs=0.005
    )

"""Who has which data, in numbers worked out by hand and in pictures."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sentences import user_error

from fedloom.core.federation import Federation, Ragged
from fedloom.report.partition import BUBBLES, check_image_path, describe, draw


def federation(labels, classes, server=0):
    """From the labels per client for training, validation and test; the server has some of class 0."""
    y, lists = [], {"train": [], "val": [], "test": []}
    for splits in labels:
        for name, mine in zip(lists, splits, strict=True):
            lists[name].append(np.arange(len(y), len(y) + len(mine)))
            y += mine
    total = len(y) + server
    return Federation(
        torch.zeros(total, 2),
        torch.tensor(y + [0] * server),
        classes,
        {name: Ragged.of(rows) for name, rows in lists.items()},
        server=torch.arange(len(y), total) if server else None,
    )


def uniform(clients, classes):
    """One sample of every class for training at every client, and one of class 0 for testing."""
    return federation([(list(range(classes)), [], [0])] * clients, classes)


# classes 0, 1, 2 per client: (3, 1, 0), (0, 0, 2), (1, 1, 0)
THREE = federation([([0, 1], [0], [0]), ([2], [], [2]), ([0], [], [1])], classes=3, server=2)


def test_samples_of_a_client_are_counted_per_class_and_per_split():
    clients = describe(THREE)["clients"]
    assert clients[0] == {
        "client": 0, "samples": 4, "train": 2, "val": 1, "test": 1, "classes": 2, "labels": [3, 1, 0],
    }  # fmt: skip
    assert [c["labels"] for c in clients] == [[3, 1, 0], [0, 0, 2], [1, 1, 0]]
    assert [c["classes"] for c in clients] == [2, 1, 2]
    assert [(c["train"], c["val"], c["test"]) for c in clients] == [(2, 1, 1), (1, 0, 1), (1, 0, 1)]


def test_clients_that_are_held_out_are_marked_and_counted():
    found = describe(replace(THREE, held_out=1))
    assert [one["held_out"] for one in found["clients"]] == [False, False, True]
    assert found["samples"] == 8
    assert found["partition"] != THREE.digest()


def test_totals_are_over_clients_and_the_servers_samples_are_counted_separately():
    found = describe(THREE)
    assert (found["samples"], found["classes"], found["server"]) == (8, 3, 2)
    assert found["partition"] == THREE.digest()
    assert describe(uniform(2, 3))["server"] == 0


def test_skew_is_the_mean_total_variation_distance_from_all_clients_classes():
    """All clients together have (4, 2, 2) of 8: 1/2, 1/4, 1/4. Client 0 has 3/4, 1/4, 0: half of 1/4 + 0 + 1/4 is
    1/4. Client 1 has 0, 0, 1: half of 1/2 + 1/4 + 3/4 is 3/4. Client 2 has 1/2, 1/2, 0: half of 0 + 1/4 + 1/4 is 1/4.
    The mean over clients is 5/12 (weighted by size it would be 3/8)."""
    assert describe(THREE)["skew"] == pytest.approx(5 / 12, rel=1e-12)


def test_clients_with_the_same_shares_have_no_skew_whatever_their_sizes():
    data = federation([([0, 1], [], [0, 1]), ([0, 1], [], []), ([0, 0, 1], [1], [])], classes=2)
    assert describe(data)["skew"] == 0


def test_four_clients_with_a_class_each_have_the_largest_skew():
    """Each has 1 where all have 1/4: half of 3/4 + 3 * 1/4."""
    data = federation([([c], [], [c]) for c in range(4)], classes=4)
    assert describe(data)["skew"] == pytest.approx(3 / 4, rel=1e-12)


SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.mark.parametrize("clients", [3, BUBBLES + 40], ids=["circles", "map"])
@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_picture_is_a_file_of_its_kind_and_the_only_one(kind, clients, tmp_path):
    path = tmp_path / f"who.{kind}"
    draw(uniform(clients, 4), path)
    content = path.read_bytes()
    assert content.startswith(SIGNATURES[kind])
    assert len(content) > 1000
    assert list(tmp_path.iterdir()) == [path]


def test_a_suffix_may_be_in_capitals(tmp_path):
    draw(THREE, tmp_path / "WHO.PNG")
    assert (tmp_path / "WHO.PNG").read_bytes().startswith(SIGNATURES["png"])


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws, and gives what was drawn: circles as {(client, class): area}, and the map."""
    figures, savefig = [], Figure.savefig

    def keep(figure, *args, **how):
        figures.append(figure)
        savefig(figure, *args, **how)

    def look(data):
        draw(data, tmp_path / "who.svg")
        axes = figures[-1].axes[0]
        circles = {}
        for points in axes.collections:
            circles |= dict(zip(map(tuple, points.get_offsets().tolist()), points.get_sizes(), strict=True))
        return circles, [image.get_array() for image in axes.images]

    monkeypatch.setattr(Figure, "savefig", keep)
    return look


def test_few_clients_have_a_circle_for_every_class_that_they_hold(drawn):
    """Areas are to each other as the numbers of samples, of which the largest is 3."""
    circles, maps = drawn(THREE)
    largest = circles[0, 0]
    counts = {(0, 0): 3, (0, 1): 1, (1, 2): 2, (2, 0): 1, (2, 1): 1}
    assert {pair: area / largest * 3 for pair, area in circles.items()} == pytest.approx(counts)
    assert maps == []


@pytest.mark.parametrize(("clients", "classes"), [(BUBBLES, 2), (2, BUBBLES), (1, 1)])
def test_up_to_so_many_clients_and_classes_there_are_circles(clients, classes, drawn):
    circles, maps = drawn(uniform(clients, classes))
    assert (len(circles), len(maps)) == (clients * classes, 0)


@pytest.mark.parametrize(("clients", "classes"), [(BUBBLES + 1, 2), (2, BUBBLES + 1)])
def test_more_clients_or_classes_are_a_map_with_clients_from_left_to_right(clients, classes, drawn):
    circles, (map_,) = drawn(uniform(clients, classes))
    assert circles == {}
    assert map_.shape == (classes, clients)
    assert (map_[0] > map_[1]).all()  # a client has two samples of class 0, one of every other


def test_a_picture_replaces_an_older_one(tmp_path):
    path = tmp_path / "who.svg"
    path.write_text("old")
    draw(THREE, path)
    assert "<svg" in path.read_text()


def test_a_picture_that_cannot_be_finished_leaves_the_older_one(tmp_path, monkeypatch):
    def fail(self, file, **how):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    path = tmp_path / "who.png"
    path.write_text("old")
    with user_error("disk is full", "who.png"):
        draw(THREE, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_in_no_folder_is_refused(tmp_path):
    with user_error("who.png", "no such file or directory"):
        draw(THREE, tmp_path / "nowhere" / "who.png")


@pytest.mark.parametrize("name", ["who.jpg", "who", "who.png.gz", "png", ".png"])
def test_other_kinds_of_pictures_are_refused(name, tmp_path):
    with user_error("png, svg or pdf", f"'{name}'"):
        check_image_path(tmp_path / name)
    with user_error("png, svg or pdf"):
        draw(THREE, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["who.png", "who.svg", "who.pdf", "a.b.svg"])
def test_the_three_kinds_are_accepted(name, tmp_path):
    check_image_path(tmp_path / name)


@pytest.mark.parametrize("clients", [6, BUBBLES + 40], ids=["circles", "map"])
def test_a_line_separates_the_clients_that_are_held_out(clients, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **how: figures.append(figure))
    draw(replace(uniform(clients, 4), held_out=2), tmp_path / "who.svg")
    axes = figures[0].axes[0]
    assert [line.get_xdata()[0] for line in axes.lines] == [clients - 2.5]
    assert f"{clients - 2} and above are held out" in axes.get_xlabel()
    if clients == 6:
        colours = axes.collections[0].get_facecolors()
        held_out = axes.collections[0].get_offsets()[:, 0] >= 4
        assert len(np.unique(colours[held_out], axis=0)) == len(np.unique(colours[~held_out], axis=0)) == 1
        assert len(np.unique(colours, axis=0)) == 2

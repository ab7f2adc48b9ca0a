"""How figures look, and that files are what their names say."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest
from PIL import Image
from sentences import user_error

from fedloom import plots
from fedloom.plots.drawing import COLOURS, RC, looks, name_lines


@pytest.fixture
def figure():
    with plots.style():
        made, [[axes]] = plots.panels(1, 1)
        axes.plot([1, 2, 3], [2, 1, 3], label="ditto")
        axes.set_xlabel("round")
    return made


def test_28_groups_can_be_told_apart_with_colours_and_the_first_four_without():
    found = looks(28)
    assert len({(look.colour, look.dash) for look in found}) == 28
    assert len({look.dash for look in found[:4]}) == 4
    assert len({look.marker for look in found[:8]}) == 8
    assert {look.colour for look in found} == set(COLOURS)


def test_the_style_ends_with_its_block():
    import matplotlib

    before = matplotlib.rcParams["font.size"]
    with plots.style():
        assert matplotlib.rcParams["font.size"] == RC["font.size"] != before
    assert matplotlib.rcParams["font.size"] == before


def test_panels_have_the_size_that_was_asked_for():
    figure, grid = plots.panels(2, 3, width=1.5, height=2.0, sharex=True)
    assert figure.get_size_inches().tolist() == [4.5, 4.0]
    assert [len(row) for row in grid] == [3, 3]
    assert grid[0][0].get_shared_x_axes().joined(grid[0][0], grid[1][2])


def test_an_svg_file_has_the_size_of_the_figure(figure, tmp_path):
    path = plots.save(figure, tmp_path / "a.svg")
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert float(root.get("width").removesuffix("pt")) == pytest.approx(72 * 3.4)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10


def test_a_pdf_file_has_fonts_that_publishers_accept(figure, tmp_path):
    data = plots.save(figure, str(tmp_path / "a.PDF")).read_bytes()
    assert data.startswith(b"%PDF-")
    assert data.rstrip().endswith(b"%%EOF")
    assert set(re.findall(rb"/Subtype /(Type\d)\b", data)) <= {b"Type0"}  # no Type 3
    assert b"/Type3" not in data


def test_a_png_file_has_200_dots_per_inch(figure, tmp_path):
    with Image.open(plots.save(figure, tmp_path / "a.png")) as picture:
        assert picture.format == "PNG"
        assert picture.size == (680, 480)


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_the_same_figure_gives_the_same_file_and_replaces_an_older_one(kind, figure, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_text("older")
    first = plots.save(figure, path).read_bytes()
    assert plots.save(figure, path).read_bytes() == first
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_other_files_are_refused(figure, tmp_path):
    with user_error("svg, pdf or png", "'a.jpg'"):
        plots.save(figure, tmp_path / "a.jpg")
    with user_error("svg, pdf or png", "'a'"):
        plots.save(figure, tmp_path / "a")
    with user_error("There is no folder", "a.svg"):
        plots.save(figure, tmp_path / "none" / "a.svg")
    assert not list(tmp_path.iterdir())


def test_the_legend_of_many_lines_is_beside_the_axes(figure):
    axes = figure.axes[0]
    name_lines(axes, ["ditto"])
    assert axes.get_legend() is None
    for count, inside in ((2, True), (7, False)):
        name_lines(axes, ["x"] * count)
        figure.canvas.draw()
        box, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert (legend.x0 < box.x1) == inside


def test_without_matplotlib_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with user_error("matplotlib", "pip install matplotlib"), plots.style():
        pass
    with user_error("pip install matplotlib"):
        plots.figure("convergence")

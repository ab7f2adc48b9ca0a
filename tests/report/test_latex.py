"""A leaderboard as LaTeX."""

import re

import pytest
from report.test_leaderboard import BOARD, COMMA, UNPAIRED, computed, held_out, line
from sentences import user_error

from fedloom.report.latex import COLUMNS, NAMES, OF_METRIC, to_latex


def latex_tables(text):
    """Lines of cells, per table."""
    return [
        [re.split(r"(?<!\\)&", row.removesuffix(r" \\")) for row in table.splitlines() if row.endswith(r" \\")]
        for table in text.split(r"\begin{tabular}")[1:]
    ]


@pytest.mark.parametrize("board", [BOARD, UNPAIRED], ids=["gain", "no gain"])
def test_latex_has_as_many_cells_in_every_row_as_its_tabular_has_columns(board):
    text = to_latex(board)
    layouts = re.findall(r"\\begin{tabular}{(\w+)}", text)
    tables = latex_tables(text)
    assert [len(table) for table in tables] == [3, 2]  # titles and methods
    for layout, table in zip(layouts, tables, strict=True):
        assert {len(cells) for cells in table} == {len(layout)}


def test_latex_opens_and_closes_what_it_opens():
    text = to_latex(BOARD)
    for name in ("table", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 2
    assert text.count("{") == text.count("}")
    assert text.count("$") % 2 == 0
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}") == 2


def test_latex_escapes_what_would_not_be_text():
    text = to_latex([line("a_b&c#d%e"), line("a_b&c#d%e", selection="last")])
    assert r"a\_b\&c\#d\%e" in text
    assert r"lowest 5 \%" in text
    lone = re.findall(r"(?<!\\)[%#_].*", text)  # a lone % hides the rest of its line
    assert all(found == "%" or found.startswith("% needs") for found in lone)
    (((_, *_), cells),) = latex_tables(text)
    assert cells[0].strip() == r"a\_b\&c\#d\%e"


def test_latex_sets_the_best_mean_and_the_best_lowest_in_bold_and_nothing_else():
    """Of the personal models fedavg has the best mean (90) and ditto the best lowest 5 % (60); the only global model
    is the best of its table in both."""
    personal, global_ = latex_tables(to_latex(BOARD))
    assert [[c.strip() for c in cells if "textbf" in c] for cells in personal[1:]] == [
        [r"\textbf{90.00 $\pm$ 0.33}"],
        [r"\textbf{60.00 $\pm$ 0.33}"],
    ]
    assert [i for i, c in enumerate(personal[1]) if "textbf" in c] == [1]
    assert [i for i, c in enumerate(personal[2]) if "textbf" in c] == [2]
    assert [i for i, c in enumerate(global_[1]) if "textbf" in c] == [1, 2]


def test_latex_sets_all_that_share_the_best_in_bold():
    methods = ("a", "b")
    board = [line(m, selection=s, acc_mean=90.0, acc_low5=30.0) for m in methods for s in ("validation", "last")]
    assert to_latex(board).count(r"\textbf") == 4


def test_the_default_columns_are_few_and_the_caption_explains_what_is_shown():
    text = to_latex(BOARD)
    personal, _ = latex_tables(text)
    assert [c.strip() for c in personal[0]] == ["method", "mean", r"lowest 5 \%", "worst", "gain", r"harmed \%"]
    assert text.count(r"$\pm$ is the standard deviation over 2 seeds.") == 2
    assert "'last'" not in text
    assert "too short" not in text
    assert r"\label{tab:personal-model}" in text
    assert r"\label{tab:global-model}" in text
    assert text.count(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%") == 2  # it fits the page


def test_columns_can_be_chosen():
    board = [computed(row) for row in BOARD]
    personal, _ = latex_tables(to_latex(board, ["low5", "std", "last", "up", "rounds", "samples"]))
    assert [c.strip() for c in personal[0]] == [
        "method", r"lowest 5 \%", "std", "last", "up", "rounds", "samples in all",
    ]  # fmt: skip
    assert [c.strip() for c in personal[1]] == [
        "fedavg", r"50.00 $\pm$ 0.33", "33.33", "91.00", "667 kB", "10", "500",
    ]  # fmt: skip
    assert "'last' is the mean in the last one" in to_latex(board, ["mean", "last"])
    assert "Gain" not in to_latex(board, ["mean", "last"])
    for name in (*OF_METRIC, *NAMES):
        assert to_latex(board, [name])  # those that the board does not have are left out


@pytest.mark.parametrize(
    ("names", "words"),
    [(["means"], ["'means'", "did you mean 'mean'?"]), ([], ["mean,low5,gain"]), (["gain", "gain"], ["each once"])],
)
def test_unknown_columns_are_refused(names, words):
    with user_error(*words):
        to_latex(BOARD, names)


def test_ranks_come_first_and_minus_signs_are_long():
    board = [line(name, selection=which, rank=1, gain=-2.0) for name in "ab" for which in ("validation", "last")]
    text = to_latex(board)
    assert r"\begin{tabular}{rl" in text
    assert r"\# & method &" in text
    assert "1 & a &" in text
    assert "& $-$2.00 $" in text


def test_unseen_clients_have_a_table_of_their_own():
    tables = latex_tables(to_latex([held_out(row) for row in BOARD], COLUMNS))
    best = [cell.strip() for cell in tables[2][1]]
    assert best[0] == "fedavg"
    assert best[1] == r"\textbf{90.00 $\pm$ 0.33}"
    assert tables[2][2][0].strip().replace("\\", "") == COMMA

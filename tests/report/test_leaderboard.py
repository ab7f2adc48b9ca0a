"""A leaderboard as CSV and Markdown; LaTeX has the same tables."""

import csv
import io
import re

import pytest

from fedloom.metrics.leaderboard import METRICS
from fedloom.report.latex import to_latex
from fedloom.report.leaderboard import (
    COLUMNS,
    VIEWS,
    budget_sentences,
    caption,
    format_bytes,
    format_cell,
    main_rows,
    to_csv,
    to_markdown,
    unseen_columns,
)

COMMA = "ditto:lam=0.5,personal_epochs=2"  # has a comma, and an underscore


def line(method, model="pre", selection="validation", **values):
    """A row as `fedloom.metrics.leaderboard` makes it, with a third of everything where nothing else is said."""
    row = {"method": method, "model": model, "selection": selection, "seeds": 2}
    for name in (*METRICS, "gain", "harmed", "trend", "round"):
        row |= {name: 100 / 3, f"{name}_std": 1 / 3}
    row |= {"bytes_down": 1e6 / 3, "bytes_up": 2e6 / 3, "train_seconds": 1 / 3, "eval_seconds": 1 / 7}
    return {**row, **values}


BOARD = [
    line("fedavg", selection="last", acc_mean=91.0, acc_mean_std=None),
    line("fedavg", acc_mean=90.0, acc_low5=50.0),
    line(COMMA, acc_mean=80.0, acc_low5=60.0, acc_mean_std=None),
    line(COMMA, selection="last", acc_mean=79.0, acc_mean_std=2.5),
    line("fedavg", "global", acc_mean=70.0, acc_low5=40.0),
    line("fedavg", "global", "last", acc_mean=69.0),
]
UNPAIRED = [{k: v for k, v in row.items() if not k.startswith(("gain", "harmed"))} for row in BOARD]


@pytest.mark.parametrize("board", [BOARD, [*BOARD, UNPAIRED[0]], UNPAIRED], ids=["all", "mixed", "no gain"])
def test_csv_has_every_number_of_every_row(board):
    reader = csv.DictReader(io.StringIO(to_csv(board)))
    found = list(reader)
    assert set(reader.fieldnames) == {name for row in board for name in row}
    assert len(found) == len(board)
    for read, row in zip(found, board, strict=True):
        for name, text in read.items():
            value = row.get(name)
            if value is None:
                assert text == ""
            else:
                assert type(value)(text) == value, name  # to the last digit


def markdown_tables(text):
    """Lines of cells, per table."""
    tables, table = [], []
    for row in [*text.splitlines(), ""]:
        if row.startswith("|"):
            table.append([c.strip() for c in row.strip("|").split("|")])
        elif table:
            tables.append(table)
            table = []
    return tables


@pytest.mark.parametrize("board", [BOARD, UNPAIRED], ids=["gain", "no gain"])
def test_markdown_has_a_table_per_model_view_with_lines_of_equal_length(board):
    text = to_markdown(board)
    personal, global_ = markdown_tables(text)
    for table in (personal, global_):
        assert {len(cells) for cells in table} == {len(table[0])}
        assert table[0][:2] == ["method", "mean"]
        assert all(re.fullmatch("-+:?", c) for c in table[1])
    assert [cells[0] for cells in personal[2:]] == ["fedavg", COMMA]
    assert [cells[0] for cells in global_[2:]] == ["fedavg"]
    assert text.index("Personal model") < text.index(COMMA) < text.index("Global model")


def test_markdown_cells_stand_below_their_titles():
    board = [
        line("fedavg", acc_mean=90.123, acc_mean_std=1.0, acc_worst=12.5, acc_worst_std=None, gain=3.0, gain_std=0.5,
             harmed=25.0, bytes_down=1500.0, bytes_up=2.5e6, train_seconds=0.12345),
        line("fedavg", selection="last", acc_mean=88.0, acc_mean_std=2.0),
    ]  # fmt: skip
    ((titles, _, cells),) = markdown_tables(to_markdown(board))
    found = dict(zip(titles, cells, strict=True))
    assert found["mean"] == "90.12 ± 1.00"
    assert found["worst"] == "12.50"
    assert found["gain"] == "+3.00 ± 0.50"
    assert found["harmed %"] == "25.00"  # its standard deviation is not shown
    assert found[COLUMNS["last"][0]] == "88.00 ± 2.00"
    assert (found["down"], found["up"], found["s/round"]) == ("1.5 kB", "2.5 MB", "0.123")


def test_a_view_without_rows_has_no_table():
    assert len(markdown_tables(to_markdown(BOARD[:4]))) == 1
    assert to_latex(BOARD[:4]).count(r"\begin{table}") == 1
    assert "Global" not in to_latex(BOARD[:4]) + to_markdown(BOARD[:4])


@pytest.mark.parametrize("write", [to_markdown, to_latex])
def test_the_caption_says_which_round_the_numbers_are_of(write):
    assert write(BOARD).count("best validation accuracy") == 2
    assert COLUMNS["last"][0] in caption([{"selection": "validation"}])


def test_main_rows_are_those_selected_on_validation_with_the_last_mean_beside():
    found = main_rows(BOARD)
    assert [(r["method"], r["acc_mean"]) for r in found] == [("fedavg", 90.0), (COMMA, 80.0)]
    assert [(r["last"], r["last_std"]) for r in found] == [(91.0, None), (79.0, 2.5)]
    assert {(r["model"], r["selection"]) for r in found} == {("pre", "validation")}
    assert [(r["acc_mean"], r["last"]) for r in main_rows(BOARD, "global")] == [(70.0, 69.0)]
    assert main_rows(BOARD, "post") == []
    assert "last" not in BOARD[1]  # the board is as it was


@pytest.mark.parametrize(
    ("row", "column", "text"),
    [
        ({"acc_mean": 12.345, "acc_mean_std": 0.678}, "acc_mean", "12.35 ± 0.68"),
        ({"acc_mean": 12.345, "acc_mean_std": None}, "acc_mean", "12.35"),
        ({"acc_mean": 12.345}, "acc_mean", "12.35"),
        ({"gain": 2.0}, "gain", "+2.00"),
        ({"gain": 0.0}, "gain", "0.00"),
        ({"gain": -2.0, "gain_std": 0.0}, "gain", "-2.00 ± 0.00"),
        ({}, "gain", ""),
        ({"trend": 0.3}, "trend", "+0.30"),
        ({"trend": -0.31}, "trend", "-0.31*"),
        ({}, "trend", ""),
    ],
)
def test_a_cell_has_two_digits_and_a_standard_deviation_where_there_is_one(row, column, text):
    assert format_cell(row, column) == text


def test_the_standard_deviation_can_be_left_out_of_a_cell():
    assert format_cell({"acc_mean": 12.0, "acc_mean_std": 1.0}, "acc_mean", with_std=False) == "12.00"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (0.5, "0.5 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (77_000, "77 kB"),
        (1e6, "1 MB"),
        (2.5e7, "25 MB"),
        (1e9, "1 GB"),
        (1.25e11, "125 GB"),
    ],
)
def test_size_is_three_digits_and_a_unit(count, text):
    assert format_bytes(count) == text


def test_the_caption_explains_the_trend_where_there_is_one():
    assert "too short" in caption(BOARD)
    assert "too short" not in caption([{k: v for k, v in row.items() if k != "trend"} for row in BOARD])


@pytest.mark.parametrize("count", [999.6, 999_700, 999_999_999, 2e12])
def test_size_is_never_in_powers_of_ten(count):
    assert "e" not in format_bytes(count)


def test_all_views_of_a_run_have_a_name():
    from fedloom.studies.result import VIEWS as RECORDED

    assert set(VIEWS) == set(RECORDED)


def test_without_validation_data_the_table_is_of_the_last_round_and_says_so():
    rows = [{**row, "selection": "last"} for row in BOARD if row["selection"] == "last"]
    assert main_rows(rows)
    assert all(row["last"] == row["acc_mean"] for row in main_rows(rows))
    assert "in the last round" in to_markdown(rows)
    assert "best validation" not in to_markdown(rows)


def held_out(row):
    """With accuracies of unseen clients 10 below the mean, and gaps of 12.5."""
    new = {c: 12.5 if c.endswith("gap") else row["acc_mean"] - 10 for c in unseen_columns([]) if c != "acc_mean"}
    return {**row, **new, **{f"{c}_std": 0.25 for c in new}}


def test_unseen_clients_have_a_table_of_their_own_where_there_are_any():
    board = [held_out(row) for row in BOARD]
    unseen = markdown_tables(to_markdown(board))[2]
    assert [cells[0] for cells in unseen] == ["method", "---", "fedavg", COMMA]
    assert unseen[0][1:] == [title for title, _ in unseen_columns([]).values()]
    wanted = ["90.00 ± 0.33", "80.00 ± 0.25", "80.00 ± 0.25", "+12.50", "80.00 ± 0.25", "80.00 ± 0.25", "+12.50"]
    assert unseen[2][1:] == wanted
    assert len(markdown_tables(to_markdown(BOARD))) == 2
    assert "nseen" not in to_markdown(BOARD) + to_latex(BOARD)


def test_ranks_come_first_in_markdown():
    board = [line(name, selection=which, rank=1) for name in "ab" for which in ("validation", "last")]
    header, bars, first, *_ = [text for text in to_markdown(board).splitlines() if text.startswith("|")]
    assert header.startswith("| # | method |")
    assert bars.startswith("|--:|---|--:|")
    assert first.startswith("| 1 | a |")
    assert "may be chance" in caption(board)


def computed(row, rounds=10, samples=500.0, **more):
    return {**row, "rounds": rounds, "gradients_per_round": 6.0, "samples_per_round": samples / rounds,
            "gradients_in_all": 60.0, "samples_in_all": samples, **more}  # fmt: skip


def test_a_table_says_what_clients_compute_and_whether_it_differs():
    board = [computed(row, samples=1500.0 if row["method"] == COMMA else 500.0) for row in BOARD]
    *_, (titles, _, first, second) = markdown_tables(to_markdown(board))
    assert titles == ["method", "rounds", "gradients", "samples", "gradients in all", "samples in all"]
    assert first == ["fedavg", "10", "6", "50", "60", "500"]
    assert second[-1] == "1500"
    assert budget_sentences(board) == [f"Budgets differ: {COMMA} computes 3.0 times as much as fedavg."]
    assert budget_sentences([computed(row) for row in BOARD]) == []
    assert budget_sentences(BOARD) == []  # of an older version, which did not count


def test_who_does_not_keep_to_an_equal_budget_is_named():
    """FedAvg has exactly its budget; 10 rounds of ditto are 104 %, which is near; 2 rounds are 120 %, because 1.67
    cannot be; 30 rounds are 120 % because it trains for longer than expected."""

    def sentences(rounds, share):
        rows = [computed(row, equal_budget="fedavg", of_budget=100.0) for row in BOARD]
        return budget_sentences(
            [{**r, "of_budget": share, "rounds": rounds} if r["method"] == COMMA else r for r in rows]
        )

    first, *rest = sentences(10, 104.0)
    assert "compute what fedavg does" in first
    assert rest == []
    assert sentences(2, 120.0)[1:] == [f"{COMMA} used 120 % of the budget (rounds are whole)."]
    assert sentences(30, 120.0)[1:] == [f"{COMMA} used 120 % of the budget."]

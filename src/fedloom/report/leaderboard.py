"""A leaderboard as text: CSV with all columns, Markdown with those that a reader needs; `report.latex` has LaTeX.

`board` is the list of rows that `fedloom.metrics.leaderboard.leaderboard` returns.
"""

import csv
import io
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.metrics.registry import column_name, in_percent, sign

Row = dict[str, Any]

VIEWS = {"pre": "personal", "post": "personal, trained", "global": "global"}
COLUMNS = {  # column -> its title, whether its standard deviation over seeds is shown
    "acc_mean": ("mean", True),
    "acc_low5": ("lowest 5 %", True),
    "acc_top5": ("top 5 %", True),
    "acc_worst": ("worst", True),
    "client_acc_std": ("std", False),
    "client_acc_cv_x1e-2": ("CV %", False),
    "gain": ("gain", True),
    "harmed": ("harmed %", False),
    "last": ("last", True),
    "trend": ("trend", False),
}
FLAT = 0.3  # percentage points: a run whose trend is larger was too short
FLAT_SHARE = 0.01  # the same for a metric that is not in percent, as a share of its mean


def ranking_metric(board: Sequence[Row]) -> str:
    """The metric that the board is ranked by."""
    return board[0].get("metric", "accuracy") if board else "accuracy"


def columns(board: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """The columns of a table: column -> its title, whether its standard deviation over seeds is shown."""
    name = column_name(ranking_metric(board))
    private = {"epsilon": ("epsilon", False)} if any("epsilon" in row for row in board) else {}
    if name == "acc":
        further = {**private, "balanced_accuracy_mean": ("balanced", True), "auprc_mean": ("AUPRC", True)}
        return {**COLUMNS, **{column: about for column, about in further.items() if any(column in r for r in board)}}
    low, top = tails(ranking_metric(board))
    of_metric = {"mean": ("mean", True), "low5": (low, True), "top5": (top, True)}
    of_metric |= {"worst": ("worst", True), "std": ("std", False)}
    others = {column: COLUMNS[column] for column in ("gain", "harmed", "last", "trend")}
    further = {**private, "acc_mean": ("accuracy", True), "r2_mean": ("R2", True)}
    further = {column: about for column, about in further.items() if any(column in r for r in board)}
    return {**{f"{name}_{key}": about for key, about in of_metric.items()}, **others, **further}


def tails(metric: str) -> tuple[str, str]:
    """What the means of the worst and of the best 5 % of clients are called."""
    return ("lowest 5 %", "top 5 %") if sign(metric) > 0 else ("worst 5 %", "best 5 %")


def unseen_columns(board: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """The columns of a table of clients that were held out."""
    name, found = column_name(ranking_metric(board)), {}
    for view, title in (("", "participating"), ("new_", "on arrival"), ("joined_", "joined")):
        found[f"{view}{name}_mean"] = (title, True)
        if view:
            low, _ = tails(ranking_metric(board))
            found |= {f"{view}{name}_low5": (low, True), f"{view}gap": ("gap", False)}
    return found


def unseen_caption(board: Sequence[Row]) -> str:
    """The caption of a table of clients that were held out."""
    return (
        f"Held-out clients, in the same rounds, test {_with_unit(ranking_metric(board))}: 'on arrival' with the model "
        "that the method gives a client that never trained, 'joined' after the client has trained as the method "
        "prescribes. Gaps are to participating clients, before and after their local training."
    )


def _with_unit(metric: str) -> str:
    return f"{metric}{' in percent' * in_percent(metric)}"


def shown_selection(board: Sequence[Row]) -> str:
    """How the rounds of a table are chosen: "validation" (the best on validation data) if there is any, else "last"."""
    return "validation" if any(row["selection"] == "validation" for row in board) else "last"


def caption(board: Sequence[Row], shown: Container[str] | None = None) -> str:
    """The caption of a table: what its numbers are. `shown` are its columns, if it does not have all."""
    metric = ranking_metric(board)

    def has(*names: str) -> bool:
        return shown is None or any(name in shown for name in names)

    last = "; 'last' is the mean in the last one" if has("last") else ""
    rounds = {
        "validation": f"in the round with the best validation {metric}{last}",
        "last": "in the last round (there is no validation data to choose one)",
    }[shown_selection(board)]
    text = f"Test {metric} over clients{' in percent' * in_percent(metric)}, {rounds}."
    if has("gain", "harmed"):
        text += " Gain and share of clients harmed are relative to the same client training alone (local)."
    if any("rank" in row for row in board):
        text += (
            " Methods with the same rank (#) differ by what may be chance: the 95 % confidence interval of the paired "
            "difference to the first of them, over clients and seeds, contains 0."
        )
    if has("epsilon") and any("epsilon" in row for row in board):
        text += " Epsilon is the differential privacy of what a client uploads in all rounds (docs/privacy.md)."
    if has("trend") and any("trend" in row for row in board):
        limit = f"{FLAT:g}" if in_percent(metric) else f"{100 * FLAT_SHARE:g} percent"
        text += (
            " A * marks a run that was too short: the mean of its last 20 rounds (trend; or of its second half) is "
            f"more than {limit} off that of the rounds before."
        )
    return text


def main_rows(board: Sequence[Row], model: str = "pre") -> list[Row]:
    """The rows of one model view (pre, post or global), each with the mean of the last round as `last`."""
    last = {row["method"]: row for row in board if row["model"] == model and row["selection"] == "last"}
    rows = [row for row in board if row["model"] == model and row["selection"] == shown_selection(board)]
    mean = f"{column_name(ranking_metric(board))}_mean"
    return [{**r, "last": last[r["method"]][mean], "last_std": last[r["method"]][f"{mean}_std"]} for r in rows]


def format_cell(
    row: Row,
    column: str,
    with_std: bool = True,
    separator: str = " ± ",
    digits: int = 2,
    metric: str | None = None,
) -> str:
    """A value with `digits` decimals, and its standard deviation after `separator`; "" if there is no value. What is
    not in percent has two digits more, wherever the point is.

    Differences have a sign, and a `trend` that is too large ends in a star.
    """
    value = row.get(column)
    if value is None:
        return ""
    ranking = metric or row.get("metric", "accuracy")
    of_ranking = column in RELATIVE or f"{column_name(ranking)}_" in column
    percent = in_percent(ranking) if of_ranking else column != "r2_mean"
    sign = "+" if column in ("gain", "trend", "new_gap", "joined_gap") and value > 0 else ""
    limit = FLAT if percent else FLAT_SHARE * abs(row.get(f"{column_name(ranking)}_mean") or 0.0)
    star = "*" if column == "trend" and abs(value) > limit else ""
    text = f"{sign}{format_value(value, percent, digits)}{star}"
    std = row.get(f"{column}_std")
    return text + (
        f"{separator}{format_value(std, percent, 2 if percent else 0)}" if with_std and std is not None else ""
    )


RELATIVE = ("gain", "last", "trend", "new_gap", "joined_gap")  # columns in the unit of the metric that ranks


def format_value(value: float, percent: bool = True, digits: int = 2) -> str:
    """A metric in percent with so many decimals; another number with two significant digits more."""
    if percent:
        return f"{value:.{digits}f}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits + 1) else f"{value:#.{digits + 2}g}"


def unseen_rows(board: Sequence[Row]) -> list[Row]:
    """The rows of the table of held-out clients; none if no clients were held out."""
    return [row for row in main_rows(board) if "new_gap" in row]


def format_number(value: float) -> str:
    """A number with three significant digits, or all digits before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_bytes(count: float) -> str:
    """A number of bytes with a decimal unit, such as "1.23 MB"."""
    return _in_units(count, "B")


def format_flops(count: float) -> str:
    """A number of floating-point operations, such as "1.23 MFLOP"."""
    return _in_units(count, "FLOP")


def _in_units(count: float, unit: str) -> str:
    prefixes = ("", "k", "M", "G", "T")
    at = 0
    while count >= 999.5 and at < len(prefixes) - 1:
        count, at = count / 1000, at + 1
    return f"{format_number(count)} {prefixes[at]}{unit}"


def to_csv(board: Sequence[Row]) -> str:
    """CSV with all columns of all rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in board for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(board)
    return text.getvalue()


COMPUTATION = {  # column -> its title
    "rounds": "rounds",
    "gradients_per_round": "gradients",
    "samples_per_round": "samples",
    "gradients_in_all": "gradients in all",
    "samples_in_all": "samples in all",
}
NEAR_BUDGET = 5  # percent: a method that is further off its budget is named


def computation_rows(board: Sequence[Row]) -> list[Row]:
    """The rows of a table of what clients compute; none of the baseline without a model, and none if it was not
    counted."""
    return [row for row in main_rows(board) if "samples_in_all" in row]


def computation_caption() -> str:
    """The caption of such a table."""
    return (
        "What a client computes, on average: gradients (one per batch and pass) and samples of which they are taken, "
        "in a round in which it takes part and in all rounds. A sample counts once per forward and backward pass, "
        "weighted by the share of the model's parameters that are differentiated."
    )


def budget_sentences(board: Sequence[Row]) -> list[str]:
    """What a reader must know of budgets: that methods had the same one, who did not keep to it, or that they had
    different ones."""
    rows = computation_rows(board)
    if not rows:
        return []
    if reference := rows[0].get("equal_budget"):
        found = [
            f"Equal budgets: every method has as many rounds as it takes to compute what {reference} does; passes that "
            "a method chooses while it trains are counted afterwards."
        ]
        for row in rows:
            if abs(row["of_budget"] - 100) > NEAR_BUDGET:
                half_a_round = row["of_budget"] / row["rounds"] / 2
                why = " (rounds are whole)" if abs(row["of_budget"] - 100) <= half_a_round else ""
                found.append(f"{row['method']} used {row['of_budget']:.0f} % of the budget{why}.")
        return found
    least, most = (pick(rows, key=lambda row: row["samples_in_all"]) for pick in (min, max))
    ratio = most["samples_in_all"] / max(least["samples_in_all"], 1e-12)
    if ratio < 1 + NEAR_BUDGET / 100:
        return []
    return [f"Budgets differ: {most['method']} computes {ratio:.1f} times as much as {least['method']}."]


COSTS = {"bytes_down": "down", "bytes_up": "up", "train_seconds": "s/round"}


class Table(NamedTuple):
    """A table of a report: its rows, and which columns and costs are shown."""

    title: str
    about: str
    rows: list[Row]
    columns: Mapping[str, tuple[str, bool]]
    costs: Mapping[str, str] = COSTS

    @property
    def titles(self) -> list[str]:
        """The header."""
        first = ["#", "method"] if self.ranked else ["method"]
        return [*first, *(title for title, _ in self.columns.values()), *self.costs.values()]

    @property
    def ranked(self) -> bool:
        """True if methods have ranks, and a table that shows why."""
        return bool(self.columns) and any("rank" in row for row in self.rows)

    def first_cells(self, row: Row) -> list[str]:
        """Rank and name of the method."""
        return [str(row["rank"]), row["method"]] if self.ranked else [row["method"]]

    def cost_cells(self, row: Row) -> list[str]:
        """The cells of the costs, which come after the columns; "" for what the baseline without a model has not."""
        return [_format_cost(column, row.get(column)) for column in self.costs]


def _format_cost(column: str, value: float | None) -> str:
    if value is None:
        return ""
    return format_bytes(value) if column.startswith("bytes") else format_number(value)


def tables(board: Sequence[Row]) -> Iterator[Table]:
    """A table for each model view, one for held-out clients if there are any, and one of what clients compute."""
    for model in (model for model in VIEWS if any(row["model"] == model for row in board)):
        rows = main_rows(board, model)
        yield Table(f"{VIEWS[model].capitalize()} model", caption(board), rows, columns(rows))
    if rows := unseen_rows(board):
        yield Table("Unseen clients", unseen_caption(board), rows, unseen_columns(rows), {})
    if rows := computation_rows(board):
        about = " ".join([computation_caption(), *budget_sentences(board)])
        yield Table("Local computation", about, rows, {}, COMPUTATION)


def to_markdown(board: Sequence[Row]) -> str:
    """Markdown tables with captions, one for each model view."""
    lines = []
    for table in tables(board):
        lines += [f"**{table.title}.** {table.about}", ""]
        lines += ["| " + " | ".join(table.titles) + " |", _alignment(table) + "|"]
        for row in table.rows:
            cells = [format_cell(row, column, with_std) for column, (_, with_std) in table.columns.items()]
            lines.append("| " + " | ".join([*table.first_cells(row), *cells, *table.cost_cells(row)]) + " |")
        lines.append("")
    return "\n".join(lines)


def _alignment(table: Table) -> str:
    return "|--:" * table.ranked + "|---" + "|--:" * (len(table.titles) - 1 - table.ranked)

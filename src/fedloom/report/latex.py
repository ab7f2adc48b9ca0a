"""A leaderboard as LaTeX: tables that fit the width of a page, with the columns that are asked for."""

from collections.abc import Sequence

from fedloom.core.errors import UserError, nearest, shown
from fedloom.metrics.registry import column_name, sign
from fedloom.report.leaderboard import (
    COMPUTATION,
    COSTS,
    Row,
    Table,
    budget_sentences,
    caption,
    columns,
    format_cell,
    ranking_metric,
    tables,
)

COLUMNS = ("mean", "low5", "worst", "gain", "harmed")  # unless others are asked for
NAMES = {  # of columns that a user may ask for -> column of the board; those of the metric that ranks come before them
    "cv": "client_acc_cv_x1e-2", "gain": "gain", "harmed": "harmed", "last": "last", "trend": "trend",
    "balanced": "balanced_accuracy_mean", "auprc": "auprc_mean", "accuracy": "acc_mean", "r2": "r2_mean",
    "down": "bytes_down", "up": "bytes_up", "seconds": "train_seconds",
    "rounds": "rounds", "gradients": "gradients_in_all", "samples": "samples_in_all",
}  # fmt: skip
OF_METRIC = ("mean", "low5", "top5", "worst", "std")
TITLES = {**COSTS, **COMPUTATION}


def check_columns(names: Sequence[str]) -> list[str]:
    """The names, which must be those of columns. Raises UserError for others."""
    known = [*OF_METRIC, *NAMES]
    for name in names:
        if name not in known:
            raise UserError(f"There is no column '{shown(name)}'; {nearest(str(name), known)}")
    if not names or len(set(names)) < len(names):
        raise UserError("columns must be names such as mean,low5,gain, each once.")
    return list(names)


def to_latex(board: Sequence[Row], names: Sequence[str] = COLUMNS) -> str:
    """LaTeX tables, one for each model view, with the columns of the given names (mean, low5, top5, worst, std, cv,
    gain, harmed, last, trend, down, up, seconds, rounds, gradients, samples, ...).

    They need `\\usepackage{booktabs}` and `\\usepackage{graphicx}`, and shrink if they are wider than the page. The
    best means and the best lowest 5 % are bold.
    """
    check_columns(names)
    found = [_latex(board, table, names) for table in tables(board) if table.columns]
    return "\n".join(["% needs \\usepackage{booktabs} and \\usepackage{graphicx}", "", *found])


def _latex(board: Sequence[Row], table: Table, names: Sequence[str]) -> str:
    of_clients = table.rows[0]["model"] == "pre" and not table.costs  # the table of held-out clients has all it has
    if not of_clients:
        wanted = [_column(name, table.rows) for name in names]
        every = {**columns(table.rows), **{column: (title, False) for column, title in TITLES.items()}}
        table = table._replace(
            about=" ".join([caption(board, wanted), *budget_sentences(board)]),
            columns={column: every[column] for column in wanted if column in every and column not in TITLES},
            costs={column: TITLES[column] for column in wanted if column in TITLES},
        )
    rows = [_cells(table, row) for row in table.rows]
    numbers = len(table.titles) - 1 - table.ranked
    tabular = [
        rf"\begin{{tabular}}{{{'r' * table.ranked}l{'r' * numbers}}}",
        r"\toprule",
        " & ".join(map(escape, table.titles)) + r" \\",
        r"\midrule",
        *(" & ".join(cells) + r" \\" for cells in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    about = f"{table.title}. {table.about}"
    spread = any(r"$\pm$" in cell for cells in rows for cell in cells)
    seeds = max(row.get("seeds", 1) for row in table.rows)
    plus_minus = rf" $\pm$ is the standard deviation over {seeds} seeds." if spread else ""
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            *tabular[:-1],
            rf"{tabular[-1]}}}",
            rf"\caption{{{escape(about)}{plus_minus}}}",
            rf"\label{{tab:{table.title.lower().replace(', ', '-').replace(' ', '-')}}}",
            r"\end{table}",
            "",
        ]
    )


def _cells(table: Table, row: Row) -> list[str]:
    cells = [escape(cell) for cell in table.first_cells(row)]
    for column, (_, with_std) in table.columns.items():
        text = format_cell(row, column, with_std, r" $\pm$ ").replace("-", "$-$")
        best = column in _bold(table.rows) and row.get(column) == _best(column, table.rows)
        cells.append(rf"\textbf{{{text}}}" if best else text)
    return [*cells, *map(escape, table.cost_cells(row))]


def _column(name: str, rows: Sequence[Row]) -> str:
    """The column of the board that a name stands for."""
    metric = column_name(ranking_metric(rows))
    if name not in OF_METRIC:
        return NAMES[name]
    return "client_acc_std" if (metric, name) == ("acc", "std") else f"{metric}_{name}"


def _bold(rows: Sequence[Row]) -> tuple[str, ...]:
    """Columns whose best value is bold."""
    name = column_name(ranking_metric(rows))
    return tuple(f"{view}{name}_{column}" for view in ("", "new_", "joined_") for column in ("mean", "low5"))


def _best(column: str, rows: Sequence[Row]) -> float:
    direction = sign(ranking_metric(rows))
    return max((row[column] for row in rows if row.get(column) is not None), key=lambda value: direction * value)


def escape(text: str) -> str:
    for char in "%_&#":
        text = text.replace(char, f"\\{char}")
    return text

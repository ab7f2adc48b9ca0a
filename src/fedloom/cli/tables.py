"""Tables that fit the terminal: words are not broken over lines, and columns that do not fit are left out."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

MARGIN = 1  # spaces before a line
GAPS = (3, 2)  # spaces between columns, where a table fits without wrapping, and where it does not
NARROWEST = 8  # of a column whose words are broken after all, because they do not fit otherwise
DIVISION = re.compile(r"(?<=[:,/])(?=[^\d\s])")  # where ditto:lam=0.5,personal_epochs=2 may go on in the next line


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: what is printed above it.
        right: True if it is flush right.
        wrap: True if cells may be wrapped between words.
        optional: True if it is left out where the table is too wide, the last such column first.
        wanted: width that wrapped cells should have before optional columns get any.
    """

    title: str
    right: bool = False
    wrap: bool = True
    optional: bool = False
    wanted: int = 0


def number_column(title: str, optional: bool = False) -> Column:
    """A column of numbers: flush right, and never wrapped."""
    return Column(title, right=True, wrap=False, optional=optional)


Cells = Sequence[str | Text]  # a Text has one style


def print_table(console: Console, columns: Sequence[Column], rows: Sequence[Cells], title: str = "") -> int:
    """Print a table that is no wider than the console. Rows may be shorter than the table.

    Returns:
        The number of columns that were left out.
    """
    texts = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    shown, widths, gap = _layout(columns, texts, console.width - MARGIN)
    found = [columns[i] for i in shown]
    titles = [_balanced(column.title, width) for column, width in zip(found, widths, strict=True)]
    height = max(map(len, titles))
    header = [[""] * (height - len(lines)) + lines for lines in titles]
    lines = [*([Text(title)] if title else []), Text(), *_lines(header, found, widths, gap, ["bold"] * len(found))]
    lines.append(Text(" " * MARGIN + "─" * (sum(widths) + gap * (len(widths) - 1))))
    for row in texts:
        cells = [row[i] for i in shown if i < len(row)]
        wrapped = [
            wrap_words(cell.plain, width) if column.wrap else [cell.plain]
            for cell, column, width in zip(cells, found, widths, strict=False)
        ]
        lines += _lines(wrapped, found, widths, gap, [str(cell.style) for cell in cells])
    for line in (*lines, Text()):
        console.print(line, soft_wrap=True)
    return len(columns) - len(shown)


def wrap_words(text: str, width: int) -> list[str]:
    """The lines of a text. A word that is too long goes on in the next line behind ':', ',' or '/', and is cut only if
    that is not enough. Spaces at the beginning are an indent of all lines."""
    indent = text[: len(text) - len(text.lstrip())]
    lines = [""]
    room = max(width - len(indent), 1)
    for word in text.split():
        pieces = [word] if cell_len(word) <= room else DIVISION.split(word)
        for i, part in enumerate(part for piece in pieces for part in chop_cells(piece, room)):
            space = " " if lines[-1] and not i else ""
            if cell_len(lines[-1] + space + part) <= room:
                lines[-1] += space + part
            else:
                lines.append(part)
    return [indent + line for line in lines]


def _balanced(title: str, width: int) -> list[str]:
    """The lines of a title: as few as possible, of about the same length."""
    lines = wrap_words(title, width)
    while width > _longest_word(title) and len(narrower := wrap_words(title, width - 1)) == len(lines):
        lines, width = narrower, width - 1
    return lines


def _lines(
    cells: list[list[str]], columns: Sequence[Column], widths: list[int], gap: int, styles: Sequence[str]
) -> list[Text]:
    """The lines of a row, given those of its cells."""
    made = []
    for parts in zip_longest(*cells, fillvalue=""):
        line = Text(" " * MARGIN)
        for i, (part, column, width, style) in enumerate(zip(parts, columns, widths, styles, strict=False)):
            space = " " * (width - cell_len(part))
            line.append(" " * gap * (i > 0))
            line.append(space + part if column.right else part + space, style)
        line.rstrip()
        made.append(line)
    return made


def least_width(columns: Sequence[Column], rows: Sequence[Cells]) -> int:
    """The width below which columns of a table are left out, or words broken."""
    return MARGIN + _total([least for least, _ in _sizes(columns, rows)], GAPS[-1])


def _layout(columns: Sequence[Column], rows: Sequence[Cells], width: int) -> tuple[list[int], list[int], int]:
    """Which columns are shown, how wide they are, and the gap between them."""
    sizes = _sizes(columns, rows)
    shown, full, (wide, gap) = list(range(len(columns))), [most for _, most in sizes], GAPS
    if _total(full, wide) <= width:
        return shown, full, wide
    wanted = [max(least, min(column.wanted, most)) for column, (least, most) in zip(columns, sizes, strict=True)]
    for i in reversed([i for i in shown if columns[i].optional]):
        if _total([wanted[k] for k in shown], gap) > width:
            shown.remove(i)
    widths = [sizes[i][0] for i in shown]
    spare = width - _total(widths, gap)
    while spare < 0:  # words are broken
        wrapped = [k for k, i in enumerate(shown) if columns[i].wrap]
        widest = max(wrapped, key=lambda k: widths[k], default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
        spare += 1
    more = {k: sizes[i][1] - sizes[i][0] for k, i in enumerate(shown)}
    for done, k in enumerate(sorted(more, key=lambda k: more[k])):  # columns that need little get all of it
        given = min(more[k], max(spare, 0) // (len(more) - done))
        widths[k] += given
        spare -= given
    return shown, widths, gap


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _sizes(columns: Sequence[Column], rows: Sequence[Cells]) -> list[tuple[int, int]]:
    """Of each column the smallest width that breaks no word, and the width in which nothing is wrapped."""
    sizes = []
    for i, column in enumerate(columns):
        cells = [str(row[i]) for row in rows if i < len(row)]
        most = max(map(cell_len, [column.title, *cells]))
        least = _longest_piece if column.wrap else cell_len
        sizes.append((max([_longest_word(column.title), *map(least, cells)]), most))
    return sizes


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _longest_piece(text: str) -> int:
    """The width of the longest part of a text that stays on one line, with the indent."""
    indent = len(text) - len(text.lstrip())
    return indent + max((cell_len(piece) for word in text.split() for piece in DIVISION.split(word)), default=0)

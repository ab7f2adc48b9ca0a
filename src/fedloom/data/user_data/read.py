"""From a path to samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.user_data import arrays, columns
from fedloom.data.user_data.findings import Findings, Origin, many
from fedloom.data.user_data.layout import Layout, look, near
from fedloom.data.user_data.names import Coded, classes_of, clients_of
from fedloom.data.user_data.pictures import Picture, stacked
from fedloom.data.user_data.samples import Samples
from fedloom.data.user_data.tables import Sheet, read_huggingface, read_table

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData


def read(asked: OwnData, findings: Findings) -> Samples:
    path = near(asked.path)
    layout = look(path, findings)
    if layout.kind == "picture":
        made = _pictures(layout, asked, findings)
    elif layout.kind == "array":
        made = arrays.samples_of(layout.files, layout.about, asked, findings)
    else:
        sheets = read_huggingface(path, findings) if layout.kind == "huggingface" else _sheets(layout, asked, findings)
        if not sheets:
            raise UserError(f"{path} has no table that can be read.")
        made = columns.samples_of(sheets, layout.about, asked, findings)
    _check_sizes(made, findings)
    return made


def _sheets(layout: Layout, asked: OwnData, findings: Findings) -> list[Sheet]:
    sheets = []
    for file in layout.files:
        sheet = read_table(file.path, asked.delimiter, findings)
        if sheet is not None:
            sheets.append(sheet._replace(client=file.client, split=file.split))
    return sheets


def _pictures(layout: Layout, asked: OwnData, findings: Findings) -> Samples:
    if asked.kind not in ("auto", "image"):
        raise UserError(f"{near(asked.path)} holds pictures, so kind={asked.kind} is impossible.")
    files = layout.files
    x, good = stacked([Picture(str(file.path), str(file.path)) for file in files], asked.resize, findings)
    kept = [file for file, use in zip(files, good, strict=True) if use]
    if not kept:
        raise UserError(f"No picture in {near(asked.path)} can be read.")
    where = Origin()
    for file in kept:
        where.add(str(file.path), None, 1)
    y, classes = classes_of(Coded.of_array(np.array([f.label for f in kept])), where, "the class", findings)
    client: np.ndarray | None = None
    names: tuple[str, ...] = ()
    if kept[0].client is not None and asked.client != "none":
        client, names = clients_of(Coded.of_array(np.array([f.client for f in kept])), where, "the client", findings)
    split = np.array([f.split for f in kept]) if kept[0].split is not None else None
    made = Samples("image", x, y, classes, where, layout.about, client=client, clients=names, split=split)
    return made.checked("the folder", findings)


def _check_sizes(samples: Samples, findings: Findings) -> None:
    """Clients that would be left out."""
    if samples.client is None:
        return
    sizes = np.bincount(samples.client, minlength=len(samples.clients))
    if (sizes < 2).all():
        findings.problem(
            "small", "No client has two samples, one to learn from and one to test on; is it the right column?"
        )
    for i in np.flatnonzero(sizes < 2):
        findings.remark(
            "small", f"Client '{samples.clients[i]}' has {many(int(sizes[i]), 'sample')} and will be left out."
        )

"""New samples for a trained model, from values in Python or from files, encoded as its training data were."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Preprocessing
from fedloom.data.text import read_text
from fedloom.data.user_data.arrays import read_arrays
from fedloom.data.user_data.categorical import Categorical, class_indices, client_names, match_classes
from fedloom.data.user_data.cells import check_scalar
from fedloom.data.user_data.columns import CLIENT_NAMES, LABEL_NAMES, similar_column
from fedloom.data.user_data.encoding import (
    NOUNS,
    decode_pictures,
    encode_table,
    encode_texts,
    encode_values,
    join_sheets,
    label_columns,
    usage,
)
from fedloom.data.user_data.images import ImageSource
from fedloom.data.user_data.issues import Issues, Origin
from fedloom.data.user_data.layout import File, Layout, detect_layout, short_path
from fedloom.data.user_data.read import read_sheets
from fedloom.data.user_data.tables import Sheet
from fedloom.data.user_data.targets import check_target_shape, known_targets, match_target, match_target_array

log = logging.getLogger("fedloom")
Contents = tuple[np.ndarray, np.ndarray | None, np.ndarray | None, Origin]  # x, y, client and where of NewSamples


@dataclass(frozen=True, eq=False)
class NewSamples:
    """New samples from files, and what the files say about them."""

    x: np.ndarray  # encoded, before they are scaled
    y: np.ndarray | None  # targets as in `Samples`: -1 (of classes) or NaN if unknown; None if the files have none
    client: np.ndarray | None  # name of the client, "" if it is unknown; None if the files name no clients
    where: Origin  # file and row of every sample
    warnings: tuple[str, ...]  # sentences about what is probably a mistake
    remarks: tuple[str, ...]  # sentences about what is worth knowing; warnings are among them

    def known(self) -> np.ndarray:
        """Rows of the samples whose target is known."""
        return np.zeros(0, dtype=np.int64) if self.y is None else np.flatnonzero(known_targets(self.y))


def encode(preprocessing: Preprocessing, values: Any, issues: Issues | None = None) -> np.ndarray:
    """Encode values in Python: numbers (NaN if one is missing), pixels or token ids, with samples along the first axis.
    `preprocessing.scale` makes of them what the model receives.

    Args:
        preprocessing: how the training data were encoded.
        values: one sample, or several. A row of a table is a dictionary, or a sequence with the values in the order of
            the columns; rows are a list of these, a data frame or a PyArrow table. A picture is a PIL image, a path or
            an array of bytes (height x width, with channels first, last or none). A text is a string. Arrays and
            tensors of encoded samples are taken for all models.
        issues: where warnings are reported; by default they are logged.
    """
    found = Issues() if issues is None else issues
    x = encode_values(preprocessing, values, found)
    if issues is None:
        for _, sentence in found.warnings:
            log.warning("%s", sentence)
    return x


def read_new_samples(
    preprocessing: Preprocessing,
    path: str | os.PathLike[str],
    *,
    label: str | None = None,
    client: str | None = None,
    delimiter: str | None = None,
) -> NewSamples:
    """Read samples from a file or a folder of any layout that training data may have; targets may be missing.

    Pictures may also be a single file, or lie in folders of their clients only or in no folders; texts may be the lines
    of a `.txt` file.

    Args:
        preprocessing: how the training data were encoded.
        path: the file or folder.
        label: column of the target; by default as in training.
        client: column of the client; by default as in training, or client or client_id.
        delimiter: between the values of a CSV row; by default it is guessed.
    """
    issues, location = Issues(), short_path(os.path.abspath(os.path.expanduser(path)))
    if preprocessing.kind == "text" and location.suffix.lower() == ".txt":
        x, y, clients, where = _read_lines(preprocessing, location, issues)
    else:
        layout = detect_layout(location, issues, labelled=False)
        if layout.kind == "image":
            x, y, clients, where = _read_pictures(preprocessing, layout, location, issues)
        elif layout.kind == "array":
            x, y, clients, where = _read_arrays(preprocessing, layout, issues)
        else:
            sheets = read_sheets(layout, location, delimiter, issues)
            x, y, clients, where = _read_rows(preprocessing, sheets, label, client, issues)
    warnings, remarks = (tuple(sentence for _, sentence in kind) for kind in (issues.warnings, issues.remarks))
    return NewSamples(x, y, clients, where, warnings, remarks)


def _read_arrays(training: Preprocessing, layout: Layout, issues: Issues) -> Contents:
    """The samples of `.npz` files with an array x, and perhaps y and client."""
    where, parts, read = Origin(), list[np.ndarray](), {"y": list[np.ndarray](), "client": list[np.ndarray]()}
    for file in layout.files:
        arrays = read_arrays(file, ("x",), issues)
        here, n = Origin(), len(arrays["x"])
        for origin in (here, where):
            origin.add(str(file.path), np.arange(n), n)
        x = list(arrays["x"]) if training.kind == "image" else arrays["x"]
        parts.append(encode_values(training, x, issues, here))
        if "y" in arrays:
            check_target_shape(training, arrays["y"], file.path)
        for name in read:
            if name in arrays:
                read[name].append(arrays[name])
    for name, values in read.items():
        if values and len(values) < len(parts):
            raise UserError(f"Some files have an array '{name}' and some have not; give it to all or to none.")
    y, client = (np.concatenate(values) if values else None for values in read.values())
    return (
        np.concatenate(parts),
        None if y is None else match_target_array(training, y, where, issues),
        None if client is None else client_names(Categorical.from_array(client)),
        where,
    )


def _read_rows(
    training: Preprocessing, sheets: list[Sheet], label: str | None, client: str | None, issues: Issues
) -> Contents:
    """The rows of tables."""
    first = sheets[0]
    features = {column.name for column in training.columns} | {training.content}
    labels = list(label_columns(training))
    if label is not None or len(labels) < 2:
        found = _role(first, features, "label", label, training.label, LABEL_NAMES)
        labels = [] if found is None else [found]
    client = _role(first, features, "client", client, training.client, CLIENT_NAMES)
    table = join_sheets(training, sheets, labels + ([] if client is None else [client]), issues)
    x = encode_table(training, table, issues)
    y: np.ndarray | None = None
    if labels and all(name in table.names for name in labels):
        y = match_target(training, {name: table[name] for name in labels}, table.features, table.where, issues)
    clients = table.client
    if client is not None and client in table.names:
        check_scalar(table[client], f"{first.file}: the client column '{client}'")
        clients = client_names(Categorical.from_column(table[client]))
    return x, y, clients, table.where


def _role(
    sheet: Sheet,
    features: set[str | None],
    setting: str,
    asked: str | None,
    trained: str | None,
    usual: tuple[str, ...],
) -> str | None:
    """The column of the label or the client: the one that is asked for, that of the training data if it is there, or
    one with a usual name if they had none."""
    names = sheet.table.column_names
    if asked is not None and asked not in names:
        raise UserError(f"{sheet.file} has no column '{asked}' ({setting}={asked}); {similar_column(asked, names)}")
    if asked is not None or trained is not None:
        return asked or trained
    others = [name for name in names if name not in features]
    return next((name for default in usual for name in others if name.lower() == default), None)


def _read_pictures(training: Preprocessing, layout: Layout, root: Path, issues: Issues) -> Contents:
    """Pictures in folders CLIENT/CLASS, CLASS or CLIENT, or in no folder."""
    if training.kind != "image":
        raise UserError(f"{root} holds pictures, but the model takes {NOUNS[training.kind]}; {usage(training)}.")
    where = Origin()
    for file in layout.files:
        where.add(str(file.path), None, 1)
    x = decode_pictures(training, [ImageSource(str(file.path), str(file.path)) for file in layout.files], issues)
    by_class = training.target == "classes"
    labels, clients = _folder_roles(layout.files, training.classes if by_class else ())
    y: np.ndarray | None = None
    if by_class and (labels != "").any():
        y = match_classes(Categorical.from_array(labels), training.classes, where, "the folder", issues)
    return x, y, clients if (clients != "").any() else None, where


def _folder_roles(files: tuple[File, ...], classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The names of the class and the client of every picture, "" for none. Single folders are those of classes if one
    of them has the name of a class."""
    single = sorted({file.parts[0] for file in files if len(file.parts) == 1})
    by_class = max(class_indices(single, classes), default=-1) >= 0
    labels, clients = [], []
    for file in files:
        if len(file.parts) > 2:
            raise UserError(f"{file.path} does not lie in a folder CLIENT/CLASS, CLASS or CLIENT; move it.")
        both = len(file.parts) == 2
        labels.append(file.parts[-1] if both or (file.parts and by_class) else "")
        clients.append(file.parts[0] if both or (file.parts and not by_class) else "")
    return np.array(labels), np.array(clients)


def _read_lines(training: Preprocessing, path: Path, issues: Issues) -> Contents:
    """The lines of a text file; those without text are left out."""
    lines = read_text(path, "save it as text in UTF-8").removeprefix("\ufeff").split("\n")
    rows = [number for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} has no texts; write one on each line.")
    where = Origin()
    where.add(str(path), rows, len(rows))
    return encode_texts(training, [lines[row - 1].strip() for row in rows], where, issues), None, None, where

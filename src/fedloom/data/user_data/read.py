"""Reads a user's data of any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.core.errors import UserError, plural
from fedloom.data.user_data import arrays, columns
from fedloom.data.user_data.categorical import Categorical, encode_classes, encode_clients
from fedloom.data.user_data.images import ImageSource, load_images
from fedloom.data.user_data.issues import Issues, Origin, shorten
from fedloom.data.user_data.layout import Layout, detect_layout, short_path
from fedloom.data.user_data.samples import Samples, array_preprocessing
from fedloom.data.user_data.tables import Sheet, read_huggingface, read_table

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData


def read_samples(options: OwnData, issues: Issues) -> Samples:
    """The samples at `options.path`. Problems go to `issues`; a UserError is raised if nothing can be read."""
    path = short_path(options.path)
    layout = detect_layout(path, issues)
    if layout.kind == "image":
        samples = _read_images(layout, options, issues)
    elif layout.kind == "array":
        samples = arrays.samples_from_arrays(layout.files, layout.about, options, issues)
    else:
        sheets = read_sheets(layout, path, options.delimiter, issues)
        samples = columns.samples_from_tables(sheets, layout.about, options, issues)
    check_client_sizes(samples, issues)
    return replace(samples, notes=issues.notes())


def read_sheets(layout: Layout, path: Path, delimiter: str | None, issues: Issues) -> list[Sheet]:
    """The tables of a layout, each with the client and split of its file; those that cannot be read are reported."""
    if layout.kind == "huggingface":
        sheets = read_huggingface(path, issues)
    else:
        read = ((file, read_table(file.path, delimiter, issues)) for file in layout.files)
        sheets = [sheet._replace(client=file.client, split=file.split) for file, sheet in read if sheet is not None]
    if not sheets:
        raise UserError(f"{path} has no table that can be read.")
    return sheets


def _read_images(layout: Layout, options: OwnData, issues: Issues) -> Samples:
    if options.kind not in ("auto", "image"):
        raise UserError(f"{short_path(options.path)} holds pictures, so kind={options.kind} is impossible.")
    if options.target not in ("auto", "class"):
        raise UserError(
            f"{short_path(options.path)} holds pictures in folders of their classes, so target={options.target} is "
            "impossible; give a Hugging Face data set, or arrays."
        )
    sources = [ImageSource(str(file.path), str(file.path)) for file in layout.files]
    x, readable = load_images(sources, options.resize, issues)
    files = [file for file, ok in zip(layout.files, readable, strict=True) if ok]
    if not files:
        raise UserError(f"No picture in {short_path(options.path)} can be read.")
    where = Origin()
    for file in files:
        where.add(str(file.path), None, 1)
    labels = Categorical.from_array(np.array([file.label for file in files]))
    y, classes = encode_classes(labels, where, "the class", issues)
    client: np.ndarray | None = None
    names: tuple[str, ...] = ()
    if files[0].client is not None and options.client != "none":
        owners = Categorical.from_array(np.array([file.client for file in files]))
        client, names = encode_clients(owners, where, "the client", issues)
    split = np.array([file.split for file in files]) if files[0].split is not None else None
    x = x if readable.all() else x[readable]
    preprocessing = replace(array_preprocessing(x, classes), resize=options.resize is not None)
    samples = Samples(
        "image", x, y, classes, where, preprocessing, layout.about, client=client, clients=names, split=split
    )
    return samples.usable("the folder", issues)


def check_client_sizes(samples: Samples, issues: Issues) -> None:
    """Report clients that have too few samples to take part."""
    if samples.client is None:
        return
    sizes = np.bincount(samples.client, minlength=len(samples.clients))
    if (sizes < 2).all():
        issues.problem(
            "small", "No client has two samples, one to learn from and one to test on; is it the right column?"
        )
    for i in np.flatnonzero(sizes < 2):
        issues.remark(
            "small",
            f"Client '{shorten(samples.clients[i])}' has {plural(int(sizes[i]), 'sample')} and will be left out.",
        )

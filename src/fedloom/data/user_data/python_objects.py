"""Samples from objects in Python: data frames, torch data sets, arrays, Hugging Face data sets in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from fedloom.core.errors import UserError, shown
from fedloom.data.user_data.arrays import check_shapes, join_arrays
from fedloom.data.user_data.columns import samples_from_tables
from fedloom.data.user_data.frames import columns_table, frame_table, is_frame
from fedloom.data.user_data.images import ImageSource, load_images
from fedloom.data.user_data.issues import Issues, Origin, error_text, shorten
from fedloom.data.user_data.layout import SPLITS
from fedloom.data.user_data.read import check_client_sizes
from fedloom.data.user_data.samples import Samples
from fedloom.data.user_data.tables import Sheet, choose_splits, huggingface_sheet, make_sheet

if TYPE_CHECKING:
    from fedloom.data.sets.own import OwnData

POSSIBLE = (
    "give the name of a data set, a path, a data frame, a torch Dataset, arrays (x, y), a Hugging Face data set, or a "
    "dictionary or list with one of these for every client"
)
OF_TABLES = ("label", "text", "split_column", "ignore")  # settings that name columns


class Part(NamedTuple):
    """Samples of one client and one split, as they are given."""

    name: str  # in messages
    given: Any
    client: str | None = None
    split: str | None = None


class Pairs(NamedTuple):
    """The samples of a part as arrays; x may also be a list of pictures or of texts."""

    x: Any
    y: np.ndarray


def samples_from_object(given: Any, options: OwnData, issues: Issues) -> Samples:
    """The samples of an object, which may have one data set for every client.

    Args:
        given: see `POSSIBLE`.
        options: the user's settings.
        issues: where problems are reported.
    """
    parts = _parts(given, issues)
    contents: list[Any] = [_contents(part) for part in parts]
    first = contents[0]
    for part, content in zip(parts, contents, strict=True):
        if _form(content) != _form(first):
            raise UserError(
                f"{part.name} holds {_form(content)}, but {parts[0].name} holds {_form(first)}; give all clients the "
                "same kind of data."
            )
    layout = f"{data_name(given)} in Python"
    if isinstance(first, Sheet):
        sheets = [
            sheet._replace(rows=np.arange(sheet.table.num_rows), client=part.client, split=part.split)
            for part, sheet in zip(parts, contents, strict=True)
        ]
        samples = samples_from_tables(sheets, layout, options, issues)
    else:
        samples = _samples_from_pairs(parts, contents, layout, options, issues)
    check_client_sizes(samples, issues)
    return replace(samples, notes=issues.notes())


def data_name(given: Any) -> str:
    """What the data are called: their type or, of a dictionary or a list, that of the first entry."""
    values = list(given.values()) if isinstance(given, Mapping) else given
    while isinstance(values, list | tuple) and len(values):
        values = values[0]
        values = list(values.values()) if isinstance(values, Mapping) else values
    return type(values).__name__


# -- clients and splits


def _parts(given: Any, issues: Issues) -> list[Part]:
    """The parts of an object: one, or one for every client and split."""
    if isinstance(given, Mapping):
        names = list(map(str, given))
        by_name = dict(zip(names, given.values(), strict=True))
        if hasattr(given, "column_names") or (names and {name.lower() for name in names} <= set(SPLITS)):
            found = choose_splits(names, issues)  # Hugging Face's DatasetDict, or one like it
            return [Part(f"The part '{name}'", by_name[name], split=split) for name, split in found]
        entries = list(by_name.items())
    elif isinstance(given, list) and not (given and _is_sample(given[0])):
        entries = [(str(i), value) for i, value in enumerate(given)]
    else:
        name = "The pair (x, y)" if isinstance(given, tuple) else f"The {type(given).__name__}"
        return [Part(name, given)]
    if not entries:
        raise UserError(f"The {type(given).__name__} of clients is empty; {POSSIBLE}.")
    parts: list[Part] = []
    split = [name for name, value in entries if isinstance(value, Mapping)]
    for name, value in entries:
        who = f"Client '{shorten(name)}'"
        if not isinstance(value, Mapping):
            if split:
                raise UserError(f"{who} has no split, but client '{shorten(split[0])}' has; give it to all or to none.")
            parts.append(Part(who, value, name))
            continue
        splits = {str(key): SPLITS.get(str(key).lower()) for key in value}
        if not set(splits.values()) <= set(SPLITS.values()) or not {"train", "test"} <= set(splits.values()):
            keys = ", ".join(map(shown, splits)) or "nothing"
            raise UserError(f"{who} has {keys}; a client with a split has train, test and perhaps val.")
        parts += [Part(f"{who}, {key}", value[key], name, SPLITS[str(key).lower()]) for key in value]
    return parts


def _is_sample(item: Any) -> bool:
    """Whether an item of a list is a sample (x, y) rather than the data of a client."""
    return isinstance(item, tuple | list) and len(item) == 2 and (isinstance(item[1], str) or np.ndim(item[1]) == 0)


# -- what a part holds


def _contents(part: Part) -> Sheet | Pairs:
    given = part.given
    if isinstance(given, DataLoader):
        given = _dataset_of(given, part.name)
    table = getattr(getattr(given, "data", None), "table", None)
    if table is not None and hasattr(given, "features"):  # Hugging Face
        if (indices := getattr(given, "_indices", None)) is not None:  # it is shuffled or filtered
            table = table.take(indices.column(0))
        features = given.features
        return huggingface_sheet(part.name, table, features.to_dict() if hasattr(features, "to_dict") else features)
    if is_frame(given):
        try:
            made = frame_table(given)
        except UserError:
            raise
        except Exception as error:  # of another library
            raise UserError(f"{part.name} cannot be read as a table ({error_text(error)}); {POSSIBLE}.") from None
        return make_sheet(part.name, made, made.column_names, {})
    if isinstance(given, TensorDataset) and len(given.tensors) == 2:
        given = given.tensors
    if isinstance(given, tuple) and len(given) == 2 and not _is_sample(given):
        x, y = (_array(values, f"{part.name}: {name}") for name, values in zip("xy", given, strict=True))
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise UserError(
                f"{part.name}: x and y must have one entry per sample, not the shapes {x.shape}, {y.shape}."
            )
        return Pairs(x, _flat(y))
    pairs = _items(given, part.name)
    if isinstance(pairs.x, list) and isinstance(pairs.x[0], str):
        made = columns_table(["text", "label"], [pairs.x, pairs.y.tolist()])
        return make_sheet(part.name, made, made.column_names, {})
    return pairs


def _dataset_of(loader: DataLoader[Any], name: str) -> Any:
    """The data set of a loader, which is read in its order. A sampler that leaves samples out or repeats some would be
    ignored, so it is refused."""
    sampler, batches = loader.sampler, loader.batch_sampler
    usual = isinstance(loader.dataset, IterableDataset) or type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        usual = not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    if not usual or (batches is not None and type(batches) is not BatchSampler):
        own = sampler if not usual else batches
        raise UserError(
            f"{name} is a DataLoader with a {type(own).__name__}, but its data set is read as a whole; give "
            "torch.utils.data.Subset(dataset, indices) instead."
        )
    return loader.dataset


def _items(given: Any, name: str) -> Pairs:
    """The items of a data set, one after another."""
    x: list[Any] = []
    y: list[Any] = []
    for i, item in enumerate(_each(given, name)):
        if not isinstance(item, tuple | list) or len(item) != 2:
            what = f"{len(item)} values" if isinstance(item, tuple | list) else f"'{shown(type(item).__name__)}'"
            raise UserError(f"{name}, sample {i} is not a pair (x, y) but {what}; give pairs.")
        x.append(item[0])
        y.append(item[1])
    if not x:
        raise UserError(f"{name} has no samples.")
    targets = _flat(_stacked(y, name, "y"))
    kinds = {Image.Image if isinstance(value, Image.Image) else str if isinstance(value, str) else None for value in x}
    if len(kinds) > 1:
        raise UserError(f"{name} has pictures, texts and arrays as x; give all samples the same kind.")
    return Pairs(_stacked(x, name, "x") if kinds == {None} else x, targets)


def _each(given: Any, name: str) -> Iterable[Any]:
    if isinstance(given, IterableDataset):
        return given
    usable = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not usable or isinstance(given, type | str | bytes | Mapping | np.ndarray | Tensor):
        what = shown(type(given).__name__)
        raise UserError(f"{name} is of the type '{what}', of which no samples can be read; {POSSIBLE}.")
    return (given[i] for i in range(len(given)))


def _array(values: Any, what: str) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except Exception:  # of what cannot be an array, such as rows of different lengths
        raise UserError(f"{what} is not an array of numbers or words; give all samples the same shape.") from None


def _stacked(values: list[Any], name: str, which: str) -> np.ndarray:
    """The values of all samples as one array."""
    arrays = [_array(value, f"{name}, sample {i}: {which}") for i, value in enumerate(values)]
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise UserError(
                f"{name}, sample {i}: {which} has the shape {array.shape}, but {arrays[0].shape} in sample 0; bring "
                "all to one shape."
            )
    return np.stack(arrays)


def _flat(y: np.ndarray) -> np.ndarray:
    """The targets without a second axis of length 1."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _form(content: Sheet | Pairs) -> str:
    if isinstance(content, Sheet):
        return "a table"
    return "pictures" if isinstance(content.x, list) else "pixels" if content.x.dtype == np.uint8 else "arrays"


# -- samples


def _samples_from_pairs(
    parts: list[Part], contents: list[Any], layout: str, options: OwnData, issues: Issues
) -> Samples:
    columns = [name for name in OF_TABLES if getattr(options, name)]
    columns += ["client"] if options.client not in ("auto", "none") else []
    if columns:
        raise UserError(f"{columns[0]} names a column of a table, but the samples are pairs (x, y); leave it out.")
    if options.kind == "text":
        raise UserError("kind=text needs a column of texts, or pairs (text, label), not arrays.")
    where = Origin("sample")
    sizes = [len(content.y) for content in contents]
    for part, size in zip(parts, sizes, strict=True):
        where.add(part.name, np.arange(size), size)
    pictures = isinstance(contents[0].x, list)
    for part, content in zip(parts, contents, strict=True):
        if not pictures:
            check_shapes(part.name, {"x": content.x, "y": content.y})
        for which in ("y",) if pictures else ("x", "y"):
            a, b = getattr(content, which).shape[1:], getattr(contents[0], which).shape[1:]
            if a != b:
                raise UserError(
                    f"{part.name}: {which} of a sample has the shape {a}, but {b} in {parts[0].name}; bring all to one "
                    "shape."
                )
    if pictures:
        images = [ImageSource(where(i), image) for i, image in enumerate(x for part in contents for x in part.x)]
        x, _ = load_images(images, options.resize, issues)
    else:
        x = np.concatenate([content.x for content in contents])
    arrays = {"x": x, "y": np.concatenate([content.y for content in contents])}
    if parts[0].client is not None:
        arrays["client"] = np.repeat([str(part.client) for part in parts], sizes)
    if parts[0].split is not None:
        arrays["split"] = np.repeat([str(part.split) for part in parts], sizes)
    if x.ndim == 4 and x.dtype != np.uint8:  # a transform of the user's has scaled them
        options = replace(options, normalise=False)
    samples = join_arrays(arrays, where, layout, options, issues)
    resized = pictures and options.resize is not None
    return replace(samples, preprocessing=replace(samples.preprocessing, resize=True)) if resized else samples

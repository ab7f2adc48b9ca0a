"""UCI HAR: six activities of thirty people, as windows of a smartphone's motion signals. A client is a person."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.settings import setting
from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import open_npz, readable, require, rows_by_client, validated_labels

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
TEST_SUBJECTS = (2, 4, 9, 10, 12, 13, 18, 20, 24)
STEPS = 128
ARCHIVE_FOLDER = "UCI HAR Dataset"


def _files(part: str) -> tuple[str, ...]:
    """The published files of "train" or "test": activities, people, and each of the signals."""
    signals = (f"{part}/Inertial Signals/{name}_{part}.txt" for name in SIGNALS)
    return (f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt", *signals)


FILES = (*_files("train"), *_files("test"))
LAYOUTS = {
    "published": tuple(f"{ARCHIVE_FOLDER}/{name}" for name in FILES),
    "inside": FILES,
    "compact": ("har.npz",),
}


@dataclass(frozen=True)
class Har(Dataset):
    """Human activity recognition."""

    name = "har"
    about = "UCI HAR, 2.56 s of nine motion signals of a smartphone; a client is a person"
    size = "10,299 windows, 6 activities, 30 people"
    model = "harcnn"
    partition = "natural"
    aliases = ("uci_har", ARCHIVE_FOLDER)
    class_names = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying")
    licence = "CC BY 4.0 (UCI); the data's own README asks for a citation and forbids commercial use"
    sources = (
        Source(
            "uci-har.zip",
            ("https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",),
            unpack=True,
        ),
    )
    usual = {"lr": 0.01, "rounds": 100}

    scrambled: bool = setting(False, "channels and time mixed up, as by the script that GPFL's authors used")

    def natural_clients(self) -> int:
        """The number of people."""
        return 30

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all windows, [windows, signals, 1, steps]; those of nine people are the official test set."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "compact":
            x, y, subject, test, notes = _read_compact(folder / "har.npz")
        else:
            x, y, subject, test, notes = _read_published(folder / ARCHIVE_FOLDER if layout == "published" else folder)
        if not self.scrambled:  # otherwise [n, steps, signals] is reshaped as if it were [n, signals, steps]
            x = x.transpose(0, 2, 1)
        x = np.ascontiguousarray(x).reshape(len(x), len(SIGNALS), 1, STEPS)
        return RawDataset(x, y, 6, official_test=np.flatnonzero(test), natural=rows_by_client(subject), notes=notes)


# x [windows, steps, signals], activities, people, whether they are for testing, notes for the user
Windows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]


def _read_published(folder: Path) -> Windows:
    """Read the published files. They have a line for each window: the activity (1 to 6), the person (1 to 30) and, in
    a file for each signal, 128 values."""
    parts = []
    for part in ("train", "test"):
        labels, people, *signals = (folder / name for name in _files(part))
        y, subject = _read_table(labels, int)[:, 0], _read_table(people, int)[:, 0]
        with readable(labels, "a list of activities, 1 to 6"):
            y = validated_labels(y - 1, 6, len(y))
        with readable(people, "a list of people, 1 to 30"):
            validated_labels(subject - 1, 30, len(y))
        x = np.empty((len(y), STEPS, len(SIGNALS)), np.float32)
        for channel, path in enumerate(signals):
            with readable(path, "a table of signals"):
                values = _read_table(path, float)
                require(values.shape == x.shape[:2], f"{values.shape} values, not {x.shape[:2]}")
                x[:, :, channel] = values
        parts.append((x, y, subject, np.full(len(y), part == "test")))
    x, y, subject, test = (np.concatenate(pair) for pair in zip(*parts, strict=True))
    notes = () if len(y) == 10_299 else (f"har: {len(y):,} of 10,299 windows",)
    return x, y, subject, test, notes


def _read_table(path: Path, kind: type) -> np.ndarray:
    """A text file of numbers, as int64 or float32."""
    with readable(path, "a table of numbers"):
        with warnings.catch_warnings(action="ignore"):  # about an empty file
            values = np.loadtxt(path, dtype=np.int64 if kind is int else np.float32, ndmin=2)
        require(values.size > 0 and bool(np.isfinite(values).all()), "a number is missing or not finite")
        return values


def _read_compact(path: Path) -> Windows:
    """Read FedLoom's compact layout: recordings as integers, and the start of each window. It was made from the raw
    recordings, and has more windows than UCI published."""
    with open_npz(path) as arrays:
        signal, start, subject = arrays["signal"], arrays["start"].astype(np.int64), arrays["subject"]
        require(signal.shape[1:] == (len(SIGNALS),), f"{signal.shape} is not a recording of nine signals")
        require(bool(start.min() >= 0 and start.max() + STEPS <= len(signal)), "a window ends behind the recording")
        y = validated_labels(arrays["label"], 6, len(start))
        validated_labels(subject - 1, 30, len(start))
        x = signal[start[:, None] + np.arange(STEPS)] * arrays["scale"]
    notes = (f"har: {len(y):,} windows cut anew from the recordings, where UCI published 10,299",)
    return x, y, subject, np.isin(subject, TEST_SUBJECTS), notes

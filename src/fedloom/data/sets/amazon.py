"""Amazon reviews: positive or negative, as bags of words. A client is one of four kinds of products."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import open_npz, readable, require, rows_by_client, validated_labels

DOMAINS = ("books", "dvd", "electronics", "kitchen")
FEATURES = 5000
ARCHIVE_FOLDER = "processed_acl"
REVIEWS = tuple(f"{domain}/{label}.review" for domain in DOMAINS for label in ("negative", "positive"))
LAYOUTS = {
    "published": tuple(f"{ARCHIVE_FOLDER}/{name}" for name in REVIEWS),
    "inside": REVIEWS,
    "npz": ("amazon.npz",),  # MDAN's file, or FedLoom's compact one
}


@dataclass(frozen=True)
class Amazon(Dataset):
    """Sentiment classification of product reviews."""

    name = "amazon"
    about = "Amazon reviews, 5,000 word counts, positive or negative; a client is a kind of product"
    size = "8,000 or 27,677 reviews, 2 classes, 4 kinds of products"
    model = "mlp3"
    partition = "natural"
    aliases = ("amazon_reviews", ARCHIVE_FOLDER)
    licence = "none stated; for research, citing Blitzer, Dredze, Pereira, ACL 2007"
    sources = (
        Source(
            "processed_acl.tar.gz",
            ("https://www.cs.jhu.edu/~mdredze/datasets/sentiment/processed_acl.tar.gz",),
            unpack=True,
        ),
    )
    usual = {"lr": 0.005, "rounds": 100}

    def natural_clients(self) -> int:
        """The number of kinds of products."""
        return len(DOMAINS)

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        """Read all reviews as counts of 5,000 words."""
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "npz":
            x, y, domain = _read_npz(folder / "amazon.npz")
        else:
            x, y, domain = _read_reviews([folder / name for name in LAYOUTS[layout]])
        return RawDataset(x, y, 2, natural=rows_by_client(domain), notes=_notes(domain))


def _notes(domain: np.ndarray) -> tuple[str, ...]:
    """A note for the user if these are other reviews than those of MDAN's file."""
    if len(domain) == 27_677:
        return ()
    sizes = ", ".join(f"{n:,}" for n in np.bincount(domain))
    return (f"amazon: {sizes} reviews, where papers that use MDAN's file have 6,465, 5,586, 7,681, 7,945",)


Reviews = tuple[np.ndarray, np.ndarray, np.ndarray]  # word counts, labels, kinds of products


def _dense(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """A sparse matrix with n rows as a dense one."""
    x = np.zeros((n, FEATURES), np.float32)
    np.add.at(x, (rows, columns), values)
    return x


def _read_reviews(paths: list[Path]) -> Reviews:
    """Read the published files. A review is a line of word:count, the last of which is #label#:positive or negative.
    The features are the 5,000 words that occur in most reviews, sorted by this number, then by the alphabet."""
    bags: list[dict[str, int]] = []  # count of every word of a review
    labels, domains = [], []
    for i, path in enumerate(paths):
        with readable(path, "a file of processed reviews"):
            start = len(bags)
            for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), 1):
                *words, last = line.strip().split(" ")
                require(last == f"#label#:{path.stem}", f"line {number} does not end in #label#:{path.stem}")
                pairs = [word.rpartition(":") for word in words]
                require(all(count.isdecimal() for _, _, count in pairs), f"line {number} has a word without a count")
                bags.append({word: int(count) for word, _, count in pairs})
            labels += [path.stem == "positive"] * (len(bags) - start)
            domains += [i // 2] * (len(bags) - start)
    frequency = Counter(word for bag in bags for word in bag)
    vocabulary = sorted(frequency, key=lambda word: (-frequency[word], word))[:FEATURES]
    column = {word: j for j, word in enumerate(vocabulary)}
    cells = [(i, column[word], count) for i, bag in enumerate(bags) for word, count in bag.items() if word in column]
    rows, columns, counts = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    return _dense(rows, columns, counts, len(bags)), np.array(labels, dtype=np.int64), np.array(domains)


def _read_npz(path: Path) -> Reviews:
    """Read amazon.npz, of MDAN or of FedLoom's compact layout."""
    with open_npz(path) as arrays:
        return _mdan(arrays) if "xx_data" in arrays.files else _compact(arrays)


def _compact(arrays: dict[str, np.ndarray]) -> Reviews:
    """FedLoom's compact layout: a sparse matrix in CSR format."""
    n, bounds = len(arrays["label"]), arrays["indptr"].astype(np.int64)
    indices, counts = arrays["indices"], arrays["counts"]
    require(len(bounds) == n + 1 and bounds[0] == 0 and bool((np.diff(bounds) >= 0).all()), "its rows do not ascend")
    require(len(indices) == len(counts) == bounds[-1], f"{len(counts)} counts of {bounds[-1]} words")
    require(not len(indices) or int(indices.max()) < FEATURES, f"a word is not in 0..{FEATURES - 1}")
    validated_labels(arrays["domain"], len(DOMAINS), n)
    x = _dense(np.repeat(np.arange(n), np.diff(bounds)), indices, counts, n)
    return x, validated_labels(arrays["label"], 2, n), arrays["domain"].astype(np.int64)


def _mdan(arrays: dict[str, np.ndarray]) -> Reviews:
    """MDAN's amazon.npz: a transposed sparse matrix in COO format, labels -1 and 1, and where each kind of product
    begins. The first 5,000 features are used."""
    values, rows, columns = (arrays[name].ravel() for name in ("xx_data", "xx_col", "xx_row"))
    label, offset = arrays["yy"].ravel(), arrays["offset"].ravel().astype(np.int64)
    require(len(offset) == 5 and offset[0] == 0 and bool((np.diff(offset) > 0).all()), "its offsets are not of 4 kinds")
    n = int(offset[-1])
    require(len(values) == len(rows) == len(columns), f"{len(values)} values, {len(rows)} rows, {len(columns)} columns")
    require(len(label) >= n, f"{len(label)} labels of {n} reviews")
    require(bool(np.isin(label, (-1, 1)).all()), "a label is neither -1 nor 1")
    used = (columns < FEATURES) & (rows < n)
    x = _dense(rows[used], columns[used], values[used], n)
    return x, (label[:n] > 0).astype(np.int64), np.repeat(np.arange(len(DOMAINS)), np.diff(offset))

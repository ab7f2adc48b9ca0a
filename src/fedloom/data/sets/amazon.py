"""Amazon reviews of four kinds of products: positive or negative, as bags of words. A kind is a client."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.dataset import Dataset, RawDataset, Source, locate
from fedloom.data.formats import by_owner, checked_labels, need, npz, reading

DOMAINS = ("books", "dvd", "electronics", "kitchen")
FEATURES = 5000
INSIDE = "processed_acl"
REVIEWS = tuple(f"{domain}/{mood}.review" for domain in DOMAINS for mood in ("negative", "positive"))
LAYOUTS = {
    "published": tuple(f"{INSIDE}/{name}" for name in REVIEWS),
    "inside": REVIEWS,
    "npz": ("amazon.npz",),  # MDAN's, or FedLoom's compact one
}


@dataclass(frozen=True)
class Amazon(Dataset):
    name = "amazon"
    about = "Amazon reviews, 5,000 word counts, positive or negative; a client is a kind of product"
    size = "8,000 or 27,677 reviews, 2 classes, 4 kinds of products"
    model = "mlp3"
    partition = "natural"
    aliases = ("amazon_reviews", INSIDE)
    licence = "none stated; for research, citing Blitzer, Dredze, Pereira, ACL 2007"
    sources = (
        Source(
            "processed_acl.tar.gz",
            ("https://www.cs.jhu.edu/~mdredze/datasets/sentiment/processed_acl.tar.gz",),
            unpack=True,
        ),
    )
    usual = {"lr": 0.005, "rounds": 100}

    def load(self, data_dir: Path | None, clients: int, seed: int) -> RawDataset:
        folder, layout = locate(type(self), data_dir, LAYOUTS)
        if layout == "npz":
            x, y, domain = _arrays(folder / "amazon.npz")
        else:
            x, y, domain = _reviews([folder / name for name in LAYOUTS[layout]])
        return RawDataset(x, y, 2, natural=by_owner(domain), notes=_notes(domain))


def _notes(domain: np.ndarray) -> tuple[str, ...]:
    if len(domain) == 27_677:
        return ()
    sizes = ", ".join(f"{n:,}" for n in np.bincount(domain))
    return (f"amazon: {sizes} reviews, where papers that use MDAN's file have 6,465, 5,586, 7,681, 7,945",)


Read = tuple[np.ndarray, np.ndarray, np.ndarray]  # counts, labels, kinds of products


def _dense(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    x = np.zeros((n, FEATURES), np.float32)
    np.add.at(x, (rows, columns), values)
    return x


def _reviews(paths: list[Path]) -> Read:
    """A review is a line of word:count, the last of them #label#:positive or negative. The features are the 5,000 words
    that most reviews have, in this order, then in that of the alphabet."""
    bags: list[dict[str, int]] = []
    labels, domains = [], []
    for i, path in enumerate(paths):
        with reading(path, "a file of processed reviews"):
            before = len(bags)
            for number, line in enumerate(path.read_text(encoding="utf-8").strip("\n").split("\n"), 1):
                *words, last = line.strip().split(" ")
                need(last == f"#label#:{path.stem}", f"line {number} does not end in #label#:{path.stem}")
                pairs = [word.rpartition(":") for word in words]
                need(all(count.isdecimal() for _, _, count in pairs), f"line {number} has a word without a count")
                bags.append({word: int(count) for word, _, count in pairs})
            labels += [path.stem == "positive"] * (len(bags) - before)
            domains += [i // 2] * (len(bags) - before)
    frequency = Counter(word for bag in bags for word in bag)
    vocabulary = sorted(frequency, key=lambda word: (-frequency[word], word))[:FEATURES]
    column = {word: j for j, word in enumerate(vocabulary)}
    cells = [(i, column[word], count) for i, bag in enumerate(bags) for word, count in bag.items() if word in column]
    rows, columns, counts = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    return _dense(rows, columns, counts, len(bags)), np.array(labels, dtype=np.int64), np.array(domains)


def _arrays(path: Path) -> Read:
    with npz(path) as arrays:
        return _mdan(arrays) if "xx_data" in arrays.files else _compact(arrays)


def _compact(arrays: dict[str, np.ndarray]) -> Read:
    """The rows of a sparse matrix, one after another."""
    n, bounds = len(arrays["label"]), arrays["indptr"].astype(np.int64)
    indices, counts = arrays["indices"], arrays["counts"]
    need(len(bounds) == n + 1 and bounds[0] == 0 and bool((np.diff(bounds) >= 0).all()), "its rows do not ascend")
    need(len(indices) == len(counts) == bounds[-1], f"{len(counts)} counts of {bounds[-1]} words")
    need(not len(indices) or int(indices.max()) < FEATURES, f"a word is not in 0..{FEATURES - 1}")
    checked_labels(arrays["domain"], len(DOMAINS), n)
    x = _dense(np.repeat(np.arange(n), np.diff(bounds)), indices, counts, n)
    return x, checked_labels(arrays["label"], 2, n), arrays["domain"].astype(np.int64)


def _mdan(arrays: dict[str, np.ndarray]) -> Read:
    """MDAN's amazon.npz: a sparse matrix on its side, labels -1 and 1, and where each kind of product begins; of the
    features the first 5,000 are used."""
    values, rows, columns = (arrays[name].ravel() for name in ("xx_data", "xx_col", "xx_row"))
    label, offset = arrays["yy"].ravel(), arrays["offset"].ravel().astype(np.int64)
    need(len(offset) == 5 and offset[0] == 0 and bool((np.diff(offset) > 0).all()), "its offsets are not of 4 kinds")
    n = int(offset[-1])
    need(len(values) == len(rows) == len(columns), f"{len(values)} values, {len(rows)} rows, {len(columns)} columns")
    need(len(label) >= n, f"{len(label)} labels of {n} reviews")
    need(bool(np.isin(label, (-1, 1)).all()), "a label is neither -1 nor 1")
    kept = (columns < FEATURES) & (rows < n)
    x = _dense(rows[kept], columns[kept], values[kept], n)
    return x, (label[:n] > 0).astype(np.int64), np.repeat(np.arange(len(DOMAINS)), np.diff(offset))

"""The data sets that come with the package or can be made without a download."""

import gzip
import itertools
import struct

import numpy as np
import pytest
import torch
from sentences import user_error

from fedloom.data.divide import divide
from fedloom.data.partitions import Iid, Natural
from fedloom.data.sets import fmnist
from fedloom.data.sets.digits import Digits
from fedloom.data.sets.fmnist import FashionMnist
from fedloom.data.sets.synthetic import Synthetic

# -- digits


def test_digits_are_1797_pictures_of_8x8_pixels_between_minus_1_and_1():
    raw = Digits().load(None, 20, 1)
    assert raw.x.shape == (1797, 1, 8, 8)
    assert raw.x.dtype == np.float32
    assert (raw.x.min(), raw.x.max()) == (-1, 1)
    assert raw.y.dtype == np.int64
    # samples per class, from optdigits.names of the UCI repository (its test set is what scikit-learn ships)
    assert np.bincount(raw.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert raw.classes == 10


# -- synthetic, as in PAGE


def test_synthetic_has_375_samples_per_client_of_which_75_are_the_servers():
    raw = Synthetic().load(None, 100, 1)
    assert raw.x.shape == (37_500, 30)
    assert raw.classes == 30
    assert {len(rows) for rows in raw.natural} == {300}
    assert len(raw.server) == 7500
    for i, rows in enumerate(raw.natural):  # in generation order: 300 local ones, then 75 for the server
        np.testing.assert_array_equal(rows, np.arange(375 * i, 375 * i + 300))
    assert not np.isin(raw.server, np.concatenate(raw.natural)).any()


def test_synthetic_splits_300_samples_in_210_for_training_and_90_for_testing_in_generation_order():
    data = divide(Synthetic().load(None, 3, 1), Natural(), 3, split=(0.7, 0.0, 0.3))
    for i in range(3):
        assert data.splits["train"][i].tolist() == list(range(375 * i, 375 * i + 210))
        assert data.splits["test"][i].tolist() == list(range(375 * i + 210, 375 * i + 300))
    assert len(data.splits["val"].flat) == 0
    assert len(data.server) == 225


def test_synthetic_labels_are_those_of_one_linear_model_for_all_clients():
    made = Synthetic()
    raw, (_, _, w, c) = made.load(None, 100, 1), made.client(0, 1)
    assert w.shape == (30, 30)
    guess = np.argmax(raw.x.astype(np.float64) @ w + c, axis=1)
    assert (guess == raw.y).mean() == 1  # the Bayes accuracy
    assert len(np.unique(raw.y)) > 20  # and not by being one class


def test_synthetic_inputs_have_the_covariance_of_the_specification():
    # Sigma = diag(j^-1.2); relative standard error of a variance from 20000 draws is 1 %, bound at five of them
    x = Synthetic(per_client=20_000).client(0, 1).x
    np.testing.assert_allclose(x.var(0), np.arange(1, 31) ** -1.2, rtol=0.05)
    correlation = np.corrcoef(x.T) - np.eye(30)
    assert np.abs(correlation).max() < 0.05


def test_synthetic_client_centres_differ_unless_inputs_are_iid():
    def centres(**options):
        return np.array([Synthetic(per_client=2000, **options).client(i, 1).x.mean(0) for i in range(40)])

    # entries of mean_i are N(B_i, 1) with B_i ~ N(0, b): standard deviation over clients sqrt(1 + b^2)
    assert centres(beta=0.0).std() == pytest.approx(1, rel=0.1)
    assert centres(beta=3.0).mean(1).std() == pytest.approx(3, rel=0.35)  # of the B_i, from 40 clients
    assert np.abs(centres(iid_x=True)).max() < 0.15  # 1200 means with standard deviation up to 1/sqrt(2000) = 0.022


@pytest.mark.parametrize("variant", ["page", "fedprox"])
def test_synthetic_clients_do_not_depend_on_how_many_there_are(variant):
    made = Synthetic(variant=variant)
    few, many = made.load(None, 3, 1), made.load(None, 6, 1)
    assert np.array_equal(few.x, many.x[: len(few.x)])
    assert np.array_equal(few.y, many.y[: len(few.y)])
    assert [len(rows) for rows in few.natural] == [len(rows) for rows in many.natural[:3]]


def test_synthetic_is_a_function_of_the_seed():
    first, again, other = (Synthetic().load(None, 2, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.x, other.x)
    assert not np.array_equal(first.y, other.y)


def test_theta_is_the_standard_deviation_of_the_logarithms_of_synthetic_sizes():
    sizes = np.array([len(Synthetic(theta=0.5).client(i, 1).y) for i in range(200)])
    # logarithms are N(log 375, 0.5); standard errors 0.035 of the mean and 0.025 of the deviation
    assert np.log(sizes).mean() == pytest.approx(np.log(375), abs=0.14)
    assert np.log(sizes).std() == pytest.approx(0.5, abs=0.1)


# -- synthetic, as in FedProx


def test_fedprox_variant_has_60_inputs_10_classes_and_50_samples_or_more():
    raw = Synthetic(variant="fedprox").load(None, 20, 1)
    sizes = [len(Synthetic(variant="fedprox").client(i, 1).y) for i in range(20)]
    assert raw.x.shape == (sum(sizes), 60)
    assert raw.classes == 10
    assert min(sizes) >= 50
    assert len(set(sizes)) > 10  # LogNormal(4, 2) + 50
    assert len(raw.server) + sum(len(rows) for rows in raw.natural) == len(raw.y)


def test_fedprox_variant_labels_every_client_by_a_model_of_its_own():
    clients = [Synthetic(variant="fedprox", alpha=1.0, beta=1.0).client(i, 1) for i in range(5)]
    for x, y, w, c in clients:
        assert np.array_equal(np.argmax(x @ w + c, axis=1), y)
    for a, b in itertools.pairwise(clients):
        assert not np.allclose(a.w, b.w)
        assert (np.argmax(a.x @ b.w + b.c, axis=1) == a.y).mean() < 0.9  # another client's model gives other labels


def test_fedprox_variants_alpha_is_the_standard_deviation_of_the_models_means():
    # entries of W_i are N(u_i, 1), u_i ~ N(0, alpha): the mean of 600 has standard deviation sqrt(alpha^2 + 1/600)
    def deviation(alpha):
        made = Synthetic(variant="fedprox", alpha=alpha)
        return np.std([made.client(i, 1).w.mean() for i in range(40)])

    assert deviation(0.0) == pytest.approx(1 / np.sqrt(600), rel=0.45)  # four standard errors of 1/sqrt(80)
    assert deviation(2.0) == pytest.approx(2, rel=0.45)


# -- Fashion-MNIST


def idx(values):
    """The IDX format of unsigned bytes: magic number, rank, sizes as big-endian integers, data."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def tiny_parts():
    """Three training and two test pictures."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (5, 28, 28))
    labels = np.array([3, 0, 9, 1, 3])
    return dict(zip(fmnist.FILES, (images[:3], labels[:3], images[3:], labels[3:]), strict=True))


def write(folder, zipped=True, **changes):
    """Write the four files; `changes` are raw bytes instead of a file (None: no file), by the first word of its name
    and what it holds, such as `train_labels`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in tiny_parts().items():
        raw = changes.get("_".join(name.split("-")[:2]), idx(values))
        if raw is not None:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw)) if zipped else (folder / name).write_bytes(raw)
    return folder


@pytest.mark.parametrize("zipped", [True, False], ids=["gz", "plain"])
@pytest.mark.parametrize("inner", ["", "fmnist"])
def test_fmnist_reads_idx_files_zipped_or_plain_in_the_folder_or_one_of_its_name(tmp_path, zipped, inner):
    write(tmp_path / inner, zipped)
    raw = FashionMnist().load(tmp_path, 20, 1)
    images = np.concatenate([tiny_parts()[name] for name in fmnist.FILES[::2]])
    assert raw.x.dtype == np.uint8
    assert np.array_equal(raw.x, images[:, None])
    assert raw.y.tolist() == [3, 0, 9, 1, 3]
    assert raw.official_test.tolist() == [3, 4]
    assert raw.classes == 10


def test_fmnist_pixels_become_numbers_between_minus_1_and_1(tmp_path):
    data = divide(FashionMnist().load(write(tmp_path), 1, 1), Iid(), 1)
    # (x/255 - 0.5) / 0.5 for 0, 51 = 255/5, 255
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(data.prepare(pixels), torch.tensor([-1.0, -0.6, 1.0]))


def test_fmnist_is_found_by_the_environment(tmp_path, monkeypatch):
    write(tmp_path / "fmnist")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    assert len(FashionMnist().load(None, 20, 1).y) == 5


def test_fmnist_says_where_it_looked_and_what_to_do_when_it_is_missing(tmp_path, monkeypatch):
    words = (str(tmp_path), "download fmnist", "dataset-fashion-mnist", "put train-images-idx3-ubyte.gz", "other 3")
    with user_error(*words):
        FashionMnist().load(tmp_path, 20, 1)
    monkeypatch.setattr(FashionMnist, "debian", ("package", tmp_path / "debian"))
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with user_error(str(tmp_path / "debian"), str(tmp_path / "mine" / "fmnist"), str(tmp_path / "cache")):
        FashionMnist().load(None, 20, 1)


def images(*shape):
    return idx(np.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_labels": None}, ["train-labels-idx1-ubyte"]),
        ({"t10k_images": None}, ["t10k-images-idx3-ubyte"]),
        ({"train_images": images(3, 28, 28)[:-1]}, ["train-images-idx3-ubyte", "damaged"]),
        ({"train_images": images(3, 28, 28) + b"\0"}, ["train-images-idx3-ubyte", "damaged"]),
        ({"train_images": b""}, ["train-images-idx3-ubyte", "damaged"]),
        ({"train_images": b"\0\0\x08\x03\0\0"}, ["train-images-idx3-ubyte", "damaged"]),  # ends within the sizes
        ({"t10k_labels": b"<html>not found</html>"}, ["t10k-labels-idx1-ubyte", "damaged"]),
        (
            {"t10k_labels": struct.pack(">HBBI", 0, 13, 1, 1) + bytes(4)},
            ["t10k-labels-idx1-ubyte", "damaged"],
        ),  # floats
        ({"train_images": images(3, 32, 32), "t10k_images": images(2, 32, 32)}, ["not Fashion-MNIST"]),
        ({"t10k_images": images(2, 32, 32)}, ["not Fashion-MNIST"]),
        ({"t10k_images": images(2)}, ["not Fashion-MNIST"]),
        ({"train_labels": images(3, 28, 28)}, ["not Fashion-MNIST"]),
        ({"train_labels": idx(np.array([1, 2]))}, ["not Fashion-MNIST"]),  # two labels of three pictures
        # five of five in all, but not of the same pictures
        ({"train_labels": idx(np.array([1, 2])), "t10k_labels": idx(np.array([1, 2, 3]))}, ["not Fashion-MNIST"]),
        ({"train_labels": idx(np.array([1, 2, 10]))}, ["not Fashion-MNIST"]),
        ({"train_images": images(0, 28, 28), "train_labels": images(0)}, ["not Fashion-MNIST"]),
        ({"train_labels": b"\0\0\x08\0\0"}, ["train-labels-idx1-ubyte", "damaged"]),  # rank 0
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["gz", "plain"])
def test_fmnist_refuses_files_that_are_missing_or_damaged_or_of_something_else(tmp_path, zipped, changes, words):
    write(tmp_path, zipped, **changes)
    with user_error(*words):
        FashionMnist().load(tmp_path, 20, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[: len(raw) // 2],  # a download that broke off
        lambda raw: raw[:10] + b"\xff" + raw[11:],  # the deflate stream begins with a block of an unknown type
        lambda raw: raw[:40] + bytes(b ^ 255 for b in raw[40:60]) + raw[60:],  # bits turned in the middle
        lambda raw: raw[:-8] + bytes(8),  # checksum
        lambda raw: b"<html>" + raw,
    ],
    ids=["truncated", "block type", "garbled", "checksum", "not gzip"],
)
def test_fmnist_refuses_a_zipped_file_that_is_damaged(tmp_path, spoil):
    path = write(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with user_error(str(path), "damaged", "fetch it again"):
        FashionMnist().load(tmp_path, 20, 1)


@pytest.mark.skipif(not FashionMnist.debian[1].is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_fmnist_from_debian_is_the_published_set(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    raw = FashionMnist().load(None, 20, 1)
    assert raw.x.shape == (70_000, 1, 28, 28)
    assert raw.official_test.tolist() == list(range(60_000, 70_000))
    assert np.bincount(raw.y[:60_000]).tolist() == [6000] * 10
    assert np.bincount(raw.y[60_000:]).tolist() == [1000] * 10

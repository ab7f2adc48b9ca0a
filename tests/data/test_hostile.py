"""Files that are made to fill memory, to hang a reader or to end it with a traceback get one sentence instead."""

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from owndata import TEXT_FEATURES, arrays, csv, hugging_face, pictures, rows, stream, texts, write
from sentences import user_error

from fedloom.data import archives, limits
from fedloom.data.formats import open_npz, read_idx, readable
from fedloom.data.sets.own import OwnData
from fedloom.data.text import read_text
from fedloom.data.user_data.check import check
from fedloom.data.user_data.leaks import LeakDetector

GOOD = rows()
MIB = 1 << 20


def load(path, **settings):
    return OwnData(str(path), **settings).load(None, 20, 1)


def tar_header(name, kind, size):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


# -- bombs: gigabytes out of a few megabytes. They are made of repeated parts, so that making them takes no time.


def csv_bomb(path):
    """10 GB: gzip's format allows that files are appended to one another."""
    path.write_bytes(gzip.compress(b"client,age,label\n") + gzip.compress(b"a,1,x\n" * 170_000, 9) * 10_000)
    return path


def npz_bomb(path):
    """An archive that says that its array x has 4 GB."""
    np.savez_compressed(path, x=np.zeros((1000, 1000)), y=np.arange(1000) % 2)
    raw = bytearray(path.read_bytes())
    struct.pack_into("<L", raw, raw.index(b"PK\x01\x02") + 24, 0xFFFFFFF0)
    path.write_bytes(raw)
    return path


def zip_with_long_directory(path):
    """A sparse file of 3 GB, all of it the list of its members."""
    with path.open("wb") as file:
        file.truncate(3 << 30)
        file.seek(3 << 30)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 3 << 30, 0, 0))
    return path


def tar_with_long_header(path, kind):
    path.write_bytes(gzip.compress(tar_header("x", kind, 3 << 30)) + gzip.compress(b"a" * MIB, 9) * 3072)
    return path


def sparse_tar_with_long_header(path):
    path.write_bytes(tar_header("x", tarfile.XHDTYPE, 3 << 30))
    with path.open("ab") as file:
        file.truncate(3 << 30)
    return path


def tar_with_a_long_end(path):
    member = tar_header("x", tarfile.REGTYPE, 1) + b"x".ljust(512, b"\0")
    path.write_bytes(gzip.compress(member + bytes(1024)) + gzip.compress(bytes(MIB), 9) * 10_000)
    return path


def arrow_bomb(folder):
    """20 GB of zeros: a message of an Arrow stream, many times."""
    batch = pa.record_batch({"age": np.zeros(8 * MIB), "label": np.zeros(8 * MIB, np.int8)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    made, empty = stream(pa.Table.from_batches([batch]), options), stream(pa.Table.from_batches([], batch.schema))
    end = len(empty) - 8
    hugging_face(folder, [texts()], {})
    write(folder / "data-00000-of-00001.arrow", made[:end] + made[end:-8] * 300 + made[-8:])
    return folder


def words_bomb(kind, length):
    """A million rows with the same word."""
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(MIB, np.int8)), ["a" * length])
    table = pa.table({"age": words, "label": np.arange(MIB) % 2})

    def make(path):
        if kind == "parquet":
            pq.write_table(table, path, store_schema=False)
            return path
        return hugging_face(path, [table], {})

    return make


def view_bomb(folder):
    """A million rows that all refer to one text of a megabyte."""
    _, view, text = pa.array(["a" * MIB], pa.string_view()).buffers()
    rows = pa.Array.from_buffers(pa.string_view(), MIB, [None, pa.py_buffer(view.to_pybytes() * MIB), text])
    return hugging_face(folder, [pa.table({"text": rows, "label": np.arange(MIB) % 2})], {})


def empty_bomb(folder):
    """Billions of rows without values, which take no bytes."""
    rows = pa.chunked_array([pa.nulls(2**31 - 1)] * 1000)
    return hugging_face(folder, [pa.table({"age": rows, "label": rows})], {})


BOMBS = {
    "data.csv.gz": (csv_bomb, "inflates to more than 200 times its size; if that is right, unpack it first."),
    "data.npz": (npz_bomb, "inflates to more than 200 times its size; if that is right, save its arrays without"),
    "arrow": (arrow_bomb, "inflates to more than 200 times its size; if that is right, write it without compression."),
    "words": (words_bomb("arrow", 10_000), "200 times its size; if that is right, write it without dictionaries."),
    "views": (view_bomb, "has a column of string_view, which is not read; write it as a plain list or string."),
    "empty": (empty_bomb, "holds more than"),
    "words.parquet": (words_bomb("parquet", 10_000), "200 times its size; if that is right, write it without dict"),
    "long.npz": (zip_with_long_directory, "is not a complete .npz file (its header is too long)"),
    "long.zip": (zip_with_long_directory, "its header is too long"),
    "pax.tar.gz": (lambda path: tar_with_long_header(path, tarfile.XHDTYPE), "its header is too long"),
    "name.tar.gz": (lambda path: tar_with_long_header(path, tarfile.GNUTYPE_LONGNAME), "its header is too long"),
    "pax.tar": (sparse_tar_with_long_header, "its header is too long"),
    "end.tar.gz": (tar_with_a_long_end, "it inflates to more than 200 times its size"),
}
SCRIPT = """
import json, resource, sys
from pathlib import Path
from fedloom.core.errors import UserError
from fedloom.data import archives, limits
from fedloom.data.sets.own import OwnData

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

found = {}
for name in sys.argv[1:]:
    path, before = Path(name), peak()
    (path.parent / "out").mkdir(exist_ok=True)
    try:
        if ".tar" in name or ".zip" in name:
            archives.extract(path, path.parent / "out", limits.inflated_limit(path.stat().st_size))
        else:
            OwnData(name).load(None, 20, 1)
    except (UserError, archives.ArchiveError) as error:
        found[path.name] = str(error), (peak() - before) / 1024
print(json.dumps(found))
"""


def test_bombs_are_refused_with_little_memory(tmp_path):
    paths = [str(make(tmp_path / name)) for name, (make, _) in BOMBS.items()]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *paths], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for path in filter(os.path.isfile, paths):
        os.unlink(path)
    assert list(found) == list(BOMBS)
    for name, (_, words) in BOMBS.items():
        message, mebibytes = found[name]
        assert words in message, name
        assert mebibytes < 200, name


def test_what_inflates_a_lot_but_is_small_is_read(tmp_path):
    made = [("ab"[i % 2], 0, i // 2 % 2) for i in range(20_000)]
    path = write(tmp_path / "data.csv.gz", gzip.compress(csv(made, "client,age,label").encode(), 9))
    assert path.stat().st_size * 100 < len(csv(made))
    assert len(load(path).y) == 20_000


@pytest.mark.parametrize("name", [b".", b"\0"])  # a name ends at its first NUL, so it is empty
def test_a_file_without_a_name_in_an_archive_is_refused(name, tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"content")
    path.write_bytes(path.read_bytes().replace(b"x", name))
    with pytest.raises(archives.ArchiveError, match="it has a file without a name"):
        archives.extract(path, tmp_path, 1 << 20)


def test_archives_count_what_all_members_inflate_to(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "INFLATED", MIB)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for i in range(8):
            packed.writestr(f"{i}", bytes(MIB // 4))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as rolled:
        for i in range(8):
            rolled.addfile(_sized(f"{i}", MIB // 4), io.BytesIO(bytes(MIB // 4)))
    for path in (tmp_path / "a.zip", tmp_path / "a.tar.gz"):
        limit = limits.inflated_limit(path.stat().st_size)
        assert limit < 2 * MIB
        with pytest.raises(archives.ArchiveError, match="than 200 times its size"):
            archives.extract(path, tmp_path, limit)


def _sized(name, size):
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def test_long_names_of_members_are_unpacked(tmp_path):
    name = "/".join(["folder" * 20] * 4)  # of 483 characters, so that tar needs headers of its own for it
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=kind) as rolled:
            rolled.addfile(_sized(name, 2), io.BytesIO(b"ab"))
        (tmp_path / str(kind)).mkdir()
        archives.extract(tmp_path / "a.tar", tmp_path / str(kind), MIB)
        assert (tmp_path / str(kind) / name).read_bytes() == b"ab"


def test_files_larger_than_half_of_the_free_memory_are_refused(tmp_path, monkeypatch):
    paths = [write(tmp_path / "data.csv", csv(rows(3000)))]
    paths.append(write(tmp_path / "data.csv.gz", gzip.compress(paths[0].read_bytes())))
    columns = {"age": np.zeros(10_000), "label": np.arange(10_000) % 2}  # a few kB, thanks to run lengths
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    paths += [tmp_path / "data.parquet", arrays(tmp_path / "data.npz", x=np.zeros((2000, 9)), y=np.arange(2000) % 2)]
    for path in paths:
        assert len(load(path).y) >= 2000
    monkeypatch.setattr(limits, "memory_limit", lambda: 50_000)
    for path in paths:
        with user_error(str(path), "half of the free memory"):
            OwnData(str(path), normalise=False).load(None, 20, 1)


def test_free_memory_counts_what_caches_can_give_back():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < limits.memory_limit() <= pages // 2


@pytest.mark.parametrize("largest", [300_000, 10**8, 2**63 - 1])
def test_a_vocabulary_far_larger_than_the_data_is_refused(tmp_path, largest):
    x = np.arange(120).reshape(12, 10)
    x[5, 3] = largest
    path = arrays(tmp_path / "data.npz", x=x, y=np.arange(12) % 2)
    with user_error("data.npz, row 5", f"a token id is {largest}", "at most 300000", "from 0 to V-1"):
        load(path, kind="sequence")
    x[5, 3] = 299_999
    assert load(arrays(tmp_path / "data.npz", x=x, y=np.arange(12) % 2), kind="sequence").vocab == 300_000


def test_time_follows_the_size_of_a_wide_table(tmp_path):
    """Twice 20,000 columns: what is quadratic in them takes minutes."""
    draw = np.random.default_rng(0)
    header = ",".join(["label", *(f"c{i}" for i in range(20_000))])
    for name in ("a", "b"):
        made = [(i % 2, *np.round(draw.normal(size=20_000), 2).tolist()) for i in range(4)]
        write(tmp_path / f"data/{name}.csv", csv(made, header))
    raw = load(tmp_path / "data")
    assert raw.x.shape == (8, 20_000)
    assert raw.client_names == ("a", "b")


# -- what is not a file


def check_texts(path, **settings):
    found = check(OwnData(str(path), **settings))
    assert not found["ready"]
    return [problem["text"] for problem in found["problems"]]


def test_every_folder_is_visited_once(tmp_path):
    """Ten folders, each with two links to the next: 2^10 paths lead to the table."""
    for i in range(10):
        (tmp_path / f"data/f{i}").mkdir(parents=True)
        for name in "ab":
            (tmp_path / f"data/f{i}" / name).symlink_to(f"../f{i + 1}")
    write(tmp_path / "data/f10/visits.csv", csv(GOOD))
    with user_error("are the same folder, by a link", "remove one of them"):
        load(tmp_path / "data")
    assert len(check_texts(tmp_path / "data")) < 50


def test_very_deep_folders_are_refused(tmp_path):
    write(tmp_path / "data/berlin.csv", csv(GOOD))
    handle = os.open(tmp_path / "data", os.O_RDONLY)
    for _ in range(1200):  # a path of them all would be too long for some systems
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    try:
        with user_error("lies 21 folders deep", "at most 20", "move it up"):
            load(tmp_path / "data")
        assert len(check_texts(tmp_path / "data")) == 1
    finally:
        subprocess.run(["rm", "-r", str(tmp_path / "data")], check=True)


def test_a_link_that_must_not_be_followed_is_named(tmp_path, monkeypatch):
    write(tmp_path / "data/berlin.csv", csv(GOOD))
    (tmp_path / "data/paris").symlink_to(tmp_path)
    stat = os.stat

    def refuse(path, *args, **kwargs):
        if str(path).endswith("paris"):
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)  # root, as which tests may run, may follow every link
    with user_error("data/paris cannot be read (permission denied)"):
        load(tmp_path / "data")


@pytest.mark.parametrize("name", ["a\nb.csv", "a\x1b[31m.csv", b"\xff.csv"])
@pytest.mark.parametrize("below", [True, False])
def test_a_name_that_cannot_be_printed_is_refused(tmp_path, name, below):
    write(tmp_path / "data/berlin.csv", csv(GOOD))
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path / "data"), os.fsencode(name)))
    with open(path, "w") as file:
        file.write(csv(GOOD))
    with user_error("The name of", "line break, a control character or bytes that are not UTF-8", "rename it"):
        load(tmp_path / "data" if below else path)
    (text,) = check_texts(tmp_path / "data" if below else path)
    assert text.isprintable()
    assert json.dumps(check(OwnData(path)), ensure_ascii=False).encode()


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "npz", "parquet"])
def test_a_pipe_is_not_opened(tmp_path, suffix):
    os.mkfifo(tmp_path / f"data.{suffix}")
    with user_error(f"data.{suffix} is a pipe, a socket or a device, not a file"):
        load(tmp_path / f"data.{suffix}")


def test_pipes_among_the_files_of_a_published_data_set_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.gz")
    for read in (read_idx, read_text, lambda path: open_npz(path).__enter__(), lambda p: readable(p, "").__enter__()):
        with user_error("a.gz is a pipe"):
            read(tmp_path / "a.gz")


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "npz", "parquet"])
def test_an_empty_file_is_refused(tmp_path, suffix):
    with user_error(f"data.{suffix} is"):
        load(write(tmp_path / f"data.{suffix}", b""))


# -- Hugging Face


BROKEN_FEATURES = [
    "{", "[]", "3", "null", '{"info": 3}', '{"info": {"features": []}}', '{"info": {"features": {"label": 7}}}',
    '{"info": {"features": {"label": {"_type": "ClassLabel", "names": 5}}}}',
    '{"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, null]}}}}',
    "[" * 100_000, "9" * 5000, b"\xff\xfe",
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN_FEATURES, ids=lambda content: str(content[:40]))
def test_a_broken_description_of_columns_is_refused(tmp_path, content):
    table = texts().replace_schema_metadata({b"huggingface": content})
    pq.write_table(table, tmp_path / "data.parquet")
    with user_error("data.parquet has a damaged description of its columns", "'huggingface'", "write the file again"):
        load(tmp_path / "data.parquet")


BROKEN_JSON = ["", "[]", "5", "null", '"x"', "[" * 100_000, "9" * 5000, b"\xff",
               '{"_data_files": 5, "features": 5, "splits": 5}',
               '{"_data_files": [5], "features": [5], "splits": [5]}',
               '{"_data_files": [{"filename": []}], "features": {"label": 1}, "splits": [[]]}',
               '{"_data_files": [{"filename": ".."}], "features": {"label": {"_type": "ClassLabel"}}, "splits": ["x"]}',
               '{"_data_files": [{"filename": "a\\u0000b"}], "features": 1, "splits": ["a\\u0000b"]}']  # fmt: skip


@pytest.mark.parametrize("file", ["state.json", "dataset_info.json", "dataset_dict.json"])
def test_broken_json_of_a_saved_data_set_is_refused(tmp_path, file):
    for number, content in enumerate(BROKEN_JSON):
        folder = hugging_face(tmp_path / str(number), [texts()], TEXT_FEATURES)
        write(folder / file, content)
        with user_error(str(folder)):
            load(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_pipes_and_folders_in_a_saved_data_set_are_not_opened(tmp_path, make):
    for file in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        folder = hugging_face(tmp_path / file, [texts()], TEXT_FEATURES)
        (folder / file).unlink()
        make(folder / file)
        with user_error(str(folder), file):
            load(folder)


def test_postscript_is_not_run_whatever_its_name(tmp_path):
    folder = pictures(tmp_path / "data")
    write(folder / "a/cat/x.png", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n")
    with user_error("x.png is not a picture, whatever its name says"):
        load(folder)


def test_arrays_that_are_none_are_refused(tmp_path):
    x = np.arange(120.0).reshape(30, 4)
    with user_error("data.npz: y must have one value per sample, not the shape ()"):
        load(arrays(tmp_path / "data.npz", x=x, y=1))
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as packed:
        packed.writestr("x", b"no array")
        packed.writestr("y", b"no array")
    with user_error("data.npz is not a complete .npz file (x is not an array)"):
        load(tmp_path / "data.npz")


def test_a_delimiter_is_an_ascii_character(tmp_path):
    with user_error("delimiter must be one ASCII character", "not 'é'"):
        load(write(tmp_path / "data.csv", csv(GOOD)), delimiter="é")


def test_rows_may_be_longer_than_a_block(tmp_path):
    """Of PyArrow, 1 MiB; also the row with the names of the columns."""
    names = [f"a gene with a long name and the number {i}" for i in range(30_000)]
    made = [(i % 2, *(f"{i}.{'0' * 40}{j % 7}" for j in range(len(names)))) for i in range(4)]
    path = write(tmp_path / "data.csv", csv(made, ",".join(["label", *names])))
    assert load(path).x.shape == (4, 30_000)
    content = 'label,text\n0,a\n1,"' + "b\n" * MIB
    with user_error("is not a table in CSV", "a row has over 1 MiB, as if a quote were not closed"):
        load(write(tmp_path / "data.csv", content))


def test_times_that_python_does_not_have_can_be_labels(tmp_path):
    times = pa.array([10**18 + i % 2 for i in range(30)], pa.timestamp("ns"))
    pq.write_table(pa.table({"age": np.arange(30) / 3, "label": times}), tmp_path / "data.parquet")
    assert load(tmp_path / "data.parquet").class_names[1].endswith("01:46:40.000000001")


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_arrow_files_of_usual_size_are_read(tmp_path, compression):
    table = texts().append_column("kind", pa.array(["a", "b"] * 12).dictionary_encode())
    folder = hugging_face(tmp_path / "data", [table], TEXT_FEATURES)
    plain = load(folder)
    write(folder / "data-00000-of-00001.arrow", stream(table, pa.ipc.IpcWriteOptions(compression=compression)))
    compressed = load(folder)
    np.testing.assert_array_equal(plain.x, compressed.x)
    assert plain.client_names == compressed.client_names


def test_a_single_column_of_categories_is_a_feature(tmp_path):
    age = pa.array(["young", "old", "old"] * 10).dictionary_encode()
    pq.write_table(pa.table({"age": age, "label": np.arange(30) % 2}), tmp_path / "data.parquet")
    assert load(tmp_path / "data.parquet").x.shape == (30, 2)


def test_categories_that_no_row_has_are_no_classes_and_cause_no_mistake(tmp_path):
    split = pa.DictionaryArray.from_arrays([i // 15 for i in range(30)], ["train", "test", "tets"])
    label = pa.DictionaryArray.from_arrays([i % 2 for i in range(30)], ["1", "2", "2.5"])
    pq.write_table(pa.table({"age": np.arange(30) / 3, "label": label, "split": split}), tmp_path / "data.parquet")
    raw = load(tmp_path / "data.parquet")
    assert raw.class_names == ("1", "2")
    assert raw.official_test.tolist() == list(range(15, 30))


@pytest.mark.parametrize("role", ["label", "client", "split", "age"])
@pytest.mark.parametrize("values", [[[1]] * 30, [{"a": 1}] * 30, [None] * 30], ids=["lists", "structs", "nothing"])
def test_columns_of_any_type_get_a_sentence(tmp_path, role, values):
    columns = {"age": np.arange(30) / 3, "label": [i % 2 for i in range(30)], "client": ["a", "b", "c"] * 10}
    pq.write_table(pa.table({**columns, role: values}), tmp_path / "data.parquet")
    with user_error(role if values[0] or role == "age" else "."):
        load(tmp_path / "data.parquet")


def test_a_column_of_lists_in_one_file_and_of_words_in_another(tmp_path):
    (tmp_path / "data").mkdir()
    for name, values in (("a", ["x", "y"] * 4), ("b", [[1]] * 8)):
        pq.write_table(pa.table({"age": values, "label": [0, 1] * 4}), tmp_path / f"data/{name}.parquet")
    with user_error("Column 'age' differs in its type between files"):
        load(tmp_path / "data")


# -- columns that determine the label


def test_a_column_leaks_if_chance_does_not_explain_that_it_determines_the_label():
    """12 samples, 6 of each class: 12! / (6! 6!) = 924 orders, of which 2^2 have one class at each of two values, which
    is 0.4 %. For 30 samples it is 4 / 155117520, and with 20 columns 20 times as much."""
    y = np.arange(12) % 2
    assert not LeakDetector(y, 1).determines(y)
    y = np.arange(30) % 2
    assert LeakDetector(y, 20).determines(y)
    assert LeakDetector(y, 20).determines(np.where(y, np.nan, 1.0))
    assert not LeakDetector(y, 10**6).determines(y)
    assert not LeakDetector(y, 1).determines(np.arange(30))  # an id determines everything
    assert not LeakDetector(y, 1).determines(np.where(np.arange(30) == 7, 0, y))
    assert LeakDetector(np.where(np.arange(30) == 7, -1, y), 1).determines(np.where(np.arange(30) == 7, 0, y))


def test_all_rows_are_looked_at():
    y = np.arange(5000) % 2
    values = y.copy()
    assert LeakDetector(y, 1).determines(values)
    values[4000] = 1 - values[4000]
    assert not LeakDetector(y, 1).determines(values)


def test_rare_values_and_measurements_leak_nothing():
    y = np.zeros(200, dtype=np.int64)
    y[3] = 1  # one sample of a class, with a rare value: 1 of 200 columns is like this
    assert not LeakDetector(y, 10).determines(y)
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 1000)
    detector = LeakDetector(y, 3000)
    assert not any(detector.determines(draw.integers(0, draw.integers(2, 900), 1000)) for _ in range(3000))


def test_a_column_of_an_array_that_leaks_is_named(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3))
    x[:, 2] = np.arange(40) % 2
    raw = load(arrays(tmp_path / "data.npz", x=x, y=np.arange(40) % 2))
    assert raw.notes == (
        "Every value of column x[:, 2] comes with one class only, so it may leak the label; unless it is known before "
        "the label, leave it out of x",
    )

"""From a raw data set to a federation: shares of train, validation and test, and what belongs to the server."""

import math
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from sentences import user_error

from fedloom.core.federation import Federation, Ragged
from fedloom.data import divide as divide_module
from fedloom.data.dataset import RawDataset
from fedloom.data.divide import divide, hold_out, split_sizes, validated
from fedloom.data.partitions import DirichletClass, Iid, KClassEqual, Natural, Pathological


def make_raw(per_class=50, classes=4, test_per_class=0, **rest):
    """Labels 0..classes-1 in turn; the official test set, where there is one, comes last."""
    n, test = per_class * classes, test_per_class * classes
    y = np.arange(n + test) % classes
    official = np.arange(n, n + test) if test else None
    return RawDataset(np.arange(n + test, dtype=np.float32)[:, None], y, classes, official_test=official, **rest)


def natural_raw(sizes, **rest):
    ends = np.cumsum(sizes)
    lists = tuple(np.arange(end - n, end) for n, end in zip(sizes, ends, strict=True))
    return make_raw(per_class=int(ends[-1]), classes=1, natural=lists, **rest)


def rows_of(data, *splits):
    return np.concatenate([data.splits[name].flat.numpy() for name in splits])


def sizes_of(data, name):
    return data.splits[name].sizes.tolist()


# -- shares


@pytest.mark.parametrize(
    ("n", "split", "expected"),
    [
        (10, (0.7, 0.1, 0.2), (7, 1, 2)),
        (9, (0.7, 0.1, 0.2), (6, 0, 3)),  # floor(6.3), floor(0.9), the rest
        (300, (0.7, 0.0, 0.3), (210, 0, 90)),
        (100, (0.29, 0.57, 0.14), (29, 57, 14)),  # 0.29 * 100 and 0.57 * 100 are below 29 and 57 in floating point
        (3, (0.1, 0.6, 0.3), (1, 1, 1)),  # floor(0.3) = 0: train gets one
        (2, (0.1, 0.8, 0.1), (1, 0, 1)),  # train gets one, and validation gives one to test
        (10, (0.05, 0.94, 0.01), (1, 8, 1)),  # floor(9.4) would leave test nothing
        (2, (0.9, 0.0, 0.1), (1, 0, 1)),
    ],
)
def test_shares_are_rounded_down_and_train_and_test_get_one_at_least(n, split, expected):
    assert split_sizes(n, split) == expected


@pytest.mark.parametrize(
    "shares", [("0.7", "0.1", "0.2"), ("0.8", "0.1", "0.1"), ("0.75", "0", "0.25"), ("0.7", "0", "0.3")]
)
def test_shares_follow_exact_arithmetic_for_every_size(shares):
    exact = [Fraction(s) for s in shares]
    for n in range(10, 400):  # from 10 on, every part that has a share has a sample
        train, val = math.floor(exact[0] * n), math.floor(exact[1] * n)
        assert split_sizes(n, tuple(float(s) for s in shares)) == (train, val, n - train - val)


def test_a_clients_samples_are_shuffled_by_the_split_stream_and_cut_in_order():
    raw = natural_raw([20, 30])
    data = divide(raw, Natural(), 2, split=(0.5, 0.2, 0.3), seed=5)
    for i, rows in enumerate(raw.natural):
        # rng(name, seed, ids) = default_rng([seed, crc32(name), ids...]), stream (partition, "split", i)
        draw = np.random.default_rng([5, zlib.crc32(b"partition"), zlib.crc32(b"split"), i])
        shuffled, n = draw.permutation(rows), len(rows)
        found = np.concatenate([data.splits[name][i].numpy() for name in ("train", "val", "test")])
        np.testing.assert_array_equal(found, shuffled)
        assert [len(data.splits[name][i]) for name in ("train", "val", "test")] == [n // 2, n // 5, n * 3 // 10]


def test_no_sample_is_in_two_parts_or_with_two_clients():
    data = divide(make_raw(per_class=200), DirichletClass(beta=0.5), 10, server_share=0.1)
    rows = np.concatenate([rows_of(data, "train", "val", "test"), data.server.numpy()])
    assert len(rows) == len(np.unique(rows)) == 800


@pytest.mark.parametrize(
    "split", [(0.7, 0.1, 0.1), (0.9, 0.1, 0.2), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (1.2, -0.4, 0.2), (0.8, 0.2, 0.0)]
)
def test_shares_that_make_no_sense_are_refused(split):
    with user_error("split", "/".join(f"{s:g}" for s in split)):
        divide(make_raw(), Iid(), 4, split=split)


def test_division_is_a_function_of_the_seed():
    digests = [divide(make_raw(), Iid(), 4, seed=seed).digest() for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


# -- what is divided


def test_merged_divides_the_official_test_set_too_and_leaves_the_server_nothing():
    data = divide(make_raw(test_per_class=10), Iid(), 4, source="merged")
    assert sorted(rows_of(data, "train", "val", "test")) == list(range(240))
    assert data.server is None


def test_train_divides_the_training_set_and_gives_the_server_the_test_set():
    data = divide(make_raw(test_per_class=10), Iid(), 4, source="train", split=(0.7, 0, 0.3))
    assert sorted(rows_of(data, "train", "val", "test")) == list(range(200))
    assert data.server.tolist() == list(range(200, 240))
    assert sizes_of(data, "train") == [35] * 4  # floor(0.7 * 50)
    assert sizes_of(data, "test") == [15] * 4


def test_separate_tests_clients_on_official_test_data_of_their_own_classes():
    raw = make_raw(per_class=100, classes=4, test_per_class=20)
    data = divide(raw, KClassEqual(k=2), 8, source="separate", split=(0.9, 0.0, 0.1))
    assert sorted(rows_of(data, "train", "val")) == list(range(400))
    assert sorted(rows_of(data, "test")) == list(range(400, 480))
    assert sizes_of(data, "train") == [50] * 8  # two classes, a quarter of 100 samples of each
    assert sizes_of(data, "test") == [10] * 8
    for i in range(8):
        train, test = (set(raw.y[data.splits[name][i].numpy()]) for name in ("train", "test"))
        assert train == test
        assert len(train) == 2


def test_separate_takes_validation_data_from_the_training_set():
    # 50 training samples per client, of which floor(0.58 * 50) = 29; the product is below 29 in floating point
    raw = make_raw(per_class=100, classes=4, test_per_class=20)
    data = divide(raw, KClassEqual(k=2), 8, source="separate", split=(0.3, 0.58, 0.12))
    assert sizes_of(data, "val") == [29] * 8
    assert sizes_of(data, "train") == [21] * 8
    assert rows_of(data, "val").max() < 400


@pytest.mark.parametrize("source", ["train", "separate"])
@pytest.mark.parametrize("raw", [make_raw(), natural_raw([10, 10])], ids=["labels", "natural"])
def test_a_data_set_without_an_official_test_set_can_only_be_merged(source, raw):
    with user_error(f"pool={source}", "pool=merged"):
        divide(raw, Iid() if raw.natural is None else Natural(), 4, source=source)


def test_a_partition_that_cannot_divide_separately_says_so():
    with user_error("pathological", "pool=merged"):
        divide(make_raw(test_per_class=10), Pathological(), 4, source="separate")


def test_more_clients_than_samples_are_refused():
    with user_error("201 clients", "200 samples"):
        divide(make_raw(), Iid(), 201)


# -- the server's share


def test_server_share_goes_to_the_server_first_and_the_rest_to_clients():
    data = divide(make_raw(), Iid(), 4, server_share=0.1)
    assert len(data.server) == 20
    divided = rows_of(data, "train", "val", "test")
    assert sorted([*divided, *data.server.tolist()]) == list(range(200))
    assert data.server.tolist() != list(range(20))  # a random share, not the first samples


def test_server_share_comes_on_top_of_the_official_test_set():
    data = divide(make_raw(test_per_class=10), Iid(), 4, source="train", server_share=0.25)
    assert len(rows_of(data, "train", "val", "test")) == 150
    assert len(data.server) == 50 + 40
    assert set(range(200, 240)) <= set(data.server.tolist())


def test_server_share_comes_on_top_of_what_the_data_set_gives_the_server():
    data = divide(make_raw(server=np.arange(180, 200)), Iid(), 4, server_share=0.1)
    assert len(data.server) == 20 + 18  # a tenth of the 180 others
    assert set(range(180, 200)) <= set(data.server.tolist())
    assert len(rows_of(data, "train", "val", "test")) == 162


def test_server_share_is_taken_from_natural_clients_too():
    data = divide(natural_raw([40, 60]), Natural(), 2, server_share=0.2)
    divided = rows_of(data, "train", "val", "test")
    assert len(data.server) == 20
    assert sorted([*divided, *data.server.tolist()]) == list(range(100))
    assert max(data.splits["train"][0]) < 40 <= min(data.splits["train"][1])


def test_a_label_partition_leaves_the_data_sets_server_rows_alone():
    data = divide(make_raw(server=np.arange(0, 200, 10)), Iid(), 4)
    assert data.server.tolist() == list(range(0, 200, 10))
    assert not set(rows_of(data, "train", "val", "test")) & set(range(0, 200, 10))


# -- natural clients


def test_natural_clients_keep_their_samples_whatever_number_is_asked_for():
    data = divide(natural_raw([10, 20, 30]), Natural(), 7)
    assert data.clients == 3
    for i, (first, end) in enumerate([(0, 10), (10, 30), (30, 60)]):
        mine = np.concatenate([data.splits[name][i].numpy() for name in ("train", "val", "test")])
        assert sorted(mine) == list(range(first, end))


def test_natural_needs_a_data_set_with_clients_of_its_own():
    with user_error("no clients of its own", "dirichlet_class"):
        divide(make_raw(), Natural(), 4)


def test_ordered_samples_are_split_in_the_order_in_which_they_are_listed():
    data = divide(natural_raw([10, 20], ordered=True), Natural(), 2, split=(0.7, 0.1, 0.2))
    assert data.splits["train"][0].tolist() == list(range(7))
    assert data.splits["val"][0].tolist() == [7]
    assert data.splits["test"][0].tolist() == [8, 9]
    assert data.splits["train"][1].tolist() == list(range(10, 24))


def test_a_label_partition_of_ordered_samples_shuffles_before_it_splits():
    # the lists of a label partition are sorted by class: cut in order, the last class would be all of a client's test
    raw = make_raw(per_class=100, ordered=True)
    data = divide(raw, KClassEqual(k=2), 4, split=(0.5, 0.0, 0.5))
    for i in range(4):
        train, test = (set(raw.y[data.splits[name][i].numpy()]) for name in ("train", "test"))
        assert train == test


# -- clients that are too small


def test_clients_with_fewer_than_two_samples_are_left_out_with_a_note():
    data = divide(natural_raw([10, 1, 0, 5], notes=("generated",)), Natural(), 4)
    assert data.clients == 2
    assert sizes_of(data, "train") == [7, 3]  # floor(0.7 * 10), floor(0.7 * 5)
    assert data.notes == ("generated", "2 of 4 clients had too few samples and were left out")


def test_there_is_no_note_when_nobody_is_left_out():
    assert divide(natural_raw([10, 2]), Natural(), 2).notes == ()


def test_a_federation_without_clients_is_refused():
    with user_error("no client", "fewer clients"):
        divide(natural_raw([1, 1, 1]), Natural(), 3)


# -- clients that are held out


def clients_of(data):
    """What each client has, in the order of ids."""
    lists = [data.splits[name].lists() for name in ("train", "val", "test")]
    return [tuple(np.concatenate(rows).tolist()) for rows in zip(*lists, strict=True)]


@pytest.mark.parametrize(("wanted", "count"), [(0.2, 5), (0.01, 1), (0.999, 24), (1, 1), (7, 7), (24, 24), (0.29, 7)])
def test_a_share_or_a_number_of_clients_is_moved_to_the_end_and_nobodys_data_changes(wanted, count):
    """0.29 * 25 = 7.25."""
    whole = divide(make_raw(100), Iid(), 25)
    data = hold_out(whole, wanted, seed=1)
    assert (data.held_out, data.clients) == (count, 25 - count)
    before, after = clients_of(whole), clients_of(data)
    assert sorted(before) == sorted(after)
    for some in (after[: data.clients], after[data.clients :]):  # both in the order they had
        assert [before.index(one) for one in some] == sorted(before.index(one) for one in some)
    left = data.participants()
    assert (left.held_out, left.clients) == (0, 25 - count)
    assert clients_of(left) == after[: data.clients]


def test_which_clients_are_held_out_depends_on_the_partition_seed_alone():
    whole = divide(make_raw(100), Iid(), 25)
    first, again, other = (clients_of(hold_out(whole, 5, seed)) for seed in (1, 1, 2))
    assert first == again
    assert set(first[20:]) != set(other[20:])
    assert hold_out(whole, 5, 1).digest() != hold_out(whole, 6, 1).digest() != whole.digest()


@pytest.mark.parametrize(
    ("clients", "wanted", "words"),
    [
        (25, 25, "holdout_clients=25 leaves nobody to train, as there are 25 clients"),
        (25, 30, "holdout_clients=30 leaves nobody"),
        (25, 2.5, "not 2.5"),
        (1, 0.5, "only one client"),
        (1, 1, "only one client"),
    ],
)
def test_too_many_to_hold_out_are_refused(clients, wanted, words):
    with user_error(words):
        hold_out(divide(make_raw(100), Iid(), clients), wanted, 1)
    with user_error("This federation holds out 5 of its clients already"):
        hold_out(hold_out(divide(make_raw(100), Iid(), 10), 5, 1), 1, 1)


def test_feature_shift_is_a_natural_partition_whose_clients_differ_in_x():
    """Four domains around 0, 10, 20 and 30, with the same classes in each: no client has a sample of another domain in
    any split, and neither do those that are held out."""
    draw = np.random.default_rng(0)
    domain, y = np.repeat(np.arange(4), 60), np.tile(np.arange(2), 120)
    x = (10 * domain[:, None] + draw.normal(size=(240, 3))).astype(np.float32)
    lists = tuple(np.flatnonzero(domain == d) for d in range(4))
    data = hold_out(divide(RawDataset(x, y, 2, natural=lists), Natural(), 99), 1, seed=1)
    assert (data.clients, data.held_out) == (3, 1)
    seen = []
    for rows in clients_of(data):
        assert np.ptp(data.x[list(rows)].numpy()) < 10  # a normal variable is not 5 away from its mean
        assert len(rows) == 60
        seen.append(round(float(data.x[list(rows)].mean()) / 10))
    assert sorted(seen) == [0, 1, 2, 3]
    assert data.labels().tolist() == [[30, 30]] * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_stratified_split_gives_every_part_its_share_of_every_class(seed):
    draw = np.random.default_rng(seed)
    y = draw.choice(4, 300, p=[0.6, 0.3, 0.07, 0.03])
    owner = draw.integers(0, 3, 300)
    raw = RawDataset(np.zeros((300, 1), np.float32), y, 4, natural=tuple(np.flatnonzero(owner == i) for i in range(3)))
    shares = {"train": 0.6, "val": 0.2, "test": 0.2}
    data = divide(raw, Natural(), 3, split=tuple(shares.values()), stratify=True, seed=seed)
    plain = divide(raw, Natural(), 3, split=tuple(shares.values()), seed=seed)
    for i in range(3):
        every = np.concatenate([data.splits[name][i].numpy() for name in shares])
        assert sorted(every) == np.flatnonzero(owner == i).tolist()
        for name, share in shares.items():
            assert data.splits[name].sizes[i] == plain.splits[name].sizes[i]
            found = np.bincount(y[data.splits[name][i].numpy()], minlength=4)
            assert (np.abs(found - share * np.bincount(y[every], minlength=4)) <= 1.5).all(), (name, found)
    again = divide(raw, Natural(), 3, split=tuple(shares.values()), stratify=True, seed=seed)
    assert again.digest() == data.digest() != plain.digest()


# -- samples in a file that is mapped to memory


def mapped_federation(path, x):
    np.save(path, x)
    rows = {name: Ragged.of([np.arange(a, b), np.arange(20 + a, 20 + b)]) for name, a, b in SPLIT_ENDS}
    return Federation(torch.from_numpy(np.load(path, mmap_mode="c")), torch.arange(40) % 2, 2, rows)


SPLIT_ENDS = (("train", 0, 14), ("val", 14, 16), ("test", 16, 20))


def test_samples_stay_in_their_file(tmp_path):
    """They are neither copied nor read at once where a run prepares its data."""
    data = mapped_federation(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32))
    prepared = validated(data).to(torch.device("cpu"), torch.float32).participants()
    assert prepared.x.data_ptr() == data.x.data_ptr()


@pytest.mark.parametrize("at", [0, 17, 39])
def test_a_value_that_is_not_finite_is_found_in_any_part(at, tmp_path, monkeypatch):
    monkeypatch.setattr(divide_module, "SCALED_AT_ONCE", 9)  # three samples
    x = np.ones((40, 3), np.float32)
    x[at, 2] = np.inf
    with user_error(f"Sample {at} of the data has a value that is not a finite number"):
        validated(mapped_federation(tmp_path / "x.npy", x))

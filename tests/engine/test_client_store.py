"""The client store: in memory and on disk it has the same rows, and a crash loses none of them."""

import os

import numpy as np
import pytest
import torch
from helpers import Crash, as_format_4
from sentences import user_error

from fedloom.core.tree import leaves, tree_map
from fedloom.engine import client_store
from fedloom.engine.client_store import DiskStore, MemoryStore, Snapshot, make_store

CLIENTS = 12


def initial_rows(ids):
    """A matrix, a number and a flag per client, which depend on its id."""
    i = torch.from_numpy(ids)
    return {
        "own": {"h": i.double()[:, None, None].expand(-1, 2, 3) / 7, "n": i.clone()},
        "stats": {"seen": i % 2 == 0},
    }


def rows(ids, value):
    return tree_map(lambda v: v + value if v.dtype != torch.bool else ~v, initial_rows(ids))


def same(a, b) -> bool:
    """True if the tensors of two trees are equal."""
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def write_random_rows(store, draw, times):
    """Write rows of four random clients, several times."""
    for value in range(times):
        ids = np.sort(draw.choice(CLIENTS, 4, replace=False))
        store.write(ids, rows(ids, value + 1))


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    return make_store(initial_rows, CLIENTS, request.param, tmp_path)


def test_a_client_that_never_trained_has_its_initial_row(store):
    ids = np.array([7, 2, 9])
    assert same(store.read(ids), initial_rows(ids))
    store.write(np.array([2]), rows(np.array([2]), 5))
    found = store.read(ids)
    assert same(tree_map(lambda v: v[1:2], found), rows(np.array([2]), 5))
    assert same(tree_map(lambda v: v[[0, 2]], found), initial_rows(ids[[0, 2]]))
    assert store.trained.tolist() == [0, 0, 1] + [0] * 9


def test_rows_come_in_the_order_asked_for(store):
    write_random_rows(store, np.random.default_rng(0), 9)
    order = np.array([5, 0, 11, 3])
    assert same(store.read(order), tree_map(lambda v: v[torch.from_numpy(order)], store.everyone()))


def test_what_was_read_does_not_change_with_the_store(store):
    store.write(np.arange(4), rows(np.arange(4), 1))
    before = store.read(np.arange(4))
    store.write(np.arange(4), rows(np.arange(4), 2))
    assert same(before, rows(np.arange(4), 1))


def test_a_snapshot_does_not_change_with_the_store(store):
    store.write(np.arange(4), rows(np.arange(4), 1))
    saved = store.snapshot()
    store.write(np.arange(4), rows(np.arange(4), 2))
    assert same(saved.rows, rows(np.arange(4), 1))
    assert saved.ids.tolist() == [0, 1, 2, 3]
    assert saved.trained.tolist() == [1] * 4


def test_both_stores_have_the_same_rows(tmp_path):
    memory, disk = MemoryStore(initial_rows, CLIENTS), DiskStore(initial_rows, CLIENTS, tmp_path)
    for turn in range(30):
        for one in (memory, disk):
            write_random_rows(one, np.random.default_rng(turn), 1)
            if turn % 3 == 0:
                one.snapshot()
                one.committed()
        assert same(memory.everyone(), disk.everyone())


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("write", range(0, 60, 3))
def test_either_of_the_two_newest_checkpoints_is_complete_wherever_writing_stops(write, damaged, tmp_path, monkeypatch):
    """The files are written row by row after a checkpoint; the process dies at one of these writes, with half a row
    written. What the newest checkpoint (or, if that is damaged, the one before it) restores is what was there then."""
    disk = DiskStore(initial_rows, CLIENTS, tmp_path)
    checkpoints: list[Snapshot] = []
    truth, participations = [], []
    count = 0
    original = os.pwrite

    def pwrite(file, data, offset):
        nonlocal count
        count += 1
        if count == write + 1:
            original(file, data[: len(data) // 2], offset)
            raise Crash
        return original(file, data, offset)

    monkeypatch.setattr(client_store.os, "pwrite", pwrite)
    draw = np.random.default_rng(write)

    def write_and_save():
        for _ in range(30):
            write_random_rows(disk, draw, int(draw.integers(1, 3)))
            checkpoints.append(disk.snapshot())
            truth.append(disk.everyone())
            participations.append(disk.trained.tolist())
            disk.committed()

    with pytest.raises(Crash):
        write_and_save()
    monkeypatch.undo()
    again = DiskStore(initial_rows, CLIENTS, tmp_path)
    again.restore(checkpoints[-1 - damaged])
    assert same(again.everyone(), truth[-1 - damaged])
    # training goes on from there as from an undamaged store
    other = MemoryStore(initial_rows, CLIENTS)
    everyone = np.arange(CLIENTS)
    assert again.trained.tolist() == participations[-1 - damaged]
    trained, unknown = torch.from_numpy(again.trained), torch.zeros(0)
    other.restore(Snapshot(torch.from_numpy(everyone), trained, truth[-1 - damaged], unknown))
    for one in (again, other):
        for turn in range(4):
            write_random_rows(one, np.random.default_rng(turn), 2)
            one.snapshot()
            one.committed()
    assert same(again.everyone(), other.everyone())


def test_only_rows_of_clients_that_took_part_take_disk_space(tmp_path):
    def large_rows(ids):
        return {"own": torch.zeros(len(ids), 4096, dtype=torch.float64)}

    disk = DiskStore(large_rows, 2000, tmp_path)
    for _ in range(2):
        disk.write(np.arange(10), large_rows(np.arange(10)))
        disk.snapshot()
        disk.committed()
    used = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 2000 * 4096 * 8
    assert used < 50 * 4096 * 8


def test_a_snapshot_of_the_disk_store_contains_only_rows_that_may_differ_from_the_files(tmp_path):
    disk = DiskStore(initial_rows, CLIENTS, tmp_path)
    for ids in ([0, 1], [2], [3], [4]):
        disk.write(np.array(ids), rows(np.array(ids), 1))
        ids_saved = disk.snapshot().ids.tolist()
        disk.committed()
    assert ids_saved == [3, 4]


def test_a_method_without_private_state_has_a_store_too(tmp_path):
    for store in (MemoryStore(lambda ids: {}, 3), DiskStore(lambda ids: {}, 3, tmp_path)):
        store.write(np.array([1]), {})
        store.committed()
        assert store.read(np.arange(3)) == {}
        assert store.trained.tolist() == [0, 1, 0]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_snapshot_has_nothing_of_clients_that_never_trained(kind, tmp_path):
    sizes = []
    for clients in (20, 20_000):
        store = make_store(initial_rows, clients, kind, tmp_path / str(clients))
        for turn in range(4):
            store.write(np.arange(turn, turn + 3), rows(np.arange(3), turn))
            saved = store.snapshot()
            store.committed()
        sizes.append([v.numel() for v in leaves(saved._asdict())])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_snapshots_of_earlier_versions_have_the_participations_of_all_clients(kind, tmp_path):
    store = make_store(initial_rows, CLIENTS, kind, tmp_path)
    for turn in range(5):
        write_random_rows(store, np.random.default_rng(turn), 2)
        saved = store.snapshot()
        everyone = torch.from_numpy(store.trained.copy())
        truth = store.everyone()
        store.committed()
    if kind == "disk":
        as_format_4(tmp_path)
    for one in (saved._replace(trained=everyone, digest=torch.zeros(0)), saved):  # the second is of the new version
        again = make_store(initial_rows, CLIENTS, kind, tmp_path)
        again.restore(one)
        assert again.trained.tolist() == everyone.tolist()
        assert same(again.everyone(), truth)


def test_a_store_that_is_cleared_has_nothing_left_on_disk_either(tmp_path):
    store = DiskStore(initial_rows, CLIENTS, tmp_path)
    for turn in range(3):
        store.write(np.arange(4), rows(np.arange(4), turn))
        store.snapshot()
        store.committed()
    store.clear()
    assert same(store.everyone(), initial_rows(np.arange(CLIENTS)))
    store.write(np.array([7]), rows(np.array([7]), 9))
    saved = store.snapshot()
    again = DiskStore(initial_rows, CLIENTS, tmp_path)
    again.restore(saved)
    assert again.trained.tolist() == store.trained.tolist() == [0] * 7 + [1] + [0] * 4
    assert same(again.everyone(), store.everyone())


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_copy_follows_its_store_also_after_both_were_restored(kind, tmp_path):
    store = make_store(initial_rows, CLIENTS, kind, tmp_path / "store")
    copy = make_store(initial_rows, CLIENTS, kind, tmp_path / "copy")
    draw = np.random.default_rng(0)
    for turn in range(12):
        write_random_rows(store, draw, 2)
        if turn % 2:
            copy.copy_from(store)
            assert same(copy.everyone(), store.everyone())
            assert copy.trained.tolist() == store.trained.tolist()
        if turn == 6:  # the copy is older than the store then
            first, second = store.snapshot(), copy.snapshot()
            store.restore(first)
            copy.restore(second)


def test_state_that_does_not_fit_memory_goes_to_disk_or_is_refused(tmp_path, monkeypatch):
    size = CLIENTS * (6 * 8 + 8 + 1)
    monkeypatch.setattr(client_store, "available_memory", lambda device: size + 1)
    assert isinstance(make_store(initial_rows, CLIENTS, "auto", tmp_path), DiskStore)
    assert isinstance(make_store(initial_rows, CLIENTS, "auto", None), MemoryStore)
    monkeypatch.setattr(client_store, "available_memory", lambda device: size - 1)
    with user_error("12 clients", "store=disk"):
        make_store(initial_rows, CLIENTS, "memory", tmp_path)
    monkeypatch.setattr(client_store, "available_memory", lambda device: 2 * size + 1)
    assert isinstance(make_store(initial_rows, CLIENTS, "auto", tmp_path), MemoryStore)


@pytest.mark.parametrize(("old", "new"), [(b"'shape'", b"'shape#"), (b"'<f", b"',f"), (b"NUMPY", b"NUMPZ")])
def test_a_file_with_a_damaged_header_is_refused(old, new, tmp_path):
    DiskStore(initial_rows, CLIENTS, tmp_path)
    path = tmp_path / "000.npy"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with user_error("000.npy is damaged; start a new run"):
        DiskStore(initial_rows, CLIENTS, tmp_path)


def test_files_of_another_run_are_refused(tmp_path):
    DiskStore(initial_rows, CLIENTS, tmp_path)
    with user_error("another run"):
        DiskStore(initial_rows, CLIENTS + 1, tmp_path)
    (tmp_path / "000.npy").write_bytes(b"nonsense")
    with user_error("000.npy is damaged"):
        DiskStore(initial_rows, CLIENTS, tmp_path)

"""Files of a run that were changed, removed, replaced or planted: reported in a sentence, or without effect."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Crash, CrashAt, as_format_4, crash_after
from kills import REPRODUCIBLE_FILES, assert_same_files
from safetensors.torch import load_file, save_file

import fedloom
from fedloom import UserError
from fedloom.config.files import FORMAT
from fedloom.core.tree import leaves
from fedloom.runs.folders import exclusive_lock
from fedloom.storage.files import Damaged, read_tensors, tensors_writer, write_file
from fedloom.storage.manifest import Manifest

SMALL = {
    "clients": 6, "participation": 0.34, "rounds": 9, "plan": "stacked-eager", "batch_size": 200, "checkpoint_every": 1,
}  # fmt: skip


def start(folder, method="ditto", **more):
    """A run that stops after its eighth round, of which there is no checkpoint yet."""
    with pytest.raises(Crash):
        fedloom.run(method, out=folder, on_round=crash_after(8), **SMALL, **more)


def resume(folder, method="ditto", **more):
    return fedloom.run(method, out=folder, resume=True, **SMALL, **more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each kind of store: a run that was not stopped, and one that was stopped."""
    made = {}
    for store in ("memory", "disk"):
        made[store] = tmp_path_factory.mktemp(store)
        fedloom.run("ditto", out=made[store] / "whole", store=store, **SMALL)
        start(made[store] / "stopped", store=store)
    return made


@pytest.fixture
def copy(folders, tmp_path):
    """Makes a copy of such a folder."""

    def make(store, name, to=None):
        return Path(shutil.copytree(folders[store] / name, tmp_path / (to or name)))

    return make


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path for path in files if path.name != "run.log")


def everything(folder: Path):
    """All that a user can read from a finished run."""
    found = fedloom.load(folder)
    tensors = [v.numpy().tobytes() for tree in (found.server, found.store) for v in leaves(tree)]
    return found.config, found.rounds, found.timings, found.clients, found.reports, found.summary(), tensors


def reported(action) -> str:
    """The message of the UserError that a function raises; empty if it raises none."""
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_flipped_bit_of_a_finished_run_is_reported_or_changes_nothing(store, copy):
    folder, draw = copy(store, "whole"), np.random.default_rng(0)
    expected, count = everything(folder), 0

    def compare():
        assert everything(folder) == expected

    for path in files_of(folder):
        original = path.read_bytes()
        for bit in draw.integers(8 * len(original), size=6):
            flip(path, int(bit))
            message = reported(compare)
            assert not message or "is damaged" in message
            count += bool(message)
            path.write_bytes(original)
    assert count > 50


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_flipped_bit_of_a_stopped_run_is_reported_or_changes_nothing(store, folders, copy):
    draw, count = np.random.default_rng(1), 0
    for path in files_of(folders[store] / "stopped"):
        folder = copy(store, "stopped", "flipped")
        name = path.relative_to(folders[store] / "stopped")
        flip(folder / name, int(draw.integers(8 * path.stat().st_size)))

        def compare(folder=folder):
            resume(folder, store=store)
            assert_same_files(folder, folders[store] / "whole")

        message = reported(compare)
        assert not message or "is damaged" in message
        count += bool(message)
        shutil.rmtree(folder)
    assert count >= 9


# -- the store on disk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["000.npy", "clients.npy", "all"])
def test_a_missing_file_of_the_store_is_not_made_anew(name, copy):
    folder = copy("disk", "stopped")
    for path in (folder / "store").glob("*.npy"):
        if name in (path.name, "all"):
            path.unlink()
    with pytest.raises(UserError, match=rf"{re.escape(str(folder / 'store'))}\S* is damaged: "):
        resume(folder, store="disk")


def test_every_row_of_the_store_is_verified(folders, copy):
    """Rows that the checkpoint contains are taken from there; a changed bit of any other row is noticed."""
    messages = []
    for client in range(6):
        folder = copy("disk", "stopped", f"row-{client}")
        rows = np.lib.format.open_memmap(folder / "store" / "000.npy", mode="r+")
        rows[client].reshape(-1).view(np.uint8)[3] ^= 16
        rows.flush()

        def compare(folder=folder):
            resume(folder, store="disk")
            assert_same_files(folder, folders["disk"] / "whole")

        if message := reported(compare):
            assert re.search(r"the private state of client \d is missing or was changed", message)
            messages.append(message)
    assert 1 <= len(messages) < 6


def test_rows_of_an_earlier_participation_are_noticed(copy, tmp_path):
    folder, early = copy("disk", "stopped"), tmp_path / "early"
    with pytest.raises(Crash):
        fedloom.run("ditto", out=early, on_round=crash_after(4), store="disk", **SMALL)
    shutil.rmtree(folder / "store")
    shutil.copytree(early / "store", folder / "store")
    with pytest.raises(UserError, match="store is damaged"):
        resume(folder, store="disk")


# -- files of other runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in REPRODUCIBLE_FILES if name != "reports.parquet"])  # Ditto has none
def test_a_file_of_another_run_is_noticed(name, copy, tmp_path):
    folder = copy("memory", "whole")
    other = tmp_path / "other"
    fedloom.run("ditto", out=other, seed=1, partition_seed=5, **SMALL)
    shutil.copy(other / name, folder / name)
    with pytest.raises(UserError, match=f"is damaged: {re.escape(name)} was changed after it was written"):
        everything(folder)


def test_a_checkpoint_of_another_seed_is_set_aside(folders, copy, tmp_path, caplog):
    folder, other = copy("memory", "stopped"), tmp_path / "other"
    start(other, seed=1, store="memory")
    newest = max((folder / "checkpoints").iterdir()).name
    shutil.copy(other / "checkpoints" / newest, folder / "checkpoints" / newest)
    resume(folder, store="memory")
    assert f"Checkpoint {newest} is damaged (it belongs to another run); the one before it is used." in caplog.text
    assert_same_files(folder, folders["memory"] / "whole")


def start_two(folder, rounds):
    """Two runs that are trained together, stopped after so many rounds; of the last there is no checkpoint yet."""
    with pytest.raises(Crash):
        fedloom.compare(["fedrep"], seeds=2, out=folder, callbacks=[CrashAt("fedrep", rounds)], **SMALL)
    return [folder / "runs" / "fedrep" / f"seed-{seed}" for seed in range(2)]


def resume_two(folder, runs):
    """Resume them; returns the round from which each went on."""
    fedloom.compare(["fedrep"], seeds=2, out=folder, resume=True, **SMALL)
    return [int(re.findall(r"Going on after round (\d+)", (run / "run.log").read_text())[-1]) for run in runs]


def damage(run, t):
    flip(run / "checkpoints" / f"round-{t:08d}.safetensors", 4000)


def test_runs_that_are_trained_together_go_on_from_a_round_of_which_all_have_an_undamaged_checkpoint(tmp_path):
    fedloom.compare(["fedrep"], seeds=2, out=tmp_path / "whole", **SMALL)
    runs = start_two(tmp_path / "stopped", 6)
    damage(runs[0], 5)
    assert resume_two(tmp_path / "stopped", runs) == [4, 4]
    for run in runs:
        assert_same_files(run, tmp_path / "whole" / run.relative_to(tmp_path / "stopped"))


@pytest.mark.parametrize(("damaged", "rounds", "instead"), [(0, [5, 4], "after"), (1, [4, 3], "before")])
def test_runs_without_a_common_checkpoint_go_on_from_the_nearest_rounds(damaged, rounds, instead, tmp_path, caplog):
    """A kill between their checkpoints leaves one round of which both have one, here 4."""
    runs, others = start_two(tmp_path / "stopped", 6), start_two(tmp_path / "before", 5)
    shutil.rmtree(runs[1])
    shutil.copytree(others[1], runs[1])
    damage(runs[damaged], 4)
    assert resume_two(tmp_path / "stopped", runs) == rounds
    assert "Checkpoint round-00000004.safetensors is damaged" in caplog.text
    assert f"the one {instead} it is used." in caplog.text


def test_what_else_lies_among_the_checkpoints_is_left_alone(folders, copy):
    folder = copy("memory", "stopped")
    newest = max((folder / "checkpoints").iterdir())
    stray = newest.with_name(f"{newest.stem} (copy).safetensors")
    shutil.copy(newest, stray)
    (folder / "checkpoints" / "round-00000099.safetensors").mkdir()
    (folder / "checkpoints" / ".round-00000099.safetensors.partial").mkdir()
    resume(folder, store="memory")
    assert stray.exists()
    assert_same_files(folder, folders["memory"] / "whole")


def test_final_tensors_that_were_replaced_are_not_loaded(copy):
    folder = copy("memory", "whole")
    path = folder / "final" / "clients.safetensors"
    tensors = load_file(path)
    save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, path)
    result = fedloom.load(folder)
    with pytest.raises(UserError, match=r"final/clients\.safetensors was changed after it was written"):
        _ = result.store


# -- runs of an older format -----------------------------------------------------------------------------------------


def as_format_1(folder: Path) -> Path:
    """Turn a run directory into one that FedLoom 0.1.0 wrote: no manifest, no checksums of rows and notes, and in
    checkpoints the participations of all clients."""
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(f"format: {FORMAT}", "format: 1"))
    (folder / "manifest.json").unlink()
    stores = {"store": folder / "store", "best/store": folder / "store" / "best"}
    trained = {}
    for name, place in stores.items():
        if (place / "clients.npy").exists():
            trained[name] = as_format_4(place)
            (place / "checksums.npy").unlink()
    for path in (folder / "checkpoints").glob("*"):
        tensors, note = read_tensors(path)
        for name in stores:
            if f"{name}/digest" in tensors:
                del tensors[f"{name}/digest"]
                ids = tensors[f"{name}/ids"]
                everyone = torch.from_numpy(trained.get(name, np.zeros(6, np.int64)).copy())
                everyone[ids] = tensors[f"{name}/trained"]
                tensors[f"{name}/trained"] = everyone
        write_file(path, tensors_writer(tensors, {name: note[name] for name in note if name != "run"}))
    return folder


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_of_the_older_format_resumes_with_a_note(store, folders, copy, caplog):
    folder = as_format_1(copy(store, "stopped"))
    resume(folder, store=store)
    assert "was written by an older FedLoom; its files cannot be verified" in caplog.text
    for name in set(REPRODUCIBLE_FILES) - {"config.yaml"}:
        assert (folder / name).read_bytes() == (folders[store] / "whole" / name).read_bytes(), name
    flip(folder / "rounds.parquet", 999)
    with pytest.raises(UserError, match=r"rounds\.parquet was changed"):
        fedloom.load(folder)


def test_a_finished_run_of_the_older_format_loads_with_a_note(folders, copy, caplog):
    folder = as_format_1(copy("memory", "whole"))
    found, expected = fedloom.load(folder), fedloom.load(folders["memory"] / "whole")
    assert (found.rounds, found.clients, found.reports) == (expected.rounds, expected.clients, expected.reports)
    assert caplog.text.count("was written by an older FedLoom; its files cannot be verified") == 1


# -- planted links, locks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.log", ".config.yaml.partial", ".manifest.json.partial"])
def test_a_planted_link_is_not_written_through(name, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim)
    message = reported(lambda: fedloom.run("fedavg", out=tmp_path / "run", **SMALL))
    assert message == (f"{tmp_path / 'run' / name} is not a file; remove it." if name == "run.log" else "")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", [".compare.yaml.partial", ".leaderboard.csv.partial"])
def test_a_planted_link_is_not_written_through_by_a_comparison(name, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / name).symlink_to(victim)
    fedloom.compare(["fedavg"], out=tmp_path / "compared", seeds=1, **{**SMALL, "rounds": 1})
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["checkpoints", "final", "store"])
def test_a_folder_that_was_replaced_by_a_link_is_refused(name, copy, tmp_path):
    folder = copy("disk", "stopped")
    shutil.move(folder / name, tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name} is a link; remove it"):
        resume(folder, store="disk")


def test_a_log_that_is_a_pipe_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.log")
    with pytest.raises(UserError, match=r"run\.log is not a file"):
        fedloom.run("fedavg", out=tmp_path / "run", **SMALL)


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", "plan.json", "store/000.npy", "checkpoints/x"])
def test_a_file_that_was_replaced_by_a_pipe_is_not_waited_for(name, copy):
    folder = copy("disk", "stopped")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for use in (fedloom.load, resume):
        with pytest.raises(UserError, match=f"is damaged: {name} is a pipe, a socket or a device"):
            use(folder)


def test_nothing_that_can_be_removed_holds_the_lock(tmp_path):
    with exclusive_lock(tmp_path):
        for path in tmp_path.iterdir():
            path.unlink()
        for _ in range(2):
            with pytest.raises(UserError, match="in use by another process"), exclusive_lock(tmp_path):
                pass
        code = "import sys, pathlib, fedloom.runs.folders as f\nwith f.exclusive_lock(pathlib.Path(sys.argv[1])): pass"
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert "in use by another process" in done.stderr
    with exclusive_lock(tmp_path):
        pass


def test_where_folders_cannot_be_locked_a_file_is(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fedloom.runs.folders.fcntl", SimpleNamespace(flock=refuse, LOCK_EX=2, LOCK_NB=4))
    with exclusive_lock(tmp_path):
        assert (tmp_path / ".lock").exists()
        with pytest.raises(UserError, match="in use by another process"), exclusive_lock(tmp_path):
            pass


# -- the manifest ----------------------------------------------------------------------------------------------------


def text(value: str):
    return lambda file: file.write(value.encode())


def test_a_manifest_knows_old_and_new_files_while_they_are_replaced(tmp_path, monkeypatch):
    manifest = Manifest(tmp_path)
    manifest.write({"a": text("1"), "b": text("1")})
    replaced = []

    def stop(*args):
        if len(replaced) == 2:  # the manifest and a
            raise KeyboardInterrupt
        replaced.append(args)
        rename(*args)

    rename = os.replace
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        manifest.write({"a": text("2"), "b": text("2")})
    monkeypatch.undo()
    assert [(tmp_path / name).read_text() for name in "ab"] == ["2", "1"]
    again = Manifest(tmp_path)
    again.load()
    again.verify("ab")
    again.write({"b": text("3")})
    (tmp_path / "b").write_text("2")
    with pytest.raises(Damaged, match="b was changed after it was written"):
        again.verify("ab")
    (tmp_path / "a").unlink()
    with pytest.raises(Damaged, match="a is missing"):
        again.verify("ab")


def test_a_reader_waits_for_a_writer_that_replaces_files_meanwhile(tmp_path):
    writer, reader = Manifest(tmp_path), Manifest(tmp_path)
    writer.write({"a": text("1")})
    reader.load()
    for value in "2345":
        writer.write({"a": text(value)})
    reader.verify("a")

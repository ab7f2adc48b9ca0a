"""Several devices: runs that are spread over processes are those of one process, and nothing is lost when one ends."""

import csv
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import SmallNet, make_federation
from kills import assert_same_files
from sentences import user_error

import fedloom
from fedloom.algorithms.fedavg import FedAvg
from fedloom.cli.display import DeviceProgress
from fedloom.config.keywords import from_keywords
from fedloom.config.methods import find_method
from fedloom.core.errors import UserError, WorkerError
from fedloom.metrics import registry
from fedloom.runs.interrupt import Stopped
from fedloom.studies import devices as devices_module
from fedloom.studies import notebook
from fedloom.studies.compare import carry_out, configure_methods
from fedloom.studies.device_worker import explanation
from fedloom.studies.devices import (
    VISIBLE,
    WorkItem,
    checked_devices,
    execute_on_devices,
    on_cpu,
    parse_devices,
    share_of_threads,
    visible,
)
from fedloom.studies.study import Study
from fedloom.studies.sweep import sweep

TASK = {"clients": 4, "rounds": 4, "batch_size": 100, "plan": "stacked-eager", "device": "cpu"}
TROUBLE = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from fedloom.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Trouble(FedAvg):
    name = "trouble"

    def aggregate(self, task, server, up, info, t, key):
        file = Path(__file__).with_name("trouble.txt")
        if int(t) == 2 and file.exists():
            how = file.read_text()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "wait":
                time.sleep(60)
            raise ValueError("no idea")
        return super().aggregate(task, server, up, info, t, key)
"""


@pytest.fixture(autouse=True)
def _as_many_threads_as_a_worker(monkeypatch):
    """Threads change the last bits of results, so all processes have the number of this one."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    """A method that fails in round 2 as a file beside it says; its place, and that file."""
    monkeypatch.setattr(fedloom.core.algorithm.ALGORITHMS, "_known", {**fedloom.core.algorithm.ALGORITHMS._known})
    (tmp_path / "trouble.py").write_text(TROUBLE)
    return str(tmp_path / "trouble.py"), tmp_path / "trouble.txt"


def spread(methods, folder, *, devices="cpu,cpu", seeds=(0,), on_progress=None, resume=False, **settings):
    """A comparison on several devices, as the command line carries it out."""
    configs = configure_methods(methods, "digits", {**TASK, **settings})
    return carry_out(configs, list(seeds), out=folder, resume=resume, devices=devices, on_progress=on_progress)


def board(folder: Path) -> list[dict[str, str]]:
    """The leaderboard without its times."""
    with (folder / "leaderboard.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in csv.DictReader(file)]


def assert_same_study(found: Path, expected: Path) -> None:
    runs = [path.relative_to(expected) for path in expected.glob("runs/*/seed-*")]
    assert runs
    for run in runs:
        assert_same_files(found / run, expected / run)
    assert (found / "compare.yaml").read_bytes() == (expected / "compare.yaml").read_bytes()
    assert board(found) == board(expected)


@pytest.fixture
def workers():
    """A function that says which workers have been started since, and have not ended."""

    def running():
        children = [(child, " ".join(child.cmdline())) for child in psutil.Process().children()]
        return [line for child, line in children if "device_worker" in line and child.pid not in before]

    before = {child.pid for child in psutil.Process().children()}
    return running


# -- the same results


def test_a_comparison_on_two_devices_has_the_bytes_of_one_in_one_process(tmp_path, workers):
    """Three methods for two workers: one of them goes on with the third."""
    whole, seen = tmp_path / "whole", []
    fedloom.compare(["fedavg", "ditto"], seeds=2, out=whole, **TASK)
    found = spread(["fedavg", "ditto"], tmp_path / "spread", seeds=(0, 1), on_progress=lambda items: seen.append(
        [(item.title, item.device, item.done, item.finished) for item in items]
    ))  # fmt: skip
    assert_same_study(tmp_path / "spread", whole)
    assert [row["method"] for row in found.rows()] == [row["method"] for row in fedloom.load(whole).rows()]
    assert [title for title, *_ in seen[-1]] == ["local, 2 runs", "fedavg, 2 runs", "ditto, 2 runs"]
    assert {tuple(rest) for _, *rest in seen[-1]} == {("cpu", 8, True)}
    assert any(0 < done < 8 for items in seen for _, _, done, _ in items)
    assert any(sum(bool(device) for _, device, _, _ in items) == 2 for items in seen)
    starts = json.loads((tmp_path / "spread/runs/ditto/seed-1/environment.json").read_text())["starts"]
    assert starts[0]["command"] == sys.argv
    assert starts[0]["threads"] == torch.get_num_threads()
    assert workers() == []

    again = fedloom.compare(
        ["fedavg", "ditto"], seeds=2, out=tmp_path / "spread", resume=True, devices="cpu,cpu", **TASK
    )
    assert again.rows() == found.rows()


def test_a_finished_comparison_starts_no_process(tmp_path, monkeypatch):
    fedloom.compare(["fedavg"], seeds=1, out=tmp_path / "mine", **{**TASK, "rounds": 1})
    monkeypatch.setattr(devices_module.subprocess, "Popen", None)
    assert spread(["fedavg"], tmp_path / "mine", resume=True, rounds=1).rows()


def test_a_sweep_is_split_among_devices(tmp_path):
    """Its runs are all stackable, so that they are one group, which two workers get in two parts."""
    grid, quick = {"lr": [0.01, 0.1], "mu": [0.1]}, {**TASK, "rounds": 2}
    whole = fedloom.sweep("fedprox", grid=grid, out=tmp_path / "whole", **{**quick, "plan": "per-client"})
    found = sweep("fedprox", grid=grid, out=tmp_path / "spread", devices="cpu,cpu", **{**quick, "plan": "per-client"})
    assert [row["lr"] for row in found.table] == [row["lr"] for row in whole.table]
    for row, expected in zip(found.table, whole.table, strict=True):
        assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert len(list((tmp_path / "spread").glob("runs/*/seed-0/summary.json"))) == 2


@pytest.mark.parametrize(
    ("devices", "items"),
    [
        (1, [("a", [0, 1, 2]), ("b", [3, 4, 5])]),
        (3, [("a", [0, 1, 2]), ("b", [3, 4, 5])]),
        (4, [("a", [0, 1]), ("a, seed 2", [2]), ("b", [3, 4]), ("b, seed 2", [5])]),
        (20, [("a, seed 0", [0]), ("a, seed 1", [1]), ("a, seed 2", [2]), ("b, seed 0", [3])]),
    ],
)
def test_seeds_are_split_only_if_there_are_devices_for_each_method(devices, items, tmp_path):
    runs = [from_keywords("fedavg", "digits", {"seed": seed}) for _ in "ab" for seed in range(3)]
    study = Study(
        file="", read=None, config={}, names=list("aaabbb"), runs=runs, groups=[range(3), range(3, 6)],
        devices=("cpu",) * devices,
    )  # fmt: skip
    found = [(item.name, [runs.index(config, 3 * (item.name[0] == "b")) for config in item.configs]) for item in
             study._work(tmp_path)]  # fmt: skip
    assert found[: len(items)] == items


def test_workers_share_the_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    assert [share_of_threads(n) for n in (1, 2, 4, 20)] == [9, 4, 2, 1]


# -- when something goes wrong


def test_a_worker_that_is_killed_is_named_and_the_comparison_can_be_continued(trouble, tmp_path, workers):
    method, file = trouble
    fedloom.compare([method], seeds=1, out=tmp_path / "whole", **TASK)
    file.write_text("kill")
    with pytest.raises(WorkerError) as caught:
        spread([method], tmp_path / "mine")
    for words in ("trouble on cpu", "SIGKILL", "memory", f"--resume {tmp_path / 'mine'}"):
        assert words in str(caught.value)
    assert workers() == []
    file.unlink()
    spread([method], tmp_path / "mine", resume=True)
    assert_same_study(tmp_path / "mine", tmp_path / "whole")


def test_a_mistake_of_an_author_is_a_sentence_with_the_method_and_the_device(trouble, tmp_path):
    method, file = trouble
    file.write_text("raise")
    with user_error("trouble on cpu: aggregate of 'trouble' raised ValueError: no idea (trouble.py, line"):
        spread([method], tmp_path / "mine", devices="cpu")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "said", "user"),
    [
        (UserError("lr must be positive."), "lr must be positive.", True),
        (MemoryError(), "not enough memory", True),
        (torch.OutOfMemoryError("CUDA out of memory"), "not enough memory", True),
        (OSError(28, "No space left on device", "x/rounds.parquet"), "x/rounds.parquet cannot be used", True),
        (KeyError("up"), "KeyError: 'up'", False),
    ],
)
def test_errors_of_a_worker_are_told_apart(error, said, user, tmp_path):
    told = explanation(raised(error))
    assert said in told["sentence"]
    assert told["user"] is user
    failure = devices_module._failure(WorkItem("ditto", [], [], "cuda:1"), told, tmp_path)
    assert isinstance(failure, UserError if user else WorkerError)
    assert "ditto on cuda:1" in str(failure)
    if not user:
        assert "Traceback" in failure.details


def test_ctrl_c_stops_all_workers_with_checkpoints(tmp_path, workers):
    long = {"rounds": 40, "checkpoint_every": 1000}
    fedloom.compare(["ditto"], seeds=1, out=tmp_path / "whole", **{**TASK, **long})
    before, asked = signal.getsignal(signal.SIGINT), []

    def interrupt(items):
        if not asked and all(item.done for item in items):
            asked.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped) as stop:
        spread(["ditto"], tmp_path / "mine", on_progress=interrupt, **long)
    assert workers() == []
    assert signal.getsignal(signal.SIGINT) is before
    done = [fedloom.load(path).last()["round"] for path in sorted((tmp_path / "mine").glob("runs/*/seed-0"))]
    assert stop.value.done == sum(done)
    assert str(stop.value) == f"stopped after {sum(done)} of 80 rounds"
    left = [path for path in (tmp_path / "mine").glob("runs/*/seed-0") if not (path / "summary.json").exists()]
    assert left
    assert all(list(path.glob("checkpoints/round-*")) for path in left)
    spread(["ditto"], tmp_path / "mine", resume=True, **long)
    assert_same_study(tmp_path / "mine", tmp_path / "whole")


def test_the_second_ctrl_c_ends_workers_at_once(trouble, tmp_path, workers):
    method, file = trouble
    file.write_text("wait")
    asked = []

    def interrupt(items):
        if len(asked) < 2 and items[1].done:
            asked.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as stop:
        spread([method], tmp_path / "mine", on_progress=interrupt)
    assert not isinstance(stop.value, Stopped)
    assert workers() == []
    assert time.monotonic() - start < 50


def test_no_worker_survives_the_process_that_started_it(trouble, tmp_path):
    method, file = trouble
    file.write_text("wait")
    code = (
        "import fedloom, sys\n"
        f"fedloom.compare([{method!r}], seeds=1, out={str(tmp_path / 'mine')!r}, devices='cpu,cpu', **{TASK!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        rounds = tmp_path / "mine/runs/trouble/seed-0/plan.json"  # written when training begins
        wait_for(rounds.exists)
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert workers
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.05)


# -- what cannot be had


@pytest.fixture
def gpus(monkeypatch):
    """A function that lets this machine have so many GPUs."""

    def have(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("0,1", ("cuda:0", "cuda:1")),
        ("cuda:1, cuda:1", ("cuda:1", "cuda:1")),
        ("cuda", ("cuda:0",)),
        (1, ("cuda:1",)),
        ([0, "cuda:1", torch.device("cuda:0")], ("cuda:0", "cuda:1", "cuda:0")),
        ("cpu,cpu", ("cpu", "cpu")),
        (("cpu",), ("cpu",)),
    ],
)
def test_devices_are_written_as_numbers_or_names(given, found, gpus):
    gpus(2)
    assert parse_devices(given) == found


@pytest.mark.parametrize(
    ("given", "there", "words"),
    [
        ("foo", 1, ("'foo'", "no device", "0,1")),
        ("cpu,gpu", 1, ("'gpu'", "no device")),
        ("0,", 1, ("''", "no device")),
        ("-1", 1, ("'-1'", "no device")),
        ("", 1, ("empty",)),
        ([], 1, ("empty",)),
        (1.5, 1, ("1.5",)),
        (True, 1, ("'True'",)),
        ("0,7", 1, ("'7'", "has 1 CUDA device: device 0 only")),
        ("0,7", 4, ("'7'", "has 4 CUDA devices: 0 to 3")),
        ("0", 0, ("'0'", "0 CUDA devices", "cpu,cpu")),
        ("cpu,cuda:0", 1, ("both GPUs and the CPU",)),
    ],
)
def test_what_is_no_device_is_refused(given, there, words, gpus):
    gpus(there)
    with user_error("devices", *words):
        parse_devices(given)


def my_metric(y, prediction):
    return 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "ray"}, ("engine=ray", "leave out")),
        ({"device": "cuda:0"}, ("device=cuda:0", "devices=cpu,cpu")),
        ({"device": "cuda"}, ("device=cuda",)),
        ({"callbacks": [fedloom.Callback()]}, ("Callbacks and trackers", "leave out")),
        ({"out": None}, ("devices needs a folder",)),
        ({"metric": my_metric}, ("The metric 'my_metric'", "made in Python")),
        ({"model": SmallNet}, ("The model 'SmallNet'", "choose one by its name")),
        ({"dataset": make_federation((5, 6, 7))}, ("The data set 'Federation'", "give their path")),
    ],
)
def test_what_does_not_fit_several_devices_is_refused_before_anything_is_written(
    settings, words, tmp_path, monkeypatch
):
    own: dict = {}
    for module in (registry, devices_module):
        monkeypatch.setattr(module, "OWN", own)
    known = {"out": tmp_path / "mine", "seeds": 1, "rounds": 1, "devices": "cpu,cpu"}
    with user_error(*words):
        fedloom.compare(["fedavg"], **{**known, **settings})
    assert not (tmp_path / "mine").exists()


def test_a_method_of_a_class_is_refused_and_one_of_a_file_is_not(trouble, tmp_path, monkeypatch):
    class Mine(FedAvg):
        name = "mine-in-python"

    monkeypatch.delitem(fedloom.core.algorithm.ALGORITHMS._known, "mine-in-python")
    with user_error("The method 'mine-in-python'", "write its class into a file"):
        checked_devices("cpu", [from_keywords(Mine, "digits", {})], tmp_path, ())
    assert checked_devices("cpu", [from_keywords(find_method(trouble[0]), "digits", {})], tmp_path, ()) == ("cpu",)


def test_a_sweep_needs_a_folder_too():
    with user_error("devices needs a folder"):
        sweep("fedprox", grid={"lr": [0.1]}, devices="cpu")


# -- GPUs, of which this machine may have none


def test_a_worker_sees_its_own_gpu_only(monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    assert [visible(device) for device in ("cuda:0", "cuda:3", "cpu")] == ["0", "3", ""]
    monkeypatch.setenv(VISIBLE, "5, 2")  # the numbers that a user gives are those that this process has
    assert [visible(device) for device in ("cuda:0", "cuda:1", "cpu")] == ["5", "2", ""]


def test_this_process_leaves_gpus_to_the_workers():
    config = from_keywords("fedavg", "digits", {"device": "cuda", "dtype": "tf32"})
    assert (on_cpu(config, ("cuda:0",)).settings.device, on_cpu(config, ("cuda:0",)).settings.dtype) == (
        "cpu",
        "float32",
    )
    assert on_cpu(config, ("cpu",)).settings.dtype == "tf32"  # which is refused later


# -- what is shown


def items():
    made = [WorkItem(name, [from_keywords("fedavg", "digits", {"rounds": 10})], [Path("x")]) for name in "abc"]
    made[0].device, made[0].done, made[0].finished = "cpu", 10, True
    made[1].device, made[1].done, made[1].row = "cuda:1", 4, {"pre_acc_mean": 91.23, "pre_acc_low5": 80.0}
    return made


def test_the_terminal_shows_what_every_device_does():
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    console = Console(record=True, width=100, force_terminal=True)
    bar = Progress(TextColumn("{task.description} {task.fields[score]}"), MofNCompleteColumn(), console=console)
    show = DeviceProgress(bar)
    show(items())
    console.print(bar.get_renderable())
    first, second = (" ".join(line.split()) for line in console.export_text().strip().splitlines())
    assert first == "all finished 1/3"
    assert second == "cuda:1 b mean 91.2 lowest 5 % 80.0 4/10"
    show([item for item in items() if setattr(item, "finished", True) is None])
    assert [task.description for task in bar.tasks] == ["all"]


def test_a_notebook_shows_what_every_device_does(monkeypatch):
    display = pytest.importorskip("IPython.display")
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    monkeypatch.setattr(display, "display", lambda data, raw, display_id: shown.append(data) or Handle())
    show = notebook.DeviceProgress()
    done = items()
    show(done)
    show(done)
    done[1].finished = done[2].finished = True  # the last call, which is shown however soon it comes
    show(done)
    assert [data["text/plain"] for data in shown] == ["1/3 finished\ncuda:1: b, 4/10 rounds", "3/3 finished"]


def test_messages_of_workers_name_the_method(trouble, tmp_path, caplog):
    """What a worker says of a run is said here, with its name."""
    with caplog.at_level(logging.INFO, "fedloom"):
        fedloom.compare(["fedavg"], seeds=1, out=tmp_path / "mine", devices="cpu", **{**TASK, "rounds": 1})
    said = [record.getMessage() for record in caplog.records]
    assert "local trains on cpu." in said
    assert any(text.startswith("fedavg: Execution plan: clients stacked") for text in said)


def test_nothing_is_done_for_groups_that_are_finished(tmp_path):
    execute_on_devices(items()[:1], ("cpu",), None, tmp_path)

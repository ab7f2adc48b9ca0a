"""Whether results survive damaged files, kills and long runs.

    python benchmarks/endurance.py flips|kills|soak [--count N] [--seed 0] [--workers 1] [--keep DIR] [--quick]

flips   5000 times (`--count`), one bit of one file is changed: of a run, a comparison or a sweep, finished or killed.
        The runs are loaded, and the command is resumed. Each must report the damage in one sentence or have the results
        of the undamaged folder. (If runs that are trained together have no undamaged checkpoints of the same round,
        one catches up alone: this is reported, and results agree up to rounding.) About 10 minutes on one core.
kills   200 commands are killed at random times, up to three times each, and resumed until they end. Each must leave the
        same bytes as a command that was not killed. About 50 minutes.
soak    A run of 5000 rounds must not grow in memory or open files.

What does otherwise is a finding: it is printed, and the exit code is 1. `--keep` keeps the folders of findings: of a
flip the damaged one, of a kill the one that it left. All with digits and a small MLP, on one thread of the CPU.
"""

import argparse
import csv
import io
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from machine import describe, head, row

import fedloom
from fedloom import UserError
from fedloom.cli.commands import run_command
from fedloom.storage.files import checksum
from fedloom.storage.trees import named

COUNT = {"flips": 5000, "kills": 200, "soak": 5000}
QUICK = {"flips": 4, "kills": 1, "soak": 50}
SMALL = ["--device", "cpu", "--plan", "stacked-eager", "--set", "width=4", "--set", "checkpoint_every=1"]
STORES = ("memory", "disk")
SAME, REPORTED = "same", "reported"
NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?|\d+e-?\d+")
HANG = 60.0  # seconds
START = 600.0  # seconds in which a worker must have started

forkserver = multiprocessing.get_context("forkserver")  # which imports these once, not for every process
forkserver.set_forkserver_preload(["__main__", "fedloom.studies.sweep", "sklearn.datasets", "torch._dynamo"])


def tables(folder: Path) -> dict[str, str]:
    """The tables of a comparison or a sweep, without times."""
    found = {}
    for path in folder.glob("*.csv"):
        with path.open() as file:
            rows = [{k: v for k, v in one.items() if not k.endswith("seconds")} for one in csv.DictReader(file)]
        found[path.name] = repr(rows)
    return found


def runs_in(folder: Path) -> list[Path]:
    """The run directories in a folder, which may be one itself."""
    return sorted(path.parent for path in folder.rglob("config.yaml"))


# -- flips -----------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of folder: the command that makes it, and where a process that makes it is killed."""

    command: list[str]
    file: str  # part of its path
    renamed: int  # the process is killed before the file gets its name for this time


TINY = ["--clients", "4", "--participation", "0.5", "--rounds", "5", "--batch-size", "200", *SMALL]
KINDS = {
    "run": Kind(["run", "fedrep", "--store", "memory", *TINY], "timings.parquet", 4),  # other tables are newer then
    "run with store=disk": Kind(["run", "fedrep", "--store", "disk", *TINY], "checkpoints/round-00000004", 1),
    # its two runs then have checkpoints of rounds 2 and 3, and of rounds 1 and 2; those of the sweep have the same two
    "comparison": Kind(["compare", "fedrep", "--seeds", "2", *TINY], "fedrep/seed-1/checkpoints/round-00000003", 1),
    "sweep": Kind(["sweep", "fedrep", "--grid", "lr=0.01,0.1", *TINY], "lr=0.01/seed-0/checkpoints/round-00000004", 1),
}
STATES = ("finished", "killed")


class Flip(NamedTuple):
    """A bit of a file in a folder."""

    number: int
    kind: str
    state: str
    file: Path
    byte: int
    bit: int

    def __str__(self) -> str:
        return f"flip {self.number}: {self.kind}, {self.state}: {self.file}, byte {self.byte}, bit {self.bit}"


def call(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and standard error of `fedloom ARGUMENTS`, in this process."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors), patch.object(sys, "argv", ["fedloom", *arguments]):
        try:
            run_command()
        except SystemExit as stop:
            return int(stop.code or 0), errors.getvalue()
    raise AssertionError("a command ends with an exit code")


def make(kind: Kind, folder: Path, killed: bool) -> None:
    """Run the command in this process, which is killed if `killed`."""
    torch.set_num_threads(1)
    rename, left = os.replace, kind.renamed

    def replace(source: Path, target: Path) -> None:
        nonlocal left
        left -= kind.file in str(target)
        if killed and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    with patch.object(os, "replace", replace):
        code, errors = call([*kind.command, "--out", str(folder)])
    if code:
        raise SystemExit(errors)


def make_folders(folder: Path, kinds: Sequence[str]) -> None:
    """A finished and a killed folder of every kind."""
    for name in kinds:
        for state in STATES:
            process = forkserver.Process(target=make, args=(KINDS[name], folder / name / state, state == "killed"))
            process.start()
            process.join()
            assert process.exitcode == (-signal.SIGKILL if state == "killed" else 0), (name, state)


def made(folder: Path) -> list[str]:
    """The kinds of which there are folders."""
    return [name for name in KINDS if (folder / name).exists()]


def draw_flip(folder: Path, seed: int, number: int) -> Flip:
    """A random bit of a random file, small or large, of a random folder."""
    draw = np.random.default_rng([seed, number])
    kind, state = str(draw.choice(made(folder))), str(draw.choice(STATES))
    inside = folder / kind / state
    files = sorted(path for path in inside.rglob("*") if path.is_file() and path.stat().st_size)
    file = files[draw.integers(len(files))]
    byte, bit = divmod(int(draw.integers(8 * file.stat().st_size)), 8)
    return Flip(number, kind, state, file.relative_to(inside), byte, bit)


def flipped_copy(folder: Path, flip: Flip, to: Path) -> Path:
    """A copy of the folder with this bit changed."""
    shutil.copytree(folder / flip.kind / flip.state, to)
    content = bytearray((to / flip.file).read_bytes())
    content[flip.byte] ^= 1 << flip.bit
    (to / flip.file).write_bytes(content)
    return to


def loaded(folder: Path) -> dict[str, str]:
    """Everything that `fedloom.load` returns of the runs in a folder but times and the plan."""
    found = {}
    for path in runs_in(folder):
        run = fedloom.load(path)
        records = [run.rounds, run.clients.to_pylist(), run.reports.to_pylist(), run.summary()]
        tensors = checksum(named((run.server, run.store))) if (path / "summary.json").exists() else None
        found[str(path.relative_to(folder))] = repr((run.config, run.partition, records, tensors))
    return found


def resumed(folder: Path, kind: str, known: bool = False) -> dict[str, str]:
    """The results after a resume; a UserError if the command ends with one sentence. `known`: the runs could not be
    loaded before, so they need not be now."""
    code, errors = call([KINDS[kind].command[0], "--resume", str(folder)])
    if code == 0:
        try:
            return loaded(folder) | tables(folder)
        except UserError as error:
            if known:
                raise
            raise RuntimeError(f"the command succeeds, but then: {error}") from None
    last = errors.splitlines()[-1] if errors else ""
    if code != 2 or not last.startswith("fedloom: ") or "Traceback" in errors:
        raise RuntimeError(f"exit code {code}: {errors}")
    raise UserError(last)


def alike(a: str, b: str) -> bool:
    """Are two texts equal but for the rounding of their numbers?"""
    numbers = [np.array([float(number) for number in NUMBER.findall(text)]) for text in (a, b)]
    return NUMBER.sub("", a) == NUMBER.sub("", b) and np.allclose(*numbers, rtol=1e-5, atol=1e-7)


def judged(results: Callable[[], dict[str, str]], expected: dict[str, str], folder: Path) -> str:
    """SAME, REPORTED, or what is wrong with the results."""
    try:
        found = results()
    except UserError as error:
        return f"more than one sentence: {error}" if "\n" in str(error) else REPORTED
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "fedloom" in frame.filename]
        place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        return f"{type(error).__name__}{place}: {error}"
    if found == expected:
        return SAME
    set_aside = any(folder.rglob("*.damaged"))  # a checkpoint, which the log names
    if set_aside and found.keys() == expected.keys() and all(alike(found[k], expected[k]) for k in found):
        return REPORTED
    return f"other results: {', '.join(sorted(k for k in {**found, **expected} if found.get(k) != expected.get(k)))}"


def flip_bits(pipe: Connection, folder: Path, seed: int, numbers: Sequence[int]) -> None:
    """Change one bit after the other; sends, for each, what loading and resuming did."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="fedloom-flips-") as work:
        copy, expected = Path(work) / "copy", {}
        for kind in made(folder):
            for state in STATES:
                shutil.copytree(folder / kind / state, copy)
                expected[kind, state] = loaded(copy), resumed(copy, kind)
                shutil.rmtree(copy)
            assert expected[kind, "killed"][1] == expected[kind, "finished"][1]
        pipe.send(None)
        for number in numbers:
            flip = draw_flip(folder, seed, number)
            flipped_copy(folder, flip, copy)
            of_load, of_resume = expected[flip.kind, flip.state]
            load = judged(partial(loaded, copy), of_load, copy)
            resume = judged(partial(resumed, copy, flip.kind, load == REPORTED), of_resume, copy)
            pipe.send({"load": load, "resume": resume})
            shutil.rmtree(copy)


def outcomes(folder: Path, seed: int, numbers: Sequence[int]) -> Iterator[tuple[Flip, dict[str, str]]]:
    """What loading and resuming did after each flip, in a process that may hang or die of it."""
    left = list(numbers)
    while left:
        receiver, sender = forkserver.Pipe(duplex=False)
        process = forkserver.Process(target=flip_bits, args=(sender, folder, seed, left))
        process.start()
        sender.close()
        if not receiver.poll(START):
            raise SystemExit("A worker does not start.")
        receiver.recv()
        failure = ""
        while left and not failure:
            found = {}
            try:
                if receiver.poll(HANG):
                    found = receiver.recv()
                else:
                    failure = f"no result after {HANG:g} s"
            except EOFError:
                process.join()
                failure = f"the process ended with exit code {process.exitcode}"
            yield draw_flip(folder, seed, left.pop(0)), found or {"load or resume": failure}
        if failure:
            process.kill()
        process.join()


def flips(count: int, seed: int, workers: int, keep: Path | None, kinds: Sequence[str]) -> int:
    """Returns the number of findings."""
    counts: Counter[tuple[str, ...]] = Counter()

    def share(first: int) -> None:
        for flip, found in outcomes(folder, seed, range(first, count, workers)):
            key = flip.kind, flip.state
            counts.update([key, *((*key, what, text) for what, text in found.items())])
            wrong = {what: text for what, text in found.items() if text not in (SAME, REPORTED)}
            if wrong:
                counts[*key, "findings"] += 1
                print(flip, *(f"{what}: {text}" for what, text in wrong.items()), "", sep="\n", flush=True)
                if keep is not None:
                    flipped_copy(folder, flip, keep / f"flip-{flip.number}")

    with TemporaryDirectory(prefix="fedloom-flips-") as temporary, ThreadPoolExecutor(workers) as pool:
        folder = Path(temporary)
        make_folders(folder, kinds)
        list(pool.map(share, range(workers)))
    columns = [(what, text) for what in ("load", "resume") for text in (REPORTED, SAME)]
    head("folder", "state", "flips", *(f"{what}: {text}" for what, text in columns), "findings")
    keys = [(kind, state) for kind in kinds for state in STATES]
    for key in keys:
        row(*key, counts[key], *(counts[*key, *column] for column in columns), counts[*key, "findings"])
    return sum(counts[*key, "findings"] for key in keys)


# -- kills -----------------------------------------------------------------------------------------------------------

METHODS = ("fedrep", "ditto", "scaffold", "pfedme", "fedbabu")
LARGER = ["--clients", "6", "--participation", "0.5", *SMALL]
JOBS = [
    *(["run", method, "--rounds", "40", "--store", store, *LARGER] for method in METHODS for store in STORES),
    *(["compare", "ditto", "--seeds", "2", "--rounds", "15", "--store", store, *LARGER] for store in STORES),
    *(["sweep", "fedrep", "--grid", "lr=0.01,0.1", "--rounds", "30", "--store", store, *LARGER] for store in STORES),
]
EARLY = 0.2  # share of kills that may come before the process writes anything
# files of a run that do not depend on the clock
REPRODUCIBLE = (
    "final/server.safetensors", "final/clients.safetensors", "rounds.parquet", "clients.parquet", "reports.parquet",
    "partition.parquet", "summary.json", "config.yaml",
)  # fmt: skip


class Whole(NamedTuple):
    """A folder of a command that was not killed."""

    folder: Path
    start: float  # seconds until it wrote something
    rest: float  # seconds from then on


def started(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("fedloom")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def start_or_resume(job: Sequence[str], folder: Path) -> list[str]:
    """What a user would type: the same again if there is nothing to resume yet."""
    begun = any((folder / name).exists() for name in ("config.yaml", "compare.yaml", "sweep.yaml"))
    return [job[0], "--resume", str(folder)] if begun else [*job, "--out", str(folder)]


def wait_for_write(process: subprocess.Popen[str], folder: Path) -> None:
    """Until the process adds or renames a file in the folder, or ends."""

    def times() -> list[int]:
        return [os.stat(path).st_mtime_ns for path, _, _ in os.walk(folder)]

    before = times()
    while process.poll() is None and times() == before:
        time.sleep(0.01)


def run_whole(job: Sequence[str], folder: Path) -> Whole:
    begin = time.perf_counter()
    process = started([*job, "--out", str(folder)])
    wait_for_write(process, folder)
    written = time.perf_counter()
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors)
    return Whole(folder, written - begin, time.perf_counter() - written)


def killed(arguments: Sequence[str], folder: Path, whole: Whole, draw: np.random.Generator) -> tuple[int, str]:
    """Exit code and standard error of a command that is killed at a random time, unless it ends before."""
    process = started(arguments)
    if draw.random() < EARLY:
        pause = draw.uniform(0, 1.2 * whole.start)
    else:
        wait_for_write(process, folder)
        pause = draw.uniform(0, 0.8 * whole.rest)
    try:
        _, errors = process.communicate(timeout=pause)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
    return process.returncode, errors


def differences(folder: Path, whole: Path) -> list[str]:
    """Files that differ from those of a command that was not killed, or that should not be there."""
    expected = [path.relative_to(whole) for path in runs_in(whole)]
    found = [path.relative_to(folder) for path in runs_in(folder)]
    if found != expected:
        return [f"runs {found} instead of {expected}"]
    names = [str(run / name) for run in expected for name in REPRODUCIBLE]
    wrong = [name for name in names if (folder / name).read_bytes() != (whole / name).read_bytes()]
    wrong += ["tables"] * (tables(folder) != tables(whole))
    return wrong + [str(path.relative_to(folder)) for path in folder.rglob("*.partial")]


def kill_and_resume(job: Sequence[str], folder: Path, whole: Whole, draw: np.random.Generator) -> tuple[int, str]:
    """The number of kills, and what is wrong in the end."""
    kills = 0
    for _ in range(draw.integers(1, 4)):
        code, errors = killed(start_or_resume(job, folder), folder, whole, draw)
        if code != -signal.SIGKILL:
            break
        kills += 1
    else:
        process = started(start_or_resume(job, folder))
        try:
            _, errors = process.communicate(timeout=HANG + 10 * (whole.start + whole.rest))
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            return kills, f"no end of the last resume: {errors}"
        code = process.returncode
    if code:
        return kills, f"exit code {code}: {errors}"
    return kills, ", ".join(differences(folder, whole.folder))


def kills(count: int, seed: int, workers: int, keep: Path | None) -> int:
    """Returns the number of findings."""
    wholes: dict[int, Whole] = {}
    counts: Counter[tuple[int, str]] = Counter()

    def one(number: int) -> None:
        place = number % len(JOBS)
        folder = temporary / f"killed-{number}"
        hits, wrong = kill_and_resume(JOBS[place], folder, wholes[place], np.random.default_rng([seed, number]))
        counts.update({(place, "commands"): 1, (place, "kills"): hits, (place, "findings"): int(bool(wrong))})
        if wrong:
            print(f"command {number}: fedloom {shlex.join(JOBS[place])}\n{hits} kills: {wrong}\n", flush=True)
            if keep is not None:
                shutil.copytree(folder, keep / folder.name)
        shutil.rmtree(folder, ignore_errors=True)

    with TemporaryDirectory(prefix="fedloom-kills-") as name, ThreadPoolExecutor(workers) as pool:
        temporary = Path(name)
        for place, job in enumerate(JOBS[:count]):
            wholes[place] = run_whole(job, temporary / f"whole-{place}")
        list(pool.map(one, range(count)))
    columns = ("commands", "kills", "findings")
    head("command", "store", *columns)
    for place in wholes:
        command, method, store = *JOBS[place][:2], JOBS[place][JOBS[place].index("--store") + 1]
        row(f"{command} {method}", store, *(counts[place, column] for column in columns))
    return sum(counts[place, "findings"] for place in wholes)


# -- soak ------------------------------------------------------------------------------------------------------------

MOST_GROWTH = 0.1  # of memory, from 20 % of the rounds to the end
MOST_BYTES = 30e6
SHOWN = (10, 20, 50, 100)  # percent of the rounds


def memory_and_files() -> tuple[int, int]:
    """Resident bytes of this process, and its open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def soak(rounds: int, seed: int) -> int:
    """Returns the number of findings. There are 45 cohorts only, so the cache of their samples is soon complete; it may
    take 64 MiB."""
    samples: dict[int, tuple[int, int]] = {}

    def sample(done: int, total: int, row: object) -> None:
        if 100 * done % total == 0:
            samples[100 * done // total] = memory_and_files()

    torch.set_num_threads(1)
    start = time.perf_counter()
    with TemporaryDirectory(prefix="fedloom-soak-") as folder:
        fedloom.run(
            "fedrep", rounds=rounds, eval_every=10, clients=10, participation=2, batch_size=50, width=4, seed=seed,
            device="cpu", plan="stacked-eager", store="disk", checkpoint_every=10, out=folder, on_round=sample,
        )  # fmt: skip
    print(f"{rounds} rounds in {time.perf_counter() - start:.0f} s\n")
    head("rounds", "resident MB", "open files")
    for percent in SHOWN:
        size, files = samples[percent]
        row(f"{percent} %", f"{size / 1e6:.1f}", files)
    (before, files_before), (after, files_after) = samples[20], samples[100]
    grown, opened = after - before, files_after - files_before
    print(f"\nFrom 20 % to 100 % of the rounds: {grown / 1e6:+.1f} MB ({grown / before:+.1%}), {opened:+d} open files.")
    return (grown > min(MOST_BYTES, MOST_GROWTH * before)) + (opened > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=COUNT)
    parser.add_argument("--count", type=int, help="flips, commands to kill, or rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes at once, for flips and kills")
    parser.add_argument("--keep", type=Path, help="folder for the folders of findings")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 4 flips, a command to kill, 50 rounds")
    args = parser.parse_args()
    count = args.count or (QUICK if args.quick else COUNT)[args.what]
    torch.set_num_threads(1)
    print(describe(torch.device("cpu")), flush=True)
    if args.what == "soak":
        found = soak(count, args.seed)
    elif args.what == "kills":
        found = kills(count, args.seed, args.workers, args.keep)
    else:
        found = flips(count, args.seed, args.workers, args.keep, list(KINDS)[: 2 if args.quick else None])
    print(f"\n{found} findings" if found != 1 else "\n1 finding")
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
